// Products with 4-bit weights of 1 to 8 rows on Hopper (int4.cuh has the packing), y[rows, n] = x[rows, k] W[n, k]^T.
//
// x stays, W passes by. A warp has at most STAGES * 128 columns of k for as long as the block lives: its x is read once, as the
// B operands of mma.m16n8k16 in registers, with the sums of each 128 columns that offsets and zero points are taken away with.
// A single row is read 128 bytes at a time (`chunks_in_turn`). Of several rows a lane reads 16 bytes at a time, 8 neighbouring
// columns, and picks the same of W: of a word of each of four lanes the half that has them.
// Past these go that warp's columns of one unit of 16 rows of W after another, from a ring of SLOTS pieces that one lane
// fills by bulk copies: nobody but the warp itself waits for it or fills it. Copies begin before the previous kernel ends.
//
// The warps' sums of a unit meet in shared memory; the warps take turns at adding them up, LAG units later, when all are there,
// and write the unit's output while the others go on. Nibbles are multiplied with their offset on and scales applied to fp32 sums
// of 128 columns, so no weight is ever rounded (as in int4_stream).
//
// A small fp16 matrix that is multiplied with the same x, as a delta net's gates are, has blocks of its own in the same launch: what
// rounding to whole units leaves idle is more than they take.
//
// Groups of 128 columns, an even number of them in k and in each part. Grid: blocks (units of W in equal shares, then units of the
// matrix beside W), parts of k.
#include "fp16.cuh"
#include "int4.cuh"

struct Int4Ring {
    Product p;
    Product beside; // fp16, of the same x, where blocks are for it
    u32 unit_room;  // most units of a block
    u32 group_room; // most groups of a part
    u32 blocks;     // along W; behind them one for each unit of `beside`
    u32 unused;
};

#define MEETINGS 4 // units whose sums may be there
#define LAG 2
#define EARLY 2 // pieces of a ring that are asked for before the previous kernel has ended
#define EVICT_FIRST 0x12F0000000000000ull // fraction 1, as createpolicy would encode it

DEVICE void copy_bulk_once(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(EVICT_FIRST) : "memory");
}

// d = a b, where mma_16x8x16 adds.
DEVICE void mma_first(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%10, %10, %10, %10};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// A lane's words of 64 columns, and from them the fragments of the i-th 16 columns, offsets left on.
template <bool SINGLE> struct Words;
template <> struct Words<true> {
    uint4 own;
    __device__ __forceinline__ void load(const u8 *at, u32) { own = *(const uint4 *)at; }
    __device__ __forceinline__ void unpack(int i, u32 (&a)[4]) { unpack_offset(word_of(own, i / 2 + i % 2 * 2), a); }
};
template <> struct Words<false> {
    uint2 picked[4];
    __device__ __forceinline__ void load(const u8 *at, u32 swap) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) picked[j] = *(const uint2 *)((j % 2 ? at - swap : at + swap) + j * 16);
    }
    __device__ __forceinline__ void unpack(int i, u32 (&a)[4]) { unpack_picked(picked, i, a); }
};

// A unit of an fp16 matrix beside W, by a block of its own: all of its rows in shared memory before the previous kernel ends, so that
// x is all that is waited for.
#define BESIDE_PAD 64 // bytes between rows: two of them that 8 lanes read together meet no bank twice
template <int WARPS> DEVICE void product_beside(const Product &p, u32 unit) {
    constexpr u32 TOGETHER = 8; // pieces of 32 columns
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u64 arrived;
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, pair = lane & 3;
    u32 row_bytes = 2 * p.k, pitch = row_bytes + BESIDE_PAD, barrier = shared_address(&arrived);
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_init_fence();
        barrier_expect(barrier, UNIT * row_bytes);
    }
    __syncthreads();
    if (threadIdx.x < UNIT)
        copy_bulk_once(shared_address(shared) + threadIdx.x * pitch, p.w + ((u64)unit * UNIT + threadIdx.x) * row_bytes, row_bytes, barrier);
    let_next_kernel_start();
    wait_for_previous_kernel();
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    u32 end = p.k / 32 * (warp + 1) / WARPS;
    for (u32 from = p.k / 32 * warp / WARPS; from < end; from += TOGETHER) {
        const f16 *x_at = p.x + (u64)group * p.k + from * 32 + pair * 8;
        uint4 x[TOGETHER];
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++)
            x[i] = group < p.rows && from + i < end ? *(const uint4 *)(x_at + i * 32) : make_uint4(0, 0, 0, 0);
        barrier_wait(barrier, 0);
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            const u8 *at = shared + group * pitch + min(from + i, end - 1) * 64 + pair * 16;
            Fp16Weights::multiply(acc, *(const uint4 *)at, *(const uint4 *)(at + 8 * pitch), x[i]);
        }
    }
    __syncthreads();
    float4 *sums = (float4 *)shared; // [WARPS][lane], where W was
    sums[warp * 32 + lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
    __syncthreads();
    if (warp > 0) return;
    float4 sum = sums[lane];
#pragma unroll
    for (int other = 1; other < WARPS; other++) sum = add4(sum, sums[other * 32 + lane]);
    stream_output(p, sum, unit, 0);
}

template <bool SINGLE, int STAGES, int WARPS, int SLOTS> DEVICE void int4_ring(const Int4Ring &r) {
    constexpr u32 SLOT = STAGES * 1024;
    constexpr int TOGETHER = SINGLE ? STAGES : 2; // stages whose products alternate
    extern __shared__ __align__(128) u8 shared[];
    __shared__ float2 sums_of_x[WARPS][STAGES][4]; // of columns 2 * pair and the next
    __shared__ u64 barriers[WARPS * SLOTS + 2 * MEETINGS + 1];
    const Product &p = r.p;
    if (blockIdx.x >= r.blocks) return product_beside<WARPS>(r.beside, blockIdx.x - r.blocks);
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, pair = lane & 3;
    u32 units = p.n / UNIT, unit0 = units * blockIdx.x / r.blocks, count = units * (blockIdx.x + 1) / r.blocks - unit0;
    u32 stages = p.k / 128, part_begin = stages * blockIdx.y / p.parts, part_count = stages * (blockIdx.y + 1) / p.parts - part_begin;
    u32 first = part_count * warp / WARPS, mine = part_count * (warp + 1) / WARPS - first; // of the part's stages

    u8 *scales = shared + WARPS * SLOTS * SLOT, *zeros = scales + r.unit_room * r.group_room * 32;
    float4 *sums = (float4 *)(zeros + r.unit_room * r.group_room * 8); // [MEETINGS][WARPS][lane]
    u32 full = shared_address(barriers) + 8 * warp * SLOTS, met = shared_address(barriers + WARPS * SLOTS);
    u32 free = met + 8 * MEETINGS, scaled = free + 8 * MEETINGS;

    u32 ring = shared_address(shared) + warp * SLOTS * SLOT;
    const u8 *from = p.w + ((u64)unit0 * stages + part_begin + first) * 1024;
    auto fill = [&](u32 slot) { // by one lane; with the next unit
        barrier_expect(full + 8 * slot, mine * 1024);
        if (mine) copy_bulk_once(ring + slot * SLOT, from, mine * 1024, full + 8 * slot);
        from += (u64)stages * 1024;
    };
    if (lane == 0) {
        for (u32 i = 0; i < SLOTS; i++) barrier_init(full + 8 * i, 1);
        if (warp == 0) {
            for (u32 i = 0; i < MEETINGS; i++) barrier_init(met + 8 * i, WARPS), barrier_init(free + 8 * i, 1);
            barrier_init(scaled, 1);
        }
        barrier_init_fence();
        if (warp == 0) barrier_expect(scaled, count * part_count * (p.zero_points ? 40 : 32));
        fill(0);
    }
    __syncwarp();
    if (warp == 0) {
        for (u32 u = lane; u < count; u += 32) {
            u64 from = (u64)(unit0 + u) * stages + part_begin;
            copy_bulk_once(shared_address(scales) + u * r.group_room * 32, p.scales + from * 32, part_count * 32, scaled);
            if (p.zero_points)
                copy_bulk_once(shared_address(zeros) + u * r.group_room * 8, p.scales + (u64)p.n * stages * 2 + from * 8, part_count * 8, scaled);
        }
    }
    let_next_kernel_start();
    __syncthreads();
    // One piece after another: x, and what the kernels before this one still read, would wait behind all of them.
    if (lane == 0) {
        for (u32 i = 1; i < EARLY && i < count; i++) {
            barrier_wait(full + 8 * (i - 1), 0);
            fill(i);
        }
    }
    __syncwarp();
    wait_for_previous_kernel();

    uint4 x[STAGES][4]; // [q]: of 32 columns
    const f16 *x_at = p.x + (part_begin + first) * 128;
    // A stage that is not there multiplies what lies in the slot with zeros.
    if (SINGLE) {
        u32 words[STAGES * 2];
#pragma unroll
        for (int i = 0; i < STAGES * 2; i++) words[i] = i / 2 < mine ? ((const u32 *)x_at)[i * 32 + lane] : 0;
#pragma unroll
        for (int s = 0; s < STAGES; s++)
#pragma unroll
            for (int q = 0; q < 4; q++) x[s][q] = chunks_in_turn(words[s * 2 + q / 2], q % 2);
    } else {
#pragma unroll
        for (int s = 0; s < STAGES; s++)
#pragma unroll
            for (int q = 0; q < 4; q++) {
                bool valid = group < p.rows && s < mine;
                x[s][q] = valid ? *(const uint4 *)(x_at + (u64)group * p.k + s * 128 + q * 32 + pair * 8) : make_uint4(0, 0, 0, 0);
            }
    }
    if (SLOTS > EARLY) {
        if (lane == 0)
            for (u32 i = EARLY; i < SLOTS && i < count; i++) fill(i);
        __syncwarp();
    }
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        const u32 ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
        float sum[4];
#pragma unroll
        for (int q = 0; q < 4; q++) {
            if (q == 0) mma_first(sum, ones, x[s][q].x, x[s][q].y);
            else mma_16x8x16(sum, ones, x[s][q].x, x[s][q].y);
            mma_16x8x16(sum, ones, x[s][q].z, x[s][q].w);
        }
        if (group == 0) sums_of_x[warp][s][pair] = make_float2(sum[0], sum[1]);
    }
    __syncwarp();
    barrier_wait(scaled, 0);

    // Adds up unit u's sums and writes its output.
    auto finish = [&](u32 u) {
        u32 at = u % MEETINGS;
        barrier_wait(met + 8 * at, u / MEETINGS & 1);
        const float4 *from = sums + at * WARPS * 32 + lane;
        float4 sum = from[0];
#pragma unroll
        for (int other = 1; other < WARPS; other++) sum = add4(sum, from[other * 32]);
        if (SINGLE) sum = sum_of_columns(sum);
        stream_output(p, sum, unit0 + u, 0);
        __syncwarp();
        if (lane == 0) barrier_arrive(free + 8 * at);
    };
    u32 swap = group >> 1 & 1 ? 16 : 0; // lanes of a group are swapped in pairs (lane_place)
    u32 slot = 0, phase = 0, last = part_count - 1 - min(first, part_count - 1);
    const u8 *scale_at = scales + first * 32 + group * 4, *zeros_at = zeros + first * 8 + group;
    for (u32 u = 0; u < count; u++) {
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        barrier_wait(full + 8 * slot, phase);
        const u8 *words_at = shared + (warp * SLOTS + slot) * SLOT + (SINGLE ? lane_place() : group * 64 + pair / 2 * 8);
#pragma unroll
        for (int s0 = 0; s0 < STAGES; s0 += TOGETHER) {
            float sum[TOGETHER][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                Words<SINGLE> words[TOGETHER];
#pragma unroll
                for (int s = 0; s < TOGETHER; s++) words[s].load(words_at + (s0 + s) * 1024 + half * 512, swap);
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int s = 0; s < TOGETHER; s++) {
                        u32 a[4];
                        words[s].unpack(i, a);
                        const uint4 &b = x[s0 + s][half * 2 + i / 2];
                        if (half == 0 && i == 0) mma_first(sum[s], a, b.x, b.y);
                        else mma_16x8x16(sum[s], a, i % 2 ? b.z : b.x, i % 2 ? b.w : b.y);
                    }
            }
#pragma unroll
            for (int s = 0; s < TOGETHER; s++) {
                u32 at = min((u32)(s0 + s), last); // a scale that is there
                u32 z = p.zero_points ? zeros_at[at * 8] : 0x88u;
                float2 scale = unpack_half2(*(const u32 *)(scale_at + at * 32));
                float low = __uint_as_float(0x43800000u | (z & 15) << 15), high = __uint_as_float(0x41800000u | (z & 0xf0) << 15);
                float2 of_x = sums_of_x[warp][s0 + s][pair];
                acc[0] += scale.x * (sum[s][0] - low * of_x.x), acc[1] += scale.x * (sum[s][1] - low * of_x.y);
                acc[2] += scale.y * (sum[s][2] - high * of_x.x), acc[3] += scale.y * (sum[s][3] - high * of_x.y);
            }
        }
        scale_at += r.group_room * 32, zeros_at += r.group_room * 8;
        __syncwarp();
        if (lane == 0 && u + SLOTS < count) fill(slot);
        slot = (slot + 1) % SLOTS, phase ^= slot == 0;

        u32 at = u % MEETINGS;
        if (u >= MEETINGS) barrier_wait(free + 8 * at, (u / MEETINGS & 1) ^ 1);
        sums[(at * WARPS + warp) * 32 + lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
        __syncwarp();
        if (lane == 0) barrier_arrive(met + 8 * at);
        if (u >= LAG && (u - LAG) % WARPS == warp) finish(u - LAG);
    }
    for (u32 u = count < LAG ? 0 : count - LAG; u < count; u++)
        if (u % WARPS == warp) finish(u);
}

extern "C" __global__ void __launch_bounds__(256, 2) int4_ring_1(const __grid_constant__ Int4Ring r) { int4_ring<true, 4, 8, 3>(r); }
extern "C" __global__ void __launch_bounds__(256, 2) int4_ring_8(const __grid_constant__ Int4Ring r) { int4_ring<false, 4, 8, 2>(r); }
