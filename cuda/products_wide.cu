// Products of 96 to 256 rows on Hopper: y[rows, n] = x[rows, k] W[n, k]^T, fp16 in, sums in fp32 (see product.cuh).
//
// The batch is the M side of the warpgroup's product, TILES tiles of 64 rows for each of two groups of four warps; rows of W are
// its N columns, so `block_rows` of them (a multiple of 8, at most N) may be what gives each multiprocessor one block: at
// 256 rows tensor cores and memory have nearly as much to do, and neither has anything to waste.
//
// A block would read 256 rows of x for at most 144 of W, more than the L2 can give. So two blocks of a cluster share x: each
// asks for half of its rows, and the copy engine writes them to both. W comes to each alone, 64 columns of k at a time,
// through a ring of `stages`. A slot is free when the groups of both blocks have read it.
//
// Tails in n and k are zeros from the copy engine; n and k are multiples of 8. The two blocks ask for `x_rows` rows of x each:
// what else is multiplied is other bytes of the ring, in rows of the product that nobody looks at.
// grid (tiles of W, an even number; parts of k; tiles of 128 TILES rows of x), clusters of 2 along x.
#include "products_hopper.cuh"

#define GROUPS 2
#define CONSUMER_WARPS (4 * GROUPS)

// A box at (column, row) to the same place in both blocks of the cluster, completing on each one's `barrier`.
DEVICE void copy_box_to_both(u32 to, const TensorMap &map, u32 column, u32 row, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], %5, %6;"
                 ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"((u16)3), "l"(policy) : "memory");
}

// 128 TILES rows by more than 256 / TILES columns of W take more registers than the rest of a multiprocessor's can be shared
// equally: three groups of four warps start with 168 each, and the third, of which one thread works, gives most of its own away.
#define MOVES_REGISTERS(N, TILES) (N * TILES > 256)
#define THREADS(N, TILES) (32 * CONSUMER_WARPS + (MOVES_REGISTERS(N, TILES) ? 128 : 32))

template <int N, int TILES> DEVICE void wide_product(const BatchProduct &p) {
    constexpr u32 ROWS = 64 * GROUPS * TILES;
    extern __shared__ u8 shared[];
    __shared__ u64 barriers[2 * MAX_STAGES];
    u32 base = (shared_address(shared) + 1023) & ~1023u, full = shared_address(barriers), empty = full + 8 * MAX_STAGES;
    u32 stages = p.stages, x_bytes = 2 * p.x_rows * 128, stage = x_bytes + p.block_rows * 128;
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = blockIdx.x & 1;
    u32 row0 = blockIdx.x * p.block_rows, x0 = blockIdx.z * ROWS;
    u32 blocks = (p.k + 63) / 64, begin = blocks * blockIdx.y / p.parts, count = blocks * (blockIdx.y + 1) / p.parts - begin;
    u32 filled = count < stages ? count : stages; // before the ring comes round
    bool producer = threadIdx.x == 32 * CONSUMER_WARPS;

    auto ask_w = [&](u32 i, u32 slot) {
        barrier_expect(full + 8 * slot, stage);
        copy_box(base + slot * stage + x_bytes, p.w, (begin + i) * 64, row0, full + 8 * slot, EVICT_FIRST);
    };
    auto ask_x = [&](u32 i, u32 slot) {
        copy_box_to_both(base + slot * stage + rank * p.x_rows * 128, p.x, (begin + i) * 64, x0 + rank * p.x_rows, full + 8 * slot, EVICT_LAST);
    };
    if (producer) {
        for (u32 i = 0; i < stages; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 2 * CONSUMER_WARPS);
        barrier_init_fence();
        for (u32 i = 0; i < filled; i++) ask_w(i, i);
    }
    let_next_kernel_start();
    __syncthreads();
    // The other block's barriers are there before anything is sent to it.
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    wait_for_previous_kernel();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");

    if (warp >= CONSUMER_WARPS) {
        if constexpr (MOVES_REGISTERS(N, TILES)) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (producer) {
            for (u32 i = 0; i < filled; i++) ask_x(i, i);
            for (u32 i = filled, slot = 0, parity = 0; i < count; i++) {
                barrier_wait(empty + 8 * slot, parity);
                ask_w(i, slot), ask_x(i, slot);
                if (++slot == stages) slot = 0, parity ^= 1;
            }
        }
        return;
    }
    if constexpr (MOVES_REGISTERS(N, TILES)) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float acc[TILES][N / 2];
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[t][i] = 0.0f;
    u32 group_rows = (warp >> 2) * TILES * 8192;
    for (u32 i = 0, slot = 0, before = 0, parity = 0; i < count; i++) {
        u32 x = base + slot * stage + group_rows, w = base + slot * stage + x_bytes;
        barrier_wait(full + 8 * slot, parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int t = 0; t < TILES; t++)
                wgmma_batch(acc[t], descriptor_rows(x + t * 8192 + 32 * k), descriptor_rows(w + 32 * k));
        wgmma_commit();
        wgmma_wait<1>();
        // Only where someone waits for the slot: a block whose last slots nobody fills again may have ended.
        if (i > 0 && i - 1 + stages < count && lane < 2) barrier_arrive_at(empty + 8 * before, lane);
        before = slot;
        if (++slot == stages) slot = 0, parity ^= 1;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int t = 0; t < TILES; t++) hold(acc[t]);
    if (row0 >= p.n) return; // the last cluster's second block, perhaps

    // fp32 leaves as it is, 32 bytes of a row by four lanes; fp16 goes through a part of the ring that is a warp's own.
    u32 w_rows = p.n - row0 < p.block_rows ? p.n - row0 : p.block_rows, pair = 2 * (lane & 3);
    auto bias = [&](u32 column) { return p.bias ? *(const float2 *)(p.bias + row0 + column) : make_float2(0.0f, 0.0f); };
    if (p.output == OUTPUT_BEST) {
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 row = x0 + ((warp >> 2) * TILES + t) * 64 + (warp & 3) * 16 + 8 * half + (lane >> 2);
                Best best = no_best();
#pragma unroll
                for (int j = 0; j < N / 8; j++) {
                    u32 column = 8 * j + pair;
                    float2 b = column < w_rows ? bias(column) : make_float2(0.0f, 0.0f);
                    if (column < w_rows) take(best, acc[t][4 * j + 2 * half] + b.x, row0 + column);
                    if (column + 1 < w_rows) take(best, acc[t][4 * j + 2 * half + 1] + b.y, row0 + column + 1);
                }
                u64 key = warp_best(best_key(best), 4);
                if ((lane & 3) == 0 && row < p.rows) atomicMax((u64 *)p.y + row, key);
            }
        return;
    }
    if (p.output == OUTPUT_FLOAT || p.output == OUTPUT_PARTS) {
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 row = x0 + ((warp >> 2) * TILES + t) * 64 + (warp & 3) * 16 + 8 * half + (lane >> 2);
                if (row >= p.rows) continue;
                float *y = (float *)p.y + blockIdx.y * p.part_stride + (u64)row * p.stride + row0 + pair;
#pragma unroll
                for (int j = 0; j < N / 8; j++) {
                    if (8 * j >= w_rows) continue;
                    float2 b = bias(8 * j + pair);
                    *(float2 *)(y + 8 * j) = make_float2(acc[t][4 * j + 2 * half] + b.x, acc[t][4 * j + 2 * half + 1] + b.y);
                }
            }
        return;
    }
    constexpr u32 PITCH = 2 * N + 16; // bytes between rows of a warp's 16
    asm volatile("bar.sync 1, %0;" ::"n"(32 * CONSUMER_WARPS) : "memory"); // all are done with the ring
    bool gated = p.output == OUTPUT_SILU;
    u32 own = base + warp * 16 * PITCH, units = w_rows / (gated ? 16 : 8);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int j = 0; j < N / 16; j++) { // 16 rows of W: 8 of gate and 8 of up, or all the same
            if (16 * j >= w_rows) continue;
            float2 low = bias(16 * j + pair), high = 16 * j + 8 < w_rows ? bias(16 * j + 8 + pair) : low;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float a0 = acc[t][8 * j + 2 * half] + low.x, a1 = acc[t][8 * j + 2 * half + 1] + low.y;
                float b0 = acc[t][8 * j + 4 + 2 * half] + high.x, b1 = acc[t][8 * j + 5 + 2 * half] + high.y;
                u32 to = own + (8 * half + (lane >> 2)) * PITCH + 2 * pair;
                if (gated) {
                    store_shared(to + 16 * j, pack_half2(silu_fast(a0) * b0, silu_fast(a1) * b1));
                } else {
                    store_shared(to + 32 * j, pack_half2(a0, a1));
                    store_shared(to + 32 * j + 16, pack_half2(b0, b1));
                }
            }
        }
        __syncwarp();
        u32 first = x0 + ((warp >> 2) * TILES + t) * 64 + (warp & 3) * 16;
        for (u32 i = lane; i < 16 * units; i += 32) {
            u32 row = i / units, unit = i - row * units;
            uint4 word;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w) : "r"(own + row * PITCH + 16 * unit) : "memory");
            if (first + row < p.rows) *(uint4 *)((f16 *)p.y + (u64)(first + row) * p.stride + (gated ? row0 / 2 : row0) + 8 * unit) = word;
        }
        __syncwarp();
    }
}

#define WIDE_NAME(BATCH, N) product_wide_##BATCH##_##N
#define WIDE(BATCH, N, TILES)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS(N, TILES), 1)                                                 \
        WIDE_NAME(BATCH, N)(const __grid_constant__ BatchProduct p) {                                                  \
        wide_product<N, TILES>(p);                                                                                     \
    }

// ---- instances: rows of W by TALLEST, one of 80, 96, 112, 128, 144 for each compilation ----
WIDE(128, TALLEST, 1)
WIDE(256, TALLEST, 2)
