// What the files of the chunked gated delta rule share. See delta_prefill.cu for the equations.
//
// Tiles lie in global memory in the order shared memory wants them, so that a tile is one linear copy: rows of 256, 128 or 64
// bytes whose 16-byte units trade places by row, so that eight rows that an ldmatrix reads together meet all banks.
#pragma once
#include "half.cuh"

#define CHUNK 64
#define HEAD 128
#define SPLIT 4              // blocks a head in the scan
#define WIDTH (HEAD / SPLIT) // columns (dv) of S that a block holds

// Halves of a tile: 64 x 128 (q, k, v, W; U as SPLIT tiles of 64 x 32) and 64 x 64 (P).
#define TILE (CHUNK * HEAD)
#define P_TILE (CHUNK * CHUNK)

struct Shape {
    int key_heads, value_heads, pitch, ring, state_type;
    float eps;
};

// `count` new tokens at row `start` after `context` cached ones; its chunks begin at `first_chunk`.
struct Piece {
    int slot, context, start, count, first_chunk;
};

DEVICE int channel_count(const Shape &shape) { return (2 * shape.key_heads + shape.value_heads) * HEAD; }

DEVICE u32 unit_256(u32 base, int row, int unit) { return base + (u32)(row * 256 + (unit ^ (row & 7)) * 16); }
DEVICE u32 unit_128(u32 base, int row, int unit) { return base + (u32)(row * 128 + (unit ^ (row & 7)) * 16); }
DEVICE u32 unit_64(u32 base, int row, int unit) { return base + (u32)(row * 64 + (unit ^ (row / 2 & 3)) * 16); }

// x sigmoid(x) in five instructions: relative error of a few 2^-22, and 0 below -87.
DEVICE float silu_short(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + exp2_fast(x * -1.4426950408889634f)));
    return x * inverse;
}

// ---- steps of the scan, for a warp; S is [dk][dv] fp32 in registers and fp16 in rows of 64 bytes in shared memory ----

DEVICE float read_state(const void *state, u64 at, int type) {
    if (type == 0) return ((const float *)state)[at];
    u16 bits = ((const u16 *)state)[at];
    return type == 1 ? half_to_float(bits) : __uint_as_float((u32)bits << 16);
}

DEVICE void write_state(void *state, u64 at, int type, float value) {
    if (type == 0) {
        ((float *)state)[at] = value;
    } else if (type == 1) {
        ((u16 *)state)[at] = float_to_half(value);
    } else {
        u16 bits;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        ((u16 *)state)[at] = bits;
    }
}

// Offset of element i of s[m][n] in a head's [dv][dk] state: row (dk) 32 warp + 16 m + group (+8), column first_column + 8 n + 2 pair (+1).
DEVICE int state_offset(int m, int n, int i, int warp, int first_column) {
    int lane = threadIdx.x % 32, dk = warp * 32 + m * 16 + lane / 4 + i / 2 * 8, dv = first_column + n * 8 + lane % 4 * 2 + i % 2;
    return dv * HEAD + dk;
}

DEVICE void store_state_half(u32 s_tile, const float (&s)[2][4][4], int warp) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                store_shared(unit_64(s_tile, warp * 32 + m * 16 + lane / 4 + half * 8, n) + lane % 4 * 4,
                             pack_half2(s[m][n][half * 2], s[m][n][half * 2 + 1]));
}

// Operands that do not depend on S or V', so that a warp can have them before it waits for those.
DEVICE void load_rows(u32 (&a)[HEAD / 16][4], u32 tile, int warp) { // rows (tokens) 16 warp ..= +15 of W or Q
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < HEAD / 16; step++)
        load_matrix_x4(a[step], unit_256(tile, warp * 16 + lane % 16, step * 2 + lane / 16));
}

DEVICE void load_keys(u32 (&a)[CHUNK / 16][2][4], u32 k_tile, int warp) { // rows (dk) 32 warp ..= +31 of K^T
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++)
#pragma unroll
        for (int m = 0; m < 2; m++) // transposed, so matrices 1 and 2 of the four trade places
            load_matrix_x4_transposed(a[step][m], unit_256(k_tile, step * 16 + lane % 8 + lane / 16 * 8, warp * 4 + m * 2 + lane / 8 % 2));
}

DEVICE void load_weights(u32 (&a)[CHUNK / 16][4], u32 p_tile, int warp) { // rows 16 warp ..= +15 of P; zero past the diagonal block
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++)
        if (step <= warp) load_matrix_x4(a[step], unit_128(p_tile, warp * 16 + lane % 16, step * 2 + lane / 16));
}

DEVICE void load_inputs(u32 (&u)[2][4], u32 u_tile, int warp) { // of U, where this warp's products lie
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < 4; n++) u[half][n] = load_shared(unit_64(u_tile, warp * 16 + lane / 4 + half * 8, n) + lane % 4 * 4);
}

// sum = a S.
DEVICE void multiply_state(float (&sum)[4][4], const u32 (&a)[HEAD / 16][4], u32 s_tile) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 4; n++) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < HEAD / 16; step++) {
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
            u32 b[4];
            load_matrix_x4_transposed(b, unit_64(s_tile, step * 16 + lane % 16, n + lane / 16));
            mma_16x8x16(sum[n], a[step], b[0], b[1]);
            mma_16x8x16(sum[n + 1], a[step], b[2], b[3]);
        }
    }
}

// V' = U - W S of this warp's rows, as fp16, and scaled by e^(G_last - G).
DEVICE void store_values(const float (&product)[4][4], const u32 (&u)[2][4], const float *g, u32 v_tile, u32 scaled_tile, int warp) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = warp * 16 + lane / 4 + half * 8;
        float to_end = __expf(g[CHUNK - 1] - g[row]);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            u32 at = unit_64(0, row, n) + lane % 4 * 4;
            float2 v = unpack_half2(u[half][n]);
            v.x -= product[n][half * 2], v.y -= product[n][half * 2 + 1];
            store_shared(v_tile + at, pack_half2(v.x, v.y));
            store_shared(scaled_tile + at, pack_half2(v.x * to_end, v.y * to_end));
        }
    }
}

// S = e^G_last S + K^T (scaled V').
DEVICE void update_state(float (&s)[2][4][4], const u32 (&a)[CHUNK / 16][2][4], u32 scaled_tile, float carry) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] *= carry;
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++) {
        u32 b[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++)
            load_matrix_x4_transposed(b[n], unit_64(scaled_tile, step * 16 + lane % 16, n * 2 + lane / 16));
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                mma_16x8x16(s[m][n * 2], a[step][m], b[n][0], b[n][1]);
                mma_16x8x16(s[m][n * 2 + 1], a[step][m], b[n][2], b[n][3]);
            }
    }
}

// sum += P V' for this warp's rows.
DEVICE void add_inside(float (&sum)[4][4], const u32 (&a)[CHUNK / 16][4], u32 v_tile, int warp) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++) {
        if (step > warp) continue;
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
            u32 b[4];
            load_matrix_x4_transposed(b, unit_64(v_tile, step * 16 + lane % 16, n + lane / 16));
            mma_16x8x16(sum[n], a[step], b[0], b[1]);
            mma_16x8x16(sum[n + 1], a[step], b[2], b[3]);
        }
    }
}

DEVICE void decay_rows(float (&sum)[4][4], const float *g, int warp) {
    int row = warp * 16 + threadIdx.x % 32 / 4;
    float decay[2] = {__expf(g[row]), __expf(g[row + 8])};
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[n][i] *= decay[i / 2];
}

// Keeps the raw inputs of a piece's last three tokens; a block takes channels `first`, `first + stride`, ... The blocks of
// every head take part.
DEVICE void keep_window(const f16 *mixed, f16 *window, const Piece &piece, const Shape &shape, int first, int stride) {
    int channels = channel_count(shape);
    for (int back = 1; back <= min(3, piece.count); back++) {
        int at = piece.count - back;
        const f16 *from = mixed + (u64)(piece.start + at) * shape.pitch;
        f16 *to = window + ((u64)piece.slot * shape.ring + (piece.context + at) % shape.ring) * channels;
        for (int c = first; c < channels; c += stride) to[c] = from[c];
    }
}
