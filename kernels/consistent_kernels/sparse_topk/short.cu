// Sparse top-k of short rows: one block a row, which holds its scores in registers. It gives the
// bits of select.cu by fewer instructions, which are most of a short row's time.
//
// 1. Scores are counted in 4096 bins: the upper 12 bits of the score as a half, rounded towards
//    zero (64 bins in an octave; two scores an instruction). A place outside the row is a NaN; a
//    NaN counts in -inf's bin.
// 2. The bin that holds the k-th largest key is found. If all of it is in, as a rule, the smallest
//    float of that bin is the threshold; NaN does not reach it, and -0.0 is +0.0 in comparison.
// 3. Else the bin is cut by the exact key, down to one key; of its ties the last places are in.
// 4. What reaches the threshold is ranked by prefix sums, laid out in shared memory by descending
//    place and written from there in whole vectors.
//
// Compiled with these defined: THREAD_VECTORS (times four scores that a thread holds: 1, 2 or 4),
// BLOCK_THREADS (256, 512 or 1024), RESIDENT_BLOCKS (of a multiprocessor) and BORDER_BYTES (4 or 8).

typedef unsigned int u32;

constexpr int THREADS = BLOCK_THREADS;
constexpr int WARPS = THREADS / 32;
constexpr int BIN_BITS = 12;
constexpr int BINS = 1 << BIN_BITS;
constexpr int OWN = BINS / THREADS;    // bins that a thread sums
constexpr int MAX_K = BINS;            // places that counts' memory holds
constexpr int LISTED = 256;            // candidates that are ranked against each other
constexpr u32 ALL = 0xffffffffu;
constexpr u32 NOTHING = 0x7fffffffu;   // a NaN: the places outside the row
constexpr u32 INFINITY_BITS = 0x7f800000u;
constexpr int ZERO_BIN = BINS / 2;
constexpr int LOWEST_BIN = 0x03f, HIGHEST_BIN = 0xfc0;  // of the infinities

static_assert(LISTED <= THREADS, "a thread ranks at most one key");

struct alignas(16) Cut {
    u32 from;         // bits of the smallest float that is in, if its bin is as a whole
    u32 bin;
    u32 need, equal;  // keys of the bin that are in, that there are
};

struct Shared {
    u32 counts[BINS];  // then the selected places
    u32 listed[LISTED];
    Cut cut;
    u32 totals[2][WARPS];
    u32 listed_count;
};

// <device>
// Sums of the lanes up to the own.
__device__ __forceinline__ u32 scan(u32 value) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        asm volatile("{\n.reg .pred p;\n.reg .u32 other;\n"
                     "shfl.sync.up.b32 other|p, %0, %1, 0, -1;\n@p add.u32 %0, %0, other;\n}"
                     : "+r"(value) : "r"(distance));
    }
    return value;
}

__device__ __forceinline__ u32 warp_sum(u32 value) {
    return __reduce_add_sync(ALL, value);
}

__device__ __forceinline__ u32 byte_sum(u32 bytes) {
    return __dp4a(bytes, 0x01010101u, 0u);
}

__device__ __forceinline__ float as_float(u32 bits) {
    return __uint_as_float(bits);
}

__device__ __forceinline__ u32 half_as_float_bits(u32 half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)half));
    return __float_as_uint(value);
}

// Two scores as halves (rounded towards zero; -0 is +0, NaN is -inf) whose bits compare as they do.
__device__ __forceinline__ u32 ordered_halves(u32 low, u32 high) {
    u32 pair, negative;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(as_float(high)), "f"(as_float(low)));
    asm("add.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0u));
    asm("max.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0xfc00fc00u));
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(negative) : "r"(pair));  // all bits of such a half
    return pair ^ (negative | 0x80008000u);
}

// Count the bins of two ordered halves: the upper 12 bits of each, times 4, are an address.
__device__ __forceinline__ void count_pair(u32* counts, u32 pair) {
    asm volatile("{\n.reg .u32 at;\n"
                 "and.b32 at, %1, 0xfff0;\nshr.u32 at, at, 2;\nadd.u32 at, at, %0;\n"
                 "red.shared.add.u32 [at], 1;\n"
                 "and.b32 at, %1, 0xfff00000;\nshr.u32 at, at, 18;\nadd.u32 at, at, %0;\n"
                 "red.shared.add.u32 [at], 1;\n}"
                 :: "r"((u32)__cvta_generic_to_shared(counts)), "r"(pair) : "memory");
}

// sum += value if a score is at least `from`: one instruction after the comparison.
__device__ __forceinline__ void add_if(u32& sum, u32 score, float from, u32 value) {
    asm("{\n.reg .pred p;\nsetp.ge.f32 p, %1, %2;\n@p add.u32 %0, %0, %3;\n}"
        : "+r"(sum) : "f"(as_float(score)), "f"(from), "r"(value));
}

// Where places are put, downwards.
struct Slot {
    u32 at;

    __device__ __forceinline__ explicit Slot(int* start)
        : at((u32)__cvta_generic_to_shared(start)) {}

    __device__ __forceinline__ void put_if(u32 score, float from, int place) {
        asm volatile("{\n.reg .pred p;\nsetp.ge.f32 p, %1, %2;\n"
                     "@p st.shared.u32 [%0], %3;\n@p add.u32 %0, %0, -4;\n}"
                     : "+r"(at) : "f"(as_float(score)), "f"(from), "r"(place) : "memory");
    }
};
// </device>

// Unsigned integers that compare as the spec's order does; 0 is kept for places outside the row.
__device__ __forceinline__ u32 ordered(u32 bits) {
    u32 key = bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
    key += key == 0x7fffffffu;  // -0.0 is +0.0
    const u32 lowest = 0x007fffffu, highest = 0xff800000u;  // the infinities; beyond them NaN
    return key - lowest > highest - lowest ? 1u : key;
}

// The smallest float of a bin above -inf's.
__device__ __forceinline__ u32 first_of_bin(int bin) {
    if (bin > ZERO_BIN) return half_as_float_bits((u32)(bin - ZERO_BIN) << 4);
    // Just above the largest half of the bin below; zero's bin holds what rounds to -0.
    const u32 below = bin == ZERO_BIN ? 1u : (u32)(ZERO_BIN - bin) << 4;
    return (0x80000000u | half_as_float_bits(below)) - 1u;
}

// Its inverse, of what is no NaN's key.
__device__ __forceinline__ u32 bits_of(u32 key) {
    return key >> 31 ? key ^ 0x80000000u : ~key;
}

__device__ __forceinline__ void clear_counts(Shared& shared) {
#pragma unroll
    for (int i = 0; i < OWN / 4; ++i) {
        reinterpret_cast<uint4*>(shared.counts)[i * THREADS + threadIdx.x] =
            make_uint4(0u, 0u, 0u, 0u);
    }
}

// Let the thread that finds it publish the bin of the k-th largest of the counted keys, how many
// keys of that bin are needed and how many there are.
template <class Publish>
__device__ __forceinline__ void find_bin(Shared& shared, u32 k, Publish publish) {
    const u32 t = threadIdx.x, lane = t % 32, warp = t / 32;
    __syncthreads();
    const u32 own = BINS - (t + 1) * OWN;
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < OWN / 4; ++i) {
        // In an order that spreads the lanes over the banks.
        const u32 at = own / 4 + ((i ^ lane / (32 / OWN)) & (OWN / 4 - 1));
        const uint4 four = reinterpret_cast<const uint4*>(shared.counts)[at];
        sum += four.x + four.y + four.z + four.w;
    }
    const u32 inclusive = scan(sum);
    if (lane == 31) shared.totals[0][warp] = inclusive;
    __syncthreads();
    u32 above = warp_sum(lane < warp ? shared.totals[0][lane] : 0u) + inclusive - sum;
    if (above < k && above + sum >= k) {  // one thread's
        u32 bin = 0, need = 0, equal = 0;
#pragma unroll
        for (int i = OWN - 1; i >= 0; --i) {
            const u32 count = shared.counts[own + i];
            if (above < k && above + count >= k) {
                bin = own + i;
                need = k - above;
                equal = count;
            }
            above += count;
        }
        publish(bin, need, equal);
    }
    __syncthreads();
}

// The scores of a thread: a warp holds whole vectors side by side, so its places are consecutive.
template <int VECTORS>
struct Scores {
    u32 bits[VECTORS][4];
    int vector, first, stop;

    __device__ __forceinline__ void load(const u32* row, int vectors) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int i = vector + 32 * v;
            uint4 four = make_uint4(NOTHING, NOTHING, NOTHING, NOTHING);
            // Aligned to 16 bytes, so that what it holds beyond the row is memory too.
            if (i < vectors) four = *reinterpret_cast<const uint4*>(row + 4 * i);
            bits[v][0] = four.x;
            bits[v][1] = four.y;
            bits[v][2] = four.z;
            bits[v][3] = four.w;
        }
    }

    __device__ __forceinline__ int place(int v, int j) const { return 4 * (vector + 32 * v) + j; }

    __device__ __forceinline__ bool inside(int v, int j) const {
        return place(v, j) >= first && place(v, j) < stop;
    }

    __device__ __forceinline__ void mask() {
        if (place(0, 0) >= first && place(VECTORS - 1, 4) <= stop) return;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (!inside(v, j)) bits[v][j] = NOTHING;
            }
        }
    }

    // Call with every key from low to high.
    template <class Call>
    __device__ __forceinline__ void within(u32 low, u32 high, Call call) const {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 key = inside(v, j) ? ordered(bits[v][j]) : 0u;
                if (key >= low && key <= high) call(key);
            }
        }
    }
};

// For each vector, how many keys of lower places than its own are counted; `counts`: of a thread's
// vectors, in bytes.
template <int VECTORS>
__device__ __forceinline__ void rank_vectors(u32* totals, u32 counts, u32 (&ranks)[VECTORS]) {
    const u32 lane = (u32)threadIdx.x % 32, warp = (u32)threadIdx.x / 32;
    const u32 inclusive = scan(counts), exclusive = inclusive - counts;
    if (lane == 31) totals[warp] = byte_sum(inclusive);
    const u32 all = __shfl_sync(ALL, inclusive, 31);
    __syncthreads();
    u32 before = warp_sum(lane < warp ? totals[lane] : 0u);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        ranks[v] = before + (exclusive >> (8 * v) & 0xffu);
        before += all >> (8 * v) & 0xffu;
    }
}

// The threshold where a bin is not in as a whole; if ties are divided, scores become +inf where
// they are in and NaN where not.
template <int VECTORS>
__device__ __forceinline__ float cut_bin(Shared& shared, Scores<VECTORS>& scores, Cut cut) {
    const u32 t = threadIdx.x;
    const bool lowest = cut.bin == LOWEST_BIN;
    u32 low = lowest ? 1u : ordered(first_of_bin(cut.bin));
    u32 high = cut.bin == HIGHEST_BIN ? ordered(INFINITY_BITS)
                                      : ordered(first_of_bin(cut.bin + 1)) - 1u;
    u32 need = cut.need, equal = cut.equal;
    bool counted = !lowest;  // -inf's bin counts places outside the row
#pragma unroll 1
    while (!counted || (equal != need && low != high && equal > LISTED)) {
        const int shift = max(32 - BIN_BITS - __clz((int)(high - low)), 0);
        clear_counts(shared);
        __syncthreads();
        scores.within(low, high, [&](u32 key) {
            atomicAdd(&shared.counts[(key - low) >> shift], 1u);
        });
        find_bin(shared, need, [&](u32 bin, u32 needed, u32 count) {
            shared.cut = Cut{0u, bin, needed, count};
        });
        low += shared.cut.bin << shift;
        high = min(high, low + ((1u << shift) - 1u));
        need = shared.cut.need;
        equal = shared.cut.equal;
        counted = true;
    }
    if (equal != need && low != high) {
        if (t == 0) shared.listed_count = 0;
        __syncthreads();
        scores.within(low, high, [&](u32 key) {
            shared.listed[atomicAdd(&shared.listed_count, 1u)] = key;
        });
        __syncthreads();
        u32 parts = 32;  // threads that rank one key
        while (parts * equal > THREADS) parts /= 2;
        const u32 i = t / parts;
        const u32 own = i < equal ? shared.listed[i] : 0u;
        u32 ranks = 0;  // keys above the own; times 65536: of its value
        if (i < equal) {
            for (u32 j = t % parts; j < equal; j += parts) {
                ranks += (shared.listed[j] > own) + ((u32)(shared.listed[j] == own) << 16);
            }
        }
        for (int distance = parts / 2; distance; distance /= 2) {
            ranks += __shfl_xor_sync(ALL, ranks, distance);
        }
        const u32 larger = ranks & 0xffffu, same = ranks >> 16;
        if (i < equal && t % parts == 0 && larger < need && larger + same >= need) {
            shared.cut = Cut{own, 0u, need - larger, same};  // the same from every tie
        }
        __syncthreads();
        low = shared.cut.from;
        need = shared.cut.need;
        equal = shared.cut.equal;
    }
    // No key lies between NaN's and -inf's.
    if (equal == need) return as_float(bits_of(max(low, ordered(0x80000000u | INFINITY_BITS))));
    u32 counts = 0, ranks[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const bool tie = scores.inside(v, j) && ordered(scores.bits[v][j]) == low;
            counts += (u32)tie << (8 * v);
        }
    }
    rank_vectors<VECTORS>(shared.totals[0], counts, ranks);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 key = scores.inside(v, j) ? ordered(scores.bits[v][j]) : 0u;
            const bool in = key > low || (key == low && ranks[v] >= equal - need);
            ranks[v] += key == low;
            scores.bits[v][j] = in ? INFINITY_BITS : NOTHING;
        }
    }
    return as_float(INFINITY_BITS);
}

// Write the places of the k scores from the threshold on.
template <int VECTORS>
__device__ __forceinline__ void write_places(
    Shared& shared, const Scores<VECTORS>& scores, float from, int k, int* out
) {
    const u32 t = threadIdx.x;
    u32 counts = 0, ranks[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int j = 0; j < 4; ++j) add_if(counts, scores.bits[v][j], from, 1u << (8 * v));
    }
    rank_vectors<VECTORS>(shared.totals[1], counts, ranks);
    int* places = reinterpret_cast<int*>(shared.counts);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        Slot slot(places + (k - 1 - (int)ranks[v]));
        const int place = scores.place(v, 0) - scores.first;
#pragma unroll
        for (int j = 0; j < 4; ++j) slot.put_if(scores.bits[v][j], from, place + j);
    }
    __syncthreads();
    if (k % 4 == 0) {
#pragma unroll
        for (int b = 0; b < MAX_K / 4 / THREADS; ++b) {
            const u32 i = b * THREADS + t;
            if (i < (u32)k / 4) {
                reinterpret_cast<uint4*>(out)[i] = reinterpret_cast<const uint4*>(places)[i];
            }
        }
    } else {
#pragma unroll 1
        for (int i = t; i < k; i += THREADS) out[i] = places[i];
    }
}

// Args: as of select.cu. The row fits in the block's registers.
template <int VECTORS, class Border>
__device__ __forceinline__ void sparse_topk_short(
    Shared& shared, const u32* all_scores, const Border* starts, const Border* ends, int* out,
    long long stride, int columns, int k
) {
    const u32 t = threadIdx.x, row = blockIdx.y;
    Scores<VECTORS> scores;
    scores.vector = t / 32 * 32 * VECTORS + t % 32;
    // A row that starts at its first column is on its way before its borders are known.
    all_scores += row * stride;
    scores.load(all_scores, (int)((u32)(columns + 3) / 4));
    const Border given_start = starts[row], given_end = ends[row];
    clear_counts(shared);
    __syncthreads();
    const int start = (int)max(given_start, (Border)0);
    const int end = (int)min(given_end, (Border)columns);
    const int length = end - start;
    out += (unsigned long long)row * (u32)k;
    if (length <= k) {
#pragma unroll 1
        for (int i = t; i < k; i += THREADS) out[i] = i < length ? length - 1 - i : -1;
        return;
    }
    const int origin = start & ~3;
    if (origin) scores.load(all_scores + origin, (int)((u32)(end - origin + 3) / 4));
    scores.first = start - origin;
    scores.stop = end - origin;
    scores.mask();
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            count_pair(shared.counts, ordered_halves(scores.bits[v][j], scores.bits[v][j + 1]));
        }
    }
    find_bin(shared, (u32)k, [&](u32 bin, u32 need, u32 equal) {
        const bool whole = need == equal && bin != LOWEST_BIN;
        shared.cut = Cut{whole ? first_of_bin(bin) : NOTHING, bin, need, equal};
    });
    const u32 from = shared.cut.from;
    if (__builtin_expect(from != NOTHING, 1)) {
        write_places<VECTORS>(shared, scores, as_float(from), k, out);
        return;
    }
    write_places<VECTORS>(shared, scores, cut_bin<VECTORS>(shared, scores, shared.cut), k, out);
}

// <kernel>
#if BORDER_BYTES == 8
typedef long long Border;
#else
typedef int Border;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS) sparse_topk_short_kernel(
    const u32* scores, const Border* starts, const Border* ends, int* out, long long stride,
    int columns, int k
) {
    __shared__ __align__(16) Shared shared;
    sparse_topk_short<THREAD_VECTORS>(shared, scores, starts, ends, out, stride, columns, k);
}
