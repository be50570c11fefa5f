// Softmax attention over the paged cache for single rows (decode tokens, drafts, and short chunks), and what comes before
// it: norms of q and k, rotation, and the write of k and v into the cache.
//
// Cache of a layer, K and V each: [blocks][kv_heads][block_tokens][head_dim] fp16. Every row has its own position p and
// sees tokens 0..=p of its sequence, whose blocks the table lists.
#include "half.cuh"

struct Heads {
    int heads, kv_heads, block_tokens;
    int qkv_pitch, gated; // halves in a row of qkv; q rows hold query and gate in turn
};

// The step's header; the width of the block table changes from step to step, the captured launches do not.
struct Header {
    u32 ring_offset, table_pitch, unused[6];
};

// Index of a row's sequence in the table of blocks, and its position; sequence < 0 marks padding.
struct Row {
    int sequence, position;
};

// ---- norm, rotation, cache write ----

struct Rotation {
    int rotary_dim, normed;
    float eps;
};

// One warp a (row, head): q heads to `q` [rows][heads][D] fp16, k and v heads into the cache. Grid (rows, ceil(units/4)),
// blocks of 128. `angles` [positions][rotary_dim / 2] holds cos and sin in fp32. Weights are fp32, with 1 + w added.
template <int D>
DEVICE void prepare(const f16 *qkv, const float *q_weight, const float *k_weight, const float2 *angles, f16 *q, f16 *k_cache,
                    f16 *v_cache, const Row *rows, const u32 *table, const Header *header, Heads shape,
                    Rotation rotation) {
    constexpr int PER_LANE = (D + 31) / 32;
    __shared__ float exchange[4][D];
    let_next_kernel_start();
    int unit = blockIdx.y * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    Row row = rows[blockIdx.x];
    int units = shape.heads + 2 * shape.kv_heads;
    if (row.sequence < 0 || unit >= units) return;
    const f16 *input = qkv + (u64)blockIdx.x * shape.qkv_pitch;
    int q_width = shape.gated ? 2 * D : D;
    bool is_q = unit < shape.heads, is_k = !is_q && unit < shape.heads + shape.kv_heads;
    int kv_head = is_k ? unit - shape.heads : unit - shape.heads - shape.kv_heads;
    const f16 *from = is_q ? input + unit * q_width
                           : input + shape.heads * q_width + ((is_k ? 0 : shape.kv_heads) + kv_head) * D;

    // All but qkv itself is there before the previous kernel ends: weights, angles, the place in the cache.
    float scale_by[PER_LANE];
    float2 turn[PER_LANE];
    int half_dim = rotation.rotary_dim / 2;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        int d = lane + 32 * i;
        scale_by[i] = rotation.normed && (is_q || is_k) ? (is_q ? q_weight : k_weight)[d] : 1.0f;
        if (d < rotation.rotary_dim) turn[i] = angles[(u64)row.position * half_dim + (d < half_dim ? d : d - half_dim)];
    }
    f16 *to;
    if (is_q) {
        to = q + ((u64)blockIdx.x * shape.heads + unit) * D;
    } else {
        u32 block = table[(u64)row.sequence * header->table_pitch + row.position / shape.block_tokens];
        u64 token = ((u64)block * shape.kv_heads + kv_head) * shape.block_tokens + row.position % shape.block_tokens;
        to = (is_k ? k_cache : v_cache) + token * D;
    }
    wait_for_previous_kernel();
    float x[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) x[i] = half_to_float(from[lane + 32 * i]);

    if (is_q || is_k) {
        if (rotation.normed) {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) squares += x[i] * x[i];
            float scale = rsqrtf(warp_sum(squares) * (1.0f / D) + rotation.eps);
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) x[i] *= scale * scale_by[i];
        }
        float *own = exchange[threadIdx.x >> 5];
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) own[lane + 32 * i] = x[i];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int d = lane + 32 * i;
            if (d < half_dim) x[i] = x[i] * turn[i].x - own[d + half_dim] * turn[i].y;
            else if (d < rotation.rotary_dim) x[i] = x[i] * turn[i].x + own[d - half_dim] * turn[i].y;
        }
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) to[lane + 32 * i] = float_to_half(x[i]);
}

#define PREPARE                                                                                                         \
    const f16 *qkv, const float *q_weight, const float *k_weight, const float2 *angles, f16 *q, f16 *k_cache,           \
        f16 *v_cache, const Row *rows, const u32 *table, const Header *header, Heads shape, Rotation rotation
#define PASS_PREPARE qkv, q_weight, k_weight, angles, q, k_cache, v_cache, rows, table, header, shape, rotation
KERNEL __launch_bounds__(128) attention_prepare_32(PREPARE) { prepare<32>(PASS_PREPARE); }
KERNEL __launch_bounds__(128) attention_prepare_64(PREPARE) { prepare<64>(PASS_PREPARE); }
KERNEL __launch_bounds__(128) attention_prepare_128(PREPARE) { prepare<128>(PASS_PREPARE); }
KERNEL __launch_bounds__(128) attention_prepare_256(PREPARE) { prepare<256>(PASS_PREPARE); }

// ---- attention of single rows, the context split over blocks ----

#define WARPS 4
#define TILE 16 // tokens a warp takes at a time
#define NO_SCORE -1.0e30f

struct Split {
    int splits, min_tiles; // grid.y, and the fewest tiles worth a block of its own
    float scale;           // of the scores, times log2(e)
};

DEVICE u32 transpose_8x8(u32 x) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(x));
    return out;
}

DEVICE uint4 load_16(const f16 *from) { return *(const uint4 *)from; }

// Grid (rows, splits, kv_heads * groups), 128 threads; a block takes up to eight query heads of one kv head and a share of
// the row's tokens, a warp 16 tokens at a time, straight from memory to registers:
//   scores^T [16 tokens x 8 heads] = K [16 x D] q^T: the order of the D products is free, so a lane loads 16 bytes of K
//   and uses them as four fragments, with q loaded in the same order;
//   out^T [D x 8 heads] += V^T [D x 16] p^T: a lane loads 16 bytes of V of four tokens and pairs them by byte permutes,
//   each row of the product being whichever d the lane holds; p comes from the scores by an 8x8 transpose.
// So nothing passes through shared memory before the warps' results are merged, and every byte of the cache is read once.
// Bytes: 4 D a token and kv head. The last block of a row and head to finish adds the parts up (`counters` starts and ends
// at zero), multiplies by sigmoid(gate) and writes fp16 [rows][heads][D].
template <int D>
DEVICE void attend(const f16 *q, const f16 *qkv, const f16 *k_cache, const f16 *v_cache, f16 *out, const Row *rows,
                   const u32 *table, const Header *header, float *parts, u32 *counters, Heads shape, Split split) {
    constexpr int LOADS = D / 32, CHUNKS = (D + 63) / 64;
    extern __shared__ float merged[]; // [WARPS][8][D]
    __shared__ float warp_max_s[WARPS][8], warp_sum_s[WARPS][8];
    __shared__ int is_last;

    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, group = lane >> 2, pair = lane & 3;
    int queries = shape.heads / shape.kv_heads, groups = (queries + 7) / 8;
    int kv_head = blockIdx.z / groups, first = (blockIdx.z % groups) * 8, count = min(8, queries - first);
    int head = kv_head * queries + first; // of this block's first query
    Row row = rows[blockIdx.x];
    let_next_kernel_start();
    if (row.sequence < 0) return;
    int tokens = row.position + 1, tiles = (tokens + TILE - 1) / TILE;
    int per_split = max((tiles + split.splits - 1) / split.splits, split.min_tiles);
    int used = (tiles + per_split - 1) / per_split; // blocks that have work
    if ((int)blockIdx.y >= used) return;
    int tile_begin = blockIdx.y * per_split, tile_end = min(tiles, tile_begin + per_split);
    const u32 *blocks = table + (u64)row.sequence * header->table_pitch;
    wait_for_previous_kernel();

    // q of head first + group, in the order K is loaded in.
    uint4 query[LOADS];
    const f16 *query_row = q + ((u64)blockIdx.x * shape.heads + head + min(group, count - 1)) * D;
#pragma unroll
    for (int j = 0; j < LOADS; j++) query[j] = load_16(query_row + 32 * j + 8 * pair);

    float acc[4 * CHUNKS][4];
#pragma unroll
    for (int i = 0; i < 4 * CHUNKS; i++) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
    float top[2] = {NO_SCORE, NO_SCORE}, sum[2] = {0.0f, 0.0f}; // of queries 2 * pair and 2 * pair + 1

    for (int tile = tile_begin + warp; tile < tile_end; tile += WARPS) {
        // A block holds whole tiles: its tokens are a multiple of 16.
        int token = tile * TILE;
        u32 block = blocks[token / shape.block_tokens];
        u64 base = (((u64)block * shape.kv_heads + kv_head) * shape.block_tokens + token % shape.block_tokens) * D;
        const f16 *keys = k_cache + base, *values = v_cache + base;
        float score[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
            uint4 low = load_16(keys + group * D + 32 * j + 8 * pair);
            uint4 high = load_16(keys + (group + 8) * D + 32 * j + 8 * pair);
            u32 a[4] = {low.x, high.x, low.y, high.y};
            mma_16x8x16(score, a, query[j].x, query[j].y);
            u32 b[4] = {low.z, high.z, low.w, high.w};
            mma_16x8x16(score, b, query[j].z, query[j].w);
        }
        // score[0], [1]: token group, queries 2 pair and 2 pair + 1; score[2], [3]: token group + 8.
        bool low_valid = token + group < tokens, high_valid = token + group + 8 < tokens;
        score[0] = low_valid ? score[0] * split.scale : NO_SCORE;
        score[1] = low_valid ? score[1] * split.scale : NO_SCORE;
        score[2] = high_valid ? score[2] * split.scale : NO_SCORE;
        score[3] = high_valid ? score[3] * split.scale : NO_SCORE;
        float best0 = fmaxf(score[0], score[2]), best1 = fmaxf(score[1], score[3]);
#pragma unroll
        for (int offset = 4; offset < 32; offset <<= 1) {
            best0 = fmaxf(best0, __shfl_xor_sync(0xffffffffu, best0, offset));
            best1 = fmaxf(best1, __shfl_xor_sync(0xffffffffu, best1, offset));
        }
        if (__any_sync(0xffffffffu, best0 > top[0] || best1 > top[1])) {
            float new0 = fmaxf(top[0], best0), new1 = fmaxf(top[1], best1);
            float shrink0 = exp2f(top[0] - new0), shrink1 = exp2f(top[1] - new1);
            top[0] = new0, top[1] = new1;
            sum[0] *= shrink0, sum[1] *= shrink1;
#pragma unroll
            for (int i = 0; i < 4 * CHUNKS; i++) {
                acc[i][0] *= shrink0, acc[i][2] *= shrink0;
                acc[i][1] *= shrink1, acc[i][3] *= shrink1;
            }
        }
        float p0 = exp2f(score[0] - top[0]), p1 = exp2f(score[1] - top[1]);
        float p2 = exp2f(score[2] - top[0]), p3 = exp2f(score[3] - top[1]);
        sum[0] += p0 + p2, sum[1] += p1 + p3;
        u32 b0 = transpose_8x8(pack_half2(p0, p1)), b1 = transpose_8x8(pack_half2(p2, p3));
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            uint4 v0 = make_uint4(0, 0, 0, 0), v1 = v0, v8 = v0, v9 = v0;
            if (D >= 64 || 8 * group < D) {
                const f16 *at = values + 64 * chunk + 8 * group;
                // Tokens past the end may be memory that was never written: their weight is 0, but 0 * NaN is not.
                if (token + 2 * pair < tokens) v0 = load_16(at + (2 * pair) * D);
                if (token + 2 * pair + 1 < tokens) v1 = load_16(at + (2 * pair + 1) * D);
                if (token + 2 * pair + 8 < tokens) v8 = load_16(at + (2 * pair + 8) * D);
                if (token + 2 * pair + 9 < tokens) v9 = load_16(at + (2 * pair + 9) * D);
            }
            const u32 x0[4] = {v0.x, v0.y, v0.z, v0.w}, x1[4] = {v1.x, v1.y, v1.z, v1.w};
            const u32 x8[4] = {v8.x, v8.y, v8.z, v8.w}, x9[4] = {v9.x, v9.y, v9.z, v9.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 a[4] = {__byte_perm(x0[i], x1[i], 0x5410), __byte_perm(x0[i], x1[i], 0x7632),
                            __byte_perm(x8[i], x9[i], 0x5410), __byte_perm(x8[i], x9[i], 0x7632)};
                mma_16x8x16(acc[4 * chunk + i], a, b0, b1);
            }
        }
    }

    // Merge the warps. acc[4c + i]: d = 64 c + 8 group + 2 i (rows 0, 1) and that + 1 (rows 2, 3).
#pragma unroll
    for (int offset = 4; offset < 32; offset <<= 1) {
        sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], offset);
        sum[1] += __shfl_xor_sync(0xffffffffu, sum[1], offset);
    }
    if (group == 0) {
        warp_max_s[warp][2 * pair] = top[0], warp_max_s[warp][2 * pair + 1] = top[1];
        warp_sum_s[warp][2 * pair] = sum[0], warp_sum_s[warp][2 * pair + 1] = sum[1];
    }
    __syncthreads();
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float best = NO_SCORE;
#pragma unroll
        for (int w = 0; w < WARPS; w++) best = fmaxf(best, warp_max_s[w][2 * pair + i]);
        shrink[i] = exp2f(top[i] - best);
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        if (D < 64 && 8 * group >= D) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int d = 64 * chunk + 8 * group + 2 * i;
            const float *x = acc[4 * chunk + i];
            if (2 * pair < count)
                *(float2 *)&merged[(warp * count + 2 * pair) * D + d] = make_float2(x[0] * shrink[0], x[2] * shrink[0]);
            if (2 * pair + 1 < count)
                *(float2 *)&merged[(warp * count + 2 * pair + 1) * D + d] = make_float2(x[1] * shrink[1], x[3] * shrink[1]);
        }
    }
    __syncthreads();

    int q_width = shape.gated ? 2 * D : D;
    const f16 *gates = qkv + (u64)blockIdx.x * shape.qkv_pitch + head * q_width + D;
    f16 *result = out + ((u64)blockIdx.x * shape.heads + head) * D;
    // A part: [count * D] sums, then top and sum of each query.
    u64 part_size = 8 * D + 16, slot = (u64)blockIdx.x * gridDim.z + blockIdx.z;
    float *part = parts + (slot * split.splits + blockIdx.y) * part_size;
    for (int at = tid; at < count * D; at += 32 * WARPS) {
        int query_index = at / D, d = at % D;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += merged[w * count * D + at];
        float best = NO_SCORE, weight = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) best = fmaxf(best, warp_max_s[w][query_index]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) weight += warp_sum_s[w][query_index] * exp2f(warp_max_s[w][query_index] - best);
        if (used == 1) {
            float value = total / weight;
            if (shape.gated) value *= sigmoid(half_to_float(gates[query_index * q_width + d]));
            result[at] = float_to_half(value);
        } else {
            part[at] = total;
            if (d == 0) part[8 * D + query_index] = best, part[8 * D + 8 + query_index] = weight;
        }
    }
    if (used == 1) return;

    __threadfence();
    __syncthreads();
    if (tid == 0) is_last = atomicAdd(&counters[slot], 1) == (u32)used - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (tid == 0) counters[slot] = 0;
    const float *all = parts + slot * split.splits * part_size;
    for (int at = tid; at < count * D; at += 32 * WARPS) {
        int query_index = at / D, d = at % D;
        float best = NO_SCORE, weight = 0.0f, total = 0.0f;
        for (int s = 0; s < used; s++) best = fmaxf(best, __ldcg(&all[s * part_size + 8 * D + query_index]));
        for (int s = 0; s < used; s++) {
            float factor = exp2f(__ldcg(&all[s * part_size + 8 * D + query_index]) - best);
            weight += factor * __ldcg(&all[s * part_size + 8 * D + 8 + query_index]);
            total += factor * __ldcg(&all[s * part_size + at]);
        }
        float value = total / weight;
        if (shape.gated) value *= sigmoid(half_to_float(gates[query_index * q_width + d]));
        result[at] = float_to_half(value);
    }
}

#define ATTEND                                                                                                          \
    const f16 *q, const f16 *qkv, const f16 *k_cache, const f16 *v_cache, f16 *out, const Row *rows, const u32 *table,   \
        const Header *header, float *parts, u32 *counters, Heads shape, Split split
#define PASS_ATTEND q, qkv, k_cache, v_cache, out, rows, table, header, parts, counters, shape, split
KERNEL __launch_bounds__(128, 2) attention_rows_32(ATTEND) { attend<32>(PASS_ATTEND); }
KERNEL __launch_bounds__(128, 2) attention_rows_64(ATTEND) { attend<64>(PASS_ATTEND); }
KERNEL __launch_bounds__(128, 2) attention_rows_128(ATTEND) { attend<128>(PASS_ATTEND); }
KERNEL __launch_bounds__(128, 2) attention_rows_256(ATTEND) { attend<256>(PASS_ATTEND); }

// ---- cos and sin of every position, once a session ----

// angles [positions][pairs]; double, because the angle of position 30,000 loses three digits in fp32.
KERNEL rotation_table(const double *inverse_frequencies, float2 *angles, int pairs, u64 total) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= total) return;
    double angle = (double)(at / pairs) * inverse_frequencies[at % pairs];
    double sine, cosine;
    sincos(angle, &sine, &cosine);
    angles[at] = make_float2((float)cosine, (float)sine);
}
