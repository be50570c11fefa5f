//! AVX-512 tiles of 4-bit weights: two registers of 16 rows, up to twelve tokens. In f32 arithmetic a nibble becomes a float by a
//! look-up, in bf16 arithmetic (AVX512-BF16) pairs of columns are looked up at once; groups are added to the totals one by one.

use std::arch::x86_64::*;

use super::avx2::GROUPS_AHEAD;
use super::avx512::{Sums, add_column, add_pair, load, prefetch_pair};
use super::{Tile, TileFn};
use crate::engine::device::cpu::pool::prefetch_line;

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
        int4_tile::<Z, B, 7>,
        int4_tile::<Z, B, 8>,
        int4_tile::<Z, B, 9>,
        int4_tile::<Z, B, 10>,
        int4_tile::<Z, B, 11>,
        int4_tile::<Z, B, 12>,
    ][tokens - 1]
}

pub fn int4_bf16(zero_points: bool, bf16_scales: bool, tokens: usize) -> TileFn {
    match (zero_points, bf16_scales) {
        (false, false) => pick_int4_bf16::<false, false>(tokens),
        (false, true) => pick_int4_bf16::<false, true>(tokens),
        (true, false) => pick_int4_bf16::<true, false>(tokens),
        (true, true) => pick_int4_bf16::<true, true>(tokens),
    }
}

fn pick_int4_bf16<const Z: bool, const B: bool>(tokens: usize) -> TileFn {
    [
        int4_bf16_tile::<Z, B, 1>,
        int4_bf16_tile::<Z, B, 2>,
        int4_bf16_tile::<Z, B, 3>,
        int4_bf16_tile::<Z, B, 4>,
        int4_bf16_tile::<Z, B, 5>,
        int4_bf16_tile::<Z, B, 6>,
        int4_bf16_tile::<Z, B, 7>,
        int4_bf16_tile::<Z, B, 8>,
        int4_bf16_tile::<Z, B, 9>,
        int4_bf16_tile::<Z, B, 10>,
        int4_bf16_tile::<Z, B, 11>,
        int4_bf16_tile::<Z, B, 12>,
    ][tokens - 1]
}

/// The sums of a tile while its groups are worked off, [T][32].
type Totals<const T: usize> = [[f32; 32]; T];

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_totals<const T: usize>(tile: &Tile) -> Totals<T> {
    let mut total = [[0f32; 32]; T];
    if tile.accumulate {
        for (t, total) in total.iter_mut().enumerate() {
            // SAFETY: `out` holds T rows of 32, by the contract of `TileFn`.
            *total = unsafe { tile.out.add(t * tile.out_stride).cast::<[f32; 32]>().read_unaligned() };
        }
    }
    total
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_totals<const T: usize>(tile: &Tile, total: &Totals<T>) {
    for (t, total) in total.iter().enumerate() {
        // SAFETY: as in `load_totals`.
        unsafe { tile.out.add(t * tile.out_stride).cast::<[f32; 32]>().write_unaligned(*total) };
    }
}

/// total = scale * part + total
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add_group<const B: bool, const T: usize>(
    tile: &Tile,
    g: usize,
    part: &Sums<T>,
    total: &mut Totals<T>,
) {
    // SAFETY: scales hold 32 of 16 bits a group; a total has 32 values.
    unsafe {
        let scales = tile.scales.add(64 * g);
        let (low, high) = if B {
            (load::<2>(scales), load::<2>(scales.add(32)))
        } else {
            (load::<1>(scales), load::<1>(scales.add(32)))
        };
        for (total, part) in total.iter_mut().zip(part) {
            let at = total.as_mut_ptr();
            _mm512_storeu_ps(at, _mm512_fmadd_ps(low, part[0], _mm512_loadu_ps(at)));
            let at = at.add(16);
            _mm512_storeu_ps(at, _mm512_fmadd_ps(high, part[1], _mm512_loadu_ps(at)));
        }
    }
}

/// Per group: part = sum of (q - 8) x in column order, then (8 - zero) * total of x added to it, then total = scale * part + total.
/// A nibble becomes a float by one shift and one table look-up, whose index is the lowest four bits.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn int4_tile<const Z: bool, const B: bool, const T: usize>(tile: &Tile) {
    // SAFETY: the contract of `TileFn` covers every access.
    unsafe {
        let mut total = load_totals::<T>(tile);
        let groups = tile.cols / tile.group;
        let mut g = 0;
        // With few tokens one group's sums are too few to hide the latency of a multiply-add. A group's part is a chain of
        // its own and parts are added in order of groups, so this does not show in the bits.
        if T <= 3 {
            while g + 2 <= groups {
                int4_groups::<Z, B, T, 2>(tile, g, &mut total);
                g += 2;
            }
        }
        while g < groups {
            int4_groups::<Z, B, T, 1>(tile, g, &mut total);
            g += 1;
        }
        store_totals(tile, &total);
    }
}

/// Groups `first..first + G`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn int4_groups<const Z: bool, const B: bool, const T: usize, const G: usize>(
    tile: &Tile,
    first: usize,
    total: &mut Totals<T>,
) {
    // SAFETY: the contract of `TileFn` covers every access below; prefetches never fault.
    unsafe {
        let table = _mm512_setr_ps(-8., -7., -6., -5., -4., -3., -2., -1., 0., 1., 2., 3., 4., 5., 6., 7.);
        for g in first..first + G {
            prefetch_group::<Z>(tile, g);
        }
        let blocks = tile.group / 8;
        let mut parts = [[[_mm512_setzero_ps(); 2]; T]; G];
        let x_stride = tile.group * T;
        for block in 0..blocks {
            let (low, high) = load_words::<G>(tile, first, block, blocks);
            let x = tile.x.add((first * blocks + block) * 8 * T);
            let words = Words { low: &low, high: &high, table, x_stride };
            words.column::<T, 0>(&mut parts, x);
            words.column::<T, 16>(&mut parts, x.add(T));
            words.column::<T, 4>(&mut parts, x.add(2 * T));
            words.column::<T, 20>(&mut parts, x.add(3 * T));
            words.column::<T, 8>(&mut parts, x.add(4 * T));
            words.column::<T, 24>(&mut parts, x.add(5 * T));
            words.column::<T, 12>(&mut parts, x.add(6 * T));
            words.column::<T, 28>(&mut parts, x.add(7 * T));
        }
        for (j, part) in parts.iter_mut().enumerate() {
            if Z {
                let pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(tile.zeros.add(16 * (first + j)).cast()));
                let zeros = [_mm512_and_si512(pairs, _mm512_set1_epi32(15)), _mm512_srli_epi32::<4>(pairs)];
                let offsets =
                    zeros.map(|zeros| _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_set1_epi32(8), zeros)));
                let totals = tile.x_totals.add((first + j) * T);
                add_column::<T>(part, offsets[0], offsets[1], totals);
            }
            add_group::<B, T>(tile, first + j, part, total);
        }
    }
}

/// Asks for the scales and zero points that a lone tile needs some groups after group `g`, on CPUs that gain from it: each is a
/// stream of its own, too thin for the hardware to keep up with.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn prefetch_group<const Z: bool>(tile: &Tile, g: usize) {
    if tile.far > 0 {
        prefetch_line(tile.scales.wrapping_add(64 * (g + GROUPS_AHEAD)));
        if Z {
            prefetch_line(tile.zeros.wrapping_add(16 * (g + GROUPS_AHEAD)));
        }
    }
}

/// Eight columns of 32 rows, block `block` of each of `G` groups of `blocks` from group `first` on: the words of rows 0 to 15 and
/// of rows 16 to 31. Prefetches run through memory in order, whatever the order of the blocks: worth a tenth of one row's speed.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_words<const G: usize>(
    tile: &Tile,
    first: usize,
    block: usize,
    blocks: usize,
) -> ([__m512i; G], [__m512i; G]) {
    let (mut low, mut high) = ([_mm512_setzero_si512(); G], [_mm512_setzero_si512(); G]);
    for j in 0..G {
        let at = ((first + j) * blocks + block) * tile.stride;
        let ahead = tile.ahead.wrapping_add((first * blocks + block * G + j) * tile.ahead_stride);
        // SAFETY: a panel holds all its words, by the contract of `TileFn`; prefetches never fault.
        unsafe {
            prefetch_pair(ahead, tile.far);
            low[j] = _mm512_loadu_si512(tile.w0.add(at).cast());
            high[j] = _mm512_loadu_si512(tile.w1.add(at).cast());
        }
    }
    (low, high)
}

struct Words<'a, const G: usize> {
    low: &'a [__m512i; G],
    high: &'a [__m512i; G],
    table: __m512,
    /// Activations from one group to the next.
    x_stride: usize,
}

impl<const G: usize> Words<'_, G> {
    /// Adds the column whose nibbles lie at bit `SHIFT`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn column<const T: usize, const SHIFT: u32>(&self, parts: &mut [Sums<T>; G], x: *const f32) {
        for j in 0..G {
            let low = _mm512_permutexvar_ps(_mm512_srli_epi32::<SHIFT>(self.low[j]), self.table);
            let high = _mm512_permutexvar_ps(_mm512_srli_epi32::<SHIFT>(self.high[j]), self.table);
            // SAFETY: every group's activations are readable, by the contract of `TileFn`.
            unsafe { add_column::<T>(&mut parts[j], low, high, x.add(j * self.x_stride)) };
        }
    }
}

/// As [`int4_tile`], in pairs.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn int4_bf16_tile<const Z: bool, const B: bool, const T: usize>(tile: &Tile) {
    // SAFETY: the contract of `TileFn` covers every access.
    unsafe {
        let mut total = load_totals::<T>(tile);
        let groups = tile.cols / tile.group;
        let mut g = 0;
        // As in `int4_tile`; a pair's latency is longer.
        if T == 1 {
            while g + 4 <= groups {
                int4_bf16_groups::<Z, B, T, 4>(tile, g, &mut total);
                g += 4;
            }
        }
        if T <= 3 {
            while g + 2 <= groups {
                int4_bf16_groups::<Z, B, T, 2>(tile, g, &mut total);
                g += 2;
            }
        }
        while g < groups {
            int4_bf16_groups::<Z, B, T, 1>(tile, g, &mut total);
            g += 1;
        }
        store_totals(tile, &total);
    }
}

/// Groups `first..first + G`: q - zero + 16 is a number of five bits, which a table of 32 bf16 turns into q - zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn int4_bf16_groups<const Z: bool, const B: bool, const T: usize, const G: usize>(
    tile: &Tile,
    first: usize,
    total: &mut Totals<T>,
) {
    // SAFETY: the contract of `TileFn` covers every access below; prefetches never fault.
    unsafe {
        let table = _mm512_loadu_si512(BF16_FROM_16_BELOW.as_ptr().cast());
        let nibble = _mm512_set1_epi16(15);
        // 16 - zero in both halves of each lane.
        let mut adds = [[_mm512_set1_epi16(8); 2]; G];
        if Z {
            for (j, add) in adds.iter_mut().enumerate() {
                let at = tile.zeros.add(16 * (first + j));
                let pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast()));
                let sixteen = _mm512_set1_epi16(16);
                let low = _mm512_and_si512(pairs, _mm512_set1_epi32(15));
                let high = _mm512_srli_epi32::<4>(pairs);
                add[0] = _mm512_sub_epi16(sixteen, _mm512_or_si512(low, _mm512_slli_epi32::<16>(low)));
                add[1] = _mm512_sub_epi16(sixteen, _mm512_or_si512(high, _mm512_slli_epi32::<16>(high)));
            }
        }
        let blocks = tile.group / 8;
        let mut parts = [[[_mm512_setzero_ps(); 2]; T]; G];
        let x_stride = tile.group / 2 * T;
        for block in 0..blocks {
            let (low, high) = load_words::<G>(tile, first, block, blocks);
            let x = tile.x.add((first * blocks + block) * 4 * T);
            let words = PairWords { low: &low, high: &high, adds: &adds, table, nibble, x_stride };
            words.pair::<T, 0>(&mut parts, x);
            words.pair::<T, 4>(&mut parts, x.add(T));
            words.pair::<T, 8>(&mut parts, x.add(2 * T));
            words.pair::<T, 12>(&mut parts, x.add(3 * T));
        }
        for (j, part) in parts.iter().enumerate() {
            add_group::<B, T>(tile, first + j, part, total);
        }
    }
}

struct PairWords<'a, const G: usize> {
    low: &'a [__m512i; G],
    high: &'a [__m512i; G],
    adds: &'a [[__m512i; 2]; G],
    table: __m512i,
    nibble: __m512i,
    x_stride: usize,
}

impl<const G: usize> PairWords<'_, G> {
    /// Adds the pair of columns whose nibbles lie at bits `SHIFT` of both halves of a word.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn pair<const T: usize, const SHIFT: u32>(&self, parts: &mut [Sums<T>; G], x: *const f32) {
        let widen = |words: __m512i, add: __m512i| {
            let nibbles = _mm512_and_si512(_mm512_srli_epi32::<SHIFT>(words), self.nibble);
            _mm512_permutexvar_epi16(_mm512_add_epi16(nibbles, add), self.table)
        };
        for j in 0..G {
            let low = widen(self.low[j], self.adds[j][0]);
            let high = widen(self.high[j], self.adds[j][1]);
            // SAFETY: every group's activations are readable, by the contract of `TileFn`.
            unsafe { add_pair::<T>(&mut parts[j], low, high, x.add(j * self.x_stride)) };
        }
    }
}

/// The numbers -16 to 15 as bf16, which holds them exactly.
const BF16_FROM_16_BELOW: [u16; 32] = {
    let mut table = [0; 32];
    let mut i = 0;
    while i < 32 {
        table[i] = half::bf16::from_f32_const(i as f32 - 16.0).to_bits();
        i += 1;
    }
    table
};
