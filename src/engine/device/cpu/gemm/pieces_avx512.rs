//! AVX-512 functions of [`super::pieces`]: registers of 16 rows by four columns; one instruction multiplies four columns and adds
//! them to a 32-bit sum (AVX512-VNNI).

use std::arch::x86_64::*;

use super::avx2::GROUPS_AHEAD;
use super::avx512::{load, prefetch_pair};
use super::{PREFETCH_BYTES, ROW_PANELS, Rows, RowsFn};
use crate::engine::device::cpu::pool::prefetch_line;

pub fn rows(zero_points: bool, bf16_scales: bool) -> [RowsFn; ROW_PANELS] {
    match (zero_points, bf16_scales) {
        (false, false) => {
            [f32_rows::<false, false, 1>, f32_rows::<false, false, 2>, f32_rows::<false, false, 3>]
        }
        (false, true) => [f32_rows::<false, true, 1>, f32_rows::<false, true, 2>, f32_rows::<false, true, 3>],
        (true, false) => [f32_rows::<true, false, 1>, f32_rows::<true, false, 2>, f32_rows::<true, false, 3>],
        (true, true) => [f32_rows::<true, true, 1>, f32_rows::<true, true, 2>, f32_rows::<true, true, 3>],
    }
}

/// `from` and the sums of q A and of q B in one group of a panel, of P pieces: [A, B][half of the panel].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn group_sums<const P: usize>(
    panel: *const u8,
    blocks: usize,
    x: *const i32,
    far: usize,
    from: [__m512i; 2],
) -> [[__m512i; 2]; 2] {
    let nibble = _mm512_set1_epi8(15);
    // Of low and high nibbles apart: a sum is not waited for by the next instruction.
    let mut sums = [[[_mm512_setzero_si512(); 2]; 2]; P];
    for block in 0..blocks {
        // SAFETY: a group's blocks of 128 bytes and of eight words of x; prefetches never fault.
        unsafe {
            let at = panel.add(128 * block);
            prefetch_pair(at.wrapping_add(PREFETCH_BYTES), far);
            let x = x.add(8 * block);
            for half in 0..2 {
                let words = _mm512_loadu_si512(at.add(64 * half).cast());
                let low = _mm512_and_si512(words, nibble);
                let high = _mm512_and_si512(_mm512_srli_epi16::<4>(words), nibble);
                for (p, sums) in sums.iter_mut().enumerate() {
                    let sums = &mut sums[half];
                    sums[0] = _mm512_dpbusd_epi32(sums[0], low, _mm512_set1_epi32(*x.add(p)));
                    sums[1] = _mm512_dpbusd_epi32(sums[1], high, _mm512_set1_epi32(*x.add(4 + p)));
                }
            }
        }
    }
    let mut joined = from.map(|from| [from; 2]);
    for (p, sums) in sums.iter().enumerate() {
        for (half, sums) in sums.iter().enumerate() {
            let sum = _mm512_add_epi32(sums[0], sums[1]);
            // The upper byte counts 256 times.
            let upper = p % 2 == 0 && p + 1 < P;
            let sum = if upper { _mm512_slli_epi32::<8>(sum) } else { sum };
            joined[p / 2][half] = _mm512_add_epi32(joined[p / 2][half], sum);
        }
    }
    joined
}

/// N panels one after the other.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn f32_rows<const Z: bool, const B: bool, const N: usize>(rows: &Rows) {
    let blocks = rows.group / 8;
    for n in 0..N {
        let (panel, scales, zeros) = (rows.panels[n], rows.scales[n], rows.zeros[n]);
        let mut totals = [_mm512_setzero_ps(); 2];
        // SAFETY: the contract of `RowsFn` covers every access below; prefetches never fault.
        unsafe {
            for g in 0..rows.cols / rows.group {
                // Each is a stream of its own, too thin for the hardware to keep up with.
                prefetch_line(scales.wrapping_add(64 * (g + GROUPS_AHEAD)));
                if Z {
                    prefetch_line(zeros.wrapping_add(16 * (g + GROUPS_AHEAD)));
                }
                let [x_scale, lower, x_total] = [0, 1, 2].map(|i| *rows.x_scales.add(3 * g + i));
                let x_sums = [0, 1].map(|part| _mm512_set1_epi32(*rows.x_sums.add(2 * g + part)));
                let (at, x) = (panel.add(128 * blocks * g), rows.x.cast::<i32>().add(g * rows.group));
                let sums = if lower == 1.0 / 256.0 {
                    group_sums::<3>(at, blocks, x, rows.far, x_sums)
                } else {
                    group_sums::<4>(at, blocks, x, rows.far, x_sums)
                };
                // 8 - zero
                let mut offsets = [_mm512_setzero_ps(); 2];
                if Z {
                    let pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(zeros.add(16 * g).cast()));
                    let zeros =
                        [_mm512_and_si512(pairs, _mm512_set1_epi32(15)), _mm512_srli_epi32::<4>(pairs)];
                    let eight = _mm512_set1_epi32(8);
                    offsets = zeros.map(|zeros| _mm512_cvtepi32_ps(_mm512_sub_epi32(eight, zeros)));
                }
                for half in 0..2 {
                    let exact = sums.map(|sums| _mm512_cvtepi32_ps(sums[half]));
                    let part = _mm512_fmadd_ps(exact[1], _mm512_set1_ps(lower), exact[0]);
                    let mut part = _mm512_mul_ps(part, _mm512_set1_ps(x_scale));
                    if Z {
                        part = _mm512_fmadd_ps(offsets[half], _mm512_set1_ps(x_total), part);
                    }
                    let at = scales.add(64 * g + 32 * half);
                    let scale = if B { load::<2>(at) } else { load::<1>(at) };
                    totals[half] = _mm512_fmadd_ps(scale, part, totals[half]);
                }
            }
            _mm512_storeu_ps(rows.out.add(32 * n), totals[0]);
            _mm512_storeu_ps(rows.out.add(32 * n + 16), totals[1]);
        }
    }
}
