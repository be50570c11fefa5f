// Causal attention of prompt chunks over the paged KV cache (flash prefill), fp16 tensor cores, fp32 softmax and sums.
//
// q [rows, q_stride] holds heads of D halves, rotated and normed; K and V of the new tokens are in the cache already. A
// chunk of n new tokens after c cached ones sees keys 0 ..= c + i at row i. One block computes TILE_ROWS rows of one head:
// it walks the keys in tiles of TILE_KEYS, keeping a running maximum and sum for each row, so scores never leave registers.
// Bytes: q and out once, K and V once a block (the heads that share them run together and find them in the L2).
// FLOPs: 4 D a visible (row, key) pair.
//
// Shared memory holds rows of D halves in 16-byte units; unit u of row r lies at u ^ (r % 8), so that the eight rows an
// ldmatrix reads fall into different banks.
#include "step.cuh"

// 128 rows of 256 halves and two key tiles take 128 KB of shared memory, which only the datacentre parts have.
#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
#define WARPS 8
#else
#define WARPS 4
#endif
#define TILE_ROWS (16 * WARPS)
#define TILE_KEYS 64

// K and V of one layer: strides in halves.
struct Cache {
    const f16 *keys, *values;
    u64 block_stride;
    u32 token_stride, head_stride, block_tokens;
    const int *tables; // [chunks' table rows, table_stride] block ids
    int table_stride;
};

template <int D> DEVICE u32 unit_address(u32 base, int row, int unit) {
    return base + (u32)(row * (D / 8) + (unit ^ (row & 7))) * 16;
}

// Copies TILE_KEYS rows of K or V. A group of D/8 lanes copies a row, in PASSES rows a tile; lane p of a group keeps where row
// p of its group begins.
template <int D> struct Loader {
    static constexpr int UNITS = D / 8, ROWS_A_PASS = WARPS * 32 / UNITS, PASSES = TILE_KEYS / ROWS_A_PASS;
    long long offset; // in halves; negative past the end, where zeros are copied

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
#pragma unroll 4
        for (int pass = 0; pass < PASSES; pass++, row += ROWS_A_PASS) {
            long long at = __shfl_sync(0xffffffffu, offset, pass, UNITS);
            copy_async_16(unit_address<D>(to, row, unit), from + (at < 0 ? 0 : at) + unit * 8, at >= 0);
        }
    }
};

template <int D>
DEVICE void attend(const f16 *q, int q_stride, const f16 *gate, int gate_stride, int gate_head_stride, f16 *out,
                   int out_stride, Cache cache, const Chunk *chunks, const int2 *tiles, int heads_a_kv_head,
                   float scale_log2) {
    extern __shared__ __align__(128) unsigned char shared[];
    constexpr int UNITS = D / 8, KEY_TILES = TILE_KEYS / 8;
    u32 q_tile = shared_address(shared), k_tile = q_tile + TILE_ROWS * D * 2, v_tile = k_tile + TILE_KEYS * D * 2;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
    int head = blockIdx.x;
    wait_for_previous_kernel();
    let_next_kernel_start();
    int2 tile = tiles[blockIdx.y];
    Chunk chunk = chunks[tile.x];
    int first_query = tile.y, queries = min(TILE_ROWS, chunk.new_tokens - first_query);
    int end = chunk.context_tokens + first_query + queries; // keys any row of the tile sees
    const int *table = cache.tables + (u64)chunk.table * cache.table_stride;
    const f16 *keys = cache.keys + (u64)(head / heads_a_kv_head) * cache.head_stride;
    const f16 *values = cache.values + (u64)(head / heads_a_kv_head) * cache.head_stride;
    u64 first_row = (u64)chunk.first_row + first_query;

    for (int i = threadIdx.x; i < TILE_ROWS * UNITS; i += WARPS * 32) {
        int row = i / UNITS, unit = i % UNITS;
        const f16 *from = q + (first_row + min(row, queries - 1)) * q_stride + head * D + unit * 8;
        copy_async_16(unit_address<D>(q_tile, row, unit), from, row < queries);
    }
    Loader<D> loader; // of the tile whose K was loaded last
    loader.locate(cache, table, 0, end);
    loader.load(k_tile, keys);
    copy_async_commit();

    float o[D / 8][4];
#pragma unroll
    for (int i = 0; i < D / 8; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
    // Rows `group` and `group + 8` of the warp's 16: largest score so far (times scale, base 2) and sum of weights.
    float largest[2] = {-1e30f, -1e30f}, total[2] = {0.0f, 0.0f};
    int position = chunk.context_tokens + first_query + warp * 16 + group; // of row `group`

    for (int first = 0; first < end; first += TILE_KEYS) {
        copy_async_wait<0>();
        __syncthreads(); // K is here, and every warp is done with the last V
        loader.load(v_tile, values);
        copy_async_commit();

        float s[KEY_TILES][4];
#pragma unroll
        for (int i = 0; i < KEY_TILES; i++) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.0f;
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            u32 a[4];
            load_matrix_x4(a, unit_address<D>(q_tile, warp * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
            for (int i = 0; i < KEY_TILES; i += 2) {
                u32 b[4];
                int row = i * 8 + lane % 8 + lane / 16 * 8;
                load_matrix_x4(b, unit_address<D>(k_tile, row, step * 2 + lane / 8 % 2));
                mma_16x8x16(s[i], a, b[0], b[1]);
                mma_16x8x16(s[i + 1], a, b[2], b[3]);
            }
        }

        // Mask, and fold the tile's maximum into the running one. Maxima are of raw scores; the scale goes into the
        // exponent's multiply-add.
        if (first + TILE_KEYS > chunk.context_tokens + first_query + warp * 16 + 1) {
#pragma unroll
            for (int i = 0; i < KEY_TILES; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (first + i * 8 + pair * 2 + j % 2 > position + j / 2 * 8) s[i][j] = -1e30f;
        }
        float rescale[2], shift[2];
#pragma unroll
        for (int row = 0; row < 2; row++) {
            float m = largest[row];
#pragma unroll
            for (int i = 0; i < KEY_TILES; i++) m = fmaxf(m, fmaxf(s[i][row * 2], s[i][row * 2 + 1]));
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
            rescale[row] = exp2_fast((largest[row] - m) * scale_log2);
            largest[row] = m, shift[row] = m * scale_log2;
            total[row] *= rescale[row];
        }
        u32 p[KEY_TILES][2];
#pragma unroll
        for (int i = 0; i < KEY_TILES; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                s[i][j] = exp2_fast(s[i][j] * scale_log2 - shift[j / 2]);
                total[j / 2] += s[i][j];
            }
            p[i][0] = pack_half2(s[i][0], s[i][1]);
            p[i][1] = pack_half2(s[i][2], s[i][3]);
        }
        if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) { // rare once the largest score was met
#pragma unroll
            for (int i = 0; i < D / 8; i++) {
                o[i][0] *= rescale[0], o[i][1] *= rescale[0];
                o[i][2] *= rescale[1], o[i][3] *= rescale[1];
            }
        }

        copy_async_wait<0>();
        __syncthreads(); // V is here, and every warp is done with K
        loader.locate(cache, table, first + TILE_KEYS, end);
        if (first + TILE_KEYS < end) loader.load(k_tile, keys);
        copy_async_commit();
#pragma unroll
        for (int step = 0; step < TILE_KEYS / 16; step++) {
            u32 a[4] = {p[2 * step][0], p[2 * step][1], p[2 * step + 1][0], p[2 * step + 1][1]};
#pragma unroll
            for (int i = 0; i < D / 8; i += 2) {
                u32 b[4];
                load_matrix_x4_transposed(b, unit_address<D>(v_tile, step * 16 + lane % 16, i + lane / 16));
                mma_16x8x16(o[i], a, b[0], b[1]);
                mma_16x8x16(o[i + 1], a, b[2], b[3]);
            }
        }
    }

#pragma unroll
    for (int row = 0; row < 2; row++) {
        float sum = total[row];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        int query = warp * 16 + group + row * 8;
        if (query >= queries) continue;
        float inverse = 1.0f / sum;
        u32 *to = (u32 *)(out + (first_row + query) * out_stride + head * D);
        const u32 *factors = gate ? (const u32 *)(gate + (first_row + query) * gate_stride + head * gate_head_stride) : 0;
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            float x = o[i][2 * row] * inverse, y = o[i][2 * row + 1] * inverse;
            if (factors) {
                float2 g = unpack_half2(factors[i * 4 + pair]);
                x *= sigmoid(g.x), y *= sigmoid(g.y);
            }
            to[i * 4 + pair] = pack_half2(x, y);
        }
    }
}

#define PREFILL_ATTENTION(D)                                                                                          \
    KERNEL __launch_bounds__(WARPS * 32, 1) prefill_attention_##D(                                      \
        const f16 *q, int q_stride, const f16 *gate, int gate_stride, int gate_head_stride, f16 *out, int out_stride, \
        const Cache cache, const Chunk *chunks, const int2 *tiles, int heads_a_kv_head, float scale_log2) {           \
        attend<D>(q, q_stride, gate, gate_stride, gate_head_stride, out, out_stride, cache, chunks, tiles,            \
                  heads_a_kv_head, scale_log2);                                                                       \
    }

PREFILL_ATTENTION(64)
PREFILL_ATTENTION(128)
PREFILL_ATTENTION(256)
