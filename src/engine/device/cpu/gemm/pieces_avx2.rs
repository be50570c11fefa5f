//! AVX2 functions of [`super::pieces`]: registers of eight rows by four columns; products of two columns are added up in 16 bits
//! for 32 columns (15 * 128 * 16 stays within them), then in 32.

use std::arch::x86_64::*;

use super::avx2::{GROUPS_AHEAD, group_ends, offset};
use super::pieces::Cut;
use super::{PREFETCH_BYTES, ROW_PANELS, Rows, RowsFn};

/// Blocks of eight columns whose products fit 16 bits.
const CHUNK_BLOCKS: usize = 4;

pub fn rows(cut: Cut, zero_points: bool, bf16_scales: bool) -> [RowsFn; ROW_PANELS] {
    match (zero_points, bf16_scales) {
        (false, false) => pick::<false, false>(cut),
        (false, true) => pick::<false, true>(cut),
        (true, false) => pick::<true, false>(cut),
        (true, true) => pick::<true, true>(cut),
    }
}

fn pick<const Z: bool, const B: bool>(cut: Cut) -> [RowsFn; ROW_PANELS] {
    match cut {
        Cut::Int16 => [int16_rows::<Z, B, 1>, int16_rows::<Z, B, 2>, int16_rows::<Z, B, 3>],
        Cut::F32 => [f32_rows::<Z, B, 1>, f32_rows::<Z, B, 2>, f32_rows::<Z, B, 3>],
    }
}

/// Asks for scales and zero points some groups after group `g`.
#[inline]
#[target_feature(enable = "avx2")]
fn prefetch_ends<const Z: bool>(scales: *const u8, zeros: *const u8, g: usize) {
    _mm_prefetch::<_MM_HINT_T0>(scales.wrapping_add((g + GROUPS_AHEAD) * 64).cast());
    if Z {
        _mm_prefetch::<_MM_HINT_T0>(zeros.wrapping_add((g + GROUPS_AHEAD) * 16).cast());
    }
}

/// `from` and the sums of q A and of q B in one group, of V registers of rows from `panel` on: P pieces, `stride` words a block.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn group_sums<const P: usize, const V: usize>(
    panel: *const u8,
    blocks: usize,
    x: *const i32,
    stride: usize,
    from: [__m256i; 2],
) -> [[__m256i; V]; 2] {
    let nibble = _mm256_set1_epi8(15);
    let (unit, upper) = (_mm256_set1_epi16(1), _mm256_set1_epi16(256));
    let mut wide = from.map(|from| [from; V]);
    let mut first = 0;
    while first < blocks {
        let end = blocks.min(first + CHUNK_BLOCKS);
        let mut sums = [[_mm256_setzero_si256(); V]; P];
        for block in first..end {
            // SAFETY: a group's blocks of 128 bytes and of words of x; prefetches never fault.
            unsafe {
                let at = panel.add(128 * block);
                for line in 0..V.div_ceil(2) {
                    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(PREFETCH_BYTES + 64 * line).cast());
                }
                let x = x.add(stride * block);
                for v in 0..V {
                    let words = _mm256_loadu_si256(at.add(32 * v).cast());
                    let low = _mm256_and_si256(words, nibble);
                    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(words), nibble);
                    for (p, sums) in sums.iter_mut().enumerate() {
                        let low = _mm256_maddubs_epi16(low, _mm256_set1_epi32(*x.add(p)));
                        let high = _mm256_maddubs_epi16(high, _mm256_set1_epi32(*x.add(stride / 2 + p)));
                        sums[v] = _mm256_add_epi16(sums[v], _mm256_add_epi16(low, high));
                    }
                }
            }
        }
        for v in 0..V {
            // The upper byte counts 256 times.
            for (half, wide) in wide.iter_mut().enumerate().take(P.div_ceil(2)) {
                let last = 2 * half + 1 == P;
                let first = _mm256_madd_epi16(sums[2 * half][v], if last { unit } else { upper });
                wide[v] = _mm256_add_epi32(wide[v], first);
                if !last {
                    wide[v] = _mm256_add_epi32(wide[v], _mm256_madd_epi16(sums[2 * half + 1][v], unit));
                }
            }
        }
        first = end;
    }
    wide
}

/// N panels one after the other: one stream, prefetched far ahead, also its scales and zero points. (Three panels side by side,
/// 256 bytes ahead, read a quarter less.)
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn int16_rows<const Z: bool, const B: bool, const N: usize>(rows: &Rows) {
    let blocks = rows.group / 8;
    for n in 0..N {
        let (panel, scales, zeros) = (rows.panels[n], rows.scales[n], rows.zeros[n]);
        let mut totals = [_mm256_setzero_ps(); 4];
        // SAFETY: the contract of `RowsFn` covers every access below; prefetches never fault.
        unsafe {
            for g in 0..rows.cols / rows.group {
                prefetch_ends::<Z>(scales, zeros, g);
                let x = rows.x.cast::<i32>().add(g * rows.group / 2);
                let [sums, _] = group_sums::<2, 4>(
                    panel.add(128 * blocks * g),
                    blocks,
                    x,
                    4,
                    [_mm256_setzero_si256(); 2],
                );
                let x_sum = _mm256_set1_epi32(*rows.x_sums.add(g));
                let x_scale = _mm256_set1_ps(*rows.x_scales.add(g));
                for v in 0..4 {
                    let (zero, scale) = group_ends::<Z, B>(zeros.wrapping_add(16 * g), scales.add(64 * g), v);
                    let exact = _mm256_sub_epi32(sums[v], _mm256_mullo_epi32(zero, x_sum));
                    let scale = _mm256_mul_ps(scale, x_scale);
                    totals[v] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(exact), totals[v]);
                }
            }
            for (v, total) in totals.iter().enumerate() {
                _mm256_storeu_ps(rows.out.add(32 * n + 8 * v), *total);
            }
        }
    }
}

/// As [`int16_rows`]; half a panel at a time, as the sums of three pieces leave no more registers.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn f32_rows<const Z: bool, const B: bool, const N: usize>(rows: &Rows) {
    let blocks = rows.group / 8;
    for n in 0..N {
        let (panel, scales, zeros) = (rows.panels[n], rows.scales[n], rows.zeros[n]);
        let mut totals = [_mm256_setzero_ps(); 4];
        // SAFETY: as in `int16_rows`.
        unsafe {
            for g in 0..rows.cols / rows.group {
                prefetch_ends::<Z>(scales, zeros, g);
                let x = rows.x.cast::<i32>().add(g * rows.group);
                let [x_scale, lower, x_total] = [0, 1, 2].map(|i| *rows.x_scales.add(3 * g + i));
                let x_sums = [0, 1].map(|part| _mm256_set1_epi32(*rows.x_sums.add(2 * g + part)));
                for half in 0..2 {
                    let at = panel.add(128 * blocks * g + 64 * half);
                    let sums = if lower == 1.0 / 256.0 {
                        group_sums::<3, 2>(at, blocks, x, 8, x_sums)
                    } else {
                        group_sums::<4, 2>(at, blocks, x, 8, x_sums)
                    };
                    for v in 0..2 {
                        let (zero, scale) =
                            group_ends::<Z, B>(zeros.wrapping_add(16 * g), scales.add(64 * g), 2 * half + v);
                        let exact = sums.map(|sums| _mm256_cvtepi32_ps(sums[v]));
                        let part = _mm256_fmadd_ps(exact[1], _mm256_set1_ps(lower), exact[0]);
                        let mut part = _mm256_mul_ps(part, _mm256_set1_ps(x_scale));
                        if Z {
                            part = _mm256_fmadd_ps(offset(zero), _mm256_set1_ps(x_total), part);
                        }
                        totals[2 * half + v] = _mm256_fmadd_ps(scale, part, totals[2 * half + v]);
                    }
                }
            }
            for (v, total) in totals.iter().enumerate() {
                _mm256_storeu_ps(rows.out.add(32 * n + 8 * v), *total);
            }
        }
    }
}
