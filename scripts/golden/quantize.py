"""Round-to-nearest int4 in the two published layouts, and the exact weights that the packed tensors stand for."""

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(nibbles):
    """[..., 8] integers in 0..15 -> int32, element i in bits 4i."""
    words = np.zeros(nibbles.shape[:-1], np.uint32)
    for i in range(8):
        words |= nibbles[..., i].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def awq(weight, group):
    """AutoAWQ GEMM of a float32 [N, K] matrix: tensors by suffix, and the weights they stand for."""
    n, k = weight.shape
    blocks = weight.reshape(n, k // group, group)
    low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    scales = np.maximum((high - low) / 15, 1e-5).astype(np.float16)
    s = scales.astype(np.float32)
    zeros = np.clip(np.round(-low / s), 0, 15)
    q = np.clip(np.round(blocks / s[..., None]) + zeros[..., None], 0, 15)
    dequantized = ((q - zeros[..., None]) * s[..., None]).astype(np.float32).reshape(n, k)
    by_column = lambda m: m.reshape(m.shape[0], n // 8, 8)[..., AWQ_ORDER]
    return {
        "qweight": pack(by_column(q.reshape(n, k).T)),
        "qzeros": pack(by_column(zeros.T)),
        "scales": np.ascontiguousarray(scales.T),
    }, dequantized


def compressed_tensors(weight, group, to_bfloat16):
    """compressed-tensors pack-quantized, symmetric. `to_bfloat16` rounds a float32 array to bfloat16 values."""
    n, k = weight.shape
    blocks = weight.reshape(n, k // group, group)
    scales = to_bfloat16(np.maximum(np.abs(blocks).max(-1) / 7.5, 1e-5).astype(np.float32))
    q = np.clip(np.round(blocks / scales[..., None]), -8, 7)
    dequantized = (q * scales[..., None]).astype(np.float32).reshape(n, k)
    return {
        "weight_packed": pack((q.reshape(n, k) + 8).reshape(n, k // 8, 8)),
        "weight_scale": scales,
        "weight_shape": np.array([n, k], np.int64),
    }, dequantized
