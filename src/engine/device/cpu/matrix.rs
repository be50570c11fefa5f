//! Weight matrices as the kernels read them: panels of 32 rows, columns one after the other.
//!
//! In a panel the 32 rows of a column lie side by side, so that a kernel multiplies one broadcast activation with two
//! registers of 16 rows and never adds across lanes. Each output is then one chain of multiply-adds over the columns in
//! ascending order, for every batch size and instruction set: that is why a row of a batch has the same bits whatever
//! else is in the batch. (AMX adds up otherwise: `gemm/tiles.rs`; so do a lone row and 4-bit weights: `gemm/pieces.rs`.) A panel is read
//! front to back, and the panels of a thread follow each other in memory.
//!
//! | packing | a panel holds |
//! |---|---|
//! | F32, F16 | `[cols][32]` elements |
//! | Bf16 | `[cols/2][32][2]`: pairs of columns, as bf16 dot products take them |
//! | Int4 | `[cols/8][32]` words; nibble j of a word is column 2j, nibble 4+j column 2j+1 (j < 4), so that the low nibbles of its bytes are columns 0, 4, 1, 5 and the high ones 2, 6, 3, 7; scales `[groups][32]` of 16 bits; zero points `[groups][16]` bytes, row r low and row r+16 high |
//!
//! Rows past the end are zero.

use std::sync::Arc;

use half::{bf16, f16};

use super::memory::{Buffer, Shared};
use super::pool::Pool;
use crate::engine::config::CpuMath;
use crate::engine::model::dequant::{Int4Source, rows_to_f32};
use crate::engine::model::layout::WeightFormat;
use crate::engine::model::weights::MatrixData;
use crate::{Error, Result};

/// Weights that a waiting thread prefetches at most: a part of the L2 that leaves room for what the current phase uses.
const AHEAD_BYTES: usize = 192 << 10;

/// Rows of a panel.
pub const PANEL: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    F32,
    F16,
    Bf16,
    Int4 { group: usize, zero_points: bool, bf16_scales: bool },
}

impl Packing {
    /// How `data` is held for `math`: as it is, except that bf16 arithmetic wants bf16.
    pub fn of(data: &MatrixData<'_>, math: CpuMath) -> Self {
        let dense = |format: WeightFormat| match (format, math) {
            (WeightFormat::Bf16, _) | (_, CpuMath::Bf16) => Self::Bf16,
            (WeightFormat::F16, _) => Self::F16,
            _ => Self::F32,
        };
        match *data {
            MatrixData::Dense { format, .. } => dense(format),
            MatrixData::Awq { group, .. } => Self::Int4 { group, zero_points: true, bf16_scales: false },
            MatrixData::CompressedTensors { group, scale_format, zero_points, .. } => Self::Int4 {
                group,
                zero_points: zero_points.is_some(),
                bf16_scales: scale_format == WeightFormat::Bf16,
            },
            MatrixData::Synthetic { format: WeightFormat::Int4 { group, zero_points }, .. } => {
                Self::Int4 { group, zero_points, bf16_scales: false }
            }
            MatrixData::Synthetic { format, .. } => dense(format),
        }
    }

    /// Bytes of a panel: (weights, scales, zero points).
    pub fn panel_bytes(self, cols: usize) -> (usize, usize, usize) {
        match self {
            Self::F32 => (cols * PANEL * 4, 0, 0),
            Self::F16 => (cols * PANEL * 2, 0, 0),
            Self::Bf16 => (cols.next_multiple_of(2) * PANEL * 2, 0, 0),
            Self::Int4 { group, zero_points, .. } => {
                let groups = cols / group;
                let zeros = if zero_points { groups * PANEL / 2 } else { 0 };
                (cols * PANEL / 2, groups * PANEL * 2, zeros)
            }
        }
    }

    /// Bytes of a whole matrix, each part on a cache line of its own.
    pub fn bytes(self, rows: usize, cols: usize) -> usize {
        let panels = rows.div_ceil(PANEL);
        let (weights, scales, zeros) = self.panel_bytes(cols);
        [weights, scales, zeros].iter().map(|bytes| (bytes * panels).next_multiple_of(64)).sum()
    }
}

/// One block of memory that matrices are packed into one after the other.
pub struct Arena {
    buffer: Arc<Buffer>,
    used: usize,
}

impl Arena {
    pub fn new(bytes: usize) -> Result<Self> {
        Ok(Self { buffer: Arc::new(Buffer::zeroed(bytes)?), used: 0 })
    }
}

/// A packed [rows, cols] matrix.
#[derive(Debug, Clone)]
pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    pub packing: Packing,
    buffer: Arc<Buffer>,
    weights: usize,
    scales: usize,
    zeros: usize,
}

impl Matrix {
    /// Packs `data` into `arena`. `name` is for messages.
    ///
    /// # Errors
    /// Data of the wrong size, a group that does not divide, a weight that is not finite.
    pub fn pack(
        arena: &mut Arena,
        pool: &mut Pool,
        name: &str,
        (rows, cols): (usize, usize),
        data: &MatrixData<'_>,
        math: CpuMath,
    ) -> Result<Self> {
        let packing = Packing::of(data, math);
        check(name, rows, cols, data)?;
        let panels = rows.div_ceil(PANEL);
        let (weight_bytes, scale_bytes, _) = packing.panel_bytes(cols);
        let weights = arena.used;
        let scales = weights + (weight_bytes * panels).next_multiple_of(64);
        let zeros = scales + (scale_bytes * panels).next_multiple_of(64);
        let bytes = packing.bytes(rows, cols);
        if arena.used + bytes > arena.buffer.len() {
            return Err(Error::bug(format!("{name}: weights need more memory than was planned")));
        }
        arena.used += bytes;
        let matrix = Self { rows, cols, packing, buffer: Arc::clone(&arena.buffer), weights, scales, zeros };
        let bad = std::sync::atomic::AtomicUsize::new(usize::MAX);
        pool.split(panels, 1, &|range, _| {
            for panel in range {
                if let Err(row) = matrix.pack_panel(panel, data) {
                    bad.fetch_min(row, std::sync::atomic::Ordering::Relaxed);
                }
            }
        });
        match bad.into_inner() {
            usize::MAX => Ok(matrix),
            row => Err(Error::invalid(
                format!("{name}: row {row} holds a weight that is not finite"),
                "the checkpoint is damaged: fetch or convert it again",
            )),
        }
    }

    pub fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }

    pub fn bytes(&self) -> usize {
        self.packing.bytes(self.rows, self.cols)
    }

    /// Start of a panel's (weights, scales, zero points).
    #[inline]
    pub fn panel(&self, panel: usize) -> (*const u8, *const u8, *const u8) {
        debug_assert!(panel < self.panels());
        let (weights, scales, zeros) = self.packing.panel_bytes(self.cols);
        let base = self.buffer.as_ptr();
        // SAFETY: the three parts of every panel lie inside the buffer, by construction in `pack`.
        unsafe {
            (
                base.add(self.weights + panel * weights),
                base.add(self.scales + panel * scales),
                base.add(self.zeros + panel * zeros),
            )
        }
    }

    /// (start, bytes) of the weights of panels `first..first + count`, no more than are worth asking for early.
    pub fn stream(&self, first: usize, count: usize) -> (*const u8, usize) {
        let count = count.min(self.panels() - first);
        if count == 0 {
            return (std::ptr::null(), 0);
        }
        (self.panel(first).0, (count * self.packing.panel_bytes(self.cols).0).min(AHEAD_BYTES))
    }

    /// One row widened to f32, as an embedding needs it.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        let (weights, scales, zeros) = self.panel(row / PANEL);
        let lane = row % PANEL;
        for (col, out) in out.iter_mut().enumerate() {
            // SAFETY: lane < PANEL and col < cols, so each element lies in the panel.
            *out = unsafe {
                match self.packing {
                    Packing::F32 => weights.cast::<f32>().add(col * PANEL + lane).read(),
                    Packing::F16 => {
                        f16::from_bits(weights.cast::<u16>().add(col * PANEL + lane).read()).to_f32()
                    }
                    Packing::Bf16 => {
                        let at = (col / 2 * PANEL + lane) * 2 + col % 2;
                        bf16::from_bits(weights.cast::<u16>().add(at).read()).to_f32()
                    }
                    Packing::Int4 { group, zero_points, bf16_scales } => {
                        let word = weights.cast::<u32>().add(col / 8 * PANEL + lane).read();
                        let q = (word >> (4 * nibble_of(col % 8))) & 15;
                        let bits = scales.cast::<u16>().add(col / group * PANEL + lane).read();
                        let pair = if zero_points {
                            zeros.add(col / group * PANEL / 2 + lane % 16).read()
                        } else {
                            0x88
                        };
                        let zero = if lane < 16 { pair & 15 } else { pair >> 4 };
                        let scale = if bf16_scales {
                            bf16::from_bits(bits).to_f32()
                        } else {
                            f16::from_bits(bits).to_f32()
                        };
                        (q as f32 - f32::from(zero)) * scale
                    }
                }
            };
        }
    }

    /// Of a 4-bit matrix, a row's scale in a group and its integers less the zero point.
    #[cfg(test)]
    pub fn group(&self, row: usize, g: usize) -> (f32, Vec<i64>) {
        let Packing::Int4 { group, bf16_scales, zero_points } = self.packing else {
            return (0.0, Vec::new());
        };
        let (weights, scales, zeros) = self.panel(row / PANEL);
        let lane = row % PANEL;
        // SAFETY: lane < PANEL, and the columns lie in the group.
        unsafe {
            let bits = scales.cast::<u16>().add(g * PANEL + lane).read();
            let scale =
                if bf16_scales { bf16::from_bits(bits).to_f32() } else { f16::from_bits(bits).to_f32() };
            let pair = if zero_points { zeros.add(g * PANEL / 2 + lane % 16).read() } else { 0x88 };
            let zero = i64::from(if lane < 16 { pair & 15 } else { pair >> 4 });
            let column = |col: usize| {
                let word = weights.cast::<u32>().add(col / 8 * PANEL + lane).read();
                i64::from(word >> (4 * nibble_of(col % 8)) & 15) - zero
            };
            (scale, (g * group..(g + 1) * group).map(column).collect())
        }
    }

    /// Packs one panel; Err is a row with a weight or scale that is not finite.
    fn pack_panel(&self, panel: usize, data: &MatrixData<'_>) -> Result<(), usize> {
        if let Some(source) = Int4Source::new(data, self.rows, self.cols) {
            return self.pack_int4(panel, &source);
        }
        let (weights, _, _) = self.panel(panel);
        let (bytes, _, _) = self.packing.panel_bytes(self.cols);
        // SAFETY: panels are disjoint and each is packed by one thread; nobody reads them before `pack` returns.
        let out = unsafe { Shared(weights.cast_mut()).part(0, bytes) };
        let mut values = vec![0f32; self.cols];
        for (lane, row) in (panel * PANEL..self.rows.min((panel + 1) * PANEL)).enumerate() {
            rows_to_f32(data, self.rows, self.cols, row..row + 1, &mut values);
            if !values.iter().all(|value| value.is_finite()) {
                return Err(row);
            }
            match self.packing {
                Packing::F32 => {
                    for (slot, value) in out.chunks_exact_mut(4 * PANEL).zip(&values) {
                        slot[4 * lane..4 * lane + 4].copy_from_slice(&value.to_le_bytes());
                    }
                }
                Packing::F16 => {
                    for (slot, value) in out.chunks_exact_mut(2 * PANEL).zip(&values) {
                        let bits = f16::from_f32(*value).to_bits();
                        slot[2 * lane..2 * lane + 2].copy_from_slice(&bits.to_le_bytes());
                    }
                }
                _ => {
                    for (slot, pair) in out.chunks_exact_mut(4 * PANEL).zip(values.chunks(2)) {
                        for (half, value) in pair.iter().enumerate() {
                            let bits = bf16::from_f32(*value).to_bits();
                            let at = 4 * lane + 2 * half;
                            slot[at..at + 2].copy_from_slice(&bits.to_le_bytes());
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn pack_int4(&self, panel: usize, source: &Int4Source<'_>) -> Result<(), usize> {
        let (weights, scales, zeros) = self.panel(panel);
        let (weight_bytes, scale_bytes, zero_bytes) = self.packing.panel_bytes(self.cols);
        // SAFETY: as in `pack_panel`; the three parts do not overlap.
        let (words, scales, zeros) = unsafe {
            (
                Shared(weights.cast_mut().cast::<u32>()).part(0, weight_bytes / 4),
                Shared(scales.cast_mut().cast::<u16>()).part(0, scale_bytes / 2),
                Shared(zeros.cast_mut()).part(0, zero_bytes),
            )
        };
        for (lane, row) in (panel * PANEL..self.rows.min((panel + 1) * PANEL)).enumerate() {
            for (block, slot) in words.chunks_exact_mut(PANEL).enumerate() {
                let mut word = 0;
                for i in 0..8 {
                    word |= source.value(row, 8 * block + i) << (4 * nibble_of(i));
                }
                slot[lane] = word;
            }
            for g in 0..self.cols / source.group {
                if !source.scale(row, g).is_finite() {
                    return Err(row);
                }
                scales[g * PANEL + lane] = source.scale_bits(row, g);
                if !zeros.is_empty() {
                    let zero = source.zero(row, g) as u8;
                    zeros[g * PANEL / 2 + lane % 16] |= if lane < 16 { zero } else { zero << 4 };
                }
            }
        }
        Ok(())
    }
}

/// Where column `i` of eight lies in a word: even columns in the low half, odd ones in the high half.
pub fn nibble_of(i: usize) -> usize {
    i / 2 + 4 * (i % 2)
}

/// Checks the sizes that packing relies on.
fn check(name: &str, rows: usize, cols: usize, data: &MatrixData<'_>) -> Result<()> {
    let wrong = |what: &str, found: usize, expected: usize| {
        Err(Error::invalid(
            format!("{name}: {what} has {found} bytes, a [{rows}, {cols}] matrix needs {expected}"),
            "the checkpoint is damaged or its config.json is of another model",
        ))
    };
    let bytes = |what: &str, found: &[u8], expected: usize| {
        if found.len() == expected { Ok(()) } else { wrong(what, found.len(), expected) }
    };
    let groups = |group: usize| {
        if group == 0 || !group.is_multiple_of(8) || !cols.is_multiple_of(group) {
            return Err(Error::invalid(
                format!("{name}: groups of {group} do not divide its {cols} columns in steps of 8"),
                "use a checkpoint with another group size, such as 32 or 64",
            ));
        }
        Ok(cols / group)
    };
    match *data {
        MatrixData::Dense { format, bytes: found } => {
            let size = if format == WeightFormat::F32 { 4 } else { 2 };
            bytes("its data", found, size * rows * cols)
        }
        MatrixData::Awq { group, qweight, qzeros, scales } => {
            let groups = groups(group)?;
            if !rows.is_multiple_of(8) {
                return wrong("qweight", qweight.len(), 4 * cols * rows.div_ceil(8));
            }
            bytes("qweight", qweight, cols * rows / 2)?;
            bytes("qzeros", qzeros, groups * rows / 2)?;
            bytes("scales", scales, 2 * groups * rows)
        }
        MatrixData::CompressedTensors { group, packed, scales, zero_points, .. } => {
            let groups = groups(group)?;
            bytes("weight_packed", packed, rows * cols / 2)?;
            bytes("weight_scale", scales, 2 * rows * groups)?;
            match zero_points {
                Some(zeros) => bytes("weight_zero_point", zeros, 4 * rows.div_ceil(8) * groups),
                None => Ok(()),
            }
        }
        MatrixData::Synthetic { format: WeightFormat::Int4 { group, .. }, .. } => groups(group).map(|_| ()),
        MatrixData::Synthetic { .. } => Ok(()),
    }
}
