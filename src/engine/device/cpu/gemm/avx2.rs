//! AVX2 tiles: registers of 8 rows, up to six tokens. One or two tokens take all 32 rows at once; more take 16 rows at a
//! time (12 sums fit the 16 registers), the second half of a panel then comes from the L1.

use std::arch::x86_64::*;

use super::{Element, ROW_PANELS, Rows, RowsFn, Tile, TileFn};

pub fn dense(element: Element, tokens: usize) -> TileFn {
    match element {
        Element::F32 => pick::<0>(tokens),
        Element::F16 => pick::<1>(tokens),
        Element::Bf16 => pick::<2>(tokens),
        Element::Bf16Pairs => pick::<3>(tokens),
    }
}

fn pick<const E: u8>(tokens: usize) -> TileFn {
    [
        dense_tile::<E, 1, 4>,
        dense_tile::<E, 2, 4>,
        dense_tile::<E, 3, 2>,
        dense_tile::<E, 4, 2>,
        dense_tile::<E, 5, 2>,
        dense_tile::<E, 6, 2>,
    ][tokens - 1]
}

/// One token, 1 to 3 panels.
pub fn rows_of(element: Element) -> [RowsFn; ROW_PANELS] {
    match element {
        Element::F32 => [rows::<0, 1>, rows::<0, 2>, rows::<0, 3>],
        Element::F16 => [rows::<1, 1>, rows::<1, 2>, rows::<1, 3>],
        Element::Bf16 => [rows::<2, 1>, rows::<2, 2>, rows::<2, 3>],
        Element::Bf16Pairs => [rows::<3, 1>, rows::<3, 2>, rows::<3, 3>],
    }
}

pub fn int4(zero_points: bool, bf16_scales: bool, tokens: usize) -> TileFn {
    match (zero_points, bf16_scales) {
        (false, false) => pick_int4::<false, false>(tokens),
        (false, true) => pick_int4::<false, true>(tokens),
        (true, false) => pick_int4::<true, false>(tokens),
        (true, true) => pick_int4::<true, true>(tokens),
    }
}

fn pick_int4<const Z: bool, const B: bool>(tokens: usize) -> TileFn {
    [
        int4_tile::<Z, B, 1>,
        int4_tile::<Z, B, 2>,
        int4_tile::<Z, B, 3>,
        int4_tile::<Z, B, 4>,
        int4_tile::<Z, B, 5>,
        int4_tile::<Z, B, 6>,
    ][tokens - 1]
}

/// Eight elements of one column, widened.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub unsafe fn load<const E: u8>(at: *const u8) -> __m256 {
    // SAFETY: eight elements are readable at `at`, by the contract of `TileFn`.
    unsafe {
        match E {
            0 => _mm256_loadu_ps(at.cast()),
            1 => _mm256_cvtph_ps(_mm_loadu_si128(at.cast())),
            _ => {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_column<const T: usize, const V: usize>(
    sums: &mut [[__m256; V]; T],
    weights: &[__m256; V],
    x: *const f32,
) {
    for (t, sum) in sums.iter_mut().enumerate() {
        // SAFETY: T activations are readable at `x`, by the contract of `TileFn`.
        let x = _mm256_set1_ps(unsafe { *x.add(t) });
        for (sum, weight) in sum.iter_mut().zip(weights) {
            *sum = _mm256_fmadd_ps(*weight, x, *sum);
        }
    }
}

/// V registers of 8 rows at a time: 4 is a whole panel, 2 is half of one.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dense_tile<const E: u8, const T: usize, const V: usize>(tile: &Tile) {
    let size = if E == 0 { 4 } else { 2 };
    // The next panel comes in while this one is worked on, at an even pace: prefetches in a row are dropped.
    let passes = 4 / V;
    let steps = if E == 3 { tile.cols.div_ceil(2) } else { tile.cols };
    let pace = tile.next.1.div_ceil((passes * steps).max(1));
    for pass in 0..passes {
        let next = tile.next.0.wrapping_add(pass * steps * pace);
        // SAFETY: the contract of `TileFn` covers every access below.
        unsafe {
            let out = tile.out.add(pass * 8 * V);
            let mut sums = [[_mm256_setzero_ps(); V]; T];
            if tile.accumulate {
                for (t, sum) in sums.iter_mut().enumerate() {
                    for (v, sum) in sum.iter_mut().enumerate() {
                        *sum = _mm256_loadu_ps(out.add(t * tile.out_stride + 8 * v));
                    }
                }
            }
            // Register v of this pass holds rows 8 * (pass * V + v)..: of the first half of the panel, or the second.
            let half = |v: usize| if pass * V + v < 2 { tile.w0 } else { tile.w1 };
            let within = |v: usize| (pass * V + v) % 2;
            let mut weights = [_mm256_setzero_ps(); V];
            if E == 3 {
                let odd = _mm256_set1_epi32(0xffff_0000_u32 as i32);
                let mut words = [_mm256_setzero_si256(); V];
                for k in 0..steps {
                    _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(k * pace).cast());
                    for v in 0..V {
                        words[v] = _mm256_loadu_si256(half(v).add(k * tile.stride + 32 * within(v)).cast());
                        weights[v] = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words[v]));
                    }
                    add_column(&mut sums, &weights, tile.x.add(2 * k * T));
                    for v in 0..V {
                        weights[v] = _mm256_castsi256_ps(_mm256_and_si256(words[v], odd));
                    }
                    add_column(&mut sums, &weights, tile.x.add((2 * k + 1) * T));
                }
            } else {
                for k in 0..steps {
                    _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(k * pace).cast());
                    for (v, weight) in weights.iter_mut().enumerate() {
                        *weight = load::<E>(half(v).add(k * tile.stride + 8 * size * within(v)));
                    }
                    add_column(&mut sums, &weights, tile.x.add(k * T));
                }
            }
            for (t, sum) in sums.iter().enumerate() {
                for (v, sum) in sum.iter().enumerate() {
                    _mm256_storeu_ps(out.add(t * tile.out_stride + 8 * v), *sum);
                }
            }
        }
    }
}

/// One token times N panels side by side, each a stream of its own, which the hardware finds.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rows<const E: u8, const N: usize>(rows: &Rows) {
    // SAFETY: the contract of `RowsFn` covers every access below.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); 4]; N];
        if E == 3 {
            let odd = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            for k in 0..rows.cols.div_ceil(2) {
                let even_x = _mm256_set1_ps(*rows.x.add(2 * k));
                let odd_x = _mm256_set1_ps(*rows.x.add(2 * k + 1));
                for (sums, panel) in sums.iter_mut().zip(&rows.panels) {
                    for (v, sum) in sums.iter_mut().enumerate() {
                        let words = _mm256_loadu_si256(panel.add(128 * k + 32 * v).cast());
                        let even = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words));
                        let odd = _mm256_castsi256_ps(_mm256_and_si256(words, odd));
                        *sum = _mm256_fmadd_ps(odd, odd_x, _mm256_fmadd_ps(even, even_x, *sum));
                    }
                }
            }
        } else {
            let size = if E == 0 { 4 } else { 2 };
            for k in 0..rows.cols {
                let x = _mm256_set1_ps(*rows.x.add(k));
                for (sums, panel) in sums.iter_mut().zip(&rows.panels) {
                    // A few columns ahead: further the hardware is faster.
                    _mm_prefetch::<_MM_HINT_T0>(panel.wrapping_add((32 * k + 128) * size).cast());
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = _mm256_fmadd_ps(load::<E>(panel.add((32 * k + 8 * v) * size)), x, *sum);
                    }
                }
            }
        }
        for (n, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                _mm256_storeu_ps(rows.out.add(32 * n + 8 * v), *sum);
            }
        }
    }
}

/// The zero points and weight scales of rows 8v to 8v + 7 of a panel in one group.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub unsafe fn group_ends<const Z: bool, const B: bool>(
    zeros: *const u8,
    scales: *const u8,
    v: usize,
) -> (__m256i, __m256) {
    // SAFETY: a group has 16 bytes of zero points and 32 scales of 16 bits, by the contract of `TileFn`.
    unsafe {
        let zero = if Z {
            let pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64(zeros.add(8 * (v % 2)).cast()));
            let low = _mm256_and_si256(pairs, _mm256_set1_epi32(15));
            if v < 2 { low } else { _mm256_srli_epi32::<4>(pairs) }
        } else {
            _mm256_set1_epi32(8)
        };
        let scale = if B { load::<2>(scales.add(16 * v)) } else { load::<1>(scales.add(16 * v)) };
        (zero, scale)
    }
}

/// 8 - zero
#[inline]
#[target_feature(enable = "avx2")]
pub fn offset(zero: __m256i) -> __m256 {
    _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_set1_epi32(8), zero))
}

/// The column whose nibbles lie at bit `SHIFT` of each word, less 8.
#[inline]
#[target_feature(enable = "avx2")]
fn column<const SHIFT: i32>(words: __m256i) -> __m256 {
    let nibbles = _mm256_and_si256(_mm256_srli_epi32::<SHIFT>(words), _mm256_set1_epi32(15));
    _mm256_sub_ps(_mm256_cvtepi32_ps(nibbles), _mm256_set1_ps(8.0))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_int4_column<const T: usize, const SHIFT: i32>(
    parts: &mut [[__m256; 2]; T],
    words: &[__m256i; 2],
    x: *const f32,
) {
    let weights = [column::<SHIFT>(words[0]), column::<SHIFT>(words[1])];
    // SAFETY: T activations are readable at `x`, by the contract of `TileFn`.
    unsafe { add_column(parts, &weights, x) };
}

/// Per group: part = sum of (q - 8) x in column order, then (8 - zero) * total of x added to it, then total = scale * part + total;
/// 16 rows at a time.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn int4_tile<const Z: bool, const B: bool, const T: usize>(tile: &Tile) {
    // As in `dense_tile`: the next panel comes in meanwhile, at an even pace.
    let steps = tile.cols / 8;
    let pace = tile.next.1.div_ceil((2 * steps).max(1));
    for (half, base) in [tile.w0, tile.w1].into_iter().enumerate() {
        let next = tile.next.0.wrapping_add(half * steps * pace);
        // SAFETY: the contract of `TileFn` covers every access below.
        unsafe {
            let mut totals = [[_mm256_setzero_ps(); 2]; T];
            for g in 0..tile.cols / tile.group {
                let mut parts = [[_mm256_setzero_ps(); 2]; T];
                for block in g * tile.group / 8..(g + 1) * tile.group / 8 {
                    _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(block * pace).cast());
                    let at = base.add(block * tile.stride);
                    let words = [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(32).cast())];
                    let x = tile.x.add(8 * block * T);
                    add_int4_column::<T, 0>(&mut parts, &words, x);
                    add_int4_column::<T, 16>(&mut parts, &words, x.add(T));
                    add_int4_column::<T, 4>(&mut parts, &words, x.add(2 * T));
                    add_int4_column::<T, 20>(&mut parts, &words, x.add(3 * T));
                    add_int4_column::<T, 8>(&mut parts, &words, x.add(4 * T));
                    add_int4_column::<T, 24>(&mut parts, &words, x.add(5 * T));
                    add_int4_column::<T, 12>(&mut parts, &words, x.add(6 * T));
                    add_int4_column::<T, 28>(&mut parts, &words, x.add(7 * T));
                }
                for v in 0..2 {
                    let at = (tile.zeros.wrapping_add(16 * g), tile.scales.add(64 * g));
                    let (zero, scale) = group_ends::<Z, B>(at.0, at.1, 2 * half + v);
                    for (t, (totals, parts)) in totals.iter_mut().zip(&parts).enumerate() {
                        let mut part = parts[v];
                        if Z {
                            let x_total = _mm256_set1_ps(*tile.x_totals.add(g * T + t));
                            part = _mm256_fmadd_ps(offset(zero), x_total, part);
                        }
                        totals[v] = _mm256_fmadd_ps(scale, part, totals[v]);
                    }
                }
            }
            for (t, totals) in totals.iter().enumerate() {
                for (v, total) in totals.iter().enumerate() {
                    _mm256_storeu_ps(tile.out.add(t * tile.out_stride + 16 * half + 8 * v), *total);
                }
            }
        }
    }
}

/// Groups ahead of the one at hand whose scales and zero points are prefetched for a lone token.
pub const GROUPS_AHEAD: usize = 8;

#[target_feature(enable = "avx2,fma")]
pub unsafe fn rounds(rounds: usize) -> f32 {
    let mut sums = [_mm256_setzero_ps(); 12];
    for (i, sum) in sums.iter_mut().enumerate() {
        *sum = _mm256_set1_ps(std::hint::black_box(i as f32));
    }
    let factor = _mm256_set1_ps(std::hint::black_box(0.999));
    let term = _mm256_set1_ps(std::hint::black_box(0.001));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, factor, term);
        }
    }
    let total = sums.iter().fold(_mm256_setzero_ps(), |total, sum| _mm256_add_ps(total, *sum));
    _mm256_cvtss_f32(total)
}
