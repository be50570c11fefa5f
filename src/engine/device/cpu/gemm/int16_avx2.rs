//! AVX2 functions of [`super::int16`]: registers of eight rows; a word's nibbles are pairs of columns once shifted and masked.

use std::arch::x86_64::*;

use super::avx2::group_ends;
use super::{Tile, TileFn, settle};

pub fn tile(zero_points: bool, bf16_scales: bool, tokens: usize) -> TileFn {
    match (zero_points, bf16_scales) {
        (false, false) => pick::<false, false>(tokens),
        (false, true) => pick::<false, true>(tokens),
        (true, false) => pick::<true, false>(tokens),
        (true, true) => pick::<true, true>(tokens),
    }
}

fn pick<const Z: bool, const B: bool>(tokens: usize) -> TileFn {
    [
        tokens_tile::<Z, B, 1, 4>,
        tokens_tile::<Z, B, 2, 2>,
        tokens_tile::<Z, B, 3, 2>,
        tokens_tile::<Z, B, 4, 2>,
    ][tokens - 1]
}

/// total = (scale * x_scale) * (part - zero * x_sum) + total
#[inline]
#[target_feature(enable = "avx2,fma")]
fn add_group(
    (zero, scale): (__m256i, __m256),
    (x_scale, x_sum): (f32, i32),
    part: __m256i,
    total: __m256,
) -> __m256 {
    let exact = _mm256_sub_epi32(part, _mm256_mullo_epi32(zero, _mm256_set1_epi32(x_sum)));
    let scale = _mm256_mul_ps(scale, _mm256_set1_ps(x_scale));
    _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(exact), total)
}

/// Columns 2j and 2j + 1 of the eight in each word.
#[inline]
#[target_feature(enable = "avx2")]
fn pair<const SHIFT: i32>(words: __m256i) -> __m256i {
    _mm256_and_si256(_mm256_srli_epi32::<SHIFT>(words), _mm256_set1_epi32(0x000f_000f))
}

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn add_pairs<const T: usize, const V: usize, const SHIFT: i32>(
    parts: &mut [[__m256i; V]; T],
    words: &mut [__m256i; V],
    x: &mut *const i32,
) {
    let pairs = words.map(|words| pair::<SHIFT>(words));
    for (t, part) in parts.iter_mut().enumerate() {
        // SAFETY: T pairs of activations are readable there, by the contract of `TileFn`.
        let x = _mm256_set1_epi32(unsafe { *x.add(SHIFT as usize / 4 * T + t) });
        for (part, pair) in part.iter_mut().zip(pairs) {
            *part = _mm256_add_epi32(*part, _mm256_madd_epi16(pair, x));
        }
    }
    for part in parts {
        settle::integers(part, x);
    }
    settle::integers(words, x);
}

/// V registers of eight rows at a time: 4 is a whole panel, 2 is half of one.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tokens_tile<const Z: bool, const B: bool, const T: usize, const V: usize>(tile: &Tile) {
    let blocks = tile.group / 8;
    let passes = 4 / V;
    // The next panel comes in while this one is worked on, at an even pace.
    let pace = tile.next.1.div_ceil((passes * tile.cols / 8).max(1));
    for pass in 0..passes {
        let next = tile.next.0.wrapping_add(pass * tile.cols / 8 * pace);
        // SAFETY: the contract of `TileFn` covers every access below; prefetches never fault.
        unsafe {
            let mut totals = [[_mm256_setzero_ps(); V]; T];
            for g in 0..tile.cols / tile.group {
                let mut parts = [[_mm256_setzero_si256(); V]; T];
                for block in g * blocks..(g + 1) * blocks {
                    _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(block * pace).cast());
                    let mut words = [_mm256_setzero_si256(); V];
                    for (v, words) in words.iter_mut().enumerate() {
                        let v = pass * V + v;
                        let half = if v < 2 { tile.w0 } else { tile.w1 };
                        *words = _mm256_loadu_si256(half.add(block * tile.stride + 32 * (v % 2)).cast());
                    }
                    let mut x = tile.x.cast::<i32>().add(4 * block * T);
                    add_pairs::<T, V, 0>(&mut parts, &mut words, &mut x);
                    add_pairs::<T, V, 4>(&mut parts, &mut words, &mut x);
                    add_pairs::<T, V, 8>(&mut parts, &mut words, &mut x);
                    add_pairs::<T, V, 12>(&mut parts, &mut words, &mut x);
                }
                for v in 0..V {
                    let ends = group_ends::<Z, B>(
                        tile.zeros.wrapping_add(16 * g),
                        tile.scales.add(64 * g),
                        pass * V + v,
                    );
                    for t in 0..T {
                        let at = g * T + t;
                        let x_ends = (*tile.x_scales.add(at), *tile.x_sums.add(at));
                        totals[t][v] = add_group(ends, x_ends, parts[t][v], totals[t][v]);
                    }
                }
            }
            for (t, totals) in totals.iter().enumerate() {
                for (v, total) in totals.iter().enumerate() {
                    _mm256_storeu_ps(tile.out.add(t * tile.out_stride + 8 * (pass * V + v)), *total);
                }
            }
        }
    }
}

/// Sums of a round of [`rounds`].
pub const ROUND_SUMS: usize = 12;

/// Independent products of pairs and their sums in registers.
#[target_feature(enable = "avx2")]
pub unsafe fn rounds(rounds: usize) -> f32 {
    let mut sums = [_mm256_setzero_si256(); ROUND_SUMS];
    for (i, sum) in sums.iter_mut().enumerate() {
        *sum = _mm256_set1_epi32(std::hint::black_box(i as i32));
    }
    let factor = _mm256_set1_epi16(std::hint::black_box(3));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(*sum, factor));
        }
    }
    let total = sums.iter().fold(_mm256_setzero_si256(), |total, sum| _mm256_add_epi32(total, *sum));
    _mm256_cvtss_f32(_mm256_cvtepi32_ps(total))
}
