//! Clipping: a group's range is narrowed where its rounded weights then give outputs nearer to the original ones, each
//! group for itself: the error is dᵀ G d, with d what rounding moves the weights by and G the second moments of their inputs.

use super::super::super::super::device::cpu::isa::Isa;
use super::super::grid::{Grid, Step};
use super::super::inputs::Rows;
use super::kernels::{Blocks, QuadraticForm, ROWS, RoundingError};

/// Shares of the range that are tried: 1, 0.95, ..., 0.45.
const RATIOS: usize = 12;
const RATIO_STEP: f32 = 0.05;

/// Second moments of a module's inputs, a block for each group of columns.
#[derive(Debug)]
pub struct Clip {
    moments: Vec<Blocks>,
}

impl Clip {
    /// `scales` are the columns' factors: inputs are divided by them.
    pub fn new(inputs: &Rows, group: usize, scales: &[f32]) -> Self {
        let moments = scales.chunks_exact(group).enumerate().map(|(at, scales)| {
            let mut sums = vec![0f32; group * group];
            for row in inputs.values.chunks_exact(inputs.cols) {
                let x = &row[at * group..(at + 1) * group];
                for (sums, a) in sums.chunks_exact_mut(group).zip(x) {
                    sums.iter_mut().zip(x).for_each(|(sum, b)| *sum += a * b);
                }
            }
            Blocks::new(group, group, |r, c| sums[r * group + c] / (scales[r] * scales[c]))
        });
        Self { moments: moments.collect() }
    }

    /// The step of group `at` with the least error, the least clipped of equals.
    pub fn step(&self, grid: Grid, at: usize, weights: &[f32]) -> Option<Step> {
        let isa = Isa::detect();
        let full = grid.step(weights, 1.0)?;
        let (mut best, mut least) = (full, f32::MAX);
        let mut moved = vec![0f32; ROWS * grid.group];
        for first in (0..RATIOS).step_by(ROWS) {
            let mut steps = [full; ROWS];
            for (i, (step, moved)) in steps.iter_mut().zip(moved.chunks_exact_mut(grid.group)).enumerate() {
                *step = grid.step(weights, 1.0 - (first + i) as f32 * RATIO_STEP)?;
                isa.run(RoundingError { weights, scale: step.scale, zero: f32::from(step.zero), out: moved });
            }
            let errors = isa.run(QuadraticForm { d: &moved, matrix: &self.moments[at] });
            for (step, error) in steps.into_iter().zip(errors) {
                if error < least {
                    (best, least) = (step, error);
                }
            }
        }
        Some(best)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::super::layout::WeightFormat;
    use super::super::super::FileFormat;
    use super::super::noise;
    use super::*;

    /// One weight far out, whose input is nearly always zero: the others gain from clipping it, unless its input counts.
    #[test]
    fn an_outlier_that_hardly_counts_is_clipped() {
        let (group, outlier) = (32, 3);
        let inputs = |factor: f32| {
            let mut values = noise(7, 256 * group);
            values.iter_mut().skip(outlier).step_by(group).for_each(|x| *x *= factor);
            Rows { cols: group, values }
        };
        // Mean squared error of the outputs, by plain sums.
        let error = |inputs: &Rows, weights: &[f32], step: Step| {
            let output = |x: &[f32]| {
                let moved = weights.iter().map(|&w| step.dequantize(step.quantize(w)) - w);
                moved.zip(x).map(|(moved, x)| f64::from(moved * x)).sum::<f64>()
            };
            inputs.values.chunks_exact(group).map(|x| output(x).powi(2)).sum::<f64>()
        };
        let (quiet, loud) = (inputs(0.01), inputs(100.0));
        for format in [FileFormat::Awq, FileFormat::CompressedTensors] {
            let grid = Grid { format, group, scale_format: WeightFormat::F16 };
            let step = |inputs: &Rows, weights: &[f32]| {
                Clip::new(inputs, group, &[1.0; 32]).step(grid, 0, weights).unwrap()
            };
            let (mut clipped, mut whole, mut narrowed) = (0.0, 0.0, 0);
            for seed in 0..8 {
                let mut weights = noise(seed, group);
                weights[outlier] = 4.0;
                let full = grid.step(&weights, 1.0).unwrap();
                let found = step(&quiet, &weights);
                narrowed += usize::from(found.scale < full.scale);
                clipped += error(&quiet, &weights, found);
                whole += error(&quiet, &weights, full);
                // None of the tried shares is better.
                for share in 0..RATIOS {
                    let other = grid.step(&weights, 1.0 - share as f32 * RATIO_STEP).unwrap();
                    let (least, other) = (error(&quiet, &weights, found), error(&quiet, &weights, other));
                    assert!(least <= other * 1.0001, "{format:?} {share}: {least} {other}");
                }
                let moved = |step: Step| (step.dequantize(step.quantize(4.0)) - 4.0).abs();
                let found = step(&loud, &weights);
                assert!(moved(found) <= moved(full), "{format:?} {found:?} {full:?}");
            }
            // Both ends of a range shrink alike, so the low weights limit what can be gained.
            assert!(clipped < 0.9 * whole && narrowed >= 6, "{format:?} {clipped} {whole} {narrowed}");
        }
    }
}
