// Sparse top-k: one cluster of thread blocks for each row; integers alone, so no order of threads
// can move a bit. A row is read once: its keys stay in registers.
//
// 1. Every block counts its keys in 4096 bins of the score (64 in an octave) by shared-memory
//    atomics; the blocks of a cluster add their counts.
// 2. The bin that holds the k-th largest key is found; keys of higher bins are in.
// 3. Of the keys inside that bin, those are listed in shared memory; each is ranked against all of
//    them by its 64-bit key (score, then place). If they are too many to list, the bin is first
//    cut into bins of 64-bit keys, as often as it takes.
// 4. What reaches the threshold is written by descending place, ranked by prefix sums.
//
// Compiled with these defined: ROW_BLOCKS (1, 2, 4 or 8), THREAD_VECTORS (times four keys that a
// thread holds: 1 to 8; 0 reads them anew), BLOCK_THREADS (512 or 1024) and RESIDENT_BLOCKS (of a
// multiprocessor).

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int THREADS = BLOCK_THREADS;
constexpr int WARPS = THREADS / 32;
constexpr int BIN_BITS = 12;
constexpr int BINS = 1 << BIN_BITS;
constexpr int LISTED = 256;        // candidates that are ranked against each other
constexpr u32 ALL = 0xffffffffu;

struct Shared {
    u32 counts[BINS + 4];          // of this block; then a spare one, for places outside the row
    u32 sums[BINS];                // of the cluster
    u64 listed[LISTED];
    u64 threshold;
    u32 warp_sums[WARPS];
    u32 table[2][WARPS];
    u32 block_counts[8];           // keys that lower blocks of the cluster select for certain
    u32 bin, above, equal;
    u32 listed_count;
};

// <device>
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same shared variable in another block of the cluster.
__device__ __forceinline__ u32 remote(const void* mine, u32 rank) {
    u32 address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address) : "r"((u32)__cvta_generic_to_shared(mine)), "r"(rank));
    return address;
}

__device__ __forceinline__ uint4 remote_load(const uint4* mine, u32 rank) {
    uint4 value;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(remote(mine, rank)) : "memory");
    return value;
}

__device__ __forceinline__ void remote_store(uint4* mine, u32 rank, uint4 value) {
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "r"(remote(mine, rank)), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

__device__ __forceinline__ void remote_store(u64* mine, u32 rank, u64 value) {
    asm volatile("st.shared::cluster.u64 [%0], %1;"
                 :: "r"(remote(mine, rank)), "l"(value) : "memory");
}

__device__ __forceinline__ u32 remote_add(u32* mine, u32 rank, u32 value) {
    u32 before;
    asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], %2;"
                 : "=r"(before) : "r"(remote(mine, rank)), "r"(value) : "memory");
    return before;
}

__device__ __forceinline__ u32 warp_sum(u32 value) {
    return __reduce_add_sync(ALL, value);
}
// </device>

// Unsigned integers that compare as the spec's order does; 0 is kept for places outside the row.
__device__ __forceinline__ u32 ordered(u32 bits) {
    u32 key = bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
    key += key == 0x7fffffffu;  // -0.0 is +0.0
    const u32 lowest = 0x007fffffu, highest = 0xff800000u;  // the infinities; beyond them NaN
    return key - lowest > highest - lowest ? 1u : key;
}

// A key's bin: 64 to an octave from 2^-16 to 2^16, the rest in the outermost; it never decreases
// with the key.
constexpr int HALF = BINS / 2, MANTISSA = 17, SMALLEST = (127 - 16) * 64;

__device__ __forceinline__ int bin_of(u32 key) {
    const bool positive = key >> 31;
    const int least = positive ? HALF : 0;
    const int shift = positive ? 16384 + SMALLEST - HALF : 16383 - SMALLEST - (HALF - 1);
    return min(max((int)(key >> MANTISSA) - shift, least), least + HALF - 1);
}

__device__ __forceinline__ u32 first_of_bin(int bin) {
    if (bin >= HALF) {
        const u32 step = bin - HALF;
        return 0x80000000u + (step ? (SMALLEST + step) << MANTISSA : 0u);
    }
    const u32 step = HALF - 1 - bin;  // of the magnitude
    return step == HALF - 1 ? 1u : 0x80000000u - ((SMALLEST + step + 1) << MANTISSA);
}

// The keys of a block: thread t holds those of its vectors t, t + THREADS, ...; VECTORS 0 reads
// them again each time.
template <int VECTORS>
struct Keys {
    static constexpr int UNROLL = VECTORS ? VECTORS : 4;  // vectors of a pass between branches
    const u32* row;
    int base, mine, first, stop;
    u32 kept[VECTORS ? VECTORS : 1][4];

    __device__ __forceinline__ void load(int v, u32 (&bits)[4]) const {
        const int i = v * THREADS + (int)threadIdx.x;
        uint4 four = make_uint4(0u, 0u, 0u, 0u);
        // Aligned to 16 bytes, so that what it holds beyond the row is memory too.
        if (i < mine) four = *reinterpret_cast<const uint4*>(row + 4 * (base + i));
        bits[0] = four.x;
        bits[1] = four.y;
        bits[2] = four.z;
        bits[3] = four.w;
    }

    __device__ __forceinline__ void load_kept() {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) load(v, kept[v]);
    }

    // From loaded bits to keys.
    __device__ __forceinline__ void order(int v, u32 (&bits)[4]) const {
        const int i = v * THREADS + (int)threadIdx.x;
        const int at = 4 * (base + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) bits[j] = ordered(bits[j]);
        if (i >= mine || at < first || at + 4 > stop) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (i >= mine || at + j < first || at + j >= stop) bits[j] = 0u;
            }
        }
    }

    __device__ __forceinline__ int steps() const {
        return VECTORS ? VECTORS : (mine + THREADS - 1) / THREADS;
    }

    __device__ __forceinline__ void get(int v, u32 (&keys)[4]) const {
        if (VECTORS) {
#pragma unroll
            for (int j = 0; j < 4; ++j) keys[j] = kept[v][j];
        } else {
            load(v, keys);
            order(v, keys);
        }
    }

    __device__ __forceinline__ u32 place(int v, int j) const {
        return 4 * (base + v * THREADS + threadIdx.x) + j;
    }

    // Call with every 64-bit key (score, then place) from low to high, few as a rule.
    template <class Call>
    __device__ __forceinline__ void within(u64 low, u64 high, Call call) const {
        const u32 low_key = (u32)(low >> 32), span = (u32)(high >> 32) - low_key;
        u32 four[4];
#pragma unroll
        for (int from = 0; from < steps(); from += UNROLL) {
            u32 found = 0;
#pragma unroll
            for (int v = 0; v < UNROLL; ++v) {
                if (!VECTORS && from + v >= steps()) break;
                get(from + v, four);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (four[j] - low_key <= span) found |= 1u << (4 * v + j);
                }
            }
            while (found) {
                const int bit = __ffs(found) - 1;
                found &= found - 1;
                const u32 at = place(from + bit / 4, bit % 4);
                const u64 key = (u64)ordered(row[at]) << 32 | at;
                if (key >= low && key <= high) call(key);
            }
        }
    }
};

// Add the counts of a cluster's blocks: every block adds a slice for all.
template <int CLUSTER>
__device__ __forceinline__ void add_counts(Shared& shared, u32 rank) {
    constexpr int SLICE = BINS / 4 / CLUSTER;
    cluster_sync();
    for (int item = threadIdx.x; item < BINS / 4; item += THREADS) {
        const u32 other = item % CLUSTER;
        const int at = rank * SLICE + item / CLUSTER;
        uint4 sum = remote_load(reinterpret_cast<const uint4*>(shared.counts) + at, other);
#pragma unroll
        for (int distance = 1; distance < CLUSTER; distance *= 2) {
            sum.x += __shfl_xor_sync(ALL, sum.x, distance);
            sum.y += __shfl_xor_sync(ALL, sum.y, distance);
            sum.z += __shfl_xor_sync(ALL, sum.z, distance);
            sum.w += __shfl_xor_sync(ALL, sum.w, distance);
        }
        remote_store(reinterpret_cast<uint4*>(shared.sums) + at, other, sum);
    }
    cluster_sync();
}

// Find the bin of the k-th largest of the counted keys: shared.bin, .above, .equal.
template <int CLUSTER>
__device__ __forceinline__ void find_bin(Shared& shared, u32 rank, u32 k) {
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    if (CLUSTER > 1) add_counts<CLUSTER>(shared, rank);
    else __syncthreads();
    constexpr int OWN = BINS / THREADS;
    const int top = BINS - 1 - t * OWN;  // own bins, from the highest
    u32 own[OWN], sum = 0;
#pragma unroll
    for (int i = 0; i < OWN; i += 4) {
        const uint4 four = reinterpret_cast<const uint4*>(
            CLUSTER > 1 ? shared.sums : shared.counts)[(top - i) / 4];
        own[i] = four.w;
        own[i + 1] = four.z;
        own[i + 2] = four.y;
        own[i + 3] = four.x;
        sum += four.x + four.y + four.z + four.w;
    }
    u32 inclusive = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(ALL, inclusive, distance);
        if (lane >= distance) inclusive += other;
    }
    if (lane == 31) shared.warp_sums[warp] = inclusive;
    __syncthreads();
    u32 above = warp_sum(lane < warp ? shared.warp_sums[lane] : 0u) + inclusive - sum;
    if (above < k && above + sum >= k) {  // one thread's
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            if (above < k && above + own[i] >= k) {
                shared.bin = top - i;
                shared.above = above;
                shared.equal = own[i];
            }
            above += own[i];
        }
    }
    __syncthreads();
}

template <int CLUSTER, int VECTORS>
__device__ __forceinline__ void select_row(
    Shared& shared, Keys<VECTORS>& keys, u32 rank, int start_place, u32 k, int* out
) {
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const int steps = keys.steps();
    u32 four[4];
    if (t < 8) shared.block_counts[t] = 0;
    if (t == 0) shared.listed_count = 0;
    // The k-th largest is among the 64-bit keys (score, then place) from low to high: the need-th
    // largest of `equal` of them. Each round narrows them to a bin: of the score first, then of
    // the distance from low.
    u64 low = 1ull << 32, high = ~0ull;
    u32 need = k, equal = 0;
    for (int round = 0; round == 0 || (equal != need && equal > LISTED); ++round) {
        const int bits = 64 - __clzll((long long)(high - low));
        const int shift = max(bits - BIN_BITS, 0);
#pragma unroll
        for (int b = 0; b < BINS / 4 / THREADS + (BINS / 4 < THREADS); ++b) {
            const int at = b * THREADS + t;
            if (at < BINS / 4) {
                reinterpret_cast<uint4*>(shared.counts)[at] = make_uint4(0u, 0u, 0u, 0u);
            }
        }
        __syncthreads();
        if (round == 0) {
#pragma unroll Keys<VECTORS>::UNROLL
            for (int v = 0; v < steps; ++v) {
                if (VECTORS) keys.order(v, keys.kept[VECTORS ? v : 0]);
                keys.get(v, four);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    // Without a branch, which would wait for each count in turn.
                    atomicAdd(&shared.counts[four[j] ? bin_of(four[j]) : BINS], 1u);
                }
            }
        } else {
            keys.within(low, high, [&](u64 key) {
                atomicAdd(&shared.counts[(u32)((key - low) >> shift)], 1u);
            });
        }
        find_bin<CLUSTER>(shared, rank, need);
        const int bin = shared.bin;
        need -= shared.above;
        equal = shared.equal;
        if (round == 0) {
            low = (u64)first_of_bin(bin) << 32;
            if (bin < BINS - 1) high = ((u64)first_of_bin(bin + 1) << 32) - 1;
        } else {
            low += (u64)bin << shift;
            high = min(high, low + ((1ull << shift) - 1));
        }
        if (CLUSTER > 1) {
            // This block's keys above the range, or from its start on where all of it is in.
            const int from = equal == need ? bin : bin + 1;
            constexpr int OWN = BINS / THREADS;
            u32 certain = 0;
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                if (t * OWN + i >= from) certain += shared.counts[t * OWN + i];
            }
            certain = warp_sum(certain);
            if (certain && lane > (int)rank && lane < CLUSTER) {
                remote_add(&shared.block_counts[rank], lane, certain);
            }
            if (equal != need && equal > LISTED) __syncthreads();  // counts are cleared next
        }
    }
    u64 threshold = low;
    if (equal != need) {
        keys.within(low, high, [&](u64 key) {
            if (CLUSTER > 1) {
                const u32 at = remote_add(&shared.listed_count, 0, 1u);
#pragma unroll 1
                for (int c = 0; c < CLUSTER; ++c) remote_store(&shared.listed[at], c, key);
            } else {
                shared.listed[atomicAdd(&shared.listed_count, 1u)] = key;
            }
        });
        if (CLUSTER > 1) cluster_sync();
        else __syncthreads();
        int parts = 32;  // threads that rank one key
        while (parts * equal > THREADS) parts /= 2;
        const u32 i = t / parts;
        u32 larger = 0;
        u64 own = 0;
        if (i < equal) {
            own = shared.listed[i];
            for (u32 j = t % parts; j < equal; j += parts) larger += shared.listed[j] > own;
        }
        for (int distance = parts / 2; distance; distance /= 2) {
            larger += __shfl_xor_sync(ALL, larger, distance);
        }
        if (i < equal && t % parts == 0 && larger == need - 1) shared.threshold = own;
        __syncthreads();
        threshold = shared.threshold;
    } else if (CLUSTER > 1) {
        cluster_sync();
    }
    u32 before = 0;  // selected in lower blocks
    if (CLUSTER > 1) {
        for (u32 c = 0; c < rank; ++c) before += shared.block_counts[c];
        if (equal != need) {
            bool lower = false;
            if (t < (int)equal) {
                const u64 key = shared.listed[t];
                lower = key >= threshold && (int)(u32)key < 4 * keys.base;
            }
            before += __syncthreads_count(lower);
        }
    }
    // Four vectors at a time: a thread's counts, of at most four, lie in the bytes of a word.
    const u32 threshold_key = (u32)(threshold >> 32), threshold_place = (u32)threshold;
    constexpr int ROUND = VECTORS && VECTORS < 4 ? VECTORS : 4;
#pragma unroll
    for (int from = 0; from < steps; from += ROUND) {
        u32 chosen = 0, counts = 0;
#pragma unroll
        for (int v = 0; v < ROUND; ++v) {
            if (!VECTORS && from + v >= steps) break;
            keys.get(from + v, four);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const bool in = four[j] > threshold_key
                    || (four[j] == threshold_key && keys.place(from + v, j) >= threshold_place);
                if (in) {
                    chosen |= 1u << (4 * v + j);
                    counts += 1u << (8 * v);
                }
            }
        }
        u32 inclusive = counts;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const u32 other = __shfl_up_sync(ALL, inclusive, distance);
            if (lane >= distance) inclusive += other;
        }
        u32* table = shared.table[from / ROUND % 2];
        if (lane == 31) table[warp] = inclusive;
        __syncthreads();
        inclusive -= counts;
        const u32 totals = lane < WARPS ? table[lane] : 0u;
        const u32 even = totals & 0x00ff00ffu, odd = totals >> 8 & 0x00ff00ffu;
        const u32 all_even = warp_sum(even), all_odd = warp_sum(odd);
        const u32 low_even = warp_sum(lane < warp ? even : 0u);
        const u32 low_odd = warp_sum(lane < warp ? odd : 0u);
#pragma unroll
        for (int v = 0; v < ROUND; ++v) {
            const u32 all = (v % 2 ? all_odd : all_even) >> (v / 2 * 16) & 0xffffu;
            const u32 lower = (v % 2 ? low_odd : low_even) >> (v / 2 * 16) & 0xffffu;
            u32 slot = before + lower + (inclusive >> (8 * v) & 0xffu);
            before += all;
            for (u32 rest = chosen >> (4 * v) & 15u; rest; rest &= rest - 1) {
                const int j = __ffs(rest) - 1;
                out[k - 1 - slot] = (int)keys.place(from + v, j) - start_place;
                ++slot;
            }
        }
    }
}

// Args: scores [rows, columns] as bits, rows 16-byte aligned, `stride` apart; starts, ends [rows],
// int64 if `wide`, else int32; out [rows, k].
template <int CLUSTER, int VECTORS>
__device__ __forceinline__ void sparse_topk(
    Shared& shared, const u32* scores, const void* starts, const void* ends, int* out,
    long long stride, int columns, int k, int wide
) {
    const int row = blockIdx.y;
    // A row that starts at its first column is on its way before its borders are known.
    constexpr bool GUESS = CLUSTER == 1 && VECTORS > 0 && VECTORS <= 2;
    Keys<VECTORS> keys;
    keys.row = scores + row * stride;
    keys.base = 0;
    keys.mine = (columns + 3) / 4;
    if (GUESS) keys.load_kept();
    const long long given_start = wide ? ((const long long*)starts)[row] : ((const int*)starts)[row];
    const long long given_end = wide ? ((const long long*)ends)[row] : ((const int*)ends)[row];
    const int start = (int)max(given_start, 0ll);
    const int end = (int)min(given_end, (long long)columns);
    const int length = end - start;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0u;
    out += (long long)row * k;
    if (length <= k) {
        if (rank == 0) {
#pragma unroll 1
            for (int i = threadIdx.x; i < k; i += THREADS) out[i] = i < length ? length - 1 - i : -1;
        }
        return;
    }
    const int origin = start & ~3;
    const int vectors = (end - origin + 3) / 4;
    const int share = (vectors + CLUSTER - 1) / CLUSTER;
    keys.row += origin;
    keys.base = rank * share;
    keys.mine = min(share, vectors - keys.base);
    keys.first = start - origin;
    keys.stop = end - origin;
    if (!GUESS || origin) keys.load_kept();
    select_row<CLUSTER, VECTORS>(shared, keys, rank, keys.first, (u32)k, out);
}

// <kernel>
extern "C" __global__ void __cluster_dims__(ROW_BLOCKS, 1, 1)
__launch_bounds__(THREADS, RESIDENT_BLOCKS)
sparse_topk_kernel(
    const u32* scores, const void* starts, const void* ends, int* out, long long stride,
    int columns, int k, int wide
) {
    __shared__ Shared shared;
    sparse_topk<ROW_BLOCKS, THREAD_VECTORS>(
        shared, scores, starts, ends, out, stride, columns, k, wide
    );
}
