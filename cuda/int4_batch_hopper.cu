// Products of 9 rows and more with 4-bit weights on warpgroup products (sm_90a): y[rows, n] = x[rows, k] W[n, k]^T.
//
// W is the A operand, dequantised by each warp into its registers, 16 rows a warp; N rows of x are the B operand, in shared memory.
// So a weight passes through shared memory in its 4 bits and is dequantised once for N rows of x.
//
// A thread block: GROUPS warpgroups of 64 rows of W each, and one that feeds a ring: a thread asks the copy engine for x (128-byte
// swizzle) and for the packed words (512 bytes a unit of 16 rows and 64 columns, as they lie), a warp brings the scales and zero
// points. Blocks go from tile to tile; the ring is filled for the next one while sums leave through shared memory. Before the
// previous kernel has ended a block asks for the words of `ahead` slots and no more, and for the scales of the whole ring: x, and
// what the kernels in front still read, would wait behind more.
//
// Two blocks of a cluster are ACROSS, and take neighbouring tiles of W and half of x each, for both; or they are DEEP, where the
// output is whole and tiles are few: they take half of k each of the same tile, one tile only, and exchange sums.
//
// To 64 rows and for groups of 128 columns and more, scales are applied to fp32 sums of 128 columns (ON_SUMS), which is no more work
// there, and no weight is rounded. Elsewhere they are applied to the fp16 weights: each is rounded once, as in a 16-bit checkpoint.
// SCALES: scales of 128 columns, 1 for groups of as many and more, 4 for smaller ones.
#include "cluster.cuh"
#include "int4.cuh"
#include "wgmma.cuh"

struct Int4Batch {
    TensorMap w; // packed words as halves: [units][rows of 128 bytes][64], boxes of a block's units by 4 rows for each 64 columns
    TensorMap x; // [k / 64][rows][64], boxes of N / ACROSS rows of 64 columns, all of a slot (one where blocks are across)
    TensorMap y; // [parts][rows][columns], boxes of 64 columns of fp16 (32 with silu) by N / DEEP rows, of 32 columns of fp32 by N / 2
    const u8 *scales;
    const float *bias;
    u32 n, k, shift;       // groups of 1 << shift columns
    u32 zero_points;
    u32 output, parts;
    u32 w_tiles, x_tiles;  // w_tiles: of blocks across together
    u32 ahead;             // slots that are asked for before the previous kernel has ended
    u32 unused[3];
};

// Tiles of x that each tile of W is multiplied by before the next, so that both stay in the L2.
#define BAND 8

template <int N, int GROUPS, int SCALES> struct Ring {
    static constexpr u32 BLOCKS = N <= 128 ? 2 : 1; // of 64 columns in a slot
    static constexpr u32 UNITS = 4 * GROUPS, SETS = SCALES == 1 ? 1 : 2 * BLOCKS; // of scales, for a unit
    static constexpr u32 X = N * 128, W = UNITS * BLOCKS * 512, S = UNITS * SETS * 40; // bytes of a slot, of X for each block
    static constexpr u32 OUT = N * 128;                                                // and of a warpgroup's output
    static constexpr u32 ROOM = (227 << 10) - 256 - GROUPS * OUT, SLOT = X * BLOCKS + W + S;
    static constexpr u32 SLOTS = ROOM / SLOT < 15 ? ROOM / SLOT : 15; // 256 bytes of barriers
    static constexpr u32 AT_W = SLOTS * X * BLOCKS, AT_OUT = AT_W + SLOTS * W, AT_S = AT_OUT + GROUPS * OUT,
                         AT_BARRIERS = AT_S + SLOTS * S;
};

// ---- shared memory ----

DEVICE uint4 load_shared_16(u32 address) {
    uint4 out;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "r"(address) : "memory");
    return out;
}
DEVICE u32 load_shared_byte(u32 address) {
    u32 out;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(out) : "r"(address) : "memory");
    return out;
}
DEVICE float4 load_shared4(u32 address) {
    float4 out;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w) : "r"(address) : "memory");
    return out;
}
// 16 bytes to another block's shared memory, which complete on a barrier there.
DEVICE void send4(u32 there, float a, float b, float c, float d, u32 barrier_there) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(there), "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier_there) : "memory");
}
DEVICE void copy_async_8(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
// Arrives on the barrier when this thread's copies so far have landed.
DEVICE void copy_async_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

DEVICE void prefetch_map(const TensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// ---- tiles ----

constexpr bool on_sums(int n, int scales) { return scales == 1 && n <= 64; }
// Whether blocks leave room for the small kernels between products, which otherwise begin only when a block has left. Two sets of
// sums of more than 32 rows do not.
constexpr bool leaves_room(int n, int scales) { return n <= (on_sums(64, scales) ? 32 : 64); }

struct Tile {
    u32 w, x, part, begin, count; // w: of this block; steps begin.. of 128 columns
};
template <int ACROSS, int DEEP> DEVICE Tile tile_at(const Int4Batch &p, u32 t) {
    Tile tile;
    tile.part = t % p.parts, t /= p.parts;
    u32 band = t / (BAND * p.w_tiles), in_band = min(p.x_tiles - band * BAND, (u32)BAND);
    t -= band * BAND * p.w_tiles;
    tile.x = band * BAND + t % in_band;
    tile.w = t / in_band * ACROSS + (ACROSS > 1 ? cluster_rank() : 0);
    u32 steps = (p.k + 127) / 128, part = tile.part * DEEP + (DEEP > 1 ? cluster_rank() : 0), parts = p.parts * DEEP;
    tile.begin = steps * part / parts, tile.count = steps * (part + 1) / parts - tile.begin;
    return tile;
}
#define FOR_TILES(t) for (u32 t = blockIdx.x / (ACROSS * DEEP), tiles = p.w_tiles * p.x_tiles * p.parts; t < tiles; t += gridDim.x / (ACROSS * DEEP))

template <u32 SLOTS> struct Place {
    u32 slot, phase;
    __device__ __forceinline__ Place(u32 first) : slot(0), phase(first) {}
    __device__ __forceinline__ void next() {
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
};

// ---- the thread that asks for x and the words ----

template <int N, int GROUPS, int ACROSS, int DEEP, int SCALES> DEVICE void ask(const Int4Batch &p, u32 base, u32 full, u32 empty) {
    typedef Ring<N, GROUPS, SCALES> R;
    Place<R::SLOTS> at(1);
    u32 bytes = R::BLOCKS * R::X + R::W, rank = ACROSS > 1 ? cluster_rank() : 0, early = 0;
    // Columns past the end are zeros.
    auto ask_w = [&](const Tile &tile, u32 block, u32 slot) {
        barrier_expect(full + 8 * slot, bytes);
        copy_box(base + R::AT_W + slot * R::W, &p.w, 0, block * 4, tile.w * R::UNITS, 0, full + 8 * slot);
    };
    FOR_TILES(t) {
        Tile tile = tile_at<ACROSS, DEEP>(p, t);
        u32 first = tile.begin * 2, count = tile.count * 2 / R::BLOCKS;
        if (t < gridDim.x / (ACROSS * DEEP)) { // before the previous kernel has ended
            early = min(min(R::SLOTS, count), p.ahead);
            for (u32 i = 0; i < early; i++) ask_w(tile, first + i * R::BLOCKS, i);
            wait_for_previous_kernel();
        }
        for (u32 i = 0; i < count; i++, at.next()) {
            barrier_wait(empty + 8 * at.slot, at.phase);
            if (early > 0) early--;
            else ask_w(tile, first + i * R::BLOCKS, at.slot);
            u32 to = base + at.slot * R::BLOCKS * R::X, block = first + i * R::BLOCKS, row = tile.x * N + rank * (N / ACROSS);
            if (ACROSS == 1) {
                copy_box(to, &p.x, 0, row, block, 0, full + 8 * at.slot);
            } else {
#pragma unroll
                for (u32 j = 0; j < R::BLOCKS; j++)
                    copy_box_to_all(to + j * R::X + rank * (R::X / ACROSS), &p.x, 0, row, block + j, 0, full + 8 * at.slot, ACROSS);
            }
        }
    }
}

// ---- the warp that brings scales and zero points: [unit][set][8] words, then [unit][set][8] bytes ----

template <int N, int GROUPS, int ACROSS, int DEEP, int SCALES> DEVICE void bring_scales(const Int4Batch &p, u32 base, u32 full, u32 empty) {
    typedef Ring<N, GROUPS, SCALES> R;
    Place<R::SLOTS> at(1);
    u32 lane = threadIdx.x & 31, groups = p.k >> p.shift, units = p.n / UNIT;
    const u8 *zeros = p.scales + (u64)p.n * groups * 2;
    FOR_TILES(t) {
        Tile tile = tile_at<ACROSS, DEEP>(p, t);
        for (u32 i = 0; i < tile.count * 2 / R::BLOCKS; i++, at.next()) {
            u32 to = base + R::AT_S + at.slot * R::S, block = tile.begin * 2 + i * R::BLOCKS;
            // Rows and columns past the end: repeated ones, which are never stored or meet zeros of x.
            auto from = [&](u32 j) {
                u32 unit = min(tile.w * R::UNITS + j / R::SETS, units - 1);
                u32 group = SCALES == 1 ? block >> (p.shift - 6) : min((block * 2 + j % R::SETS) >> (p.shift - 5), groups - 1);
                return (u64)unit * groups + group;
            };
            barrier_wait(empty + 8 * at.slot, at.phase);
            if (R::BLOCKS == 2 || SCALES > 1 || i % 2 == 0) { // else those of the slot before
#pragma unroll
                for (u32 j = lane; j < R::UNITS * R::SETS * 2; j += 32) copy_async_16(to + j * 16, p.scales + from(j / 2) * 32 + j % 2 * 16);
                if (p.zero_points) {
#pragma unroll
                    for (u32 j = lane; j < R::UNITS * R::SETS; j += 32) copy_async_8(to + R::UNITS * R::SETS * 32 + j * 8, zeros + from(j) * 8);
                }
            }
            copy_async_arrive(full + 8 * at.slot);
        }
    }
}

// ---- the warpgroups that multiply ----

// Where a lane finds what it dequantises, in slot 0.
struct Lane {
    u32 words, scales, zeros; // addresses
};

// Scales and zero points of rows group and group + 8: the scales as floats where sums are multiplied, else twice in a word.
struct Group {
    u32 scale_low, scale_high;
    u32 zero_low, zero_high; // as in Zeros
};
template <class R, bool ON_SUMS> DEVICE Group load_group(const Lane &lane, u32 slot, u32 set) {
    u32 both = load_shared(lane.scales + slot * R::S + set * 32);
    u32 zeros = load_shared_byte(lane.zeros + slot * R::S + set * 8) * 0x00040004u;
    Group out;
    if (ON_SUMS) {
        float2 scale = unpack_half2(both);
        out.scale_low = __float_as_uint(scale.x), out.scale_high = __float_as_uint(scale.y);
    } else {
        out.scale_low = __byte_perm(both, 0, 0x1010), out.scale_high = __byte_perm(both, 0, 0x3232);
    }
    out.zero_low = lop_and_or(zeros, 0x003c003cu, 0x5c005c00u), out.zero_high = lop_and_or(zeros, 0x03c003c0u, 0x4c004c00u);
    return out;
}

// The fragments of block `block` of 64 columns of a slot, of whose halves the groups are given.
template <class R, bool ON_SUMS> DEVICE void dequantise(u32 (&a)[4][4], const Lane &lane, u32 slot, u32 block, const Group &first, const Group &last) {
    uint4 words = load_shared_16(lane.words + slot * R::W + block * 512);
#pragma unroll
    for (u32 q = 0; q < 4; q++) {
        const Group &of = q < 2 ? first : last;
        unpack_offset(word_of(words, q / 2 + q % 2 * 2), a[q]);
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            a[q][j] = sub_half2(a[q][j], j & 1 ? of.zero_high : of.zero_low);
            if (!ON_SUMS) a[q][j] = mul_half2(a[q][j], j & 1 ? of.scale_high : of.scale_low);
        }
    }
}

// Sums of two blocks with half of k each: block r of them gets those of half r of the rows of x. Each sends the other one its share to
// where that one's output will lie.
template <int N> DEVICE void exchange(const float (&acc)[N / 2], float (&half)[N / 4], u32 out, u32 mail) {
    u32 rank = cluster_rank(), other = rank ^ 1, at = out + (threadIdx.x & 127) * 16;
    u32 there = address_in_block(at, other), mail_there = address_in_block(mail, other);
#pragma unroll
    for (u32 j = 0; j < N / 16; j++) {
        const float *low = acc + 4 * j, *high = acc + 4 * (N / 16 + j);
#pragma unroll
        for (u32 i = 0; i < 4; i++) half[4 * j + i] = rank ? high[i] : low[i];
        send4(there + j * 2048, rank ? low[0] : high[0], rank ? low[1] : high[1], rank ? low[2] : high[2], rank ? low[3] : high[3], mail_there);
    }
    barrier_wait_cluster(mail, 0);
#pragma unroll
    for (u32 j = 0; j < N / 16; j++) {
        float4 sum = load_shared4(at + j * 2048);
        half[4 * j] += sum.x, half[4 * j + 1] += sum.y, half[4 * j + 2] += sum.z, half[4 * j + 3] += sum.w;
    }
}

// A warpgroup's sums to y, by way of `out`, in the swizzle of y's boxes; fp32 in ROUNDS of N / ROUNDS rows, as many as `out` holds.
template <int N, u32 UNITS, int ROUNDS> DEVICE void put(const Int4Batch &p, const Tile &tile, float (&acc)[N / 2], int row, u32 out) {
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, w = warp & 3, wg = warp >> 2, group = lane >> 2, pair = lane & 3;
    bool leader = w == 0 && lane == 0;
    auto together = [&] { asm volatile("bar.sync %0, 128;" ::"r"(wg + 1) : "memory"); };
    auto begin = [&] { // the copy engine has read what was there
        if (leader) store_wait_read<0>();
        together();
    };
    auto end = [&] {
        shared_write_fence();
        together();
    };
    u32 column = tile.w * UNITS * UNIT + wg * 64;
    if (p.bias) {
        u32 n0 = (tile.w * UNITS + warp) * UNIT + group;
        float low = n0 < p.n ? p.bias[n0] : 0.0f, high = n0 < p.n ? p.bias[n0 + 8] : 0.0f;
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[i] += i & 2 ? high : low;
    }
    if (p.output == OUTPUT_HALF) {
        begin();
        u32 to = out + ((lane >> 4) * 8 + (lane & 7)) * 128 + ((2 * w + (lane >> 3 & 1)) ^ (lane & 7)) * 16;
#pragma unroll
        for (int j = 0; j < N / 8; j += 2) {
            const float *v = acc + 4 * j;
            if (j + 1 == N / 8) store_matrix_x2_transposed(to + j * 1024, pack_half2(v[0], v[1]), pack_half2(v[2], v[3]));
            else store_matrix_x4_transposed(to + j * 1024, pack_half2(v[0], v[1]), pack_half2(v[2], v[3]), pack_half2(v[4], v[5]), pack_half2(v[6], v[7]));
        }
        end();
        if (leader) store_box(&p.y, out, column, row, tile.part, 0), store_commit();
    } else if (ROUNDS == 2 && p.output == OUTPUT_SILU) { // never deep
        begin();
        u32 to = out + lane * 64 + (w ^ (lane >> 1 & 3)) * 16;
        u32 gated[N / 8];
#pragma unroll
        for (int j = 0; j < N / 8; j++)
            gated[j] = pack_half2(silu_fast(acc[4 * j]) * acc[4 * j + 2], silu_fast(acc[4 * j + 1]) * acc[4 * j + 3]);
#pragma unroll
        for (int j = 0; j + 4 <= N / 8; j += 4) store_matrix_x4_transposed(to + j * 512, gated[j], gated[j + 1], gated[j + 2], gated[j + 3]);
        if constexpr (N / 8 % 4 == 2) store_matrix_x2_transposed(to + (N / 8 - 2) * 512, gated[N / 8 - 2], gated[N / 8 - 1]);
        end();
        if (leader) store_box(&p.y, out, column / 2, row, tile.part, 0), store_commit();
    } else { // 32 columns a box
        constexpr int ROWS = N / ROUNDS;
        constexpr u32 BOX = ROWS * 128;
        u32 to[4]; // rows 2 * pair (+ 1), columns group (+ 8)
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 r = 2 * pair + (i & 1), c = (w & 1) * 16 + group + (i >> 1) * 8;
            to[i] = out + (w >> 1) * BOX + r * 128 + ((c >> 2) ^ r) * 16 + (c & 3) * 4;
        }
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            begin();
#pragma unroll
            for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) store_shared(to[i] + j * 1024, acc[4 * (round * (ROWS / 8) + j) + i]);
            end();
            if (!leader) continue;
#pragma unroll
            for (u32 box = 0; box < 2; box++) {
                u32 from = out + box * BOX, x = column + 32 * box, z = row + round * ROWS;
                if (p.output == OUTPUT_RESIDUAL) add_box(&p.y, from, x, z, tile.part, 0);
                else store_box(&p.y, from, x, z, tile.part, 0);
            }
            store_commit();
        }
    }
}

template <int N, int GROUPS, int ACROSS, int DEEP, int SCALES> DEVICE void multiply_tiles(const Int4Batch &p, u32 base, u32 full, u32 empty, u32 mail) {
    typedef Ring<N, GROUPS, SCALES> R;
    constexpr bool ON_SUMS = on_sums(N, SCALES);
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    Lane mine;
    mine.words = base + R::AT_W + warp * (R::BLOCKS * 512) + lane_place();
    mine.scales = base + R::AT_S + warp * R::SETS * 32 + lane / 4 * 4;
    mine.zeros = base + R::AT_S + R::UNITS * R::SETS * 32 + warp * R::SETS * 8 + lane / 4;
    asm volatile("" : "+r"(mine.words), "+r"(mine.scales), "+r"(mine.zeros)); // else they are made again for each slot
    const u64 rows = descriptor_rows(base);
    // A lane for each block that shares this one's x says that this warp is done with a slot.
    u32 release_at = address_in_block(empty, lane < ACROSS && ACROSS > 1 ? lane : cluster_rank());
    auto release = [&](u32 slot) {
        if (lane < ACROSS) barrier_arrive_in_block(release_at + 8 * slot);
    };
    Place<R::SLOTS> at(0);
    float acc[N / 2];
    u32 a[2][4][4];
    Group first = {}, last = {};
    // Fragments from block `block` of a slot, the first or second one of 128 columns.
    auto prepare = [&](u32(&to)[4][4], u32 half, u32 slot, u32 block) {
        if (SCALES == 1) {
            if (half == 0) first = load_group<R, ON_SUMS>(mine, slot, block / 2);
            dequantise<R, ON_SUMS>(to, mine, slot, block, first, first);
        } else {
            first = load_group<R, false>(mine, slot, 2 * block), last = load_group<R, false>(mine, slot, 2 * block + 1);
            dequantise<R, false>(to, mine, slot, block, first, last);
        }
    };
    auto multiply_block = [&](float(&d)[N / 2], const u32(&a)[4][4], u32 slot, u32 block, bool fresh = false) {
        u64 b = rows + (slot * R::BLOCKS + block) * (R::X / 16);
        wgmma_fence();
        if (fresh) wgmma_registers<false>(d, a[0], b);
        else wgmma_registers<true>(d, a[0], b);
#pragma unroll
        for (u32 q = 1; q < 4; q++) wgmma_registers<true>(d, a[q], b + 2 * q);
        wgmma_commit();
    };
    FOR_TILES(t) {
        Tile tile = tile_at<ACROSS, DEEP>(p, t);
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[i] = 0.0f;
        barrier_wait(full + 8 * at.slot, at.phase);
        prepare(a[0], 0, at.slot, 0);
        if constexpr (ON_SUMS) {
            // One block's products are always under way; behind them those of the block before are done, so its fragments may be
            // overwritten. A slot is a group: its sums are added to the others while the next one's begin in registers of their own.
            float of_group[2][N / 2];
            // The rest of a slot whose first block is under way, and the first block of the next one.
            auto multiply_slot = [&](int odd, bool last) {
                u32 slot = at.slot;
                at.next();
                prepare(a[1], 1, slot, 1);
                multiply_block(of_group[odd], a[1], slot, 1);
                float low = __uint_as_float(first.scale_low), high = __uint_as_float(first.scale_high);
                if (!last) {
                    barrier_wait(full + 8 * at.slot, at.phase);
                    wgmma_wait<1>();
                    prepare(a[0], 0, at.slot, 0);
                }
                wgmma_wait<0>(); // the compiler does not follow sums that are under way any further
                if (!last) multiply_block(of_group[odd ^ 1], a[0], at.slot, 0, true);
                hold(of_group[odd]);
#pragma unroll
                for (int i = 0; i < N / 2; i++) acc[i] += (i & 2 ? high : low) * of_group[odd][i];
                release(slot);
            };
            multiply_block(of_group[0], a[0], at.slot, 0, true);
            u32 left = tile.count;
            for (; left > 2; left -= 2) multiply_slot(0, false), multiply_slot(1, false);
            if (left == 2) multiply_slot(0, false), multiply_slot(1, true);
            else multiply_slot(0, true);
            hold(acc);
        } else {
            u32 second = 0;
            for (u32 i = 0; i < tile.count; i++) {
                u32 slot = at.slot;
                multiply_block(acc, a[0], slot, 0);
                if (R::BLOCKS == 1) {
                    at.next();
                    barrier_wait(full + 8 * at.slot, at.phase);
                }
                wgmma_wait<1>(); // the step before is done
                if (i > 0) release(second);
                second = at.slot;
                prepare(a[1], 1, second, R::BLOCKS - 1);
                multiply_block(acc, a[1], second, R::BLOCKS - 1);
                at.next();
                if (i + 1 < tile.count) barrier_wait(full + 8 * at.slot, at.phase);
                wgmma_wait<1>();
                if (R::BLOCKS == 1) release(slot);
                if (i + 1 < tile.count) prepare(a[0], 0, at.slot, 0);
            }
            wgmma_wait<0>();
            hold(acc);
            release(second);
        }
        u32 out = base + R::AT_OUT + (warp >> 2) * R::OUT;
        if constexpr (DEEP == 1) {
            put<N, R::UNITS, 2>(p, tile, acc, tile.x * N, out);
        } else {
            float half[N / 4];
            exchange<N>(acc, half, out, mail);
            put<N / 2, R::UNITS, 1>(p, tile, half, tile.x * N + cluster_rank() * (N / 2), out);
        }
    }
    if ((threadIdx.x & 127) == 0) store_wait();
}

template <int N, int GROUPS, int ACROSS, int DEEP, int SCALES> DEVICE void int4_batch(const Int4Batch &p) {
    typedef Ring<N, GROUPS, SCALES> R;
    extern __shared__ __align__(1024) u8 shared[];
    u32 base = shared_address(shared), full = base + R::AT_BARRIERS, empty = full + 8 * R::SLOTS, mail = empty + 8 * R::SLOTS;
    u32 warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0); // so the compiler knows that all of a warp go the same way
    if (threadIdx.x == 32) prefetch_map(&p.w), prefetch_map(&p.x), prefetch_map(&p.y);
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < R::SLOTS; i++) barrier_init(full + 8 * i, 1 + 32), barrier_init(empty + 8 * i, ACROSS * 4 * GROUPS);
        if (DEEP > 1) barrier_init(mail, 1), barrier_expect(mail, GROUPS * (N / 16) * 2048);
        barrier_init_fence();
    }
    if (!p.zero_points) // all are 8
        for (u32 i = threadIdx.x; i < R::SLOTS * R::UNITS * R::SETS * 2; i += blockDim.x) {
            u32 slot = i / (R::UNITS * R::SETS * 2), word = i % (R::UNITS * R::SETS * 2);
            store_shared(base + R::AT_S + slot * R::S + R::UNITS * R::SETS * 32 + word * 4, 0x88888888u);
        }
    if (ACROSS * DEEP > 1) cluster_sync();
    else __syncthreads();
    let_next_kernel_start();
    if (warp >= 4 * GROUPS) {
        give_registers<leaves_room(N, SCALES) ? 48 : GROUPS == 3 ? 56 : 40>();
        if (warp == 4 * GROUPS) {
            if ((threadIdx.x & 31) == 0) ask<N, GROUPS, ACROSS, DEEP, SCALES>(p, base, full, empty);
            __syncwarp();
        } else if (warp == 4 * GROUPS + 1) {
            bring_scales<N, GROUPS, ACROSS, DEEP, SCALES>(p, base, full, empty);
        }
    } else {
        take_registers<leaves_room(N, SCALES) ? 112 : GROUPS == 3 ? 152 : 232>();
        wait_for_previous_kernel(); // else they would wait at a barrier, which takes more from the others
        multiply_tiles<N, GROUPS, ACROSS, DEEP, SCALES>(p, base, full, empty, mail);
    }
    if (ACROSS > 1) cluster_sync(); // no block leaves while the other one writes to it
}

#ifndef GROUP_SCALES
#define GROUP_SCALES 1
#endif
// Which leave room are compiled as if a block had 128 threads more: 96 registers a thread instead of 128.
#define THREADS_OF(n, groups) (128 * groups + (leaves_room(n, GROUP_SCALES) ? 256 : 128))
#define KERNEL_OF(name, n, groups, across, deep)                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS_OF(n, groups), 1) name(const __grid_constant__ Int4Batch p) { \
        int4_batch<n, groups, across, deep, GROUP_SCALES>(p);                                                           \
    }
KERNEL_OF(int4_batch_16, 16, 3, 1, 1)
KERNEL_OF(int4_batch_16_deep, 16, 3, 1, 2)
KERNEL_OF(int4_batch_32, 32, 3, 1, 1)
KERNEL_OF(int4_batch_32_deep, 32, 3, 1, 2)
KERNEL_OF(int4_batch_48, 48, 3, 1, 1)
KERNEL_OF(int4_batch_48_deep, 48, 3, 1, 2)
KERNEL_OF(int4_batch_64, 64, 3, 1, 1)
KERNEL_OF(int4_batch_64_deep, 64, 3, 1, 2)
KERNEL_OF(int4_batch_128, 128, 3, 2, 1)
KERNEL_OF(int4_batch_256, 256, 2, 2, 1)
