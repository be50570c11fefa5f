// What the products with 4-bit weights on warpgroup products (sm_90a) share where x lies in shared memory in its own order: W is
// the A operand, dequantised by each warp into its registers, 16 rows a warp; rows of x are the B operand.
//
// Fragments against the packing (int4.cuh): there a lane holds eight neighbouring columns, here x lies in its own order, so
// lane (group, pair) needs columns 2 * pair, + 1, + 8, + 9 of each 16. It reads words of four lanes, whose swizzled places
// meet no bank twice, and turns the half it wants to the front.
//
// Scales are applied to the fp16 weights: each is rounded once, as in a 16-bit checkpoint.
#pragma once
#include "cluster.cuh"
#include "int4.cuh"
#include "wgmma.cuh"

// ---- d[64xN] += a[64x16] b[Nx16]^T; a in registers, b in shared memory with the 16 contiguous ----

#define NAMES_24 WGMMA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_12 WGMMA_NAMES_8 ", %8, %9, %10, %11"
#define WGMMA_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define NAMES_128 WGMMA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, " \
    "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
    "%124, %125, %126, %127"
#define MULTIPLY(N, NAMES, A, B, ...)                                                                                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" NAMES "}, {" A "}, " B ", 1, 1, 1, 0;"          \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
DEVICE void multiply(float (&d)[8], const u32 (&a)[4], u64 b) {
    MULTIPLY(16, WGMMA_NAMES_8, "%8, %9, %10, %11", "%12", WGMMA_8(0));
}
DEVICE void multiply(float (&d)[12], const u32 (&a)[4], u64 b) {
    MULTIPLY(24, NAMES_12, "%12, %13, %14, %15", "%16", WGMMA_8(0), WGMMA_4(8));
}
DEVICE void multiply(float (&d)[16], const u32 (&a)[4], u64 b) {
    MULTIPLY(32, WGMMA_NAMES_16, "%16, %17, %18, %19", "%20", WGMMA_8(0), WGMMA_8(8));
}
DEVICE void multiply(float (&d)[24], const u32 (&a)[4], u64 b) {
    MULTIPLY(48, NAMES_24, "%24, %25, %26, %27", "%28", WGMMA_8(0), WGMMA_8(8), WGMMA_8(16));
}
DEVICE void multiply(float (&d)[32], const u32 (&a)[4], u64 b) {
    MULTIPLY(64, WGMMA_NAMES_32, "%32, %33, %34, %35", "%36", WGMMA_32(0));
}
DEVICE void multiply(float (&d)[64], const u32 (&a)[4], u64 b) {
    MULTIPLY(128, WGMMA_NAMES_64, "%64, %65, %66, %67", "%68", WGMMA_32(0), WGMMA_32(32));
}
DEVICE void multiply(float (&d)[128], const u32 (&a)[4], u64 b) {
    MULTIPLY(256, NAMES_128, "%128, %129, %130, %131", "%132", WGMMA_32(0), WGMMA_32(32), WGMMA_32(64), WGMMA_32(96));
}

// threadIdx.x / 32, known to the compiler to be the same in all of a warp: what depends on it alone then takes no vector instructions.
DEVICE u32 warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0); }

// ---- shared memory ----

DEVICE uint2 load_shared2(u32 address) {
    uint2 out;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(out.x), "=r"(out.y) : "r"(address) : "memory");
    return out;
}
DEVICE u32 load_shared_byte(u32 address) {
    u32 out;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(out) : "r"(address) : "memory");
    return out;
}
DEVICE void copy_async_8(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
// Arrives on the barrier when this thread's copies so far have landed.
DEVICE void copy_async_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

DEVICE void prefetch_map(const TensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// ---- dequantising ----

// Where a lane finds what it dequantises, in slot 0 of a ring.
struct Lane {
    u32 words, scales, zeros; // addresses; words of both halves together
    u32 turn;                 // brings the lane's half of a word to the front
    bool zero_points;
};

// Scales, twice in a word, and zero points of rows group and group + 8.
struct Group {
    u32 low, high;
    Zeros zeros;
};
DEVICE Group load_group(const Lane &lane, u32 scale_offset, u32 zero_offset) {
    u32 scale = load_shared(lane.scales + scale_offset);
    u32 zeros = lane.zero_points ? load_shared_byte(lane.zeros + zero_offset) : 0x88u;
    return {__byte_perm(scale, 0, 0x1010), __byte_perm(scale, 0, 0x3232), Zeros(zeros)};
}

// What a lane reads of block `block` of 64 columns of what lies `offset` behind its words: words of both halves, from the lanes that
// hold columns 8 * c.. of each.
struct Words {
    uint2 of[4];
};
DEVICE Words load_words(const Lane &lane, u32 offset, u32 block) {
    u32 words = (lane.words ^ block * 64) + offset + block * 512; // a unit is four rows of 128 bytes a block
    return {load_shared2(words), load_shared2(words ^ 16), load_shared2(words ^ 32), load_shared2(words ^ 48)};
}

// The fragments of 64 columns, of whose halves the groups are given.
DEVICE void dequantise(u32 (&a)[4][4], const Words &words, u32 turn, const Group &first, const Group &last) {
#pragma unroll
    for (u32 c = 0; c < 4; c++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const Group &of = half ? last : first;
            u32 word = __byte_perm(half ? words.of[c].y : words.of[c].x, 0, turn);
            u32(&to)[4] = a[half * 2 + c / 2];
            to[c % 2 * 2] = mul_half2(sub_half2(lop_and_or(word, 0x003c003cu, 0x5c005c00u), of.zeros.low), of.low);
            to[c % 2 * 2 + 1] = mul_half2(sub_half2(lop_and_or(word, 0x03c003c0u, 0x4c004c00u), of.zeros.high), of.high);
        }
    }
}
