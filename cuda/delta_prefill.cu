// Gated delta net for prompts: the chunked form on tensor cores, for heads of 128 x 128.
//
// A prompt chunk of a step (a piece) is cut into chunks of 64 tokens. With G the running sum of g inside a chunk and
// D_ij = e^(G_i - G_j) for i >= j, per value head:
//   A = strictly lower(diag(beta) K K^T * D),  T = (I + A)^-1,  U = T diag(beta) V,  W = T diag(beta e^G) K
//   scan over chunks:  V' = U - W S;  O = diag(e^G) Q S + (lower(Q K^T) * D) V';  S = e^G_last S + K^T diag(e^(G_last - G)) V'
// (Yang et al., Gated Delta Networks, and the WY form of DeltaNet.) Every exponent is <= 0. Rows past the end of a piece
// count as k = q = v = 0, beta = 0, g = 0, which leaves S as it is.
//
// Four launches: `delta_prepare` (convolution, SiLU, L2 norms, gates), `delta_chunks` (all chunks at once: T in fp32 by blocks, then
// U, W and P = lower(Q K^T) * D), `delta_scan` (serial over chunks; a block holds 32 columns of one head's S in fp32
// registers), `delta_finish` (gated norm, convolution window). Hopper has a scan of its own (delta_scan_hopper.cu).
// S enters products as fp16, sums stay fp32; o is written in fp32 because it is not normalised yet and can exceed fp16.
//
// Shapes: mixed [rows, pitch] fp16 with u (q, k, v channels), z, b, a; conv tiles [chunks][heads of q, k, v][64][128] fp16;
// W tiles [chunks][value_heads][64][128], U [..][4][64][32], P [..][64][64], all fp16; G and beta [..][64] fp32; o [rows, value_heads * 128]
// fp32; state [slots][value_heads][128 dv][128 dk] in fp32, fp16 or bf16; window [slots][ring][channels] fp16, position p at
// p % ring. Tiles are swizzled as shared memory wants them (delta_prefill.cuh).
// Bytes a token and value head: u 256 (and its share of q, k) read and written, U and W 256 each and P 128 written and
// read, o 512 written and read, z and y 256 each.
#include "delta_prefill.cuh"

#define LOG2_E 1.4426950408889634f
#define PITCH 68 // floats in a row of a 64 x 64 fp32 tile: 16-byte aligned, rows shifted by four banks

// ---- convolution, SiLU, L2 norms, gates ----

DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(__expf(x)); }

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
        g[i] = valid ? rate * softplus(half_to_float(raw[i][1]) + dt_bias) : 0.0f;
    }
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        float before[2] = {__shfl_up_sync(0xffffffffu, g[0], offset), __shfl_up_sync(0xffffffffu, g[1], offset)};
        if (lane >= offset) g[0] += before[0], g[1] += before[1];
    }
    g_out[lane] = g[0];
    g_out[32 + lane] = g[1] + __shfl_sync(0xffffffffu, g[0], 31);
}

// Grid (heads of q, k, v / 2 rounded up + value_heads / 4 rounded up, chunks), 128 threads. In the first blocks a warp takes 16 tokens
// of two heads, eight channels a lane, and slides over them; in the others it makes the gates of a value head.
KERNEL __launch_bounds__(128) delta_prepare(const f16 *mixed, const float *taps, const float *a_log, const float *dt_bias,
                                            const f16 *window, f16 *conv, float *g_out, float *beta_out, const Piece *pieces,
                                            const int2 *chunks, const Shape shape) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    int2 chunk = chunks[blockIdx.y];
    Piece piece = pieces[chunk.x];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, channels = channel_count(shape), heads = channels / HEAD;
    int gate_head = ((int)blockIdx.x - (heads + 1) / 2) * 4 + warp;
    if (gate_head >= 0) {
        if (gate_head >= shape.value_heads) return;
        u64 at = ((u64)blockIdx.y * shape.value_heads + gate_head) * CHUNK;
        return make_gates(mixed, a_log[gate_head], dt_bias[gate_head], g_out + at, beta_out + at, piece, chunk.y, gate_head, shape);
    }
    int head = blockIdx.x * 2 + lane / 16, first = chunk.y + warp * 16, last = min(first + 16, piece.count);
    bool exists = head < heads; // the last block of an odd number has half its lanes idle
    int channel = (exists ? head : 0) * HEAD + lane % 16 * 8;
    f16 *tile = conv + ((u64)blockIdx.y * heads + head) * TILE;
    float tap[4][8], history[3][8];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float4 low = *(const float4 *)(taps + j * channels + channel), high = *(const float4 *)(taps + j * channels + channel + 4);
        tap[j][0] = low.x, tap[j][1] = low.y, tap[j][2] = low.z, tap[j][3] = low.w;
        tap[j][4] = high.x, tap[j][5] = high.y, tap[j][6] = high.z, tap[j][7] = high.w;
    }
#pragma unroll
    for (int j = 0; j < 3; j++) {
        int at = first - 3 + j; // in the piece; before its start the window has it
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (at >= 0 && at < piece.count)
            raw = *(const uint4 *)(mixed + (u64)(piece.start + at) * shape.pitch + channel);
        else if (at < 0 && piece.context + at >= 0)
            raw = *(const uint4 *)(window + ((u64)piece.slot * shape.ring + (piece.context + at) % shape.ring) * channels + channel);
        unpack_half8(raw, history[j]);
    }
    bool query = head < shape.key_heads, normed = head < 2 * shape.key_heads;
#pragma unroll
    for (int begin = 0; begin < 16; begin += 8) {
        uint4 inputs[8]; // all in flight before the first is used
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (first + begin + i < last) inputs[i] = *(const uint4 *)(mixed + (u64)(piece.start + first + begin + i) * shape.pitch + channel);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int row = warp * 16 + begin + i;
            uint4 packed = make_uint4(0, 0, 0, 0); // past the end
            if (first + begin + i < last) {
                float u[8], c[8], squares = 0.0f;
                unpack_half8(inputs[i], u);
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    c[e] = silu_short(tap[0][e] * history[0][e] + tap[1][e] * history[1][e] + tap[2][e] * history[2][e] + tap[3][e] * u[e]);
                    history[0][e] = history[1][e], history[1][e] = history[2][e], history[2][e] = u[e];
                    squares += c[e] * c[e];
                }
#pragma unroll
                for (int offset = 1; offset < 16; offset *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
                float scale = normed ? rsqrtf(squares + 1e-6f) : 1.0f;
                if (query) scale *= 0.08838834764831845f; // 1 / sqrt(128)
#pragma unroll
                for (int e = 0; e < 8; e++) c[e] *= scale;
                packed = pack_half8(c);
            }
            if (exists) *(uint4 *)(tile + row * HEAD + (lane % 16 ^ (row & 7)) * 8) = packed;
        }
    }
}

// ---- within chunks ----

// `Bytes` (a multiple of 16 Threads) as they lie.
template <int Threads, int Bytes> DEVICE void load_tile(u32 to, const f16 *from) {
#pragma unroll
    for (int i = threadIdx.x; i < Bytes / 16; i += Threads) copy_async_16(to + i * 16, from + i * 8);
}

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

// sum = rows 16 block ..= +15 of t diag(factors) x, with x 64 rows of 256 bytes in shared memory.
DEVICE void apply(float (&sum)[16][4], const float *t, const float *factors, u32 x, int block) {
    int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
#pragma unroll
    for (int i = 0; i < 16; i++) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.0f;
    const float *row = t + (block * 16 + group) * PITCH;
    for (int step = 0; step <= block; step++) { // columns past the diagonal block are zero
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

// Grid (value_heads, chunks), 128 threads. K K^T and Q K^T are made again for each value head of a key head: three blocks
// on a multiprocessor that each hold one tile beat fewer that keep both products in registers. Where rows further down have
// more to do, a warp takes the w-th block of 16 of one product and the w-th from the end of the other.
KERNEL __launch_bounds__(128, 3) delta_chunks(const f16 *conv, const float *g_in, const float *beta_in, f16 *u_out, f16 *w_out,
                                              f16 *p_out, const Shape shape) {
    extern __shared__ __align__(128) unsigned char shared[];
    float *a_tile = (float *)(shared + 2 * CHUNK * 256), *t_tile = a_tile + CHUNK * PITCH;
    float *beta = t_tile + CHUNK * PITCH, *g_sum = beta + CHUNK, *beta_decay = g_sum + CHUNK; // g_sum in powers of two
    u32 k_tile = shared_address(shared), x_tile = k_tile + CHUNK * 256; // x: first q, then v
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = lane / 4, pair = lane % 4;
    wait_for_previous_kernel();
    let_next_kernel_start();
    int channels = channel_count(shape), head = blockIdx.x, key_head = head / (shape.value_heads / shape.key_heads);
    const f16 *tiles = conv + (u64)blockIdx.y * channels * CHUNK;
    u64 tile = (u64)blockIdx.y * shape.value_heads + head;
    load_tile<128, TILE * 2>(k_tile, tiles + (u64)(shape.key_heads + key_head) * TILE);
    load_tile<128, TILE * 2>(x_tile, tiles + (u64)key_head * TILE);
    copy_async_commit();
    if (thread < CHUNK) {
        float g = g_in[tile * CHUNK + thread] * LOG2_E, b = beta_in[tile * CHUNK + thread];
        g_sum[thread] = g, beta[thread] = b, beta_decay[thread] = b * exp2_fast(g);
    }
    copy_async_wait<0>();
    __syncthreads();

    // 16 rows of each product against the tokens up to their last; later ones are masked anyway.
    int k_block = 3 - warp, q_block = warp;
    float kk[8][4], qk[8][4];
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) kk[i][j] = qk[i][j] = 0.0f;
#pragma unroll
    for (int step = 0; step < HEAD / 16; step++) {
        u32 from_k[4], from_q[4];
        load_matrix_x4(from_k, unit_256(k_tile, k_block * 16 + lane % 16, step * 2 + lane / 16));
        load_matrix_x4(from_q, unit_256(x_tile, q_block * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
        for (int block = 0; block < 4; block++) {
            if (block > k_block && block > q_block) continue;
            u32 b[4];
            load_matrix_x4(b, unit_256(k_tile, block * 16 + lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2));
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

    __syncthreads(); // everyone is done with q
    load_tile<128, TILE * 2>(x_tile, tiles + (u64)(2 * shape.key_heads + head) * TILE);
    copy_async_commit();
    u32 p_tile = shared_address(t_tile);
#pragma unroll
    for (int i = 0; i < 8; i++) { // blocks above the diagonal are never read, of A or of P
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
            if (i / 2 <= q_block) {
                int row = q_block * 16 + group + half * 8;
                float sum = g_sum[row];
                store_shared(unit_128(p_tile, row, i) + pair * 4,
                             pack_half2(column <= row ? qk[i][half * 2] * exp2_fast(sum - sums.x) : 0.0f,
                                        column < row ? qk[i][half * 2 + 1] * exp2_fast(sum - sums.y) : 0.0f));
            }
        }
    }
    __syncthreads();
    write_out<P_TILE * 2>(p_out + tile * P_TILE, p_tile);
    copy_async_wait<0>();
    invert(t_tile, a_tile);

    float sum[16][4];
    u32 u_tile = shared_address(a_tile); // A is done with; U leaves as SPLIT tiles of 64 x 32
    apply(sum, t_tile, beta, x_tile, q_block);
#pragma unroll
    for (int i = 0; i < 16; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            store_shared(unit_64(u_tile + i / 4 * (TILE * 2 / SPLIT), q_block * 16 + group + half * 8, i % 4) + pair * 4,
                         pack_half2(sum[i][half * 2], sum[i][half * 2 + 1]));
    apply(sum, t_tile, beta_decay, k_tile, k_block);
    __syncthreads(); // U is whole, and V has been read: W takes its place
    write_out<TILE * 2>(u_out + tile * TILE, u_tile);
#pragma unroll
    for (int i = 0; i < 16; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            store_shared(unit_256(x_tile, k_block * 16 + group + half * 8, i) + pair * 4, pack_half2(sum[i][half * 2], sum[i][half * 2 + 1]));
    __syncthreads();
    write_out<TILE * 2>(w_out + tile * TILE, x_tile);
}

// ---- across chunks ----

#define SCAN_THREADS 256
#define STAGE_BYTES (3 * TILE * 2 + P_TILE * 2 + TILE * 2 / SPLIT)

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
    int head = blockIdx.x / SPLIT, slice = blockIdx.x % SPLIT, first_column = slice * WIDTH;
    wait_for_previous_kernel();
    let_next_kernel_start();
    Piece piece = pieces[blockIdx.y];
    int key_head = head / (shape.value_heads / shape.key_heads), heads = 2 * shape.key_heads + shape.value_heads;
    int chunk_count = (piece.count + CHUNK - 1) / CHUNK, width = shape.value_heads * HEAD;
    u32 s_tile = shared_address(shared), v_tile = s_tile + HEAD * 64, scaled_tile = v_tile + CHUNK * 64;
    u32 stage_tiles = scaled_tile + CHUNK * 64;

    float s[2][4][4];
    u64 state_base = ((u64)piece.slot * shape.value_heads + head) * HEAD * HEAD;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[m][n][i] = carries && piece.context > 0
                                 ? read_state(state, state_base + state_offset(m, n, i, warp, first_column), shape.state_type) : 0.0f;

    auto load = [&](int chunk) { // W, Q, K, P and the columns of U
        u64 index = piece.first_chunk + chunk, tile = index * shape.value_heads + head;
        const f16 *q = conv + (index * heads + key_head) * TILE;
        u32 to = stage_tiles + (stages > 1 ? chunk % 2 : 0) * STAGE_BYTES;
        load_tile<SCAN_THREADS, TILE * 2>(to, w_in + tile * TILE);
        load_tile<SCAN_THREADS, TILE * 2>(to + TILE * 2, q);
        load_tile<SCAN_THREADS, TILE * 2>(to + 2 * TILE * 2, q + (u64)shape.key_heads * TILE);
        load_tile<SCAN_THREADS, P_TILE * 2>(to + 3 * TILE * 2, p_in + tile * P_TILE);
        load_tile<SCAN_THREADS, TILE * 2 / SPLIT>(to + 3 * TILE * 2 + P_TILE * 2, u_in + tile * TILE + slice * (TILE / SPLIT));
        copy_async_commit();
        if (thread < CHUNK) g_sum[chunk % 2][thread] = g_in[tile * CHUNK + thread];
    };
    if (stages > 1) load(0);

    for (int chunk = 0; chunk < chunk_count; chunk++) {
        if (carries) store_state_half(s_tile, s, warp);
        if (stages == 1) load(chunk);
        copy_async_wait<0>();
        __syncthreads(); // this chunk's tiles and S are here; the other stage is free
        if (stages > 1 && chunk + 1 < chunk_count) load(chunk + 1);
        u32 w_tile = stage_tiles + (stages > 1 ? chunk % 2 : 0) * STAGE_BYTES, q_tile = w_tile + TILE * 2;
        u32 k_tile = q_tile + TILE * 2, p_tile = k_tile + TILE * 2, u_tile = p_tile + P_TILE * 2;
        const float *g = g_sum[chunk % 2];
        float sum[4][4];
        u32 rows[HEAD / 16][4];
        load_rows(rows, carries ? w_tile : q_tile, warp);
        multiply_state(sum, rows, s_tile);
        if (carries) {
            u32 u[2][4];
            load_inputs(u, u_tile, warp);
            store_values(sum, u, g, v_tile, scaled_tile, warp);
        } else {
            decay_rows(sum, g, warp);
        }
        __syncthreads(); // V' is here, and every warp is done with S
        if (carries) {
            u32 keys[CHUNK / 16][2][4];
            load_keys(keys, k_tile, warp);
            update_state(s, keys, scaled_tile, __expf(g[CHUNK - 1]));
        } else {
            u32 weights[CHUNK / 16][4];
            load_weights(weights, p_tile, warp);
            add_inside(sum, weights, v_tile, warp);
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
            for (int i = 0; i < 4; i++)
                write_state(state, state_base + state_offset(m, n, i, warp, first_column), shape.state_type, s[m][n][i]);
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
            make_uint2(pack_half2(x.x * scale * w.x * silu_short(low.x), x.y * scale * w.y * silu_short(low.y)),
                       pack_half2(x.z * scale * w.z * silu_short(high.x), x.w * scale * w.w * silu_short(high.y)));
    }
    if (chunk.y + CHUNK >= piece.count) keep_window(mixed, window, piece, shape, head * 128 + threadIdx.x, shape.value_heads * 128);
}
