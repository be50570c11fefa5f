// Products of few rows on Hopper: y[rows, n] = x[rows, k] W[n, k]^T, fp16 in, sums in fp32 (see product.cuh).
//
// Rows of W are the 64 rows of a warpgroup's product, the batch is its N columns (padded to N), so a small batch wastes little.
// A block takes `block_rows` rows of W (a multiple of 8, 16 where gate and up are in turn, at most 64 * GROUPS) and a part of
// k, 64 columns at a time: one thread asks the copy engine for tiles of W, and one for those of x (above 32 rows the same one),
// swizzled by it, into a ring of `stages`; each group of four warps multiplies 64 rows. What a group reads past `block_rows` is
// other bytes of the ring, in rows of the product that nobody looks at, so the rows of a block may be what gives each
// multiprocessor one block. The ring takes all of a multiprocessor, or as much as a block's tiles: as soon as one is done, a block of
// the next product begins to fill it with weights. To 32 rows no more than `ahead` tiles of W are on their way at a time, as many
// as keep the memory busy: more would only queue, and what else reads or writes (x, the norm or the mixer in front) would wait
// behind them.
//
// Tails in n and k are zeros from the copy engine; n and k are multiples of 8. Of x a block asks for `x_rows` rows: what else it
// multiplies is in columns of the product that nobody looks at either.
// grid (tiles of W, parts of k); all rows of x are in each block.
#include "products_hopper.cuh"

DEVICE float4 load_shared4(u32 address) {
    float4 out;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w) : "r"(address) : "memory");
    return out;
}

template <int N, int GROUPS> DEVICE void batch_product(const BatchProduct &p) {
    constexpr u32 WARPS = 4 * GROUPS, PITCH = 64 * GROUPS + 4; // floats between rows of x in the sums
    constexpr bool APART = N <= 32; // x is asked for by a thread of its own, and W no more than `ahead`
    extern __shared__ u8 shared[];
    __shared__ u64 barriers[3 * MAX_STAGES];
    u32 base = (shared_address(shared) + 1023) & ~1023u, has_w = shared_address(barriers), has_x = has_w + 8 * MAX_STAGES, empty = has_x + 8 * MAX_STAGES;
    u32 stages = p.stages, w_bytes = p.block_rows * 128, stage = w_bytes + N * 128;
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32 row0 = blockIdx.x * p.block_rows;
    u32 blocks = (p.k + 63) / 64, begin = blocks * blockIdx.y / p.parts, count = blocks * (blockIdx.y + 1) / p.parts - begin;
    u32 filled = count < stages ? count : stages; // before the ring comes round
    bool asks_w = threadIdx.x == 32 * WARPS, asks_x = threadIdx.x == 32 * WARPS + 32;

    auto ask_w = [&](u32 i, u32 slot) {
        barrier_expect(has_w + 8 * slot, w_bytes + (APART ? 0 : p.x_rows * 128));
        copy_box(base + slot * stage, p.w, (begin + i) * 64, row0, has_w + 8 * slot, EVICT_FIRST);
    };
    auto ask_x = [&](u32 i, u32 slot) {
        u32 barrier = (APART ? has_x : has_w) + 8 * slot;
        if (APART) barrier_expect(barrier, p.x_rows * 128);
        copy_box(base + slot * stage + w_bytes, p.x, (begin + i) * 64, 0, barrier, EVICT_LAST);
    };
    if (asks_w) {
        for (u32 i = 0; i < stages; i++) barrier_init(has_w + 8 * i, 1);
        barrier_init_fence();
        for (u32 i = 0; i < filled && (!APART || i < p.ahead); i++) ask_w(i, i);
    }
    if (asks_x) {
        for (u32 i = 0; i < stages; i++) barrier_init(has_x + 8 * i, 1), barrier_init(empty + 8 * i, WARPS);
        barrier_init_fence();
    }
    let_next_kernel_start();
    __syncthreads();

    if (warp == WARPS) {
        if (asks_w && !APART) {
            wait_for_previous_kernel();
            for (u32 i = 0; i < filled; i++) ask_x(i, i);
            for (u32 i = filled, slot = 0, parity = 0; i < count; i++) {
                barrier_wait(empty + 8 * slot, parity);
                ask_w(i, slot), ask_x(i, slot);
                if (++slot == stages) slot = 0, parity ^= 1;
            }
        }
        if (asks_w && APART) {
            for (u32 i = p.ahead; i < filled; i++) {
                barrier_wait(has_w + 8 * (i - p.ahead), 0);
                ask_w(i, i);
            }
            for (u32 i = filled, slot = 0, parity = 0, last = stages - p.ahead, last_parity = 0; i < count; i++) {
                barrier_wait(empty + 8 * slot, parity);
                barrier_wait(has_w + 8 * last, last_parity);
                ask_w(i, slot);
                if (++slot == stages) slot = 0, parity ^= 1;
                if (++last == stages) last = 0, last_parity ^= 1;
            }
        }
        __syncwarp();
        __syncthreads();
        __syncthreads();
        return;
    }
    wait_for_previous_kernel();
    if (warp == WARPS + 1) {
        if (asks_x && APART) {
            for (u32 i = 0; i < filled; i++) ask_x(i, i);
            for (u32 i = filled, slot = 0, parity = 0; i < count; i++) {
                barrier_wait(empty + 8 * slot, parity);
                ask_x(i, slot);
                if (++slot == stages) slot = 0, parity ^= 1;
            }
        }
        __syncwarp();
        __syncthreads();
        __syncthreads();
        return;
    }
    float acc[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[i] = 0.0f;
    u32 group_rows = (warp >> 2) * 8192;
    for (u32 i = 0, slot = 0, before = 0, parity = 0; i < count; i++) {
        u32 w = base + slot * stage + group_rows, x = base + slot * stage + w_bytes;
        barrier_wait(has_w + 8 * slot, parity);
        if (APART) barrier_wait(has_x + 8 * slot, parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma_batch(acc, descriptor_rows(w + 32 * k), descriptor_rows(x + 32 * k));
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0 && lane == 0) barrier_arrive(empty + 8 * before);
        before = slot;
        if (++slot == stages) slot = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    hold(acc);

    // All groups are done with the ring: sums go there, [N][PITCH], so that they leave in long runs of each row of y.
    __syncthreads();
    u32 to = base + 4 * (2 * (lane & 3) * PITCH + warp * 16 + (lane >> 2));
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            store_shared(to + 4 * ((8 * j + (i & 1)) * PITCH + 8 * (i >> 1)), acc[4 * j + i]);
    __syncthreads();

    // Each thread takes 16 bytes of a row of y at a time, 8 rows of W or 4 in fp32; with gate and up 8 bytes, 4 rows of each.
    u32 w_rows = p.n - row0 < p.block_rows ? p.n - row0 : p.block_rows;
    auto sum4 = [&](u32 x_row, u32 w_row) {
        float4 sum = load_shared4(base + 4 * (x_row * PITCH + w_row));
        return p.bias ? add4(sum, *(const float4 *)(p.bias + row0 + w_row)) : sum;
    };
    if (p.output == OUTPUT_BEST) { // a warp a row
        for (u32 x_row = warp; x_row < p.rows; x_row += WARPS) {
            Best best = no_best();
            for (u32 w_row = 4 * lane; w_row < w_rows; w_row += 128) {
                float4 sum = sum4(x_row, w_row);
                take(best, sum.x, row0 + w_row);
                if (w_row + 1 < w_rows) take(best, sum.y, row0 + w_row + 1);
                if (w_row + 2 < w_rows) take(best, sum.z, row0 + w_row + 2);
                if (w_row + 3 < w_rows) take(best, sum.w, row0 + w_row + 3);
            }
            u64 key = warp_best(best_key(best));
            if (lane == 0) atomicMax((u64 *)p.y + x_row, key);
        }
        return;
    }
    u32 each = p.output == OUTPUT_SILU || p.output == OUTPUT_HALF ? 8 : 4, units = w_rows / each;
    for (u32 i = threadIdx.x; i < p.rows * units; i += 32 * WARPS) {
        u32 x_row = i / units, unit = i - x_row * units;
        u64 y_row = (u64)x_row * p.stride;
        if (p.output == OUTPUT_SILU) {
            u32 w_row = unit / 2 * 16 + unit % 2 * 4;
            float4 gate = sum4(x_row, w_row), up = sum4(x_row, w_row + 8);
            *(uint2 *)((f16 *)p.y + y_row + row0 / 2 + 4 * unit) =
                make_uint2(pack_half2(silu_fast(gate.x) * up.x, silu_fast(gate.y) * up.y),
                           pack_half2(silu_fast(gate.z) * up.z, silu_fast(gate.w) * up.w));
        } else if (p.output == OUTPUT_HALF) {
            float4 a = sum4(x_row, 8 * unit), b = sum4(x_row, 8 * unit + 4);
            *(uint4 *)((f16 *)p.y + y_row + row0 + 8 * unit) =
                make_uint4(pack_half2(a.x, a.y), pack_half2(a.z, a.w), pack_half2(b.x, b.y), pack_half2(b.z, b.w));
        } else {
            *(float4 *)((float *)p.y + blockIdx.y * p.part_stride + y_row + row0 + 4 * unit) = sum4(x_row, 4 * unit);
        }
    }
}

#define BATCH_NAME(N, GROUPS) product_batch_##N##_##GROUPS
#define BATCH(N, GROUPS, BLOCKS)                                                                                       \
    extern "C" __global__ void __launch_bounds__(128 * GROUPS + 64, BLOCKS)                                            \
        BATCH_NAME(N, GROUPS)(const __grid_constant__ BatchProduct p) {                                                \
        batch_product<N, GROUPS>(p);                                                                                   \
    }

// ---- instances: columns of the product (rows of x) by COLUMNS, one of 8, 16, 32, 64, 128 for each compilation ----
BATCH(COLUMNS, 1, 2)
BATCH(COLUMNS, 2, 2)
BATCH(COLUMNS, 3, COLUMNS == 128 ? 1 : 2)
