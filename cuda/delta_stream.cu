// The decode step of the gated delta net for many sequences, with states that are read every step and written every few.
//
// The equations and shapes are those of delta.cu, with heads of 128 x 128 and an fp32 state. A step moves far more state
// than anything else of a sequence, and half of it is the writing back. But what a token adds to the state is a rank-1
// term, and a few of them are small: the state S0 in memory stays as it was `pending` tokens ago, and for each token since
// then the pair (k_i, u_i) and the logarithm L_i of the decay since S0 are kept. With a_i = exp(L_t - L_i):
//   S_(t-1) = exp(L_(t-1)) S0 + sum_i exp(L_(t-1) - L_i) u_i k_i^T
//   u_t = beta (v - exp(L_t) S0 k - sum_i a_i (k_i . k) u_i)
//   o_t = exp(L_t) S0 q + sum_i a_i (k_i . q) u_i + (k . q) u_t
// A sequence whose `write` is set first folds its pairs into S0 and writes it: its own token's pair is then the first.
// So a token that turns out to be unwanted (a rejected draft) leaves no mark: its pair is not counted the next time.
//
// Bytes a (sequence, head): 64 KB of state read, 1 KB a pair read and one written, and 64 KB written by each that folds.
// Such a pair is a task. Blocks stay, one a multiprocessor, and walk the tasks: their first ones are shared out, the others
// are drawn from a counter, since multiprocessors read at different rates.
#include "delta.cuh"

#define HEAD 128
#define STATE_BYTES (HEAD * HEAD * 4)
#define PAIR 260            // floats: k, u, L and three unused
#define PAIR_BYTES (PAIR * 4)

DEVICE void add_scaled(float4 &to, float by, float4 x) {
    to.x += by * x.x, to.y += by * x.y, to.z += by * x.z, to.w += by * x.w;
}

#define ROWS 8 // of the state, for each group of eight lanes: row, row + 4..

#define FOLDED 4 // rows at a time, for which a pair's k is read once

// A thread's rows of the state with its pairs folded in, in place. `fresh`: S0 is zero.
DEVICE void fold(float4 *rows, const float *pairs, int count, bool fresh, int row, int sub) {
    float last = pairs[(count - 1) * PAIR + 2 * HEAD], scale = expf(last);
#pragma unroll 1
    for (int r = 0; r < ROWS; r += FOLDED) {
        float4 *own = rows + (row + 4 * r) * (HEAD / 4) + sub, S[FOLDED][4];
#pragma unroll
        for (int f = 0; f < FOLDED; f++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                S[f][j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (!fresh) add_scaled(S[f][j], scale, own[f * HEAD + 8 * j]);
            }
#pragma unroll 2
        for (int i = 0; i < count; i++) {
            const float *pair = pairs + i * PAIR;
            float decay = expf(last - pair[2 * HEAD]);
            float4 k[4];
#pragma unroll
            for (int j = 0; j < 4; j++) k[j] = ((const float4 *)pair)[sub + 8 * j];
#pragma unroll
            for (int f = 0; f < FOLDED; f++) {
                float by = decay * pair[HEAD + row + 4 * (r + f)];
#pragma unroll
                for (int j = 0; j < 4; j++) add_scaled(S[f][j], by, k[j]);
            }
        }
#pragma unroll
        for (int f = 0; f < FOLDED; f++)
#pragma unroll
            for (int j = 0; j < 4; j++) own[f * HEAD + 8 * j] = S[f][j];
    }
}

// Warps of a block: 4 own the state's rows (eight lanes a row, rows 32 w..32 w + 31 for warp w), GROUPS times 4 prepare the
// tokens in turn and finish them, 1 copies. While the first work on a token, the second are at the next ones, and the copies
// at the states behind those. A group's token takes it longer than the rows take: hence two.
#define MAIN_THREADS 128
#define SIDE_THREADS 128
#define THREADS(GROUPS) (MAIN_THREADS + GROUPS * SIDE_THREADS + 32)

// A group's own barrier. It counts whole warps, so a warp that a loop or a branch may have split comes together first.
DEVICE void group_sync(int group) {
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(SIDE_THREADS) : "memory");
}

// A token as the preparing warps leave it to the others. `have`: pairs in shared memory; < 0 ends the walk.
template <int PAIRS> struct __align__(16) Token {
    float conv[3 * HEAD]; // q, k, v after convolution and silu
    float outputs[HEAD], updates[HEAD];
    float by_k[PAIRS + 1], by_q[PAIRS + 1]; // a_i (k_i . k) and a_i (k_i . q); the last: (k . q)
    float q_scale, k_scale, decay, beta;
    int have, pending, first, last, write, fresh;
};

// STAGES states with up to PAIRS pairs each are in shared memory; a task has at most PAIRS + 1 pending pairs and new tokens
// together, and with two groups one new token. pairs: [slots][value_heads][capacity][PAIR] fp32. drawn: tasks drawn, and
// blocks that draw no more; zero before and after. Nothing is drawn before the wait for the previous kernel, so all launches of
// a stream may share them.
template <int STAGES, int PAIRS, int GROUPS>
DEVICE void stream_states(const f16 *mixed, const float *taps, const float *a_log, const float *dt_bias,
                          const float *norm_weight, float *state, f16 *window, f16 *out, const Sequence *sequences,
                          Shape shape, float *pairs, int capacity, int count, u32 *drawn) {
    constexpr int STAGE_BYTES = STATE_BYTES + PAIRS * PAIR_BYTES, TURNS = 2 * GROUPS; // tokens under way
    constexpr int NAMES = STAGES + 1;                                                 // drawn tasks under way
    extern __shared__ __align__(128) unsigned char stages[];
    __shared__ __align__(16) Token<PAIRS> tokens[TURNS];
    __shared__ __align__(8) u64 arrived[STAGES], kept_arrived[STAGES], left[STAGES]; // states; their pairs
    __shared__ __align__(8) u64 ready[TURNS], done[TURNS]; // tokens: prepared; their rows are through
    __shared__ __align__(8) u64 named[NAMES];              // tasks: drawn
    __shared__ int names[NAMES];

    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    int heads = shape.value_heads, group = heads / shape.key_heads, tasks = count * heads;
    let_next_kernel_start();
    // Every thread arrives for itself: what a lane says for its warp, racecheck does not follow.
    if (tid == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&arrived[i]), 1), barrier_init(shared_address(&kept_arrived[i]), 1);
            barrier_init(shared_address(&left[i]), MAIN_THREADS);
        }
        for (int i = 0; i < NAMES; i++) barrier_init(shared_address(&named[i]), 1);
        barrier_init_fence();
    }
    if (tid == 32) {
        for (int i = 0; i < TURNS; i++) barrier_init(shared_address(&ready[i]), SIDE_THREADS), barrier_init(shared_address(&done[i]), MAIN_THREADS);
        barrier_init_fence();
    }
    __syncthreads();

    // Padding comes last, so a task of padding, like one behind the last, ends the walk.
    auto find = [&](int task) {
        Sequence sequence;
        sequence.slot = -1;
        if (task >= 0 && task < tasks) sequence = sequences[task / heads];
        return sequence;
    };
    // The first STAGES tasks of a block are known from the start, the others once the copying warp has named them. Behind its
    // last one it names LAST, and then AFTER.
    constexpr int LAST = -1, AFTER = -2;
    auto is_named = [&](int i) {
        return i < STAGES || barrier_passed(shared_address(&named[(i - STAGES) % NAMES]), (i - STAGES) / NAMES & 1);
    };
    int known = STAGES * gridDim.x;
    auto task_at = [&](int i) { return i < STAGES ? int(blockIdx.x + i * gridDim.x) : names[(i - STAGES) % NAMES]; };

    if (tid >= MAIN_THREADS + GROUPS * SIDE_THREADS) { // copies
        if (lane > 0) return;
        int end = -1; // the block's task that is none
        auto name = [&](int i) {
            int task = AFTER;
            if (end < 0) {
                task = i < STAGES ? task_at(i) : known < tasks ? known + (int)atomicAdd(drawn, 1) : tasks;
                if (find(task).slot < 0) end = i, task = LAST;
            }
            if (i >= STAGES) {
                names[(i - STAGES) % NAMES] = task;
                barrier_arrive(shared_address(&named[(i - STAGES) % NAMES]));
            }
            return task;
        };
        int upcoming = 0;
        bool ahead = false; // `upcoming` is named
        for (int i = 0; end < 0 || i < end + STAGES; i++) { // into the stage that task i - STAGES leaves
            int stage = i % STAGES;
            // Only the first state is asked for before: what the first tokens take from the previous kernel queues behind it.
            if (i == 1) wait_for_previous_kernel();
            if (i >= STAGES) {
                barrier_wait(shared_address(&left[stage]), (i / STAGES - 1) & 1);
                int leaving = task_at(i - STAGES);
                Sequence sequence = find(leaving);
                if (sequence.write) {
                    float *to = state + ((u64)sequence.slot * heads + leaving % heads) * (HEAD * HEAD);
                    store_bulk(to, shared_address(stages + stage * STAGE_BYTES), STATE_BYTES);
                    store_commit();
                }
            }
            int task = ahead ? upcoming : name(i);
            store_wait_read<0>();
            if (task >= 0) {
                Sequence sequence = find(task);
                u32 to = shared_address(stages + stage * STAGE_BYTES);
                u32 barrier = shared_address(&arrived[stage]), kept_barrier = shared_address(&kept_arrived[stage]);
                u64 at = (u64)sequence.slot * heads + task % heads;
                u32 pair_bytes = sequence.pending * PAIR_BYTES;
                if (pair_bytes > 0) {
                    barrier_expect(kept_barrier, pair_bytes);
                    copy_bulk(to + STATE_BYTES, pairs + at * capacity * PAIR, pair_bytes, kept_barrier);
                } else {
                    barrier_arrive(kept_barrier);
                }
                if (sequence.context != sequence.pending) {
                    barrier_expect(barrier, STATE_BYTES);
                    copy_bulk(to, state + at * (HEAD * HEAD), STATE_BYTES, barrier);
                } else { // S0 is taken as zero
                    barrier_arrive(barrier);
                }
            }
            // A task ahead, so that its inputs are asked for early; but of the last ones, whoever is first takes one.
            ahead = i >= STAGES && end < 0 && task < tasks - (int)gridDim.x;
            if (ahead) upcoming = name(i + 1);
        }
        // The last block leaves the counters as they were.
        if (known < tasks) {
            __threadfence();
            if (atomicInc(drawn + 1, gridDim.x - 1) == gridDim.x - 1) drawn[0] = 0;
        }
        store_wait();
        return;
    }

    if (tid < MAIN_THREADS) { // rows of the state
        int sub = lane & 7, row = 4 * ROWS * warp + (lane >> 3);
        u32 i = 0;
        for (u32 n = 0;; n++) { // the block's n-th token
            u32 turn = n % TURNS;
            barrier_wait(shared_address(&ready[turn]), n / TURNS & 1);
            Token<PAIRS> &token = tokens[turn];
            int have = token.have;
            if (have < 0) return;
            bool first = token.first, last = token.last, write = token.write, fresh = token.fresh;
            float4 *rows = (float4 *)(stages + (i % STAGES) * STAGE_BYTES);
            const float *kept = (const float *)rows + HEAD * HEAD;
            if (first) {
                barrier_wait(shared_address(&kept_arrived[i % STAGES]), (i / STAGES) & 1);
                barrier_wait(shared_address(&arrived[i % STAGES]), (i / STAGES) & 1);
            }
            if (write) {
                // Each thread reads below what it writes here.
                fold(rows, kept, token.pending, fresh, row, sub);
                fresh = false;
                shared_write_fence(); // the copy engine reads it too
            }
            float4 q[4], k[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                q[j] = ((const float4 *)token.conv)[sub + 8 * j];
                k[j] = ((const float4 *)token.conv)[HEAD / 4 + sub + 8 * j];
            }
            float decay = token.decay, k_scale = decay * token.k_scale, q_scale = decay * token.q_scale;
            float with_k[ROWS] = {}, with_q[ROWS] = {};
            if (!fresh) {
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float4 *own = rows + (row + 4 * r) * (HEAD / 4) + sub;
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float4 S = own[8 * j];
                        with_k[r] += dot4(S, k[j]), with_q[r] += dot4(S, q[j]);
                    }
                    with_k[r] *= k_scale, with_q[r] *= q_scale;
                }
            }
            for (int pair = sub; pair < have; pair += 8) {
                float by_k = token.by_k[pair], by_q = token.by_q[pair];
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    float value = kept[pair * PAIR + HEAD + row + 4 * r];
                    with_k[r] += by_k * value, with_q[r] += by_q * value;
                }
            }
#pragma unroll
            for (int offset = 1; offset < 8; offset <<= 1)
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    with_k[r] += __shfl_xor_sync(0xffffffffu, with_k[r], offset);
                    with_q[r] += __shfl_xor_sync(0xffffffffu, with_q[r], offset);
                }
            float mine_k = with_k[0], mine_q = with_q[0]; // lane `sub` finishes row `row + 4 sub`
#pragma unroll
            for (int r = 1; r < ROWS; r++)
                if (sub == r) mine_k = with_k[r], mine_q = with_q[r];
            if (sub < ROWS) {
                int own = row + 4 * sub;
                float delta = token.beta * (token.conv[2 * HEAD + own] - mine_k);
                token.updates[own] = delta;
                token.outputs[own] = mine_q + token.by_q[have] * delta;
            }
            barrier_arrive(shared_address(&done[turn]));
            if (last) barrier_arrive(shared_address(&left[i++ % STAGES]));
        }
    }

    // Preparation and end of each token. Thread t owns channel t of q, of k and of v, and output t.
    int at = tid % SIDE_THREADS, key_channels = shape.key_heads * HEAD, channels = 2 * key_channels + heads * HEAD;
    int own_group = GROUPS == 1 ? 0 : tid / SIDE_THREADS - 1;
    warp %= SIDE_THREADS / 32;
    float weight = norm_weight[at];
    // Asked for a token ahead and left as they come, so that nothing waits for them before they are used.
    struct {
        float tap[3][4];
        f16 history[3][3], u[3], z, b, a;
        float rate, bias;
    } next;
    auto channel_of = [&](int head, int which) {
        return which == 2 ? 2 * key_channels + head * HEAD + at : which * key_channels + head / group * HEAD + at;
    };
    // `early`: what there is without the previous kernel, the window and weights. `late`: what that one leaves.
    auto load = [&](const Sequence &sequence, int head, int token, bool early, bool late) {
        if (sequence.slot < 0) return;
        int position = sequence.context + token, entry = position % shape.ring;
        const f16 *input = mixed + (u64)(sequence.start + token) * shape.pitch;
        const f16 *gates = input + channels + heads * HEAD;
        if (early) next.rate = a_log[head], next.bias = dt_bias[head];
        if (late) next.b = gates[head], next.a = gates[heads + head], next.z = input[channels + head * HEAD + at];
#pragma unroll
        for (int which = 0; which < 3; which++) {
            int channel = channel_of(head, which);
            if (late) next.u[which] = input[channel];
            const f16 *ring = window + (u64)sequence.slot * shape.ring * channels + channel;
#pragma unroll
            for (int back = 1; back <= 3; back++) {
                int from = entry - back < 0 ? entry - back + shape.ring : entry - back;
                const f16 *raw = back <= token ? input - back * shape.pitch + channel : ring + from * channels;
                if (early) next.history[which][3 - back] = 0; // 0.0
                if (position >= back && (back <= token ? late : early)) next.history[which][3 - back] = *raw;
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (early) next.tap[which][j] = taps[j * channels + channel];
        }
    };

    // What is still needed of the token before when its rows are through.
    struct {
        float *pair, *beside; // its pair in memory, and in shared memory for the task's next token
        f16 *out;
        float log, gate;
    } before = {};
    auto finish = [&](u32 n) {
        u32 turn = n % TURNS;
        barrier_wait(shared_address(&done[turn]), n / TURNS & 1);
        const Token<PAIRS> &token = tokens[turn];
        float key = token.conv[HEAD + at] * token.k_scale, update = token.updates[at];
        before.pair[at] = key, before.pair[HEAD + at] = update;
        if (at == 0) before.pair[2 * HEAD] = before.log;
        if (before.beside) {
            before.beside[at] = key, before.beside[HEAD + at] = update;
            if (at == 0) before.beside[2 * HEAD] = before.log;
            shared_write_fence(); // a state comes here later
        }
        float4 o = ((const float4 *)token.outputs)[lane];
        float squares = warp_sum(dot4(o, o));
        float y = token.outputs[at] * rsqrtf(squares * (1.0f / HEAD) + shape.eps) * weight * before.gate;
        before.out[at] = float_to_half(y);
    };

    int have = 0, head = task_at(own_group) % heads, next_head = 0;
    bool fresh = true;
    Sequence sequence = find(task_at(own_group)), following = sequence;
    load(sequence, head, 0, true, false);
    wait_for_previous_kernel();
    load(sequence, head, 0, false, true);
    u32 n = own_group; // the block's n-th token
    for (int i = own_group, step = 0;; n += GROUPS) {
        bool any = n >= GROUPS; // before it
        Token<PAIRS> &token = tokens[n % TURNS];
        if (sequence.slot < 0) {
            if (any) finish(n - GROUPS);
            // The walk ends here, not at the other group's token.
            if (i < STAGES ? i == 0 || find(task_at(i - 1)).slot >= 0 : task_at(i) == LAST) {
                if (at == 0) token.have = -1;
                barrier_arrive(shared_address(&ready[n % TURNS]));
            }
            return;
        }
        bool first = GROUPS > 1 || step == 0, last = GROUPS > 1 || step + 1 == sequence.count, write = first && sequence.write;
#pragma unroll
        for (int which = 0; which < 3; which++) {
            const float *tap = next.tap[which];
            float sum = tap[3] * half_to_float(next.u[which]);
#pragma unroll
            for (int j = 0; j < 3; j++) sum += tap[j] * half_to_float(next.history[which][j]);
            token.conv[which * HEAD + at] = silu(sum);
            // q and k channels belong to all value heads of a key head; the first one keeps them. Of more tokens than the ring has
            // room for beside what others still read, `delta_save_window` keeps the last ones.
            int entry = (sequence.context + step) % shape.ring;
            if (sequence.count <= shape.ring - 3 && (which == 2 || head % group == 0))
                window[((u64)sequence.slot * shape.ring + entry) * channels + channel_of(head, which)] = next.u[which];
        }
        float beta = sigmoid(half_to_float(next.b)), gate = silu(half_to_float(next.z));
        float log_decay = -expf(next.rate) * softplus(half_to_float(next.a) + next.bias);
        auto load_next = [&] {
            if (last) {
                int task = task_at(i + GROUPS);
                following = find(task), next_head = task % heads;
            }
            load(last ? following : sequence, last ? next_head : head, last ? 0 : step + 1, true, true);
        };
        // The block has nothing to do until a group's first token is prepared, so that does not wait for these loads.
        bool asked = (any || GROUPS == 1) && (!last || is_named(i + GROUPS));
        if (asked) load_next();
        group_sync(own_group);

        float4 q = ((const float4 *)token.conv)[lane], k = ((const float4 *)token.conv)[HEAD / 4 + lane];
        float q_scale = rsqrtf(warp_sum(dot4(q, q)) + 1e-6f) * 0.08838834764831845f; // 1 / sqrt(128)
        float k_scale = rsqrtf(warp_sum(dot4(k, k)) + 1e-6f);
        float *kept = (float *)(stages + (i % STAGES) * STAGE_BYTES) + HEAD * HEAD;
        if (first) {
            have = write ? 0 : sequence.pending;
            fresh = sequence.context == sequence.pending;
            if (sequence.pending > 0) {
                // A parity tells two neighbouring phases of a barrier apart, no more, and of two groups one may be here before the
                // pairs that take this stage first have come: their token (there is one a state) is through before.
                u32 before = n - STAGES;
                if (GROUPS > 1 && n >= STAGES) barrier_wait(shared_address(&done[before % TURNS]), before / TURNS & 1);
                barrier_wait(shared_address(&kept_arrived[i % STAGES]), (i / STAGES) & 1);
            }
        } else {
            finish(n - GROUPS); // its pair is one of this token's
            group_sync(own_group);
        }
        float log = (have > 0 ? kept[(have - 1) * PAIR + 2 * HEAD] : 0.0f) + log_decay;
        // Warp w: the products with pairs w, w + 4.., and behind the last pair q with k.
        for (int from = warp; from <= have; from += 2 * (SIDE_THREADS / 32)) { // two at a time
            float with_k[2], with_q[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int pair = from + j * (SIDE_THREADS / 32);
                float4 own = pair < have ? ((const float4 *)(kept + pair * PAIR))[lane] : k;
                with_k[j] = dot4(own, k), with_q[j] = dot4(own, q);
            }
#pragma unroll
            for (int offset = 16; offset > 0; offset >>= 1)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    with_k[j] += __shfl_xor_sync(0xffffffffu, with_k[j], offset);
                    with_q[j] += __shfl_xor_sync(0xffffffffu, with_q[j], offset);
                }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int pair = from + j * (SIDE_THREADS / 32);
                if (lane == 0 && pair <= have) {
                    float scale = pair < have ? expf(log - kept[pair * PAIR + 2 * HEAD]) : k_scale;
                    token.by_k[pair] = scale * with_k[j] * k_scale, token.by_q[pair] = scale * with_q[j] * q_scale;
                }
            }
        }
        if (at == 0) {
            token.q_scale = q_scale, token.k_scale = k_scale, token.decay = expf(log), token.beta = beta;
            token.have = have, token.pending = sequence.pending, token.first = first, token.last = last;
            token.write = write, token.fresh = fresh;
        }
        barrier_arrive(shared_address(&ready[n % TURNS]));
        if (any && first) finish(n - GROUPS);
        if (!asked) {
            if (last && i + GROUPS >= STAGES)
                barrier_wait(shared_address(&named[(i + GROUPS - STAGES) % NAMES]), (i + GROUPS - STAGES) / NAMES & 1);
            load_next();
        }

        before = {pairs + (((u64)sequence.slot * heads + head) * capacity + have) * PAIR, last ? nullptr : kept + have * PAIR,
                  out + ((u64)(sequence.start + step) * heads + head) * HEAD, log, gate};
        have++;
        if (write) fresh = false;
        step++;
        if (last) step = 0, i += GROUPS, head = next_head, sequence = following;
    }
}

#define ARGUMENTS                                                                                                       \
    const f16 *mixed, const float *taps, const float *a_log, const float *dt_bias, const float *norm_weight,            \
        float *state, f16 *window, f16 *out, const Sequence *sequences, Shape shape, float *pairs, int capacity, int count
#define PASS mixed, taps, a_log, dt_bias, norm_weight, state, window, out, sequences, shape, pairs, capacity, count

KERNEL __launch_bounds__(THREADS(2), 1) delta_stream(ARGUMENTS, u32 *drawn) { stream_states<3, 8, 2>(PASS, drawn); }
// With drafts: the pairs of a draft's length and of as many tokens kept.
KERNEL __launch_bounds__(THREADS(1), 1) delta_stream_drafts(ARGUMENTS, u32 *drawn) { stream_states<2, 32, 1>(PASS, drawn); }

// ---- few sequences: no shared memory to speak of, so that the products beside it keep their L1 ----

#define MOST_PAIRS 8

// PARTS blocks share a head, as a cluster where there are several. A block has PART_ROWS rows of the state, in registers, and one
// new token. Eight lanes a row, two rows a thread. State and pairs are asked for before the wait for the product in front. Grid
// (value_heads * PARTS, sequences).
template <int PARTS> DEVICE void few_states(ARGUMENTS) {
    constexpr int PART_ROWS = HEAD / PARTS, THREADS = 4 * PART_ROWS, CHANNELS = 2 * HEAD + PART_ROWS, TASKS = (CHANNELS + THREADS - 1) / THREADS;
    constexpr int KEPT = HEAD + PART_ROWS + 4;
    __shared__ __align__(16) float conv[CHANNELS], kept[MOST_PAIRS][KEPT]; // of a pair: k, these rows of u, L
    __shared__ float by_k[MOST_PAIRS + 1], by_q[MOST_PAIRS + 1], outputs[PART_ROWS], updates[PART_ROWS], squares[PARTS];

    int head = blockIdx.x / PARTS, part = blockIdx.x % PARTS, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    int sub = lane & 7, row = 8 * warp + (lane >> 3); // and row + 4
    int heads = shape.value_heads, group = heads / shape.key_heads, key_channels = shape.key_heads * HEAD;
    int channels = 2 * key_channels + heads * HEAD;
    let_next_kernel_start();
    Sequence sequence = sequences[blockIdx.y];
    if (sequence.slot < 0) return; // the whole cluster
    if (PARTS > 1) cluster_say_started();
    u64 at = (u64)sequence.slot * heads + head;
    bool fresh = sequence.context == sequence.pending;

    float4 *own = (float4 *)(state + at * (HEAD * HEAD)) + (part * PART_ROWS + row) * (HEAD / 4) + sub, S[2][4];
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            S[r][j] = fresh ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : own[r * HEAD + 8 * j];
    float *rows = pairs + at * capacity * PAIR;
    for (int piece = tid; piece < sequence.pending * (KEPT / 4); piece += THREADS) {
        int pair = piece / (KEPT / 4), word = 4 * (piece % (KEPT / 4));
        int from = word < HEAD ? word : word < HEAD + PART_ROWS ? word + part * PART_ROWS : 2 * HEAD;
        copy_async_16(shared_address(&kept[pair][word]), rows + pair * PAIR + from);
    }
    copy_async_commit();

    int channel[TASKS], entry = sequence.context % shape.ring;
    float tap[TASKS][4];
    f16 history[TASKS][3], *ring = window + (u64)sequence.slot * shape.ring * channels;
#pragma unroll
    for (int task = 0; task < TASKS; task++) {
        int c = tid + THREADS * task;
        channel[task] = c < 2 * HEAD   ? c / HEAD * key_channels + head / group * HEAD + c % HEAD
                        : c < CHANNELS ? 2 * key_channels + head * HEAD + part * PART_ROWS + c - 2 * HEAD
                                       : -1;
        if (channel[task] < 0) continue;
#pragma unroll
        for (int j = 0; j < 4; j++) tap[task][j] = taps[j * channels + channel[task]];
#pragma unroll
        for (int back = 1; back <= 3; back++) {
            int from = entry - back < 0 ? entry - back + shape.ring : entry - back;
            history[task][3 - back] = 0;
            if (sequence.context >= back) history[task][3 - back] = ring[from * channels + channel[task]];
        }
    }
    float rate = a_log[head], bias = dt_bias[head], weight = tid < PART_ROWS ? norm_weight[part * PART_ROWS + tid] : 0.0f;

    if (PARTS > 1) cluster_wait_started();
    wait_for_previous_kernel();
    const f16 *input = mixed + (u64)sequence.start * shape.pitch, *gates = input + channels + heads * HEAD;
    f16 b = gates[head], a = gates[heads + head], z = 0;
    if (tid < PART_ROWS) z = input[channels + head * HEAD + part * PART_ROWS + tid];
    f16 raw[TASKS];
#pragma unroll
    for (int task = 0; task < TASKS; task++)
        if (channel[task] >= 0) raw[task] = input[channel[task]];
#pragma unroll
    for (int task = 0; task < TASKS; task++) {
        if (channel[task] < 0) continue;
        float sum = tap[task][3] * half_to_float(raw[task]);
#pragma unroll
        for (int j = 0; j < 3; j++) sum += tap[task][j] * half_to_float(history[task][j]);
        conv[tid + THREADS * task] = silu(sum);
        // q and k channels belong to all blocks of a key head; the first one keeps them.
        if (tid + THREADS * task >= 2 * HEAD || (part == 0 && head % group == 0)) ring[entry * channels + channel[task]] = raw[task];
    }
    copy_async_wait<0>();
    __syncthreads();

    float4 q[4], k[4];
    float q_squares = 0.0f, k_squares = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        q[j] = ((const float4 *)conv)[sub + 8 * j], k[j] = ((const float4 *)conv)[HEAD / 4 + sub + 8 * j];
        q_squares += dot4(q[j], q[j]), k_squares += dot4(k[j], k[j]);
    }
#pragma unroll
    for (int offset = 1; offset < 8; offset <<= 1) {
        q_squares += __shfl_xor_sync(0xffffffffu, q_squares, offset);
        k_squares += __shfl_xor_sync(0xffffffffu, k_squares, offset);
    }
    float q_scale = rsqrtf(q_squares + 1e-6f) * 0.08838834764831845f; // 1 / sqrt(128)
    float k_scale = rsqrtf(k_squares + 1e-6f);
    float beta = sigmoid(half_to_float(b)), log = -expf(rate) * softplus(half_to_float(a) + bias);

    int have = sequence.pending;
    float last = have > 0 ? kept[have - 1][KEPT - 4] : 0.0f;
    if (sequence.write) {
        float scale = expf(last);
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int j = 0; j < 4; j++) S[r][j].x *= scale, S[r][j].y *= scale, S[r][j].z *= scale, S[r][j].w *= scale;
        for (int pair = 0; pair < have; pair++) {
            float decay = expf(last - kept[pair][KEPT - 4]);
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    add_scaled(S[r][j], decay * kept[pair][HEAD + row + 4 * r], ((const float4 *)kept[pair])[sub + 8 * j]);
        }
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int j = 0; j < 4; j++) own[r * HEAD + 8 * j] = S[r][j];
        have = 0;
    } else {
        log += last;
    }
    float decay = expf(log), S_k[2] = {}, S_q[2] = {};
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int j = 0; j < 4; j++) S_k[r] += dot4(S[r][j], k[j]), S_q[r] += dot4(S[r][j], q[j]);
        S_k[r] *= decay * k_scale, S_q[r] *= decay * q_scale;
    }
    // Warp w: the products with pairs w, w + warps.., and behind the last pair q with k.
    for (int pair = warp; pair <= have; pair += THREADS / 32) {
        float4 all = ((const float4 *)conv)[HEAD / 4 + lane], query = ((const float4 *)conv)[lane];
        float4 other = pair < have ? ((const float4 *)kept[pair])[lane] : all;
        float with_k = warp_sum(dot4(other, all)), with_q = warp_sum(dot4(other, query));
        if (lane == 0) {
            float scale = pair < have ? expf(log - kept[pair][KEPT - 4]) : k_scale;
            by_k[pair] = scale * with_k * k_scale, by_q[pair] = scale * with_q * q_scale;
        }
    }
    __syncthreads();

#pragma unroll
    for (int r = 0; r < 2; r++) {
        float with_k = S_k[r], with_q = S_q[r];
        if (sub < have) {
            float value = kept[sub][HEAD + row + 4 * r];
            with_k += by_k[sub] * value, with_q += by_q[sub] * value;
        }
#pragma unroll
        for (int offset = 1; offset < 8; offset <<= 1) {
            with_k += __shfl_xor_sync(0xffffffffu, with_k, offset);
            with_q += __shfl_xor_sync(0xffffffffu, with_q, offset);
        }
        float delta = beta * (conv[2 * HEAD + row + 4 * r] - with_k);
        if (sub == 0) updates[row + 4 * r] = delta, outputs[row + 4 * r] = with_q + by_q[have] * delta;
    }
    __syncthreads();

    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PART_ROWS; i += 32) sum += outputs[lane + i] * outputs[lane + i];
    sum = warp_sum(sum);
    if (PARTS > 1) {
        cluster_share(squares, part, PARTS, sum);
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PARTS; i++) sum += squares[i];
    }
    // The cluster has read what this may overwrite.
    float *pair = rows + have * PAIR;
    if (part == 0 && tid < HEAD) {
        pair[tid] = conv[HEAD + tid] * k_scale;
        if (tid == 0) pair[2 * HEAD] = log;
    }
    if (tid < PART_ROWS) pair[HEAD + part * PART_ROWS + tid] = updates[tid];
    if (tid < PART_ROWS) {
        float y = outputs[tid] * rsqrtf(sum * (1.0f / HEAD) + shape.eps) * weight * silu(half_to_float(z));
        out[((u64)sequence.start * heads + head) * HEAD + part * PART_ROWS + tid] = float_to_half(y);
    }
}

KERNEL __launch_bounds__(128) delta_few(ARGUMENTS) { few_states<4>(PASS); }
// For one sequence: no clusters, which wait for places side by side and for each other. It has 512 threads; the bound is what
// leaves registers for the products' blocks before and behind it, with which it shares a multiprocessor.
KERNEL __launch_bounds__(640, 1) delta_one(ARGUMENTS) { few_states<1>(PASS); }

// Folds the pairs of every sequence that has some into its state, for kernels that know nothing of pairs. Grid (value_heads, sequences).
// The next kernel is not let in early: behind it stands one that reads states before it waits.
KERNEL __launch_bounds__(MAIN_THREADS) delta_settle(float *state, const float *pairs, const Sequence *sequences, int heads, int capacity) {
    wait_for_previous_kernel();
    Sequence sequence = sequences[blockIdx.y];
    if (sequence.slot < 0 || sequence.pending == 0) return;
    u64 at = (u64)sequence.slot * heads + blockIdx.x;
    int lane = threadIdx.x & 31, row = 4 * ROWS * (threadIdx.x >> 5) + (lane >> 3);
    fold((float4 *)(state + at * (HEAD * HEAD)), pairs + at * capacity * PAIR, sequence.pending,
         sequence.context == sequence.pending, row, lane & 7);
}
