// sparse_topk/short.cu on CPU fibers. SOURCE is its text without what names GPU instructions.
#include "cuda_threads.h"

typedef unsigned int u32;

static u32 scan(u32 value) {
    for (int distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, value, distance);
        if (threadIdx.x % 32 >= distance) value += other;
    }
    return value;
}

static u32 byte_sum(u32 bytes) {
    return (bytes & 0xffu) + (bytes >> 8 & 0xffu) + (bytes >> 16 & 0xffu) + (bytes >> 24);
}

static float as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static u32 float_bits(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}

// Exact: half's smallest step is 2^-24.
static u32 half_as_float_bits(u32 half) {
    const u32 sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31u, mantissa = half & 0x3ffu;
    if (exponent == 31) return sign | 0x7f800000u | mantissa << 13;
    if (exponent == 0) return sign | float_bits((float)mantissa / (1 << 24));
    return sign | (exponent + 112) << 23 | mantissa << 13;
}

// PTX cvt.rz.f16.f32: a finite float stays finite.
static u32 half_towards_zero(u32 bits) {
    const u32 sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fffu;
    if (magnitude == 0x7f800000u) return sign | 0x7c00u;
    if (magnitude >= 0x47800000u) return sign | 0x7bffu;          // from 2^16 on
    if (magnitude >= 0x38800000u) return sign | ((magnitude >> 13) - (112u << 10));  // from 2^-14 on
    return sign | (u32)(as_float(magnitude) * (1 << 24));
}

static u32 ordered_half(u32 bits) {
    u32 half = half_towards_zero(bits);
    if (half == 0x8000u) half = 0;                // add.f16x2 of +0
    if ((half & 0x7fffu) > 0x7c00u) half = 0xfc00u;  // max.f16x2 with -inf
    return half >> 15 ? half ^ 0xffffu : half | 0x8000u;
}

static u32 ordered_halves(u32 low, u32 high) {
    return ordered_half(low) | ordered_half(high) << 16;
}

static void count_pair(u32* counts, u32 pair) {
    atomicAdd(&counts[pair >> 4 & 0xfffu], 1u);
    atomicAdd(&counts[pair >> 20], 1u);
}

static void add_if(u32& sum, u32 score, float from, u32 value) {
    if (as_float(score) >= from) sum += value;
}

struct Slot {
    int* at;

    explicit Slot(int* start) : at(start) {}

    void put_if(u32 score, float from, int place) {
        if (as_float(score) >= from) *at-- = place;
    }
};

#include SOURCE

static std::vector<Shared> shared_memory;

template <int VECTORS, class Border>
static bool select_rows(
    const u32* scores, const void* starts, const void* ends, int* out, int rows, long long stride,
    int columns, int k
) {
    static_assert(THREADS == THREADS_OF_BLOCK, "");
    for (int i = 0; i < rows; ++i) {
        shared_memory.assign(1, Shared());
        memset((void*)shared_memory.data(), 0xA5, sizeof(Shared));
        const bool done = run_cluster(1, i, i + 1, [&] {
            sparse_topk_short<VECTORS>(
                shared_memory[0], scores, (const Border*)starts, (const Border*)ends, out, stride,
                columns, k
            );
        });
        if (!done) return false;
    }
    return true;
}

#define SHAPE(VECTORS, BORDER)                                                                     \
    if (vectors == VECTORS && wide == (sizeof(BORDER) == 8)) return select_rows<VECTORS, BORDER>(  \
        scores, starts, ends, out, rows, stride, columns, k);

extern "C" int select_on_cpu(
    int, int vectors, const u32* scores, const void* starts, const void* ends, int* out, int rows,
    long long stride, int columns, int k, int wide
) {
    SHAPE(1, int) SHAPE(2, int) SHAPE(4, int) SHAPE(2, long long)
    return -1;
}

// For every float of `count` from `first` on in the order of its bits: its bin must not fall in the
// spec's order, and the bin's smallest float must be exact. Returns the first that breaks it.
extern "C" long long first_wrong_bin(u32 first, long long count, u32 step) {
    for (long long i = 0; i < count; ++i) {
        const u32 bits = first + (u32)i * step;
        const int bin = ordered_half(bits) >> 4;
        const bool number = (bits & 0x7fffffffu) <= 0x7f800000u;
        if (!number) {
            if (bin != LOWEST_BIN) return bits;
            continue;
        }
        const float value = as_float(bits);
        if (bin > HIGHEST_BIN || bin < LOWEST_BIN) return bits;
        if (bin > LOWEST_BIN && !(value >= as_float(first_of_bin(bin)))) return bits;
        if (bin < HIGHEST_BIN && !(value < as_float(first_of_bin(bin + 1)))) return bits;
    }
    return -1;
}
