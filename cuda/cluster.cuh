// Clusters of blocks, and copies that the copy engine makes for one block or for all of a cluster (sm_90 and later).
//
// A copy to all blocks of a cluster lands at the same offset of each one's shared memory and completes on the barrier at the
// same offset there. Before it may overwrite a tile, every block of the cluster must have said that it is done with it.
#pragma once
#include "half.cuh"

// What cuTensorMapEncodeTiled writes; passed by value as a `const __grid_constant__` parameter.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

DEVICE u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

DEVICE u32 cluster_size() {
    u32 size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// Barrier of all threads of the cluster; also the barrier of a block without one.
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives on the barrier at this address in block `rank` of the cluster. Says that this thread's reads are done, and publishes no
// writes: with release at the scope of the cluster it would wait for every write to global memory in flight, which took a fifth
// of the time of a kernel that waits for nothing else.
DEVICE void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there];}"
                 ::"r"(barrier), "r"(rank) : "memory");
}

// One box of a tensor of four dimensions; coordinates fastest first, outside the tensor zeros. `to` 128-byte aligned.
DEVICE void copy_box(u32 to, const TensorMap *map, int x, int y, int z, int w, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

DEVICE void copy_box_to_all(u32 to, const TensorMap *map, int x, int y, int z, int w, u32 barrier, u32 blocks) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "h"((u16)((1u << blocks) - 1)) : "memory");
}

// As copy_bulk.
DEVICE void copy_bulk_to_all(u32 to, const void *from, u32 bytes, u32 barrier, u32 blocks) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((u16)((1u << blocks) - 1)) : "memory");
}
