// Clusters of blocks, and copies that the copy engine makes for one block or for all of a cluster, or from one (sm_90 and later).
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

// An address of this block's shared memory, in block `rank` of the cluster.
DEVICE u32 address_in_block(u32 address, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// As `barrier_wait`, for what other blocks of the cluster have sent.
DEVICE void barrier_wait_cluster(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1; @!done bra again;}"
                 ::"r"(barrier), "r"(parity) : "memory");
}

// Arrives on a barrier of another block, at such an address. Says that this thread's reads are done, and publishes no writes: with
// release at the scope of the cluster it would wait for every write to global memory in flight, which took a fifth of the time of
// a kernel that waits for nothing else.
DEVICE void barrier_arrive_in_block(u32 there) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory"); }

// The same on the barrier that is at this address in block `rank`.
DEVICE void barrier_arrive_at(u32 barrier, u32 rank) { barrier_arrive_in_block(address_in_block(barrier, rank)); }

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

// A box of a matrix, and the same for both blocks of a cluster of two.
DEVICE void copy_box(u32 to, const TensorMap *map, int x, int y, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}

DEVICE void copy_box_to_both(u32 to, const TensorMap *map, int x, int y, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier), "h"((u16)3) : "memory");
}

// Shared memory to a box of a tensor, or added to it; what lies outside is left out. As store_bulk.
DEVICE void store_box(const TensorMap *map, u32 from, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(map), "r"(from), "r"(x), "r"(y) : "memory");
}

DEVICE void store_box(const TensorMap *map, u32 from, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 ::"l"(map), "r"(from), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

DEVICE void add_box(const TensorMap *map, u32 from, int x, int y) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(map), "r"(from), "r"(x), "r"(y) : "memory");
}

DEVICE void add_box(const TensorMap *map, u32 from, int x, int y, int z, int w) {
    asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 ::"l"(map), "r"(from), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
