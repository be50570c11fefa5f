//! AVX2 tiles: registers of 8 rows, up to six tokens. Up to three tokens take all 32 rows at once; more take 16 rows at a
//! time (12 sums fit the 16 registers), the second half of a panel then comes from the L1.

use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::atomic::{Ordering, compiler_fence};

use super::{Element, ROW_PANELS, Rows, RowsFn, Tile, TileFn, settle};
use crate::engine::device::cpu::pool::prefetch_line_to_l2;

pub fn dense(element: Element, tokens: usize) -> TileFn {
    match element {
        Element::F32 => pick::<0>(tokens),
        Element::F16 => pick::<1>(tokens),
        Element::Bf16 => pick::<2>(tokens),
        Element::Bf16Pairs => pick::<3>(tokens),
    }
}

fn pick<const E: u8>(tokens: usize) -> TileFn {
    // Pairs need a register more.
    let three: TileFn = if E == 3 { dense_tile::<E, 3, 2> } else { dense_tile::<E, 3, 4> };
    [
        dense_tile::<E, 1, 4>,
        dense_tile::<E, 2, 4>,
        three,
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

/// Columns of one round of a tile's loop.
const ROUND: usize = 4;

/// Where a tile's loop stands.
struct Walk {
    /// Of the rows of the first two registers, and of the third and fourth.
    w: [*const u8; 2],
    stride: usize,
    x: *const f32,
    /// What is prefetched, `pace` further each time.
    next: *const u8,
    pace: usize,
}

impl Walk {
    /// Adds the COLUMN-th column of a round to `sums`, and prefetches every so many of them.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn add<const E: u8, const T: usize, const V: usize, const COLUMN: usize>(
        &mut self,
        sums: &mut [[__m256; V]; T],
    ) {
        let size = if E == 0 || E == 3 { 4 } else { 2 };
        let odd = _mm256_set1_epi32(0xffff_0000_u32 as i32);
        // SAFETY: the contract of `TileFn` covers every access.
        unsafe {
            if T > 2 && COLUMN.is_multiple_of(prefetch_every::<E, V>()) {
                prefetch_line_to_l2(self.next);
                self.next = self.next.wrapping_add(self.pace);
            }
            let weight = |w: *const u8, v: usize| {
                let at = w.add(8 * size * (v % 2));
                match (E, COLUMN % 2) {
                    // A pair is read twice: kept in registers, pairs would push sums out to memory.
                    (3, 0) => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_loadu_si256(at.cast()))),
                    (3, _) => _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(at.cast()), odd)),
                    _ => load::<E>(at),
                }
            };
            let column_x = self.x.add(COLUMN * T);
            let x = |t: usize| _mm256_set1_ps(*column_x.add(t));
            // Those of which there are fewer stay in registers.
            if T < V {
                let x: [_; T] = std::array::from_fn(x);
                for v in 0..V {
                    let weight = weight(self.w[v / 2], v);
                    for (sum, x) in sums.iter_mut().zip(x) {
                        sum[v] = _mm256_fmadd_ps(weight, x, sum[v]);
                    }
                }
            } else {
                let weights: [_; V] = std::array::from_fn(|v| weight(self.w[v / 2], v));
                for (t, sum) in sums.iter_mut().enumerate() {
                    let x = x(t);
                    for (sum, weight) in sum.iter_mut().zip(weights) {
                        *sum = _mm256_fmadd_ps(weight, x, *sum);
                    }
                }
            }
            for sums in sums.iter_mut() {
                settle::floats(sums, &mut self.x);
            }
            for w in &mut self.w[..V.div_ceil(2)] {
                if E != 3 || COLUMN % 2 == 1 {
                    *w = w.wrapping_add(self.stride);
                }
                settle::floats(&mut [], w);
            }
        }
    }

    /// Goes on to the activations of the next round.
    #[inline(always)]
    fn next_round<const T: usize>(&mut self, columns: usize) {
        self.x = self.x.wrapping_add(columns * T);
    }
}

/// Columns from one prefetch to the next: of a panel in one pass, and of f32, each column is a line or more.
const fn prefetch_every<const E: u8, const V: usize>() -> usize {
    if V == 4 || E == 0 { 1 } else { 2 }
}

/// V registers of 8 rows at a time: 4 is a whole panel, 2 is half of one.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dense_tile<const E: u8, const T: usize, const V: usize>(tile: &Tile) {
    // The next panel comes in while this one is worked on, at an even pace: prefetches in a row are dropped. One or two tokens are
    // multiplied as fast as the hardware finds the stream by itself.
    let passes = 4 / V;
    let cols = if E == 3 { tile.cols.next_multiple_of(2) } else { tile.cols };
    let prefetches = passes * cols / prefetch_every::<E, V>();
    let pace = tile.next.1.div_ceil(prefetches.max(1));
    let mut next = tile.next.0;
    for pass in 0..passes {
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
            // A pass takes the first half of the panel, the second, or both.
            let w = if pass == 0 { [tile.w0, tile.w1] } else { [tile.w1; 2] };
            let mut walk = Walk { w, stride: tile.stride, x: tile.x, next, pace };
            for _ in 0..cols / ROUND {
                walk.add::<E, T, V, 0>(&mut sums);
                walk.add::<E, T, V, 1>(&mut sums);
                walk.add::<E, T, V, 2>(&mut sums);
                walk.add::<E, T, V, 3>(&mut sums);
                walk.next_round::<T>(ROUND);
            }
            if cols % ROUND >= 2 {
                walk.add::<E, T, V, 0>(&mut sums);
                walk.add::<E, T, V, 1>(&mut sums);
                walk.next_round::<T>(2);
            }
            if cols % 2 == 1 {
                walk.add::<E, T, V, 0>(&mut sums);
            }
            next = walk.next;
            for (t, sum) in sums.iter().enumerate() {
                for (v, sum) in sum.iter().enumerate() {
                    _mm256_storeu_ps(out.add(t * tile.out_stride + 8 * v), *sum);
                }
            }
        }
    }
}

/// How far ahead streams side by side are prefetched: further the hardware is faster.
const NEAR_COLUMNS: usize = 4;

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
                        let at = panel.add(128 * k + 32 * v);
                        if v % 2 == 0 {
                            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(64 * NEAR_COLUMNS).cast());
                        }
                        let even = _mm256_slli_epi32::<16>(_mm256_loadu_si256(at.cast()));
                        *sum = _mm256_fmadd_ps(_mm256_castsi256_ps(even), even_x, *sum);
                        // Read again, as in `dense_tile`.
                        compiler_fence(Ordering::SeqCst);
                        let odd = _mm256_and_si256(_mm256_loadu_si256(at.cast()), odd);
                        *sum = _mm256_fmadd_ps(_mm256_castsi256_ps(odd), odd_x, *sum);
                    }
                }
            }
        } else {
            let size = if E == 0 { 4 } else { 2 };
            for k in 0..rows.cols {
                let x = _mm256_set1_ps(*rows.x.add(k));
                for (sums, panel) in sums.iter_mut().zip(&rows.panels) {
                    _mm_prefetch::<_MM_HINT_T0>(panel.wrapping_add(32 * (k + NEAR_COLUMNS) * size).cast());
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

/// What makes floats of nibbles left in place at bits 0, 4, 8, 12 and 16 of a word: the nibble's mask, a power of two whose unit in
/// the last place is the nibble's lowest bit, and the same plus 8. A row of constants for each register's lanes, to be operands in
/// memory: registers are short.
#[repr(align(32))]
struct InPlace([[[u32; 8]; 3]; 5]);

static IN_PLACE: InPlace = {
    let mut rows = [[[0; 8]; 3]; 5];
    let mut place = 0;
    while place < rows.len() {
        let unit = (1 << (23 - 4 * place)) as f32;
        rows[place] = [[15 << (4 * place); 8], [unit.to_bits(); 8], [(unit + 8.0).to_bits(); 8]];
        place += 1;
    }
    InPlace(rows)
};

/// The column whose nibbles lie at bit `BIT` of each word, less 8.
#[inline]
#[target_feature(enable = "avx2")]
fn column<const BIT: usize>(words: __m256) -> __m256 {
    let upper = || _mm256_castsi256_ps(_mm256_srli_epi32::<16>(_mm256_castps_si256(words)));
    let (words, place) = if BIT < 20 { (words, BIT / 4) } else { (upper(), BIT / 4 - 4) };
    let column;
    // SAFETY: three operands of 32 bytes, aligned, which nobody writes. The difference is exact and its operands normal, so no flag
    // of floating-point arithmetic changes.
    unsafe {
        asm!(
            "vandps {column}, {words}, [{row}]",
            "vorps {column}, {column}, [{row} + 32]",
            "vsubps {column}, {column}, [{row} + 64]",
            column = lateout(ymm_reg) column,
            words = in(ymm_reg) words,
            row = in(reg) &IN_PLACE.0[place],
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    column
}

/// The words of a block of eight columns and 16 rows. Beside the sums of six tokens there are no registers for them, so these read
/// them again for each column.
struct Words {
    at: *const f32,
    kept: [__m256; 2],
}

impl Words {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn read(at: *const f32) -> [__m256; 2] {
        // SAFETY: 64 bytes of words, by the contract of `TileFn`.
        unsafe { [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))] }
    }
}

/// The COLUMN-th column of a block.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_int4_column<const T: usize, const COLUMN: usize, const BIT: usize>(
    parts: &mut [[__m256; 2]; T],
    words: &mut Words,
    x: &mut *const f32,
) {
    let again = T == 6;
    // SAFETY: T activations and the block's words are readable there, by the contract of `TileFn`.
    unsafe {
        let kept = if again { Words::read(words.at) } else { words.kept };
        let weights = kept.map(|words| column::<BIT>(words));
        add_column(parts, &weights, x.add(COLUMN * T));
    }
    for parts in parts {
        settle::floats(parts, x);
    }
    if again { settle::floats(&mut [], &mut words.at) } else { settle::floats(&mut words.kept, x) }
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
            let mut x = tile.x;
            for g in 0..tile.cols / tile.group {
                let mut parts = [[_mm256_setzero_ps(); 2]; T];
                for block in g * tile.group / 8..(g + 1) * tile.group / 8 {
                    prefetch_line_to_l2(next.wrapping_add(block * pace));
                    let at = base.add(block * tile.stride).cast();
                    let mut words = Words { at, kept: Words::read(at) };
                    add_int4_column::<T, 0, 0>(&mut parts, &mut words, &mut x);
                    add_int4_column::<T, 1, 16>(&mut parts, &mut words, &mut x);
                    add_int4_column::<T, 2, 4>(&mut parts, &mut words, &mut x);
                    add_int4_column::<T, 3, 20>(&mut parts, &mut words, &mut x);
                    add_int4_column::<T, 4, 8>(&mut parts, &mut words, &mut x);
                    add_int4_column::<T, 5, 24>(&mut parts, &mut words, &mut x);
                    add_int4_column::<T, 6, 12>(&mut parts, &mut words, &mut x);
                    add_int4_column::<T, 7, 28>(&mut parts, &mut words, &mut x);
                    x = x.add(8 * T);
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
