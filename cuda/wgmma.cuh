// Warpgroup matrix products (sm_90a): four consecutive warps multiply from shared memory, asynchronously.
//
// Operands in shared memory use the 128-byte swizzle: a tile is cut into panels of 64 halves (128 bytes) by `rows` rows, each
// panel 1024-byte aligned; 16-byte unit u of row r lies at unit u ^ (r % 8) of that row. Accumulators are laid out as those
// of mma_16x8x16: warp w of the group holds rows 16 w ..= 16 w + 15. Descriptor fields: PTX ISA, "matrix descriptor".
#pragma once
#include "half.cuh"

DEVICE u64 descriptor(u32 address, u32 leading_bytes, u32 stride_bytes) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(leading_bytes >> 4) << 16 | (u64)(stride_bytes >> 4) << 32 | 1ull << 62;
}

// Rows of K contiguous halves (K the summed dimension), 8 rows 1024 bytes apart: the offset of step k is 32 bytes inside a panel.
DEVICE u64 descriptor_rows(u32 address) { return descriptor(address, 16, 1024); }

// The summed dimension runs over rows, the other is contiguous over panels `panel_bytes` apart.
DEVICE u64 descriptor_columns(u32 address, u32 panel_bytes) { return descriptor(address, panel_bytes, 1024); }

// Named barriers of a block, of so many threads (0 is that of __syncthreads): arriving waits for nobody.
DEVICE void named_sync(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
DEVICE void named_arrive(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

// Moves registers between warpgroups, executed by all of a warpgroup: what some give, others may take.
template <int Registers> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers)); }
template <int Registers> DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers)); }

// Before the first product of a batch, and after registers of its operands were written.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory"); }

// Keeps the compiler from reading accumulators (or reusing what a product reads) before the wait in front of this.
template <int N> DEVICE void hold(float (&registers)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(registers[i])::"memory");
}

// d[64x80] (+)= a[64x16] b[80x16]^T; a and b in shared memory, both with the 16 contiguous. `accumulate` 0 starts from zero.
DEVICE void wgmma_64x80(float (&d)[40], u64 a, u64 b, int accumulate) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %42, 0; wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39"
                 "}, %40, %41, p, 1, 1, 0, 0;}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                   "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
                 : "l"(a), "l"(b), "r"(accumulate));
}

// d[64x128] += a[64x16] b[16x128]; a in registers (as mma_16x8x16 has it), b in shared memory with the 128 contiguous.
DEVICE void wgmma_64x128(float (&d)[64], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                   "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                   "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                   "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d[64x256] += a[64x16] b[16x256]; a in registers (as mma_16x8x16 has it), b in shared memory with the 256 contiguous.
DEVICE void wgmma_64x256(float (&d)[128], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
                 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                   "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                   "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                   "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
                   "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
                   "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
                   "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
                   "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
                   "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
                   "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
                   "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
                   "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d[64xN] += a[64x16] b[Nx16]^T for N = 2 * (length of d); a and b in shared memory, both with the 16 contiguous.
#define WGMMA_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_32(i) WGMMA_8(i), WGMMA_8(i + 8), WGMMA_8(i + 16), WGMMA_8(i + 24)
#define WGMMA_NAMES_4 "%0, %1, %2, %3"
#define WGMMA_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_NAMES_16 WGMMA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_32 WGMMA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_56 WGMMA_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_NAMES_64 WGMMA_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_72 WGMMA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_BATCH(N, NAMES, A, B, ...)                                                                                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" NAMES "}, " A ", " B ", 1, 1, 1, 0, 0;"       \
                 : __VA_ARGS__ : "l"(a), "l"(b))
DEVICE void wgmma_batch(float (&d)[4], u64 a, u64 b) { WGMMA_BATCH(8, WGMMA_NAMES_4, "%4", "%5", "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])); }
DEVICE void wgmma_batch(float (&d)[8], u64 a, u64 b) { WGMMA_BATCH(16, WGMMA_NAMES_8, "%8", "%9", WGMMA_8(0)); }
DEVICE void wgmma_batch(float (&d)[16], u64 a, u64 b) { WGMMA_BATCH(32, WGMMA_NAMES_16, "%16", "%17", WGMMA_8(0), WGMMA_8(8)); }
DEVICE void wgmma_batch(float (&d)[32], u64 a, u64 b) { WGMMA_BATCH(64, WGMMA_NAMES_32, "%32", "%33", WGMMA_32(0)); }
DEVICE void wgmma_batch(float (&d)[40], u64 a, u64 b) { WGMMA_BATCH(80, WGMMA_NAMES_40, "%40", "%41", WGMMA_32(0), WGMMA_8(32)); }
DEVICE void wgmma_batch(float (&d)[48], u64 a, u64 b) { WGMMA_BATCH(96, WGMMA_NAMES_48, "%48", "%49", WGMMA_32(0), WGMMA_8(32), WGMMA_8(40)); }
DEVICE void wgmma_batch(float (&d)[56], u64 a, u64 b) { WGMMA_BATCH(112, WGMMA_NAMES_56, "%56", "%57", WGMMA_32(0), WGMMA_8(32), WGMMA_8(40), WGMMA_8(48)); }
DEVICE void wgmma_batch(float (&d)[64], u64 a, u64 b) { WGMMA_BATCH(128, WGMMA_NAMES_64, "%64", "%65", WGMMA_32(0), WGMMA_32(32)); }
DEVICE void wgmma_batch(float (&d)[72], u64 a, u64 b) { WGMMA_BATCH(144, WGMMA_NAMES_72, "%72", "%73", WGMMA_32(0), WGMMA_32(32), WGMMA_8(64)); }

// d[64xN] (+)= a[64x16] b[Nx16]^T for N = 2 * (length of d); a and b as above. `accumulate` false starts from zero.
#define WGMMA_NAMES_96 WGMMA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_ROWS(N, NAMES, A, B, ACCUMULATE, ...)                                                                       \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0; wgmma.mma_async.sync.aligned.m64n" #N                  \
                 "k16.f32.f16.f16 {" NAMES "}, " A ", " B ", p, 1, 1, 0, 0;}"                                             \
                 : __VA_ARGS__ : "l"(a), "l"(b), "r"((int)accumulate))
DEVICE void wgmma_rows(float (&d)[96], u64 a, u64 b, bool accumulate) {
    WGMMA_ROWS(192, WGMMA_NAMES_96, "%96", "%97", "%98", WGMMA_32(0), WGMMA_32(32), WGMMA_32(64));
}

// d[64x64] (+)= a[64x16] b[64x16]^T; a in registers (as mma_16x8x16 has it), b in shared memory with the 16 contiguous.
DEVICE void wgmma_64x64_rows(float (&d)[32], const u32 (&a)[4], u64 b, bool accumulate) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" WGMMA_NAMES_32 "}, "
                 "{%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
                 : WGMMA_32(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));
}

// d[64xN] (+)= a[64x16] b[Nx16]^T for N = 2 * (length of d); a in registers (as mma_16x8x16 has it), b in shared memory with the 16
// contiguous. `Add` false starts from zero.
#define WGMMA_NAMES_24 WGMMA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_NAMES_128 WGMMA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, " \
    "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
    "%124, %125, %126, %127"
#define WGMMA_REGISTERS(N, NAMES, A, B, ADD, ...)                                                                                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" NAMES "}, {" A "}, " B ", " ADD ", 1, 1, 0;"    \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)Add))
template <bool Add> DEVICE void wgmma_registers(float (&d)[8], const u32 (&a)[4], u64 b) {
    WGMMA_REGISTERS(16, WGMMA_NAMES_8, "%8, %9, %10, %11", "%12", "%13", WGMMA_8(0));
}
template <bool Add> DEVICE void wgmma_registers(float (&d)[16], const u32 (&a)[4], u64 b) {
    WGMMA_REGISTERS(32, WGMMA_NAMES_16, "%16, %17, %18, %19", "%20", "%21", WGMMA_8(0), WGMMA_8(8));
}
template <bool Add> DEVICE void wgmma_registers(float (&d)[24], const u32 (&a)[4], u64 b) {
    WGMMA_REGISTERS(48, WGMMA_NAMES_24, "%24, %25, %26, %27", "%28", "%29", WGMMA_8(0), WGMMA_8(8), WGMMA_8(16));
}
template <bool Add> DEVICE void wgmma_registers(float (&d)[32], const u32 (&a)[4], u64 b) {
    WGMMA_REGISTERS(64, WGMMA_NAMES_32, "%32, %33, %34, %35", "%36", "%37", WGMMA_32(0));
}
template <bool Add> DEVICE void wgmma_registers(float (&d)[64], const u32 (&a)[4], u64 b) {
    WGMMA_REGISTERS(128, WGMMA_NAMES_64, "%64, %65, %66, %67", "%68", "%69", WGMMA_32(0), WGMMA_32(32));
}
template <bool Add> DEVICE void wgmma_registers(float (&d)[128], const u32 (&a)[4], u64 b) {
    WGMMA_REGISTERS(256, WGMMA_NAMES_128, "%128, %129, %130, %131", "%132", "%133", WGMMA_32(0), WGMMA_32(32), WGMMA_32(64), WGMMA_32(96));
}
