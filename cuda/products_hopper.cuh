// What the products for Hopper share: their parameters and copies of tiles of 64 columns of k, swizzled by the copy engine.
#pragma once
#include "best.cuh"
#include "cluster.cuh"
#include "product.cuh"
#include "wgmma.cuh"

struct BatchProduct {
    TensorMap w; // [n, k], boxes of block_rows rows by 64 columns
    TensorMap x; // [rows, k], boxes of x_rows rows by 64 columns
    const float *bias;
    void *y;
    u64 part_stride;
    u32 rows, n, k, stride, output, parts;
    u32 block_rows, x_rows, stages;
    u32 ahead; // tiles of W on their way at a time, at most `stages`; products_hopper.cu to 32 rows
};

#define MAX_STAGES 16
// Fractions of 1 for the L2's eviction policy, as createpolicy would encode them.
#define EVICT_FIRST 0x12F0000000000000ull
#define EVICT_LAST 0x14F0000000000000ull

// A box at (column, row) to shared memory, completing on `barrier`.
DEVICE void copy_box(u32 to, const TensorMap &map, u32 column, u32 row, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy) : "memory");
}
