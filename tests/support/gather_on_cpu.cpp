// gather.cu with a CPU in place of the GPU's instructions: a warp is 32 threads, blocks take turns.

#include <barrier>
#include <bit>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __restrict__

struct Place3 { unsigned x; };
static thread_local Place3 threadIdx, blockIdx, gridDim;
static std::barrier<> together(32);
static unsigned long long exchanged[32];

static unsigned long long __shfl_sync(unsigned, unsigned long long value, int source) {
    exchanged[threadIdx.x % 32] = value;
    together.arrive_and_wait();
    unsigned long long got = exchanged[source];
    together.arrive_and_wait();
    return got;
}
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }

#include SOURCE_TYPES

static u64 leave_first() { return 1; }
static u64 leave_last() { return 2; }
static Two load8(const u8* from, u64) { Two got; std::memcpy(&got, from, 8); return got; }
static Four load16(const u8* from, u64) { Four got; std::memcpy(&got, from, 16); return got; }
static void store16(u8* to, Four row, u64, bool) { std::memcpy(to, &row, 16); }

static float e4m3(u32 byte) {
    int exponent = byte >> 3 & 15, fraction = byte & 7;
    float value = exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp((float)fraction, -9);
    if ((byte & 0x7f) == 0x7f) value = NAN;
    return byte & 0x80 ? -value : value;
}
static Floats scaled(u32 pair, float scale) {
    return {e4m3(pair & 0xff) * scale, e4m3(pair >> 8 & 0xff) * scale};
}
static u32 bf16(float value) {
    u32 bits = std::bit_cast<u32>(value);
    if (value != value) return 0x7fff;  // as the GPU's conversion
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static u32 rounded(Floats values) { return bf16(values.x) | bf16(values.y) << 16; }
static float power_of_two(u32 exponent) {
    return std::bit_cast<float>(exponent == 0 ? 1u << 22 : exponent << 23);
}

#include SOURCE_BODY

extern "C" void gather_on_cpu(const u8* cache, const int* positions, const Request* requests,
                              const Place* table, u8* out, int* indices, long long table_stride,
                              long long block_stride, long long indices_stride, u32 entries,
                              u32 k, int first_row, u32 grid) {
    for (u32 block = 0; block < grid; ++block)
        for (u32 warp = 0; warp < WARPS; ++warp) {
            std::vector<std::thread> lanes;
            for (u32 lane = 0; lane < 32; ++lane)
                lanes.emplace_back([=] {
                    threadIdx.x = warp * 32 + lane, blockIdx.x = block, gridDim.x = grid;
                    gather_kv_fp8_v4_kernel(cache, positions, requests, table, out, indices,
                                            table_stride, block_stride, indices_stride, entries,
                                            k, first_row, 1);
                });
            for (auto& lane : lanes) lane.join();
        }
}
