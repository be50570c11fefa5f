// prefill_attention.cu for sm_90a: the same function on warpgroup matrix products.
//
// One block is two warpgroups of 64 query rows each. Within a warpgroup the scores of key tile j+1 and the weighted values of
// tile j are on the tensor cores at once, and the softmax of tile j+1 runs under the latter. K and V sit in two slots
// each; at the top of an iteration everything it needs has arrived and what the last one read may be overwritten, so one
// barrier a tile is enough. See prefill_attention.cu for shapes, bytes and the masking rule.
#include "wgmma.cuh"

#define TILE_ROWS 128
#define TILE_KEYS 64
#define THREADS 256
#define PANEL (TILE_KEYS * 128) // bytes of 64 rows of 64 halves

struct Chunk {
    int first_row, new_tokens, context_tokens, table;
};

struct Cache {
    const f16 *keys, *values;
    u64 block_stride;
    u32 token_stride, head_stride, block_tokens;
    const int *tables;
    int table_stride;
};

// Address of 16-byte unit `unit` of row `row` in a tile of 64 rows, swizzled by 128 bytes.
DEVICE u32 unit_address(u32 base, int row, int unit) {
    return base + (u32)(unit / 8 * PANEL + row * 128 + ((unit ^ row) & 7) * 16);
}

// A group of D/8 lanes copies a row, in PASSES rows a tile; lane p of a group keeps where row p of its group begins.
template <int D> struct Loader {
    static constexpr int UNITS = D / 8, ROWS_A_PASS = THREADS / UNITS, PASSES = TILE_KEYS / ROWS_A_PASS;
    long long offset; // in halves; negative past the end

    __device__ __forceinline__ void locate(const Cache &cache, const int *table, int first, int end) {
        int pass = threadIdx.x % UNITS, token = first + threadIdx.x / UNITS + pass * ROWS_A_PASS;
        offset = -1;
        if (pass < PASSES && token < end) {
            u32 block = (u32)token / cache.block_tokens, within = (u32)token - block * cache.block_tokens;
            offset = (long long)table[block] * cache.block_stride + (long long)within * cache.token_stride;
        }
    }

    __device__ __forceinline__ void load(u32 to, const f16 *from) const {
        int unit = threadIdx.x % UNITS, row = threadIdx.x / UNITS;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++, row += ROWS_A_PASS) {
            long long at = __shfl_sync(0xffffffffu, offset, pass, UNITS);
            copy_async_16(unit_address(to, row, unit), from + (at < 0 ? 0 : at) + unit * 8, at >= 0);
        }
    }
};

DEVICE void add_product(float (&o)[64], const u32 (&a)[4], u64 b) { wgmma_64x128(o, a, b); }
DEVICE void add_product(float (&o)[128], const u32 (&a)[4], u64 b) { wgmma_64x256(o, a, b); }

// Queues s = q k^T.
template <int D> DEVICE void start_scores(float (&s)[32], u32 q_tile, u32 k_tile) {
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
        u32 offset = step / 4 * PANEL + step % 4 * 32;
        wgmma_64x64(s, descriptor_rows(q_tile + offset), descriptor_rows(k_tile + offset), step > 0);
    }
    wgmma_commit();
}

// Turns scores into weights; returns the factors by which earlier sums shrink. Maxima are of raw scores; the scale goes into
// the exponent's multiply-add.
DEVICE void softmax(float (&s)[32], float (&largest)[2], float (&total)[2], float (&rescale)[2], int first, int position,
                    float scale_log2) {
    int pair = threadIdx.x % 4;
    if (first + TILE_KEYS > position + 1) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            int key = first + i / 4 * 8 + pair * 2 + i % 2;
            if (key > position + i / 2 % 2 * 8) s[i] = -1e30f;
        }
    }
    float m[2] = {largest[0], largest[1]};
#pragma unroll
    for (int i = 0; i < 32; i++) m[i / 2 % 2] = fmaxf(m[i / 2 % 2], s[i]);
#pragma unroll
    for (int row = 0; row < 2; row++) {
        m[row] = fmaxf(m[row], __shfl_xor_sync(0xffffffffu, m[row], 1));
        m[row] = fmaxf(m[row], __shfl_xor_sync(0xffffffffu, m[row], 2));
        rescale[row] = exp2_fast((largest[row] - m[row]) * scale_log2);
        largest[row] = m[row];
        total[row] *= rescale[row];
    }
    float shift[2] = {largest[0] * scale_log2, largest[1] * scale_log2};
#pragma unroll
    for (int i = 0; i < 32; i++) {
        s[i] = exp2_fast(s[i] * scale_log2 - shift[i / 2 % 2]);
        total[i / 2 % 2] += s[i];
    }
}

// Weights as the next product wants them. Not while a product still reads p.
DEVICE void pack_weights(const float (&s)[32], u32 (&p)[4][4]) {
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[step][i] = pack_half2(s[step * 8 + i * 2], s[step * 8 + i * 2 + 1]);
}

// Queues o += p v.
template <int D> DEVICE void start_values(float (&o)[D / 2], const u32 (&p)[4][4], u32 v_tile) {
#pragma unroll
    for (int step = 0; step < 4; step++) add_product(o, p[step], descriptor_columns(v_tile + step * 2048, PANEL));
    wgmma_commit();
}

template <int D>
DEVICE void attend(const f16 *q, int q_stride, const f16 *gate, int gate_stride, int gate_head_stride, f16 *out,
                   int out_stride, const Cache &cache, const Chunk *chunks, const int2 *tiles, int heads_a_kv_head,
                   float scale_log2) {
    extern __shared__ unsigned char shared[];
    constexpr int UNITS = D / 8, TILE_BYTES = TILE_KEYS * D * 2;
    u32 base = (shared_address(shared) + 1023) & ~1023u;
    u32 q_tiles = base, k_tiles = base + 2 * TILE_BYTES, v_tiles = base + 4 * TILE_BYTES;
    int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int head = blockIdx.x;
    wait_for_previous_kernel();
    let_next_kernel_start();
    int2 tile = tiles[blockIdx.y];
    Chunk chunk = chunks[tile.x];
    int first_query = tile.y, queries = min(TILE_ROWS, chunk.new_tokens - first_query);
    int end = chunk.context_tokens + first_query + queries;
    int key_tiles = (end + TILE_KEYS - 1) / TILE_KEYS;
    const int *table = cache.tables + (u64)chunk.table * cache.table_stride;
    const f16 *keys = cache.keys + (u64)(head / heads_a_kv_head) * cache.head_stride;
    const f16 *values = cache.values + (u64)(head / heads_a_kv_head) * cache.head_stride;
    u64 first_row = (u64)chunk.first_row + first_query;

    for (int i = threadIdx.x; i < TILE_ROWS * UNITS; i += THREADS) {
        int row = i / UNITS, unit = i % UNITS;
        const f16 *from = q + (first_row + min(row, queries - 1)) * q_stride + head * D + unit * 8;
        copy_async_16(unit_address(q_tiles + row / 64 * TILE_BYTES, row % 64, unit), from, row < queries);
    }
    Loader<D> loader;
    loader.locate(cache, table, 0, end);
    loader.load(k_tiles, keys);
    copy_async_commit();
    loader.load(v_tiles, values);
    loader.locate(cache, table, TILE_KEYS, end); // from here on, of the tile whose K was or is loaded last
    if (key_tiles > 1) loader.load(k_tiles + TILE_BYTES, keys);
    copy_async_commit();

    float o[D / 2], s[32];
    u32 p[4][4];
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] = 0.0f;
    float largest[2] = {-1e30f, -1e30f}, total[2] = {0.0f, 0.0f}, rescale[2];
    int query = group * 64 + warp * 16 + lane / 4; // and query + 8
    int position = chunk.context_tokens + first_query + query;
    u32 q_tile = q_tiles + group * TILE_BYTES;

    copy_async_wait<1>();
    shared_write_fence();
    __syncthreads();
    wgmma_fence();
    start_scores<D>(s, q_tile, k_tiles);
    wgmma_wait<0>();
    hold(s);
    softmax(s, largest, total, rescale, 0, position, scale_log2);
    pack_weights(s, p);

    for (int j = 0; j + 1 < key_tiles; j++) {
        copy_async_wait<0>();
        shared_write_fence();
        __syncthreads(); // K of j+1 and V of j are here; K of j and V of j-1 are done with
        wgmma_fence();
        start_scores<D>(s, q_tile, k_tiles + (j + 1) % 2 * TILE_BYTES);
        start_values<D>(o, p, v_tiles + j % 2 * TILE_BYTES);
        loader.load(v_tiles + (j + 1) % 2 * TILE_BYTES, values);
        loader.locate(cache, table, (j + 2) * TILE_KEYS, end);
        if (j + 2 < key_tiles) loader.load(k_tiles + j % 2 * TILE_BYTES, keys);
        copy_async_commit();
        wgmma_wait<1>();
        hold(s);
        softmax(s, largest, total, rescale, (j + 1) * TILE_KEYS, position, scale_log2);
        wgmma_wait<0>();
        hold(o);
        hold(s); // p is free only now
        pack_weights(s, p);
        if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) { // rare once the largest score was met
#pragma unroll
            for (int i = 0; i < D / 2; i++) o[i] *= rescale[i / 2 % 2];
        }
    }
    copy_async_wait<0>();
    shared_write_fence();
    __syncthreads();
    wgmma_fence();
    start_values<D>(o, p, v_tiles + (key_tiles - 1) % 2 * TILE_BYTES);
    wgmma_wait<0>();
    hold(o);

#pragma unroll
    for (int row = 0; row < 2; row++) {
        float sum = total[row];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        int at = query + row * 8;
        if (at >= queries) continue;
        float inverse = 1.0f / sum;
        u32 *to = (u32 *)(out + (first_row + at) * out_stride + head * D);
        const u32 *factors = gate ? (const u32 *)(gate + (first_row + at) * gate_stride + head * gate_head_stride) : 0;
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            float x = o[i * 4 + row * 2] * inverse, y = o[i * 4 + row * 2 + 1] * inverse;
            if (factors) {
                float2 g = unpack_half2(factors[i * 4 + lane % 4]);
                x *= sigmoid(g.x), y *= sigmoid(g.y);
            }
            to[i * 4 + lane % 4] = pack_half2(x, y);
        }
    }
}

#define PREFILL_ATTENTION(D)                                                                                          \
    KERNEL __launch_bounds__(THREADS, 1) prefill_attention_##D(                                                       \
        const f16 *q, int q_stride, const f16 *gate, int gate_stride, int gate_head_stride, f16 *out, int out_stride, \
        const Cache cache, const Chunk *chunks, const int2 *tiles, int heads_a_kv_head, float scale_log2) {           \
        attend<D>(q, q_stride, gate, gate_stride, gate_head_stride, out, out_stride, cache, chunks, tiles,            \
                  heads_a_kv_head, scale_log2);                                                                       \
    }

PREFILL_ATTENTION(128)
PREFILL_ATTENTION(256)
