// Weights on their way into the GPU's memory: seeded noise made in place, and 16- or 32-bit elements from a file turned
// into fp16. Both write whole rows of a matrix to rows of the fused matrix they belong to.
#include "half.cuh"

// Row r of the source goes to row r / block * spread + r % block + first of the destination: spread = block for rows that
// stay together, 2 * block for gate and up rows in turn.
struct Rows {
    u32 block, spread, first;
};

DEVICE u64 place(u64 index, u32 cols, Rows rows) {
    u32 row = (u32)(index / cols), col = (u32)(index % cols);
    return (u64)(row / rows.block * rows.spread + row % rows.block + rows.first) * cols + col;
}

// The value of engine/model/synthetic.rs, bit for bit: `keys` are those of the block of 2^32 indices, `unit` the factor.
DEVICE float synthetic(u32 low, u32 key0, u32 key1, float unit) {
    u32 x = low ^ key0;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x += key1;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    int odd = 2 * (int)(x >> 8) + 1 - 16777216;
    return (float)odd * unit;
}

DEVICE float round_to_bfloat(float x) {
    u32 bits = __float_as_uint(x);
    bits += 0x7fffu + (bits >> 16 & 1);
    return __uint_as_float(bits & 0xffff0000u);
}

// Elements first..first + count of a matrix with `cols` columns, all in one block of 2^32 indices; count and cols are
// multiples of 8. `bfloat`: the source's format rounds to bf16 before it becomes fp16.
KERNEL weights_synthetic(f16 *to, u64 first, u64 count, u32 cols, Rows rows, u32 key0, u32 key1, float unit, int bfloat) {
    u64 at = 8 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= count) return;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = synthetic((u32)(first + at) + i, key0, key1, unit);
        if (bfloat) x[i] = round_to_bfloat(x[i]);
    }
    *(uint4 *)(to + place(first + at, cols, rows)) = pack_half8(x);
}

// Elements first..first + count, read from `from` as fp16 (kind 0), bf16 (1) or fp32 (2). `faults` counts elements that are
// not finite in the file or do not fit fp16.
KERNEL weights_convert(const void *from, int kind, f16 *to, u64 first, u64 count, u32 cols, Rows rows, u32 *faults) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    float x = kind == 0   ? half_to_float(((const f16 *)from)[at])
              : kind == 1 ? __uint_as_float((u32)((const u16 *)from)[at] << 16)
                          : ((const float *)from)[at];
    f16 half = float_to_half(x);
    to[place(first + at, cols, rows)] = half;
    if ((half & 0x7c00) == 0x7c00) atomicAdd(faults, 1);
}
