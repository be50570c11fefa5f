// Gated delta net for prompts: the chunked form on tensor cores, for heads of 128 x 128.
//
// A prompt chunk of a step (a piece) is cut into chunks of 64 tokens. With G the running sum of g inside a chunk and
// D_ij = e^(G_i - G_j) for i >= j, per value head:
//   A = strictly lower(diag(beta) K K^T * D),  T = (I + A)^-1,  U = T diag(beta) V,  W = T diag(beta e^G) K
//   scan over chunks:  V' = U - W S;  O = diag(e^G) Q S + (lower(Q K^T) * D) V';  S = e^G_last S + K^T diag(e^(G_last - G)) V'
// (Yang et al., Gated Delta Networks, and the WY form of DeltaNet.) Every exponent is <= 0. Rows past the end of a piece
// count as k = q = v = 0, beta = 0, g = 0, which leaves S as it is.
//
// Four launches: `delta_prepare` (convolution, SiLU, L2 norms), `delta_chunks` (all chunks at once: T in fp32 by blocks, then
// U, W and P = lower(Q K^T) * D), `delta_scan` (serial over chunks; a block holds 32 columns of one head's S in fp32
// registers), `delta_finish` (gated norm, convolution window). S enters products as fp16, sums stay fp32; o is written in
// fp32 because it is not normalised yet and can exceed fp16.
//
// Shapes: mixed [rows, pitch] fp16 with u (q, k, v channels), z, b, a; conv [rows, channels] fp16; U, W
// [chunks][value_heads][64][128] fp16; P [..][64][64] fp16; G [..][64] fp32; o [rows, value_heads * 128] fp32; state
// [slots][value_heads][128 dv][128 dk] in fp32, fp16 or bf16; window [slots][ring][channels] fp16, position p at p % ring.
// Bytes a token and value head: u 256 (and its share of q, k) read and written, U and W 256 each and P 128 written and
// read, o 512 written and read, z and y 256 each.
#include "half.cuh"

#define CHUNK 64
#define HEAD 128
#define PITCH 68 // floats in a row of a 64 x 64 fp32 tile: 16-byte aligned, rows shifted by four banks

struct Shape {
    int key_heads, value_heads, pitch, ring, state_type;
    float eps;
};

// `count` new tokens at row `start` after `context` cached ones; its chunks begin at `first_chunk`.
struct Piece {
    int slot, context, start, count, first_chunk;
};

DEVICE int channel_count(const Shape &shape) { return (2 * shape.key_heads + shape.value_heads) * HEAD; }

// 16-byte unit `unit` of row `row`, rows of 256, 128 or 64 bytes; eight rows that an ldmatrix reads together meet all banks.
DEVICE u32 unit_256(u32 base, int row, int unit) { return base + (u32)(row * 256 + (unit ^ (row & 7)) * 16); }
DEVICE u32 unit_128(u32 base, int row, int unit) { return base + (u32)(row * 128 + (unit ^ (row & 7)) * 16); }
DEVICE u32 unit_64(u32 base, int row, int unit) { return base + (u32)(row * 64 + (unit ^ (row / 2 & 3)) * 16); }

// ---- convolution, SiLU, L2 norms ----

// Grid (channels / 128, chunks), 128 threads: a warp takes 16 tokens of 128 channels, four a lane, and slides over them.
KERNEL __launch_bounds__(128) delta_prepare(const f16 *mixed, const float *taps, const f16 *window, f16 *conv,
                                            const Piece *pieces, const int2 *chunks, const Shape shape) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    int2 chunk = chunks[blockIdx.y];
    Piece piece = pieces[chunk.x];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, channels = channel_count(shape);
    int channel = blockIdx.x * HEAD + lane * 4, first = chunk.y + warp * 16;
    int last = min(first + 16, piece.count);
    float tap[4][4], history[3][4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float4 t = *(const float4 *)(taps + j * channels + channel);
        tap[j][0] = t.x, tap[j][1] = t.y, tap[j][2] = t.z, tap[j][3] = t.w;
    }
#pragma unroll
    for (int j = 0; j < 3; j++) {
        int at = first - 3 + j; // in the piece; before its start the window has it
        uint2 raw = make_uint2(0, 0);
        if (at >= 0 && at < piece.count)
            raw = *(const uint2 *)(mixed + (u64)(piece.start + at) * shape.pitch + channel);
        else if (at < 0 && piece.context + at >= 0)
            raw = *(const uint2 *)(window + ((u64)piece.slot * shape.ring + (piece.context + at) % shape.ring) * channels + channel);
        float2 low = unpack_half2(raw.x), high = unpack_half2(raw.y);
        history[j][0] = low.x, history[j][1] = low.y, history[j][2] = high.x, history[j][3] = high.y;
    }
    bool query = blockIdx.x < shape.key_heads, normed = blockIdx.x < 2 * shape.key_heads;
    uint2 inputs[16]; // all in flight before the first is used
#pragma unroll
    for (int i = 0; i < 16; i++)
        if (first + i < last) inputs[i] = *(const uint2 *)(mixed + (u64)(piece.start + first + i) * shape.pitch + channel);
#pragma unroll
    for (int token = 0; token < 16; token++) {
        int at = first + token;
        if (at >= last) break;
        float2 low = unpack_half2(inputs[token].x), high = unpack_half2(inputs[token].y);
        float u[4] = {low.x, low.y, high.x, high.y}, c[4], squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            c[i] = silu(tap[0][i] * history[0][i] + tap[1][i] * history[1][i] + tap[2][i] * history[2][i] + tap[3][i] * u[i]);
            history[0][i] = history[1][i], history[1][i] = history[2][i], history[2][i] = u[i];
            squares += c[i] * c[i];
        }
        if (normed) {
            float scale = rsqrtf(warp_sum(squares) + 1e-6f);
            if (query) scale *= 0.08838834764831845f; // 1 / sqrt(128)
#pragma unroll
            for (int i = 0; i < 4; i++) c[i] *= scale;
        }
        *(uint2 *)(conv + (u64)(piece.start + at) * channels + channel) =
            make_uint2(pack_half2(c[0], c[1]), pack_half2(c[2], c[3]));
    }
}

// ---- within chunks ----

// 64 rows of one head of conv into rows of 256 bytes; rows at or past `valid` become zeros.
template <int Threads> DEVICE void load_head(u32 to, const f16 *from, int channels, int valid) {
#pragma unroll 4
    for (int i = threadIdx.x; i < CHUNK * 16; i += Threads) {
        int row = i / 16, unit = i % 16;
        copy_async_16(unit_256(to, row, unit), from + (u64)(row < valid ? row : 0) * channels + unit * 8, row < valid);
    }
}

DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(__expf(x)); }

// out = sign * left right, all Size x Size with Size a multiple of 16, in fp32 tiles of PITCH; `threads` threads from 0.
template <int Size> DEVICE void multiply(float *out, const float *left, const float *right, float sign, int thread, int threads) {
    constexpr int COLUMNS = Size / 4; // groups of four columns a row
#pragma unroll
    for (int item = thread; item < Size * COLUMNS; item += threads) {
        int row = item / COLUMNS, column = item % COLUMNS * 4;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
        for (int k = 0; k < Size; k++) {
            float a = left[row * PITCH + k];
            float4 b = *(const float4 *)(right + k * PITCH + column);
            sum.x += a * b.x, sum.y += a * b.y, sum.z += a * b.z, sum.w += a * b.w;
        }
        *(float4 *)(out + row * PITCH + column) = make_float4(sign * sum.x, sign * sum.y, sign * sum.z, sign * sum.w);
    }
}

// t = (I + a)^-1 for a strictly lower 64 x 64 tile; its blocks above the diagonal serve as scratch. 128 threads; ends with
// a barrier. Forward substitution in the four 16 x 16 diagonal blocks, then [[P, 0], [B, Q]]^-1 = [[P', 0], [-Q' B P', Q']].
DEVICE void invert(float *t, float *a) {
    int thread = threadIdx.x, warp = thread / 32, column = thread % 16;
    for (int i = thread; i < CHUNK * PITCH / 4; i += 128) ((float4 *)t)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    __syncthreads();
    const float *block = a + warp * 16 * PITCH + warp * 16;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < i; j++) sum -= block[i * PITCH + j] * x[j];
        x[i] = sum;
    }
    if (thread % 32 < 16) {
#pragma unroll
        for (int i = 0; i < 16; i++) t[(warp * 16 + i) * PITCH + warp * 16 + column] = x[i];
    }
    __syncthreads();
    int half = thread / 64, corner = half * 32; // two pairs of 16 x 16 blocks, 64 threads each
    float *scratch = a + corner * PITCH + corner + 16;
    multiply<16>(scratch, a + (corner + 16) * PITCH + corner, t + corner * PITCH + corner, 1.0f, thread % 64, 64);
    __syncthreads();
    multiply<16>(t + (corner + 16) * PITCH + corner, t + (corner + 16) * PITCH + corner + 16, scratch, -1.0f, thread % 64, 64);
    __syncthreads();
    multiply<32>(a + 32, a + 32 * PITCH, t, 1.0f, thread, 128);
    __syncthreads();
    multiply<32>(t + 32 * PITCH, t + 32 * PITCH + 32, a + 32, -1.0f, thread, 128);
    __syncthreads();
}

// out [64][128] fp16 = t diag(factors) x, with x 64 rows of 256 bytes in shared memory; a warp makes 16 rows.
DEVICE void apply(const float *t, const float *factors, u32 x, f16 *out) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
    float sum[16][4];
#pragma unroll
    for (int i = 0; i < 16; i++) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.0f;
    const float *row = t + (warp * 16 + group) * PITCH;
    for (int step = 0; step <= warp; step++) { // columns past the diagonal block are zero
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int column = step * 16 + pair * 2 + i / 2 * 8;
            float2 value = *(const float2 *)(row + i % 2 * 8 * PITCH + column);
            float2 factor = *(const float2 *)(factors + column);
            a[i] = pack_half2(value.x * factor.x, value.y * factor.y);
        }
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
            u32 b[4];
            load_matrix_x4_transposed(b, unit_256(x, step * 16 + lane % 16, i + lane / 16));
            mma_16x8x16(sum[i], a, b[0], b[1]);
            mma_16x8x16(sum[i + 1], a, b[2], b[3]);
        }
    }
    u32 *to = (u32 *)(out + (warp * 16 + group) * HEAD);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        to[i * 4 + pair] = pack_half2(sum[i][0], sum[i][1]);
        to[8 * HEAD / 2 + i * 4 + pair] = pack_half2(sum[i][2], sum[i][3]);
    }
}

// Grid (value_heads, chunks), 128 threads. K K^T and Q K^T are made again for each value head of a key head: three blocks
// on a multiprocessor that each hold one tile beat fewer that keep both products in registers.
KERNEL __launch_bounds__(128, 3) delta_chunks(const f16 *conv, const f16 *mixed, const float *a_log, const float *dt_bias, f16 *u_out,
                                              f16 *w_out, f16 *p_out, float *g_out, const Piece *pieces, const int2 *chunks,
                                              const Shape shape) {
    extern __shared__ __align__(128) unsigned char shared[];
    float *a_tile = (float *)(shared + 2 * CHUNK * 256), *t_tile = a_tile + CHUNK * PITCH;
    float *beta = t_tile + CHUNK * PITCH, *g_sum = beta + CHUNK, *beta_decay = g_sum + CHUNK;
    u32 k_tile = shared_address(shared), x_tile = k_tile + CHUNK * 256; // x: first q, then v
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = lane / 4, pair = lane % 4;
    wait_for_previous_kernel();
    let_next_kernel_start();
    int2 chunk = chunks[blockIdx.y];
    Piece piece = pieces[chunk.x];
    int channels = channel_count(shape), head = blockIdx.x, key_head = head / (shape.value_heads / shape.key_heads);
    int valid = min(CHUNK, piece.count - chunk.y);
    const f16 *rows = conv + (u64)(piece.start + chunk.y) * channels;
    load_head<128>(k_tile, rows + (shape.key_heads + key_head) * HEAD, channels, valid);
    load_head<128>(x_tile, rows + key_head * HEAD, channels, valid);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();

    // Rows 16 warp ..= +15 against tokens 0 .. 16 (warp + 1); later ones are masked anyway.
    float kk[8][4], qk[8][4];
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) kk[i][j] = qk[i][j] = 0.0f;
#pragma unroll
    for (int step = 0; step < HEAD / 16; step++) {
        u32 from_k[4], from_q[4];
        load_matrix_x4(from_k, unit_256(k_tile, warp * 16 + lane % 16, step * 2 + lane / 16));
        load_matrix_x4(from_q, unit_256(x_tile, warp * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            if (i > 2 * warp) continue;
            u32 b[4];
            load_matrix_x4(b, unit_256(k_tile, i * 8 + lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2));
            mma_16x8x16(kk[i], from_k, b[0], b[1]);
            mma_16x8x16(kk[i + 1], from_k, b[2], b[3]);
            mma_16x8x16(qk[i], from_q, b[0], b[1]);
            mma_16x8x16(qk[i + 1], from_q, b[2], b[3]);
        }
    }

    u64 tile = (u64)blockIdx.y * shape.value_heads + head;
    __syncthreads(); // everyone is done with q
    load_head<128>(x_tile, rows + (2 * shape.key_heads + head) * HEAD, channels, valid);
    copy_async_commit();
    float b = 0.0f, g = 0.0f;
    if (thread < CHUNK) {
        if (thread < valid) {
            const f16 *gates = mixed + (u64)(piece.start + chunk.y + thread) * shape.pitch + channels + shape.value_heads * HEAD;
            b = sigmoid(half_to_float(gates[head]));
            g = -expf(a_log[head]) * softplus(half_to_float(gates[shape.value_heads + head]) + dt_bias[head]);
        }
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            float before = __shfl_up_sync(0xffffffffu, g, offset);
            if (lane >= offset) g += before;
        }
        g_sum[thread] = g;
    }
    __syncthreads();
    if (thread < CHUNK) {
        if (thread >= 32) g += g_sum[31];
        beta[thread] = b;
        beta_decay[thread] = b * __expf(g);
        g_out[tile * CHUNK + thread] = g;
    }
    __syncthreads();
    if (thread >= 32 && thread < CHUNK) g_sum[thread] = g;
    __syncthreads();

    u32 *p = (u32 *)(p_out + tile * CHUNK * CHUNK);
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = warp * 16 + group + half * 8, column = i * 8 + pair * 2;
            float2 a = make_float2(0.0f, 0.0f), weight = make_float2(0.0f, 0.0f);
            if (column <= row) {
                float decay = __expf(g_sum[row] - g_sum[column]);
                weight.x = qk[i][half * 2] * decay;
                if (column < row) a.x = beta[row] * kk[i][half * 2] * decay;
            }
            if (column + 1 <= row) {
                float decay = __expf(g_sum[row] - g_sum[column + 1]);
                weight.y = qk[i][half * 2 + 1] * decay;
                if (column + 1 < row) a.y = beta[row] * kk[i][half * 2 + 1] * decay;
            }
            *(float2 *)(a_tile + row * PITCH + column) = a;
            p[row * CHUNK / 2 + i * 4 + pair] = pack_half2(weight.x, weight.y);
        }
    }
    copy_async_wait<0>();
    __syncthreads();
    invert(t_tile, a_tile);
    apply(t_tile, beta, x_tile, u_out + tile * CHUNK * HEAD);
    apply(t_tile, beta_decay, k_tile, w_out + tile * CHUNK * HEAD);
}

// ---- across chunks ----

#define SPLIT 4             // blocks a head
#define WIDTH (HEAD / SPLIT) // columns (dv) a block holds
#define SCAN_THREADS 256
#define STAGE_BYTES (3 * CHUNK * 256 + CHUNK * 128 + CHUNK * 64)

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

// One chunk's W, Q, K (256-byte rows), P (128) and U's columns of this block (64), all as one stage.
DEVICE void load_stage(u32 stage, const f16 *w, const f16 *q, const f16 *k, int channels, const f16 *p, const f16 *u, int valid) {
    load_head<SCAN_THREADS>(stage, w, HEAD, CHUNK);
    load_head<SCAN_THREADS>(stage + CHUNK * 256, q, channels, valid);
    load_head<SCAN_THREADS>(stage + 2 * CHUNK * 256, k, channels, valid);
    u32 p_tile = stage + 3 * CHUNK * 256, u_tile = p_tile + CHUNK * 128;
#pragma unroll
    for (int i = threadIdx.x; i < CHUNK * 8; i += SCAN_THREADS)
        copy_async_16(unit_128(p_tile, i / 8, i % 8), p + i * 8);
#pragma unroll
    for (int i = threadIdx.x; i < CHUNK * WIDTH / 8; i += SCAN_THREADS)
        copy_async_16(unit_64(u_tile, i / 4, i % 4), u + i / 4 * HEAD + i % 4 * 8);
    copy_async_commit();
}

// Grid (value_heads * SPLIT, pieces), 256 threads. Warps 0 to 3 carry the state: warp w holds rows (dk) 32 w ..= +31 of S as
// two 16 x 32 accumulators and makes rows 16 w of W S and V'. Warps 4 to 7 make the outputs, which the state does not wait
// for. S as fp16, V' and V' scaled pass through shared memory. `stages` 2 loads the next chunk under this one's work.
KERNEL __launch_bounds__(SCAN_THREADS, 1) delta_scan(const f16 *conv, const f16 *u_in, const f16 *w_in, const f16 *p_in,
                                                     const float *g_in, void *state, float *o, const Piece *pieces,
                                                     const Shape shape, int stages) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float g_sum[2][CHUNK];
    int thread = threadIdx.x, warp = thread / 32 % 4, lane = thread % 32, group = lane / 4, pair = lane % 4;
    bool carries = thread < 128;
    int head = blockIdx.x / SPLIT, first_column = blockIdx.x % SPLIT * WIDTH;
    wait_for_previous_kernel();
    let_next_kernel_start();
    Piece piece = pieces[blockIdx.y];
    int channels = channel_count(shape), key_head = head / (shape.value_heads / shape.key_heads);
    int chunk_count = (piece.count + CHUNK - 1) / CHUNK, width = shape.value_heads * HEAD;
    u32 s_tile = shared_address(shared), v_tile = s_tile + HEAD * 64, scaled_tile = v_tile + CHUNK * 64;
    u32 stage_tiles = scaled_tile + CHUNK * 64;

    // S[dk][dv]: element (row 32 warp + 16 m + group (+8), column first_column + 8 n + 2 pair (+1)).
    float s[2][4][4];
    u64 state_base = ((u64)piece.slot * shape.value_heads + head) * HEAD * HEAD;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int dk = warp * 32 + m * 16 + group + i / 2 * 8, dv = first_column + n * 8 + pair * 2 + i % 2;
                s[m][n][i] = carries && piece.context > 0 ? read_state(state, state_base + dv * HEAD + dk, shape.state_type) : 0.0f;
            }

    auto load = [&](int chunk) {
        u64 tile = (u64)(piece.first_chunk + chunk) * shape.value_heads + head;
        const f16 *rows = conv + (u64)(piece.start + chunk * CHUNK) * channels;
        load_stage(stage_tiles + (stages > 1 ? chunk % 2 : 0) * STAGE_BYTES, w_in + tile * CHUNK * HEAD,
                   rows + key_head * HEAD, rows + (shape.key_heads + key_head) * HEAD, channels,
                   p_in + tile * CHUNK * CHUNK, u_in + tile * CHUNK * HEAD + first_column, min(CHUNK, piece.count - chunk * CHUNK));
        if (thread < CHUNK) g_sum[chunk % 2][thread] = g_in[tile * CHUNK + thread];
    };
    if (stages > 1) load(0);

    for (int chunk = 0; chunk < chunk_count; chunk++) {
        if (carries) { // S as fp16: rows of 32 halves (64 bytes)
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        u32 at = unit_64(s_tile, warp * 32 + m * 16 + group + half * 8, n) + pair * 4;
                        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pack_half2(s[m][n][half * 2], s[m][n][half * 2 + 1])) : "memory");
                    }
        }
        if (stages == 1) load(chunk);
        copy_async_wait<0>();
        __syncthreads(); // this chunk's tiles and S are here; the other stage is free
        if (stages > 1 && chunk + 1 < chunk_count) load(chunk + 1);
        u32 w_tile = stage_tiles + (stages > 1 ? chunk % 2 : 0) * STAGE_BYTES, q_tile = w_tile + CHUNK * 256;
        u32 k_tile = q_tile + CHUNK * 256, p_tile = k_tile + CHUNK * 256, u_tile = p_tile + CHUNK * 128;
        const float *g = g_sum[chunk % 2];

        // Rows (tokens) 16 warp ..= +15 of W S, or of Q S.
        float sum[4][4];
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[n][i] = 0.0f;
        u32 rows_tile = carries ? w_tile : q_tile;
#pragma unroll
        for (int step = 0; step < HEAD / 16; step++) {
            u32 a[4];
            load_matrix_x4(a, unit_256(rows_tile, warp * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
            for (int n = 0; n < 4; n += 2) {
                u32 b[4];
                load_matrix_x4_transposed(b, unit_64(s_tile, step * 16 + lane % 16, n + lane / 16));
                mma_16x8x16(sum[n], a, b[0], b[1]);
                mma_16x8x16(sum[n + 1], a, b[2], b[3]);
            }
        }
        if (carries) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = warp * 16 + group + half * 8;
                float to_end = __expf(g[CHUNK - 1] - g[row]);
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    u32 packed;
                    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(packed) : "r"(unit_64(u_tile, row, n) + pair * 4));
                    float2 v = unpack_half2(packed);
                    v.x -= sum[n][half * 2], v.y -= sum[n][half * 2 + 1];
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(unit_64(v_tile, row, n) + pair * 4), "r"(pack_half2(v.x, v.y)) : "memory");
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(unit_64(scaled_tile, row, n) + pair * 4),
                                 "r"(pack_half2(v.x * to_end, v.y * to_end)) : "memory");
                }
            }
        } else {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float decay = __expf(g[warp * 16 + group + half * 8]);
#pragma unroll
                for (int n = 0; n < 4; n++) sum[n][half * 2] *= decay, sum[n][half * 2 + 1] *= decay;
            }
        }
        __syncthreads(); // V' is here, and every warp is done with S

        if (carries) { // S = e^G_last S + K^T (scaled V')
            float carry = __expf(g[CHUNK - 1]);
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) s[m][n][i] *= carry;
#pragma unroll
            for (int step = 0; step < CHUNK / 16; step++) {
                u32 b[2][4];
#pragma unroll
                for (int n = 0; n < 2; n++)
                    load_matrix_x4_transposed(b[n], unit_64(scaled_tile, step * 16 + lane % 16, n * 2 + lane / 16));
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    // Transposed: rows are dk, so matrices 1 and 2 of the four trade places.
                    u32 a[4];
                    int token = step * 16 + lane % 8 + lane / 16 * 8, unit = warp * 4 + m * 2 + lane / 8 % 2;
                    load_matrix_x4_transposed(a, unit_256(k_tile, token, unit));
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        mma_16x8x16(s[m][n * 2], a, b[n][0], b[n][1]);
                        mma_16x8x16(s[m][n * 2 + 1], a, b[n][2], b[n][3]);
                    }
                }
            }
        } else { // O = e^G Q S + P V' (P is zero past the diagonal block)
#pragma unroll
            for (int step = 0; step < CHUNK / 16; step++) {
                if (step > warp) continue;
                u32 a[4];
                load_matrix_x4(a, unit_128(p_tile, warp * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
                for (int n = 0; n < 4; n += 2) {
                    u32 b[4];
                    load_matrix_x4_transposed(b, unit_64(v_tile, step * 16 + lane % 16, n + lane / 16));
                    mma_16x8x16(sum[n], a, b[0], b[1]);
                    mma_16x8x16(sum[n + 1], a, b[2], b[3]);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int token = chunk * CHUNK + warp * 16 + group + half * 8;
                if (token >= piece.count) continue;
                float *to = o + (u64)(piece.start + token) * width + head * HEAD + first_column + pair * 2;
#pragma unroll
                for (int n = 0; n < 4; n++) *(float2 *)(to + n * 8) = make_float2(sum[n][half * 2], sum[n][half * 2 + 1]);
            }
        }
        // What is rewritten at the top had its last readers before the second barrier, but for the tiles of a single stage.
        if (stages == 1) __syncthreads();
    }

    if (!carries) return;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int dk = warp * 32 + m * 16 + group + i / 2 * 8, dv = first_column + n * 8 + pair * 2 + i % 2;
                write_state(state, state_base + dv * HEAD + dk, shape.state_type, s[m][n][i]);
            }
}

// ---- gated norm and convolution window ----

// Grid (value_heads, chunks), 128 threads: a warp takes 16 tokens of one head. out = o / rms(o) * weight * silu(z). The blocks
// of a piece's last chunk also keep the raw inputs of its last three tokens.
KERNEL __launch_bounds__(128) delta_finish(const float *o, const f16 *mixed, const float *weight, f16 *window, f16 *out,
                                           const Piece *pieces, const int2 *chunks, const Shape shape) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    int2 chunk = chunks[blockIdx.y];
    Piece piece = pieces[chunk.x];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x, channels = channel_count(shape);
    int width = shape.value_heads * HEAD, first = chunk.y + warp * 16, last = min(first + 16, piece.count);
    float4 w = *(const float4 *)(weight + lane * 4);
#pragma unroll 4
    for (int at = first; at < last; at++) {
        u64 row = piece.start + at;
        float4 x = *(const float4 *)(o + row * width + head * HEAD + lane * 4);
        uint2 packed = *(const uint2 *)(mixed + row * shape.pitch + channels + head * HEAD + lane * 4);
        float2 low = unpack_half2(packed.x), high = unpack_half2(packed.y);
        float scale = rsqrtf(warp_sum(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w) / HEAD + shape.eps);
        *(uint2 *)(out + row * width + head * HEAD + lane * 4) =
            make_uint2(pack_half2(x.x * scale * w.x * silu(low.x), x.y * scale * w.y * silu(low.y)),
                       pack_half2(x.z * scale * w.z * silu(high.x), x.w * scale * w.w * silu(high.y)));
    }
    if (chunk.y + CHUNK < piece.count) return;
    for (int back = 1; back <= min(3, piece.count); back++) {
        int at = piece.count - back;
        const f16 *from = mixed + (u64)(piece.start + at) * shape.pitch;
        f16 *to = window + ((u64)piece.slot * shape.ring + (piece.context + at) % shape.ring) * channels;
        for (int c = head * 128 + threadIdx.x; c < channels; c += shape.value_heads * 128) to[c] = from[c];
    }
}
