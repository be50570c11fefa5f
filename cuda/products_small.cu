// Products with small fp16 matrices (n % 16 == 0, k % 64 == 0) from sm_90 on: y[rows, n] = x[rows, k] W[n, k]^T, sums in fp32.
//
// The two projections of a delta net's gates where the others have 4 bits: 64 rows of W, 0.5 MB, which every layer waits for. Nothing
// of it is bandwidth; what takes time is the chain of loads behind each other. So k is cut across the warps of a cluster until each
// has one block of 64 columns or few, W comes before the previous kernel has ended, and x is one round trip. (A ring for each 64
// rows of W, which one multiprocessor feeds, took 17 us at 32 rows of x.)
//
// Grid: units of 16 rows of W by CLUSTER parts of k (the cluster), 1, tiles of 8 * TILES rows of x. Block r of a cluster adds up the
// rth 8 rows; all send it theirs.
#include "cluster.cuh"
#include "fp16.cuh"

#define CLUSTER 8

DEVICE void send_to_block(const float4 *own, u32 rank, float4 v) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"r"(address_in_block(shared_address(own), rank)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

template <int TILES> DEVICE void small_product(Product p) {
    static_assert(TILES <= CLUSTER, "a block adds up one tile");
    __shared__ float4 sums[STREAM_WARPS][TILES][32], from_blocks[CLUSTER][32];
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 unit = blockIdx.x / CLUSTER, rank = cluster_rank(), row0 = blockIdx.z * 8 * TILES;
    u64 y0 = (u64)row0 * p.stride;
    p.x += (u64)row0 * p.k, p.rows -= row0;
    p.y = p.output == OUTPUT_HALF || p.output == OUTPUT_SILU ? (void *)((f16 *)p.y + y0) : (void *)((float *)p.y + y0);
    cluster_say_started();
    stream_sums<Fp16Weights, TILES, 1, 1, STREAM_WARPS>(p, sums, unit, rank * STREAM_WARPS + warp, CLUSTER * STREAM_WARPS);
    cluster_wait_started();
    __syncthreads();
    if (warp < TILES) send_to_block(&from_blocks[rank][lane], warp, sum_of_warps(sums, warp));
    cluster_sync();
    if (warp > 0 || rank >= TILES) return;
    float4 sum = from_blocks[0][lane];
#pragma unroll
    for (u32 r = 1; r < CLUSTER; r++) sum = add4(sum, from_blocks[r][lane]);
    stream_output(p, sum, unit, rank);
}

extern "C" __global__ void __launch_bounds__(256) product_small_8(const __grid_constant__ Product p) { small_product<1>(p); }
extern "C" __global__ void __launch_bounds__(256) product_small_16(const __grid_constant__ Product p) { small_product<2>(p); }
extern "C" __global__ void __launch_bounds__(256) product_small_32(const __grid_constant__ Product p) { small_product<4>(p); }
extern "C" __global__ void __launch_bounds__(256) product_small_64(const __grid_constant__ Product p) { small_product<8>(p); }
