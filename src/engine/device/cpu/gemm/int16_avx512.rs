//! AVX-512 functions of [`super::int16`]: registers of 16 rows; a word's nibbles are pairs of columns once shifted and masked,
//! and one instruction multiplies 32 of them and adds to the sums (AVX512-VNNI).

use std::arch::x86_64::*;

use super::avx512::{load, prefetch_pair};
use super::avx512_int4::prefetch_group;
use super::{Tile, TileFn};

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
        tokens_tile::<Z, B, 1>,
        tokens_tile::<Z, B, 2>,
        tokens_tile::<Z, B, 3>,
        tokens_tile::<Z, B, 4>,
        tokens_tile::<Z, B, 5>,
        tokens_tile::<Z, B, 6>,
        tokens_tile::<Z, B, 7>,
        tokens_tile::<Z, B, 8>,
        tokens_tile::<Z, B, 9>,
        tokens_tile::<Z, B, 10>,
        tokens_tile::<Z, B, 11>,
        tokens_tile::<Z, B, 12>,
    ][tokens - 1]
}

/// Adds columns 2j and 2j + 1 of the eight in each word, where `SHIFT` is 4j.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn add_pairs<const T: usize, const SHIFT: u32>(
    parts: &mut [[__m512i; 2]; T],
    words: [__m512i; 2],
    x: *const i32,
) {
    let mask = _mm512_set1_epi32(0x000f_000f);
    let pairs = words.map(|words| _mm512_and_si512(_mm512_srli_epi32::<SHIFT>(words), mask));
    for (t, part) in parts.iter_mut().enumerate() {
        // SAFETY: T pairs of activations are readable at `x`, by the contract of `TileFn`.
        let x = _mm512_set1_epi32(unsafe { *x.add(t) });
        part[0] = _mm512_dpwssd_epi32(part[0], pairs[0], x);
        part[1] = _mm512_dpwssd_epi32(part[1], pairs[1], x);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn tokens_tile<const Z: bool, const B: bool, const T: usize>(tile: &Tile) {
    let blocks = tile.group / 8;
    // SAFETY: the contract of `TileFn` covers every access below; prefetches never fault.
    unsafe {
        let mut totals = [[0f32; 32]; T];
        for g in 0..tile.cols / tile.group {
            prefetch_group::<Z>(tile, g);
            let mut parts = [[_mm512_setzero_si512(); 2]; T];
            for block in g * blocks..(g + 1) * blocks {
                let ahead = tile.ahead.wrapping_add(block * tile.ahead_stride);
                prefetch_pair(ahead, tile.far);
                let at = block * tile.stride;
                let low = _mm512_loadu_si512(tile.w0.add(at).cast());
                let high = _mm512_loadu_si512(tile.w1.add(at).cast());
                let x = tile.x.cast::<i32>().add(4 * block * T);
                add_pairs::<T, 0>(&mut parts, [low, high], x);
                add_pairs::<T, 4>(&mut parts, [low, high], x.add(T));
                add_pairs::<T, 8>(&mut parts, [low, high], x.add(2 * T));
                add_pairs::<T, 12>(&mut parts, [low, high], x.add(3 * T));
            }
            let mut zeros = [_mm512_set1_epi32(8); 2];
            if Z {
                let pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(tile.zeros.add(16 * g).cast()));
                zeros = [_mm512_and_si512(pairs, _mm512_set1_epi32(15)), _mm512_srli_epi32::<4>(pairs)];
            }
            let scales = [tile.scales.add(64 * g), tile.scales.add(64 * g + 32)];
            let scales = scales.map(|at| if B { load::<2>(at) } else { load::<1>(at) });
            for (t, (total, part)) in totals.iter_mut().zip(parts).enumerate() {
                let x_sum = _mm512_set1_epi32(*tile.x_sums.add(g * T + t));
                let x_scale = _mm512_set1_ps(*tile.x_scales.add(g * T + t));
                for v in 0..2 {
                    let at = total.as_mut_ptr().add(16 * v);
                    let exact = _mm512_sub_epi32(part[v], _mm512_mullo_epi32(zeros[v], x_sum));
                    let scale = _mm512_mul_ps(scales[v], x_scale);
                    let sum = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(exact), _mm512_loadu_ps(at));
                    _mm512_storeu_ps(at, sum);
                }
            }
        }
        for (t, total) in totals.iter().enumerate() {
            tile.out.add(t * tile.out_stride).cast::<[f32; 32]>().write_unaligned(*total);
        }
    }
}

/// Sums of a round of [`rounds`].
pub const ROUND_SUMS: usize = 16;

/// Independent products of pairs added to sums in registers.
#[target_feature(enable = "avx512f,avx512vnni")]
pub unsafe fn rounds(rounds: usize) -> f32 {
    let mut sums = [_mm512_setzero_si512(); ROUND_SUMS];
    for (i, sum) in sums.iter_mut().enumerate() {
        *sum = _mm512_set1_epi32(std::hint::black_box(i as i32));
    }
    let factor = _mm512_set1_epi32(std::hint::black_box(0x0003_0003));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpwssd_epi32(*sum, *sum, factor);
        }
    }
    let total = sums.iter().fold(_mm512_setzero_si512(), |total, sum| _mm512_add_epi32(total, *sum));
    _mm512_reduce_add_epi32(total) as f32
}
