// 4-bit weights: w = (q - z) * s with q, z in 0..15 and a 16-bit s, shared by `group` columns (32, 64, 128...) of a row.
//
// Packing. W is cut into units of 16 rows and blocks of 64 columns; a unit's blocks follow each other, 512 bytes each: 16
// bytes a lane (lane = 4 * group + pair; at `lane_place`), word i = half + 2*odd for the mma.m16n8k16 of columns 32*half + 16*odd.., in their own
// order. Its nibbles j and j + 4 are the lane's fragment register a[j]: row group (j even) or group + 8 (j odd), columns c and
// c + 1 with c = 32*half + 16*odd + 2*pair + 8*(j / 2). Nibble j is at bits 4j + 2, nibble j + 4 at 16 + 4j + 2, modulo 32. Then scales
// [unit][group][8] words (rows r and r + 8), then zero points, if any, [unit][group][8] bytes (low nibble row r, high nibble
// row r + 8); both in `scales`.
//
// So x is a plain B operand, as warpgroup products and ldmatrix read it from shared memory; where a lane has 16 bytes of a row
// instead, `spread` makes B operands of them, or the lane picks its words of W among those of the other three (int4_ring_8,
// int4_stream_16 and _32).
//
// Nibbles become fp16 by bits: q at bits 2..5 under 0x5c00 is 256 + q, at bits 6..9 under 0x4c00 it is 16 + q, both exact.
#pragma once
#include "product.cuh"

DEVICE u32 lop_and_or(u32 a, u32 mask, u32 bits) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(a), "r"(mask), "r"(bits)); // (a & mask) | bits
    return out;
}
DEVICE u32 sub_half2(u32 a, u32 b) {
    u32 out;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
DEVICE u32 mul_half2(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

// The four fragment registers of a word, each with its offset: 256 + q in rows group, 16 + q in rows group + 8.
DEVICE void unpack_offset(u32 word, u32 (&a)[4]) {
    a[0] = lop_and_or(word, 0x003c003cu, 0x5c005c00u);
    a[1] = lop_and_or(word, 0x03c003c0u, 0x4c004c00u);
    word = __byte_perm(word, 0, 0x0321); // right by 8 bits, around
    a[2] = lop_and_or(word, 0x003c003cu, 0x5c005c00u);
    a[3] = lop_and_or(word, 0x03c003c0u, 0x4c004c00u);
}

// What takes the offsets and the zero points of rows group and group + 8 away, twice in a word.
struct Zeros {
    u32 low, high; // 256 + z, 16 + z
    __device__ __forceinline__ Zeros(u32 nibbles) {
        low = 0x5c005c00u | (nibbles & 15) * 0x00040004u;
        high = 0x4c004c00u | (nibbles & 0xf0) * 0x00040004u;
    }
};

// The four fragment registers of a word, as q - z.
DEVICE void unpack(u32 word, const Zeros &z, u32 (&a)[4]) {
    unpack_offset(word, a);
    a[0] = sub_half2(a[0], z.low), a[1] = sub_half2(a[1], z.high);
    a[2] = sub_half2(a[2], z.low), a[3] = sub_half2(a[3], z.high);
}

// Where a lane's 16 bytes are among a block's 512: lanes of groups 2, 3, 6 and 7 are swapped in pairs, so that lanes which pick from
// one of their group each (int4_ring_8) meet no bank twice.
DEVICE u32 lane_place() {
    u32 lane = threadIdx.x & 31;
    return (lane ^ (lane >> 3 & 1)) * 16;
}

// Transposes 4 by 4 words among the four lanes of a group: what each loaded of a row, columns 8 * pair.. of 32, becomes columns
// 8 * c + 2 * pair (and the next) in word c, as two B operands hold them. And back.
DEVICE uint4 spread(uint4 v) {
    bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    u32 a = __shfl_xor_sync(0xffffffffu, odd ? v.x : v.y, 1), b = __shfl_xor_sync(0xffffffffu, odd ? v.z : v.w, 1);
    if (odd) v.x = a, v.z = b;
    else v.y = a, v.w = b;
    a = __shfl_xor_sync(0xffffffffu, high ? v.x : v.z, 2), b = __shfl_xor_sync(0xffffffffu, high ? v.y : v.w, 2);
    if (high) v.x = a, v.y = b;
    else v.z = a, v.w = b;
    return v;
}

// Where a lane has columns 8 * pair.. of x it needs the same of W: half of a word of each of its group's four lanes. `picked`: of
// each, words pair / 2 * 2 and the next (of a block's two halves). The fragments of the block's i-th 16 columns so taken, with offsets.
DEVICE void unpack_picked(const uint2 (&picked)[4], int i, u32 (&a)[4]) {
    u32 turn = threadIdx.x & 1 ? 0x0321 : 0x3210; // brings the lane's half to the front
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const uint2 &both = picked[i % 2 * 2 + j];
        u32 word = __byte_perm(i / 2 ? both.y : both.x, 0, turn);
        a[2 * j] = lop_and_or(word, 0x003c003cu, 0x5c005c00u), a[2 * j + 1] = lop_and_or(word, 0x03c003c0u, 0x4c004c00u);
    }
}
// Picks them from the lanes' registers.
DEVICE void pick(uint4 own, uint2 (&picked)[4]) {
    bool odd = threadIdx.x & 2;
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        u32 from = (threadIdx.x & 28) + j;
        u32 x = __shfl_sync(0xffffffffu, own.x, from), y = __shfl_sync(0xffffffffu, own.y, from);
        u32 z = __shfl_sync(0xffffffffu, own.z, from), w = __shfl_sync(0xffffffffu, own.w, from);
        picked[j] = odd ? make_uint2(z, w) : make_uint2(x, y);
    }
}

// A single row needs one of the eight columns of B: so each takes every eighth chunk of 8 columns of k, which is how 128 bytes of x
// that a warp reads together, a word a lane, lie among its lanes; sums of the columns are added up at the end. These are the B
// operands of the `half`th 32 columns.
DEVICE uint4 chunks_in_turn(u32 word, u32 half) {
    u32 mine = (threadIdx.x & 31) / 4 - half * 4;
    return make_uint4(mine == 0 ? word : 0, mine == 1 ? word : 0, mine == 2 ? word : 0, mine == 3 ? word : 0);
}
// mma's d of such a product, its columns added up, in the first column.
DEVICE float4 sum_of_columns(float4 d) {
    d.x += d.y, d.z += d.w;
#pragma unroll
    for (u32 apart = 1; apart < 4; apart *= 2) {
        d.x += __shfl_xor_sync(0xffffffffu, d.x, apart);
        d.z += __shfl_xor_sync(0xffffffffu, d.z, apart);
    }
    return d;
}

DEVICE u32 word_of(uint4 words, int i) { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }

// Groups of 32 or of a power of two of 64 columns: shifts instead of divisions, which would cost more than the product.
DEVICE u32 group_shift(const Product &p) { return 31 - __clz(p.group); }

// Index of the scale (and zero point) of a lane, for the columns from `column`.
DEVICE u64 scale_at(const Product &p, u32 unit, u32 column) {
    u32 shift = group_shift(p);
    return ((u64)unit * (p.k >> shift) + (column >> shift)) * 8 + (threadIdx.x & 31) / 4;
}
DEVICE u32 load_scale(const Product &p, u64 at) { return __ldg((const u32 *)p.scales + at); }
DEVICE u32 load_zeros(const Product &p, u64 at) {
    return p.zero_points ? __ldg(p.scales + ((u64)p.n * (p.k >> group_shift(p)) * 2 + at)) : 0x88u;
}
