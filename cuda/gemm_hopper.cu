// Products of many rows on Hopper: y[rows, n] = x[rows, k] W[n, k]^T, fp16 in, sums in fp32.
//
// A block is two groups of four warps, which make tiles of M rows of x by N rows of W in turn ("ping-pong": while one multiplies,
// the other writes its tile), and a warp that asks the copy engine for 64 columns of k at a time, x [M, 64] and W [N, 64], into
// a ring of stages that goes on from tile to tile. Blocks are in clusters of two, which make tiles one above the other: each
// asks for its own rows of x and for one half of their rows of W, which goes to both. There are as many clusters as the GPU
// holds; they take tiles in turn.
//
// Bytes from the L2 for a block and 64 columns: 128 (M + N/2), in M N / 32 cycles of tensor cores.
//
// Tails in rows, n and k: the copy engine reads zeros outside and writes nothing there. n and k are multiples of 8.
// Grid (blocks of clusters of two).
#include "cluster.cuh"
#include "product.cuh"
#include "wgmma.cuh"

struct Gemm {
    TensorMap x; // fp16 [rows, k], boxes of 64 columns by the rows that a block asks for
    TensorMap w; // fp16 [n, k], the same
    TensorMap y; // fp16 or fp32, boxes of 16 rows by 128 bytes, 64 for OUTPUT_SILU
    const float *bias; // [n] or null
    u32 rows, n, k;
    u32 output; // OUTPUT_*
    u32 group;  // rows of tiles that are made column by column
    u32 unused[9];
};

#define GEMM_THREADS 384
#define PIECE_BYTES 2048 // 16 rows of 128 bytes: what a warp hands to the copy engine at a time; it has two of them

// Bytes of shared memory: the ring, two pieces of output for each of eight warps, and what aligns them.
constexpr u32 gemm_stage_bytes(int m, int n) { return (u32)(m + n) * 128; }
constexpr int gemm_stages(int m, int n) { return (int)((227 * 1024 - 1024 - 256 - 16 * PIECE_BYTES) / gemm_stage_bytes(m, n)); }

// The order of tiles: column by column within groups of `group` rows, so that the rows of x and W in use at a time stay in the L2.
struct TileOrder {
    u32 rows, columns, group;

    __device__ __forceinline__ u32 count() const { return rows * columns; }
    __device__ __forceinline__ void at(u32 tile, u32 &row, u32 &column) const {
        u32 first = tile / (group * columns) * group, within = tile - first * columns, height = min(group, rows - first);
        column = within / height, row = first + (within - column * height);
    }
};

// A place in the ring, and the parity of the phase of its barriers.
template <int STAGES> struct Slot {
    u32 index = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++index == STAGES) index = 0, parity ^= 1;
    }
    __device__ __forceinline__ void skip(u32 steps) {
        index += steps;
        parity ^= index / STAGES & 1, index %= STAGES;
    }
};

// A warp's 16 rows by N columns of sums, from (row, column) of x W^T, to y by way of its two pieces at `pieces`; `piece` counts those
// sent.
template <int N> DEVICE void gemm_output(const Gemm &p, float (&sums)[N / 2], u32 row, u32 column, u32 pieces, u32 &piece) {
    u32 lane = threadIdx.x & 31;
    if (p.bias) {
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            u32 at = column + 8 * j + 2 * (lane & 3);
            if (at >= p.n) continue;
            float2 bias = *(const float2 *)(p.bias + at);
            sums[4 * j] += bias.x, sums[4 * j + 1] += bias.y, sums[4 * j + 2] += bias.x, sums[4 * j + 3] += bias.y;
        }
    }
    // The piece to fill next: its last store has read it.
    auto begin = [&] {
        if (lane == 0) store_wait_read<1>();
        __syncwarp();
        return pieces + (piece++ & 1) * PIECE_BYTES;
    };
    auto send = [&](u32 from, u32 at) {
        shared_write_fence();
        __syncwarp();
        if (lane == 0) {
            if (p.output == OUTPUT_RESIDUAL) add_box(&p.y, from, at, row);
            else store_box(&p.y, from, at, row);
            store_commit();
        }
    };
    // The copy engine's swizzles: 16-byte unit u of row r of 128 bytes is at unit u ^ (r % 8), of 64 bytes at u ^ (r / 2 % 4).
    // stmatrix: lane l addresses row l % 16, unit l / 16 of two.
    u32 r = lane & 15, unit = lane >> 4;
    if (p.output == OUTPUT_HALF) {
#pragma unroll
        for (int j = 0; j < N / 8; j += 8) {
            u32 to = begin();
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                const float *s = sums + 4 * (j + i);
                store_matrix_x4(to + r * 128 + (((i + unit) ^ r) & 7) * 16, pack_half2(s[0], s[1]), pack_half2(s[2], s[3]),
                                pack_half2(s[4], s[5]), pack_half2(s[6], s[7]));
            }
            send(to, column + 8 * j);
        }
    } else if (p.output == OUTPUT_SILU) {
        // Columns 0 to 7 of each 16 are gates, the others what they are for; a thread has the same of both.
        auto gated = [&](const float *s) { return silu_fast(s[0]) * s[4]; };
#pragma unroll
        for (int j = 0; j < N / 8; j += 8) {
            u32 to = begin();
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                const float *s = sums + 4 * (j + i);
                store_matrix_x4(to + r * 64 + (((i / 2 + unit) ^ r / 2) & 3) * 16, pack_half2(gated(s), gated(s + 1)),
                                pack_half2(gated(s + 2), gated(s + 3)), pack_half2(gated(s + 8), gated(s + 9)),
                                pack_half2(gated(s + 10), gated(s + 11)));
            }
            send(to, column / 2 + 4 * j);
        }
    } else {
        u32 r = lane >> 2, half_unit = (lane & 3) >> 1;
#pragma unroll
        for (int j = 0; j < N / 8; j += 4) {
            u32 to = begin();
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *s = sums + 4 * (j + i);
                u32 at = to + r * 128 + ((2 * i + half_unit) ^ r) * 16 + (lane & 1) * 8;
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(s[0]), "f"(s[1]) : "memory");
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + 8 * 128), "f"(s[2]), "f"(s[3]) : "memory");
            }
            send(to, column + 8 * j);
        }
    }
}

// Tiles of M rows of x by N rows of W.
template <int M, int N> DEVICE void gemm(const Gemm &p) {
    constexpr int STAGES = gemm_stages(M, N), PARTS = M / 64; // of the 64 rows of a warpgroup's product
    constexpr u32 X_BYTES = M * 128, STAGE = gemm_stage_bytes(M, N), GROUP_WARPS = 4, WARPS = 2 * GROUP_WARPS;
    extern __shared__ u8 shared[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    u32 ring = (shared_address(shared) + 1023) & ~1023u, pieces = ring + STAGES * STAGE;
    u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    u32 warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, rank = cluster_rank();
    u32 steps = (p.k + 63) / 64, cluster = blockIdx.x >> 1, clusters = gridDim.x >> 1;
    TileOrder order = {(p.rows + 2 * M - 1) / (2 * M), (p.n + N - 1) / N, p.group};

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 2 * GROUP_WARPS);
        barrier_init_fence();
    }
    cluster_sync();
    let_next_kernel_start();
    if (warp >= WARPS) {
        give_registers<40>();
        if (threadIdx.x == 32 * WARPS) {
            wait_for_previous_kernel();
            Slot<STAGES> slot;
            for (u32 tile = cluster; tile < order.count(); tile += clusters) {
                u32 row, column;
                order.at(tile, row, column);
                row = (2 * row + rank) * M, column *= N;
                for (u32 step = 0; step < steps; step++, slot.next()) {
                    u32 x = ring + slot.index * STAGE, w = x + X_BYTES, barrier = full + 8 * slot.index;
                    barrier_wait(empty + 8 * slot.index, slot.parity ^ 1);
                    barrier_expect(barrier, STAGE);
                    copy_box(x, &p.x, 64 * step, row, barrier);
                    copy_box_to_both(w + rank * (N * 64), &p.w, 64 * step, column + rank * (N / 2), barrier);
                }
            }
        }
        __syncwarp();
    } else {
        take_registers<232>();
        wait_for_previous_kernel();
        u32 group = warp / GROUP_WARPS;
        auto release = [&](u32 index) { // for both blocks to fill
            if (lane < 2) barrier_arrive_at(empty + 8 * index, lane);
        };
        float sums[PARTS][N / 2];
        u32 piece = 0;
        Slot<STAGES> slot;
        if (group == 1) slot.skip(steps);
        for (u32 tile = cluster + group * clusters; tile < order.count(); tile += 2 * clusters, slot.skip(steps)) {
            // A parity tells two neighbouring phases of a barrier apart, no more: none may wait for stages of its tile before the
            // other group has seen all of the tile before.
            if (tile != cluster) named_sync(1 + group, 256);
            u32 before = 0;
            for (u32 step = 0; step < steps; step++, slot.next()) {
                u64 x = descriptor_rows(ring + slot.index * STAGE), w = descriptor_rows(ring + slot.index * STAGE + X_BYTES);
                barrier_wait(full + 8 * slot.index, slot.parity);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; k++)
#pragma unroll
                    for (int part = 0; part < PARTS; part++)
                        wgmma_rows(sums[part], x + part * (8192 >> 4) + 2 * k, w + 2 * k, k > 0 || step > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (step > 0) release(before);
                before = slot.index;
            }
            if (tile + clusters < order.count()) named_arrive(2 - group, 256);
            wgmma_wait<0>();
#pragma unroll
            for (int part = 0; part < PARTS; part++) hold(sums[part]);
            release(before);
            u32 row, column;
            order.at(tile, row, column);
            row = (2 * row + rank) * M + warp % GROUP_WARPS * 16;
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                gemm_output<N>(p, sums[part], row + part * 64, column * N, pieces + warp * 2 * PIECE_BYTES, piece);
        }
        if (lane == 0) store_wait_read<0>();
        __syncwarp();
    }
    cluster_sync(); // no block ends while the other may still send to it or signal it
}

#define GEMM(NAME, M, N) \
    KERNEL __launch_bounds__(GEMM_THREADS, 1) NAME(const __grid_constant__ Gemm p) { gemm<M, N>(p); }

GEMM(gemm_128x192, 128, 192)
