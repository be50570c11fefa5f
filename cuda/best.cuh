// The largest of some logits and where it is, as one 64-bit key that atomics and shuffles can compare: the larger value, of equal
// values the lower id. Logits that are not finite make the key all ones; 0 is less than any key.
#pragma once
#include "half.cuh"

DEVICE u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE u64 best_key(float value, u32 id) { return ((u64)ordered(value) << 32) | (u32)~id; }
DEVICE u32 key_id(u64 key) { return ~(u32)key; }

// Of what one thread has seen, ids in ascending order, so that of equal logits the first stays.
struct Best {
    float value;
    u32 id, magnitude;
};

DEVICE Best no_best() { return {__uint_as_float(0xff800000u), 0, 0}; } // -infinity

DEVICE void take(Best &best, float value, u32 id) {
    best.magnitude = max(best.magnitude, __float_as_uint(value) & 0x7fffffffu);
    if (value > best.value) best.value = value, best.id = id;
}

DEVICE u64 best_key(const Best &best) {
    if (best.magnitude >= 0x7f800000u) return ~0ull;
    return best.value == __uint_as_float(0xff800000u) ? 0 : best_key(best.value + 0.0f, best.id);
}

// Over the lanes of a warp that differ in the bits below `lanes`.
DEVICE u64 warp_best(u64 key, int lanes = 32) {
#pragma unroll
    for (int offset = lanes / 2; offset > 0; offset >>= 1) key = max(key, __shfl_xor_sync(0xffffffffu, key, offset));
    return key;
}
