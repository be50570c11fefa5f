//! Weight matrices in the GPU's memory, and what a product does with its result: the seam between the step loop
//! (`forward`) and the products (`products`).
//!
//! The step loop calls `products.linear(stream, x, rows, matrix, output)` with x fp16 [rows, cols]; sums are fp32. Every
//! matrix of a layer that reads the same input is one [`Matrix`], its modules' rows one after the other:
//!
//! | matrix | rows | columns | output |
//! |---|---|---|---|
//! | delta net in | qkv, z, b, a | hidden | [`Output::Half`] |
//! | attention in | q (with gate), k, v | hidden | [`Output::Half`], bias for qwen2 |
//! | delta net out, o, down | hidden | value size, query size, intermediate | [`Output::Partials`], [`Output::Residual`] |
//! | gate and up, interleaved | 2 x intermediate | hidden | [`Output::SiluMul`] |
//! | head | vocabulary | hidden | [`Output::Float`], [`Output::Best`] |

use std::ops::Range;
use std::sync::Arc;

use super::driver::DeviceBuffer;
use crate::{Error, Result};

/// Rows of 4-bit weights that are packed together.
pub const UNIT: usize = 16;

/// How a matrix lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixFormat {
    /// fp16, row-major, rows of `cols` elements without padding.
    F16,
    /// 4-bit, in the products' own order; see there.
    Int4 { group: usize, zero_points: bool },
}

/// W [rows, cols] of y = x Wᵀ + bias.
#[derive(Debug)]
pub struct Matrix {
    pub format: MatrixFormat,
    pub rows: usize,
    pub cols: usize,
    pub weights: DeviceBuffer,
    /// int4: scales (and zero points) in the products' own order.
    pub scales: Option<DeviceBuffer>,
    /// fp32 `[rows]`.
    pub bias: Option<DeviceBuffer>,
}

impl Matrix {
    /// The matrix, and matrices of some of its rows on the same memory: of a 4-bit one whole units of [`UNIT`] rows, whose scales are
    /// copied where zero points lie behind those of all rows.
    ///
    /// # Errors
    /// Rows that are not there, or of a 4-bit matrix no whole units.
    pub fn cut(self, parts: &[Range<usize>]) -> Result<(Self, Vec<Self>)> {
        let Self { format, rows: all, cols, .. } = self;
        let (weights, scales, bias) =
            (Arc::new(self.weights), self.scales.map(Arc::new), self.bias.map(Arc::new));
        let part = |rows: &Range<usize>| {
            let whole_units = [rows.start, rows.end].iter().all(|row| row.is_multiple_of(UNIT));
            if format != MatrixFormat::F16 && !rows.is_empty() && !whole_units {
                return Err(Error::bug(format!("rows {rows:?} of a 4-bit matrix")));
            }
            let of = |whole: &Arc<DeviceBuffer>| {
                let at = |row: usize| whole.bytes() * row as u64 / all.max(1) as u64;
                DeviceBuffer::part(whole, at(rows.start), at(rows.end) - at(rows.start))
            };
            let side = |whole: &Arc<DeviceBuffer>| match format {
                MatrixFormat::Int4 { group, zero_points: true } if !rows.is_empty() && *rows != (0..all) => {
                    // Four bytes of scales for each of zero points, and those first.
                    let at = |row: usize| (row / 2 * (cols / group)) as u64;
                    let (start, end, zeros) = (at(rows.start), at(rows.end), 4 * at(all));
                    whole.gather(&[4 * start..4 * end, zeros + start..zeros + end])
                }
                _ => of(whole),
            };
            Ok(Self {
                format,
                rows: rows.len(),
                cols,
                weights: of(&weights)?,
                scales: scales.as_ref().map(side).transpose()?,
                bias: bias.as_ref().map(of).transpose()?,
            })
        };
        Ok((part(&(0..all))?, parts.iter().map(part).collect::<Result<_>>()?))
    }

    /// Bytes a product streams.
    pub fn bytes(&self) -> u64 {
        let side = |buffer: &Option<DeviceBuffer>| buffer.as_ref().map_or(0, DeviceBuffer::bytes);
        self.weights.bytes() + side(&self.scales) + side(&self.bias)
    }
}

/// Where the result of a product goes. Pointers are device addresses, 16-byte aligned; strides are in elements, multiples
/// of 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// fp16 [rows of x, stride].
    Half { to: u64, stride: usize },
    /// fp32 [rows of x, stride].
    Float { to: u64, stride: usize },
    /// The matrix holds gate rows and up rows in turn, [`GATE_UP_INTERLEAVE`] of each at a time; out is
    /// silu(gate) * up, fp16 [rows of x, stride].
    SiluMul { to: u64, stride: usize },
    /// fp32 sums to be added to the residual stream by the norm that follows: the columns of W are split into 1 to
    /// `max_parts` parts, part p is written whole to `to + 4 * p * part_stride` as [rows of x, W's rows] (nothing
    /// there is read or assumed zero). The product returns how many parts it wrote.
    Partials { to: u64, part_stride: usize, max_parts: usize },
    /// Added to the residual stream itself, fp32 [rows of x, W's rows]: for many rows, where the products say so
    /// (`Products::adds`), since the norm then reads and writes less.
    Residual { to: u64 },
    /// For each row of x the largest among W's first `vocab` rows and which it is: `keys` u64 [rows of x], of what is there
    /// and the key found (cuda/best.cuh) the larger. Where the products say so (`Products::finds_best`).
    Best { keys: u64, vocab: usize },
}

/// Rows of gate before as many rows of up, in the interleaved gate and up matrix. Intermediate sizes are multiples of it.
pub const GATE_UP_INTERLEAVE: usize = 8;
