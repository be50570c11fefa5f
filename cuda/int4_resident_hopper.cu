// Products of 17 to 64 rows with 4-bit weights on warpgroup products (sm_90a): y[rows, n] = x[rows, k] W[n, k]^T.
//
// x stays, W passes by, as in int4_ring_hopper.cu, but x is the B operand in shared memory and W the A operand, which each warp
// unpacks into its registers, 16 rows a warp. A block has a part of k, whose x it reads once, and a range of units of 16 rows of
// W. It has GROUPS warpgroups: each takes tiles of four units in turn, from a ring of its own, up to 256 columns a slot, which a
// thread fills by bulk copies, and a warp with the scales. The rings begin to fill before the previous kernel has ended.
//
// A lane's words are fragments of the product where x lies in the packing's order of columns (int4.cuh): 4-byte piece w of the
// 16-byte chunks 0..3 of 32 columns makes unit w. Nibbles are multiplied with their offset on and scales applied to fp32 sums of
// 128 columns, so no weight is ever rounded; offsets and zero points are taken away by way of the sum of x, which a product
// with ones gives. That is fewer instructions than dequantising, and instructions are what binds here.
//
// Where whole sums are wanted, the parts of k are the blocks of a cluster: block r finishes units r, r + CLUSTER.. of each tile.
// Warpgroups send it their sums (a mailbox for each), and add up and write what has come in the midst of the next tile.
//
// Groups of 128 << shift columns, k in multiples of 128. Grid: blocks (ranges of units, of each the blocks of a cluster), parts of k.
#include "cluster.cuh"
#include "int4.cuh"
#include "wgmma.cuh"

struct Int4Resident {
    Product p;
    u32 slots;      // of a warpgroup's ring
    u32 ahead;      // slots, of all rings, that are asked for before the previous kernel has ended
    u32 stage_room; // most stages of 128 columns of a block
    u32 cluster;    // blocks of a cluster: 1, 2 or 4
    u32 shift;
    u32 unused;
};

#define MAX_SLOTS 12
#define SLOT_STAGES 2
#define UNIT_BYTES (SLOT_STAGES * 1024)
#define SLOT_BYTES (4 * UNIT_BYTES)
#define SCALE_BYTES (4 * SLOT_STAGES * 40) // [unit][stage][8] words, then [unit][stage][8] bytes
#define EVICT_FIRST 0x12F0000000000000ull  // fraction 1, as createpolicy would encode it

DEVICE void copy_bulk_once(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(EVICT_FIRST) : "memory");
}
DEVICE void copy_async_8(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
// Arrives on the barrier when this thread's copies so far have landed.
DEVICE void copy_async_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// 16 bytes to another block's shared memory, which complete on a barrier there.
DEVICE void send4(u32 there, float a, float b, float c, float d, u32 barrier_there) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(there), "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier_there) : "memory");
}

DEVICE float4 load_shared4(u32 address) {
    float4 out;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w) : "r"(address) : "memory");
    return out;
}
DEVICE uint4 load_words(u32 address) {
    uint4 out;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "r"(address) : "memory");
    return out;
}
DEVICE float2 load_shared2(u32 address) {
    float2 out;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(out.x), "=f"(out.y) : "r"(address) : "memory");
    return out;
}
DEVICE u32 load_shared_byte(u32 address) {
    u32 out;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(out) : "r"(address) : "memory");
    return out;
}

// threadIdx.x / 32, known to the compiler to be the same in all of a warp: what depends on it alone then takes no vector instructions.
DEVICE u32 warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0); }

// d[64xN] (+)= a[64x16] b[Nx16]^T; a in registers, b in shared memory with the 16 contiguous.
#define NAMES_24 WGMMA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MULTIPLY(N, NAMES, A, B, ADD, ...)                                                                                         \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" NAMES "}, {" A \
                 "}, " B ", p, 1, 1, 0;}" : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(Add))
template <int Add> DEVICE void multiply(float (&d)[8], const u32 (&a)[4], u64 b) {
    MULTIPLY(16, WGMMA_NAMES_8, "%8, %9, %10, %11", "%12", "%13", WGMMA_8(0));
}
template <int Add> DEVICE void multiply(float (&d)[16], const u32 (&a)[4], u64 b) {
    MULTIPLY(32, WGMMA_NAMES_16, "%16, %17, %18, %19", "%20", "%21", WGMMA_8(0), WGMMA_8(8));
}
template <int Add> DEVICE void multiply(float (&d)[24], const u32 (&a)[4], u64 b) {
    MULTIPLY(48, NAMES_24, "%24, %25, %26, %27", "%28", "%29", WGMMA_8(0), WGMMA_8(8), WGMMA_8(16));
}
template <int Add> DEVICE void multiply(float (&d)[32], const u32 (&a)[4], u64 b) {
    MULTIPLY(64, WGMMA_NAMES_32, "%32, %33, %34, %35", "%36", "%37", WGMMA_32(0));
}

// x of the block's stages, from column `column`, to its panels of 64 columns: threads 0.. of THREADS, a chunk of 8 columns at a time.
template <int N, u32 THREADS> DEVICE void bring_x(const Product &p, u32 base, u32 column, u32 panels) {
    constexpr u32 TOGETHER = 8;
    u32 c = threadIdx.x & 7, first = threadIdx.x >> 3;
    const f16 *from = p.x + column + c * 8;
    for (u32 start = first; start < panels * N; start += TOGETHER * (THREADS / 8)) {
        uint4 x[TOGETHER];
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            u32 at = start + i * (THREADS / 8), panel = at / N, row = at % N;
            if (panel < panels && row < p.rows) x[i] = *(const uint4 *)(from + row * p.k + panel * 64);
        }
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            u32 at = start + i * (THREADS / 8), row = at % N;
            if (at >= panels * N || row >= p.rows) continue; // columns of the product that nobody looks at
#pragma unroll
            for (u32 w = 0; w < 4; w++) store_shared(base + at * 128 + (((c & 4) + w) ^ (row & 7)) * 16 + (c & 3) * 4, word_of(x[i], w));
        }
    }
}

template <int N, int GROUPS> DEVICE void int4_resident(const Int4Resident &r) {
    constexpr u32 PANEL = N * 128, FRAGMENT = N * 64, MAIL = 4 * FRAGMENT; // bytes; of 64 columns of x, a unit's sums, a tile's
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u64 barriers[2 * GROUPS * MAX_SLOTS + 2 * GROUPS];
    const Product &p = r.p;
    u32 warp = warp_index(), lane = threadIdx.x & 31, cluster = r.cluster, rank = cluster > 1 ? cluster_rank() : 0;
    u32 range = blockIdx.x / cluster, ranges = gridDim.x / cluster, units = p.n / UNIT;
    u32 unit0 = units * range / ranges, count = units * (range + 1) / ranges - unit0, tiles = (count + 3) / 4;
    u32 share = blockIdx.y * cluster + rank, shares = p.parts * cluster, all_stages = p.k / 128;
    u32 stage0 = all_stages * share / shares, stages = all_stages * (share + 1) / shares - stage0;

    u32 base = shared_address(shared), ring = base + r.stage_room * 2 * PANEL, mail = ring + GROUPS * r.slots * SLOT_BYTES;
    u32 x_sums = mail + (cluster > 1 ? GROUPS * MAIL : 0), scales = x_sums + r.stage_room * N * 4; // [stage][N]
    u32 full = shared_address(barriers), empty = full + 8 * GROUPS * MAX_SLOTS;
    u32 has_mail = empty + 8 * GROUPS * MAX_SLOTS, free_mail = has_mail + 8 * GROUPS;

    if (threadIdx.x == 128 * GROUPS) {
        for (u32 g = 0; g < GROUPS; g++) {
            for (u32 i = 0; i < r.slots; i++) {
                barrier_init(full + 8 * (g * MAX_SLOTS + i), 1 + 32);
                barrier_init(empty + 8 * (g * MAX_SLOTS + i), 4);
            }
            barrier_init(has_mail + 8 * g, 1), barrier_init(free_mail + 8 * g, 4 * cluster);
        }
        barrier_init_fence();
        if (cluster > 1)
            for (u32 g = 0; g < GROUPS; g++) barrier_expect(has_mail + 8 * g, MAIL);
    }
    __syncthreads();
    if (cluster > 1) cluster_say_started();
    let_next_kernel_start();

    if (warp >= 4 * GROUPS) {
        give_registers<40>();
        if (cluster > 1) cluster_wait_started();
        if (warp == 4 * GROUPS) { // asks for W
            if (lane == 0) {
                u32 slot = 0, phase = 1, asked = 0;
                for (u32 round = 0; round * GROUPS < tiles; round++)
                    for (u32 s = 0; s < stages; s += SLOT_STAGES) {
                        u32 bytes = min(stages - s, SLOT_STAGES) * 1024;
                        for (u32 g = 0; g < GROUPS && round * GROUPS + g < tiles; g++) {
                            if (asked++ == r.ahead) wait_for_previous_kernel();
                            u32 first = 4 * (round * GROUPS + g), present = min(count - first, 4u), at = g * MAX_SLOTS + slot;
                            u32 to = ring + (g * r.slots + slot) * SLOT_BYTES;
                            const u8 *from = p.w + ((u64)(unit0 + first) * all_stages + stage0 + s) * 1024;
                            barrier_wait(empty + 8 * at, phase);
                            barrier_expect(full + 8 * at, present * bytes);
                            for (u32 i = 0; i < present; i++, from += (u64)all_stages * 1024)
                                copy_bulk_once(to + i * UNIT_BYTES, from, bytes, full + 8 * at);
                        }
                        if (++slot == r.slots) slot = 0, phase ^= 1;
                    }
            }
            __syncwarp();
        } else if (warp == 4 * GROUPS + 1) { // brings the scales
            u32 groups = all_stages >> r.shift, slot = 0, phase = 1;
            const u8 *zeros = p.scales + (u64)p.n * groups * 2;
            u32 of = lane < 16 ? lane / 2 : lane % 8; // unit and stage of the slot
            for (u32 round = 0; round * GROUPS < tiles; round++)
                for (u32 s = 0; s < stages; s += SLOT_STAGES) {
                    for (u32 g = 0; g < GROUPS && round * GROUPS + g < tiles; g++) {
                        u32 at = g * MAX_SLOTS + slot, to = scales + (g * r.slots + slot) * SCALE_BYTES;
                        // Units and stages past the end: others, whose sums nobody looks at.
                        u32 unit = min(unit0 + 4 * (round * GROUPS + g) + of / 2, units - 1);
                        u64 from = (u64)unit * groups + (min(stage0 + s + of % 2, all_stages - 1) >> r.shift);
                        barrier_wait(empty + 8 * at, phase);
                        if (lane < 16) copy_async_16(to + lane * 16, p.scales + from * 32 + lane % 2 * 16);
                        else if (lane < 24 && p.zero_points) copy_async_8(to + 256 + of * 8, zeros + from * 8);
                        copy_async_arrive(full + 8 * at);
                    }
                    if (++slot == r.slots) slot = 0, phase ^= 1;
                }
        }
    } else {
        take_registers<GROUPS == 2 ? 96 : 152>();
        u32 group = lane >> 2, pair = lane & 3, w = warp & 3, wg = warp >> 2;
        const u64 rows = descriptor_rows(base);
        wait_for_previous_kernel();
        bring_x<N, 128 * GROUPS>(p, base, stage0 * 128, 2 * stages);
        shared_write_fence();
        named_sync(1, 128 * GROUPS);
        float sum[N / 2];
        for (u32 s = wg; s < stages; s += GROUPS) { // sums of x, the same in all rows of the product
            const u32 ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
            wgmma_fence();
#pragma unroll
            for (u32 q = 0; q < 8; q++) {
                u64 x = rows >> 32 << 32 | ((u32)rows + (2 * s + q / 4) * (PANEL / 16) + q % 4 * 2);
                if (q == 0) multiply<0>(sum, ones, x);
                else multiply<1>(sum, ones, x);
            }
            wgmma_commit();
            wgmma_wait<0>();
            hold(sum);
            if (w == 0 && group == 0) {
#pragma unroll
                for (u32 j = 0; j < N / 8; j++) {
                    store_shared(x_sums + (s * N + 8 * j + 2 * pair) * 4, sum[4 * j]);
                    store_shared(x_sums + (s * N + 8 * j + 2 * pair) * 4 + 4, sum[4 * j + 1]);
                }
            }
        }
        named_sync(1, 128 * GROUPS);

        u32 my_full = full + 8 * wg * MAX_SLOTS, my_empty = empty + 8 * wg * MAX_SLOTS;
        u32 words_at = ring + wg * r.slots * SLOT_BYTES + w * UNIT_BYTES + lane * 16;
        u32 scales_at = scales + wg * r.slots * SCALE_BYTES + w * SLOT_STAGES * 32 + group * 4;
        u32 zeros_at = scales + wg * r.slots * SCALE_BYTES + 256 + w * SLOT_STAGES * 8 + group;
        u32 slot = 0, phase = 0, round = 0;
        u32 to = 0, to_barrier = 0, release = 0;
        if (cluster > 1) {
            u32 owner = w % cluster;
            cluster_wait_started();
            to = address_in_block(mail + wg * MAIL + (rank * (4 / cluster) + w / cluster) * FRAGMENT + lane * 16, owner);
            to_barrier = address_in_block(has_mail + 8 * wg, owner);
            release = address_in_block(free_mail + 8 * wg, lane < cluster ? lane : 0);
        }
        // Adds up and writes the units of this block in this warpgroup's tile of round `done`, a tile of 8 rows of x a warp in turn.
        auto finish = [&](u32 done) {
            u32 each = 4 / cluster;
            barrier_wait(has_mail + 8 * wg, done & 1);
            for (u32 i = 0; i < each; i++) {
                u32 unit = 4 * (done * GROUPS + wg) + i * cluster + rank;
                if (unit >= count) continue;
#pragma unroll
                for (u32 j = 0; j < (N / 8 + 3) / 4; j++) {
                    u32 tile = j * 4 + w, from = mail + wg * MAIL + i * FRAGMENT + tile * 512 + lane * 16;
                    if (N % 32 && tile >= N / 8) break;
                    float4 all = load_shared4(from);
                    for (u32 other = 1; other < cluster; other++) all = add4(all, load_shared4(from + other * each * FRAGMENT));
                    stream_output(p, all, unit0 + unit, tile);
                }
            }
            __syncwarp();
            if (w == 0 && lane == 0) barrier_expect(has_mail + 8 * wg, MAIL);
            __syncwarp();
            if (lane < cluster) barrier_arrive_in_block(release);
        };
        for (u32 t = wg; t < tiles; t += GROUPS, round++) {
            float acc[N / 2];
#pragma unroll
            for (int i = 0; i < N / 2; i++) acc[i] = 0.0f;
            u32 x = (u32)rows, x_sum_at = x_sums + 8 * pair; // only the low half of a descriptor moves
            for (u32 s = 0; s < stages; s += SLOT_STAGES) {
                // In the midst of the next tile, when all of the last one's sums have come.
                if (cluster > 1 && round > 0 && s == stages / 4 * 2) finish(round - 1);
                barrier_wait(my_full + 8 * slot, phase);
                u32 words_from = words_at + slot * SLOT_BYTES, scale_from = scales_at + slot * SCALE_BYTES, zeros_from = zeros_at + slot * SCALE_BYTES;
#pragma unroll
                for (u32 odd = 0; odd < SLOT_STAGES; odd++) {
                    if (odd && s + 1 == stages) break;
                    uint4 words[2] = {load_words(words_from + odd * 1024), load_words(words_from + odd * 1024 + 512)};
                    u32 scale_pair = load_shared(scale_from + odd * 32);
                    u32 z = p.zero_points ? load_shared_byte(zeros_from + odd * 8) : 0x88u;
#pragma unroll
                    for (u32 half = 0; half < 2; half++) {
                        u32 a[4][4];
#pragma unroll
                        for (u32 q = 0; q < 4; q++) unpack_offset(word_of(words[half], q / 2 + q % 2 * 2), a[q]);
                        wgmma_fence();
#pragma unroll
                        for (u32 q = 0; q < 4; q++) {
                            u64 b = rows >> 32 << 32 | (x + half * (PANEL / 16) + 2 * q);
                            if (half == 0 && q == 0) multiply<0>(sum, a[q], b);
                            else multiply<1>(sum, a[q], b);
                        }
                        wgmma_commit();
                    }
                    float2 scale = unpack_half2(scale_pair);
                    float low = __uint_as_float(0x43800000u | (z & 15) << 15), high = __uint_as_float(0x41800000u | (z & 0xf0) << 15);
                    float2 x_sum[N / 8];
#pragma unroll
                    for (u32 j = 0; j < N / 8; j++) x_sum[j] = load_shared2(x_sum_at + 32 * j);
                    wgmma_wait<0>();
                    hold(sum);
#pragma unroll
                    for (u32 j = 0; j < N / 8; j++) {
                        const float *of = sum + 4 * j;
                        acc[4 * j] += scale.x * (of[0] - low * x_sum[j].x), acc[4 * j + 1] += scale.x * (of[1] - low * x_sum[j].y);
                        acc[4 * j + 2] += scale.y * (of[2] - high * x_sum[j].x), acc[4 * j + 3] += scale.y * (of[3] - high * x_sum[j].y);
                    }
                    x += 2 * PANEL / 16, x_sum_at += 4 * N;
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(my_empty + 8 * slot);
                if (++slot == r.slots) slot = 0, phase ^= 1;
            }
            if (cluster > 1) {
                if (round > 0) barrier_wait(free_mail + 8 * wg, (round & 1) ^ 1);
#pragma unroll
                for (u32 j = 0; j < N / 8; j++) send4(to + j * 512, acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3], to_barrier);
            } else if (4 * t + w < count) {
#pragma unroll
                for (u32 j = 0; j < N / 8; j++)
                    stream_output(p, make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]), unit0 + 4 * t + w, j);
            }
        }
        if (cluster > 1 && round > 0) finish(round - 1);
    }
    if (cluster > 1) cluster_sync(); // no block leaves while another one sends to it or has yet to hear from it
}

#define KERNEL_OF(name, n, groups, blocks)                                                                                   \
    extern "C" __global__ void __launch_bounds__(128 * groups + 128, blocks) name(const __grid_constant__ Int4Resident r) { \
        int4_resident<n, groups>(r);                                                                                         \
    }
KERNEL_OF(int4_resident_16, 16, 3, 1)
KERNEL_OF(int4_resident_32, 32, 3, 1)
KERNEL_OF(int4_resident_48, 48, 3, 1)
KERNEL_OF(int4_resident_64, 64, 3, 1)
#ifdef TRY_TWO
KERNEL_OF(int4_resident_16_twice, 16, 2, 2)
KERNEL_OF(int4_resident_32_twice, 32, 2, 2)
#endif
