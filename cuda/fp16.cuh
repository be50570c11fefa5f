// 16-bit weights for product.cuh: row-major, as in checkpoints.
#pragma once
#include "product.cuh"

struct Fp16Weights {
    static constexpr int COLS = 64;

    struct Tile {
        uint4 low[2], high[2]; // row `group` and row `group + 8` of the unit
    };

    DEVICE u32 step_bytes(const Product &) { return COLS * 2; }
    DEVICE const u8 *start(const Product &p, u32 unit, u32 block) {
        u32 lane = threadIdx.x & 31;
        return p.w + ((u64)(unit * UNIT + (lane >> 2)) * p.k + block * COLS + 8 * (lane & 3)) * 2;
    }
    DEVICE void load(const Product &p, Tile &tile, const u8 *from) {
        const u8 *high = from + 16 * p.k;
        tile.low[0] = load_streaming(from), tile.low[1] = load_streaming(from + 64);
        tile.high[0] = load_streaming(high), tile.high[1] = load_streaming(high + 64);
    }

    DEVICE void multiply(float (&acc)[4], uint4 low, uint4 high, uint4 x) {
        u32 a[4] = {low.x, high.x, low.y, high.y};
        mma_16x8x16(acc, a, x.x, x.y);
        u32 b[4] = {low.z, high.z, low.w, high.w};
        mma_16x8x16(acc, b, x.z, x.w);
    }
    template <int TILES> DEVICE void accumulate(const Product &, float (&acc)[TILES][4], const Tile &w, const uint4 (&x)[TILES][2], u32) {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int t = 0; t < TILES; t++) multiply(acc[t], w.low[half], w.high[half], x[t][half]);
    }

    DEVICE void tile_start(const Product &p, u32 to, u32 n0, u32 k0) {
        for (u32 i = threadIdx.x; i < TILE_N * 8; i += 256) {
            u32 row = i >> 3, chunk = i & 7;
            bool valid = n0 + row < p.n && k0 + chunk * 8 < p.k;
            copy_async_16(to + tile_place(row, chunk), p.w + (valid ? ((u64)(n0 + row) * p.k + k0 + chunk * 8) * 2 : 0), valid);
        }
    }
};
