// Sparse top-k: one cluster of thread blocks for each row; integers alone, so no order of threads
// can move a bit. A row is read once: its keys stay in registers.
//
// 1. Every block counts its keys in 4096 bins of the score (64 in an octave) by shared-memory
//    atomics; the blocks of a cluster add their counts.
// 2. The bin that holds the k-th largest key is found; keys of higher bins are in.
// 3. Of the keys inside that bin, those are listed in shared memory; each is ranked against all of
//    them by its 64-bit key (score, then place). If they are too many to list, the bin is first
//    counted again by further digits of the 64-bit key, as often as it takes.
// 4. What reaches the threshold is written by descending place: ranks from ballots and warp counts.
//
// Compiled with these defined: ROW_BLOCKS (1, 2, 4 or 8), THREAD_VECTORS (times four keys that a
// thread holds: 1 to 8; 0 reads them anew), BLOCK_THREADS (512 or 1024) and RESIDENT_BLOCKS (of a
// multiprocessor).

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int THREADS = BLOCK_THREADS;
constexpr int WARPS = THREADS / 32;
constexpr int BINS = 4096;
constexpr int DIGIT = 11;          // bits of a refining count; 2^DIGIT <= BINS
constexpr int LISTED = 256;        // candidates that are ranked against each other
constexpr u32 ALL = 0xffffffffu;

struct Shared {
    u32 counts[BINS];              // of this block
    u32 sums[BINS];                // of the cluster
    u64 listed[LISTED];
    u64 threshold;
    u32 warp_sums[WARPS];
    u32 table[8 * WARPS];
    u32 block_counts[8];           // keys above the candidates, block by block
    u32 bin, above, equal;
    u32 listed_count, block_count;
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

__device__ __forceinline__ u32 remote_load(const u32* mine, u32 rank) {
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];"
                 : "=r"(value) : "r"(remote(mine, rank)) : "memory");
    return value;
}

__device__ __forceinline__ void remote_store(u32* mine, u32 rank, u32 value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;"
                 :: "r"(remote(mine, rank)), "r"(value) : "memory");
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
    const u32 magnitude = bits & 0x7fffffffu;
    const u32 key = (bits >> 31) ? ~bits : bits | 0x80000000u;
    if (magnitude > 0x7f800000u) return 1u;
    return magnitude == 0u ? 0x80000000u : key;
}

// A key's bin: 64 to an octave from 2^-16 to 2^16, the rest in the outermost; it never decreases
// with the key.
__device__ __forceinline__ int bin_of(u32 key) {
    const u32 magnitude = (key >> 31) ? key & 0x7fffffffu : ~key & 0x7fffffffu;
    const int step = min(max((int)(magnitude >> 17) - (127 - 16) * 64, 0), BINS / 2 - 1);
    return (key >> 31) ? BINS / 2 + step : BINS / 2 - 1 - step;
}

__device__ __forceinline__ u64 top_bits(u64 key, int shift) {
    return shift > 63 ? 0ull : key >> shift;
}

// What is known of the k-th largest 64-bit key: its bin, and its bits from `shift` on.
struct Known {
    int bin;
    int shift;
    u64 prefix;

    // 2: above it for certain, 1: may be it or on either side, 0: below.
    __device__ __forceinline__ int side(u32 key, u32 place) const {
        const int bin_of_key = bin_of(key);
        if (bin_of_key != bin) return bin_of_key > bin ? 2 : 0;
        const u64 bits = top_bits((u64)key << 32 | place, shift);
        return bits > prefix ? 2 : (bits == prefix ? 1 : 0);
    }
};

// The keys of a block: thread t holds those of its vectors t, t + THREADS, ...; VECTORS 0 reads
// them again each time.
template <int VECTORS>
struct Keys {
    const u32* row;
    int base, mine, first, stop, limit;
    u32 kept[VECTORS ? VECTORS : 1][4];

    __device__ __forceinline__ void read(int v, u32 (&keys)[4]) const {
        const int i = v * THREADS + (int)threadIdx.x;
        const int place = 4 * (base + i);
        u32 bits[4] = {0u, 0u, 0u, 0u};
        if (i < mine) {
            if (place + 4 <= limit) {
                const uint4 four = *reinterpret_cast<const uint4*>(row + place);
                bits[0] = four.x; bits[1] = four.y; bits[2] = four.z; bits[3] = four.w;
            } else {
                for (int j = 0; j < 4; ++j) if (place + j < limit) bits[j] = row[place + j];
            }
        }
        for (int j = 0; j < 4; ++j) {
            const bool inside = i < mine && place + j >= first && place + j < stop;
            keys[j] = inside ? ordered(bits[j]) : 0u;
        }
    }

    __device__ __forceinline__ int steps() const {
        return VECTORS ? VECTORS : (mine + THREADS - 1) / THREADS;
    }

    __device__ __forceinline__ void get(int v, u32 (&keys)[4]) const {
        if (VECTORS) {
            for (int j = 0; j < 4; ++j) keys[j] = kept[v][j];
        } else {
            read(v, keys);
        }
    }

    __device__ __forceinline__ u32 place(int v, int j) const {
        return 4 * (base + v * THREADS + threadIdx.x) + j;
    }
};

// Find the bin of the k-th largest of the counted keys: shared.bin, .above, .equal.
template <int CLUSTER>
__device__ __forceinline__ void find_bin(Shared& shared, u32 rank, u32 k) {
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const u32* counts = shared.counts;
    if (CLUSTER > 1) {
        constexpr int SLICE = BINS / CLUSTER;
        cluster_sync();
        for (int b = t; b < SLICE; b += THREADS) {
            const int at = rank * SLICE + b;
            u32 sum = 0;
#pragma unroll
            for (int c = 0; c < CLUSTER; ++c) sum += remote_load(&shared.counts[at], c);
#pragma unroll
            for (int c = 0; c < CLUSTER; ++c) remote_store(&shared.sums[at], c, sum);
        }
        cluster_sync();
        counts = shared.sums;
    } else {
        __syncthreads();
    }
    constexpr int OWN = BINS / THREADS;
    const int top = BINS - 1 - t * OWN;  // own bins, from the highest
    u32 own[OWN], sum = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) sum += own[i] = counts[top - i];
    u32 inclusive = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(ALL, inclusive, distance);
        if (lane >= distance) inclusive += other;
    }
    if (lane == 31) shared.warp_sums[warp] = inclusive;
    __syncthreads();
    u32 above = warp_sum(lane < warp ? shared.warp_sums[lane] : 0u) + inclusive - sum;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        if (above < k && above + own[i] >= k) {
            shared.bin = top - i;
            shared.above = above;
            shared.equal = own[i];
        }
        above += own[i];
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
    // The loads are on their way while the counts are cleared.
    if (VECTORS) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) keys.read(v, keys.kept[v ? v : 0]);
    }
    for (int b = t; b < BINS; b += THREADS) shared.counts[b] = 0;
    if (t == 0) shared.listed_count = shared.block_count = 0;
    __syncthreads();
#pragma unroll
    for (int v = 0; v < steps; ++v) {
        keys.get(v, four);
#pragma unroll
        for (int j = 0; j < 4; ++j) if (four[j]) atomicAdd(&shared.counts[bin_of(four[j])], 1u);
    }
    find_bin<CLUSTER>(shared, rank, k);
    Known known = {(int)shared.bin, 64, 0ull};
    u32 need = k - shared.above, equal = shared.equal;
    while (equal != need && equal > LISTED) {
        // Digits of the score, then of the place: no key is another's equal at the end.
        const int shift = known.shift == 42 ? 32 : max(known.shift - DIGIT, 0);
        const u32 mask = (1u << (known.shift - shift)) - 1u;
        __syncthreads();
        for (int b = t; b < BINS; b += THREADS) shared.counts[b] = 0;
        __syncthreads();
#pragma unroll
        for (int v = 0; v < steps; ++v) {
            keys.get(v, four);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (four[j] && known.side(four[j], keys.place(v, j)) == 1) {
                    const u64 key = (u64)four[j] << 32 | keys.place(v, j);
                    atomicAdd(&shared.counts[(u32)(key >> shift) & mask], 1u);
                }
            }
        }
        find_bin<CLUSTER>(shared, rank, need);
        known.prefix = known.prefix << (known.shift - shift) | shared.bin;
        known.shift = shift;
        need -= shared.above;
        equal = shared.equal;
    }
    u64 threshold = 0;  // of the keys that may be the k-th largest, those from here on are in
    u32 before = 0;     // selected in lower blocks
    if (CLUSTER > 1 || equal != need) {
        u32 certain = 0;
#pragma unroll
        for (int v = 0; v < steps; ++v) {
            keys.get(v, four);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (!four[j]) continue;
                const int side = known.side(four[j], keys.place(v, j));
                if (side == 1 && equal != need) {
                    const u64 key = (u64)four[j] << 32 | keys.place(v, j);
                    if (CLUSTER > 1) {
                        const u32 at = remote_add(&shared.listed_count, 0, 1u);
                        for (int c = 0; c < CLUSTER; ++c) remote_store(&shared.listed[at], c, key);
                    } else {
                        shared.listed[atomicAdd(&shared.listed_count, 1u)] = key;
                    }
                } else {
                    certain += side != 0;
                }
            }
        }
        if (CLUSTER > 1) {
            certain = warp_sum(certain);
            if (lane == 0) atomicAdd(&shared.block_count, certain);
            __syncthreads();
            if (t < CLUSTER) remote_store(&shared.block_counts[rank], t, shared.block_count);
            cluster_sync();
            for (u32 c = 0; c < rank; ++c) before += shared.block_counts[c];
        } else {
            __syncthreads();
        }
        if (equal != need) {
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
            if (CLUSTER > 1) {
                bool lower = false;
                if (t < equal) {
                    const u64 key = shared.listed[t];
                    lower = key >= threshold && (int)(u32)key < 4 * keys.base;
                }
                before += __syncthreads_count(lower);
            }
        }
    }
    const u32 earlier = (1u << lane) - 1u;
    constexpr int ROUND = VECTORS ? VECTORS : 1;  // vectors between two barriers
    for (int from = 0; from < steps; from += ROUND) {
        u32 chosen[ROUND], rank_in_warp[ROUND];
        u32* table = shared.table + (VECTORS ? 0 : from % 2 * WARPS);
#pragma unroll
        for (int v = 0; v < ROUND; ++v) {
            keys.get(from + v, four);
            chosen[v] = rank_in_warp[v] = 0;
            u32 total = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 place = keys.place(from + v, j);
                const int side = four[j] ? known.side(four[j], place) : 0;
                const bool in = side == 2 || (side == 1 && ((u64)four[j] << 32 | place) >= threshold);
                const u32 all = __ballot_sync(ALL, in);
                rank_in_warp[v] += __popc(all & earlier);
                total += __popc(all);
                chosen[v] |= (u32)in << j;
            }
            if (lane == 0) table[v * WARPS + warp] = total;
        }
        __syncthreads();
#pragma unroll
        for (int v = 0; v < ROUND; ++v) {
            const u32 own = lane < WARPS ? table[v * WARPS + lane] : 0u;
            u32 slot = before + warp_sum(lane < warp ? own : 0u) + rank_in_warp[v];
            before += warp_sum(own);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (chosen[v] >> j & 1u) {
                    out[k - 1 - slot] = (int)keys.place(from + v, j) - start_place;
                    ++slot;
                }
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
    const long long given_start = wide ? ((const long long*)starts)[row] : ((const int*)starts)[row];
    const long long given_end = wide ? ((const long long*)ends)[row] : ((const int*)ends)[row];
    const int start = (int)max(given_start, 0ll);
    const int end = (int)min(given_end, (long long)columns);
    const int length = end - start;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0u;
    out += (long long)row * k;
    if (length <= k) {
        if (rank == 0) {
            for (int i = threadIdx.x; i < k; i += THREADS) out[i] = i < length ? length - 1 - i : -1;
        }
        return;
    }
    const int origin = start & ~3;
    const int vectors = (end - origin + 3) / 4;
    const int share = (vectors + CLUSTER - 1) / CLUSTER;
    Keys<VECTORS> keys;
    keys.row = scores + row * stride + origin;
    keys.base = rank * share;
    keys.mine = min(share, vectors - keys.base);
    keys.first = start - origin;
    keys.stop = end - origin;
    keys.limit = columns - origin;
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
