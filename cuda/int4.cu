// Products with 4-bit weights (int4.cuh), y[rows, n] = x[rows, k] W[n, k]^T. `int4_stream_*`: up to 32 rows. `int4_tile_*`: any
// number, the portable path. `int4_expand`: W in fp16 for a library's product. Wider ones on Hopper are in int4_batch_hopper.cu.
#include "int4.cuh"

// ---- 1 to 8 rows ----

// The frame of stream_product (product.cuh) with UNITS units a warp, which share its reads of x, and stages of 128 columns. Two
// things keep the instructions few: nibbles are multiplied with their offset (256 or 16) on, and offset and zero point are
// taken away from the sum of a group, (256 + z) times the sum of its x, which a product with ones gives in the right lanes.
// The scale multiplies that sum in fp32, so no weight is ever rounded. SCALES: 1 for groups of 128 columns and more, 4 for
// smaller ones.
template <int UNITS, int SCALES> struct Int4Stage {
    uint4 words[UNITS][2];
    u32 scale[UNITS][SCALES], zeros[UNITS][SCALES];
};

template <int UNITS, int WARPS, int DEPTH, int SCALES> DEVICE void int4_stream(const Product &p) {
    __shared__ float4 sums[WARPS][UNITS][32];
    typedef Int4Stage<UNITS, SCALES> Stage;
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, pair = lane & 3;
    u32 units = p.n / UNIT, blocks = p.k / 64, stages = (blocks + 1) / 2;
    u32 shares = WARPS * p.parts, share = blockIdx.y * WARPS + warp;
    u32 begin = stages * share / shares, end = stages * (share + 1) / shares;
    u32 shift = group_shift(p), groups = p.k >> shift;

    const u8 *from[UNITS], *zeros = p.scales + (u64)p.n * groups * 2;
    u32 scales_of[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        u32 unit = min(blockIdx.x * UNITS + u, units - 1); // past the end: repeated, never stored
        from[u] = p.w + (u64)unit * blocks * 512 + lane_place();
        scales_of[u] = unit * groups * 8 + group;
    }
    auto load = [&](Stage &to, u32 stage) {
        u32 second = 2 * stage + 1 < blocks ? 512 : 0; // past the end: its x is zero
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            to.words[u][0] = load_streaming(from[u] + stage * 1024);
            to.words[u][1] = load_streaming(from[u] + stage * 1024 + second);
#pragma unroll
            for (int s = 0; s < SCALES; s++) {
                u32 at = SCALES == 1 ? stage >> (shift - 7) : min((stage * SCALES + s) * (128 / SCALES) >> shift, groups - 1);
                at = scales_of[u] + at * 8;
                to.scale[u][s] = load_scale(p, at);
                to.zeros[u][s] = p.zero_points ? __ldg(zeros + at) : 0x88u;
            }
        }
    };
    const f16 *row = p.x + (u64)group * p.k + 8 * pair;
    bool single = p.rows == 1;
    auto load_x = [&](uint4 (&x)[4], u32 stage) {
        if (single) {
            const u32 *words = (const u32 *)p.x + stage * 64 + lane;
            x[0].x = words[0], x[0].y = 2 * stage + 1 < blocks ? words[32] : 0;
            return;
        }
#pragma unroll
        for (u32 q = 0; q < 4; q++) {
            bool valid = group < p.rows && (q < 2 || 2 * stage + 1 < blocks);
            x[q] = valid ? *(const uint4 *)(row + stage * 128 + q * 32) : make_uint4(0, 0, 0, 0);
        }
    };
    float acc[UNITS][4];
#pragma unroll
    for (int u = 0; u < UNITS; u++) acc[u][0] = acc[u][1] = acc[u][2] = acc[u][3] = 0.0f;
    auto multiply = [&](const Stage &w, const uint4 (&loaded)[4]) {
        const u32 ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll
        for (int s = 0; s < SCALES; s++) {
            float sum[UNITS][4], of_x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int u = 0; u < UNITS; u++) sum[u][0] = sum[u][1] = sum[u][2] = sum[u][3] = 0.0f;
#pragma unroll
            for (int q = s * 4 / SCALES; q < (s + 1) * 4 / SCALES; q++) {
                uint4 x = single ? chunks_in_turn(q / 2 ? loaded[0].y : loaded[0].x, q % 2) : spread(loaded[q]);
                mma_16x8x16(of_x, ones, x.x, x.y);
                mma_16x8x16(of_x, ones, x.z, x.w);
#pragma unroll
                for (int u = 0; u < UNITS; u++) {
                    u32 a[4];
                    unpack_offset(word_of(w.words[u][q / 2], q % 2), a);
                    mma_16x8x16(sum[u], a, x.x, x.y);
                    unpack_offset(word_of(w.words[u][q / 2], q % 2 + 2), a);
                    mma_16x8x16(sum[u], a, x.z, x.w);
                }
            }
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                float2 scale = unpack_half2(w.scale[u][s]);
                float low = __uint_as_float(0x43800000u | (w.zeros[u][s] & 15) << 15);   // 256 + z
                float high = __uint_as_float(0x41800000u | (w.zeros[u][s] & 0xf0) << 15); // 16 + z
                acc[u][0] += scale.x * (sum[u][0] - low * of_x[0]), acc[u][1] += scale.x * (sum[u][1] - low * of_x[1]);
                acc[u][2] += scale.y * (sum[u][2] - high * of_x[0]), acc[u][3] += scale.y * (sum[u][3] - high * of_x[1]);
            }
        }
    };

    Stage w[DEPTH];
    uint4 x[2][4];
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
        if (begin + i < end) load(w[i], begin + i);
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (begin < end) load_x(x[0], begin);
    for (u32 first = begin; first < end; first += DEPTH) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            u32 stage = first + i;
            if (stage < end) {
                if (stage + 1 < end) load_x(x[(i + 1) % 2], stage + 1);
                multiply(w[i], x[i % 2]);
                if (stage + DEPTH < end) load(w[i], stage + DEPTH);
            }
        }
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++) sums[warp][u][lane] = make_float4(acc[u][0], acc[u][1], acc[u][2], acc[u][3]);
    __syncthreads();
    u32 unit = blockIdx.x * UNITS + warp;
    if (warp >= UNITS || unit >= units) return;
    float4 sum = sums[0][warp][lane];
#pragma unroll
    for (int other = 1; other < WARPS; other++) sum = add4(sum, sums[other][warp][lane]);
    if (single) sum = sum_of_columns(sum);
    stream_output(p, sum, unit, 0);
}

#ifndef STREAM_KERNELS
extern "C" __global__ void __launch_bounds__(256, 2) int4_stream_8(const __grid_constant__ Product p) { int4_stream<2, 8, 2, 1>(p); }
extern "C" __global__ void __launch_bounds__(128, 5) int4_stream_8_short(const __grid_constant__ Product p) { int4_stream<1, 4, 2, 1>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) int4_stream_8_small_groups(const __grid_constant__ Product p) { int4_stream<1, 8, 2, 4>(p); }
#endif

// ---- 9 to 32 rows ----

struct Int4Weights {
    static constexpr int COLS = 64;

    struct Tile {
        uint4 words;
        u32 scale, zeros; // of columns 0..31, or all
    };

    // A lane's place: its words, and the scales follow from it.
    DEVICE u32 step_bytes(const Product &) { return 512; }
    DEVICE const u8 *start(const Product &p, u32 unit, u32 block) {
        return p.w + ((u64)unit * (p.k / COLS) + block) * 512 + lane_place();
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
        uint2 picked[4];
        pick(w.words, picked);
        auto multiply = [&](int half, const Zeros &zeros) {
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                u32 a[4];
                unpack_picked(picked, half * 2 + odd, a);
#pragma unroll
                for (int j = 0; j < 4; j++) a[j] = sub_half2(a[j], j & 1 ? zeros.high : zeros.low);
#pragma unroll
                for (int t = 0; t < TILES; t++)
                    mma_16x8x16(sum[t], a, odd ? x[t][half].z : x[t][half].x, odd ? x[t][half].w : x[t][half].y);
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

extern "C" __global__ void __launch_bounds__(256, 2) int4_stream_16(const __grid_constant__ Product p) { stream_product<Int4Weights, 2, 6, 2>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) int4_stream_32(const __grid_constant__ Product p) { stream_product<Int4Weights, 4, 4, 1>(p); }

// ---- many rows ----

// A tile of ROWS rows of x by 128 rows of W, 64 columns of k at a time through a ring of stages. x is the A operand (16-byte chunks
// at `tile_place`); W is the B operand, a unit being two tiles of eight of its rows, made fp16 (scale included) in registers.
// Warps are 2 (rows of x) by 4 (rows of W).
#define INT4_STAGES 4

template <int ROWS> DEVICE void int4_tile(const Product &p) {
    extern __shared__ __align__(128) u8 shared[];
    constexpr int MT = ROWS / 32, X_BYTES = ROWS * 128, STAGE = X_BYTES + 8 * 512;
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp & 1, wn = warp >> 1;
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
                copy_async_16(to + tile_place(row, chunk), p.x + (valid ? (u64)(row0 + row) * p.k + block * 64 + chunk * 8 : 0), valid);
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
        u32 at_x = (block - begin) % INT4_STAGES * STAGE;
        const u8 *at_w = shared + at_x + X_BYTES;
        uint4 words[2];
#pragma unroll
        for (int u = 0; u < 2; u++) words[u] = *(const uint4 *)(at_w + (wn * 2 + u) * 512 + lane_place());
#pragma unroll
        for (u32 i = 0; i < 4; i++) { // 16 columns
            u32 a[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++) load_matrix_x4(a[m], base + at_x + tile_place(wm * (ROWS / 2) + m * 16 + (lane & 15), 2 * i + (lane >> 4)));
#pragma unroll
            for (int u = 0; u < 2; u++) {
                u32 b[4];
                unpack(word_of(words[u], i / 2 + i % 2 * 2), Zeros(zeros[u][i / 2]), b);
#pragma unroll
                for (int j = 0; j < 4; j++) b[j] = mul_half2(b[j], scale[u][i / 2][j & 1]);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma_16x8x16(acc[m][2 * u], a[m], b[0], b[2]);
                    mma_16x8x16(acc[m][2 * u + 1], a[m], b[1], b[3]);
                }
            }
        }
    }
    tile_output<MT>(p, acc, row0 + wm * (ROWS / 2), blockIdx.y * TILE_N + wn * 32);
}

extern "C" __global__ void __launch_bounds__(256, 1) int4_tile_64(const __grid_constant__ Product p) { int4_tile<64>(p); }
extern "C" __global__ void __launch_bounds__(256, 1) int4_tile_128(const __grid_constant__ Product p) { int4_tile<128>(p); }

// In one piece: the compiler would make four stores of it.
DEVICE void store_16(void *to, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// fp16 [n, k], row-major, from the packing: a warp a block, one lane's 16 bytes a thread. Bytes: 2.5 a weight. grid (ceil(k / 64 / 8),
// n / 16).
KERNEL int4_expand(const u8 *w, const u8 *scales, f16 *to, u32 n, u32 k, u32 group, u32 zero_points) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    u32 lane = threadIdx.x & 31, blocks = k / 64, unit = blockIdx.y, block = blockIdx.x * 8 + threadIdx.x / 32;
    if (block >= blocks) return;
    Product p = {};
    p.scales = scales, p.n = n, p.k = k, p.group = group, p.zero_points = zero_points;
    uint4 words = load_streaming(w + ((u64)unit * blocks + block) * 512 + lane_place());
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u64 at = scale_at(p, unit, block * 64 + half * 32);
        u32 both = load_scale(p, at), a[2][4];
        Zeros z(load_zeros(p, at));
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            unpack(word_of(words, half + 2 * odd), z, a[odd]);
#pragma unroll
            for (int j = 0; j < 4; j++) a[odd][j] = mul_half2(a[odd][j], (j & 1 ? both >> 16 : both & 0xffff) * 0x00010001u);
        }
        f16 *row = to + (u64)(unit * 16 + lane / 4) * k + block * 64 + half * 32 + lane % 4 * 8;
        store_16(row, spread(make_uint4(a[0][0], a[0][2], a[1][0], a[1][2])));
        store_16(row + 8 * (u64)k, spread(make_uint4(a[0][1], a[0][3], a[1][1], a[1][3])));
    }
}

