// Makes the packing of int4.cuh from the published formats, or from noise, once, at load.
#include "half.cuh"

#define FROM_COLUMNS 0   // compressed-tensors: words [n][k / 8] along columns, zeros [n / 8][k / group] along rows (0: all are 8),
                         // scales [n][k / group]
#define FROM_AWQ 1       // AutoAWQ: words [k][n / 8] along rows, zeros [k / group][n / 8], scales [k / group][n]
#define FROM_SYNTHETIC 2 // the noise of engine/model/synthetic.rs, bit for bit

struct Packed {
    const u32 *words, *zeros;
    const u16 *scales;
    u32 n, k, group, source;
    u32 bfloat;               // scales are bf16
    u32 block, spread, first; // row r becomes row r / block * spread + r % block + first; spread 0: r + first
    u32 total;                // rows of the matrix written
    u32 word_keys[2], zero_keys[2], scale; // synthetic
    u32 drawn_zeros;                       // synthetic: zero points are drawn, else 8
    u32 padding;
};

DEVICE u32 noise(u32 index, const u32 (&keys)[2]) {
    u32 x = index ^ keys[0];
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x += keys[1];
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

DEVICE u32 awq_shift(u32 row) { return 4 * ((row & 7) / 2 + (row & 1) * 4); }

// Which row of the source a row of the matrix is; n and above when it is none of this source's.
DEVICE u32 source_row(const Packed &s, u32 row) {
    if (row < s.first) return 0xffffffffu;
    row -= s.first;
    if (s.spread == 0) return row;
    return row % s.spread < s.block ? row / s.spread * s.block + row % s.spread : 0xffffffffu;
}

DEVICE u32 source_q(const Packed &s, u32 row, u32 column) {
    if (s.source == FROM_AWQ) return s.words[(u64)column * (s.n / 8) + row / 8] >> awq_shift(row) & 15;
    if (s.source == FROM_SYNTHETIC) {
        u32 drawn = noise(row * s.k + column, s.word_keys);
        return (drawn >> 29) + (drawn >> 26 & 7) + (drawn >> 25 & 1);
    }
    return s.words[(u64)row * (s.k / 8) + column / 8] >> 4 * (column & 7) & 15;
}

DEVICE u32 source_z(const Packed &s, u32 row, u32 group) {
    u32 groups = s.k / s.group;
    if (s.source == FROM_AWQ) return s.zeros[(u64)group * (s.n / 8) + row / 8] >> awq_shift(row) & 15;
    if (s.source == FROM_SYNTHETIC) return s.drawn_zeros ? 7 + (noise(row * groups + group, s.zero_keys) >> 31) : 8;
    return s.zeros ? s.zeros[(u64)(row / 8) * groups + group] >> 4 * (row & 7) & 15 : 8;
}

DEVICE u16 source_scale(const Packed &s, u32 row, u32 group) {
    if (s.source == FROM_SYNTHETIC) return s.scale;
    u16 scale = s.scales[s.source == FROM_AWQ ? (u64)group * s.n + row : (u64)row * (s.k / s.group) + group];
    return s.bfloat ? float_to_half(__uint_as_float((u32)scale << 16)) : scale;
}

DEVICE u32 rotate_left(u32 word, u32 by) { return word << by | word >> (32 - by); }

// One word a thread, and with it what its lane holds of it: words of rows that another source brings keep those nibbles.
KERNEL int4_pack_words(const __grid_constant__ Packed s, u32 *to) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)s.total * s.k / 8) return;
    u32 place = i >> 2 & 31, lane = place ^ (place >> 3 & 1), blocks = s.k / 64;
    u64 tile = i >> 7;
    u32 unit = tile / blocks, block = tile % blocks;
    u32 word = rotate_left(to[i], 30);
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        u32 row = source_row(s, unit * 16 + lane / 4 + (j & 1) * 8);
        if (row >= s.n) continue;
        u32 column = block * 64 + (i & 1) * 32 + (i >> 1 & 1) * 16 + lane % 4 * 2 + j / 2 * 8;
        word &= ~(0x000f000fu << 4 * j);
        word |= (source_q(s, row, column) | source_q(s, row, column + 1) << 16) << 4 * j;
    }
    to[i] = rotate_left(word, 2);
}

// One (unit, group, r) a thread: two scales and two zero points.
KERNEL int4_pack_scales(const __grid_constant__ Packed s, u16 *scales, u8 *zeros, u32 *faults) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u32 groups = s.k / s.group;
    if (i >= (u64)s.total / 2 * groups) return;
    u32 r = i & 7, group = (i >> 3) % groups, unit = (u32)((i >> 3) / groups);
    u32 nibbles = zeros ? zeros[i] : 0;
    for (u32 j = 0; j < 2; j++) {
        u32 row = source_row(s, unit * 16 + r + j * 8);
        if (row >= s.n) continue;
        u16 scale = source_scale(s, row, group);
        if ((scale & 0x7c00) == 0x7c00) atomicAdd(faults, 1);
        scales[i * 2 + j] = scale;
        u32 z = source_z(s, row, group);
        nibbles = (nibbles & ~(15u << 4 * j)) | z << 4 * j;
    }
    if (zeros) zeros[i] = nibbles;
}
