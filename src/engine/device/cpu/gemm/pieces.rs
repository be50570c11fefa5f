//! 4-bit weights times a lone row of activations, by products of bytes.
//!
//! A nibble is an unsigned byte as it is, so unpacking takes three instructions for twice the weights of a register, and one
//! instruction multiplies four columns of a row of the matrix by bytes. Activations of a group become fixed-point numbers,
//! x = scale (A + B / 2^s), cut into signed bytes, A of two (|A| <= 32639):
//!
//! | arithmetic | pieces | bits | B |
//! |---|---|---|---|
//! | int16 (see `int16.rs`: the same bits) | 2 | 16 | none |
//! | f32 | 3 | 24, s = 8 | a byte |
//! | f32, groups whose largest outweighs the rest | 4 | 31 or 32, s = 16 | two bytes |
//!
//! Sums of integers are exact, and a product in f32 is, group after group in ascending order,
//!   part = scale * (sum of (q - 8) A + (sum of (q - 8) B) / 2^s), total = weight scale * (part + (8 - zero) * sum of x) + total.
//! Three pieces round each activation to 2^-24 of the group's largest; a chain of n multiply-adds rounds n sums instead. Where
//! few activations make up most of a group, or late ones, the chain errs less, so such a group takes the fourth piece
//! ([`least_squares`]), and a power of two as its scale: errors against exact products are then no larger than those of
//! multiply-adds (`tests/lone.rs`). (Where only a group's last activation counts both round once, and are equal.)
//! Integer sums have no order, so all instruction sets give the same bits; several rows are multiplied by multiply-adds, with
//! others.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::int16;
#[cfg(target_arch = "x86_64")]
use super::{ROW_PANELS, RowsFn};
use crate::engine::device::cpu::isa::{Isa, has_vnni};

/// What a lone row's activations are cut for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    Int16,
    F32,
}

impl Cut {
    /// Words of 32 bits for a block of eight columns: for each piece four bytes of columns 0, 4, 1, 5 and, after those of all
    /// pieces, four of columns 2, 6, 3, 7, as the nibbles of a word of weights are unpacked. In f32 there is room for
    /// four pieces.
    pub fn block_words(self) -> usize {
        match self {
            Self::Int16 => 4,
            Self::F32 => 8,
        }
    }

    /// Scales and sums of a group: in int16 its scale and the sum of A, in f32 (scale, 2^-s, sum of x) and (-8 times the sum of A,
    /// -8 times that of B).
    pub fn ends(self) -> (usize, usize) {
        match self {
            Self::Int16 => (1, 1),
            Self::F32 => (3, 2),
        }
    }
}

/// Whether this instruction set multiplies a lone row so in f32, by groups of `group`.
pub fn in_f32(isa: Isa, group: usize) -> bool {
    int16::fits(group) && (isa == Isa::Avx2 || isa == Isa::Avx512 && has_vnni())
}

/// Whether it does in int16. (AVX512-VNNI's tiles read as fast as memory gives.)
pub fn in_int16(isa: Isa, group: usize) -> bool {
    int16::fits(group) && (isa == Isa::Avx2 || isa == Isa::Avx512 && !has_vnni())
}

/// The functions for one token and 1 to [`ROW_PANELS`] panels.
#[cfg(target_arch = "x86_64")]
pub fn rows(isa: Isa, cut: Cut, zero_points: bool, bf16_scales: bool) -> [RowsFn; ROW_PANELS] {
    match isa {
        Isa::Avx512 if cut == Cut::F32 => super::pieces_avx512::rows(zero_points, bf16_scales),
        _ => super::pieces_avx2::rows(cut, zero_points, bf16_scales),
    }
}

/// Of the activations over their scale, each times [`LATER_SUMS`] less than the sums that a chain of multiply-adds rounds once it is
/// in, the sum of squares from which on three pieces err no more than that chain. Errors of n activations, rounded to steps of
/// 2^-8, vary by 2^-16 n / 12 together; a sum's rounding varies by 0.18 2^-48 of its square, taken as 0.16 for safety.
#[cfg(target_arch = "x86_64")]
fn least_squares(group: usize) -> f32 {
    group as f32 / (12.0 * 0.16) * 4_294_967_296.0
}

/// Roundings of a group's sum by three pieces themselves.
#[cfg(target_arch = "x86_64")]
const LATER_SUMS: f32 = 3.0;

/// Cuts a row in f32: whole groups `values` into `pieces`, `ends` scales and sums each group.
///
/// # Safety
/// The CPU has AVX2 and FMA. `pieces`, `scales` and `sums` hold the row as [`Cut::F32`] says.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
pub unsafe fn cut_f32(values: &[f32], group: usize, pieces: *mut i32, scales: *mut f32, sums: *mut i32) {
    let least = least_squares(group);
    let lanes = _mm256_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0);
    for (g, values) in values.chunks_exact(group).enumerate() {
        let (largest, poison) = largest(values);
        // A scale below the normal numbers would be no scale: what is so small keeps the absolute steps of larger ones.
        let scale = (largest * (1.0 / int16::MOST)).max(f32::MIN_POSITIVE);
        let inverse = _mm256_set1_ps(1.0 / scale);
        let (mut total, mut squares) = (_mm256_setzero_ps(), _mm256_setzero_ps());
        let mut sums_of_chain = _mm256_sub_ps(_mm256_set1_ps(group as f32 - LATER_SUMS), lanes);
        for values in values.chunks_exact(8) {
            // SAFETY: eight floats.
            let value = unsafe { _mm256_loadu_ps(values.as_ptr()) };
            total = _mm256_add_ps(total, value);
            let value = _mm256_mul_ps(value, inverse);
            squares = _mm256_fmadd_ps(_mm256_mul_ps(value, value), sums_of_chain, squares);
            sums_of_chain = _mm256_sub_ps(sums_of_chain, _mm256_set1_ps(8.0));
        }
        let four = add_up(squares) < least;
        // SAFETY: the group's part of the row, by the caller's promise.
        unsafe {
            let pieces = pieces.add(g * group);
            let (scale, lower, (a, b)) = if four {
                // The next power of two: a product with it is exact.
                let scale = f32::from_bits((scale.to_bits() + 0x007f_ffff) & 0xff80_0000);
                (scale, 1.0 / 65536.0, cut_group::<4>(values, _mm256_set1_ps(1.0 / scale), pieces))
            } else {
                (scale, 1.0 / 256.0, cut_group::<3>(values, inverse, pieces))
            };
            *scales.add(3 * g) = scale + poison;
            *scales.add(3 * g + 1) = lower;
            *scales.add(3 * g + 2) = add_up(total);
            *sums.add(2 * g) = a.wrapping_mul(-8);
            *sums.add(2 * g + 1) = b.wrapping_mul(-8);
        }
    }
}

/// The same in int16, rounded as `grouped.rs` does.
///
/// # Safety
/// As [`cut_f32`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
pub unsafe fn cut_int16(values: &[f32], group: usize, pieces: *mut i32, scales: *mut f32, sums: *mut i32) {
    for (g, values) in values.chunks_exact(group).enumerate() {
        let (largest, poison) = largest(values);
        let (scale, inverse) = super::grouped::scale(largest);
        // SAFETY: the group's part of the row, by the caller's promise.
        unsafe {
            *scales.add(g) = scale + poison;
            (*sums.add(g), _) = cut_group::<2>(values, _mm256_set1_ps(inverse), pieces.add(g * group / 2));
        }
    }
}

/// The largest magnitude, and zero, or NaN where one is not finite.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma")]
fn largest(values: &[f32]) -> (f32, f32) {
    let (mut largest, mut poison) = (_mm256_setzero_ps(), _mm256_setzero_ps());
    for values in values.chunks_exact(8) {
        // SAFETY: eight floats.
        let value = unsafe { _mm256_loadu_ps(values.as_ptr()) };
        let value = _mm256_andnot_ps(_mm256_set1_ps(-0.0), value);
        // (The second operand where one is not a number.)
        largest = _mm256_max_ps(value, largest);
        poison = _mm256_fmadd_ps(value, _mm256_setzero_ps(), poison);
    }
    let half = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps::<1>(largest));
    let half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    let largest = _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps::<1>(half, half)));
    (largest, add_up(poison))
}

#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
fn add_up(lanes: __m256) -> f32 {
    let half = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
    let half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps::<1>(half, half)))
}

#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
fn add_up_integers(lanes: __m256i) -> i32 {
    let half = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256::<1>(lanes));
    let half = _mm_add_epi32(half, _mm_shuffle_epi32::<0b1110>(half));
    _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32::<1>(half)))
}

/// Stores the P pieces of one group; gives the sums of A and of B.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn cut_group<const P: usize>(values: &[f32], inverse: __m256, pieces: *mut i32) -> (i32, i32) {
    // 2^s, and what makes the lower bytes of a sum with it their distances from -128.
    let (unit, middle) = match P {
        2 => (1.0, 0x80),
        3 => (256.0, 0x8080),
        _ => (65536.0, 0x0080_8080),
    };
    let middle = _mm256_set1_epi32(middle);
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    // A word of four columns for each piece, the upper piece first.
    let split = _mm256_broadcastsi128_si256(match P {
        2 => _mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1),
        3 => _mm_setr_epi8(2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12, -1, -1, -1, -1),
        _ => _mm_setr_epi8(3, 7, 11, 15, 2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12),
    });
    let (mut upper_sum, mut lower_sum) = (_mm256_setzero_si256(), _mm256_setzero_si256());
    for (block, values) in values.chunks_exact(8).enumerate() {
        // SAFETY: eight floats; a block's words of the row.
        unsafe {
            let value = _mm256_mul_ps(_mm256_loadu_ps(values.as_ptr()), inverse);
            let integer = _mm256_cvtps_epi32(_mm256_mul_ps(value, _mm256_set1_ps(unit)));
            let (upper, lower) = match P {
                2 => (integer, _mm256_setzero_si256()),
                3 => {
                    let upper = _mm256_srai_epi32::<8>(_mm256_add_epi32(integer, _mm256_set1_epi32(0x80)));
                    (upper, _mm256_sub_epi32(integer, _mm256_slli_epi32::<8>(upper)))
                }
                _ => {
                    let upper = _mm256_srai_epi32::<16>(_mm256_add_epi32(integer, _mm256_set1_epi32(0x8080)));
                    (upper, _mm256_sub_epi32(integer, _mm256_slli_epi32::<16>(upper)))
                }
            };
            upper_sum = _mm256_add_epi32(upper_sum, upper);
            lower_sum = _mm256_add_epi32(lower_sum, lower);
            let bytes = _mm256_xor_si256(_mm256_add_epi32(integer, middle), middle);
            let words = _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(bytes, order), split);
            if P == 2 {
                let words = _mm256_permute4x64_epi64::<0b1000>(words);
                _mm_storeu_si128(pieces.add(4 * block).cast(), _mm256_castsi256_si128(words));
            } else {
                _mm256_storeu_si256(pieces.add(8 * block).cast(), words);
            }
        }
    }
    (add_up_integers(upper_sum), add_up_integers(lower_sum))
}
