// What the files of the chunked gated delta rule share. See delta_prefill.cu for the equations.
//
// Tiles lie in global memory in the order shared memory wants them, so that a tile is one linear copy: panels of 64 rows of 128
// bytes whose 16-byte units trade places by row, so that eight rows that an ldmatrix reads together meet all banks. It is the
// 128-byte swizzle that Hopper's warpgroup products know.
#pragma once
#include "half.cuh"

#define CHUNK 64
#define HEAD 128

// Halves of a tile: 64 x 128 (q, k, v, o; two panels) and 64 x 64 (T, P).
#define TILE (CHUNK * HEAD)
#define SQUARE (CHUNK * CHUNK)
#define PANEL (CHUNK * 128) // bytes

struct Shape {
    int key_heads, value_heads, pitch, ring, state_type;
    float eps;
};

// `count` new tokens at row `start` after `context` cached ones; its chunks begin at `first_chunk`.
struct Piece {
    int slot, context, start, count, first_chunk;
};

DEVICE int channel_count(const Shape &shape) { return (2 * shape.key_heads + shape.value_heads) * HEAD; }

// Address of a 16-byte unit of a tile.
DEVICE u32 tile_unit(u32 base, int row, int unit) { return base + (u32)(unit / 8 * PANEL + row * 128 + ((unit ^ row) & 7) * 16); }

// `Bytes` (a multiple of 16 Threads) as they lie.
template <int Threads, int Bytes> DEVICE void load_tile(u32 to, const f16 *from) {
#pragma unroll
    for (int i = threadIdx.x; i < Bytes / 16; i += Threads) copy_async_16(to + i * 16, from + i * 8);
}

// x sigmoid(x) in five instructions: relative error of a few 2^-22, and 0 below -87.
DEVICE float silu_short(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + exp2_fast(x * -1.4426950408889634f)));
    return x * inverse;
}

// ---- a state's element in its type ----

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
