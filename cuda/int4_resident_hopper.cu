// Products of 9 to 64 rows with 4-bit weights on warpgroup products (sm_90a): y[rows, n] = x[rows, k] W[n, k]^T.
//
// x stays, W passes by, as in int4_ring_hopper.cu, but x is the B operand in shared memory (128-byte swizzle) and W the A operand
// (int4_wgmma.cuh). A block has a part of k, whose x it asks for once, and a range of units of 16 rows of W. It has GROUPS
// warpgroups: each takes tiles of four units in turn, from a ring of its own, 128 columns a slot, which a thread asks for by
// the copy engine and a warp brings the scales to. The rings begin to fill before the previous kernel has ended.
//
// Where whole sums are wanted, the parts of k are the blocks of a cluster: block r finishes units r, r + CLUSTER.. of each tile.
// Warpgroups send it their sums (a mailbox for each warpgroup), a warp adds them up and writes the output while the others go on.
//
// Groups of at least 128 columns, k in multiples of 128. Grid: blocks (ranges of units, of each the blocks of a cluster), parts of k.
#include "int4_wgmma.cuh"

struct Int4Resident {
    TensorMap tile; // packed words as halves: [units][rows of 128 bytes][64], boxes of 4 units by the 8 rows of 128 columns
    TensorMap unit; // the same in boxes of 1 unit
    TensorMap x;    // [rows, k], boxes of the rows that there are by 64 columns
    Product p;
    u32 slots;      // of a warpgroup's ring
    u32 ahead;      // slots, of all rings, that are asked for before the previous kernel has ended
    u32 stage_room; // most stages of 128 columns of a block
    u32 cluster;
    u32 shift;      // groups of 128 << shift columns
    u32 unused[5];
};

#define MAX_SLOTS 12
#define MAX_PARTS_STAGES 32
#define SLOT_BYTES 4096
#define SCALE_BYTES 160 // [unit][8] words, then [unit][8] bytes
#define EVICT_FIRST 0x12F0000000000000ull // fraction 1, as createpolicy would encode it

DEVICE void copy_box_once(u32 to, const TensorMap *map, int x, int y, int z, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(0), "l"(EVICT_FIRST) : "memory");
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

template <int N, int GROUPS> DEVICE void int4_resident(const Int4Resident &r) {
    constexpr u32 PANEL = N * 128, FRAGMENT = N * 64, MAIL = 4 * FRAGMENT; // bytes; of 64 columns of x, a unit's sums, a tile's
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u64 barriers[2 * GROUPS * MAX_SLOTS + MAX_PARTS_STAGES + 2 * GROUPS];
    const Product &p = r.p;
    u32 warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, cluster = r.cluster, rank = cluster > 1 ? cluster_rank() : 0;
    u32 range = blockIdx.x / cluster, ranges = gridDim.x / cluster, units = p.n / UNIT;
    u32 unit0 = units * range / ranges, count = units * (range + 1) / ranges - unit0, tiles = (count + 3) / 4;
    u32 share = blockIdx.y * cluster + rank, shares = p.parts * cluster, all_stages = p.k / 128;
    u32 stage0 = all_stages * share / shares, stages = all_stages * (share + 1) / shares - stage0;

    u32 base = shared_address(shared), ring = base + r.stage_room * 2 * PANEL, mail = ring + GROUPS * r.slots * SLOT_BYTES;
    u32 scales = mail + (cluster > 1 ? GROUPS * MAIL : 0);
    u32 full = shared_address(barriers), empty = full + 8 * GROUPS * MAX_SLOTS, has_x = empty + 8 * GROUPS * MAX_SLOTS;
    u32 has_mail = has_x + 8 * MAX_PARTS_STAGES, free_mail = has_mail + 8 * GROUPS;

    // The lane that asks for W and x; the first slots before anything else.
    bool asks = threadIdx.x == 128 * GROUPS;
    u32 asked = 0;
    auto ask_w = [&](u32 round, u32 stage, u32 group, u32 slot) { // tile `round` of a warpgroup
        u32 first = 4 * (round * GROUPS + group), unit = unit0 + first, present = min(count - first, 4u);
        u32 to = ring + (group * r.slots + slot) * SLOT_BYTES, barrier = full + 8 * (group * MAX_SLOTS + slot);
        barrier_expect(barrier, present * 1024);
        if (present == 4) {
            copy_box_once(to, &r.tile, 0, (stage0 + stage) * 8, unit, barrier);
        } else {
            for (u32 i = 0; i < present; i++) copy_box_once(to + i * 1024, &r.unit, 0, (stage0 + stage) * 8, unit + i, barrier);
        }
    };
    if (asks) {
        prefetch_map(&r.tile), prefetch_map(&r.unit), prefetch_map(&r.x);
        for (u32 g = 0; g < GROUPS; g++) {
            for (u32 i = 0; i < r.slots; i++) {
                barrier_init(full + 8 * (g * MAX_SLOTS + i), 1 + 32);
                barrier_init(empty + 8 * (g * MAX_SLOTS + i), 4);
            }
            barrier_init(has_mail + 8 * g, 1), barrier_init(free_mail + 8 * g, cluster);
        }
        for (u32 i = 0; i < stages; i++) barrier_init(has_x + 8 * i, 1);
        barrier_init_fence();
        if (cluster > 1)
            for (u32 g = 0; g < GROUPS; g++) barrier_expect(has_mail + 8 * g, MAIL);
    }
    __syncthreads();
    if (cluster > 1) cluster_say_started();
    let_next_kernel_start();

    if (warp == 4 * GROUPS) {
        if (asks) {
            bool waited = false;
            auto ask_x = [&] {
                wait_for_previous_kernel();
                u32 rows = min(p.rows, (u32)N);
                for (u32 s = 0; s < stages; s++) {
                    barrier_expect(has_x + 8 * s, 2 * rows * 128);
                    for (u32 i = 0; i < 2; i++)
                        copy_box(base + (2 * s + i) * PANEL, &r.x, ((stage0 + s) * 2 + i) * 64, 0, has_x + 8 * s);
                }
                waited = true;
            };
            u32 slot = 0, phase = 1;
            for (u32 round = 0; round * GROUPS < tiles; round++)
                for (u32 s = 0; s < stages; s++) {
                    for (u32 g = 0; g < GROUPS && round * GROUPS + g < tiles; g++) {
                        if (!waited && (asked == r.ahead || phase == 0)) ask_x();
                        barrier_wait(empty + 8 * (g * MAX_SLOTS + slot), phase);
                        ask_w(round, s, g, slot);
                        asked++;
                    }
                    if (++slot == r.slots) slot = 0, phase ^= 1;
                }
            if (!waited) ask_x();
        }
        __syncwarp();
        if (cluster > 1) cluster_wait_started();
    } else if (warp == 4 * GROUPS + 1) {
        u32 groups = all_stages >> r.shift, slot = 0, phase = 1;
        const u8 *zeros = p.scales + (u64)p.n * groups * 2;
        for (u32 round = 0; round * GROUPS < tiles; round++)
            for (u32 s = 0; s < stages; s++) {
                for (u32 g = 0; g < GROUPS && round * GROUPS + g < tiles; g++) {
                    u32 at = g * MAX_SLOTS + slot, to = scales + (g * r.slots + slot) * SCALE_BYTES;
                    u32 unit = min(unit0 + 4 * (round * GROUPS + g) + (lane < 8 ? lane / 2 : lane % 4), units - 1);
                    u64 from = (u64)unit * groups + ((stage0 + s) >> r.shift);
                    barrier_wait(empty + 8 * at, phase);
                    if (lane < 8) copy_async_16(to + lane * 16, p.scales + from * 32 + lane % 2 * 16);
                    else if (lane < 12 && p.zero_points) copy_async_8(to + 128 + lane % 4 * 8, zeros + from * 8);
                    copy_async_arrive(full + 8 * at);
                }
                if (++slot == r.slots) slot = 0, phase ^= 1;
            }
        if (cluster > 1) cluster_wait_started();
    } else if (warp > 4 * GROUPS + 1) {
        if (cluster > 1) { // adds up and writes the units of this block
            cluster_wait_started();
            wait_for_previous_kernel();
            u32 each = 4 / cluster; // units of a tile
            u32 release = address_in_block(free_mail, lane < cluster ? lane : 0);
            for (u32 t = 0; t < tiles; t++) {
                u32 g = t % GROUPS, from = mail + g * MAIL + lane * 16;
                if ((g & 1) != warp - (4 * GROUPS + 2)) continue;
                barrier_wait(has_mail + 8 * g, t / GROUPS & 1);
                for (u32 i = 0; i < each; i++) {
                    u32 unit = 4 * t + i * cluster + rank;
                    if (unit >= count) continue;
#pragma unroll 4
                    for (u32 j = 0; j < N / 8; j++) {
                        float4 sum = load_shared4(from + i * FRAGMENT + j * 512);
                        for (u32 other = 1; other < cluster; other++)
                            sum = add4(sum, load_shared4(from + (other * each + i) * FRAGMENT + j * 512));
                        stream_output(p, sum, unit0 + unit, j);
                    }
                }
                __syncwarp();
                if (lane == 0) barrier_expect(has_mail + 8 * g, MAIL);
                __syncwarp();
                if (lane < cluster) barrier_arrive_in_block(release + 8 * g);
            }
        }
    } else {
        wait_for_previous_kernel();
        u32 group = lane >> 2, pair = lane & 3, w = warp & 3, wg = warp >> 2;
        Lane mine;
        // The words of chunk c of 16 bytes are at words ^ 16 * c: chunk (group & 1) * 4 + c of row group / 2, swizzled.
        mine.words = ring + wg * r.slots * SLOT_BYTES + w * 1024 + (group >> 1) * 128 + (group & 1) * 64 + (group >> 1) * 16 + (pair >> 1) * 8;
        mine.scales = scales + wg * r.slots * SCALE_BYTES + w * 32 + group * 4;
        mine.zeros = scales + wg * r.slots * SCALE_BYTES + 128 + w * 8 + group;
        mine.turn = pair & 1 ? 0x0321 : 0x3210;
        mine.zero_points = p.zero_points;
        u32 my_full = full + 8 * wg * MAX_SLOTS, my_empty = empty + 8 * wg * MAX_SLOTS;
        u32 slot = 0, phase = 0;
        u32 owner = w % cluster, to = 0, to_barrier = 0;
        if (cluster > 1) {
            cluster_wait_started();
            to = address_in_block(mail + wg * MAIL + (rank * (4 / cluster) + w / cluster) * FRAGMENT + lane * 16, owner);
            to_barrier = address_in_block(has_mail + 8 * wg, owner);
        }
        for (u32 t = wg; t < tiles; t += GROUPS) {
            float acc[N / 2];
            u32 a[2][4][4];
#pragma unroll
            for (int i = 0; i < N / 2; i++) acc[i] = 0.0f;
            const u64 rows = descriptor_rows(base);
            u32 x = (u32)rows; // only the low half of a descriptor moves
            for (u32 s = 0; s < stages; s++) {
                barrier_wait(my_full + 8 * slot, phase);
                if (t == wg) barrier_wait(has_x + 8 * s, 0);
                Words words[2] = {load_words(mine, slot * SLOT_BYTES, 0), load_words(mine, slot * SLOT_BYTES, 1)};
                Group of = load_group(mine, slot * SCALE_BYTES, slot * SCALE_BYTES);
                __syncwarp();
                if (lane == 0) barrier_arrive(my_empty + 8 * slot);
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    dequantise(a[half], words[half], mine.turn, of, of);
                    wgmma_fence();
#pragma unroll
                    for (u32 q = 0; q < 4; q++) multiply(acc, a[half][q], rows >> 32 << 32 | (x + half * (PANEL / 16) + 2 * q));
                    wgmma_commit();
                    wgmma_wait<1>(); // all but these
                }
                x += 2 * PANEL / 16;
                if (++slot == r.slots) slot = 0, phase ^= 1;
            }
            wgmma_wait<0>();
            hold(acc);
            if (cluster > 1) {
                if (t != wg) barrier_wait(free_mail + 8 * wg, (t / GROUPS & 1) ^ 1);
#pragma unroll
                for (u32 j = 0; j < N / 8; j++) send4(to + j * 512, acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3], to_barrier);
            } else if (4 * t + w < count) {
#pragma unroll
                for (u32 j = 0; j < N / 8; j++)
                    stream_output(p, make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]), unit0 + 4 * t + w, j);
            }
        }
    }
    if (cluster > 1) cluster_sync(); // no block leaves while another one sends to it or has yet to hear from it
}

#define KERNEL_OF(name, n, groups)                                                                                      \
    extern "C" __global__ void __launch_bounds__(128 * groups + 128, 1) name(const __grid_constant__ Int4Resident r) { \
        int4_resident<n, groups>(r);                                                                                    \
    }
KERNEL_OF(int4_resident_16, 16, 3)
KERNEL_OF(int4_resident_32, 32, 3)
KERNEL_OF(int4_resident_48, 48, 3)
KERNEL_OF(int4_resident_64, 64, 3)
#ifdef TRY_TWO
KERNEL_OF(int4_resident_32_2, 32, 2)
KERNEL_OF(int4_resident_64_2, 64, 2)
KERNEL_OF(int4_resident_32_4, 32, 4)
#endif
