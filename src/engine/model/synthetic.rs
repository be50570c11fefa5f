//! Seeded random weights of a real shape, so that experiments need no download.
//!
//! Which instructions run does not depend on the values, but what they draw does: products of thousands of rows on a GPU at
//! its power limit are 5 to 19 % faster with constant weights (docs/perf-log.md). So weights are noise, and 4-bit
//! integers have about the spread of rounded weights.
//!
//! A value is a function of (seed, index) alone, so that a device can make its own part of a matrix where it lies.
//! The function is short enough for a CUDA kernel to repeat bit for bit: 32-bit integer operations, one conversion and
//! one f32 multiplication.

use super::layout::ModelLayout;
use super::spec::{Linear, Role};
use super::weights::{MatrixData, Weights};
use crate::{Error, Result};

/// The two 32-bit keys of a seed and a block of 2^32 indices: all that a kernel needs beside the index's low half.
pub fn keys(seed: u64, index_high: u32) -> [u32; 2] {
    let mixed = splitmix64(seed ^ (u64::from(index_high) << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    [mixed as u32, (mixed >> 32) as u32]
}

/// 32 random bits for the low half of an index: two rounds of multiply and shift, a key before each.
#[inline(always)]
pub fn bits(keys: [u32; 2], index_low: u32) -> u32 {
    let mut x = index_low ^ keys[0];
    x ^= x >> 16;
    x = x.wrapping_mul(0x7FEB_352D);
    x ^= x >> 15;
    x = x.wrapping_add(keys[1]);
    x = x.wrapping_mul(0x846C_A68B);
    x ^ (x >> 16)
}

/// What an odd integer in (-2^24, 2^24) is multiplied with, so that a uniform draw has this standard deviation.
pub fn unit(std: f32) -> f32 {
    std * (1.732_050_8 / 16_777_216.0)
}

/// An f32 from 32 random bits: the upper 24 as an odd integer, times [`unit()`]. Never zero, exactly symmetric.
#[inline(always)]
pub fn from_bits(bits: u32, unit: f32) -> f32 {
    let odd = 2 * (bits >> 8) as i32 + 1 - 16_777_216;
    odd as f32 * unit
}

/// Element `index` (row-major) of the noise of `seed`: uniform, mean 0, standard deviation `std`.
/// 16-bit formats hold it rounded to nearest even.
pub fn value(seed: u64, index: u64, std: f32) -> f32 {
    from_bits(bits(keys(seed, (index >> 32) as u32), index as u32), unit(std))
}

/// Elements `start..start + out.len()` through `convert`, at memory speed where the compiler vectorises it.
#[inline(always)]
fn fill_with<T>(seed: u64, start: u64, std: f32, out: &mut [T], convert: impl Fn(f32) -> T) {
    let unit = unit(std);
    let mut index = start;
    let mut rest = out;
    while !rest.is_empty() {
        let keys = keys(seed, (index >> 32) as u32);
        let low = index as u32;
        let until_carry = (1u64 << 32) - u64::from(low);
        let (now, later) = rest.split_at_mut((rest.len() as u64).min(until_carry) as usize);
        for (offset, slot) in now.iter_mut().enumerate() {
            *slot = convert(from_bits(bits(keys, low.wrapping_add(offset as u32)), unit));
        }
        index += now.len() as u64;
        rest = later;
    }
}

/// Values `start..` as f32.
pub fn fill_f32(seed: u64, start: u64, std: f32, out: &mut [f32]) {
    fill_with(seed, start, std, out, |value| value);
}

/// Values `start..` as the bits of f16.
pub fn fill_f16(seed: u64, start: u64, std: f32, out: &mut [u16]) {
    fill_with(seed, start, std, out, |value| half::f16::from_f32(value).to_bits());
}

/// Values `start..` as the bits of bf16.
pub fn fill_bf16(seed: u64, start: u64, std: f32, out: &mut [u16]) {
    fill_with(seed, start, std, out, |value| half::bf16::from_f32(value).to_bits());
}

/// Element `index` (row-major) of a synthetic int4 matrix: the sum of two draws from 0..8 and one from 0..2. So it is
/// near 7 or 8 more often than at an end, with a standard deviation of 3.28. Rounding normal weights to 16 levels between the
/// least and the largest of a group, as quantisers do, gives 3.05 in groups of 128 and 3.36 in groups of 64; the integers of
/// SmolLM2-135M-Instruct, rounded so in groups of 64, have 3.32. All levels alike would be 4.61.
#[inline(always)]
pub fn int4_value(seed: u64, index: u64) -> u32 {
    let bits = bits(keys(seed, (index >> 32) as u32), index as u32);
    (bits >> 29) + (bits >> 26 & 7) + (bits >> 25 & 1)
}

/// Eight of them: nibble i (bits 4i) is element `8 * word_index + i`.
pub fn int4_word(seed: u64, word_index: u64) -> u32 {
    (0..8).fold(0, |word, i| word | int4_value(seed, 8 * word_index + i) << (4 * i))
}

/// The zero point of group `group_index` (row-major over [rows, cols / group]): 7 or 8, so that the mean is zero.
/// A symmetric matrix has 8 everywhere.
pub fn int4_zero_point(seed: u64, group_index: u64) -> u8 {
    let keys = keys(!seed, (group_index >> 32) as u32);
    7 + (bits(keys, group_index as u32) >> 31) as u8
}

/// The scale of every group: [`int4_value`] has a variance of 63/12 + 63/12 + 3/12.
pub fn int4_scale(std: f32) -> half::f16 {
    half::f16::from_f32(std / 3.278_719)
}

/// Weights of a preset, made where they are asked for.
#[derive(Debug, Clone)]
pub struct SyntheticWeights {
    layout: ModelLayout,
    seed: u64,
}

impl SyntheticWeights {
    pub fn new(layout: ModelLayout, seed: u64) -> Self {
        Self { layout, seed }
    }

    fn tensor_seed(&self, name: &str) -> u64 {
        name.bytes().fold(splitmix64(self.seed), |hash, byte| splitmix64(hash ^ u64::from(byte)))
    }
}

impl Weights for SyntheticWeights {
    fn linear(&self, linear: &Linear) -> Result<MatrixData<'_>> {
        if linear.role == Role::Head && self.layout.spec.tied_head {
            return self.embedding();
        }
        let Some((_, format)) = self.layout.linears.iter().find(|(known, _)| known == linear) else {
            return Err(Error::failed(
                format!("synthetic weights have no module `{}` of this shape", linear.name()),
                "this is a fault of the program: please report it",
            ));
        };
        let std = 1.0 / (linear.cols as f32).sqrt();
        Ok(MatrixData::Synthetic { format: *format, seed: self.tensor_seed(&linear.name()), std })
    }

    fn embedding(&self) -> Result<MatrixData<'_>> {
        let seed = self.tensor_seed("embed_tokens");
        Ok(MatrixData::Synthetic { format: self.layout.embedding, seed, std: 0.02 })
    }

    fn vector(&self, name: &str, elements: usize) -> Result<Vec<f32>> {
        let mut values = vec![0.0; elements];
        let seed = self.tensor_seed(name);
        // Uniform in 0..1 from noise that is uniform in -sqrt(3)..sqrt(3).
        let share = |noise: f32| noise / 3.464_101_6 + 0.5;
        if name.ends_with("A_log") {
            // A in 1..16: from slow to fast decay.
            fill_f32(seed, 0, 1.0, &mut values);
            values.iter_mut().for_each(|v| *v = (1.0 + 15.0 * share(*v)).ln());
        } else if name.ends_with("dt_bias") {
            // softplus(dt_bias) log-uniform in 0.001..0.1, the range that such layers are initialised with.
            fill_f32(seed, 0, 1.0, &mut values);
            values.iter_mut().for_each(|v| {
                let dt = 0.001 * 100f32.powf(share(*v));
                *v = dt + (-(-dt).exp_m1()).ln();
            });
        } else if name.ends_with("conv1d.weight") {
            fill_f32(seed, 0, 0.5, &mut values);
        } else {
            fill_f32(seed, 0, 0.02, &mut values);
            // A norm that multiplies by w, not by 1 + w, is neutral at 1. The gated norm is always of that kind.
            let norm = name.ends_with("norm.weight");
            if norm && (!self.layout.spec.norm_plus_one || name.ends_with("linear_attn.norm.weight")) {
                values.iter_mut().for_each(|v| *v += 1.0);
            }
        }
        Ok(values)
    }
}

fn splitmix64(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::super::presets::synthetic_layout;
    use super::*;

    #[test]
    fn noise_has_the_moments_asked_for() {
        let mut values = vec![0f32; 1 << 20];
        fill_f32(7, 0, 0.02, &mut values);
        let n = values.len() as f64;
        let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let variance = values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n;
        assert!(mean.abs() < 4.0 * 0.02 / n.sqrt(), "mean {mean}");
        assert!((variance.sqrt() / 0.02 - 1.0).abs() < 2e-3, "std {}", variance.sqrt());
        // Neighbours, rows of a power of two apart, and other seeds are uncorrelated.
        let mut other = vec![0f32; 1 << 20];
        fill_f32(8, 0, 0.02, &mut other);
        let correlation = |shift: usize, with: &[f32]| {
            let pairs = values.iter().zip(&with[shift..]);
            pairs.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() / n / 4e-4
        };
        for shift in [1, 2, 3, 256, 1024, 4096, 65536] {
            assert!(correlation(shift, &values).abs() < 5.0 / n.sqrt(), "shift {shift}");
        }
        assert!(correlation(0, &other).abs() < 5.0 / n.sqrt());
    }

    #[test]
    fn bulk_fill_equals_single_values_across_the_carry() {
        let start = (1u64 << 32) - 5;
        let mut wide = vec![0f32; 11];
        let mut half = vec![0u16; 11];
        let mut brain = vec![0u16; 11];
        fill_f32(3, start, 0.1, &mut wide);
        fill_f16(3, start, 0.1, &mut half);
        fill_bf16(3, start, 0.1, &mut brain);
        for i in 0..11 {
            let single = value(3, start + i as u64, 0.1);
            assert_eq!(wide[i].to_bits(), single.to_bits());
            assert_eq!(half[i], half::f16::from_f32(single).to_bits());
            assert_eq!(brain[i], half::bf16::from_f32(single).to_bits());
        }
    }

    #[test]
    fn the_hash_is_pinned() {
        // Other implementations (a CUDA kernel) must give these very bits.
        assert_eq!(keys(0, 0), [0x7b1d_cdaf, 0xe220_a839]);
        let drawn: Vec<u32> = (0..4).map(|i| bits(keys(1, 0), i)).collect();
        assert_eq!(drawn, [1_448_771_786, 51_490_704, 4_055_890_205, 962_429_497]);
    }
    #[test]
    fn int4_noise_has_zero_mean_and_the_std() {
        let (mut sum, mut squares) = (0f64, 0f64);
        let scale = f64::from(int4_scale(0.02).to_f32());
        let words = 1 << 16;
        for word in 0..words {
            let zero = f64::from(int4_zero_point(5, word / 16));
            for nibble in 0..8 {
                let q = f64::from(int4_word(5, word) >> (4 * nibble) & 15);
                sum += (q - zero) * scale;
                squares += ((q - zero) * scale).powi(2);
            }
        }
        // A CUDA kernel must give the very same.
        assert_eq!(int4_word(5, 0), 0x3462_9a6c);
        let n = (8 * words) as f64;
        assert!((sum / n).abs() < 2e-4, "mean {}", sum / n);
        assert!(((squares / n).sqrt() / 0.02 - 1.0).abs() < 0.02, "std {}", (squares / n).sqrt());
    }

    #[test]
    fn vectors_are_in_realistic_ranges() {
        let layout = synthetic_layout("demo").unwrap();
        let weights = SyntheticWeights::new(layout, 0);
        let within = |name: &str, low: f32, high: f32| {
            let values = weights.vector(name, 1000).unwrap();
            assert!(values.iter().all(|v| (low..=high).contains(v)), "{name}: {values:?}");
            values
        };
        within("layers.0.input_layernorm.weight", -0.04, 0.04);
        within("layers.0.linear_attn.norm.weight", 0.96, 1.04);
        within("layers.0.linear_attn.A_log", 0.0, 16f32.ln());
        let dt_bias = within("layers.0.linear_attn.dt_bias", -6.91, -2.2);
        let softplus = dt_bias.iter().map(|b| b.exp().ln_1p());
        assert!(softplus.into_iter().all(|dt| (0.00099..=0.1001).contains(&dt)));
        assert_ne!(
            weights.vector("layers.0.linear_attn.A_log", 16).unwrap(),
            weights.vector("layers.1.linear_attn.A_log", 16).unwrap()
        );
    }
}
