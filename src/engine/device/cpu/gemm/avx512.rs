//! AVX-512 tiles: two registers of 16 rows, up to twelve tokens, 24 sums.
//!
//! Per column and token two fused multiply-adds with one broadcast, in column order. Widening is one conversion (f16), or a
//! shift and a mask for a pair of bf16 columns. In bf16 arithmetic a pair of columns is one instruction of two products a lane
//! (AVX512-BF16).

use std::arch::x86_64::*;

use super::{Element, PREFETCH_BYTES, ROW_PANELS, Rows, RowsFn, Tile, TileFn};
use crate::engine::device::cpu::pool::{prefetch_line, prefetch_line_to_l2};

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
        dense_tile::<E, 1>,
        dense_tile::<E, 2>,
        dense_tile::<E, 3>,
        dense_tile::<E, 4>,
        dense_tile::<E, 5>,
        dense_tile::<E, 6>,
        dense_tile::<E, 7>,
        dense_tile::<E, 8>,
        dense_tile::<E, 9>,
        dense_tile::<E, 10>,
        dense_tile::<E, 11>,
        dense_tile::<E, 12>,
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

/// The same in bf16 arithmetic.
pub fn bf16_rows_of() -> [RowsFn; ROW_PANELS] {
    [bf16_rows::<1>, bf16_rows::<2>, bf16_rows::<3>]
}

/// Tiles of bf16 arithmetic: pairs of weights times pairs of activations.
pub fn bf16(tokens: usize) -> TileFn {
    [
        bf16_tile::<1>,
        bf16_tile::<2>,
        bf16_tile::<3>,
        bf16_tile::<4>,
        bf16_tile::<5>,
        bf16_tile::<6>,
        bf16_tile::<7>,
        bf16_tile::<8>,
        bf16_tile::<9>,
        bf16_tile::<10>,
        bf16_tile::<11>,
        bf16_tile::<12>,
    ][tokens - 1]
}

pub(super) type Sums<const T: usize> = [[__m512; 2]; T];

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_sums<const T: usize>(tile: &Tile) -> Sums<T> {
    let mut sums = [[_mm512_setzero_ps(); 2]; T];
    if tile.accumulate {
        for (t, sum) in sums.iter_mut().enumerate() {
            // SAFETY: `out` holds T rows of 32, by the contract of `TileFn`.
            unsafe {
                let at = tile.out.add(t * tile.out_stride);
                *sum = [_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(16))];
            }
        }
    }
    sums
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_sums<const T: usize>(tile: &Tile, sums: &Sums<T>) {
    for (t, sum) in sums.iter().enumerate() {
        // SAFETY: as in `load_sums`.
        unsafe {
            let at = tile.out.add(t * tile.out_stride);
            _mm512_storeu_ps(at, sum[0]);
            _mm512_storeu_ps(at.add(16), sum[1]);
        }
    }
}

/// 16 elements of one column, widened.
#[inline]
#[target_feature(enable = "avx512f")]
pub unsafe fn load<const E: u8>(at: *const u8) -> __m512 {
    // SAFETY: 16 elements are readable at `at`, by the contract of `TileFn`.
    unsafe {
        match E {
            0 => _mm512_loadu_ps(at.cast()),
            1 => load_f16(at),
            _ => {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
            }
        }
    }
}

/// 16 of f16, widened. (Said so that it is one instruction on memory, which leaves the units of the multiply-adds more free than
/// one on a register, as `_mm512_cvtph_ps` is made.)
#[inline]
#[target_feature(enable = "avx512f")]
pub unsafe fn load_f16(at: *const u8) -> __m512 {
    // SAFETY: as in `load`.
    unsafe { _mm512_cvt_roundph_ps::<_MM_FROUND_CUR_DIRECTION>(_mm256_loadu_si256(at.cast())) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn add_column<const T: usize>(
    sums: &mut Sums<T>,
    low: __m512,
    high: __m512,
    x: *const f32,
) {
    for (t, sum) in sums.iter_mut().enumerate() {
        // SAFETY: T activations are readable at `x`, by the contract of `TileFn`.
        let x = _mm512_set1_ps(unsafe { *x.add(t) });
        sum[0] = _mm512_fmadd_ps(low, x, sum[0]);
        sum[1] = _mm512_fmadd_ps(high, x, sum[1]);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn dense_tile<const E: u8, const T: usize>(tile: &Tile) {
    // SAFETY: the contract of `TileFn` covers every access below; prefetches never fault.
    unsafe {
        let mut sums = load_sums::<T>(tile);
        let (mut w0, mut w1, mut x, mut ahead) = (tile.w0, tile.w1, tile.x, tile.ahead);
        if E == 3 {
            let odd = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            for _ in 0..tile.cols.div_ceil(2) {
                prefetch_pair(ahead, tile.far);
                ahead = ahead.wrapping_add(tile.ahead_stride);
                let (low, high) = (_mm512_loadu_si512(w0.cast()), _mm512_loadu_si512(w1.cast()));
                let even_low = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(low));
                let even_high = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(high));
                add_column::<T>(&mut sums, even_low, even_high, x);
                let odd_low = _mm512_castsi512_ps(_mm512_and_si512(low, odd));
                let odd_high = _mm512_castsi512_ps(_mm512_and_si512(high, odd));
                add_column::<T>(&mut sums, odd_low, odd_high, x.add(T));
                w0 = w0.add(tile.stride);
                w1 = w1.add(tile.stride);
                x = x.add(2 * T);
            }
        } else {
            let mut ahead_high = tile.ahead_high;
            for _ in 0..tile.cols {
                prefetch(ahead, tile.far);
                ahead = ahead.wrapping_add(tile.ahead_stride);
                if E != 1 {
                    prefetch(ahead_high, tile.far);
                    ahead_high = ahead_high.wrapping_add(tile.ahead_stride);
                }
                add_column::<T>(&mut sums, load::<E>(w0), load::<E>(w1), x);
                w0 = w0.add(tile.stride);
                w1 = w1.add(tile.stride);
                x = x.add(T);
            }
        }
        store_sums(tile, &sums);
    }
}

/// Asks for a line, and into the L2 for the one `far` bytes on unless that is 0 (see [`Tile::far`]).
#[inline]
#[target_feature(enable = "avx512f")]
pub fn prefetch(at: *const u8, far: usize) {
    prefetch_line(at);
    if far > 0 {
        prefetch_line_to_l2(at.wrapping_add(far));
    }
}

/// The same for two lines that follow each other.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn prefetch_pair(at: *const u8, far: usize) {
    prefetch(at, far);
    prefetch(at.wrapping_add(64), far);
}

/// One token times N panels one after the other, which are one stream. (Three side by side, each prefetched 512 bytes ahead,
/// read a tenth less on AMD's Zen 5.)
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn rows<const E: u8, const N: usize>(rows: &Rows) {
    // SAFETY: the contract of `RowsFn` covers every access below.
    unsafe {
        let mut all = [[_mm512_setzero_ps(); 2]; N];
        for (sums, panel) in all.iter_mut().zip(&rows.panels) {
            if E == 3 {
                let odd = _mm512_set1_epi32(0xffff_0000_u32 as i32);
                for k in 0..rows.cols.div_ceil(2) {
                    let even_x = _mm512_set1_ps(*rows.x.add(2 * k));
                    let odd_x = _mm512_set1_ps(*rows.x.add(2 * k + 1));
                    prefetch_pair(panel.wrapping_add(128 * k + PREFETCH_BYTES), rows.far);
                    for (v, sum) in sums.iter_mut().enumerate() {
                        let words = _mm512_loadu_si512(panel.add(128 * k + 64 * v).cast());
                        let even = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words));
                        let odd = _mm512_castsi512_ps(_mm512_and_si512(words, odd));
                        *sum = _mm512_fmadd_ps(odd, odd_x, _mm512_fmadd_ps(even, even_x, *sum));
                    }
                }
            } else {
                let size = if E == 0 { 4 } else { 2 };
                for k in 0..rows.cols {
                    let x = _mm512_set1_ps(*rows.x.add(k));
                    let ahead = panel.wrapping_add(32 * k * size + PREFETCH_BYTES);
                    prefetch(ahead, rows.far);
                    if E == 0 {
                        prefetch(ahead.wrapping_add(64), rows.far);
                    }
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = _mm512_fmadd_ps(load::<E>(panel.add((32 * k + 16 * v) * size)), x, *sum);
                    }
                }
            }
        }
        store_rows(rows, &all);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn bf16_rows<const N: usize>(rows: &Rows) {
    // SAFETY: the contract of `RowsFn` covers every access below.
    unsafe {
        let mut all = [[_mm512_setzero_ps(); 2]; N];
        for (sums, panel) in all.iter_mut().zip(&rows.panels) {
            for k in 0..rows.cols.div_ceil(2) {
                let x = as_bf16(_mm512_set1_epi32(*rows.x.cast::<i32>().add(k)));
                prefetch_pair(panel.wrapping_add(128 * k + PREFETCH_BYTES), rows.far);
                for (v, sum) in sums.iter_mut().enumerate() {
                    let pairs = as_bf16(_mm512_loadu_si512(panel.add(128 * k + 64 * v).cast()));
                    *sum = _mm512_dpbf16_ps(*sum, pairs, x);
                }
            }
        }
        store_rows(rows, &all);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_rows<const N: usize>(rows: &Rows, sums: &[[__m512; 2]; N]) {
    for (n, sums) in sums.iter().enumerate() {
        // SAFETY: `out` holds N rows of 32, by the contract of `RowsFn`.
        unsafe {
            _mm512_storeu_ps(rows.out.add(32 * n), sums[0]);
            _mm512_storeu_ps(rows.out.add(32 * n + 16), sums[1]);
        }
    }
}

/// 512 bits taken as 32 bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn as_bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both are 512 bits without invalid values.
    unsafe { std::mem::transmute(bits) }
}

/// One pair of columns: two multiply-adds a lane and token.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn add_pair<const T: usize>(
    sums: &mut Sums<T>,
    low: __m512i,
    high: __m512i,
    x: *const f32,
) {
    let (low, high) = (as_bf16(low), as_bf16(high));
    for (t, sum) in sums.iter_mut().enumerate() {
        // SAFETY: T pairs of activations are readable at `x`, by the contract of `TileFn`.
        let x = as_bf16(_mm512_set1_epi32(unsafe { *x.cast::<i32>().add(t) }));
        sum[0] = _mm512_dpbf16_ps(sum[0], low, x);
        sum[1] = _mm512_dpbf16_ps(sum[1], high, x);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn bf16_tile<const T: usize>(tile: &Tile) {
    // SAFETY: the contract of `TileFn` covers every access below; prefetches never fault.
    unsafe {
        let mut sums = load_sums::<T>(tile);
        let (mut w0, mut w1, mut x, mut ahead) = (tile.w0, tile.w1, tile.x, tile.ahead);
        for _ in 0..tile.cols.div_ceil(2) {
            prefetch_pair(ahead, tile.far);
            ahead = ahead.wrapping_add(tile.ahead_stride);
            add_pair::<T>(&mut sums, _mm512_loadu_si512(w0.cast()), _mm512_loadu_si512(w1.cast()), x);
            w0 = w0.add(tile.stride);
            w1 = w1.add(tile.stride);
            x = x.add(T);
        }
        store_sums(tile, &sums);
    }
}

/// Independent sums of a round: enough to hide the latency of both kinds of multiply-add.
pub const ROUND_SUMS: usize = 16;

#[target_feature(enable = "avx512f")]
pub unsafe fn rounds(rounds: usize) -> f32 {
    let mut sums = [_mm512_setzero_ps(); ROUND_SUMS];
    for (i, sum) in sums.iter_mut().enumerate() {
        *sum = _mm512_set1_ps(std::hint::black_box(i as f32));
    }
    let factor = _mm512_set1_ps(std::hint::black_box(0.999));
    let term = _mm512_set1_ps(std::hint::black_box(0.001));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, factor, term);
        }
    }
    sums.iter().map(|sum| _mm512_reduce_add_ps(*sum)).sum()
}

#[target_feature(enable = "avx512f,avx512bf16")]
pub unsafe fn bf16_rounds(rounds: usize) -> f32 {
    let mut sums = [_mm512_setzero_ps(); ROUND_SUMS];
    for (i, sum) in sums.iter_mut().enumerate() {
        *sum = _mm512_set1_ps(std::hint::black_box(i as f32));
    }
    let bits = _mm512_set1_epi32(std::hint::black_box(0x3a00_3a00));
    // SAFETY: both are 512 bits without invalid values.
    let factor: __m512bh = unsafe { std::mem::transmute(bits) };
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, factor, factor);
        }
    }
    sums.iter().map(|sum| _mm512_reduce_add_ps(*sum)).sum()
}
