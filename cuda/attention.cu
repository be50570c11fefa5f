// Softmax attention over the paged cache for single rows (decode tokens, drafts, and short chunks), and what comes before
// it: norms of q and k, rotation, and the write of k and v into the cache.
//
// Cache of a layer, K and V each: [blocks][kv_heads][block_tokens][head_dim] fp16. Every row has its own position p and
// sees tokens 0..=p of its sequence, whose blocks the table lists.
#include "step.cuh"

struct Heads {
    int heads, kv_heads, block_tokens;
    int qkv_pitch, gated; // halves in a row of qkv; q rows hold query and gate in turn
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

// One warp a (row, unit), units being q heads (to `q` [rows][heads][D] fp16), then k heads and v heads (into the cache), of
// which `first_unit..end_unit` are done. Grid (rows, ceil(units/4)), blocks of 128. `angles` [positions][rotary_dim / 2] holds
// cos and sin in fp32. Weights are fp32, with 1 + w added.
template <int D>
DEVICE void prepare(const f16 *qkv, const float *q_weight, const float *k_weight, const float2 *angles, f16 *q, f16 *k_cache,
                    f16 *v_cache, const Row *rows, const u32 *table, const Header *header, Heads shape,
                    Rotation rotation, int first_unit, int end_unit) {
    constexpr int PER_LANE = (D + 31) / 32;
    __shared__ float exchange[4][D];
    let_next_kernel_start();
    int unit = first_unit + blockIdx.y * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    Row row = rows[blockIdx.x];
    if (row.sequence < 0 || unit >= end_unit) return;
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
        f16 *v_cache, const Row *rows, const u32 *table, const Header *header, Heads shape, Rotation rotation,          \
        int first_unit, int end_unit
#define PASS_PREPARE                                                                                                    \
    qkv, q_weight, k_weight, angles, q, k_cache, v_cache, rows, table, header, shape, rotation, first_unit, end_unit
KERNEL __launch_bounds__(128) attention_prepare_32(PREPARE) { prepare<32>(PASS_PREPARE); }
KERNEL __launch_bounds__(128) attention_prepare_64(PREPARE) { prepare<64>(PASS_PREPARE); }
KERNEL __launch_bounds__(128) attention_prepare_128(PREPARE) { prepare<128>(PASS_PREPARE); }
KERNEL __launch_bounds__(128) attention_prepare_256(PREPARE) { prepare<256>(PASS_PREPARE); }

// ---- attention of single rows, the context split over blocks ----

#define WARPS 4
#define TILE 16 // tokens a warp takes at a time
#define SLOTS 2 // tiles of K or V in a warp's ring
#define NO_SCORE -1.0e30f
#define SHORT_TILES 32 // of a context whose blocks take a tile a warp, all of it on its way before the wait

struct Split {
    int splits, min_tiles; // grid.y, and the fewest tiles of a longer context worth a block of its own
    float scale;           // of the scores, times log2(e)
    int recent;            // a sequence's last tokens that this step writes, at most
};

DEVICE u32 transpose_8x8(u32 x) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(x));
    return out;
}

// Byte of a 16-byte chunk in rows of D halves: eight rows at the same chunk meet no bank twice.
template <int D> DEVICE u32 place(u32 row, u32 chunk) {
    u32 turn = D >= 64 ? row & 7 : row >> 1 & 3;
    return row * 2 * D + (chunk ^ turn) * 16;
}

// Grid (rows, splits, kv_heads * groups), 128 threads; a block takes up to eight query heads of one kv head and a share of
// the row's tokens, a warp 16 tokens at a time:
//   scores^T [16 tokens x 8 heads] = K [16 x D] q^T, then out^T [D x 8 heads] += V^T [D x 16] p^T,
// K and V through a ring of the warp's own in shared memory, K and V of a tile in turn, the next ones on their way while one
// is used. Tokens that earlier steps wrote are asked for before the wait for the previous kernel.
// Bytes: 4 D a token and kv head. The last block of a row and head to finish adds the parts up (`counters` starts and ends
// at zero), multiplies by sigmoid(gate) and writes fp16 [rows][heads][D].
// Dynamic shared memory: WARPS * SLOTS * 32 D bytes of rings and 16 D of q.
template <int D>
DEVICE void attend(const f16 *q, const f16 *qkv, const f16 *k_cache, const f16 *v_cache, f16 *out, const Row *rows,
                   const u32 *table, const Header *header, float *parts, u32 *counters, Heads shape, Split split) {
    constexpr int STEPS = D / 16, CHUNKS = D / 8, SLOT = TILE * 2 * D, COPIES = TILE * CHUNKS / 32, PITCH = D + 4;
    constexpr int UNITS = (8 * CHUNKS + 32 * WARPS - 1) / (32 * WARPS); // of 8 outputs, a thread
    extern __shared__ __align__(128) u8 shared[];
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
    int per_split = max((tiles + split.splits - 1) / split.splits, tiles <= SHORT_TILES ? WARPS : split.min_tiles);
    int used = (tiles + per_split - 1) / per_split; // blocks that have work
    if ((int)blockIdx.y >= used) return;
    int tile_begin = blockIdx.y * per_split, tile_end = min(tiles, tile_begin + per_split);
    const u32 *blocks = table + (u64)row.sequence * header->table_pitch;

    u8 *q_rows = shared + WARPS * SLOTS * SLOT, *own_ring = shared + warp * SLOTS * SLOT;
    u32 ring = shared_address(own_ring);
    // The warp's tiles are tile_begin + warp + WARPS * n; lane l keeps the block of the one with n % 32 = l.
    int mine = (tile_end - tile_begin - warp + WARPS - 1) / WARPS;
    u32 ids = 0;
    auto first_token = [&](int n) { return (tile_begin + warp + WARPS * n) * TILE; };
    auto load_ids = [&](int n) {
        if (n + lane < mine) ids = blocks[first_token(n + lane) / shape.block_tokens];
    };
    load_ids(0);
    // Asks for K (even) or V (odd) of tile half / 2. A block of the cache holds whole tiles: its tokens are a multiple of 16.
    // Tokens past the end are zeros: a weight of 0 would not silence a NaN.
    int to_slot = 0;
    auto fetch = [&](int half) {
        int n = half >> 1;
        if (n < mine) {
            if (half > 0 && (half & 63) == 0) load_ids(n);
            int token = first_token(n);
            u32 block = __shfl_sync(0xffffffffu, ids, n & 31);
            u64 base = (((u64)block * shape.kv_heads + kv_head) * shape.block_tokens + token % shape.block_tokens) * D;
            const f16 *from = (half & 1 ? v_cache : k_cache) + base;
            u32 to = ring + to_slot * SLOT;
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                int r = (lane + 32 * i) / CHUNKS, chunk = (lane + 32 * i) % CHUNKS;
                copy_async_16(to + place<D>(r, chunk), from + r * D + chunk * 8, token + r < tokens);
            }
        }
        copy_async_commit();
        to_slot = to_slot + 1 == SLOTS ? 0 : to_slot + 1;
    };
    // All of a tile was written by earlier steps. (Older tiles come first, so the order of the ring holds.)
    auto is_old = [&](int half) {
        return first_token(half >> 1) + TILE - 1 <= row.position - split.recent;
    };
    int early = 0;
    while (early < SLOTS && is_old(early)) fetch(early++);

    const f16 *input = qkv + (u64)blockIdx.x * shape.qkv_pitch;
    int q_width = shape.gated ? 2 * D : D;
    wait_for_previous_kernel();
    const f16 *query_rows = q + ((u64)blockIdx.x * shape.heads + head) * D;
    for (int at = tid; at < 8 * CHUNKS; at += 32 * WARPS) {
        int r = at / CHUNKS, chunk = at % CHUNKS;
        uint4 x = r < count ? *(const uint4 *)(query_rows + r * D + chunk * 8) : make_uint4(0, 0, 0, 0);
        *(uint4 *)(q_rows + place<D>(r, chunk)) = x;
    }
    uint4 gate[UNITS];
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        int at = tid + 32 * WARPS * i;
        if (shape.gated && at < count * CHUNKS)
            gate[i] = *(const uint4 *)(input + (head + at / CHUNKS) * q_width + D + at % CHUNKS * 8);
    }
    for (; early < SLOTS; early++) fetch(early);
    __syncthreads();
    u32 query[STEPS / 2][4]; // two steps of 16 in each
#pragma unroll
    for (int s = 0; s < STEPS / 2; s++)
        load_matrix_x4(query[s], shared_address(q_rows) + place<D>(lane & 7, 4 * s + (lane >> 3)));

    float acc[STEPS][4];
#pragma unroll
    for (int i = 0; i < STEPS; i++) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
    float top[2] = {NO_SCORE, NO_SCORE}, sum[2] = {0.0f, 0.0f}; // of queries 2 * pair and 2 * pair + 1
    int slot = 0;
    // The next half tile, in place and seen by the whole warp.
    auto arrive = [&] {
        copy_async_wait<SLOTS - 1>();
        __syncwarp();
        return ring + slot * SLOT;
    };
    auto leave = [&](int half) {
        __syncwarp();
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
        fetch(half + SLOTS);
    };

    for (int n = 0; n < mine; n++) {
        int token = first_token(n);
        u32 keys = arrive();
        float score[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            u32 a[4];
            load_matrix_x4(a, keys + place<D>(lane & 15, 2 * s + (lane >> 4)));
            mma_16x8x16(score, a, query[s / 2][s % 2 * 2], query[s / 2][s % 2 * 2 + 1]);
        }
        leave(2 * n);
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
            for (int i = 0; i < STEPS; i++) {
                acc[i][0] *= shrink0, acc[i][2] *= shrink0;
                acc[i][1] *= shrink1, acc[i][3] *= shrink1;
            }
        }
        float p0 = exp2f(score[0] - top[0]), p1 = exp2f(score[1] - top[1]);
        float p2 = exp2f(score[2] - top[0]), p3 = exp2f(score[3] - top[1]);
        sum[0] += p0 + p2, sum[1] += p1 + p3;
        u32 b0 = transpose_8x8(pack_half2(p0, p1)), b1 = transpose_8x8(pack_half2(p2, p3));
        u32 values = arrive();
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            u32 a[4];
            load_matrix_x4_transposed(a, values + place<D>((lane & 7) + (lane >> 4) * 8, 2 * i + (lane >> 3 & 1)));
            mma_16x8x16(acc[i], a, b0, b1);
        }
        leave(2 * n + 1);
    }

    // Merge the warps, each in its own ring. acc[i]: d = 16 i + group of queries 2 pair and 2 pair + 1, then d + 8.
#pragma unroll
    for (int offset = 4; offset < 32; offset <<= 1) {
        sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], offset);
        sum[1] += __shfl_xor_sync(0xffffffffu, sum[1], offset);
    }
    if (group == 0) {
        warp_max_s[warp][2 * pair] = top[0], warp_max_s[warp][2 * pair + 1] = top[1];
        warp_sum_s[warp][2 * pair] = sum[0], warp_sum_s[warp][2 * pair + 1] = sum[1];
    }
    copy_async_wait<0>(); // only empty groups are left
    float *sums = (float *)own_ring;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        int d = 16 * i + group;
        if (2 * pair < count) sums[2 * pair * PITCH + d] = acc[i][0], sums[2 * pair * PITCH + d + 8] = acc[i][2];
        if (2 * pair + 1 < count)
            sums[(2 * pair + 1) * PITCH + d] = acc[i][1], sums[(2 * pair + 1) * PITCH + d + 8] = acc[i][3];
    }
    __syncthreads();

    f16 *result = out + ((u64)blockIdx.x * shape.heads + head) * D;
    // A part: [count * D] sums, then top and sum of each query.
    u64 part_size = 8 * D + 16, block_slot = (u64)blockIdx.x * gridDim.z + blockIdx.z;
    float *part = parts + (block_slot * split.splits + blockIdx.y) * part_size;
    // Eight outputs of one query, divided by the sum of weights and gated.
    auto finish = [&](int at, float (&total)[8], float weight, uint4 own_gate) {
        float factor = 1.0f / weight, gates[8];
        unpack_half8(own_gate, gates);
#pragma unroll
        for (int i = 0; i < 8; i++) total[i] *= shape.gated ? factor * sigmoid(gates[i]) : factor;
        *(uint4 *)(result + at * 8) = pack_half8(total);
    };
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        int at = tid + 32 * WARPS * i, query_index = at / CHUNKS, d = at % CHUNKS * 8;
        if (at >= count * CHUNKS) continue;
        float best = NO_SCORE, weight = 0.0f, total[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int w = 0; w < WARPS; w++) best = fmaxf(best, warp_max_s[w][query_index]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float factor = exp2f(warp_max_s[w][query_index] - best);
            weight += factor * warp_sum_s[w][query_index];
            const float4 *from = (const float4 *)((float *)(shared + w * SLOTS * SLOT) + query_index * PITCH + d);
            float4 low = from[0], high = from[1];
            total[0] += factor * low.x, total[1] += factor * low.y, total[2] += factor * low.z, total[3] += factor * low.w;
            total[4] += factor * high.x, total[5] += factor * high.y, total[6] += factor * high.z, total[7] += factor * high.w;
        }
        if (used == 1) {
            finish(at, total, weight, gate[i]);
        } else {
            ((float4 *)(part + at * 8))[0] = make_float4(total[0], total[1], total[2], total[3]);
            ((float4 *)(part + at * 8))[1] = make_float4(total[4], total[5], total[6], total[7]);
            if (d == 0) part[8 * D + query_index] = best, part[8 * D + 8 + query_index] = weight;
        }
    }
    if (used == 1) return;

    __threadfence();
    __syncthreads();
    if (tid == 0) is_last = atomicAdd(&counters[block_slot], 1) == (u32)used - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (tid == 0) counters[block_slot] = 0;
    const float *all = parts + block_slot * split.splits * part_size;
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        int at = tid + 32 * WARPS * i, query_index = at / CHUNKS;
        if (at >= count * CHUNKS) continue;
        float best = NO_SCORE, weight = 0.0f, total[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
        for (int s = 0; s < used; s++) best = fmaxf(best, __ldcg(&all[s * part_size + 8 * D + query_index]));
#pragma unroll 4
        for (int s = 0; s < used; s++) {
            const float *from = all + s * part_size;
            float factor = exp2f(__ldcg(&from[8 * D + query_index]) - best);
            weight += factor * __ldcg(&from[8 * D + 8 + query_index]);
            float4 low = __ldcg((const float4 *)(from + at * 8)), high = __ldcg((const float4 *)(from + at * 8 + 4));
            total[0] += factor * low.x, total[1] += factor * low.y, total[2] += factor * low.z, total[3] += factor * low.w;
            total[4] += factor * high.x, total[5] += factor * high.y, total[6] += factor * high.z, total[7] += factor * high.w;
        }
        finish(at, total, weight, gate[i]);
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
