// sparse_topk/select.cu on CPU fibers. SOURCE is its text without what names GPU instructions.
#include "cuda_threads.h"

typedef unsigned int u32;
typedef unsigned long long u64;

static u32 cluster_rank() { return block(); }
template <class T> static T* remote(const T* mine, u32 rank);
static uint4 remote_load(const uint4* mine, u32 rank) { return *remote(mine, rank); }
static void remote_store(uint4* mine, u32 rank, uint4 value) { *remote(mine, rank) = value; }
static void remote_store(u64* mine, u32 rank, u64 value) { *remote(mine, rank) = value; }
static u32 remote_add(u32* mine, u32 rank, u32 value) { return atomicAdd(remote(mine, rank), value); }

#include SOURCE

static std::vector<Shared> shared_memory;

template <class T> static T* remote(const T* mine, u32 rank) {
    const long offset = (const char*)mine - (const char*)&shared_memory[block()];
    if (offset < 0 || offset >= (long)sizeof(Shared)) abort();
    return (T*)((char*)&shared_memory[rank] + offset);
}

template <int CLUSTER, int VECTORS>
static bool select_rows(
    const u32* scores, const void* starts, const void* ends, int* out, int rows, long long stride,
    int columns, int k, int wide
) {
    static_assert(THREADS == THREADS_OF_BLOCK, "");
    for (int i = 0; i < rows; ++i) {
        shared_memory.assign(CLUSTER, Shared());
        memset(shared_memory.data(), 0xA5, sizeof(Shared) * CLUSTER);
        const bool done = run_cluster(CLUSTER, i, i + 1, [&] {
            sparse_topk<CLUSTER, VECTORS>(
                shared_memory[block()], scores, starts, ends, out, stride, columns, k, wide
            );
        });
        if (!done) return false;
    }
    return true;
}

#define SHAPE(CLUSTER, VECTORS)                                                                    \
    if (cluster == CLUSTER && vectors == VECTORS) return select_rows<CLUSTER, VECTORS>(            \
        scores, starts, ends, out, rows, stride, columns, k, wide);

extern "C" int select_on_cpu(
    int cluster, int vectors, const u32* scores, const void* starts, const void* ends, int* out,
    int rows, long long stride, int columns, int k, int wide
) {
    SHAPE(1, 1) SHAPE(1, 4) SHAPE(1, 0) SHAPE(2, 2) SHAPE(8, 1) SHAPE(8, 0)
    return -1;
}
