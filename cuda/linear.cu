// y[rows, n] = x[rows, k] W[n, k]^T + bias: the plain product, for any shape with k a multiple of 8. It is what the faster
// products are checked against, and what runs where none of them fits.
//
// A block computes 64 columns of W's n times 64 rows of x; four warps have 32 x 32 each. W sits on the M side of the tensor
// instruction, so that gate and up, whose rows take turns eight at a time, meet in one thread. Both operands pass through
// two shared-memory stages of 32 columns of k; rows of 80 bytes keep ldmatrix free of bank conflicts.
// Bytes: W ceil(rows/64) times, x ceil(n/64) times (from the L2 beyond the first), y once.
#include "half.cuh"

#define TILE 64
#define STEP 32
#define PITCH 40 // halves in a row of a stage

#define HALF 0
#define FLOAT 1
#define SILU_MUL 2

KERNEL __launch_bounds__(128) linear(const f16 *x, const f16 *w, const float *bias, void *y, int rows, int n, int k, u64 stride,
                                     int output) {
    __shared__ __align__(16) f16 w_stage[2][TILE * PITCH], x_stage[2][TILE * PITCH];
    wait_for_previous_kernel();
    let_next_kernel_start();
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, group = lane >> 2, pair = lane & 3;
    int n_base = blockIdx.x * TILE, row_base = blockIdx.y * TILE;
    int warp_n = (warp & 1) * 32, warp_row = (warp >> 1) * 32;

    // 64 rows of 32 halves: four 16-byte pieces a row, two a thread.
    auto load = [&](int stage, int column) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int piece = tid + 128 * i, row = piece >> 2, at = (piece & 3) * 8;
            bool inside = column + at < k;
            bool w_valid = inside && n_base + row < n, x_valid = inside && row_base + row < rows;
            const f16 *w_from = w + (w_valid ? (u64)(n_base + row) * k + column + at : 0);
            const f16 *x_from = x + (x_valid ? (u64)(row_base + row) * k + column + at : 0);
            copy_async_16(shared_address(&w_stage[stage][row * PITCH + at]), w_from, w_valid);
            copy_async_16(shared_address(&x_stage[stage][row * PITCH + at]), x_from, x_valid);
        }
        copy_async_commit();
    };

    float sum[2][4][4] = {};
    int steps = (k + STEP - 1) / STEP;
    load(0, 0);
    for (int step = 0; step < steps; step++) {
        if (step + 1 < steps) load((step + 1) & 1, (step + 1) * STEP);
        else copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        const f16 *w_tile = w_stage[step & 1], *x_tile = x_stage[step & 1];
#pragma unroll
        for (int part = 0; part < STEP; part += 16) {
            u32 a[2][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                // Matrices in the order of a's registers: rows 0-7, rows 8-15, then the same with k + 8.
                int row = warp_n + 16 * i + (lane & 7) + (lane & 8), column = part + (lane >> 4) * 8;
                load_matrix_x4(a[i], shared_address(&w_tile[row * PITCH + column]));
                // Rows of x 0-7 with k and k + 8, then rows 8-15.
                row = warp_row + 16 * i + (lane & 7) + (lane >> 4) * 8, column = part + (lane & 8);
                load_matrix_x4(b[i], shared_address(&x_tile[row * PITCH + column]));
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) mma_16x8x16(sum[i][j], a[i], b[j >> 1][(j & 1) * 2], b[j >> 1][(j & 1) * 2 + 1]);
        }
        __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int row = row_base + warp_row + 8 * j + 2 * pair + e;
                int column = n_base + warp_n + 16 * i + group; // and column + 8
                if (row >= rows) continue;
                float low = sum[i][j][e], high = sum[i][j][2 + e];
                if (bias) {
                    if (column < n) low += bias[column];
                    if (column + 8 < n) high += bias[column + 8];
                }
                if (output == SILU_MUL) {
                    int pair_column = (n_base + warp_n + 16 * i) / 2 + group;
                    if (column + 8 < n) ((f16 *)y)[row * stride + pair_column] = float_to_half(silu(low) * high);
                } else if (output == HALF) {
                    if (column < n) ((f16 *)y)[row * stride + column] = float_to_half(low);
                    if (column + 8 < n) ((f16 *)y)[row * stride + column + 8] = float_to_half(high);
                } else {
                    if (column < n) ((float *)y)[row * stride + column] = low;
                    if (column + 8 < n) ((float *)y)[row * stride + column + 8] = high;
                }
            }
        }
    }
}
