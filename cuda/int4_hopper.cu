// Products with 4-bit weights on warpgroup products (sm_90a), for 9 to 64 rows: W dequantised into registers as the A
// operand, x from shared memory as the B operand. More rows, and from 33 on those that fill the GPU with fewer tiles, are in
// int4_batch_hopper.cu; few rows in int4_ring_hopper.cu.
//
// A thread block: 12 warps in three warpgroups, a unit of 16 rows of W each (192 rows: the shapes of the 9B cut by it fill 132
// multiprocessors), by N rows of x, and a warpgroup that brings x. Stages of 128 columns: packed words go straight to
// registers, DEPTH stages ahead and before the previous kernel has ended; x goes through the registers of its warpgroup into a
// ring in shared memory, since its columns must come in the packing's order there (4-byte piece w of the 16-byte chunks 0..3
// of 32 columns makes unit w).
//
// Grid: parts of k, tiles of x, tiles of W. Where the output takes no parts, the parts of k are a cluster and sum through its
// shared memory. Scales are applied to the fp16 weights: each is rounded once, as in a 16-bit checkpoint. GROUPS, the
// groups that touch 128 columns: 1 for those of 128 and more, 4 for smaller ones.
#include "cluster.cuh"
#include "int4.cuh"
#include "wgmma.cuh"

#define WARPS 12
#define THREADS (WARPS * 32)
#define X_THREADS 128
#define TILE_ROWS (WARPS * UNIT)
#define PITCH (TILE_ROWS + 4) // floats between rows of x in the output tile

// d[64xN] += a[64x16] b[Nx16]^T; a in registers, b in shared memory with the 16 contiguous.
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
DEVICE void multiply(float (&d)[8], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
                 "{%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
                 : F4(0), F4(4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
DEVICE void multiply(float (&d)[16], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, "
                 "%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
                 : F16(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
DEVICE void multiply(float (&d)[32], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, "
                 "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
                 "%24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
                 : F16(0), F16(16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// ---- clusters ----

// The float4 at a shared-memory address of the cluster's block `rank`.
DEVICE float4 load_from_block(u32 address, u32 rank) {
    float4 out;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w) : "r"(address_in_block(address, rank)) : "memory");
    return out;
}

// ---- registers change hands between warpgroups ----

#define X_REGISTERS 88
#define W_REGISTERS 136 // 4 * 88 + 12 * 136 is less than 16 * 128

// Packed words of 128 columns, and what scales them.
template <int SCALES> struct Words {
    uint4 words[2];
    u32 scale[SCALES], zeros[SCALES];
};

template <int N> struct Ring {
    static constexpr u32 STAGE = N * 256;                 // bytes
    static constexpr u32 SLOTS = N >= 64 ? 4 : 8;
    static constexpr u32 EACH = N / 8;                    // 16-byte chunks of a stage a thread of the x warpgroup brings
    static constexpr u32 BATCH = EACH < 4 ? EACH : 4;     // of them at a time
    static constexpr u32 PIECES = EACH / BATCH;
    static constexpr u32 STAGES = N >= 64 ? 2 : 3;        // a turn of the loop
    static constexpr u32 AHEAD = STAGES * PIECES;         // batches in flight
    static constexpr u32 TOGETHER = 4;                    // products that are waited for together
};

// The x warpgroup: stages begin..end of rows row0.. into the ring. A thread brings 16 bytes of every 16th row; a row past the end
// is another one, never stored. Chunk i of a stage: block i / (N / 16), rows i % (N / 16) * 16.. .
template <int N> DEVICE void bring_x(const Product &p, u8 *ring, u32 full, u32 empty, u32 row0, u32 begin, u32 end) {
    typedef Ring<N> R;
    constexpr u32 OF_ROWS = N / 16;
    u32 thread = threadIdx.x - THREADS, r = thread >> 3, c = thread & 7, blocks = p.k / 64, last = p.rows - 1 - row0, to[4];
    const f16 *from = p.x + (u64)row0 * p.k + c * 8;
#pragma unroll
    for (u32 w = 0; w < 4; w++) to[w] = r * 128 + (((c & 4) + w) ^ (r & 7)) * 16 + (c & 3) * 4;

    uint4 x[R::AHEAD][R::BATCH];
    auto load = [&](uint4(&x)[R::BATCH], u32 stage, u32 piece) {
        if (stage >= end) return;
        u32 second = 2 * stage + 1 < blocks ? 64 : 0; // an odd block is repeated
#pragma unroll
        for (u32 j = 0; j < R::BATCH; j++) {
            u32 i = piece * R::BATCH + j, row = min(r + i % OF_ROWS * 16, last);
            x[j] = *(const uint4 *)(from + (row * p.k + stage * 128 + (i / OF_ROWS ? second : 0)));
        }
    };
#pragma unroll
    for (u32 b = 0; b < R::AHEAD; b++) load(x[b], begin + b / R::PIECES, b % R::PIECES);
    u32 slot = 0, phase = 1;
    for (u32 first = begin; first < end; first += R::STAGES) {
#pragma unroll
        for (u32 b = 0; b < R::AHEAD; b++) {
            u32 stage = first + b / R::PIECES, piece = b % R::PIECES;
            if (stage >= end) break;
            if (piece == 0) barrier_wait(empty + 8 * slot, phase);
            u8 *rows = ring + slot * R::STAGE + piece * R::BATCH * 2048;
            if (2 * stage + 1 >= blocks) { // and its words too
#pragma unroll
                for (u32 j = 0; j < R::BATCH; j++)
                    if ((piece * R::BATCH + j) / OF_ROWS) x[b][j] = make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (u32 w = 0; w < 4; w++)
#pragma unroll
                for (u32 j = 0; j < R::BATCH; j++) *(u32 *)(rows + to[w] + j * 2048) = word_of(x[b][j], w);
            if (piece == R::PIECES - 1) {
                shared_write_fence();
                barrier_arrive(full + 8 * slot);
                slot = (slot + 1) % R::SLOTS, phase ^= slot == 0;
            }
            load(x[b], stage + R::STAGES, piece);
        }
    }
}

template <int N, int DEPTH, int SCALES> DEVICE void int4_wide(const Product &p) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u64 barriers[2 * Ring<N>::SLOTS];
    typedef Ring<N> R;
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, pair = lane & 3;
    u32 part = blockIdx.x, row0 = blockIdx.y * N, tile = blockIdx.z;
    u32 units = p.n / UNIT, blocks = p.k / 64, stages = (blocks + 1) / 2;
    u32 begin = stages * part / p.parts, end = stages * (part + 1) / p.parts;
    u32 base = shared_address(shared), full = shared_address(barriers), empty = full + 8 * R::SLOTS;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < R::SLOTS; i++) barrier_init(full + 8 * i, X_THREADS), barrier_init(empty + 8 * i, WARPS);
        barrier_init_fence();
    }
    __syncthreads();
    let_next_kernel_start();

    if (warp >= WARPS) {
        give_registers<X_REGISTERS>();
        wait_for_previous_kernel();
        bring_x<N>(p, shared, full, empty, row0, begin, end);
    } else {
        take_registers<W_REGISTERS>();
        u32 unit = min(tile * WARPS + warp, units - 1); // past the end: repeated, never stored
        u32 shift = group_shift(p), groups = p.k >> shift;
        const u8 *from = p.w + ((u64)unit * blocks + 2 * begin) * 512 + lane * 16;
        const u32 *scales = (const u32 *)p.scales + unit * groups * 8 + group;
        const u8 *zeros = p.scales + (u64)p.n * groups * 2 + unit * groups * 8 + group;
        auto load = [&](Words<SCALES> &w, u32 stage) {
            if (stage >= end) return;
            w.words[0] = load_streaming(from);
            w.words[1] = load_streaming(2 * stage + 1 < blocks ? from + 512 : from); // past the end: its x is zero
            from += 1024;
#pragma unroll
            for (u32 s = 0; s < SCALES; s++) {
                u32 at = (SCALES == 1 ? stage >> (shift - 7) : min((stage * 4 + s) >> (shift - 5), groups - 1)) * 8;
                w.scale[s] = __ldg(scales + at);
                w.zeros[s] = p.zero_points ? __ldg(zeros + at) : 0x88u;
            }
        };
        float acc[N / 2];
        Words<SCALES> w[DEPTH];
#pragma unroll
        for (u32 i = 0; i < DEPTH; i++) load(w[i], begin + i);
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[i] = 0.0f;
        const u64 ring = descriptor_rows(base);
        u32 slot = 0, phase = 0;
        for (u32 first = begin; first < end; first += DEPTH) {
#pragma unroll
            for (u32 i = 0; i < DEPTH; i++) {
                u32 stage = first + i;
                if (stage >= end) break;
                // Only the low half of a descriptor moves, by 16 bytes a step.
                u32 x_at = (u32)ring + slot * (R::STAGE / 16);
#pragma unroll
                for (u32 q = 0; q < 8; q += R::TOGETHER) { // 16 columns each
                    u32 a[R::TOGETHER][4];
#pragma unroll
                    for (u32 k = 0; k < R::TOGETHER; k++) {
                        u32 of = SCALES == 1 ? 0 : (q + k) / 2;
                        u32 low = __byte_perm(w[i].scale[of], 0, 0x1010), high = __byte_perm(w[i].scale[of], 0, 0x3232);
                        unpack(word_of(w[i].words[(q + k) / 4], (q + k) % 4 / 2 + (q + k) % 2 * 2), Zeros(w[i].zeros[of]), a[k]);
                        a[k][0] = mul_half2(a[k][0], low), a[k][1] = mul_half2(a[k][1], high);
                        a[k][2] = mul_half2(a[k][2], low), a[k][3] = mul_half2(a[k][3], high);
                    }
                    if (q == 0) barrier_wait(full + 8 * slot, phase);
                    wgmma_fence();
#pragma unroll
                    for (u32 k = 0; k < R::TOGETHER; k++)
                        multiply(acc, a[k], ring >> 32 << 32 | (x_at + (q + k) / 4 * N * 8 + (q + k) % 4 * 2));
                    wgmma_commit();
                    wgmma_wait<1>(); // all but these
                    if (q == 0 && stage > begin && lane == 0) barrier_arrive(empty + 8 * ((slot - 1) % R::SLOTS));
                }
                slot = (slot + 1) % R::SLOTS, phase ^= slot == 0;
                load(w[i], stage + DEPTH);
            }
        }
        wgmma_wait<0>();
        hold(acc);
        asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); // the ring is free
        // Through shared memory, so that what is stored is contiguous: [row of x][PITCH of W's rows].
        float *at = (float *)shared + 2 * pair * PITCH + warp * UNIT + group;
#pragma unroll
        for (u32 j = 0; j < N / 8; j++, at += 8 * PITCH) {
            at[0] = acc[4 * j], at[PITCH] = acc[4 * j + 1];
            at[8] = acc[4 * j + 2], at[PITCH + 8] = acc[4 * j + 3];
        }
        wait_for_previous_kernel();
    }
    const float *sums = (const float *)shared;
    bool together = p.parts > 1 && p.output != OUTPUT_PARTS;
    if (together) cluster_sync();
    else __syncthreads();
    u32 ranks = together ? p.parts : 1;
    // A thread: 16 columns of a row.
    for (u32 i = threadIdx.x * ranks + (together ? part : 0); i < N * WARPS; i += (THREADS + X_THREADS) * ranks) {
        u32 row = i / WARPS, column = i % WARPS * UNIT, n0 = tile * TILE_ROWS + column;
        if (row0 + row >= p.rows || n0 >= p.n) continue;
        u32 at = base + (row * PITCH + column) * 4;
        float v[16];
#pragma unroll
        for (u32 q = 0; q < 4; q++) {
            float4 sum = *(const float4 *)(sums + row * PITCH + column + 4 * q);
            if (together) {
                sum = load_from_block(at + 16 * q, 0);
                for (u32 rank = 1; rank < ranks; rank++) sum = add4(sum, load_from_block(at + 16 * q, rank));
            }
            v[4 * q] = sum.x, v[4 * q + 1] = sum.y, v[4 * q + 2] = sum.z, v[4 * q + 3] = sum.w;
        }
        if (p.bias) {
#pragma unroll
            for (u32 q = 0; q < 16; q++) v[q] += p.bias[n0 + q];
        }
        u64 to = (u64)(row0 + row) * p.stride;
        if (p.output == OUTPUT_HALF) {
            uint4 *y = (uint4 *)((f16 *)p.y + to + n0);
            y[0] = pack_half8(v), y[1] = pack_half8(v + 8);
        } else if (p.output == OUTPUT_SILU) {
#pragma unroll
            for (u32 q = 0; q < 8; q++) v[q] = silu(v[q]) * v[q + 8];
            *(uint4 *)((f16 *)p.y + to + n0 / 2) = pack_half8(v);
        } else {
            float4 *y = (float4 *)((float *)p.y + (p.output == OUTPUT_PARTS ? part * p.part_stride : 0) + to + n0);
#pragma unroll
            for (u32 q = 0; q < 4; q++) y[q] = make_float4(v[4 * q], v[4 * q + 1], v[4 * q + 2], v[4 * q + 3]);
        }
    }
    if (together) cluster_sync(); // no block leaves while another reads its sums
}

#ifndef GROUPS
#define GROUPS 1
#endif
#define KERNEL_OF(name, n, depth) \
    extern "C" __global__ void __launch_bounds__(THREADS + X_THREADS, 1) name(const __grid_constant__ Product p) { int4_wide<n, depth, GROUPS>(p); }
#ifndef WIDE_KERNELS
KERNEL_OF(int4_wide_16, 16, 4)
KERNEL_OF(int4_wide_32, 32, 4)
KERNEL_OF(int4_wide_64, 64, 3)
#endif
