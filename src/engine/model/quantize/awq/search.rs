//! The scales of one group: s = m^alpha over the root of its largest times its smallest, m a channel's mean |x|, with
//! the alpha of twenty whose rounded modules give the outputs nearest to the original ones on the calibration's rows.

use super::super::super::super::device::cpu::isa::Isa;
use super::super::super::dequant::rows_to_f32;
use super::super::super::spec::Linear;
use super::super::super::weights::MatrixData;
use super::super::grid::Grid;
use super::super::inputs::Rows;
use super::groups::Before;
use super::kernels::{Blocks, ROWS, RoundingError, SquaredProduct};

/// Values of alpha: 0, 1/20, ..., 19/20; 0 leaves the weights as they are.
const ALPHAS: usize = 20;
/// Activation rows that outputs are compared on.
const MOST_INPUT_ROWS: usize = 256;
/// Rows of a module that are compared, evenly spread.
const MOST_WEIGHT_ROWS: usize = 1024;
/// A channel that is hardly ever used still gets a scale.
const LEAST_MEAN: f32 = 1e-4;

/// A module to round, and how.
pub struct Module<'a> {
    pub linear: Linear,
    pub data: MatrixData<'a>,
    pub grid: Grid,
}

/// What was found for a group.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// Factor of each class of input channels, all 1 if nothing is gained.
    pub scales: Vec<f32>,
    /// Sum of squared errors of the outputs without and with it.
    pub before: f64,
    pub after: f64,
}

/// `allowed` turns wished-for scales of the classes into those that what comes before can take exactly.
pub fn search(
    modules: &[Module<'_>],
    inputs: &Rows,
    classes: &[usize],
    allowed: &dyn Fn(&[f32]) -> Vec<f32>,
) -> Found {
    let isa = Isa::detect();
    let cols = inputs.cols;
    let means = class_means(inputs, classes);
    let candidates: Vec<Vec<f32>> =
        (0..ALPHAS).map(|at| allowed(&normalised(&means, at as f32 / ALPHAS as f32))).collect();
    // The scale of every channel, and its inverse.
    let channels: Vec<(Vec<f32>, Vec<f32>)> = candidates
        .iter()
        .map(|scales| {
            let scales: Vec<f32> = classes.iter().map(|&class| scales[class]).collect();
            let inverse = scales.iter().map(|scale| 1.0 / scale).collect();
            (scales, inverse)
        })
        .collect();
    let rows = inputs.values.len() / cols;
    let every = rows.div_ceil(MOST_INPUT_ROWS).max(1);
    let x = Blocks::new(cols, rows.div_ceil(every), |col, row| inputs.values[row * every * cols + col]);

    let mut errors = vec![0f64; candidates.len()];
    let mut weights = vec![0f32; ROWS * cols];
    let mut scaled = vec![0f32; cols];
    let mut moved = vec![0f32; ROWS * cols];
    for module in modules {
        let Linear { rows, cols, .. } = module.linear;
        let every = rows.div_ceil(MOST_WEIGHT_ROWS);
        let chosen: Vec<usize> = (0..rows).step_by(every).collect();
        for block in chosen.chunks(ROWS) {
            for (&row, weights) in block.iter().zip(weights.chunks_exact_mut(cols)) {
                rows_to_f32(&module.data, rows, cols, row..row + 1, weights);
            }
            for ((scales, inverse), error) in channels.iter().zip(&mut errors) {
                moved.fill(0.0);
                for (weights, moved) in
                    weights.chunks_exact(cols).zip(moved.chunks_exact_mut(cols)).take(block.len())
                {
                    scaled.iter_mut().zip(weights.iter().zip(scales)).for_each(|(to, (w, s))| *to = w * s);
                    rounding_errors(isa, module.grid, &scaled, moved);
                    moved.iter_mut().zip(inverse).for_each(|(moved, inverse)| *moved *= inverse);
                }
                let squares = isa.run(SquaredProduct { d: &moved, matrix: &x });
                *error += squares.iter().map(|&square| f64::from(square)).sum::<f64>() * every as f64;
            }
        }
    }
    let best = (0..errors.len()).min_by(|&a, &b| errors[a].total_cmp(&errors[b])).unwrap_or(0);
    Found {
        before: errors[0],
        after: errors[best],
        scales: candidates.into_iter().nth(best).unwrap_or_default(),
    }
}

/// What rounding moves each weight of a row by; a group without a step counts as moved by all of itself.
fn rounding_errors(isa: Isa, grid: Grid, weights: &[f32], out: &mut [f32]) {
    for (weights, out) in weights.chunks_exact(grid.group).zip(out.chunks_exact_mut(grid.group)) {
        match grid.step(weights, 1.0) {
            Some(step) => {
                isa.run(RoundingError { weights, scale: step.scale, zero: f32::from(step.zero), out });
            }
            None => out.copy_from_slice(weights),
        }
    }
}

/// Mean |x| over the channels of each class.
fn class_means(inputs: &Rows, classes: &[usize]) -> Vec<f32> {
    let mut sums = vec![0f64; classes.iter().max().map_or(0, |most| most + 1)];
    let mut counts = vec![0usize; sums.len()];
    for row in inputs.values.chunks_exact(inputs.cols) {
        for (x, &class) in row.iter().zip(classes) {
            sums[class] += f64::from(x.abs());
            counts[class] += 1;
        }
    }
    sums.iter().zip(counts).map(|(sum, count)| (sum / count.max(1) as f64) as f32).collect()
}

fn normalised(means: &[f32], alpha: f32) -> Vec<f32> {
    let powers: Vec<f32> = means.iter().map(|mean| mean.max(LEAST_MEAN).powf(alpha)).collect();
    let (least, most) = powers.iter().fold((f32::MAX, 0f32), |(least, most), &p| (least.min(p), most.max(p)));
    powers.iter().map(|power| power / (least * most).sqrt()).collect()
}

/// Scales that `before` can take exactly: a norm's new weight is rounded to its stored type first, and the scale is
/// what that weight then says. Returns the scales and the new stored weights.
pub fn taken_by_norm(
    stored: &[f32],
    plus_one: bool,
    round: &dyn Fn(f32) -> f32,
    wished: &[f32],
) -> (Vec<f32>, Vec<f32>) {
    let one = if plus_one { 1.0 } else { 0.0 };
    let take = |(&stored, &wished): (&f32, &f32)| {
        let new = round((stored + one) / wished - one);
        let scale = (stored + one) / (new + one);
        // A weight that is or becomes zero cannot say its scale.
        if scale.is_finite() && scale > 0.0 { (scale, new) } else { (1.0, stored) }
    };
    stored.iter().zip(wished).map(take).unzip()
}

impl Before {
    /// The name that messages show.
    pub fn name(&self) -> String {
        match self {
            Self::Norm { vector, .. } => vector.clone(),
            Self::Linear { linear, .. } => linear.name(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::super::layout::WeightFormat;
    use super::super::super::super::spec::Role;
    use super::super::super::FileFormat;
    use super::super::noise;
    use super::*;

    /// Sum of squared errors of the outputs with the given scales, by plain sums.
    fn error(grid: Grid, weights: &[f32], inputs: &Rows, scales: &[f32]) -> f64 {
        let mut moved = Vec::new();
        for row in weights.chunks_exact(inputs.cols) {
            let scaled: Vec<f32> = row.iter().zip(scales).map(|(w, s)| w * s).collect();
            for (at, group) in scaled.chunks_exact(grid.group).enumerate() {
                let step = grid.step(group, 1.0).unwrap();
                let moves = group.iter().map(|&w| step.dequantize(step.quantize(w)) - w);
                moved.extend(moves.zip(&scales[at * grid.group..]).map(|(moved, s)| f64::from(moved / s)));
            }
        }
        let output =
            |moved: &[f64], x: &[f32]| moved.iter().zip(x).map(|(d, &x)| d * f64::from(x)).sum::<f64>();
        let rows = moved.chunks_exact(inputs.cols);
        rows.flat_map(|moved| inputs.values.chunks_exact(inputs.cols).map(move |x| output(moved, x).powi(2)))
            .sum()
    }

    #[test]
    fn channels_that_matter_get_finer_steps() {
        let (rows, cols, group) = (64, 64, 32);
        let weights = noise(1, rows * cols);
        let bytes: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
        // One channel of each group carries nearly all of the input; its weights are no larger than the others'.
        let mut inputs = Rows { cols, values: noise(2, 128 * cols) };
        inputs.values.iter_mut().enumerate().filter(|(i, _)| i % group != 5).for_each(|(_, x)| *x *= 0.02);
        let classes: Vec<usize> = (0..cols).collect();
        let module = |format| Module {
            linear: Linear { layer: Some(0), role: Role::Gate, rows, cols },
            data: MatrixData::Dense { format: WeightFormat::F32, bytes: &bytes },
            grid: Grid { format, group, scale_format: WeightFormat::F16 },
        };
        for format in [FileFormat::Awq, FileFormat::CompressedTensors] {
            let module = module(format);
            let grid = module.grid;
            let found = search(&[module], &inputs, &classes, &<[f32]>::to_vec);
            assert!(found.after < 0.5 * found.before, "{format:?} {found:?}");
            assert!(found.scales[5] > 2.0 * found.scales[10], "{:?}", found.scales);
            for (scales, right) in [(&vec![1.0; cols], found.before), (&found.scales, found.after)] {
                let plain = error(grid, &weights, &inputs, scales);
                assert!((plain - right).abs() < 1e-3 * right, "{format:?} {plain} {right}");
            }
        }
        // Where all scales must be equal nothing can be gained.
        let found = search(&[module(FileFormat::Awq)], &inputs, &classes, &|wished| vec![1.0; wished.len()]);
        assert_eq!(found.before, found.after);
    }

    #[test]
    fn a_rounded_norm_says_its_scales() {
        let bf16 = |value: f32| half::bf16::from_f32(value).to_f32();
        let stored = [0.5, -0.25, 0.0, -1.0];
        let (scales, new) = taken_by_norm(&stored, true, &bf16, &[3.0, 0.7, 20.0, 2.0]);
        for i in 0..3 {
            assert!(((1.0 + new[i]) * scales[i] - (1.0 + stored[i])).abs() < 1e-6);
            assert_eq!(new[i], bf16(new[i]));
        }
        assert_eq!((scales[3], new[3]), (1.0, -1.0), "1 + w is zero");
        let (scales, new) = taken_by_norm(&[2.0, 0.0], false, &bf16, &[4.0, 4.0]);
        assert_eq!((scales, new), (vec![4.0, 1.0], vec![0.5, 0.0]));
    }
}
