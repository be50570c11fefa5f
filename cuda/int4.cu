// Products with 4-bit weights, y[rows, n] = x[rows, k] W[n, k]^T, and the packing they read. w = (q - z) * s with q, z in 0..15
// and a 16-bit s, shared by `group` columns (32, 64, 128...) of a row. Bytes: packed weights, scales and zero points once.
//
// Packing. W is cut into units of 16 rows and blocks of 64 columns; a unit's blocks follow each other, 512 bytes each: 16
// bytes a lane (lane = 4 * group + pair), word i = 2*half + odd for one mma.m16n8k16. Its nibbles j (bits 4j) and j + 4 (bits
// 16 + 4j) are the lane's fragment register a[j]: row group (j even) or group + 8 (j odd), columns c and c + 1 with
// c = 32*half + 8*pair + 4*odd + 2*(j / 2). Then scales [unit][group][8] words (rows r and r + 8), then zero points, if any,
// [unit][group][8] bytes (low nibble row r, high nibble row r + 8); both in `scales`.
//
// Nibbles become fp16 by bits: 0x6400 | q is 1024 + q, and 0x6400 | q << 4 is 1024 + 16 q; taking away 1024 + z, or
// multiplying by 1/16 and taking away 64 + z, leaves q - z without rounding.
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

// What takes the zero points of rows group and group + 8 away.
struct Zeros {
    u32 low, high; // 1024 + z and -(64 + z), twice
    __device__ __forceinline__ Zeros(u32 nibbles) {
        low = 0x64006400u | (nibbles & 15) * 0x00010001u;
        high = 0xd400d400u | (nibbles & 0xf0) * 0x00010001u;
    }
};

// The four fragment registers of a word, as q - z.
DEVICE void unpack(u32 word, const Zeros &z, u32 (&a)[4]) {
    const u32 sixteenth = 0x2c002c00u;
    a[0] = sub_half2(lop_and_or(word, 0x000f000fu, 0x64006400u), z.low);
    a[1] = fma_half2(lop_and_or(word, 0x00f000f0u, 0x64006400u), sixteenth, z.high);
    word >>= 8;
    a[2] = sub_half2(lop_and_or(word, 0x000f000fu, 0x64006400u), z.low);
    a[3] = fma_half2(lop_and_or(word, 0x00f000f0u, 0x64006400u), sixteenth, z.high);
}

DEVICE u32 word_of(uint4 words, int i) { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }

// Index of the scale (and zero point) of a lane, for the columns from `column`.
DEVICE u64 scale_at(const Product &p, u32 unit, u32 column) {
    return ((u64)unit * (p.k / p.group) + column / p.group) * 8 + (threadIdx.x & 31) / 4;
}
DEVICE u32 load_scale(const Product &p, u64 at) { return __ldg((const u32 *)p.scales + at); }
DEVICE u32 load_zeros(const Product &p, u64 at) {
    return p.zero_points ? __ldg(p.scales + (u64)p.n * (p.k / p.group) * 2 + at) : 0x88u;
}

struct Int4Weights {
    static constexpr int COLS = 64;

    struct Tile {
        uint4 words;
        u32 scale, zeros; // of columns 0..31, or all
    };

    // A lane's place: its words, and the scales follow from it.
    DEVICE u32 step_bytes(const Product &) { return 512; }
    DEVICE const u8 *start(const Product &p, u32 unit, u32 block) {
        return p.w + ((u64)unit * (p.k / COLS) + block) * 512 + (threadIdx.x & 31) * 16;
    }
    DEVICE void load(const Product &p, Tile &tile, const u8 *from) {
        tile.words = load_streaming(from);
        u32 block = (u32)((u64)(from - p.w) / 512) - blockIdx.x * (p.k / COLS);
        u64 at = scale_at(p, blockIdx.x, block * COLS);
        tile.scale = load_scale(p, at);
        tile.zeros = load_zeros(p, at);
    }

    // The scale multiplies sums in fp32, so no weight is ever rounded.
    template <int TILES>
    DEVICE void accumulate(const Product &p, float (&acc)[TILES][4], const Tile &w, const uint4 (&x)[TILES][2], u32 block) {
        float sum[TILES][4];
        auto clear = [&] {
#pragma unroll
            for (int t = 0; t < TILES; t++) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0.0f;
        };
        auto add = [&](u32 both) {
            float2 scale = unpack_half2(both);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                acc[t][0] += scale.x * sum[t][0], acc[t][1] += scale.x * sum[t][1];
                acc[t][2] += scale.y * sum[t][2], acc[t][3] += scale.y * sum[t][3];
            }
        };
        auto multiply = [&](int half, const Zeros &zeros) {
            u32 a[4], b[4];
            unpack(word_of(w.words, 2 * half), zeros, a);
            unpack(word_of(w.words, 2 * half + 1), zeros, b);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                mma_16x8x16(sum[t], a, x[t][half].x, x[t][half].y);
                mma_16x8x16(sum[t], b, x[t][half].z, x[t][half].w);
            }
        };
        Zeros zeros(w.zeros);
        clear();
        multiply(0, zeros);
        if (p.group == 32) {
            add(w.scale);
            clear();
            u64 at = scale_at(p, blockIdx.x, block * COLS + 32);
            multiply(1, Zeros(load_zeros(p, at)));
            add(load_scale(p, at));
        } else {
            multiply(1, zeros);
            add(w.scale);
        }
    }
};

extern "C" __global__ void __launch_bounds__(256, 2) int4_stream_8(const __grid_constant__ Product p) { stream_product<Int4Weights, 1, 8, 4>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) int4_stream_16(const __grid_constant__ Product p) { stream_product<Int4Weights, 2, 6, 2>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) int4_stream_32(const __grid_constant__ Product p) { stream_product<Int4Weights, 4, 4, 1>(p); }

// ---- many rows ----

// A tile of ROWS rows of x by 128 rows of W, 64 columns of k at a time through a ring of stages. x is the A operand in the
// packing's order of k (16-byte chunk c of a row at c ^ 4 * (row & 1)); W is the B operand, a unit being two tiles of eight
// of its rows, made fp16 (scale included) in registers. Warps are 2 (rows of x) by 4 (rows of W).
#define INT4_STAGES 4

template <int ROWS> DEVICE void int4_tile(const Product &p) {
    extern __shared__ __align__(128) u8 shared[];
    constexpr int MT = ROWS / 32, X_BYTES = ROWS * 128, STAGE = X_BYTES + 8 * 512;
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp & 1, wn = warp >> 1, group = lane >> 2, pair = lane & 3;
    u32 row0 = blockIdx.x * ROWS, unit0 = blockIdx.y * 8, units = p.n / UNIT, blocks = p.k / 64;
    u32 begin = blocks * blockIdx.z / p.parts, end = blocks * (blockIdx.z + 1) / p.parts;
    u32 base = shared_address(shared);
    let_next_kernel_start();
    wait_for_previous_kernel();

    auto fill = [&](u32 block) {
        if (block < end) {
            u32 to = base + (block - begin) % INT4_STAGES * STAGE;
#pragma unroll
            for (u32 i = 0; i < ROWS * 8 / 256; i++) {
                u32 row = threadIdx.x / 8 + i * 32, chunk = threadIdx.x & 7;
                bool valid = row0 + row < p.rows;
                copy_async_16(to + row * 128 + (chunk ^ ((row & 1) << 2)) * 16,
                              p.x + (valid ? (u64)(row0 + row) * p.k + block * 64 + chunk * 8 : 0), valid);
            }
            u32 unit = min(unit0 + warp, units - 1); // past the end: repeated, never stored
            copy_async_16(to + X_BYTES + threadIdx.x * 16, p.w + ((u64)unit * blocks + block) * 512 + lane * 16);
        }
        copy_async_commit();
    };
    float acc[MT][4][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < 4; n++) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.0f;
#pragma unroll
    for (int i = 0; i < INT4_STAGES - 1; i++) fill(begin + i);
    u32 scale[2][2][2], zeros[2][2]; // [unit][half](row, row + 8)
    for (u32 block = begin; block < end; block++) {
        if (block == begin || block * 64 % p.group == 0 || p.group < 64) {
#pragma unroll
            for (int u = 0; u < 2; u++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u64 at = scale_at(p, min(unit0 + wn * 2 + u, units - 1), block * 64 + half * 32);
                    u32 both = load_scale(p, at);
                    scale[u][half][0] = (both & 0xffff) * 0x00010001u, scale[u][half][1] = (both >> 16) * 0x00010001u;
                    zeros[u][half] = load_zeros(p, at);
                }
        }
        copy_async_wait<INT4_STAGES - 2>();
        __syncthreads();
        fill(block + INT4_STAGES - 1);
        const u8 *stage = shared + (block - begin) % INT4_STAGES * STAGE;
        uint4 words[2];
#pragma unroll
        for (int u = 0; u < 2; u++) words[u] = *(const uint4 *)(stage + X_BYTES + (wn * 2 + u) * 512 + lane * 16);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 x[MT][2];
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    u32 row = wm * (ROWS / 2) + m * 16 + h * 8 + group;
                    x[m][h] = *(const uint4 *)(stage + row * 128 + ((half * 4 + pair) ^ ((row & 1) << 2)) * 16);
                }
#pragma unroll
            for (int u = 0; u < 2; u++) {
                Zeros z(zeros[u][half]);
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    u32 b[4];
                    unpack(word_of(words[u], 2 * half + odd), z, b);
#pragma unroll
                    for (int j = 0; j < 4; j++) b[j] = mul_half2(b[j], scale[u][half][j & 1]);
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        u32 a[4] = {odd ? x[m][0].z : x[m][0].x, odd ? x[m][1].z : x[m][1].x, odd ? x[m][0].w : x[m][0].y,
                                    odd ? x[m][1].w : x[m][1].y};
                        mma_16x8x16(acc[m][2 * u], a, b[0], b[2]);
                        mma_16x8x16(acc[m][2 * u + 1], a, b[1], b[3]);
                    }
                }
            }
        }
    }
    tile_output<MT>(p, acc, row0 + wm * (ROWS / 2), blockIdx.y * TILE_N + wn * 32);
}

extern "C" __global__ void __launch_bounds__(256, 1) int4_tile_64(const __grid_constant__ Product p) { int4_tile<64>(p); }
extern "C" __global__ void __launch_bounds__(256, 1) int4_tile_128(const __grid_constant__ Product p) { int4_tile<128>(p); }

// fp16 [n, k], row-major, from the packing: one lane's 16 bytes a thread. Bytes: 2.5 a weight.
KERNEL int4_expand(const u8 *w, const u8 *scales, f16 *to, u32 n, u32 k, u32 group, u32 zero_points) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)n * k / 32) return;
    Product p = {};
    p.scales = scales, p.n = n, p.k = k, p.group = group, p.zero_points = zero_points;
    u32 lane = i & 31, blocks = k / 64;
    u64 tile = i >> 5;
    u32 unit = tile / blocks, block = tile % blocks;
    uint4 words = load_streaming(w + i * 16);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u64 at = scale_at(p, unit, block * 64 + half * 32);
        u32 both = load_scale(p, at), a[2][4];
        Zeros z(load_zeros(p, at));
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            unpack(word_of(words, 2 * half + odd), z, a[odd]);
#pragma unroll
            for (int j = 0; j < 4; j++) a[odd][j] = mul_half2(a[odd][j], (j & 1 ? both >> 16 : both & 0xffff) * 0x00010001u);
        }
        f16 *row = to + (u64)(unit * 16 + lane / 4) * k + block * 64 + half * 32 + lane % 4 * 8;
        *(uint4 *)row = make_uint4(a[0][0], a[0][2], a[1][0], a[1][2]);
        *(uint4 *)(row + 8 * (u64)k) = make_uint4(a[0][1], a[0][3], a[1][1], a[1][3]);
    }
}

// ---- packing, once, at load ----

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
    u64 at = (u64)row * (s.k / 8) + column / 8;
    u32 word = s.source == FROM_SYNTHETIC ? noise((u32)at, s.word_keys) : s.words[at];
    return word >> 4 * (column & 7) & 15;
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

// One word a thread, and with it what its lane holds of it: words of rows that another source brings keep those nibbles.
KERNEL int4_pack_words(const __grid_constant__ Packed s, u32 *to) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)s.total * s.k / 8) return;
    u32 lane = i >> 2 & 31, blocks = s.k / 64, half = i >> 1 & 1, odd = i & 1;
    u64 tile = i >> 7;
    u32 unit = tile / blocks, block = tile % blocks;
    u32 word = to[i];
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        u32 row = source_row(s, unit * 16 + lane / 4 + (j & 1) * 8);
        if (row >= s.n) continue;
        u32 column = block * 64 + half * 32 + lane % 4 * 8 + odd * 4 + j / 2 * 2;
        word &= ~(0x000f000fu << 4 * j);
        word |= (source_q(s, row, column) | source_q(s, row, column + 1) << 16) << 4 * j;
    }
    to[i] = word;
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
