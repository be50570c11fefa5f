//! The two loops that calibration spends its time in, compiled for the CPU's own instructions.

use super::super::super::super::device::cpu::isa::{Arch, LANES, Work, fma};

/// Rows worked on together: four times two registers of sums.
pub const ROWS: usize = 4;

/// Columns of a matrix side by side in blocks of 16, as the kernels read them: [blocks][rows][16]. Short blocks are
/// filled with zeros.
#[derive(Debug, Clone, Default)]
pub struct Blocks {
    pub rows: usize,
    values: Vec<[f32; LANES]>,
}

impl Blocks {
    /// `at(row, column)` of a [rows, columns] matrix.
    pub fn new(rows: usize, columns: usize, at: impl Fn(usize, usize) -> f32) -> Self {
        let mut values = Vec::with_capacity(columns.div_ceil(LANES) * rows);
        for start in (0..columns).step_by(LANES) {
            for row in 0..rows {
                let lane = |lane: usize| if start + lane < columns { at(row, start + lane) } else { 0.0 };
                values.push(std::array::from_fn(lane));
            }
        }
        Self { rows, values }
    }
}

/// Sum of squares of d M for each of [`ROWS`] rows of `d`, [ROWS][M's rows].
pub struct SquaredProduct<'a> {
    pub d: &'a [f32],
    pub matrix: &'a Blocks,
}

impl Work for SquaredProduct<'_> {
    type Output = [f32; ROWS];

    #[inline(always)]
    fn run<A: Arch>(self) -> [f32; ROWS] {
        let mut total = [0f32; ROWS];
        for block in self.matrix.values.chunks_exact(self.matrix.rows) {
            let sums = product::<A>(self.d, block);
            for (total, sums) in total.iter_mut().zip(&sums) {
                *total += sums.iter().map(|sum| sum * sum).sum::<f32>();
            }
        }
        total
    }
}

/// dᵀ M d for each of [`ROWS`] rows of `d`, with M square.
pub struct QuadraticForm<'a> {
    pub d: &'a [f32],
    pub matrix: &'a Blocks,
}

impl Work for QuadraticForm<'_> {
    type Output = [f32; ROWS];

    #[inline(always)]
    fn run<A: Arch>(self) -> [f32; ROWS] {
        let size = self.matrix.rows;
        let mut total = [0f32; ROWS];
        for (block, start) in self.matrix.values.chunks_exact(size).zip((0..size).step_by(LANES)) {
            let sums = product::<A>(self.d, block);
            for (row, sums) in sums.iter().enumerate() {
                let d = &self.d[row * size..(row + 1) * size];
                total[row] += d[start..].iter().zip(sums).map(|(d, sum)| d * sum).sum::<f32>();
            }
        }
        total
    }
}

/// Sixteen columns of d M.
#[inline(always)]
fn product<A: Arch>(d: &[f32], block: &[[f32; LANES]]) -> [[f32; LANES]; ROWS] {
    let size = block.len();
    let (d0, rest) = d.split_at(size);
    let (d1, rest) = rest.split_at(size);
    let (d2, d3) = rest.split_at(size);
    let mut sums = [[0f32; LANES]; ROWS];
    for (i, lanes) in block.iter().enumerate() {
        let weights = [d0[i], d1[i], d2[i], d3[i]];
        for r in 0..ROWS {
            for l in 0..LANES {
                sums[r][l] = fma::<A>(weights[r], lanes[l], sums[r][l]);
            }
        }
    }
    sums
}

/// What rounding moves a group of weights by: out = (q - zero) step - w, with q as the file stores it.
pub struct RoundingError<'a> {
    pub weights: &'a [f32],
    pub scale: f32,
    pub zero: f32,
    pub out: &'a mut [f32],
}

impl Work for RoundingError<'_> {
    type Output = ();

    #[inline(always)]
    fn run<A: Arch>(self) {
        for (out, w) in self.out.iter_mut().zip(self.weights) {
            let q = ((w / self.scale).round_ties_even() + self.zero).clamp(0.0, 15.0);
            *out = (q - self.zero) * self.scale - w;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::super::super::device::cpu::isa::Isa;
    use super::*;

    fn noise(seed: usize, len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 37 + seed * 911) as f32 * 0.713).sin()).collect()
    }

    #[test]
    fn kernels_match_plain_sums() {
        for (rows, columns) in [(8, 8), (24, 40), (32, 33)] {
            let matrix = noise(1, rows * columns);
            let d = noise(2, ROWS * rows);
            let blocks = Blocks::new(rows, columns, |r, c| matrix[r * columns + c]);
            let column = |k: usize, c: usize| {
                (0..rows).map(|r| f64::from(d[k * rows + r] * matrix[r * columns + c])).sum::<f64>()
            };
            for isa in Isa::available() {
                let found = isa.run(SquaredProduct { d: &d, matrix: &blocks });
                for (k, found) in found.iter().enumerate() {
                    let right: f64 = (0..columns).map(|c| column(k, c).powi(2)).sum();
                    assert!((f64::from(*found) - right).abs() < 1e-4 * right, "{isa:?} {found} {right}");
                }
            }
            let square = Blocks::new(rows, rows, |r, c| matrix[(r * 7 + c * 3) % matrix.len()]);
            let at = |r: usize, c: usize| matrix[(r * 7 + c * 3) % matrix.len()];
            let found = Isa::detect().run(QuadraticForm { d: &d, matrix: &square });
            for (k, found) in found.iter().enumerate() {
                let d = &d[k * rows..(k + 1) * rows];
                let right: f64 = (0..rows * rows)
                    .map(|i| f64::from(d[i / rows] * at(i / rows, i % rows) * d[i % rows]))
                    .sum();
                assert!((f64::from(*found) - right).abs() < 1e-3, "{found} {right}");
            }
        }
    }

    #[test]
    fn rounding_errors_are_those_of_the_file() {
        use super::super::super::FileFormat;
        use super::super::super::grid::Grid;
        use crate::engine::model::layout::WeightFormat;
        for format in [FileFormat::Awq, FileFormat::CompressedTensors] {
            let grid = Grid { format, group: 32, scale_format: WeightFormat::F16 };
            let weights = noise(5, 32);
            let step = grid.step(&weights, 0.8).unwrap();
            let mut out = vec![0f32; 32];
            let zero = f32::from(step.zero);
            Isa::detect().run(RoundingError { weights: &weights, scale: step.scale, zero, out: &mut out });
            for (error, &w) in out.iter().zip(&weights) {
                assert_eq!(*error, step.dequantize(step.quantize(w)) - w);
            }
        }
    }
}
