// Gated delta net, token by token: convolution window, SiLU, L2 norms, gates, state update and gated norm in one kernel.
// It is the decode step, and the reference for the chunked form of a prefill.
//
// Per value head j with key head h = j / (value_heads / key_heads), state S [dv][dk] fp32 (dk contiguous):
//   c = silu(conv4(u)), split into q, k, v;  q = q / |q| / sqrt(dk), k = k / |k|   (|x| = sqrt(sum x^2 + 1e-6))
//   beta = sigmoid(b), decay = exp(-exp(A_log) * softplus(a + dt_bias))
//   S = decay S;  delta = beta (v - S k);  S = S + delta k^T;  o = S q
//   y = o / sqrt(mean(o^2) + eps) * norm_weight * silu(z)
//
// Shapes: mixed [rows, pitch] fp16, a row holding u (q, k, v channels), z, b, a; taps [4][channels] fp32; state
// [slots][value_heads][dv][dk]; window [slots][ring][channels] fp16: the raw u of position p is at p % ring, so that this
// step's write never meets another block's reads of the three positions before; out [rows, value_heads * dv] fp16.
// Bytes a sequence and head: the state read and written (2 * 64 KB at 128 x 128), all else is small. The state is read
// into registers before the wait for the product in front, so it overlaps with that product's tail.
#include "delta.cuh"

// ---- state in fp32, fp16 or bf16 ----

template <int TYPE> struct State;
template <> struct State<0> {
    typedef float4 Vector;
    DEVICE float4 load(const void *base, u64 vector) { return ((const float4 *)base)[vector]; }
    DEVICE void store(void *base, u64 vector, float4 x) { ((float4 *)base)[vector] = x; }
};
template <> struct State<1> {
    DEVICE float4 load(const void *base, u64 vector) {
        uint2 packed = ((const uint2 *)base)[vector];
        float2 low = unpack_half2(packed.x), high = unpack_half2(packed.y);
        return make_float4(low.x, low.y, high.x, high.y);
    }
    DEVICE void store(void *base, u64 vector, float4 x) {
        ((uint2 *)base)[vector] = make_uint2(pack_half2(x.x, x.y), pack_half2(x.z, x.w));
    }
};
DEVICE u32 pack_bfloat2(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
template <> struct State<2> {
    DEVICE float4 load(const void *base, u64 vector) {
        uint2 packed = ((const uint2 *)base)[vector];
        return make_float4(__uint_as_float(packed.x << 16), __uint_as_float(packed.x & 0xffff0000u),
                           __uint_as_float(packed.y << 16), __uint_as_float(packed.y & 0xffff0000u));
    }
    DEVICE void store(void *base, u64 vector, float4 x) {
        ((uint2 *)base)[vector] = make_uint2(pack_bfloat2(x.x, x.y), pack_bfloat2(x.z, x.w));
    }
};

// Heads of 128 x 128. SPLIT blocks share a head (a cluster when SPLIT > 1), each with 128 / SPLIT rows of the state; a
// warp owns 8 rows, eight lanes a row, so a dot product costs three shuffles. Grid (value_heads * SPLIT, sequences).
template <int TYPE, int SPLIT>
DEVICE void delta_128(const f16 *mixed, const float *taps, const float *a_log, const float *dt_bias,
                      const float *norm_weight, void *state, f16 *window, f16 *out, const Sequence *sequences, Shape shape) {
    constexpr int DK = 128, DV = 128, ROWS = DV / SPLIT, THREADS = 4 * ROWS, CHANNELS = 2 * DK + ROWS;
    constexpr int TASKS = (CHANNELS + THREADS - 1) / THREADS;
    __shared__ __align__(16) float conv[2][CHANNELS];
    __shared__ float outputs[2][ROWS];

    int head = blockIdx.x / SPLIT, part = blockIdx.x % SPLIT, tid = threadIdx.x;
    int lane = tid & 31, warp = tid >> 5, sub = lane & 7, row = 8 * warp + (lane >> 3); // and row + 4
    int group = shape.value_heads / shape.key_heads, key_head = head / group;
    int key_channels = shape.key_heads * DK, channels = 2 * key_channels + shape.value_heads * DV;
    int first_row = part * ROWS + row;
    let_next_kernel_start();

    // Channels this thread convolves, and their taps; then, once the sequence is known, their last three raw inputs.
    int channel[TASKS];
    float tap[TASKS][4], history[TASKS][3];
#pragma unroll
    for (int task = 0; task < TASKS; task++) {
        int c = tid + task * THREADS;
        channel[task] = c < DK        ? key_head * DK + c
                        : c < 2 * DK  ? key_channels + key_head * DK + c - DK
                        : c < CHANNELS ? 2 * key_channels + head * DV + part * ROWS + c - 2 * DK
                                       : -1;
#pragma unroll
        for (int j = 0; j < 4; j++) tap[task][j] = channel[task] < 0 ? 0.0f : taps[j * channels + channel[task]];
    }
    Sequence sequence = sequences[blockIdx.y];
    // Whole clusters leave together: all its blocks see the same sequence.
    if (sequence.slot < 0) return;
#if __CUDA_ARCH__ >= 900
    if (SPLIT > 1) cluster_say_started();
#endif

    // The state, before the wait: only this kernel, a step ago, wrote it.
    u64 base = ((u64)(sequence.slot * (u64)shape.value_heads + head) * DV + first_row) * (DK / 4) + sub;
    float4 S[2][4];
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            S[r][i] = sequence.context > 0 ? State<TYPE>::load(state, base + r * 4 * (DK / 4) + 8 * i)
                                           : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    f16 *ring = window + (u64)sequence.slot * shape.ring * channels;
    int entry = sequence.context % shape.ring;
#pragma unroll
    for (int task = 0; task < TASKS; task++) {
#pragma unroll
        for (int back = 1; back <= 3; back++) {
            int from = entry - back < 0 ? entry - back + shape.ring : entry - back;
            bool kept = channel[task] >= 0 && sequence.context >= back;
            history[task][3 - back] = kept ? half_to_float(ring[from * channels + channel[task]]) : 0.0f;
        }
    }
    float decay_rate = -expf(a_log[head]), bias = dt_bias[head];
    float weight = tid < ROWS ? norm_weight[part * ROWS + tid] : 0.0f;
    bool keeps_window = sequence.count <= shape.ring - 3;

#if __CUDA_ARCH__ >= 900
    if (SPLIT > 1) cluster_wait_started();
#endif
    wait_for_previous_kernel();
    for (int t = 0; t < sequence.count; t++) {
        const f16 *input = mixed + (u64)(sequence.start + t) * shape.pitch;
        float *c = conv[t & 1];
        f16 *keep = ring + (u64)((sequence.context + t) % shape.ring) * channels;
        const f16 *gates = input + channels + shape.value_heads * DV;
        float b = half_to_float(gates[head]), a = half_to_float(gates[shape.value_heads + head]);
        float z = tid < ROWS ? half_to_float(input[channels + head * DV + part * ROWS + tid]) : 0.0f;
#pragma unroll
        for (int task = 0; task < TASKS; task++) {
            if (channel[task] < 0) continue;
            f16 raw = input[channel[task]];
            float u = half_to_float(raw);
            float sum = tap[task][0] * history[task][0] + tap[task][1] * history[task][1] + tap[task][2] * history[task][2] +
                        tap[task][3] * u;
            history[task][0] = history[task][1], history[task][1] = history[task][2], history[task][2] = u;
            c[tid + task * THREADS] = silu(sum);
            // q and k channels belong to all blocks of a key head; the first one keeps them.
            bool owner = tid + task * THREADS >= 2 * DK || (part == 0 && head % group == 0);
            if (keeps_window && owner) keep[channel[task]] = raw;
        }
        __syncthreads();

        float4 q[4], k[4];
        float q_squares = 0.0f, k_squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            q[i] = ((const float4 *)c)[sub + 8 * i];
            k[i] = ((const float4 *)c)[DK / 4 + sub + 8 * i];
            q_squares += dot4(q[i], q[i]);
            k_squares += dot4(k[i], k[i]);
        }
#pragma unroll
        for (int offset = 1; offset < 8; offset <<= 1) {
            q_squares += __shfl_xor_sync(0xffffffffu, q_squares, offset);
            k_squares += __shfl_xor_sync(0xffffffffu, k_squares, offset);
        }
        float q_scale = rsqrtf(q_squares + 1e-6f) * 0.08838834764831845f; // 1 / sqrt(128)
        float k_scale = rsqrtf(k_squares + 1e-6f);
        float beta = sigmoid(b), decay = expf(decay_rate * softplus(a + bias));

#pragma unroll
        for (int r = 0; r < 2; r++) {
            float p = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                S[r][i].x *= decay, S[r][i].y *= decay, S[r][i].z *= decay, S[r][i].w *= decay;
                p += dot4(S[r][i], k[i]);
            }
#pragma unroll
            for (int offset = 1; offset < 8; offset <<= 1) p += __shfl_xor_sync(0xffffffffu, p, offset);
            float delta = beta * (c[2 * DK + row + 4 * r] - p * k_scale) * k_scale;
            float o = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                S[r][i].x += delta * k[i].x, S[r][i].y += delta * k[i].y;
                S[r][i].z += delta * k[i].z, S[r][i].w += delta * k[i].w;
                o += dot4(S[r][i], q[i]);
            }
#pragma unroll
            for (int offset = 1; offset < 8; offset <<= 1) o += __shfl_xor_sync(0xffffffffu, o, offset);
            if (sub == 0) outputs[t & 1][row + 4 * r] = o * q_scale;
        }
        __syncthreads();

        // Every warp sums the same values in the same order.
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS / 32; i++) sum += outputs[t & 1][lane + 32 * i] * outputs[t & 1][lane + 32 * i];
        sum = warp_sum(sum);
#if __CUDA_ARCH__ >= 900
        if (SPLIT > 1) {
            __shared__ float squares[2][4];
            cluster_share(squares[t & 1], part, SPLIT, sum);
            sum = 0.0f;
#pragma unroll
            for (int i = 0; i < SPLIT; i++) sum += squares[t & 1][i];
        }
#endif
        if (tid < ROWS) {
            float y = outputs[t & 1][tid] * rsqrtf(sum * (1.0f / DV) + shape.eps) * weight * silu(z);
            out[((u64)(sequence.start + t) * shape.value_heads + head) * DV + part * ROWS + tid] = float_to_half(y);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) State<TYPE>::store(state, base + r * 4 * (DK / 4) + 8 * i, S[r][i]);
}

#define ARGUMENTS                                                                                                       \
    const f16 *mixed, const float *taps, const float *a_log, const float *dt_bias, const float *norm_weight,            \
        void *state, f16 *window, f16 *out, const Sequence *sequences, Shape shape
#define PASS mixed, taps, a_log, dt_bias, norm_weight, state, window, out, sequences, shape

#if __CUDA_ARCH__ >= 900
KERNEL __launch_bounds__(128) delta_f32_split(ARGUMENTS) { delta_128<0, 4>(PASS); }
KERNEL __launch_bounds__(128) delta_f16_split(ARGUMENTS) { delta_128<1, 4>(PASS); }
KERNEL __launch_bounds__(128) delta_bf16_split(ARGUMENTS) { delta_128<2, 4>(PASS); }
#endif
KERNEL __launch_bounds__(512) delta_f32(ARGUMENTS) { delta_128<0, 1>(PASS); }
KERNEL __launch_bounds__(512) delta_f16(ARGUMENTS) { delta_128<1, 1>(PASS); }
KERNEL __launch_bounds__(512) delta_bf16(ARGUMENTS) { delta_128<2, 1>(PASS); }

// ---- heads of any size, plainly: thread r owns row r of the state, which stays in memory ----

template <int TYPE> DEVICE void state_row(void *state, u64 at, float *values, bool store) {
    float4 x = make_float4(values[0], values[1], values[2], values[3]);
    if (store) {
        State<TYPE>::store(state, at, x);
    } else {
        x = State<TYPE>::load(state, at);
        values[0] = x.x, values[1] = x.y, values[2] = x.z, values[3] = x.w;
    }
}

// Grid (value_heads, sequences); blocks of whole warps with at least max(dk, dv) threads; dk a multiple of 4.
// Dynamic shared memory: (2 dk + dv) floats.
template <int TYPE>
DEVICE void delta_any(const f16 *mixed, const float *taps, const float *a_log, const float *dt_bias,
                      const float *norm_weight, void *state, f16 *window, f16 *out, const Sequence *sequences, Shape shape,
                      int dk, int dv) {
    extern __shared__ float dynamic[];
    __shared__ float scratch[3][32];
    float *q = dynamic, *k = dynamic + dk;
    int head = blockIdx.x, tid = threadIdx.x;
    Sequence sequence = sequences[blockIdx.y];
    if (sequence.slot < 0) return;
    int group = shape.value_heads / shape.key_heads, key_head = head / group;
    int key_channels = shape.key_heads * dk, channels = 2 * key_channels + shape.value_heads * dv;
    f16 *ring = window + (u64)sequence.slot * shape.ring * channels;
    bool keeps_window = sequence.count <= shape.ring - 3;
    wait_for_previous_kernel();
    let_next_kernel_start();

    for (int t = 0; t < sequence.count; t++) {
        const f16 *input = mixed + (u64)(sequence.start + t) * shape.pitch;
        int position = sequence.context + t;
        auto convolve = [&](int channel, bool owner) {
            float sum = 0.0f;
            for (int j = 0; j < 4; j++) {
                int from = position - 3 + j;
                if (from < 0) continue;
                float u = from >= sequence.context
                              ? half_to_float(mixed[(u64)(sequence.start + from - sequence.context) * shape.pitch + channel])
                              : half_to_float(ring[(from % shape.ring) * channels + channel]);
                sum += taps[j * channels + channel] * u;
            }
            if (keeps_window && owner) ring[(position % shape.ring) * channels + channel] = input[channel];
            return silu(sum);
        };
        bool owner = head % group == 0;
        float q_value = tid < dk ? convolve(key_head * dk + tid, owner) : 0.0f;
        float k_value = tid < dk ? convolve(key_channels + key_head * dk + tid, owner) : 0.0f;
        float v = tid < dv ? convolve(2 * key_channels + head * dv + tid, true) : 0.0f;
        float q_squares = block_sum(q_value * q_value, scratch[0]);
        float k_squares = block_sum(k_value * k_value, scratch[1]);
        if (tid < dk) {
            q[tid] = q_value * rsqrtf(q_squares + 1e-6f) * rsqrtf((float)dk);
            k[tid] = k_value * rsqrtf(k_squares + 1e-6f);
        }
        __syncthreads();
        const f16 *gates = input + channels + shape.value_heads * dv;
        float beta = sigmoid(half_to_float(gates[head]));
        float decay = expf(-expf(a_log[head]) *
                             softplus(half_to_float(gates[shape.value_heads + head]) + dt_bias[head]));
        float o = 0.0f;
        if (tid < dv) {
            u64 base = ((u64)(sequence.slot * (u64)shape.value_heads + head) * dv + tid) * (dk / 4);
            bool fresh = position == 0;
            float p = 0.0f, values[4];
            for (int i = 0; i < dk / 4; i++) {
                values[0] = values[1] = values[2] = values[3] = 0.0f;
                if (!fresh) state_row<TYPE>(state, base + i, values, false);
                for (int j = 0; j < 4; j++) p += decay * values[j] * k[4 * i + j];
            }
            float delta = beta * (v - p);
            for (int i = 0; i < dk / 4; i++) {
                values[0] = values[1] = values[2] = values[3] = 0.0f;
                if (!fresh) state_row<TYPE>(state, base + i, values, false);
                for (int j = 0; j < 4; j++) {
                    values[j] = decay * values[j] + delta * k[4 * i + j];
                    o += values[j] * q[4 * i + j];
                }
                state_row<TYPE>(state, base + i, values, true);
            }
        }
        float sum = block_sum(o * o, scratch[2]);
        if (tid < dv) {
            float z = half_to_float(input[channels + head * dv + tid]);
            float y = o * rsqrtf(sum / (float)dv + shape.eps) * norm_weight[tid] * silu(z);
            out[((u64)(sequence.start + t) * shape.value_heads + head) * dv + tid] = float_to_half(y);
        }
        __syncthreads();
    }
}

KERNEL delta_any_f32(ARGUMENTS, int dk, int dv) { delta_any<0>(PASS, dk, dv); }
KERNEL delta_any_f16(ARGUMENTS, int dk, int dv) { delta_any<1>(PASS, dk, dv); }
KERNEL delta_any_bf16(ARGUMENTS, int dk, int dv) { delta_any<2>(PASS, dk, dv); }

// ---- the window after a chunk that is longer than the ring can take while others read it ----

// Keeps the raw inputs of the last three positions. Grid (ceil(channels / threads), sequences).
KERNEL delta_save_window(const f16 *mixed, f16 *window, const Sequence *sequences, int pitch, int channels, int ring) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    Sequence sequence = sequences[blockIdx.y];
    int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (sequence.slot < 0 || sequence.count <= ring - 3 || channel >= channels) return;
    f16 *to = window + (u64)sequence.slot * ring * channels;
    for (int back = 1; back <= 3; back++) {
        int t = sequence.count - back, position = sequence.context + t;
        if (t < 0) break; // kept by an earlier step
        to[(u64)(position % ring) * channels + channel] = mixed[(u64)(sequence.start + t) * pitch + channel];
    }
}
