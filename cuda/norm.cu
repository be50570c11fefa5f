// Embedding and RMSNorm. Both leave the residual stream (fp32, so that 64 additions do not round to fp16) and the
// normalised row (fp16) that the next product reads.
//
// Shapes: residual [rows, hidden] fp32, normed [rows, hidden] fp16, weight [hidden] fp32 (already 1 + w where the model
// stores w), partials [parts, rows, hidden] fp32. hidden is a multiple of 4 and at most 8192; one block a row.
// Bytes of a row: residual 4 + 4, normed 2, each part 4, an element; the idea is to touch each once: the sums that a
// split product left in parts are added here, where the row is read anyway, so the product needs no second pass.
#include "half.cuh"

#define MAX_VECTORS 2 // float4 a thread: blocks have at least hidden / 8 threads
#define MAX_PARTS 8

// A read that the compiler leaves in front of those that follow.
DEVICE float4 load_in_order(const float4 *from) {
    float4 out;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w) : "l"(from) : "memory");
    return out;
}

// The weight of this thread's vectors: read before the wait, since no kernel writes it.
DEVICE void load_weight(float4 (&w)[MAX_VECTORS], const float4 *weight, int vectors) {
#pragma unroll
    for (int i = 0; i < MAX_VECTORS; i++) {
        int at = threadIdx.x + i * blockDim.x;
        if (at < vectors) w[i] = weight[at];
    }
}

// Writes one row's normalised values from registers.
DEVICE void finish_row(const float4 (&x)[MAX_VECTORS], const float4 (&weight)[MAX_VECTORS], f16 *normed, int vectors,
                       float eps, float *scratch) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < MAX_VECTORS; i++) sum += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
    float scale = rsqrtf(block_sum(sum, scratch) / (float)(4 * vectors) + eps);
#pragma unroll
    for (int i = 0; i < MAX_VECTORS; i++) {
        int at = threadIdx.x + i * blockDim.x;
        if (at < vectors) {
            float4 w = weight[i];
            uint2 packed = make_uint2(pack_half2(x[i].x * scale * w.x, x[i].y * scale * w.y),
                                      pack_half2(x[i].z * scale * w.z, x[i].w * scale * w.w));
            ((uint2 *)normed)[at] = packed;
        }
    }
}

// residual[row] = table[token], normed[row] = norm of it. A token with its highest bit set is an index into `ring`, where a
// step that the host has not seen yet left what it sampled.
KERNEL embed_norm(const f16 *table, const u32 *tokens, const u32 *ring, const float4 *weight, float *residual, f16 *normed, int hidden,
                  float eps) {
    __shared__ float scratch[32];
    int row = blockIdx.x, vectors = hidden / 4;
    float4 w[MAX_VECTORS];
    load_weight(w, weight, vectors);
    let_next_kernel_start();
    wait_for_previous_kernel();
    u32 token = tokens[row];
    if (token & 0x80000000u) token = ring[token & 0x7fffffffu];
    const uint2 *from = (const uint2 *)(table + (u64)token * hidden);
    float4 *out = (float4 *)(residual + (u64)row * hidden);
    float4 x[MAX_VECTORS];
#pragma unroll
    for (int i = 0; i < MAX_VECTORS; i++) {
        int at = threadIdx.x + i * blockDim.x;
        x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (at < vectors) {
            uint2 packed = from[at];
            float2 low = unpack_half2(packed.x), high = unpack_half2(packed.y);
            x[i] = make_float4(low.x, low.y, high.x, high.y);
            out[at] = x[i];
        }
    }
    finish_row(x, w, normed + (u64)row * hidden, vectors, eps, scratch);
}

// For output row r, with s = select ? select[r] : r:
//   x = residual[s] + sum over parts of partials[part][s]; residual[s] = x (unless `keep` is 0); normed[r] = norm of x.
// `stride` is the distance of two parts (at most MAX_PARTS) in floats. The order of the sum is fixed.
KERNEL add_norm(float *residual, const float *partials, int parts, u64 stride, const float4 *weight, const u32 *select,
                f16 *normed, int hidden, float eps, int keep) {
    __shared__ float scratch[32];
    int vectors = hidden / 4;
    float4 w[MAX_VECTORS];
    load_weight(w, weight, vectors);
    let_next_kernel_start();
    wait_for_previous_kernel();
    u32 source = select ? select[blockIdx.x] : blockIdx.x;
    float4 *in = (float4 *)(residual + (u64)source * hidden);
    const float4 *part = (const float4 *)(partials + (u64)source * hidden);
    float4 x[MAX_VECTORS];
#pragma unroll
    for (int i = 0; i < MAX_VECTORS; i++) {
        int at = threadIdx.x + i * blockDim.x;
        x[i] = at < vectors ? in[at] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    auto add = [](float4 &to, float4 y) { to.x += y.x, to.y += y.y, to.z += y.z, to.w += y.w; };
#pragma unroll
    for (int i = 0; i < MAX_VECTORS; i++) {
        int at = threadIdx.x + i * blockDim.x;
        if (at >= vectors) continue;
        if (parts <= 2) {
            for (int p = 0; p < parts; p++) add(x[i], part[(u64)p * (stride / 4) + at]);
            continue;
        }
        // All asked for at once: one wait instead of two or three.
        float4 y[MAX_PARTS];
#pragma unroll
        for (int p = 0; p < MAX_PARTS; p++)
            y[p] = p < parts ? part[(u64)p * (stride / 4) + at] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int p = 0; p < MAX_PARTS; p++) add(x[i], y[p]);
    }
    if (keep && parts > 0) {
#pragma unroll
        for (int i = 0; i < MAX_VECTORS; i++) {
            int at = threadIdx.x + i * blockDim.x;
            if (at < vectors) in[at] = x[i];
        }
    }
    finish_row(x, w, normed + (u64)blockIdx.x * hidden, vectors, eps, scratch);
}

// The same for a vector a thread and at most PARTS parts, of few rows between products: all reads are asked for at once, since each
// round trip behind the weights of the next product takes about 2 us, with registers few enough for a row to wait beside a
// product's block.
template <int PARTS>
DEVICE void add_norm_flat(float *residual, const float *partials, int parts, u64 stride, const float4 *weight, const u32 *select,
                          f16 *normed, int hidden, float eps, int keep) {
    __shared__ float scratch[32];
    int at = threadIdx.x;
    bool valid = 4 * at < hidden;
    float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f), w = valid ? weight[at] : zero;
    let_next_kernel_start();
    wait_for_previous_kernel();
    u32 source = select ? select[blockIdx.x] : blockIdx.x;
    float4 *in = (float4 *)(residual + (u64)source * hidden) + at;
    const float4 *part = (const float4 *)(partials + (u64)source * hidden) + at;
    float4 x = valid ? load_in_order(in) : zero, y[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        y[p] = zero;
        if (valid && p < parts) y[p] = load_in_order(part + p * (stride / 4));
    }
#pragma unroll
    for (int p = 0; p < PARTS; p++) x.x += y[p].x, x.y += y[p].y, x.z += y[p].z, x.w += y[p].w;
    if (valid && keep && parts > 0) *in = x;
    float sum = block_sum(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w, scratch);
    float scale = rsqrtf(sum / (float)hidden + eps);
    if (valid)
        ((uint2 *)(normed + (u64)blockIdx.x * hidden))[at] =
            make_uint2(pack_half2(x.x * scale * w.x, x.y * scale * w.y), pack_half2(x.z * scale * w.z, x.w * scale * w.w));
}

#define ADD_NORM                                                                                                        \
    float *residual, const float *partials, int parts, u64 stride, const float4 *weight, const u32 *select, f16 *normed, \
        int hidden, float eps, int keep
#define ADD_NORM_PASS residual, partials, parts, stride, weight, select, normed, hidden, eps, keep
KERNEL __launch_bounds__(1024, 2) add_norm_3_parts(ADD_NORM) { add_norm_flat<3>(ADD_NORM_PASS); }
KERNEL __launch_bounds__(640, 2) add_norm_6_parts(ADD_NORM) { add_norm_flat<6>(ADD_NORM_PASS); }

// normed = norm of the residual stream, for many rows with nothing left to add. A block of WARPS warps a row, VECTORS float4 a
// lane: all of a row is asked for at once, and enough blocks fit that some read while others write (8,192 rows of 4,096:
// 53 us, 52 at the copy roof; a warp a row took 100).
template <int WARPS, int VECTORS>
DEVICE void norm_row(const float *residual, const float4 *weight, f16 *normed, int hidden, float eps) {
    __shared__ float sums[WARPS];
    int vectors = hidden / 4;
    let_next_kernel_start();
    wait_for_previous_kernel();
    const float4 *in = (const float4 *)(residual + (u64)blockIdx.x * hidden);
    uint2 *out = (uint2 *)(normed + (u64)blockIdx.x * hidden);
    float4 x[VECTORS];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int at = threadIdx.x + 32 * WARPS * i;
        x[i] = at < vectors ? in[at] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) sum += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += sums[i];
    float scale = rsqrtf(sum / (float)hidden + eps);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int at = threadIdx.x + 32 * WARPS * i;
        if (at >= vectors) continue;
        float4 w = weight[at];
        out[at] = make_uint2(pack_half2(x[i].x * scale * w.x, x[i].y * scale * w.y),
                             pack_half2(x[i].z * scale * w.z, x[i].w * scale * w.w));
    }
}

#define NORM_ROW const float *residual, const float4 *weight, f16 *normed, int hidden, float eps
KERNEL __launch_bounds__(128) norm_rows_2560(NORM_ROW) { norm_row<4, 5>(residual, weight, normed, hidden, eps); }
KERNEL __launch_bounds__(256) norm_rows_4096(NORM_ROW) { norm_row<8, 4>(residual, weight, normed, hidden, eps); }

// Row i of `own_residual` and `own_normed` is row select[i] of the others: the few rows that the end of the last layer runs on.
KERNEL gather_rows(const float4 *residual, const uint2 *normed, const u32 *select, float4 *own_residual, uint2 *own_normed,
                   int vectors) {
    let_next_kernel_start();
    u64 from = (u64)select[blockIdx.x] * vectors, to = (u64)blockIdx.x * vectors;
    wait_for_previous_kernel();
    for (int at = threadIdx.x; at < vectors; at += blockDim.x) {
        own_residual[to + at] = residual[from + at];
        own_normed[to + at] = normed[from + at];
    }
}
