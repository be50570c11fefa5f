// What every kernel here shares: fp16 as bits, and the PTX that CUDA's own headers would wrap. Compiled by NVRTC with no
// include path, so nothing below may come from a header. Shapes of fragments and operands are in the PTX ISA manual;
// the comments say only what a caller has to know.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef u16 f16; // IEEE binary16, as bits

#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void

// ---- fp16 ----

DEVICE float half_to_float(f16 value) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value));
    return out;
}

DEVICE f16 float_to_half(float value) {
    f16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
    return out;
}

// Two floats as two halves in one word; `low` goes to the lower address.
DEVICE u32 pack_half2(float low, float high) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

DEVICE float2 unpack_half2(u32 pair) {
    float2 out;
    asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
        : "=f"(out.x), "=f"(out.y) : "r"(pair));
    return out;
}

// Eight halves in a 16-byte word to eight floats.
DEVICE void unpack_half8(uint4 packed, float *out) {
    float2 pair = unpack_half2(packed.x);
    out[0] = pair.x, out[1] = pair.y;
    pair = unpack_half2(packed.y);
    out[2] = pair.x, out[3] = pair.y;
    pair = unpack_half2(packed.z);
    out[4] = pair.x, out[5] = pair.y;
    pair = unpack_half2(packed.w);
    out[6] = pair.x, out[7] = pair.y;
}

DEVICE uint4 pack_half8(const float *in) {
    return make_uint4(pack_half2(in[0], in[1]), pack_half2(in[2], in[3]), pack_half2(in[4], in[5]),
                      pack_half2(in[6], in[7]));
}

// ---- arithmetic ----

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
DEVICE float silu(float x) { return x / (1.0f + __expf(-x)); }
// The division to two units in the last place; zero below x = -87, where the quotient is under 1e-35.
DEVICE float silu_fast(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// 2^x, to two units in the last place; denormal results are zero.
DEVICE float exp2_fast(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

DEVICE float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

// Sum over a block of whole warps, the same bits in every thread. `scratch` holds 32 floats; a barrier must separate two
// uses of the same scratch.
DEVICE float block_sum(float value, float *scratch) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    value = warp_sum(value);
    if (warps == 1) return value;
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    value = lane < warps ? scratch[lane] : 0.0f;
    return warp_sum(value);
}

// ---- memory ----

// Bytes that are read once: past the L1. Never for what a kernel of the same overlapped chain has just written.
DEVICE uint4 load_streaming(const void *from) {
    uint4 out;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "l"(from));
    return out;
}

DEVICE u32 shared_address(const void *pointer) { return (u32)__cvta_generic_to_shared(pointer); }

DEVICE u32 load_shared(u32 address) {
    u32 out;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(out) : "r"(address) : "memory");
    return out;
}
DEVICE void store_shared(u32 address, u32 word) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory"); }
DEVICE void store_shared(u32 address, float value) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory"); }

// 16 bytes from global to shared memory, past the L1; with `valid` false the destination is filled with zeros.
DEVICE void copy_async_16(u32 to, const void *from, bool valid = true) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;"); }

// Waits until at most `Pending` of this thread's latest groups are in flight. A barrier must follow.
template <int Pending> DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory"); }

// ---- tensor cores ----

// d[16x8] += a[16x16] b[16x8], fp16 operands, fp32 sums. Thread (group = lane / 4, pair = lane % 4) holds
//   a[0]: row group, columns 2*pair, +1; a[1]: row group+8; a[2], a[3]: the same rows, columns 2*pair+8, +9
//   b0: rows 2*pair, +1 of column group; b1: rows 2*pair+8, +9
//   d[0], d[1]: row group, columns 2*pair, +1; d[2], d[3]: row group+8
DEVICE void mma_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of halves; lane l gives the address of row l%8 of matrix l/8.
DEVICE void load_matrix_x4(u32 (&out)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address) : "memory");
}

DEVICE void load_matrix_x4_transposed(u32 (&out)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address) : "memory");
}

#if __CUDA_ARCH__ >= 900
DEVICE void store_matrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

DEVICE void store_matrix_x4_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

DEVICE void store_matrix_x2_transposed(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}
#endif

// ---- launches that overlap (programmatic dependent launch) ----

// Before the first access to anything the previous kernel wrote (or still reads, if this one writes it). Weights may be
// read earlier. Returns at once in a kernel launched without the attribute, and on GPUs before sm_90.
DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start as soon as every block has said this or ended; it still waits for all of this kernel's
// writes before it passes its own wait.
DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- bulk copies with an arrival barrier in shared memory (sm_90 and later) ----

#if __CUDA_ARCH__ >= 900
DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine; a block barrier must follow.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again;}"
                 ::"r"(barrier), "r"(parity) : "memory");
}

DEVICE bool barrier_passed(u32 barrier, u32 parity) {
    u32 out;
    asm volatile("{.reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done;}"
                 : "=r"(out) : "r"(barrier), "r"(parity) : "memory");
    return out;
}

// `bytes` (a multiple of 16, both addresses 16-byte aligned) to shared memory; completes on `barrier`.
DEVICE void copy_bulk(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Makes this thread's writes to shared memory visible to the copy engine and the tensor cores; a barrier must follow.
DEVICE void shared_write_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The other way, as a part of this thread's current group of stores.
DEVICE void store_bulk(void *to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of this thread's latest groups still read shared memory; until all are written.
template <int Pending> DEVICE void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory"); }
DEVICE void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#endif

// ---- clusters ----

#if __CUDA_ARCH__ >= 900
// Before a kernel's first cluster_share: another block's shared memory is there once it has started. Said early and waited for
// late, that takes 0.1 us.
DEVICE void cluster_say_started() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait_started() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Thread t < size writes this block's value into block t's slots[rank], and all wait for all.
DEVICE void cluster_share(float *slots, int rank, int size, float value) {
    if (threadIdx.x < size) {
        u32 remote, local = shared_address(slots + rank);
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(threadIdx.x));
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif
