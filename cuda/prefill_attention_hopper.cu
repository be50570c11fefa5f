// prefill_attention.cu for sm_90a: the same function on warpgroup matrix products.
//
// A block is two warpgroups of 64 query rows each and a producer. The producer keeps two slots of K and two of V filled by
// tensor copies, one box of 16 keys x 64 elements at a time, straight from the paged cache; the blocks of a cluster work on the
// same rows for query heads of one key-value head, copy an equal part of each tile and send it to all. Within a warpgroup the
// scores of key tile j+1 and the weighted values of tile j are on the tensor cores at once; the two groups take turns to queue
// products, so that one's softmax runs under the other's products. See prefill_attention.cu for shapes, bytes and the masking
// rule.
#include "wgmma.cuh"
#include "cluster.cuh"
#include "step.cuh"

#define TILE_ROWS 128
#define TILE_KEYS 80
#define BOX_KEYS 16 // a box never crosses a block of the cache: block_tokens is a multiple of this
#define THREADS 384
#define Q_PANEL (64 * 128) // bytes of 64 rows of 64 halves
#define PANEL (TILE_KEYS * 128)
#define SCORES (TILE_KEYS / 2) // a thread's scores of a tile

// Block ids of each sequence; K and V themselves are behind tensor maps of dimensions (element, token, head, block).
struct Tables {
    const int *ids;
    int stride;
    u32 block_tokens;
};

// Named barriers of the block, beside 0: whose turn it is to queue products, and one for each warpgroup by itself.
#define TURN 1
#define GROUP 3

// Address of 16-byte unit `unit` of row `row` in a tile whose panels of 64 halves are `panel` bytes apart, swizzled by 128 bytes.
DEVICE u32 unit_address(u32 base, u32 panel, int row, int unit) {
    return base + (u32)(unit / 8 * panel + row * 128 + ((unit ^ row) & 7) * 16);
}

DEVICE void add_product(float (&o)[64], const u32 (&a)[4], u64 b) { wgmma_64x128(o, a, b); }
DEVICE void add_product(float (&o)[128], const u32 (&a)[4], u64 b) { wgmma_64x256(o, a, b); }

// Queues s = q k^T.
template <int D> DEVICE void start_scores(float (&s)[SCORES], u32 q_tile, u32 k_tile) {
#pragma unroll
    for (int step = 0; step < D / 16; step++)
        wgmma_64x80(s, descriptor_rows(q_tile + step / 4 * Q_PANEL + step % 4 * 32),
                   descriptor_rows(k_tile + step / 4 * PANEL + step % 4 * 32), step > 0);
    wgmma_commit();
}

// Turns scores into weights; returns the factors by which earlier sums shrink. Maxima are of raw scores; the scale goes into
// the exponent's multiply-add.
DEVICE void softmax(float (&s)[SCORES], float (&largest)[2], float (&total)[2], float (&rescale)[2], int first, int position,
                    float scale_log2) {
    int pair = threadIdx.x % 4;
    if (first + TILE_KEYS > position + 1) {
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            int key = first + i / 4 * 8 + pair * 2 + i % 2;
            if (key > position + i / 2 % 2 * 8) s[i] = -1e30f;
        }
    }
    float m[2] = {largest[0], largest[1]};
#pragma unroll
    for (int i = 0; i < SCORES; i++) m[i / 2 % 2] = fmaxf(m[i / 2 % 2], s[i]);
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
    for (int i = 0; i < SCORES; i++) {
        s[i] = exp2_fast(s[i] * scale_log2 - shift[i / 2 % 2]);
        total[i / 2 % 2] += s[i];
    }
}

// Weights as the next product wants them. Not while a product still reads p.
DEVICE void pack_weights(const float (&s)[SCORES], u32 (&p)[TILE_KEYS / 16][4]) {
#pragma unroll
    for (int step = 0; step < TILE_KEYS / 16; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[step][i] = pack_half2(s[step * 8 + i * 2], s[step * 8 + i * 2 + 1]);
}

// Queues o += p v.
template <int D> DEVICE void start_values(float (&o)[D / 2], const u32 (&p)[TILE_KEYS / 16][4], u32 v_tile) {
#pragma unroll
    for (int step = 0; step < TILE_KEYS / 16; step++) add_product(o, p[step], descriptor_columns(v_tile + step * 2048, PANEL));
    wgmma_commit();
}

// Two slots of K or V, each with a barrier that says "filled" and one that says "free in every block of the cluster".
template <int D> struct Ring {
    u32 tiles, barriers;
    __device__ __forceinline__ u32 tile(int j) const { return tiles + j % 2 * (TILE_KEYS * D * 2); }
    __device__ __forceinline__ u32 filled(int j) const { return barriers + j % 2 * 8; }
    __device__ __forceinline__ u32 free(int j) const { return barriers + 16 + j % 2 * 8; }
};

// A warp copies tiles 0 .. count of K and V; a lane owns a box.
template <int D>
DEVICE void produce(const TensorMap *keys, const TensorMap *values, const Tables &tables, const int *table, int kv_head, int end,
                    int count, const Ring<D> &k, const Ring<D> &v) {
    constexpr int PANELS = D / 64, BOXES = TILE_KEYS / BOX_KEYS * PANELS;
    static_assert(BOXES <= 32, "a lane a box");
    int lane = threadIdx.x % 32, panel = lane % PANELS, first = lane / PANELS * BOX_KEYS;
    u32 rank = cluster_rank(), blocks = cluster_size(), box = (u32)(panel * PANEL + first * 128);
    bool mine = lane < BOXES && panel % blocks == rank;
    int within = 0, id = 0, last_within = 0, last_id = 0;
    auto fill = [&](const Ring<D> &ring, const TensorMap *map, int tile, int token, int block) {
        barrier_wait(ring.free(tile), (tile / 2 & 1) ^ 1);
        if (lane == 0) barrier_expect(ring.filled(tile), TILE_KEYS * D * 2);
        __syncwarp();
        if (!mine) return;
        if (blocks == 1)
            copy_box(ring.tile(tile) + box, map, panel * 64, token, kv_head, block, ring.filled(tile));
        else
            copy_box_to_all(ring.tile(tile) + box, map, panel * 64, token, kv_head, block, ring.filled(tile), blocks);
    };
    for (int j = 0; j <= count; j++) {
        if (j < count) {
            u32 token = (u32)(j * TILE_KEYS + first), block = token / tables.block_tokens;
            bool inside = mine && (int)token < end;
            within = (int)(inside ? token - block * tables.block_tokens : tables.block_tokens); // past its end the copy is zeros
            id = inside ? table[block] : 0;
            fill(k, keys, j, within, id);
        }
        if (j > 0) fill(v, values, j - 1, last_within, last_id);
        last_within = within, last_id = id;
    }
}

template <int D>
DEVICE void consume(const f16 *q, int q_stride, const f16 *gate, int gate_stride, int gate_head_stride, f16 *out, int out_stride,
                    const Chunk &chunk, int first_query, u32 q_tile, const Ring<D> &k, const Ring<D> &v, float scale_log2) {
    constexpr int UNITS = D / 8;
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    int head = blockIdx.x, queries = min(TILE_ROWS, chunk.new_tokens - first_query);
    int end = chunk.context_tokens + first_query + queries, tiles = (end + TILE_KEYS - 1) / TILE_KEYS;
    int first_position = chunk.context_tokens + first_query + group * 64;
    int own_tiles = min(tiles, (first_position + 64 + TILE_KEYS - 1) / TILE_KEYS); // none that all of its rows are masked from
    u32 blocks = cluster_size();
    u64 first_row = (u64)chunk.first_row + first_query + group * 64;
    queries = min(64, queries - group * 64); // of this group; may be 0 or less
    auto release = [&](const Ring<D> &ring, int tile) {
        if (lane < blocks) barrier_arrive_at(ring.free(tile), lane);
    };
    auto take_turn = [&] { named_sync(TURN + group, 256); };
    auto pass_turn = [&](int tile) { // group 1's last has no taker
        if (group == 0 || tile + 1 < tiles) named_arrive(TURN + 1 - group, 256);
    };

#pragma unroll
    for (int i = thread; i < 64 * UNITS; i += 128) {
        int row = i / UNITS, unit = i % UNITS;
        const f16 *from = q + (queries > 0 ? (first_row + min(row, queries - 1)) * q_stride + head * D + unit * 8 : 0);
        copy_async_16(unit_address(q_tile, Q_PANEL, row, unit), from, row < queries);
    }
    copy_async_commit();
    if (group == 1) named_arrive(TURN, 256);

    float o[D / 2], s[SCORES];
    u32 p[TILE_KEYS / 16][4];
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] = 0.0f;
    float largest[2] = {-1e30f, -1e30f}, total[2] = {0.0f, 0.0f}, rescale[2];
    int position = first_position + warp * 16 + lane / 4; // of one row; the other's is 8 more

    copy_async_wait<0>();
    shared_write_fence();
    named_sync(GROUP + group, 128);
    barrier_wait(k.filled(0), 0);
    take_turn();
    wgmma_fence();
    start_scores<D>(s, q_tile, k.tile(0));
    pass_turn(0);
    wgmma_wait<0>();
    hold(s);
    release(k, 0);
    softmax(s, largest, total, rescale, 0, position, scale_log2);
    pack_weights(s, p);

    for (int j = 0; j + 1 < own_tiles; j++) {
        barrier_wait(k.filled(j + 1), (j + 1) / 2 & 1);
        take_turn();
        wgmma_fence();
        start_scores<D>(s, q_tile, k.tile(j + 1));
        barrier_wait(v.filled(j), j / 2 & 1);
        start_values<D>(o, p, v.tile(j));
        pass_turn(j + 1);
        wgmma_wait<1>();
        hold(s);
        release(k, j + 1);
        softmax(s, largest, total, rescale, (j + 1) * TILE_KEYS, position, scale_log2);
        wgmma_wait<0>();
        hold(o);
        hold(s); // p is free only now
        release(v, j);
        pack_weights(s, p);
        if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) { // rare once the largest score was met
#pragma unroll
            for (int i = 0; i < D / 2; i++) o[i] *= rescale[i / 2 % 2];
        }
    }
    for (int j = own_tiles; j < tiles; j++) take_turn(), pass_turn(j);
    int last = own_tiles - 1;
    barrier_wait(v.filled(last), last / 2 & 1);
    if (end % BOX_KEYS != 0 && last + 1 == tiles) { // rows that no token owns yet meet weights of zero, yet could hold anything
        int row = end - last * TILE_KEYS;
        for (int i = thread; i < (BOX_KEYS - end % BOX_KEYS) * UNITS; i += 128)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};"
                         ::"r"(unit_address(v.tile(last), PANEL, row + i / UNITS, i % UNITS)), "r"(0) : "memory");
        shared_write_fence();
        named_sync(GROUP + group, 128);
    }
    wgmma_fence();
    start_values<D>(o, p, v.tile(last));
    wgmma_wait<0>();
    hold(o);

    // Out through this group's tile of q, so that rows leave in whole lines.
#pragma unroll
    for (int row = 0; row < 2; row++) {
        float sum = total[row];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        float inverse = 1.0f / sum;
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            store_shared(unit_address(q_tile, Q_PANEL, warp * 16 + lane / 4 + row * 8, i) + lane % 4 * 4,
                         pack_half2(o[i * 4 + row * 2] * inverse, o[i * 4 + row * 2 + 1] * inverse));
    }
    named_sync(GROUP + group, 128);
    // Eight units of a thread at a time, their gates all asked for before the first is used.
    for (int begin = thread; begin < queries * UNITS; begin += 8 * 128) {
        uint4 gates[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int i = begin + j * 128, row = i / UNITS, unit = i % UNITS;
            if (gate && i < queries * UNITS) gates[j] = *(const uint4 *)(gate + (first_row + row) * gate_stride + head * gate_head_stride + unit * 8);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int i = begin + j * 128, row = i / UNITS, unit = i % UNITS;
            if (i >= queries * UNITS) break;
            uint4 packed;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(packed.x), "=r"(packed.y), "=r"(packed.z), "=r"(packed.w)
                         : "r"(unit_address(q_tile, Q_PANEL, row, unit)) : "memory");
            if (gate) {
                float x[8], g[8];
                unpack_half8(packed, x);
                unpack_half8(gates[j], g);
#pragma unroll
                for (int e = 0; e < 8; e++) x[e] *= sigmoid(g[e]);
                packed = pack_half8(x);
            }
            *(uint4 *)(out + (first_row + row) * out_stride + head * D + unit * 8) = packed;
        }
    }
}

template <int D>
DEVICE void attend(const f16 *q, int q_stride, const f16 *gate, int gate_stride, int gate_head_stride, f16 *out, int out_stride,
                   const TensorMap *keys, const TensorMap *values, const Tables &tables, const Chunk *chunks, const int2 *tiles,
                   int heads_a_kv_head, float scale_log2) {
    extern __shared__ unsigned char shared[];
    __shared__ __align__(8) u64 barriers[8];
    constexpr int Q_BYTES = 64 * D * 2, TILE_BYTES = TILE_KEYS * D * 2;
    u32 q_tiles = (shared_address(shared) + 1023) & ~1023u;
    Ring<D> k = {q_tiles + 2 * Q_BYTES, shared_address(barriers)}, v = {k.tiles + 2 * TILE_BYTES, k.barriers + 32};
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < 2; slot++) {
            barrier_init(k.filled(slot), 1), barrier_init(v.filled(slot), 1);
            barrier_init(k.free(slot), 8 * cluster_size()), barrier_init(v.free(slot), 8 * cluster_size());
        }
        barrier_init_fence();
    }
    cluster_sync();
    wait_for_previous_kernel();
    let_next_kernel_start();
    int2 tile = tiles[blockIdx.y];
    Chunk chunk = chunks[tile.x];
    if (__shfl_sync(0xffffffffu, threadIdx.x / 128, 0) == 2) {
        give_registers<40>();
        if (threadIdx.x < 288) {
            int end = chunk.context_tokens + min(tile.y + TILE_ROWS, chunk.new_tokens);
            produce<D>(keys, values, tables, tables.ids + (u64)chunk.table * tables.stride, blockIdx.x / heads_a_kv_head, end,
                       (end + TILE_KEYS - 1) / TILE_KEYS, k, v);
        }
        __syncwarp();
        cluster_sync(); // no block ends while another may still send to it or signal it
    } else {
        take_registers<232>();
        consume<D>(q, q_stride, gate, gate_stride, gate_head_stride, out, out_stride, chunk, tile.y,
                   q_tiles + threadIdx.x / 128 * Q_BYTES, k, v, scale_log2);
        cluster_sync();
    }
}

#define PREFILL_ATTENTION(D)                                                                                               \
    KERNEL __launch_bounds__(THREADS, 1) prefill_attention_##D(                                                            \
        const f16 *q, int q_stride, const f16 *gate, int gate_stride, int gate_head_stride, f16 *out, int out_stride,      \
        const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values, const Tables tables,             \
        const Chunk *chunks, const int2 *tiles, int heads_a_kv_head, float scale_log2) {                                   \
        attend<D>(q, q_stride, gate, gate_stride, gate_head_stride, out, out_stride, &keys, &values, tables, chunks, tiles, \
                  heads_a_kv_head, scale_log2);                                                                            \
    }

PREFILL_ATTENTION(128)
PREFILL_ATTENTION(256)
