// Products of many rows on Hopper: instances of gemm_hopper.cuh, by the rows of x and of W in a tile.
// grid (blocks of clusters of two).
#include "gemm_hopper.cuh"

#define GEMM(NAME, M, N) \
    KERNEL __launch_bounds__(GEMM_THREADS, 1) NAME(const __grid_constant__ Gemm p) { gemm<M, N>(p); }

GEMM(gemm_128x192, 128, 192)
