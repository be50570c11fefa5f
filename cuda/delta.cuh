// What the decode kernels of the gated delta net share (delta.cu has the equations, delta_stream.cu the form with pairs).
#pragma once
#include "step.cuh"

struct Shape {
    int key_heads, value_heads, pitch, ring;
    float eps;
};

DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

DEVICE float dot4(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
