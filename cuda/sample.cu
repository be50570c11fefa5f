// From logits to tokens, on the device, so that the next step can be queued before the host has seen them.
//
// logits [rows, pitch] fp32; rows of the vocabulary at or beyond `vocab` are padding. A sampled token goes to `ring` (device
// memory, read by a later step's embedding) and to `host` (page-locked memory, read after the step's event). The meaning
// is that of engine/sampling.rs: temperature, then the top_k largest (equal ones: the lower id first), then the smallest
// set of the most likely whose weight reaches top_p; kept tokens lie end to end in order of id and the draw picks one.
// Weights are summed as 40-bit fixed point, so that no order of summation can change a token.
// Bytes: 4 a logit for each pass; greedy takes one pass (none where the head's product leaves
// keys: `sample_keys`), sampling one, and four each for top_k and top_p.
#include "best.cuh"
#include "step.cuh"

struct Sample {
    float inverse_temperature; // 0: greedy
    float top_p;
    u32 top_k; // 0: all
    u32 unused;
    u64 seed, position;
};

#define TOKEN_NOT_FINITE 0xffffffffu

DEVICE u64 block_max(u64 key, u64 *scratch) {
    key = warp_best(key);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    if (lane == 0) scratch[warp] = key;
    __syncthreads();
    return warp_best(lane < warps ? scratch[lane] : 0);
}

// Best of a stretch of logits (begin a multiple of 4). Rows of a vocabulary that is no multiple of four may lie anywhere.
DEVICE u64 best_of(const float *logits, int begin, int end) {
    Best best = no_best();
    bool aligned = ((u64)logits & 15) == 0;
    int at = begin + 4 * threadIdx.x;
#pragma unroll 4
    for (; at + 4 <= end; at += 4 * blockDim.x) {
        float4 x = aligned ? *(const float4 *)(logits + at)
                           : make_float4(logits[at], logits[at + 1], logits[at + 2], logits[at + 3]);
        take(best, x.x, at), take(best, x.y, at + 1), take(best, x.z, at + 2), take(best, x.w, at + 3);
    }
    for (int id = at; id < end && id < at + 4; id++) take(best, logits[id], id);
    return best_key(best);
}

DEVICE void put_token(u64 key, u32 row, const Header *header, u32 *ring, u32 *host) {
    u32 token = key == ~0ull ? TOKEN_NOT_FINITE : key_id(key), at = header->ring_offset + row;
    ring[at] = token == TOKEN_NOT_FINITE ? 0 : token;
    host[at] = token;
}

// Greedy rows whose keys the head's product has found: one thread a row. `keys` ends at zero, for the next step.
KERNEL sample_keys(u64 *keys, int rows, const Header *header, u32 *ring, u32 *host) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    put_token(keys[row], row, header, ring, host);
    keys[row] = 0;
}

// Greedy rows: grid (parts, rows). Each block takes a stretch; the last one to finish writes the token.
// `keys` [rows] and `counters` [rows] start and end at zero.
KERNEL sample_greedy(const float *logits, u64 pitch, int vocab, u64 *keys, u32 *counters, const Header *header, u32 *ring,
                     u32 *host) {
    __shared__ u64 scratch[32];
    wait_for_previous_kernel();
    let_next_kernel_start();
    u32 row = blockIdx.y;
    int stretch = ((vocab + gridDim.x - 1) / gridDim.x + 3) & ~3;
    int begin = min(vocab, (int)blockIdx.x * stretch), end = min(vocab, begin + stretch);
    u64 key = block_max(best_of(logits + row * pitch, begin, end), scratch);
    if (threadIdx.x != 0) return;
    atomicMax(&keys[row], key);
    __threadfence();
    if (atomicAdd(&counters[row], 1) != gridDim.x - 1) return;
    __threadfence();
    key = atomicExch(&keys[row], 0ull);
    counters[row] = 0;
    put_token(key, row, header, ring, host);
}

// ---- temperature, top-k, top-p ----

DEVICE u64 mix64(u64 word) {
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ull;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebull;
    return word ^ (word >> 31);
}

DEVICE float draw_uniform(u64 seed, u64 position) {
    const u64 golden = 0x9e3779b97f4a7c15ull;
    return (float)(mix64(mix64(seed + golden) + (position + 1) * golden) >> 40) * (1.0f / 16777216.0f);
}

// What is kept: logits whose ordered bits are above `bits`, and those equal to it with an id up to `last_id`.
struct Cut {
    u32 bits, last_id;
};

DEVICE bool keeps(Cut cut, u32 bits, u32 id) { return bits > cut.bits || (bits == cut.bits && id <= cut.last_id); }

struct SampleShared {
    u64 bins[256];
    u64 scratch[32];
    u64 rest;
    u32 prefix, id;
};

// Finds the cut at which the sum of `measure` over kept tokens, the largest logits first, reaches `enough`: eight bits of the
// ordered logit at a time, then in order of id among equal ones.
template <class Measure>
DEVICE Cut find_cut(const float *row, int vocab, Cut within, u64 enough, Measure measure, SampleShared &shared) {
    int tid = threadIdx.x;
    u32 prefix = 0;
    u64 rest = enough;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = tid; i < 256; i += blockDim.x) shared.bins[i] = 0;
        __syncthreads();
        u32 mask = shift == 24 ? 0 : 0xffffffffu << (shift + 8);
        for (int id = tid; id < vocab; id += blockDim.x) {
            u32 bits = ordered(row[id]);
            if ((bits & mask) == (prefix & mask) && keeps(within, bits, id)) {
                u64 amount = measure(row[id]);
                if (amount) atomicAdd(&shared.bins[bits >> shift & 255], amount);
            }
        }
        __syncthreads();
        if (tid == 0) {
            int bin = 255;
            for (; bin > 0 && shared.bins[bin] < rest; bin--) rest -= shared.bins[bin];
            shared.prefix = prefix | (u32)bin << shift;
            shared.rest = rest;
        }
        __syncthreads();
        prefix = shared.prefix, rest = shared.rest;
    }
    // Equal logits weigh the same: so many of them, the lowest ids first.
    if (tid == 0) shared.id = 0xffffffffu;
    __syncthreads();
    if (tid < 32) {
        u64 needed = rest;
        for (int base = 0; base < vocab; base += 32) {
            int id = base + tid;
            bool equal = id < vocab && ordered(row[id]) == prefix && keeps(within, prefix, id);
            u32 votes = __ballot_sync(0xffffffffu, equal);
            if (!votes) continue;
            u64 each = measure(row[base + __ffs(votes) - 1]);
            u64 before = (u64)__popc(votes & ((1u << tid) - 1)) * each;
            bool reached = equal && before + each >= needed;
            u32 done = __ballot_sync(0xffffffffu, reached);
            if (done) {
                if (tid == 0) shared.id = base + __ffs(done) - 1;
                break;
            }
            needed -= (u64)__popc(votes) * each;
        }
    }
    __syncthreads();
    Cut cut = {prefix, shared.id};
    __syncthreads();
    return cut;
}

// One block of 1024 threads a row; greedy rows are done here too, so that a mixed batch needs one launch.
KERNEL __launch_bounds__(1024) sample_rows(const float *logits, u64 pitch, int vocab, const Sample *samples,
                                           const Header *header, u32 *ring, u32 *host) {
    __shared__ SampleShared shared;
    wait_for_previous_kernel();
    let_next_kernel_start();
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const float *row = logits + blockIdx.x * pitch;
    Sample sample = samples[blockIdx.x];
    u64 key = block_max(best_of(row, 0, vocab), shared.scratch);
    u32 at = header->ring_offset + blockIdx.x;
    u32 token = key_id(key);
    if (key == ~0ull || sample.inverse_temperature == 0.0f || sample.top_k == 1) {
        if (tid == 0) put_token(key, blockIdx.x, header, ring, host);
        return;
    }
    float largest = row[token], inverse_temperature = sample.inverse_temperature;
    auto weight = [&](float logit) {
        return (u64)(expf((logit - largest) * inverse_temperature) * 1099511627776.0f); // 2^40
    };
    Cut cut = {0, 0xffffffffu};
    if (sample.top_k > 0 && sample.top_k < (u32)vocab)
        cut = find_cut(row, vocab, cut, sample.top_k, [](float) { return 1ull; }, shared);

    // Sum of the kept weights, and each warp's own: a warp takes one stretch of ids.
    int stretch = (vocab + 31) / 32, begin = min(vocab, warp * stretch), end = min(vocab, begin + stretch);
    auto kept_sum = [&]() {
        u64 sum = 0;
        for (int id = begin + lane; id < end; id += 32)
            if (keeps(cut, ordered(row[id]), id)) sum += weight(row[id]);
#pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        __syncthreads();
        if (lane == 0) shared.scratch[warp] = sum;
        __syncthreads();
        u64 total = 0;
        for (int w = 0; w < 32; w++) total += shared.scratch[w];
        return total;
    };
    u64 total = kept_sum();
    if (sample.top_p < 1.0f) {
        u64 enough = max((u64)((double)total * sample.top_p), (u64)1);
        cut = find_cut(row, vocab, cut, enough, weight, shared);
        total = kept_sum();
    }
    u64 target = (u64)((double)draw_uniform(sample.seed, sample.position) * (double)total), before = 0;
    int chosen = 0;
    while (chosen < 31 && before + shared.scratch[chosen] <= target) before += shared.scratch[chosen++];
    if (warp != chosen) return;
    u32 last = token; // the last with any weight, should rounding fall short of the target
    for (int base = begin; base < end; base += 32) {
        int id = base + lane;
        u64 own = id < end && keeps(cut, ordered(row[id]), id) ? weight(row[id]) : 0, sum = own;
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) {
            u64 left = __shfl_up_sync(0xffffffffu, sum, offset);
            if (lane >= offset) sum += left;
        }
        u32 done = __ballot_sync(0xffffffffu, own > 0 && before + sum > target);
        u32 any = __ballot_sync(0xffffffffu, own > 0);
        if (any) last = base + 31 - __clz(any);
        if (done) {
            last = base + __ffs(done) - 1;
            break;
        }
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) ring[at] = last, host[at] = last;
}

// ---- log probability of given tokens ----

// result[row] = ln softmax(logits[row])[targets[row]]; NaN where a logit is not finite. One block of 1024 a row.
KERNEL __launch_bounds__(1024) log_probability(const float *logits, u64 pitch, int vocab, const u32 *targets,
                                               float *result) {
    __shared__ u64 keys[32];
    __shared__ double sums[32];
    wait_for_previous_kernel();
    let_next_kernel_start();
    const float *row = logits + blockIdx.x * pitch;
    u64 key = block_max(best_of(row, 0, vocab), keys);
    if (key == ~0ull) {
        if (threadIdx.x == 0) result[blockIdx.x] = __uint_as_float(0x7fc00000u);
        return;
    }
    float largest = row[key_id(key)];
    double sum = 0.0;
    for (int id = threadIdx.x; id < vocab; id += blockDim.x) sum += (double)expf(row[id] - largest);
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0.0;
        for (u32 w = 0; w < blockDim.x / 32; w++) total += sums[w];
        result[blockIdx.x] = (float)((double)row[targets[blockIdx.x]] - largest - log(total));
    }
}
