// Entries of V4's FP8 cache to rows of bf16: 448 e4m3 values in seven groups, each with a power of
// two (a biased exponent in a byte), then 64 bf16 values. A row's bits depend on its entry alone.
//
// A warp reads entries one beside the other: a lane holds bytes 8 l .. 8 l + 7 of the values, which
// become 16 bytes of the row, so that a warp's loads and stores are whole lines. The addresses of a
// warp's entries are found by its lanes at once, and BATCH entries are loaded before one is stored.
//
// Compiled with these defined: BLOCK_SIZE (tokens of a page), PAGED, REQUEST_BYTES and TABLE_BYTES
// (4 or 8: of an integer), WARPS (of a block), BATCH, DESCENDING (the order of blocks), READ (0
// plain, 1 no allocation in L1, 2 first to leave L2 as well) and WRITE (0 plain, 1 the last blocks'
// rows leave L2 last).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

template <int BYTES> struct Integer;
template <> struct Integer<4> { typedef int type; };
template <> struct Integer<8> { typedef long long type; };
typedef Integer<REQUEST_BYTES>::type Request;
typedef Integer<TABLE_BYTES>::type Place;

constexpr u32 ALL = 0xffffffffu;
constexpr int VALUES = 448, WIDTH = 512, TOKEN_BYTES = 576, SCALE_ROOM = 8;
constexpr int TAIL_LANES = (VALUES - 256) / 8;  // lanes whose second part is FP8; the others' bf16

static_assert(BATCH <= 32, "a lane finds one address");

struct Two { u32 x, y; };
struct Four { u32 x, y, z, w; };
struct Floats { float x, y; };

struct Arguments {
    const u8* cache;
    const int* positions;
    const Request* requests;
    const Place* table;
    u8* out;
    int* indices;
    long long table_stride, block_stride, indices_stride;
    u32 entries, k;
    int first_row;
};

// <device>
__device__ __forceinline__ u64 leave_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ u64 leave_last() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ Two load8(const u8* from, u64 policy) {
    Two got;
    if (READ == 0)
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(got.x), "=r"(got.y) : "l"(from));
    else if (READ == 1)
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                     : "=r"(got.x), "=r"(got.y) : "l"(from));
    else
        asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                     : "=r"(got.x), "=r"(got.y) : "l"(from), "l"(policy));
    return got;
}

__device__ __forceinline__ Four load16(const u8* from, u64 policy) {
    Four got;
    if (READ == 0)
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w) : "l"(from));
    else if (READ == 1)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w) : "l"(from));
    else
        asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w) : "l"(from), "l"(policy));
    return got;
}

__device__ __forceinline__ void store16(u8* to, Four row, u64 policy, bool keep) {
    if (!keep)
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     :: "l"(to), "r"(row.x), "r"(row.y), "r"(row.z), "r"(row.w) : "memory");
    else
        asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
                     :: "l"(to), "r"(row.x), "r"(row.y), "r"(row.z), "r"(row.w), "l"(policy)
                     : "memory");
}

// Two e4m3 values times the scale in fp32.
__device__ __forceinline__ Floats scaled(u32 pair, float scale) {
    Floats got;
    asm("{\n.reg .b32 halves;\n.reg .b16 low, high;\ncvt.rn.f16x2.e4m3x2 halves, %2;\n"
        "mov.b32 {low, high}, halves;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(got.x), "=f"(got.y) : "h"((u16)pair));
    got.x *= scale;
    got.y *= scale;
    return got;
}

__device__ __forceinline__ u32 rounded(Floats values) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(values.y), "f"(values.x));
    return pair;
}

__device__ __forceinline__ float power_of_two(u32 exponent) {
    return __uint_as_float(exponent == 0 ? 1u << 22 : exponent << 23);
}
// </device>

__device__ __forceinline__ u32 without_nan(Floats values, u32 pair) {
    if (values.x != values.x) pair = (pair & 0xffff0000u) | 0x7fc0u;
    if (values.y != values.y) pair = (pair & 0x0000ffffu) | 0x7fc00000u;
    return pair;
}

// Whether one of four bytes is an e4m3 NaN.
__device__ __forceinline__ bool has_nan(u32 bytes) {
    return (((bytes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) != 0;
}

__device__ __forceinline__ Four row_part(Two values, u32 exponent) {
    float scale = power_of_two(exponent);
    Floats parts[4] = {scaled(values.x, scale), scaled(values.x >> 16, scale),
                       scaled(values.y, scale), scaled(values.y >> 16, scale)};
    Four row = {rounded(parts[0]), rounded(parts[1]), rounded(parts[2]), rounded(parts[3])};
    // A product is NaN where the value is, or zero times infinity.
    if (has_nan(values.x) || has_nan(values.y) || exponent == 255)
        row = {without_nan(parts[0], row.x), without_nan(parts[1], row.y),
               without_nan(parts[2], row.z), without_nan(parts[3], row.w)};
    return row;
}

__device__ __forceinline__ void gather(const Arguments& a, u32 begin, u32 lane, u64 policy,
                                       u64 kept_policy, bool keep) {
    // A lane finds one entry: its values, its exponents.
    u32 entry = begin + lane;
    bool inside = lane < BATCH && entry < a.entries;
    u64 own = 0, exponents = 0;
    if (inside) {
        int position = a.positions[entry];
        u32 query = entry / a.k;
        if (position >= 0) {
            long long request = a.requests[query];
            const u8* block;
            u32 token;
            if (PAGED) {
                u32 page = (u32)position / BLOCK_SIZE;
                token = (u32)position % BLOCK_SIZE;
                block = a.cache + a.table[request * a.table_stride + page] * a.block_stride;
            } else {
                long long slot = a.table[request] + (long long)position;
                block = a.cache + slot / BLOCK_SIZE * a.block_stride;
                token = (u32)(slot % BLOCK_SIZE);
            }
            own = (u64)(block + token * TOKEN_BYTES);
            exponents = *(const u64*)(block + BLOCK_SIZE * TOKEN_BYTES + token * SCALE_ROOM);
        }
        if (a.indices)
            a.indices[query * a.indices_stride + (entry - query * a.k)] =
                position >= 0 ? a.first_row + (int)entry : -1;
    }

    Two head[BATCH];
    Four tail[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        const u8* from = (const u8*)__shfl_sync(ALL, own, i);
        head[i] = {0, 0};
        tail[i] = {0, 0, 0, 0};
        if (from) {
            head[i] = load8(from + 8 * lane, policy);
            if (lane < TAIL_LANES) {
                Two more = load8(from + 256 + 8 * lane, policy);
                tail[i].x = more.x, tail[i].y = more.y;
            } else {
                tail[i] = load16(from + VALUES + 16 * (lane - TAIL_LANES), policy);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        u64 word = __shfl_sync(ALL, exponents, i);
        u32 at = begin + i, shift = lane / 8 * 8;
        Four first = row_part(head[i], (u32)word >> shift & 0xff);
        if (lane < TAIL_LANES)
            tail[i] = row_part({tail[i].x, tail[i].y}, (u32)(word >> 32) >> shift & 0xff);
        if (at < a.entries) {
            u8* to = a.out + (u64)at * (2 * WIDTH) + 16 * lane;
            store16(to, first, kept_policy, keep);
            store16(to + 512, tail[i], kept_policy, keep);
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
gather_kv_fp8_v4_kernel(const u8* __restrict__ cache, const int* __restrict__ positions,
                        const Request* __restrict__ requests, const Place* __restrict__ table,
                        u8* __restrict__ out, int* __restrict__ indices, long long table_stride,
                        long long block_stride, long long indices_stride, u32 entries, u32 k,
                        int first_row, u32 kept_blocks) {
    Arguments a = {cache, positions, requests, table, out, indices, table_stride, block_stride,
                   indices_stride, entries, k, first_row};
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, last = gridDim.x - 1 - blockIdx.x;
    u32 begin = ((DESCENDING ? last : blockIdx.x) * WARPS + warp) * BATCH;
    u64 policy = READ == 2 ? leave_first() : 0, kept_policy = WRITE == 1 ? leave_last() : 0;
    gather(a, begin, lane, policy, kept_policy, WRITE == 1 && last < kept_blocks);
}
