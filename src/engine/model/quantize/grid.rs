//! Rounding to 4 bits: the grid of a group of weights, and the packed words of both file formats.
//!
//! A grid is a 16-bit scale s and a zero point z: w is stored as q = round(w / s) + z within 0..=15 and read back as
//! (q - z) s. AutoAWQ's grid spans the group's range and zero, s = (max - min) / 15; the symmetric one of
//! compressed-tensors has z = 8 and s = max |w| / 7.5. The scale is rounded up to its 16-bit type, so that no weight
//! is moved by more than half a step.

use super::super::dequant::AWQ_NIBBLE;
use super::super::layout::WeightFormat;
use super::FileFormat;

/// How a module's weights are rounded and stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    pub format: FileFormat,
    /// Columns that share a scale.
    pub group: usize,
    /// F16 or Bf16: the type of the scales.
    pub scale_format: WeightFormat,
}

/// Scale and zero point of one group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// The scale's 16 bits as stored.
    pub bits: u16,
    pub scale: f32,
    pub zero: u8,
}

impl Step {
    /// The stored integer of `weight`.
    #[inline]
    pub fn quantize(self, weight: f32) -> u8 {
        // Within 0..=15 by the clamp.
        ((weight / self.scale).round_ties_even() + f32::from(self.zero)).clamp(0.0, 15.0) as u8
    }

    /// What is read back for a stored integer.
    #[cfg(test)]
    pub fn dequantize(self, stored: u8) -> f32 {
        (f32::from(stored) - f32::from(self.zero)) * self.scale
    }
}

impl Grid {
    /// The step for a group of finite weights, whose range is taken times `share` (1: nothing is clipped); `None` if its
    /// scale is too large for 16 bits.
    pub fn step(&self, weights: &[f32], share: f32) -> Option<Step> {
        let (min, max) = weights.iter().fold((0f32, 0f32), |(min, max), &w| (min.min(w), max.max(w)));
        let (min, max) = (min * share, max * share);
        let scale = match self.format {
            FileFormat::Awq => (max - min) / 15.0,
            FileFormat::CompressedTensors => max.max(-min) / 7.5,
        };
        let (bits, scale) = round_up(self.scale_format, scale)?;
        let zero = match self.format {
            FileFormat::Awq => (-min / scale).round_ties_even().clamp(0.0, 15.0) as u8,
            FileFormat::CompressedTensors => 8,
        };
        Some(Step { bits, scale, zero })
    }
}

/// The least 16-bit float that is not below `scale`, at least the smallest normal one: its bits and its value.
/// `None` if there is no finite one.
fn round_up(format: WeightFormat, scale: f32) -> Option<(u16, f32)> {
    let value = |bits: u16| match format {
        WeightFormat::Bf16 => half::bf16::from_bits(bits).to_f32(),
        _ => half::f16::from_bits(bits).to_f32(),
    };
    let (nearest, smallest) = match format {
        WeightFormat::Bf16 => (half::bf16::from_f32(scale).to_bits(), half::bf16::MIN_POSITIVE.to_bits()),
        _ => (half::f16::from_f32(scale).to_bits(), half::f16::MIN_POSITIVE.to_bits()),
    };
    // Bits of positive floats are in the order of their values.
    let bits = if value(nearest) < scale { nearest + 1 } else { nearest }.max(smallest);
    Some((bits, value(bits))).filter(|(_, value)| value.is_finite())
}

/// A module's three packed tensors, little-endian, in the file's layout.
pub struct PackedModule {
    grid: Grid,
    rows: usize,
    cols: usize,
    pub weights: Vec<u32>,
    pub scales: Vec<u16>,
    /// Empty for a symmetric grid.
    pub zeros: Vec<u32>,
}

impl PackedModule {
    /// Room for a [rows, cols] module; `rows` (AutoAWQ) and `cols` are multiples of 8, and the group divides `cols`.
    pub fn new(grid: Grid, rows: usize, cols: usize) -> Self {
        let groups = cols / grid.group;
        let zeros = if grid.format == FileFormat::Awq { groups * rows / 8 } else { 0 };
        Self {
            grid,
            rows,
            cols,
            weights: vec![0; rows * cols / 8],
            scales: vec![0; rows * groups],
            zeros: vec![0; zeros],
        }
    }

    /// Rounds and stores row `row` with a step for each of its groups.
    pub fn set_row(&mut self, row: usize, weights: &[f32], steps: &[Step]) {
        let (group, words_per_row) = (self.grid.group, self.rows / 8);
        let shift = 4 * AWQ_NIBBLE[row % 8];
        for (at, (weights, step)) in weights.chunks_exact(group).zip(steps).enumerate() {
            match self.grid.format {
                FileFormat::Awq => {
                    self.scales[at * self.rows + row] = step.bits;
                    self.zeros[at * words_per_row + row / 8] |= u32::from(step.zero) << shift;
                    for (i, &weight) in weights.iter().enumerate() {
                        let word = (at * group + i) * words_per_row + row / 8;
                        self.weights[word] |= u32::from(step.quantize(weight)) << shift;
                    }
                }
                FileFormat::CompressedTensors => {
                    self.scales[row * (self.cols / group) + at] = step.bits;
                    for (i, weights) in weights.chunks_exact(8).enumerate() {
                        let nibbles = weights.iter().rev();
                        self.weights[(row * self.cols + at * group) / 8 + i] =
                            nibbles.fold(0, |word, &weight| word << 4 | u32::from(step.quantize(weight)));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::dequant::rows_to_f32;
    use super::super::super::weights::MatrixData;
    use super::*;

    fn bytes<const N: usize, T: Copy>(values: &[T], to: impl Fn(T) -> [u8; N]) -> Vec<u8> {
        values.iter().flat_map(|&value| to(value)).collect()
    }

    /// Weights of several magnitudes: groups of both signs, of one sign, and of zeros.
    fn weights(rows: usize, cols: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 7919 % 1009) as f32 / 1009.0 - 0.5) * 0.1;
        let shaped = |i: usize| match i / 32 % 4 {
            0 => value(i),
            1 => value(i).abs() + 0.2,
            2 => -value(i).abs() * 1e-6,
            _ => 0.0,
        };
        (0..rows * cols).map(shaped).collect()
    }

    #[test]
    fn nothing_moves_by_more_than_half_a_step() {
        let (rows, cols, group) = (16, 128, 32);
        let all = weights(rows, cols);
        for (format, scale_format) in [
            (FileFormat::Awq, WeightFormat::F16),
            (FileFormat::CompressedTensors, WeightFormat::F16),
            (FileFormat::CompressedTensors, WeightFormat::Bf16),
        ] {
            let grid = Grid { format, group, scale_format };
            let mut module = PackedModule::new(grid, rows, cols);
            for (row, weights) in all.chunks(cols).enumerate() {
                let steps: Vec<Step> =
                    weights.chunks(group).map(|weights| grid.step(weights, 1.0).unwrap()).collect();
                module.set_row(row, weights, &steps);
            }
            let packed = bytes(&module.weights, u32::to_le_bytes);
            let scales = bytes(&module.scales, u16::to_le_bytes);
            let zeros = bytes(&module.zeros, u32::to_le_bytes);
            let data = match format {
                FileFormat::Awq => {
                    MatrixData::Awq { group, qweight: &packed, qzeros: &zeros, scales: &scales }
                }
                FileFormat::CompressedTensors => MatrixData::CompressedTensors {
                    group,
                    packed: &packed,
                    scales: &scales,
                    scale_format,
                    zero_points: None,
                },
            };
            let mut read = vec![0f32; rows * cols];
            rows_to_f32(&data, rows, cols, 0..rows, &mut read);
            for (at, (weights, read)) in all.chunks(group).zip(read.chunks(group)).enumerate() {
                let step = grid.step(weights, 1.0).unwrap();
                for (&weight, &read) in weights.iter().zip(read) {
                    assert_eq!(read, step.dequantize(step.quantize(weight)), "{format:?} group {at}");
                    let moved = (weight - read).abs();
                    assert!(moved <= 0.5001 * step.scale, "{format:?} group {at}: {weight} {read} {step:?}");
                }
            }
        }
    }

    #[test]
    fn steps_of_known_groups() {
        let awq = Grid { format: FileFormat::Awq, group: 8, scale_format: WeightFormat::F16 };
        let step = awq.step(&[-5.0, 10.0, 0.0], 1.0).unwrap();
        assert_eq!((step.scale, step.zero), (1.0, 5));
        assert_eq!([-5.0, 10.0, 0.0, 0.6].map(|w| step.quantize(w)), [0, 15, 5, 6]);
        let symmetric = Grid { format: FileFormat::CompressedTensors, ..awq };
        let step = symmetric.step(&[-7.5, 3.0], 1.0).unwrap();
        assert_eq!((step.scale, step.zero, step.quantize(-7.5), step.quantize(7.5)), (1.0, 8, 0, 15));
        assert!(awq.step(&[0.0; 4], 1.0).is_some_and(|step| step.quantize(0.0) == step.zero));
        assert_eq!(awq.step(&[2e6, -1.0], 1.0), None, "its scale is above 65504");
    }
}
