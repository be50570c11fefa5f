// delta_scan of the chunked gated delta rule on any GPU: from chunk to chunk, see delta_prefill.cu for equations and shapes.
//
// A block holds 32 columns (dv) of one head's S, [dk][dv] in fp32 registers and as fp16 in rows of 64 bytes in shared memory.
#include "delta_prefill.cuh"

#define SPLIT 4              // blocks a head
#define WIDTH (HEAD / SPLIT) // columns (dv) of S that a block holds

DEVICE u32 unit_64(u32 base, int row, int unit) { return base + (u32)(row * 64 + (unit ^ (row / 2 & 3)) * 16); }

// ---- steps, for a warp ----

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
DEVICE void load_rows(u32 (&a)[HEAD / 16][4], u32 tile, int warp) { // rows (tokens) 16 warp ..= +15 of K or Q
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < HEAD / 16; step++)
        load_matrix_x4(a[step], tile_unit(tile, warp * 16 + lane % 16, step * 2 + lane / 16));
}

DEVICE void load_keys(u32 (&a)[CHUNK / 16][2][4], u32 k_tile, int warp) { // rows (dk) 32 warp ..= +31 of K^T
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++)
#pragma unroll
        for (int m = 0; m < 2; m++) // transposed, so matrices 1 and 2 of the four trade places
            load_matrix_x4_transposed(a[step][m], tile_unit(k_tile, step * 16 + lane % 8 + lane / 16 * 8, warp * 4 + m * 2 + lane / 8 % 2));
}

DEVICE void load_weights(u32 (&a)[CHUNK / 16][4], u32 p_tile, int warp) { // rows 16 warp ..= +15 of T or P; zero past the diagonal block
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++)
        if (step <= warp) load_matrix_x4(a[step], tile_unit(p_tile, warp * 16 + lane % 16, step * 2 + lane / 16));
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

// For each two neighbours of this lane in 16 rows by 32 columns, elements i and i + 1 of fragment n: their row and their
// offset in a tile.
template <class Body> DEVICE void for_pairs(int warp, Body body) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = warp * 16 + lane / 4 + half * 8;
#pragma unroll
        for (int n = 0; n < 4; n++) body(row, unit_64(0, row, n) + lane % 4 * 4, n, half * 2);
    }
}

// The residual V - e^G K S of this warp's rows, as fp16.
DEVICE void store_residual(const float (&product)[4][4], u32 value_tile, const float *decay, u32 to, int warp) {
    for_pairs(warp, [&](int row, u32 at, int n, int i) {
        float2 v = unpack_half2(load_shared(value_tile + at));
        store_shared(to + at, pack_half2(v.x - decay[row] * product[n][i], v.y - decay[row] * product[n][i + 1]));
    });
}

// V' of this warp's rows, as fp16, and scaled by e^(G_last - G).
DEVICE void store_values(const float (&v)[4][4], const float *to_end, u32 v_tile, u32 scaled_tile, int warp) {
    for_pairs(warp, [&](int row, u32 at, int n, int i) {
        store_shared(v_tile + at, pack_half2(v[n][i], v[n][i + 1]));
        store_shared(scaled_tile + at, pack_half2(v[n][i] * to_end[row], v[n][i + 1] * to_end[row]));
    });
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

// sum += T times the residual, or P V', for this warp's rows.
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

DEVICE void decay_rows(float (&sum)[4][4], const float *decay, int warp) {
    int row = warp * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[n][i] *= decay[row + i / 2 * 8];
}

// ---- the scan ----

#define SCAN_THREADS 256
// K, Q, T, P and the columns of V.
#define STAGE_Q (TILE * 2)
#define STAGE_T (2 * TILE * 2)
#define STAGE_P (STAGE_T + SQUARE * 2)
#define STAGE_V (STAGE_P + SQUARE * 2)
#define STAGE_BYTES (STAGE_V + TILE * 2 / SPLIT)

// Grid (value_heads * SPLIT, pieces), 256 threads. Warps 0 to 3 carry the state: warp w holds rows (dk) 32 w ..= +31 of S as
// two 16 x 32 accumulators and makes rows 16 w of K S and V'. Warps 4 to 7 make the outputs. S as fp16, the residual, V' and
// V' scaled pass through shared memory. `stages` 2 loads the next chunk under this one's work.
KERNEL __launch_bounds__(SCAN_THREADS, 1) delta_scan(const f16 *conv, const f16 *t_in, const f16 *p_in, const float *decays_in,
                                                     void *state, f16 *o, const Piece *pieces, const Shape shape, int stages) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float decays[2][2 * CHUNK];
    int thread = threadIdx.x, warp = thread / 32 % 4, lane = thread % 32, group = lane / 4, pair = lane % 4;
    bool carries = thread < 128;
    int head = blockIdx.x / SPLIT, slice = blockIdx.x % SPLIT, first_column = slice * WIDTH;
    wait_for_previous_kernel();
    let_next_kernel_start();
    Piece piece = pieces[blockIdx.y];
    int key_head = head / (shape.value_heads / shape.key_heads), heads = 2 * shape.key_heads + shape.value_heads;
    int chunk_count = (piece.count + CHUNK - 1) / CHUNK;
    u32 s_tile = shared_address(shared), v_tile = s_tile + HEAD * 64, scaled_tile = v_tile + CHUNK * 64;
    u32 residual_tile = scaled_tile + CHUNK * 64, stage_tiles = residual_tile + CHUNK * 64;

    float s[2][4][4];
    u64 state_base = ((u64)piece.slot * shape.value_heads + head) * HEAD * HEAD;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[m][n][i] = carries && piece.context > 0
                                 ? read_state(state, state_base + state_offset(m, n, i, warp, first_column), shape.state_type) : 0.0f;

    auto load = [&](int chunk) {
        u64 index = piece.first_chunk + chunk, tile = index * shape.value_heads + head;
        const f16 *q = conv + (index * heads + key_head) * TILE, *v = conv + (index * heads + 2 * shape.key_heads + head) * TILE;
        u32 to = stage_tiles + (stages > 1 ? chunk % 2 : 0) * STAGE_BYTES;
        load_tile<SCAN_THREADS, TILE * 2>(to, q + (u64)shape.key_heads * TILE);
        load_tile<SCAN_THREADS, TILE * 2>(to + STAGE_Q, q);
        load_tile<SCAN_THREADS, SQUARE * 2>(to + STAGE_T, t_in + tile * SQUARE);
        load_tile<SCAN_THREADS, SQUARE * 2>(to + STAGE_P, p_in + tile * SQUARE);
        int row = thread / 4, unit = thread % 4;
        copy_async_16(unit_64(to + STAGE_V, row, unit), v + tile_unit(0, row, slice * 4 + unit) / 2);
        copy_async_commit();
        if (thread < 2 * CHUNK) decays[chunk % 2][thread] = decays_in[tile * (2 * CHUNK) + thread];
    };
    if (stages > 1) load(0);

    for (int chunk = 0; chunk < chunk_count; chunk++) {
        if (carries) store_state_half(s_tile, s, warp);
        if (stages == 1) load(chunk);
        copy_async_wait<0>();
        __syncthreads(); // this chunk's tiles and S are here; the other stage is free
        if (stages > 1 && chunk + 1 < chunk_count) load(chunk + 1);
        u32 k_tile = stage_tiles + (stages > 1 ? chunk % 2 : 0) * STAGE_BYTES;
        const float *decay = decays[chunk % 2], *to_end = decay + CHUNK;
        float sum[4][4];
        u32 rows[HEAD / 16][4], weights[CHUNK / 16][4];
        load_rows(rows, k_tile + (carries ? 0 : STAGE_Q), warp);
        multiply_state(sum, rows, s_tile);
        if (carries) store_residual(sum, k_tile + STAGE_V, decay, residual_tile, warp);
        else decay_rows(sum, decay, warp);
        __syncthreads(); // the residual is here
        load_weights(weights, k_tile + (carries ? STAGE_T : STAGE_P), warp);
        if (carries) {
#pragma unroll
            for (int n = 0; n < 4; n++) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.0f;
            add_inside(sum, weights, residual_tile, warp);
            store_values(sum, to_end, v_tile, scaled_tile, warp);
        }
        __syncthreads(); // V' is here
        if (carries) {
            u32 keys[CHUNK / 16][2][4];
            load_keys(keys, k_tile, warp);
            update_state(s, keys, scaled_tile, decay[CHUNK - 1]);
        } else {
            add_inside(sum, weights, v_tile, warp);
            f16 *tile = o + ((u64)(piece.first_chunk + chunk) * shape.value_heads + head) * TILE;
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int n = 0; n < 4; n++)
                    *(u32 *)(tile + tile_unit(0, warp * 16 + group + half * 8, slice * 4 + n) / 2 + pair * 2) =
                        pack_half2(sum[n][half * 2], sum[n][half * 2 + 1]);
        }
        // What is rewritten at the top had its last readers before the last barrier, but for the tiles of a single stage.
        if (stages == 1) __syncthreads();
    }

    if (!carries) return;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                write_state(state, state_base + state_offset(m, n, i, warp, first_column), shape.state_type, s[m][n][i]);
}
