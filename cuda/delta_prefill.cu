// Gated delta net for prompts: the chunked form on tensor cores, for heads of 128 x 128.
//
// A prompt chunk of a step (a piece) is cut into chunks of 64 tokens. With G the running sum of g inside a chunk and
// D_ij = e^(G_i - G_j) for i >= j, per value head:
//   A = strictly lower(diag(beta) K K^T * D),  T = (I + A)^-1 diag(beta),  P = lower(Q K^T) * D
//   scan over chunks:  V' = T (V - diag(e^G) K S);  O = diag(e^G) Q S + P V';  S = e^G_last S + K^T diag(e^(G_last - G)) V'
// (Yang et al., Gated Delta Networks; the WY form of DeltaNet with U = T V and W = T diag(e^G) K left as products that the scan
// makes: T is a quarter of U and W together.) Every exponent is <= 0. Rows past the end of a piece count as k = q = v = 0,
// beta = 0, g = 0, which leaves S as it is.
//
// Four launches: `delta_prepare` (convolution, SiLU, L2 norms, gates), `delta_chunks` (all chunks at once: T in fp32 by blocks, and P),
// `delta_scan` (delta_scan.cu; serial over chunks), `delta_finish` (gated norm, convolution window). Hopper's scan
// (delta_scan_hopper.cu) does what the last two do.
// S, the residual V - diag(e^G) K S and V' enter products as fp16, sums stay fp32. o is not normalised yet and still fits fp16 if S
// does, which a product has as fp16 anyway: |o| <= |q| |column of S| <= sqrt(1/128) sqrt(128) max |S|. What is below the normal
// range of fp16 is far below sqrt(eps) of the norm.
//
// Shapes: mixed [rows, pitch] fp16 with u (q, k, v channels), z, b, a; tiles of conv [chunks][heads of q, k, v][64][128], of o
// [chunks][value_heads][64][128], of T and P [..][64][64], all fp16 and swizzled as shared memory wants them (delta_prefill.cuh);
// G and beta [..][64] fp32, decays [..][e^G, e^(G_last - G)][64] fp32; state [slots][value_heads][128 dv][128 dk] in fp32, fp16
// or bf16; window [slots][ring][channels] fp16, position p at p % ring.
// Bytes a token and value head: u 256 (and its share of q, k) read and written, T and P 128 each, o 256 written and read (not on
// Hopper), z and y 256 each.
#include "delta_prefill.cuh"

#define LOG2_E 1.4426950408889634f
#define AHEAD 8  // rows of inputs that a lane of the convolution has in flight
// Blocks that a multiprocessor has registers for: with one more, sm_80 and sm_120 spill in delta_chunks and sm_120 in delta_prepare.
#define CHUNKS_BLOCKS (__CUDA_ARCH__ == 900 ? 5 : 4)
#define PREPARE_BLOCKS (__CUDA_ARCH__ > 900 ? 3 : 4)
#define PITCH 68 // floats in a row of a 64 x 64 fp32 tile: 16-byte aligned, rows shifted by four banks

// ---- convolution, SiLU, L2 norms, gates ----

// With the short exponential.
DEVICE float softplus_fast(float x) { return x > 20.0f ? x : log1pf(__expf(x)); }

// beta and the running sum of g over a chunk for one value head: a warp, two tokens a lane.
DEVICE void make_gates(const f16 *mixed, float a_log, float dt_bias, float *g_out, float *beta_out, const Piece &piece, int first,
                       int head, const Shape &shape) {
    int lane = threadIdx.x % 32;
    f16 raw[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++) { // past the end the last token, which is not used
        u64 row = piece.start + min(first + i * 32 + lane, piece.count - 1);
        const f16 *gates = mixed + row * shape.pitch + channel_count(shape) + shape.value_heads * HEAD + head;
        raw[i][0] = gates[0], raw[i][1] = gates[shape.value_heads];
    }
    float g[2], rate = -expf(a_log);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        bool valid = first + i * 32 + lane < piece.count;
        beta_out[i * 32 + lane] = valid ? sigmoid(half_to_float(raw[i][0])) : 0.0f;
        g[i] = valid ? rate * softplus_fast(half_to_float(raw[i][1]) + dt_bias) : 0.0f;
    }
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        float before[2] = {__shfl_up_sync(0xffffffffu, g[0], offset), __shfl_up_sync(0xffffffffu, g[1], offset)};
        if (lane >= offset) g[0] += before[0], g[1] += before[1];
    }
    g_out[lane] = g[0];
    g_out[32 + lane] = g[1] + __shfl_sync(0xffffffffu, g[0], 31);
}

// Convolution, SiLU and, if Normed, L2 norm times `scale` of 16 tokens of a head: half a warp, eight channels a lane. Nothing
// branches on where the piece ends (past it the last token is taken again and zeros are stored): so the history moves by names of
// registers and not by instructions.
template <bool Normed>
DEVICE void convolve(const f16 *mixed, const float *taps, const f16 *window, f16 *tile, const Piece &piece, int first, int row, int channel,
                     float scale, bool exists, const Shape &shape) {
    int lane = threadIdx.x % 32, channels = channel_count(shape), end = piece.count - 1;
    float tap[4][8], history[3][8];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float4 low = *(const float4 *)(taps + j * channels + channel), high = *(const float4 *)(taps + j * channels + channel + 4);
        tap[j][0] = low.x, tap[j][1] = low.y, tap[j][2] = low.z, tap[j][3] = low.w;
        tap[j][4] = high.x, tap[j][5] = high.y, tap[j][6] = high.z, tap[j][7] = high.w;
    }
    const char *from = (const char *)(mixed + (u64)piece.start * shape.pitch + channel);
    u32 pitch = shape.pitch * 2; // bytes
    auto input = [&](int at) { return *(const uint4 *)(from + (u64)(u32)min(at, end) * pitch); };
    uint4 inputs[AHEAD], before[3]; // AHEAD always in flight
#pragma unroll
    for (int i = 0; i < AHEAD; i++) inputs[i] = input(first + i);
#pragma unroll
    for (int j = 0; j < 3; j++) {
        int at = first - 3 + j; // in the piece; before its start the window has it
        before[j] = make_uint4(0, 0, 0, 0);
        if (at >= 0)
            before[j] = input(at);
        else if (piece.context + at >= 0)
            before[j] = *(const uint4 *)(window + ((u64)piece.slot * shape.ring + (piece.context + at) % shape.ring) * channels + channel);
    }
#pragma unroll
    for (int j = 0; j < 3; j++) unpack_half8(before[j], history[j]);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float u[8], c[8];
        unpack_half8(inputs[i % AHEAD], u);
        if (i + AHEAD < 16) inputs[i % AHEAD] = input(first + i + AHEAD);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            c[e] = silu_short(tap[0][e] * history[0][e] + tap[1][e] * history[1][e] + tap[2][e] * history[2][e] + tap[3][e] * u[e]);
            history[0][e] = history[1][e], history[1][e] = history[2][e], history[2][e] = u[e];
        }
        if (Normed) {
            float squares = 0.0f;
#pragma unroll
            for (int e = 0; e < 8; e++) squares += c[e] * c[e];
#pragma unroll
            for (int offset = 1; offset < 16; offset *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
            float by = rsqrtf(squares + 1e-6f) * scale;
#pragma unroll
            for (int e = 0; e < 8; e++) c[e] *= by;
        }
        uint4 packed = pack_half8(c);
        if (first + i > end) packed = make_uint4(0, 0, 0, 0);
        if (exists) *(uint4 *)(tile + tile_unit(0, row + i, lane % 16) / 2) = packed;
    }
}

// Grid (heads of q, k, v / 2 rounded up + value_heads / 4 rounded up, chunks), 128 threads. In the first blocks a warp takes 16 tokens
// of two heads, eight channels a lane, and slides over them; in the others it makes the gates of a value head.
KERNEL __launch_bounds__(128, PREPARE_BLOCKS) delta_prepare(const f16 *mixed, const float *taps, const float *a_log, const float *dt_bias,
                                               const f16 *window, f16 *conv, float *g_out, float *beta_out, const Piece *pieces,
                                               const int2 *chunks, const Shape shape) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    int2 chunk = chunks[blockIdx.y];
    Piece piece = pieces[chunk.x];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads = channel_count(shape) / HEAD;
    int gate_head = ((int)blockIdx.x - (heads + 1) / 2) * 4 + warp;
    if (gate_head >= 0) {
        if (gate_head >= shape.value_heads) return;
        u64 at = ((u64)blockIdx.y * shape.value_heads + gate_head) * CHUNK;
        return make_gates(mixed, a_log[gate_head], dt_bias[gate_head], g_out + at, beta_out + at, piece, chunk.y, gate_head, shape);
    }
    int head = blockIdx.x * 2 + lane / 16, first = chunk.y + warp * 16;
    bool exists = head < heads; // the last block of an odd number has half its lanes idle
    int channel = (exists ? head : 0) * HEAD + lane % 16 * 8;
    f16 *tile = conv + ((u64)blockIdx.y * heads + head) * TILE;
    if (blockIdx.x < shape.key_heads) { // both heads are of q or k
        float scale = head < shape.key_heads ? 0.08838834764831845f : 1.0f; // 1 / sqrt(128)
        convolve<true>(mixed, taps, window, tile, piece, first, warp * 16, channel, scale, exists, shape);
    } else {
        convolve<false>(mixed, taps, window, tile, piece, first, warp * 16, channel, 1.0f, exists, shape);
    }
}

// ---- within chunks ----

// out = sign * left right, all Size x Size with Size a multiple of 16, in fp32 tiles of PITCH; `threads` threads from 0, each
// four columns of Size * Size / 4 / threads rows.
template <int Size, int Threads> DEVICE void multiply(float *out, const float *left, const float *right, float sign, int thread) {
    constexpr int COLUMNS = Size / 4, ROWS = Size * COLUMNS / Threads, STRIDE = Threads / COLUMNS;
    int row = thread / COLUMNS, column = thread % COLUMNS * 4;
    float4 sum[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 2
    for (int k = 0; k < Size; k += 4) {
        float4 b[4];
#pragma unroll
        for (int i = 0; i < 4; i++) b[i] = *(const float4 *)(right + (k + i) * PITCH + column);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float4 a = *(const float4 *)(left + (row + r * STRIDE) * PITCH + k);
            sum[r].x += a.x * b[0].x + a.y * b[1].x + a.z * b[2].x + a.w * b[3].x;
            sum[r].y += a.x * b[0].y + a.y * b[1].y + a.z * b[2].y + a.w * b[3].y;
            sum[r].z += a.x * b[0].z + a.y * b[1].z + a.z * b[2].z + a.w * b[3].z;
            sum[r].w += a.x * b[0].w + a.y * b[1].w + a.z * b[2].w + a.w * b[3].w;
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        *(float4 *)(out + (row + r * STRIDE) * PITCH + column) = make_float4(sign * sum[r].x, sign * sum[r].y, sign * sum[r].z, sign * sum[r].w);
}

// t = (I + a)^-1 for a strictly lower 64 x 64 tile of which only the 16 x 16 blocks on and below the diagonal count; its blocks
// above serve as scratch, and most of those of t stay as they are. 128 threads; t may be in use until all have come; ends
// with a barrier. Forward substitution in the four diagonal blocks, then [[P, 0], [B, Q]]^-1 = [[P', 0], [-Q' B P', Q']].
DEVICE void invert(float *t, float *a) {
    int thread = threadIdx.x, warp = thread / 32, column = thread % 16;
    const float *block = a + warp * 16 * PITCH + warp * 16;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < i; j += 4) {
            float4 row = *(const float4 *)(block + i * PITCH + j); // the same for all lanes
            sum -= row.x * x[j];
            if (j + 1 < i) sum -= row.y * x[j + 1];
            if (j + 2 < i) sum -= row.z * x[j + 2];
            if (j + 3 < i) sum -= row.w * x[j + 3];
        }
        x[i] = sum;
    }
    __syncthreads();
    // Lanes 16 up: the block to the right of an even one, zeros that the products of 32 read.
    bool own = thread % 32 < 16;
    if (own || warp % 2 == 0) {
#pragma unroll
        for (int i = 0; i < 16; i++) t[(warp * 16 + i) * PITCH + warp * 16 + thread % 32] = own ? x[i] : 0.0f;
    }
    __syncthreads();
    int half = thread / 64, corner = half * 32; // two pairs of 16 x 16 blocks, 64 threads each
    float *scratch = a + corner * PITCH + corner + 16;
    multiply<16, 64>(scratch, a + (corner + 16) * PITCH + corner, t + corner * PITCH + corner, 1.0f, thread % 64);
    __syncthreads();
    multiply<16, 64>(t + (corner + 16) * PITCH + corner, t + (corner + 16) * PITCH + corner + 16, scratch, -1.0f, thread % 64);
    __syncthreads();
    multiply<32, 128>(a + 32, a + 32 * PITCH, t, 1.0f, thread);
    __syncthreads();
    multiply<32, 128>(t + 32 * PITCH, t + 32 * PITCH + 32, a + 32, -1.0f, thread);
    __syncthreads();
}

// `Bytes` of shared memory to `to`, by 128 threads.
template <int Bytes> DEVICE void write_out(f16 *to, u32 from) {
#pragma unroll
    for (int i = threadIdx.x; i < Bytes / 16; i += 128) {
        uint4 value;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(from + i * 16) : "memory");
        ((uint4 *)to)[i] = value;
    }
}

// Grid (value_heads, chunks), 128 threads. K K^T and Q K^T are made again for each value head of a key head: blocks that each
// hold one tile beat fewer that keep both products in registers. Where rows further down have more to do, a warp takes the w-th block
// of 16 of one product and the w-th from the end of the other. A and T take the place of K and Q.
KERNEL __launch_bounds__(128, CHUNKS_BLOCKS) delta_chunks(const f16 *conv, const float *g_in, const float *beta_in, f16 *t_out, f16 *p_out,
                                              float *decays_out, const Shape shape) {
    extern __shared__ __align__(128) unsigned char shared[];
    float *a_tile = (float *)shared, *t_tile = a_tile + CHUNK * PITCH;
    float *beta = t_tile + CHUNK * PITCH, *g_sum = beta + CHUNK; // g_sum in powers of two
    u32 k_tile = shared_address(shared), q_tile = k_tile + TILE * 2, p_tile = shared_address(t_tile);
    int thread = threadIdx.x, lane = thread % 32, group = lane / 4, pair = lane % 4;
    int warp = __shfl_sync(0xffffffffu, thread / 32, 0); // known to be the same for all lanes, so branches on it are cheap
    wait_for_previous_kernel();
    let_next_kernel_start();
    int channels = channel_count(shape), head = blockIdx.x, key_head = head / (shape.value_heads / shape.key_heads);
    const f16 *tiles = conv + (u64)blockIdx.y * channels * CHUNK;
    u64 tile = (u64)blockIdx.y * shape.value_heads + head;
    load_tile<128, TILE * 2>(k_tile, tiles + (u64)(shape.key_heads + key_head) * TILE);
    load_tile<128, TILE * 2>(q_tile, tiles + (u64)key_head * TILE);
    copy_async_commit();
    if (thread < CHUNK) {
        g_sum[thread] = g_in[tile * CHUNK + thread] * LOG2_E;
        beta[thread] = beta_in[tile * CHUNK + thread];
    }
    copy_async_wait<0>();
    __syncthreads();
    float from = thread < CHUNK ? 0.0f : g_sum[CHUNK - 1], sum = g_sum[thread % CHUNK];
    decays_out[tile * (2 * CHUNK) + thread] = exp2_fast(thread < CHUNK ? sum : from - sum);

    // 16 rows of each product against the tokens up to their last; later ones are masked anyway.
    int k_block = 3 - warp, q_block = warp;
    float kk[8][4], qk[8][4];
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) kk[i][j] = qk[i][j] = 0.0f;
    u32 k_at = tile_unit(k_tile, k_block * 16 + lane % 16, lane / 16), q_at = tile_unit(q_tile, q_block * 16 + lane % 16, lane / 16);
    u32 b_at = tile_unit(k_tile, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < HEAD / 16; step++) {
        u32 from_k[4], from_q[4], panel = step / 4 * PANEL, swap = step % 4 * 32; // units of 128-byte rows trade places
        load_matrix_x4(from_k, (k_at ^ swap) + panel);
        load_matrix_x4(from_q, (q_at ^ swap) + panel);
#pragma unroll
        for (int block = 0; block < 4; block++) {
            if (block > k_block && block > q_block) continue;
            u32 b[4];
            load_matrix_x4(b, (b_at ^ swap) + panel + block * 16 * 128);
            if (block <= k_block) {
                mma_16x8x16(kk[block * 2], from_k, b[0], b[1]);
                mma_16x8x16(kk[block * 2 + 1], from_k, b[2], b[3]);
            }
            if (block <= q_block) {
                mma_16x8x16(qk[block * 2], from_q, b[0], b[1]);
                mma_16x8x16(qk[block * 2 + 1], from_q, b[2], b[3]);
            }
        }
    }

    __syncthreads(); // everyone is done with k and q
#pragma unroll
    for (int i = 0; i < 8; i++) { // blocks above the diagonal are never read of A; of P and T they are zeros
        int column = i * 8 + pair * 2;
        float2 sums = *(const float2 *)(g_sum + column);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (i / 2 <= k_block) {
                int row = k_block * 16 + group + half * 8;
                float sum = g_sum[row], factor = beta[row];
                *(float2 *)(a_tile + row * PITCH + column) =
                    make_float2(factor * kk[i][half * 2] * exp2_fast(sum - sums.x), factor * kk[i][half * 2 + 1] * exp2_fast(sum - sums.y));
            }
            int row = q_block * 16 + group + half * 8;
            float sum = g_sum[row];
            u32 weights = i / 2 > q_block ? 0
                                          : pack_half2(column <= row ? qk[i][half * 2] * exp2_fast(sum - sums.x) : 0.0f,
                                                       column < row ? qk[i][half * 2 + 1] * exp2_fast(sum - sums.y) : 0.0f);
            store_shared(tile_unit(p_tile, row, i) + pair * 4, weights);
        }
    }
    __syncthreads();
    write_out<SQUARE * 2>(p_out + tile * SQUARE, p_tile);
    invert(t_tile, a_tile);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = i * 16 + thread / 8, unit = thread % 8;
        float value[8];
#pragma unroll
        for (int e = 0; e < 8; e++) value[e] = unit / 2 > row / 16 ? 0.0f : t_tile[row * PITCH + unit * 8 + e] * beta[unit * 8 + e];
        *(uint4 *)(t_out + tile * SQUARE + tile_unit(0, row, unit) / 2) = pack_half8(value);
    }
}

// ---- gated norm and convolution window ----

// Grid (value_heads, chunks), 128 threads: a warp takes 16 tokens of one head, half a warp a token. out = o / rms(o) * weight *
// silu(z). The blocks of a piece's last chunk also keep the raw inputs of its last three tokens.
KERNEL __launch_bounds__(128) delta_finish(const f16 *o, const f16 *mixed, const float *weight, f16 *window, f16 *out,
                                           const Piece *pieces, const int2 *chunks, const Shape shape) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    int2 chunk = chunks[blockIdx.y];
    Piece piece = pieces[chunk.x];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x, channels = channel_count(shape);
    int width = shape.value_heads * HEAD, unit = lane % 16, first = chunk.y + warp * 16;
    const f16 *tile = o + ((u64)blockIdx.y * shape.value_heads + head) * TILE;
    float w[8];
#pragma unroll
    for (int e = 0; e < 8; e++) w[e] = weight[unit * 8 + e];
    uint4 inputs[8], gates[8]; // all in flight before the first is used
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = i * 2 + lane / 16;
        u64 at = piece.start + min(first + row, piece.count - 1); // past the end the last token, which is not used
        inputs[i] = *(const uint4 *)(tile + tile_unit(0, warp * 16 + row, unit) / 2);
        gates[i] = *(const uint4 *)(mixed + at * shape.pitch + channels + head * HEAD + unit * 8);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int at = first + i * 2 + lane / 16;
        float x[8], z[8], squares = 0.0f;
        unpack_half8(inputs[i], x);
        unpack_half8(gates[i], z);
#pragma unroll
        for (int e = 0; e < 8; e++) squares += x[e] * x[e];
#pragma unroll
        for (int offset = 1; offset < 16; offset *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
        float scale = rsqrtf(squares / HEAD + shape.eps);
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] *= scale * w[e] * silu_short(z[e]);
        if (at < piece.count) *(uint4 *)(out + (u64)(piece.start + at) * width + head * HEAD + unit * 8) = pack_half8(x);
    }
    if (chunk.y + CHUNK >= piece.count) keep_window(mixed, window, piece, shape, head * 128 + threadIdx.x, shape.value_heads * 128);
}
