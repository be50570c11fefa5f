//! Rows of a stored matrix as f32, element by element.
//!
//! Exact: (q - z) * s is one rounding in f32, and 16-bit floats widen without any.

use std::ops::Range;

use half::{bf16, f16};

use super::layout::WeightFormat;
use super::synthetic;
use super::weights::MatrixData;

/// The nibble of an AutoAWQ word that holds row offset i of the word's eight rows.
pub const AWQ_NIBBLE: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Writes rows `rows` of the [`total_rows`, `cols`] matrix, row-major, into `out`.
///
/// # Panics
/// If `out` does not hold `rows.len() * cols` values, or the data is not of that shape (the checkpoint checks it).
pub fn rows_to_f32(
    data: &MatrixData<'_>,
    total_rows: usize,
    cols: usize,
    rows: Range<usize>,
    out: &mut [f32],
) {
    assert_eq!(out.len(), rows.len() * cols, "output of {} rows of {cols}", rows.len());
    assert!(rows.end <= total_rows, "rows {rows:?} of {total_rows}");
    if let Some(source) = Int4Source::new(data, total_rows, cols) {
        for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
            for (g, out) in out.chunks_mut(source.group).enumerate() {
                let (zero, scale) = (source.zero(row, g) as f32, source.scale(row, g));
                for (i, out) in out.iter_mut().enumerate() {
                    *out = (source.value(row, g * source.group + i) as f32 - zero) * scale;
                }
            }
        }
        return;
    }
    match *data {
        MatrixData::Dense { format, bytes } => dense(format, bytes, rows.start * cols, out),
        MatrixData::Synthetic { format, seed, std } => {
            synthetic::fill_f32(seed, (rows.start * cols) as u64, std, out);
            match format {
                WeightFormat::F16 => out.iter_mut().for_each(|v| *v = f16::from_f32(*v).to_f32()),
                WeightFormat::Bf16 => out.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32()),
                _ => {}
            }
        }
        // 4-bit, so read above.
        MatrixData::Awq { .. } | MatrixData::CompressedTensors { .. } => {}
    }
}

/// Single values of a 4-bit [rows, cols] matrix in any of its stored layouts: weight = (value - zero) * scale, zero and scale
/// of the `group` columns it is in.
pub struct Int4Source<'a> {
    data: &'a MatrixData<'a>,
    rows: usize,
    cols: usize,
    pub group: usize,
}

impl<'a> Int4Source<'a> {
    /// `None` for a matrix that is not 4-bit. The data has to be of that shape (the checkpoint checks it).
    pub fn new(data: &'a MatrixData<'a>, rows: usize, cols: usize) -> Option<Self> {
        let group = match *data {
            MatrixData::Awq { group, .. }
            | MatrixData::CompressedTensors { group, .. }
            | MatrixData::Synthetic { format: WeightFormat::Int4 { group, .. }, .. } => group,
            MatrixData::Dense { .. } | MatrixData::Synthetic { .. } => return None,
        };
        Some(Self { data, rows, cols, group })
    }

    /// The stored integer, 0 to 15.
    pub fn value(&self, row: usize, col: usize) -> u32 {
        match *self.data {
            MatrixData::Awq { qweight, .. } => {
                word(qweight, col * (self.rows / 8) + row / 8) >> (4 * AWQ_NIBBLE[row % 8]) & 15
            }
            MatrixData::CompressedTensors { packed, .. } => {
                word(packed, row * (self.cols / 8) + col / 8) >> (4 * (col % 8)) & 15
            }
            MatrixData::Synthetic { seed, .. } => synthetic::int4_value(seed, (row * self.cols + col) as u64),
            MatrixData::Dense { .. } => 0,
        }
    }

    /// The zero point of a row's group, 0 to 15; 8 where none are stored.
    pub fn zero(&self, row: usize, group: usize) -> u32 {
        let groups = self.cols.div_ceil(self.group);
        match *self.data {
            MatrixData::Awq { qzeros, .. } => {
                word(qzeros, group * (self.rows / 8) + row / 8) >> (4 * AWQ_NIBBLE[row % 8]) & 15
            }
            MatrixData::CompressedTensors { zero_points: Some(zeros), .. } => {
                word(zeros, row / 8 * groups + group) >> (4 * (row % 8)) & 15
            }
            MatrixData::Synthetic { format: WeightFormat::Int4 { zero_points: true, .. }, seed, .. } => {
                u32::from(synthetic::int4_zero_point(seed, (row * groups + group) as u64))
            }
            _ => 8,
        }
    }

    /// The bits of a row's scale in a group: bf16 where the checkpoint has it so, else fp16.
    pub fn scale_bits(&self, row: usize, group: usize) -> u16 {
        match *self.data {
            MatrixData::Awq { scales, .. } => short(scales, group * self.rows + row),
            MatrixData::CompressedTensors { scales, .. } => {
                short(scales, row * self.cols.div_ceil(self.group) + group)
            }
            MatrixData::Synthetic { std, .. } => synthetic::int4_scale(std).to_bits(),
            MatrixData::Dense { .. } => 0,
        }
    }

    pub fn scale(&self, row: usize, group: usize) -> f32 {
        let bits = self.scale_bits(row, group);
        match *self.data {
            MatrixData::CompressedTensors { scale_format: WeightFormat::Bf16, .. } => {
                bf16::from_bits(bits).to_f32()
            }
            _ => f16::from_bits(bits).to_f32(),
        }
    }
}

fn dense(format: WeightFormat, bytes: &[u8], start: usize, out: &mut [f32]) {
    match format {
        WeightFormat::F32 => {
            let (all, _) = bytes.as_chunks::<4>();
            out.iter_mut().zip(&all[start..]).for_each(|(out, &b)| *out = f32::from_le_bytes(b));
        }
        WeightFormat::Bf16 => {
            let (all, _) = bytes.as_chunks::<2>();
            out.iter_mut().zip(&all[start..]).for_each(|(out, &b)| *out = bf16::from_le_bytes(b).to_f32());
        }
        _ => {
            let (all, _) = bytes.as_chunks::<2>();
            out.iter_mut().zip(&all[start..]).for_each(|(out, &b)| *out = f16::from_le_bytes(b).to_f32());
        }
    }
}

fn word(bytes: &[u8], index: usize) -> u32 {
    u32::from_le_bytes(bytes.as_chunks::<4>().0[index])
}

fn short(bytes: &[u8], index: usize) -> u16 {
    u16::from_le_bytes(bytes.as_chunks::<2>().0[index])
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: usize = 16;
    const COLS: usize = 64;

    /// 4-bit integers and zero points with a known answer.
    fn q(row: usize, col: usize) -> u32 {
        ((row * 7 + col * 13 + row * col) % 16) as u32
    }
    fn z(row: usize, group: usize) -> u32 {
        ((row * 5 + group * 3) % 16) as u32
    }
    fn scale(row: usize, group: usize) -> f32 {
        0.25 * (1 + row + 16 * group) as f32
    }

    #[test]
    fn awq_rows_are_the_values_packed() {
        let group = 32;
        let mut qweight = vec![0u32; COLS * ROWS / 8];
        let mut qzeros = vec![0u32; COLS / group * ROWS / 8];
        let mut scales = Vec::new();
        for col in 0..COLS {
            for (i, offset) in [0, 2, 4, 6, 1, 3, 5, 7].into_iter().enumerate() {
                for c in 0..ROWS / 8 {
                    qweight[col * ROWS / 8 + c] |= q(8 * c + offset, col) << (4 * i);
                    if col % group == 0 {
                        qzeros[col / group * ROWS / 8 + c] |= z(8 * c + offset, col / group) << (4 * i);
                    }
                }
            }
        }
        for at in 0..COLS / group {
            scales.extend((0..ROWS).flat_map(|row| half::f16::from_f32(scale(row, at)).to_le_bytes()));
        }
        let bytes = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
        let (qweight, qzeros) = (bytes(&qweight), bytes(&qzeros));
        let data = MatrixData::Awq { group, qweight: &qweight, qzeros: &qzeros, scales: &scales };
        check(&data, group, z);
    }

    #[test]
    fn compressed_tensors_rows_are_the_values_packed() {
        let group = 32;
        let groups = COLS / group;
        let mut packed = vec![0u32; ROWS * COLS / 8];
        let mut zeros = vec![0u32; ROWS / 8 * groups];
        let mut scales = Vec::new();
        for row in 0..ROWS {
            for col in 0..COLS {
                packed[(row * COLS + col) / 8] |= q(row, col) << (4 * (col % 8));
            }
            for at in 0..groups {
                zeros[row / 8 * groups + at] |= z(row, at) << (4 * (row % 8));
                scales.extend(half::bf16::from_f32(scale(row, at)).to_le_bytes());
            }
        }
        let bytes = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
        let (packed, zeros) = (bytes(&packed), bytes(&zeros));
        let data = |zero_points| MatrixData::CompressedTensors {
            group,
            packed: &packed,
            scales: &scales,
            scale_format: WeightFormat::Bf16,
            zero_points,
        };
        check(&data(Some(&zeros)), group, z);
        check(&data(None), group, |_, _| 8);
    }

    fn check(data: &MatrixData<'_>, group: usize, z: impl Fn(usize, usize) -> u32) {
        let mut all = vec![0f32; ROWS * COLS];
        rows_to_f32(data, ROWS, COLS, 0..ROWS, &mut all);
        for row in 0..ROWS {
            for col in 0..COLS {
                let expected = (q(row, col) as f32 - z(row, col / group) as f32) * scale(row, col / group);
                assert_eq!(all[row * COLS + col], expected, "row {row} col {col}");
            }
        }
        let mut some = vec![0f32; 3 * COLS];
        rows_to_f32(data, ROWS, COLS, 5..8, &mut some);
        assert_eq!(some, all[5 * COLS..8 * COLS]);
    }

    #[test]
    fn synthetic_rows_do_not_depend_on_the_range() {
        for format in [
            WeightFormat::F32,
            WeightFormat::F16,
            WeightFormat::Bf16,
            WeightFormat::Int4 { group: 32, zero_points: true },
        ] {
            let data = MatrixData::Synthetic { format, seed: 9, std: 0.1 };
            let mut all = vec![0f32; ROWS * COLS];
            rows_to_f32(&data, ROWS, COLS, 0..ROWS, &mut all);
            let mut some = vec![0f32; 2 * COLS];
            rows_to_f32(&data, ROWS, COLS, 3..5, &mut some);
            assert_eq!(some, all[3 * COLS..5 * COLS]);
            let variance = all.iter().map(|v| v * v).sum::<f32>() / all.len() as f32;
            assert!((variance.sqrt() / 0.1 - 1.0).abs() < 0.1, "{format:?} {variance}");
        }
    }
}
