// y[rows, n] = x[rows, k] W[n, k]^T: what the 16-bit and the 4-bit products share.
#pragma once
#include "half.cuh"

#define OUTPUT_HALF 0  // fp16
#define OUTPUT_FLOAT 1 // fp32
#define OUTPUT_SILU 2  // W's rows are 8 of gate, then the same 8 of up, and so on: fp16(silu(gate) * up), n/2 columns
#define OUTPUT_PARTS 3 // fp32, and k is cut into `parts`: part p goes to y + p * part_stride
#define OUTPUT_RESIDUAL 4 // fp32, added to what y holds; kernels of many rows only
#define OUTPUT_BEST 5  // u64 [rows], each raised to the key (best.cuh) of its row's largest: products_hopper.cu, products_wide.cu

struct Product {
    const f16 *x;      // [rows, k]
    const u8 *w;       // fp16 [n, k], or packed
    const u8 *scales;  // 4-bit only
    const float *bias; // [n] or null
    void *y;           // [rows, stride]
    u64 part_stride;   // elements
    u32 rows, n, k;
    u32 stride;
    u32 output;
    u32 parts;
    u32 group;         // 4-bit only: columns that share a scale
    u32 zero_points;   // 4-bit only: 0 when all are 8
};

DEVICE float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// ---- 1 to 32 rows ----

// Rows of W sit on the M side of mma.m16n8k16 and the batch on its N side, so that a batch of 1 to 8 costs one tensor
// instruction for each 16x16 piece of W. W is cut into units of 16 rows and blocks of Weights::COLS columns. The order of
// k inside 32 columns is permuted, the same way for W and x (a dot product does not mind): lane (group, pair) holds columns
// 8*pair..+7, which makes every load 16 bytes a lane, straight into registers.
//
// One small thread block of 8 warps (4 where units abound) a unit (and part of k), each warp with an equal run of blocks: multiprocessors of one GPU
// read memory at different rates (on an H200 equal bytes took from 206 to 352 us), so equal shares would not be equal
// times; the hardware hands out blocks as others end. Registers of 24 warps on a multiprocessor hold 96 KB in flight.
// LOADS blocks of W are in flight a warp, AHEAD (a divisor) of x; the first of W are asked for before the previous kernel has
// ended.
//
// `Weights` gives COLS; Tile, the registers of one block; start(p, unit, block) and step_bytes(p): where a lane reads and how
// far it goes from block to block; load(p, Tile &, from); accumulate<TILES>(p, acc, tile, x, block) where x[t][i] are the lane's eight
// columns of 32i.. of batch tile t.
#define STREAM_WARPS 8
#define UNIT 16

// A warp's sums of a unit and a tile of 8 rows, as mma's d, to where they go: a lane has columns n0 and n0 + 8 of y, rows r and r + 1.
DEVICE void stream_output(const Product &p, float4 sum, u32 unit, u32 tile) {
    u32 lane = threadIdx.x & 31;
    u32 r = tile * 8 + 2 * (lane & 3), n0 = unit * UNIT + (lane >> 2);
    bool in0 = r < p.rows, in1 = r + 1 < p.rows;
    if (p.bias) {
        float b0 = p.bias[n0], b1 = p.bias[n0 + 8];
        sum = add4(sum, make_float4(b0, b0, b1, b1));
    }
    if (p.output == OUTPUT_HALF) {
        f16 *y = (f16 *)p.y + (u64)r * p.stride + n0;
        if (in0) y[0] = float_to_half(sum.x), y[8] = float_to_half(sum.z);
        if (in1) y[p.stride] = float_to_half(sum.y), y[p.stride + 8] = float_to_half(sum.w);
    } else if (p.output == OUTPUT_SILU) {
        f16 *y = (f16 *)p.y + (u64)r * p.stride + unit * 8 + (lane >> 2);
        if (in0) y[0] = float_to_half(silu(sum.x) * sum.z);
        if (in1) y[p.stride] = float_to_half(silu(sum.y) * sum.w);
    } else {
        float *y = (float *)p.y + blockIdx.y * p.part_stride + (u64)r * p.stride + n0;
        if (in0) y[0] = sum.x, y[8] = sum.z;
        if (in1) y[p.stride] = sum.y, y[p.stride + 8] = sum.w;
    }
}

// Each warp's sums of its `share` of `shares` equal runs of blocks of a unit.
template <class Weights, int TILES, int LOADS, int AHEAD, int WARPS>
DEVICE void stream_sums(const Product &p, float4 (&sums)[WARPS][TILES][32], u32 unit, u32 share, u32 shares) {
    constexpr int COLS = Weights::COLS, WORDS = COLS / 32;
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, pair = lane & 3;
    u32 blocks = p.k / COLS;
    u32 at = blocks * share / shares, end = blocks * (share + 1) / shares, load_at = at;
    u32 step = Weights::step_bytes(p);
    const u8 *from = Weights::start(p, unit, at);

    typename Weights::Tile w[LOADS];
    uint4 x[AHEAD][TILES][WORDS];
    auto load_x = [&](uint4(&into)[TILES][WORDS], u32 block) {
        const f16 *row = p.x + (u64)group * p.k + block * COLS + 8 * pair;
#pragma unroll
        for (int t = 0; t < TILES; t++, row += 8 * p.k)
#pragma unroll
            for (int i = 0; i < WORDS; i++)
                into[t][i] = t * 8 + group < p.rows ? *(const uint4 *)(row + 32 * i) : make_uint4(0, 0, 0, 0);
    };
#pragma unroll
    for (int i = 0; i < LOADS; i++)
        if (at + i < end) Weights::load(p, w[i], from), from += step;
    let_next_kernel_start();
    wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (at + i < end) load_x(x[i], at + i);
    load_at += LOADS;

    float acc[TILES][4];
#pragma unroll
    for (int t = 0; t < TILES; t++) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.0f;
    while (at < end) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            if (at < end) {
                Weights::template accumulate<TILES>(p, acc, w[i], x[i % AHEAD], at);
                if (load_at < end) Weights::load(p, w[i], from), from += step;
                if (at + AHEAD < end) load_x(x[i % AHEAD], at + AHEAD);
                at++, load_at++;
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) sums[warp][t][lane] = make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
}

// The block's sum of a tile, by one warp, after all have written theirs.
template <int WARPS, int TILES> DEVICE float4 sum_of_warps(const float4 (&sums)[WARPS][TILES][32], u32 tile) {
    u32 lane = threadIdx.x & 31;
    float4 sum = sums[0][tile][lane];
#pragma unroll
    for (int other = 1; other < WARPS; other++) sum = add4(sum, sums[other][tile][lane]);
    return sum;
}

template <class Weights, int TILES, int LOADS, int AHEAD = LOADS, int WARPS = STREAM_WARPS> DEVICE void stream_product(const Product &p) {
    __shared__ float4 sums[WARPS][TILES][32];
    u32 warp = threadIdx.x >> 5;
    stream_sums<Weights, TILES, LOADS, AHEAD, WARPS>(p, sums, blockIdx.x, blockIdx.y * WARPS + warp, WARPS * p.parts);
    __syncthreads();
    if (warp < TILES) stream_output(p, sum_of_warps(sums, warp), blockIdx.x, warp);
}

// ---- many rows ----

// A thread block of 8 warps makes a tile of ROWS rows of x by 128 of W, 64 columns of k at a time through a ring of three stages;
// a row of a stage is 128 bytes, 16-byte chunk c at c ^ (row & 7), so that ldmatrix meets no bank twice. Warps are 2 (rows
// of x) by 4 (rows of W). Grid: tiles of x, tiles of W, parts of k. `Weights::Stage` copies a tile of W: `start(p, to, n0, k0)`
// asks for it, `finish(p, to)` after its arrival puts fp16 in place (nothing to do for fp16).
#define TILE_N 128
#define TILE_K 64
#define TILE_STAGES 3

DEVICE u32 tile_place(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row & 7)) * 16); }

// A warp's 16*MT rows from row0 by 32 columns from n0, in mma's layout, to where they go.
template <int MT> DEVICE void tile_output(const Product &p, const float (&acc)[MT][4][4], u32 row0, u32 n0) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = row0 + m * 16 + half * 8 + ((threadIdx.x & 31) >> 2);
            if (row >= p.rows) continue;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                u32 column = n0 + n * 8 + 2 * (threadIdx.x & 3);
                if (column >= p.n) continue;
                float v0 = acc[m][n][2 * half], v1 = acc[m][n][2 * half + 1];
                if (p.bias) v0 += p.bias[column], v1 += p.bias[column + 1];
                if (p.output == OUTPUT_HALF) {
                    *(u32 *)((f16 *)p.y + (u64)row * p.stride + column) = pack_half2(v0, v1);
                } else if (p.output == OUTPUT_SILU) {
                    if (n & 1) continue; // gate in this tile of 8, up in the next
                    float u0 = acc[m][n | 1][2 * half], u1 = acc[m][n | 1][2 * half + 1];
                    if (p.bias) u0 += p.bias[column + 8], u1 += p.bias[column + 9];
                    u32 to = (n0 + n * 8) / 2 + 2 * (threadIdx.x & 3);
                    *(u32 *)((f16 *)p.y + (u64)row * p.stride + to) = pack_half2(silu(v0) * u0, silu(v1) * u1);
                } else {
                    float2 pair = make_float2(v0, v1);
                    *(float2 *)((float *)p.y + blockIdx.z * p.part_stride + (u64)row * p.stride + column) = pair;
                }
            }
        }
}

template <class Weights, int ROWS> DEVICE void tile_product(const Product &p) {
    extern __shared__ __align__(128) u8 shared[];
    constexpr int MT = ROWS / 32, X_BYTES = ROWS * 128, STAGE = X_BYTES + TILE_N * 128;
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp & 1, wn = warp >> 1;
    u32 row0 = blockIdx.x * ROWS, n0 = blockIdx.y * TILE_N;
    u32 blocks = (p.k + TILE_K - 1) / TILE_K;
    u32 begin = blocks * blockIdx.z / p.parts, end = blocks * (blockIdx.z + 1) / p.parts;
    u32 base = shared_address(shared);
    let_next_kernel_start();
    wait_for_previous_kernel();

    auto fill = [&](u32 block) {
        if (block < end) {
            u32 to = base + (block - begin) % TILE_STAGES * STAGE, k0 = block * TILE_K;
            for (u32 i = threadIdx.x; i < ROWS * 8; i += 256) {
                u32 row = i >> 3, chunk = i & 7;
                bool valid = row0 + row < p.rows && k0 + chunk * 8 < p.k;
                copy_async_16(to + tile_place(row, chunk), p.x + (valid ? (u64)(row0 + row) * p.k + k0 + chunk * 8 : 0), valid);
            }
            Weights::tile_start(p, to + X_BYTES, n0, k0);
        }
        copy_async_commit();
    };
    float acc[MT][4][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < 4; n++) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.0f;
    fill(begin), fill(begin + 1);
    for (u32 block = begin; block < end; block++) {
        copy_async_wait<TILE_STAGES - 2>();
        __syncthreads(); // this stage is complete, and everyone is done with the one that is filled next
        fill(block + TILE_STAGES - 1);
        u32 x = base + (block - begin) % TILE_STAGES * STAGE, w = x + X_BYTES;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 a[MT][4], b[2][4];
#pragma unroll
            for (int m = 0; m < MT; m++) load_matrix_x4(a[m], x + tile_place(wm * (ROWS / 2) + m * 16 + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
            for (int n = 0; n < 2; n++) // two tiles of 8 rows of W at a time
                load_matrix_x4(b[n], w + tile_place(wn * 32 + n * 16 + (lane >> 4) * 8 + (lane & 7), 2 * k + (lane >> 3 & 1)));
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < 4; n++) mma_16x8x16(acc[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
    }
    tile_output<MT>(p, acc, row0 + wm * (ROWS / 2), n0 + wn * 32);
}
