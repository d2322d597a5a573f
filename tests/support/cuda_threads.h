// Enough of CUDA C++ to run one of our kernels on a CPU: every thread is a fiber of one process, and
// gives way at a barrier or a warp operation. A fiber that waits for ever ends the run.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <ucontext.h>

#define __device__
#define __forceinline__ inline
#define threadIdx (index_of_thread())
#define blockIdx (index_of_block())

using std::max;
using std::min;

struct alignas(16) uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static int __ffs(int value) { return __builtin_ffs(value); }
static int __clz(int value) { return value ? __builtin_clz(value) : 32; }
static int __clzll(long long value) { return value ? __builtin_clzll(value) : 64; }
struct Index { int x, y, z; };

constexpr int MOST_BLOCKS = 8, THREADS_OF_BLOCK = BLOCK_THREADS;

struct Fiber { ucontext_t context; int thread, block; bool done; };
struct Barrier { int arrived = 0, turn = 0; };

static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static int current, blocks, row;
static Barrier of_cluster, of_block[MOST_BLOCKS], of_warp[MOST_BLOCKS][32];
static unsigned long long lanes[MOST_BLOCKS][32][32];

static Index index_of_thread() { return {fibers[current].thread, 0, 0}; }
static Index index_of_block() { return {fibers[current].block, row, 0}; }
static int block() { return fibers[current].block; }

static void wait(Barrier& barrier, int count) {
    const int turn = barrier.turn;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.turn;
    }
    while (barrier.turn == turn) swapcontext(&fibers[current].context, &scheduler);
}

static void __syncthreads() { wait(of_block[block()], THREADS_OF_BLOCK); }
static void cluster_sync() { wait(of_cluster, THREADS_OF_BLOCK * blocks); }

static int __syncthreads_count(int predicate) {
    static int counts[MOST_BLOCKS];
    int& count = counts[block()];
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    count += predicate != 0;
    __syncthreads();
    const int result = count;
    __syncthreads();
    return result;
}

template <class Combine>
static unsigned long long over_warp(unsigned long long value, Combine combine) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned long long* values = lanes[block()][warp];
    values[lane] = value;
    wait(of_warp[block()][warp], 32);
    const unsigned long long result = combine(values, lane);
    wait(of_warp[block()][warp], 32);
    return result;
}

static unsigned warp_sum(unsigned value) {
    return over_warp(value, [](unsigned long long* values, int) {
        unsigned long long sum = 0;
        for (int lane = 0; lane < 32; ++lane) sum += values[lane];
        return sum;
    });
}

static unsigned __shfl_sync(unsigned, unsigned value, int from) {
    return over_warp(value, [from](unsigned long long* values, int) { return values[from]; });
}

static unsigned __shfl_up_sync(unsigned, unsigned value, int by) {
    return over_warp(value, [by](unsigned long long* values, int lane) {
        return values[lane >= by ? lane - by : lane];
    });
}

static unsigned __shfl_xor_sync(unsigned, unsigned value, int by) {
    return over_warp(value, [by](unsigned long long* values, int lane) { return values[lane ^ by]; });
}

static unsigned atomicAdd(unsigned* at, unsigned value) {
    const unsigned before = *at;
    *at += value;
    return before;
}

// Run `body` in every thread of a cluster, in an order and at a pace of each warp that `seed` draws;
// false if it hangs.
template <class Body>
static bool run_cluster(int cluster, int row_index, unsigned seed, Body body) {
    static Body* running;
    static std::vector<char> stacks;
    constexpr size_t STACK = 64 << 10;
    running = &body;
    blocks = cluster;
    row = row_index;
    of_cluster = Barrier();
    for (auto& barrier : of_block) barrier = Barrier();
    for (auto& warps : of_warp) for (auto& barrier : warps) barrier = Barrier();
    const int count = cluster * THREADS_OF_BLOCK;
    stacks.resize(std::max(stacks.size(), STACK * count));
    fibers.assign(count, Fiber());
    std::vector<int> order(count);
    for (int i = 0; i < count; ++i) {
        Fiber& fiber = fibers[i];
        fiber.thread = i % THREADS_OF_BLOCK;
        fiber.block = i / THREADS_OF_BLOCK;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks.data() + STACK * i;
        fiber.context.uc_stack.ss_size = STACK;
        makecontext(&fiber.context, +[]() {
            (*running)();
            fibers[current].done = true;
            swapcontext(&fibers[current].context, &scheduler);
        }, 0);
        order[i] = i;
    }
    srand(seed);
    for (int i = count - 1; i > 0; --i) std::swap(order[i], order[rand() % (i + 1)]);
    std::vector<char> rests(count / 32);
    for (int round = 0, left = count; left; ++round) {
        if (round == 100000) return false;
        // Half of the warps rest for some rounds, so that no warp keeps pace without a barrier.
        if (round % 8 == 0) for (char& rest : rests) rest = rand() / 256 % 2;
        left = 0;
        for (int i : order) {
            if (fibers[i].done) continue;
            if (rests[i / 32]) {
                ++left;
                continue;
            }
            current = i;
            swapcontext(&scheduler, &fibers[i].context);
            left += !fibers[i].done;
        }
    }
    return true;
}
