// The decode step of the gated delta net for many sequences: the states stream through shared memory.
//
// The equations and shapes are those of delta.cu, with one new token a sequence, heads of 128 x 128 and an fp32 state. A
// (sequence, head) pair is a task: 64 KB that lie together. Blocks stay, one a multiprocessor, and walk the tasks; bulk
// copies bring the next two states into a ring of three while the current one is updated in place, and take it back. So
// the copy engine always has 64 to 128 KB of reads and a write in flight, whatever the arithmetic waits for; a block
// that loads, computes and stores in turn reaches half of that.
// Bytes: 128 KB a task; the rest (convolution, gates) is 2 % of it.
#include "half.cuh"

struct Shape {
    int key_heads, value_heads, pitch, ring;
    float eps;
};

struct Sequence {
    int slot, context, start, count;
};

#define HEAD 128
#define STAGES 3
#define STATE_BYTES (HEAD * HEAD * 4)
#define CHANNELS (3 * HEAD) // of a task: q, k, v

DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
DEVICE float dot4(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// What a thread needs of a task beside the state. Threads 0..383 own a channel, 384..511 an output.
struct Inputs {
    Sequence sequence;
    int head, channel;
    float tap[4], history[3];
    f16 u; // or z
    float b, a, rate, bias;
};

// 512 threads: warp w owns rows 8 w..8 w + 7 of the state, eight lanes a row.
KERNEL __launch_bounds__(512, 1) delta_stream(const f16 *mixed, const float *taps, const float *a_log, const float *dt_bias,
                                              const float *norm_weight, float *state, f16 *window, f16 *out,
                                              const Sequence *sequences, Shape shape, int count) {
    extern __shared__ __align__(128) unsigned char stages[];
    __shared__ __align__(16) float conv[2][CHANNELS];
    __shared__ float outputs[2][HEAD];
    __shared__ __align__(8) u64 arrived[STAGES];

    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, sub = lane & 7, row = 8 * warp + (lane >> 3); // and row + 4
    int heads = shape.value_heads, group = heads / shape.key_heads, tasks = count * heads;
    int key_channels = shape.key_heads * HEAD, channels = 2 * key_channels + heads * HEAD;
    let_next_kernel_start();

    if (tid == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(shared_address(&arrived[i]), 1);
        barrier_init_fence();
    }
    __syncthreads();

    // Thread 0: brings the state of this block's i-th task. Padding comes last, so a task of padding ends the walk.
    auto fetch = [&](int i) {
        int task = blockIdx.x + i * gridDim.x;
        if (task >= tasks) return;
        Sequence sequence = sequences[task / heads];
        if (sequence.slot < 0) return;
        u32 barrier = shared_address(&arrived[i % STAGES]);
        if (sequence.context == 0) {
            barrier_arrive(barrier); // taken as zero
            return;
        }
        const float *from = state + ((u64)sequence.slot * heads + task % heads) * (HEAD * HEAD);
        barrier_expect(barrier, STATE_BYTES);
        copy_bulk(shared_address(stages + (i % STAGES) * STATE_BYTES), from, STATE_BYTES, barrier);
    };
    if (tid == 0) fetch(0), fetch(1);
    wait_for_previous_kernel();

    auto load = [&](int task, Inputs &in) {
        in.sequence.slot = -1;
        if (task >= tasks) return;
        in.sequence = sequences[task / heads];
        in.head = task % heads;
        if (in.sequence.slot < 0) return;
        const f16 *input = mixed + (u64)in.sequence.start * shape.pitch;
        const f16 *gates = input + channels + heads * HEAD;
        in.b = half_to_float(gates[in.head]), in.a = half_to_float(gates[heads + in.head]);
        in.rate = a_log[in.head], in.bias = dt_bias[in.head];
        if (tid >= CHANNELS) {
            in.u = input[channels + in.head * HEAD + tid - CHANNELS];
            return;
        }
        int which = tid / HEAD, at = tid % HEAD;
        in.channel = which == 2 ? 2 * key_channels + in.head * HEAD + at
                                : which * key_channels + in.head / group * HEAD + at;
        in.u = input[in.channel];
        const f16 *ring = window + (u64)in.sequence.slot * shape.ring * channels + in.channel;
        int entry = in.sequence.context % shape.ring;
#pragma unroll
        for (int back = 1; back <= 3; back++) {
            int from = entry - back < 0 ? entry - back + shape.ring : entry - back;
            in.history[3 - back] = in.sequence.context >= back ? half_to_float(ring[from * channels]) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) in.tap[j] = taps[j * channels + in.channel];
    };

    float weight = tid >= CHANNELS ? norm_weight[tid - CHANNELS] : 0.0f;
    Inputs now, next;
    load(blockIdx.x, next);
    for (int i = 0; blockIdx.x + i * gridDim.x < tasks; i++) {
        now = next;
        if (now.sequence.slot < 0) break;
        float *c = conv[i & 1], *o = outputs[i & 1];
        if (tid < CHANNELS) {
            float sum = now.tap[0] * now.history[0] + now.tap[1] * now.history[1] + now.tap[2] * now.history[2] +
                        now.tap[3] * half_to_float(now.u);
            c[tid] = silu(sum);
            // q and k channels belong to all value heads of a key head; the first one keeps them.
            if (tid >= 2 * HEAD || now.head % group == 0) {
                int entry = now.sequence.context % shape.ring;
                window[((u64)now.sequence.slot * shape.ring + entry) * channels + now.channel] = now.u;
            }
        }
        float beta = sigmoid(now.b), decay = expf(-expf(now.rate) * softplus(now.a + now.bias));
        load(blockIdx.x + (i + 1) * gridDim.x, next);
        __syncthreads();

        float4 q[4], k[4];
        float q_squares = 0.0f, k_squares = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            q[j] = ((const float4 *)c)[sub + 8 * j];
            k[j] = ((const float4 *)c)[HEAD / 4 + sub + 8 * j];
            q_squares += dot4(q[j], q[j]);
            k_squares += dot4(k[j], k[j]);
        }
#pragma unroll
        for (int offset = 1; offset < 8; offset <<= 1) {
            q_squares += __shfl_xor_sync(0xffffffffu, q_squares, offset);
            k_squares += __shfl_xor_sync(0xffffffffu, k_squares, offset);
        }
        float q_scale = rsqrtf(q_squares + 1e-6f) * 0.08838834764831845f; // 1 / sqrt(128)
        float k_scale = rsqrtf(k_squares + 1e-6f);

        barrier_wait(shared_address(&arrived[i % STAGES]), (i / STAGES) & 1);
        float4 *rows = (float4 *)(stages + (i % STAGES) * STATE_BYTES);
        bool fresh = now.sequence.context == 0;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float4 *own = rows + (row + 4 * r) * (HEAD / 4) + sub;
            float4 S[4];
            float p = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                S[j] = fresh ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : own[8 * j];
                S[j].x *= decay, S[j].y *= decay, S[j].z *= decay, S[j].w *= decay;
                p += dot4(S[j], k[j]);
            }
#pragma unroll
            for (int offset = 1; offset < 8; offset <<= 1) p += __shfl_xor_sync(0xffffffffu, p, offset);
            float delta = beta * (c[2 * HEAD + row + 4 * r] - p * k_scale) * k_scale;
            float total = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                S[j].x += delta * k[j].x, S[j].y += delta * k[j].y;
                S[j].z += delta * k[j].z, S[j].w += delta * k[j].w;
                total += dot4(S[j], q[j]);
                own[8 * j] = S[j];
            }
#pragma unroll
            for (int offset = 1; offset < 8; offset <<= 1) total += __shfl_xor_sync(0xffffffffu, total, offset);
            if (sub == 0) o[row + 4 * r] = total * q_scale;
        }
        // The copy engine reads what these threads wrote.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();

        if (tid == 0) {
            float *to = state + ((u64)now.sequence.slot * heads + now.head) * (HEAD * HEAD);
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(rows)),
                         "n"(STATE_BYTES) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            // All but this store have left their stages: the one before it makes room for the state after next. Asking
            // for that state earlier, in front of the update, was slower: 349 us for 310 at 256 sequences.
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
            fetch(i + 2);
        }
        if (tid >= CHANNELS) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < HEAD / 32; j++) sum += o[lane + 32 * j] * o[lane + 32 * j];
            sum = warp_sum(sum);
            int at = tid - CHANNELS;
            float y = o[at] * rsqrtf(sum * (1.0f / HEAD) + shape.eps) * weight * silu(half_to_float(now.u));
            out[((u64)now.sequence.start * heads + now.head) * HEAD + at] = float_to_half(y);
        }
    }
    if (tid == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
