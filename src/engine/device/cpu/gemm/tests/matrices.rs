//! Matrices for the tests of products, and that packing keeps what was stored.

use half::{bf16, f16};

use super::super::super::matrix::{Arena, Matrix};
use super::super::super::pool::Pool;
use super::super::Packing;
use crate::engine::config::CpuMath;
use crate::engine::model::dequant::rows_to_f32;
use crate::engine::model::layout::WeightFormat;
use crate::engine::model::weights::MatrixData;

pub fn noise(seed: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 31 + seed * 977) as f32 * 0.737).sin()).collect()
}

/// Weights of 16 or 32 bits as a checkpoint stores them.
fn dense_bytes(format: WeightFormat, rows: usize, cols: usize) -> Vec<u8> {
    let bytes = |value: f32| match format {
        WeightFormat::F32 => value.to_le_bytes().to_vec(),
        WeightFormat::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        _ => bf16::from_f32(value).to_le_bytes().to_vec(),
    };
    noise(1, rows * cols).into_iter().flat_map(bytes).collect()
}

pub fn dense_matrix(format: WeightFormat, rows: usize, cols: usize, math: CpuMath) -> Matrix {
    pack(&MatrixData::Dense { format, bytes: &dense_bytes(format, rows, cols) }, rows, cols, math)
}

pub fn pack(data: &MatrixData<'_>, rows: usize, cols: usize, math: CpuMath) -> Matrix {
    let mut arena = Arena::new(Packing::of(data, math).bytes(rows, cols)).unwrap();
    Matrix::pack(&mut arena, &mut Pool::new(1), "test", (rows, cols), data, math).unwrap()
}

/// Symmetric or asymmetric groups of 4-bit weights with scales of either kind, as a checkpoint stores them.
struct Int4 {
    group: usize,
    packed: Vec<u8>,
    scales: Vec<u8>,
    bf16_scales: bool,
    zero_points: Option<Vec<u8>>,
}

impl Int4 {
    fn new(rows: usize, cols: usize, group: usize, zeros: bool, bf16_scales: bool) -> Self {
        let scale = |s: &f32| {
            let s = 0.01 + s.abs() * 0.02;
            if bf16_scales { bf16::from_f32(s).to_le_bytes() } else { f16::from_f32(s).to_le_bytes() }
        };
        let zero_points = || (0..rows.div_ceil(8) * 4 * (cols / group)).map(|i| (i * 57 + 3) as u8).collect();
        Self {
            group,
            packed: (0..rows * cols / 2).map(|i| (i * 89 + i / 7) as u8).collect(),
            scales: noise(3, rows * cols / group).iter().flat_map(scale).collect(),
            bf16_scales,
            zero_points: zeros.then(zero_points),
        }
    }

    fn data(&self) -> MatrixData<'_> {
        MatrixData::CompressedTensors {
            group: self.group,
            packed: &self.packed,
            scales: &self.scales,
            scale_format: if self.bf16_scales { WeightFormat::Bf16 } else { WeightFormat::F16 },
            zero_points: self.zero_points.as_deref(),
        }
    }
}

pub fn int4_matrix(rows: usize, cols: usize, group: usize, zeros: bool, bf16_scales: bool) -> Matrix {
    pack(&Int4::new(rows, cols, group, zeros, bf16_scales).data(), rows, cols, CpuMath::F32)
}

/// Against the reader of stored weights: the other tests take what a packed matrix holds from the matrix itself.
#[test]
fn packed_matrices_hold_what_was_stored() {
    let check = |data: &MatrixData<'_>, rows: usize, cols: usize| {
        let matrix = pack(data, rows, cols, CpuMath::F32);
        let mut stored = vec![0f32; rows * cols];
        rows_to_f32(data, rows, cols, 0..rows, &mut stored);
        let mut found = vec![0f32; cols];
        for (row, stored) in stored.chunks_exact(cols).enumerate() {
            matrix.read_row(row, &mut found);
            assert_eq!(found, stored, "{:?} [{rows}, {cols}] row {row}", matrix.packing);
            if let MatrixData::CompressedTensors { group, .. } = data {
                for (g, stored) in stored.chunks_exact(*group).enumerate() {
                    let (scale, quants) = matrix.group(row, g);
                    let found: Vec<f32> = quants.iter().map(|&quant| quant as f32 * scale).collect();
                    assert_eq!(found, stored, "{:?} row {row} group {g}", matrix.packing);
                }
            }
        }
    };
    for format in [WeightFormat::F32, WeightFormat::F16, WeightFormat::Bf16] {
        for (rows, cols) in [(1, 1), (45, 7), (70, 50), (96, 129)] {
            check(&MatrixData::Dense { format, bytes: &dense_bytes(format, rows, cols) }, rows, cols);
        }
    }
    for (rows, cols, group) in [(8, 8, 8), (40, 96, 32), (72, 256, 128)] {
        for (zeros, bf16_scales) in [(false, false), (false, true), (true, false), (true, true)] {
            check(&Int4::new(rows, cols, group, zeros, bf16_scales).data(), rows, cols);
        }
    }
}
