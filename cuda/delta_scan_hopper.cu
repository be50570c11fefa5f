// delta_scan for GPUs with clusters, warpgroup products and the shared memory for three stages: the arguments and results of
// delta_scan.cu.
//
// What limits the scan is shared memory, so S^T, not S, is held: 64 rows (dv) of a head are one warpgroup's accumulators, and S^T,
// the residual and V' go from accumulators into the next product's left operand without leaving registers. Only K, Q, T and P are
// right operands in shared memory, read once for 64 columns of dv. In a chunk of 64 tokens that is 144 KB of traffic where S in
// shared memory (mma of 16 rows, 32 columns a block) takes 220 KB for half of the columns.
//
// Two blocks of a head form a cluster, and each asks for half of what both read and sends it to both. A second warpgroup makes the
// gated norm, so that o never leaves the multiprocessor.
#include "delta_prefill.cuh"
#include "cluster.cuh"
#include "wgmma.cuh"

#define THREADS 384 // warpgroups: products, the gated norm, and one warp that copies
#define STAGES 3
#define CLUSTER 2
#define OUTPUTS 2 // tiles of outputs on their way
#define SUMS 4    // chunks whose sums of squares are

// In a stage: K, Q, T, P, V of these columns. The decays have a place of their own.
#define STAGE_Q (TILE * 2)
#define STAGE_T (2 * TILE * 2)
#define STAGE_P (STAGE_T + SQUARE * 2)
#define STAGE_V (STAGE_P + SQUARE * 2)
#define STAGE_BYTES (STAGE_V + PANEL)
#define DECAY_BYTES (2 * CHUNK * 4)

// Accumulators of 64 x 16 Steps as the left operand of the next product; column c by `factors`[c] if there are any.
template <int Steps> DEVICE void pack_operand(u32 (&a)[Steps][4], const float (&d)[Steps * 8]) {
#pragma unroll
    for (int step = 0; step < Steps; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) a[step][i] = pack_half2(d[step * 8 + i * 2], d[step * 8 + i * 2 + 1]);
}

// Address of the 8 x 8 matrix that this lane names: tokens 8 n and dv 16 warp (+8), then the same of n + 1.
DEVICE u32 matrix_address(u32 tile, int n, int warp) {
    int lane = threadIdx.x % 32;
    return tile_unit(tile, (n + lane / 16) * 8 + lane % 8, warp * 2 + lane / 8 % 2);
}

// d (+)= a B^T for 16 Steps of the summed dimension, B 64 rows in panels. Descriptors count in 16 bytes; made anew for every product they
// cost a chain of five uniform instructions, longer than the product.
template <int Steps> DEVICE void queue_rows(float (&d)[32], const u32 (&a)[Steps][4], u64 b, bool accumulate) {
#pragma unroll
    for (int step = 0; step < Steps; step++)
        wgmma_64x64_rows(d, a[step], b + (step / 4 * PANEL + step % 4 * 32) / 16, accumulate || step > 0);
    wgmma_commit();
}

// `value` to shared memory of another block, which counts 4 bytes on a barrier there: no fence, so no wait for writes in flight.
DEVICE void send(u32 there, float value, u32 barrier_there) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                 ::"r"(there), "r"(__float_as_uint(value)), "r"(barrier_there) : "memory");
}

// out = o / rms(o) * weight * silu(z) for the 64 columns of this block, 128 threads: two threads a token. The other block's sum of
// squares of each token comes by `send`, and what waits for it waits a chunk long. Of SUMS slots four are enough: that block sends
// chunk c + 4 when it has all sums of c + 2, which this one sent after it had read those of c.
DEVICE void finish_outputs(const f16 *mixed, const float *weight, f16 *out, const Piece &piece, const Shape &shape, int head, u32 rank,
                           u32 tiles, u32 ready, u32 taken, u32 sums, u32 arrived) {
    int thread = threadIdx.x % 128, token = thread / 2, half = thread % 2, width = shape.value_heads * HEAD;
    int chunk_count = (piece.count + CHUNK - 1) / CHUNK, column = head * HEAD + rank * 64 + half * 32;
    const f16 *z = mixed + (u64)piece.start * shape.pitch + channel_count(shape) + column;
    f16 *to = out + (u64)piece.start * width + column;
    u32 there = address_in_block(sums, rank ^ 1), arrived_there = address_in_block(arrived, rank ^ 1);
    float w[32];
#pragma unroll
    for (int i = 0; i < 32; i++) w[i] = weight[rank * 64 + half * 32 + i];
    uint4 gates[4];
    float own = 0.0f, x[32]; // of the chunk before: sum of squares, and what is left to scale
    auto load = [&](int chunk) {
        const f16 *from = z + (u64)min(chunk * CHUNK + token, piece.count - 1) * shape.pitch;
#pragma unroll
        for (int i = 0; i < 4; i++) gates[i] = *(const uint4 *)(from + i * 8);
    };
    auto store = [&](int chunk) {
        int slot = chunk % SUMS, at = chunk * CHUNK + token;
        barrier_wait(arrived + slot * 8, chunk / SUMS & 1);
        float scale = rsqrtf((own + __uint_as_float(load_shared(sums + (slot * CHUNK + token) * 4))) / HEAD + shape.eps);
        __syncwarp(); // both threads of a token have read before one sends again
#pragma unroll
        for (int i = 0; i < 32; i++) x[i] *= scale;
        if (at >= piece.count) return;
#pragma unroll
        for (int i = 0; i < 4; i++) *(uint4 *)(to + (u64)at * width + i * 8) = pack_half8(x + i * 8);
    };
    load(0);
    for (int chunk = 0; chunk < chunk_count; chunk++) {
        int slot = chunk % OUTPUTS, sum_slot = chunk % SUMS;
        uint4 raw[4];
        if (thread == 0) barrier_expect(arrived + sum_slot * 8, CHUNK * 4);
        barrier_wait(ready + slot * 8, chunk / OUTPUTS & 1);
#pragma unroll
        for (int i = 0; i < 4; i++)
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(raw[i].x), "=r"(raw[i].y), "=r"(raw[i].z), "=r"(raw[i].w)
                         : "r"(tile_unit(tiles + slot * PANEL, token, half * 4 + i)) : "memory");
        barrier_arrive(taken + slot * 8);
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float o[8];
            unpack_half8(raw[i], o);
#pragma unroll
            for (int e = 0; e < 8; e++) squares += o[e] * o[e];
        }
        squares += __shfl_xor_sync(0xffffffffu, squares, 1);
        if (half == 0) send(there + (sum_slot * CHUNK + token) * 4, squares, arrived_there + sum_slot * 8);
        if (chunk > 0) store(chunk - 1);
        own = squares;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float o[8], gate[8];
            unpack_half8(raw[i], o);
            unpack_half8(gates[i], gate);
#pragma unroll
            for (int e = 0; e < 8; e++) x[i * 8 + e] = o[e] * w[i * 8 + e] * silu_short(gate[e]);
        }
        if (chunk + 1 < chunk_count) load(chunk + 1);
    }
    store(chunk_count - 1);
}

// Grid (value_heads * CLUSTER, pieces) in clusters of CLUSTER.
KERNEL __launch_bounds__(THREADS, 1) delta_scan(const f16 *conv, const f16 *t_in, const f16 *p_in, const float *decays_in, void *state,
                                                const f16 *mixed, const float *weight, f16 *window, f16 *out_rows, const Piece *pieces,
                                                const Shape shape) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) u64 barriers[3 * STAGES + 2 * OUTPUTS + SUMS];
    __shared__ float sums[SUMS * CHUNK];
    u32 stages = (shared_address(shared) + 1023) & ~1023u, outputs = stages + STAGES * STAGE_BYTES, decays_at = outputs + OUTPUTS * PANEL;
    u32 filled = shared_address(barriers), free = filled + 8 * STAGES, both_free = free + 8 * STAGES; // by stage
    u32 ready = both_free + 8 * STAGES, taken = ready + 8 * OUTPUTS, arrived = taken + 8 * OUTPUTS;   // by tile of outputs
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    u32 rank = cluster_rank();
    // Every thread arrives for itself: what a lane says for its warp, racecheck does not follow.
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(filled + 8 * i, 1), barrier_init(free + 8 * i, 128), barrier_init(both_free + 8 * i, 1);
        for (int i = 0; i < OUTPUTS; i++) barrier_init(ready + 8 * i, 128), barrier_init(taken + 8 * i, 128);
        for (int i = 0; i < SUMS; i++) barrier_init(arrived + 8 * i, 1);
        barrier_init_fence();
    }
    cluster_sync();
    wait_for_previous_kernel();
    let_next_kernel_start();
    Piece piece = pieces[blockIdx.y];
    int head = blockIdx.x / CLUSTER, key_head = head / (shape.value_heads / shape.key_heads);
    int chunk_count = (piece.count + CHUNK - 1) / CHUNK;
    u64 first_tile = (u64)piece.first_chunk * shape.value_heads + head;

    if (warp >= 8) {
        give_registers<40>();
        if (warp > 8) { // the raw inputs of the last tokens
            keep_window(mixed, window, piece, shape, blockIdx.x * 96 + threadIdx.x - 288, gridDim.x * 96);
        } else if (lane == 0) {
            int heads = 2 * shape.key_heads + shape.value_heads;
            for (int chunk = 0; chunk < chunk_count; chunk++) {
                u32 slot = chunk % STAGES, to = stages + slot * STAGE_BYTES, barrier = filled + slot * 8;
                u64 tile = first_tile + (u64)chunk * shape.value_heads;
                const f16 *q = conv + ((u64)(piece.first_chunk + chunk) * heads + key_head) * TILE;
                const f16 *k = q + (u64)shape.key_heads * TILE, *v = q + (u64)(2 * shape.key_heads + head - key_head) * TILE;
                u32 part = rank * PANEL, half = rank * SQUARE; // bytes
                if (chunk >= STAGES) { // this block is done with what was there, and then the other
                    u32 parity = (chunk / STAGES & 1) ^ 1;
                    barrier_wait(free + slot * 8, parity);
                    barrier_arrive_at(both_free + slot * 8, rank ^ 1);
                    barrier_wait(both_free + slot * 8, parity);
                }
                barrier_expect(barrier, STAGE_BYTES + DECAY_BYTES);
                copy_bulk_to_all(to + part, k + part / 2, PANEL, barrier, CLUSTER);
                copy_bulk(to + STAGE_V, v + part / 2, PANEL, barrier);
                copy_bulk(decays_at + slot * DECAY_BYTES, decays_in + tile * (2 * CHUNK), DECAY_BYTES, barrier);
                copy_bulk_to_all(to + STAGE_T + half, t_in + tile * SQUARE + half / 2, SQUARE, barrier, CLUSTER);
                copy_bulk_to_all(to + STAGE_Q + part, q + part / 2, PANEL, barrier, CLUSTER);
                copy_bulk_to_all(to + STAGE_P + half, p_in + tile * SQUARE + half / 2, SQUARE, barrier, CLUSTER);
            }
        }
        __syncwarp();
    } else if (warp >= 4) {
        finish_outputs(mixed, weight, out_rows, piece, shape, head, rank, outputs, ready, taken, shared_address(sums), arrived);
    } else {
        take_registers<240>();
        // S^T: element i of group n is row (dv) rank 64 + warp 16 + lane / 4 (+8 if i / 2), column (dk) 8 n + 2 (lane % 4) + i % 2.
        float s[64], read[32], out[32];
        u64 base = ((u64)piece.slot * shape.value_heads + head) * HEAD * HEAD + (rank * 64 + warp * 16 + lane / 4) * HEAD + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 64; i++)
            s[i] = piece.context > 0 ? read_state(state, base + i / 2 % 2 * 8 * HEAD + i / 4 * 8 + i % 2, shape.state_type) : 0.0f;

        // Outputs of a chunk, packed as pack_operand has it, as a panel for the warpgroup that finishes them.
        auto store_outputs = [&](const u32 (&packed)[4][4], int chunk) {
            barrier_wait(taken + chunk % OUTPUTS * 8, (chunk / OUTPUTS & 1) ^ 1);
            u32 to = outputs + chunk % OUTPUTS * PANEL;
#pragma unroll
            for (int n = 0; n < 8; n += 2)
                store_matrix_x4_transposed(matrix_address(to, n, warp), packed[n / 2][0], packed[n / 2][1], packed[n / 2][2], packed[n / 2][3]);
            barrier_arrive(ready + chunk % OUTPUTS * 8);
        };
        // P V' of a chunk waits for K S of the next one, so that the tensor cores have work while the residual is made; its outputs
        // leave under the update of S.
        u32 inner[4][4] = {};
#pragma unroll
        for (int i = 0; i < 32; i++) out[i] = 0.0f;
        u64 last_p = descriptor_rows(stages + STAGE_P); // for the first chunk anything finite, since V' is zero
        for (int chunk = 0; chunk < chunk_count; chunk++) {
            u32 slot = chunk % STAGES, k_tile = stages + slot * STAGE_BYTES;
            const float2 *decay = (const float2 *)(shared + (decays_at + slot * DECAY_BYTES - shared_address(shared)));
            const float2 *to_end = decay + CHUNK / 2;
            u64 rows = descriptor_rows(k_tile), columns = descriptor_columns(k_tile, PANEL);
            u32 operand[8][4], v[4][4], residual[4][4], scaled[4][4], packed[4][4];
            pack_operand(operand, s);
            barrier_wait(filled + slot * 8, chunk / STAGES & 1);
            wgmma_fence();
            queue_rows(read, operand, rows, false); // (K S)^T
            queue_rows(out, inner, last_p, true);   // of the chunk before
#pragma unroll
            for (int n = 0; n < 8; n += 2) load_matrix_x4_transposed(v[n / 2], matrix_address(k_tile + STAGE_V, n, warp));
            wgmma_wait<1>();
            hold(read);
#pragma unroll
            for (int n = 0; n < 8; n++) { // V - e^G K S
                float2 factor = decay[n * 4 + lane % 4];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float2 value = unpack_half2(v[n / 2][n % 2 * 2 + half]);
                    residual[n / 2][n % 2 * 2 + half] =
                        pack_half2(value.x - factor.x * read[n * 4 + half * 2], value.y - factor.y * read[n * 4 + half * 2 + 1]);
                }
            }
            wgmma_fence();
            queue_rows(read, residual, rows + STAGE_T / 16, false); // V'^T
            wgmma_wait<1>();
            hold(out);
            pack_operand(packed, out);
            wgmma_fence();
            queue_rows(out, operand, rows + STAGE_Q / 16, false); // (Q S)^T
            if (chunk > 0) barrier_arrive(free + (chunk - 1) % STAGES * 8);
            float carry = decay[CHUNK / 2 - 1].y;
#pragma unroll
            for (int i = 0; i < 64; i++) s[i] *= carry;
            wgmma_wait<1>();
            hold(read);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                float2 factor = to_end[n * 4 + lane % 4];
#pragma unroll
                for (int half = 0; half < 2; half++)
                    scaled[n / 2][n % 2 * 2 + half] = pack_half2(factor.x * read[n * 4 + half * 2], factor.y * read[n * 4 + half * 2 + 1]);
            }
            hold(s);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; step++) wgmma_64x128(s, scaled[step], columns + step * 2048 / 16);
            wgmma_commit();
            pack_operand(inner, read);
            if (chunk > 0) store_outputs(packed, chunk - 1);
            wgmma_wait<1>();
            hold(out);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                float2 factor = decay[n * 4 + lane % 4];
#pragma unroll
                for (int i = 0; i < 4; i++) out[n * 4 + i] *= i % 2 ? factor.y : factor.x;
            }
            wgmma_wait<0>();
            hold(s);
            last_p = rows + STAGE_P / 16;
        }
        wgmma_fence();
        queue_rows(out, inner, last_p, true);
        wgmma_wait<0>();
        hold(out);
        u32 packed[4][4];
        pack_operand(packed, out);
        store_outputs(packed, chunk_count - 1);
#pragma unroll
        for (int i = 0; i < 64; i++)
            write_state(state, base + i / 2 % 2 * 8 * HEAD + i / 4 * 8 + i % 2, shape.state_type, s[i]);
    }
    cluster_sync(); // no block ends while another may still send to it or signal it
}
