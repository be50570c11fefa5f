// delta_scan of delta_prefill.cu for GPUs with clusters and the shared memory for three stages: the same arguments and results.
//
// W, Q, K, P and U of the next chunks arrive by bulk copies in a ring of three stages; two blocks of a head form a cluster, each
// asks for half of what both read and sends it to both. (Four do not fit: the largest count of clusters of four that an H200
// holds at once is below the 32 heads, so that a second round doubled the time.) Four warps carry the state; four make the
// outputs, up to a chunk behind, so that the state waits for nothing but its own two products.
#include "delta_prefill.cuh"
#include "cluster.cuh"

#define THREADS 288 // 4 + 4 warps, and one that copies
#define STAGES 3
#define CLUSTER 2
#define STAGE_BYTES (3 * TILE * 2 + P_TILE * 2 + TILE * 2 / SPLIT + CHUNK * 4)
#define CARRIERS 1 // named barrier

// Grid (value_heads * SPLIT, pieces) in clusters of CLUSTER.
KERNEL __launch_bounds__(THREADS, 1) delta_scan(const f16 *conv, const f16 *u_in, const f16 *w_in, const f16 *p_in,
                                                const float *g_in, void *state, float *o, const Piece *pieces, const Shape shape) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ __align__(8) u64 barriers[3 * STAGES + 6];
    u32 stages = shared_address(shared), s_tiles = stages + STAGES * STAGE_BYTES, v_tiles = s_tiles + 2 * HEAD * 64;
    u32 scaled_tile = v_tiles + 2 * CHUNK * 64;
    u32 filled = shared_address(barriers), free = filled + 8 * STAGES, both_free = free + 8 * STAGES; // by stage
    u32 state_ready = both_free + 8 * STAGES, values_ready = state_ready + 16, done = values_ready + 16; // by parity
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, role = threadIdx.x / 128; // 0 carries, 1 outputs, 2 copies
    u32 rank = cluster_rank();
    // Every thread arrives for itself: what a lane says for its warp, racecheck does not follow.
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(filled + 8 * i, 1), barrier_init(free + 8 * i, 256), barrier_init(both_free + 8 * i, 1);
        for (int i = 0; i < 2; i++) {
            barrier_init(state_ready + 8 * i, 128), barrier_init(values_ready + 8 * i, 128), barrier_init(done + 8 * i, 128);
        }
        barrier_init_fence();
    }
    cluster_sync();
    wait_for_previous_kernel();
    let_next_kernel_start();
    Piece piece = pieces[blockIdx.y];
    int head = blockIdx.x / SPLIT, slice = blockIdx.x % SPLIT, first_column = slice * WIDTH;
    int key_head = head / (shape.value_heads / shape.key_heads);
    int chunk_count = (piece.count + CHUNK - 1) / CHUNK;
    auto stage = [&](int chunk) { return stages + chunk % STAGES * STAGE_BYTES; };
    auto wait_stage = [&](int chunk) { barrier_wait(filled + chunk % STAGES * 8, chunk / STAGES & 1); };
    auto free_stage = [&](int chunk) { barrier_arrive(free + chunk % STAGES * 8); };
    // In a stage: W, Q, K, P, U of these columns, G.
    constexpr u32 Q = TILE * 2, K = 2 * Q, P = 3 * Q, U = P + P_TILE * 2, G = U + TILE * 2 / SPLIT;

    if (role == 2) {
        if (lane == 0) {
            int heads = 2 * shape.key_heads + shape.value_heads;
            for (int chunk = 0; chunk < chunk_count; chunk++) {
                u32 to = stage(chunk), barrier = filled + chunk % STAGES * 8;
                u32 part = rank * (TILE / CLUSTER), p_part = rank * (P_TILE / CLUSTER);
                u64 index = piece.first_chunk + chunk, tile = index * shape.value_heads + head;
                const f16 *q = conv + (index * heads + key_head) * TILE, *k = q + (u64)shape.key_heads * TILE;
                if (chunk >= STAGES) { // this block is done with what was there, and then the other
                    u32 slot = chunk % STAGES * 8, parity = (chunk / STAGES & 1) ^ 1;
                    barrier_wait(free + slot, parity);
                    barrier_arrive_at(both_free + slot, rank ^ 1);
                    barrier_wait(both_free + slot, parity);
                }
                barrier_expect(barrier, STAGE_BYTES);
                copy_bulk_to_all(to + part * 2, w_in + tile * TILE + part, TILE * 2 / CLUSTER, barrier, CLUSTER);
                copy_bulk(to + U, u_in + tile * TILE + slice * (TILE / SPLIT), TILE * 2 / SPLIT, barrier);
                copy_bulk(to + G, g_in + tile * CHUNK, CHUNK * 4, barrier);
                copy_bulk_to_all(to + K + part * 2, k + part, TILE * 2 / CLUSTER, barrier, CLUSTER);
                copy_bulk_to_all(to + Q + part * 2, q + part, TILE * 2 / CLUSTER, barrier, CLUSTER);
                copy_bulk_to_all(to + P + p_part * 2, p_in + tile * P_TILE + p_part, P_TILE * 2 / CLUSTER, barrier, CLUSTER);
            }
        }
        __syncwarp();
    } else if (role == 0) {
        float s[2][4][4];
        u64 base = ((u64)piece.slot * shape.value_heads + head) * HEAD * HEAD;
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    s[m][n][i] = piece.context > 0 ? read_state(state, base + state_offset(m, n, i, warp, first_column), shape.state_type) : 0.0f;
        for (int chunk = 0; chunk < chunk_count; chunk++) {
            int parity = chunk & 1;
            u32 s_tile = s_tiles + parity * HEAD * 64, v_tile = v_tiles + parity * CHUNK * 64, at = stage(chunk);
            const float *g = (const float *)(shared + (at + G - stages));
            u32 rows[HEAD / 16][4], u[2][4], keys[CHUNK / 16][2][4];
            barrier_wait(done + 8 * parity, (chunk / 2 & 1) ^ 1); // the outputs of the chunk before last
            store_state_half(s_tile, s, warp);
            barrier_arrive(state_ready + 8 * parity);
            wait_stage(chunk);
            load_rows(rows, at, warp);
            load_inputs(u, at + U, warp);
            asm volatile("bar.sync %0, 128;" ::"n"(CARRIERS) : "memory");
            float product[4][4];
            multiply_state(product, rows, s_tile);
            load_keys(keys, at + K, warp);
            store_values(product, u, g, v_tile, scaled_tile, warp);
            barrier_arrive(values_ready + 8 * parity);
            asm volatile("bar.sync %0, 128;" ::"n"(CARRIERS) : "memory");
            update_state(s, keys, scaled_tile, __expf(g[CHUNK - 1]));
            free_stage(chunk);
        }
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    write_state(state, base + state_offset(m, n, i, warp, first_column), shape.state_type, s[m][n][i]);
    } else {
        int width = shape.value_heads * HEAD;
        float *to = o + (u64)piece.start * width + head * HEAD + first_column + lane % 4 * 2;
        for (int chunk = 0; chunk < chunk_count; chunk++) {
            int parity = chunk & 1;
            u32 at = stage(chunk), rows[HEAD / 16][4], weights[CHUNK / 16][4];
            float sum[4][4];
            wait_stage(chunk);
            load_rows(rows, at + Q, warp);
            barrier_wait(state_ready + 8 * parity, chunk / 2 & 1);
            multiply_state(sum, rows, s_tiles + parity * HEAD * 64);
            decay_rows(sum, (const float *)(shared + (at + G - stages)), warp);
            load_weights(weights, at + P, warp);
            barrier_wait(values_ready + 8 * parity, chunk / 2 & 1);
            add_inside(sum, weights, v_tiles + parity * CHUNK * 64, warp);
            free_stage(chunk);
            barrier_arrive(done + 8 * parity);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int token = chunk * CHUNK + warp * 16 + lane / 4 + half * 8;
                if (token >= piece.count) continue;
#pragma unroll
                for (int n = 0; n < 4; n++)
                    *(float2 *)(to + (u64)token * width + n * 8) = make_float2(sum[n][half * 2], sum[n][half * 2 + 1]);
            }
        }
    }
    cluster_sync(); // no block ends while another may still send to it or signal it
}
