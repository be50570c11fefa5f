// Products with fp16 weights, row-major as in checkpoints: y[rows, n] = x[rows, k] W[n, k]^T, sums in fp32 (see product.cuh).
//
// `product_stream_*`: 1 to 32 rows, n % 16 == 0, k % 64 == 0; bytes: W once. `product_tile_*`: any number of rows, n and k
// multiples of 8; W once for each tile of rows. `product_silu`, `product_bias`: what a library's product leaves to do.
#include "fp16.cuh"

extern "C" __global__ void __launch_bounds__(128, 6) product_stream_8_short(const __grid_constant__ Product p) { stream_product<Fp16Weights, 1, 2, 2, 4>(p); }
extern "C" __global__ void __launch_bounds__(256, 3) product_stream_8(const __grid_constant__ Product p) { stream_product<Fp16Weights, 1, 2>(p); }
extern "C" __global__ void __launch_bounds__(256, 3) product_stream_16(const __grid_constant__ Product p) { stream_product<Fp16Weights, 2, 1>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) product_stream_32(const __grid_constant__ Product p) { stream_product<Fp16Weights, 4, 1>(p); }
extern "C" __global__ void __launch_bounds__(256, 1) product_tile_64(const __grid_constant__ Product p) { tile_product<Fp16Weights, 64>(p); }
extern "C" __global__ void __launch_bounds__(256, 1) product_tile_128(const __grid_constant__ Product p) { tile_product<Fp16Weights, 128>(p); }

// y[rows, stride] = silu(gate) * up of a product kept as [rows, 2 * columns], 8 of gate and 8 of up in turn. Eight columns a
// thread; bytes: 6 a column. grid (ceil(columns / 8 / 256), rows).
KERNEL product_silu(const f16 *gate_up, f16 *y, u32 columns, u32 stride) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at * 8 >= columns) return;
    const uint4 *from = (const uint4 *)(gate_up + (u64)blockIdx.y * 2 * columns) + 2 * at;
    float gate[8], up[8];
    unpack_half8(from[0], gate);
    unpack_half8(from[1], up);
#pragma unroll
    for (int i = 0; i < 8; i++) gate[i] = silu(gate[i]) * up[i];
    *(uint4 *)(y + (u64)blockIdx.y * stride + at * 8) = pack_half8(gate);
}

// y[rows, stride] += bias, in place, fp16 or fp32. grid (ceil(n / 256), rows).
KERNEL product_bias(void *y, const float *bias, u32 n, u32 stride, u32 is_half) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= n) return;
    u64 at = (u64)blockIdx.y * stride + column;
    if (is_half) ((f16 *)y)[at] = float_to_half(half_to_float(((f16 *)y)[at]) + bias[column]);
    else ((float *)y)[at] += bias[column];
}
