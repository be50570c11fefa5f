//! Activations as the tiles read them: rows in groups, column by column, or in blocks of 32 columns where tiles of AMX read them.

use std::ops::Range;

use super::{Arithmetic, MAX_TILE, max_tile_of};
use crate::Result;
use crate::engine::device::cpu::isa::Isa;
use crate::engine::device::cpu::memory::{Scratch, Shared};

/// How rows of activations are grouped into tiles: as few as possible, of equal size as far as possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    pub rows: usize,
    pub tiles: usize,
    pub(super) small: usize,
    pub(super) larger: usize,
}

impl Tiling {
    pub fn new(rows: usize, max_tile: usize) -> Self {
        let tiles = rows.div_ceil(max_tile).max(1);
        Self { rows, tiles, small: rows / tiles, larger: rows % tiles }
    }

    /// (first row, rows) of a tile.
    #[inline(always)]
    pub fn tile(&self, tile: usize) -> (usize, usize) {
        let start = tile * self.small + tile.min(self.larger);
        (start, self.small + usize::from(tile < self.larger))
    }

    /// (tile, which of its rows) of a row.
    #[inline(always)]
    pub(super) fn place(&self, row: usize) -> (usize, usize) {
        let of_larger = self.larger * (self.small + 1);
        if row < of_larger {
            return (row / (self.small + 1), row % (self.small + 1));
        }
        let row = row - of_larger;
        (self.larger + row / self.small, row % self.small)
    }
}

/// Columns of a block of activations in bf16, and what loads of 16 lines may read beyond the last of a tile's rows.
const BLOCK: usize = 32;
const BLOCK_SLACK: usize = 15 * BLOCK;

/// The input of a product, tile by tile and column by column, as the tiles read it.
#[derive(Debug, Default)]
pub struct Activations {
    values: Scratch<f32>,
    pairs: Scratch<u32>,
    blocks: Scratch<u16>,
}

/// A view of packed activations that threads write and read.
#[derive(Debug, Clone, Copy)]
pub struct Packed {
    pub tiling: Tiling,
    pub cols: usize,
    /// Columns with padding to a pair, or to a block.
    padded: usize,
    /// For int16 by tiles row by row, else column by column of a tile.
    values: Shared<f32>,
    pairs: Shared<u32>,
    /// bf16, a tile of T rows as [cols/32][pieces][T][32]. (A lone row in bf16 arithmetic lies so in f32, in `values`.)
    blocks: Shared<u16>,
    math: Arithmetic,
}

impl Packed {
    pub fn math(&self) -> Arithmetic {
        self.math
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        self.tiling.rows * self.padded * self.element()
    }

    /// Bytes of a value.
    fn element(&self) -> usize {
        match self.math {
            Arithmetic::F32 | Arithmetic::Bf16InF32 | Arithmetic::Int16 | Arithmetic::Int16Tiles { .. } => 4,
            Arithmetic::Bf16Pairs => 2,
            Arithmetic::Bf16Tiles if self.tiling.rows == 1 => 4,
            Arithmetic::F32Tiles { .. } | Arithmetic::Bf16Tiles => 2 * self.math.pieces(),
        }
    }
}

impl Activations {
    /// Room for `rows` rows of `cols` columns; contents are whatever they were.
    pub fn shape(&mut self, isa: Isa, math: Arithmetic, rows: usize, cols: usize) -> Result<Packed> {
        let math = match math {
            // The bits are the same.
            Arithmetic::Int16Tiles { from_rows } if rows < from_rows => Arithmetic::Int16,
            Arithmetic::F32Tiles { from_rows } if rows < from_rows => Arithmetic::F32,
            math => math,
        };
        let padded = cols.next_multiple_of(if math.in_blocks() { BLOCK } else { 2 });
        match math {
            Arithmetic::Bf16Pairs => self.pairs.reserve(rows * padded / 2)?,
            Arithmetic::Bf16Tiles if rows == 1 => self.values.reserve(padded)?,
            Arithmetic::F32Tiles { .. } | Arithmetic::Bf16Tiles => {
                self.blocks.reserve(rows * padded * math.pieces() + BLOCK_SLACK)?;
            }
            _ => self.values.reserve(rows * padded)?,
        }
        Ok(Packed {
            tiling: Tiling::new(rows, max_tile_of(isa, math)),
            cols,
            padded,
            values: self.values.ptr(),
            pairs: self.pairs.ptr(),
            blocks: self.blocks.ptr(),
            math,
        })
    }
}

impl Packed {
    /// Stores columns `first..first + columns` of all rows of a tile; `value(t, i)` gives row t, column first + i.
    ///
    /// A tile's columns are written in the order they lie in memory, by one thread, so that threads never share a line.
    ///
    /// # Safety
    /// No other thread writes these columns of this tile. Where columns of bf16 lie in pairs, `first` is even and
    /// `columns` is even or ends at the last column; where they lie in blocks, likewise multiples of 32.
    #[inline(always)]
    pub unsafe fn write(
        &self,
        tile: usize,
        first: usize,
        columns: usize,
        value: impl Fn(usize, usize) -> f32,
    ) {
        debug_assert!(first + columns <= self.cols);
        let range = first..first + columns;
        // SAFETY: promised by the caller.
        unsafe {
            match self.math {
                Arithmetic::Bf16Pairs => self.write_pairs(tile, range, value),
                Arithmetic::Bf16InF32 => {
                    let rounded = |t, i| f32::from_bits(round_to_bf16(value(t, i)) & 0xffff_0000);
                    self.write_values(tile, range, rounded);
                }
                Arithmetic::F32 | Arithmetic::Int16 => self.write_values(tile, range, value),
                Arithmetic::Int16Tiles { .. } => {
                    let (start, tokens) = self.tiling.tile(tile);
                    for t in 0..tokens {
                        let row = self.values.part((start + t) * self.padded + first, columns);
                        row.iter_mut().enumerate().for_each(|(i, out)| *out = value(t, i));
                    }
                }
                Arithmetic::F32Tiles { .. } | Arithmetic::Bf16Tiles => {
                    let (_, tokens) = self.tiling.tile(tile);
                    (0..tokens).for_each(|t| self.write_blocks(tile, t, range.clone(), |i| value(t, i)));
                }
            }
        }
    }

    /// One row of a tile in blocks.
    ///
    /// # Safety
    /// As [`Packed::write`].
    #[inline(always)]
    unsafe fn write_blocks(&self, tile: usize, t: usize, range: Range<usize>, value: impl Fn(usize) -> f32) {
        let (start, tokens) = self.tiling.tile(tile);
        let pieces = self.math.pieces();
        debug_assert!(range.start.is_multiple_of(BLOCK));
        for first in range.clone().step_by(BLOCK) {
            let mut values = [0f32; BLOCK];
            let columns = BLOCK.min(range.end - first);
            if columns == BLOCK {
                values.iter_mut().enumerate().for_each(|(i, to)| *to = value(first - range.start + i));
            } else {
                let some = values.iter_mut().take(columns).enumerate();
                some.for_each(|(i, to)| *to = value(first - range.start + i));
            }
            let at = pieces * (start * self.padded + first * tokens) + t * BLOCK;
            for piece in 0..pieces {
                let mut bits = [0u32; BLOCK];
                for (value, bits) in values.iter_mut().zip(&mut bits) {
                    if pieces == 1 {
                        *bits = round_to_bf16(*value) & 0xffff_0000;
                    } else {
                        // The upper eight significant bits, and the rest, exactly.
                        *bits = value.to_bits() & 0xffff_0000;
                        *value -= f32::from_bits(*bits);
                    }
                }
                let at = at + piece * tokens * BLOCK;
                // SAFETY: inside `rows * padded * pieces` values; disjointness is the caller's promise.
                unsafe {
                    if pieces == 1 && self.tiling.rows == 1 {
                        let out = self.values.part(at, BLOCK);
                        out.iter_mut().zip(bits).for_each(|(out, bits)| *out = f32::from_bits(bits));
                    } else {
                        let out = self.blocks.part(at, BLOCK);
                        out.iter_mut().zip(bits).for_each(|(out, bits)| *out = (bits >> 16) as u16);
                    }
                }
            }
        }
    }

    /// Parts of the rows that are written each by one thread: rows where they lie apart in whole lines, else tiles.
    pub fn units(&self) -> usize {
        if self.math.is_tiles() { self.tiling.rows } else { self.tiling.tiles }
    }

    /// (first row, rows) of a unit.
    #[inline(always)]
    pub fn unit(&self, unit: usize) -> (usize, usize) {
        if self.math.is_tiles() { (unit, 1) } else { self.tiling.tile(unit) }
    }

    /// Stores all rows of a unit from rows `stride` apart.
    ///
    /// # Safety
    /// No other thread writes this unit.
    #[inline(always)]
    pub unsafe fn write_unit(&self, unit: usize, rows: &[f32], stride: usize) {
        if !self.math.is_tiles() {
            // SAFETY: promised by the caller.
            return unsafe { self.write_rows(unit, rows, stride) };
        }
        let row = &rows[..self.cols];
        if self.math.is_int16_tiles() {
            // SAFETY: inside `rows * padded` values; disjointness is the caller's promise.
            return unsafe { self.values.part(unit * self.padded, self.cols) }.copy_from_slice(row);
        }
        let (tile, t) = self.tiling.place(unit);
        // SAFETY: promised by the caller.
        unsafe { self.write_blocks(tile, t, 0..self.cols, |i| row[i]) };
    }

    /// # Safety
    /// As [`Packed::write`].
    #[inline(always)]
    unsafe fn write_pairs(&self, tile: usize, range: Range<usize>, value: impl Fn(usize, usize) -> f32) {
        let (start, tokens) = self.tiling.tile(tile);
        let (first, columns) = (range.start, range.len());
        // SAFETY: inside `rows * padded / 2` pairs; disjointness is the caller's promise.
        let out = unsafe {
            self.pairs.part(start * self.padded / 2 + first / 2 * tokens, columns.div_ceil(2) * tokens)
        };
        for (pair, out) in out.chunks_exact_mut(tokens).enumerate() {
            let odd = 2 * pair + 1 < columns;
            for (t, out) in out.iter_mut().enumerate() {
                let high = if odd { round_to_bf16(value(t, 2 * pair + 1)) } else { 0 };
                *out = round_to_bf16(value(t, 2 * pair)) >> 16 | high & 0xffff_0000;
            }
        }
    }

    /// # Safety
    /// As [`Packed::write`].
    #[inline(always)]
    unsafe fn write_values(&self, tile: usize, range: Range<usize>, value: impl Fn(usize, usize) -> f32) {
        let (start, tokens) = self.tiling.tile(tile);
        let (first, columns) = (range.start, range.len());
        let padding = if first + columns == self.cols { self.padded - self.cols } else { 0 };
        // SAFETY: inside `rows * padded` values; disjointness is the caller's promise.
        let out =
            unsafe { self.values.part(start * self.padded + first * tokens, (columns + padding) * tokens) };
        if tokens == 1 {
            // The same without a loop over one token, which the compiler vectorises.
            let (out, padding) = out.split_at_mut(columns);
            out.iter_mut().enumerate().for_each(|(i, out)| *out = value(0, i));
            padding.fill(0.0);
            return;
        }
        for (i, out) in out.chunks_exact_mut(tokens).enumerate() {
            for (t, out) in out.iter_mut().enumerate() {
                *out = if i < columns { value(t, i) } else { 0.0 };
            }
        }
    }

    /// # Safety
    /// As [`Packed::write_unit`].
    #[inline(always)]
    unsafe fn write_rows(&self, tile: usize, rows: &[f32], stride: usize) {
        let (_, tokens) = self.tiling.tile(tile);
        let mut parts: [&[f32]; MAX_TILE] = [&[]; MAX_TILE];
        for (t, part) in parts.iter_mut().enumerate().take(tokens) {
            *part = &rows[t * stride..t * stride + self.cols];
        }
        if tokens == 1 {
            let row = parts[0];
            // SAFETY: as below.
            return unsafe { self.write(tile, 0, self.cols, |_, i| row[i]) };
        }
        // SAFETY: promised by the caller; a whole tile ends at the last column.
        unsafe { self.write(tile, 0, self.cols, |t, i| parts[t][i]) };
    }

    /// (row, panel) of result `index` of a tile: of a lone row there is one for each panel, else there is one panel and one
    /// for each row of the tile.
    #[inline(always)]
    pub fn place(&self, panels: &Range<usize>, tile: usize, index: usize) -> (usize, usize) {
        match self.tiling.rows {
            1 => (0, panels.start + index),
            _ => (self.tiling.tile(tile).0 + index, panels.start),
        }
    }

    /// Tiles that a panel meets one after the other: as many as stay in a core's L2 while panels pass by.
    pub(super) fn block_tiles(&self) -> usize {
        let tiles = self.tiling.tiles;
        let element = if self.math.in_blocks() { self.element() } else { 4 };
        let tile_bytes = (self.tiling.rows * self.padded * element / tiles).max(1);
        let most = (self.math.activation_block_bytes() / tile_bytes).clamp(1, tiles);
        tiles.div_ceil(tiles.div_ceil(most))
    }

    /// Results of a tile.
    #[inline(always)]
    pub fn results(&self, panels: &Range<usize>, tile: usize) -> usize {
        if self.tiling.rows == 1 { panels.len() } else { self.tiling.tile(tile).1 }
    }

    /// Stores all rows of a unit of column after column from another view of the same rows that holds them row by row.
    ///
    /// # Safety
    /// No other thread writes this unit.
    pub unsafe fn copy_unit(&self, unit: usize, from: &Self) {
        debug_assert!(!self.math.is_tiles() && from.math.is_int16_tiles());
        let (start, count) = self.unit(unit);
        // SAFETY: promised by the caller; nobody writes the rows read, and no other thread reads them.
        unsafe {
            let rows = from.values.part(start * from.padded, count * from.padded);
            self.write_rows(unit, rows, from.padded);
        }
    }

    /// A row of f32 activations that are held row by row; it has been written.
    pub(super) fn row(&self, row: usize) -> &[f32] {
        debug_assert!(self.math.is_int16_tiles());
        // SAFETY: inside `rows * padded` values, which nobody writes between the phases of a step.
        unsafe { self.values.part(row * self.padded, self.cols) }
    }

    /// Appends a row of f32 activations to `out`; the rows have been written.
    pub fn read_row(&self, row: usize, out: &mut Vec<f32>) {
        debug_assert!(!matches!(self.math, Arithmetic::Bf16Pairs | Arithmetic::Bf16Tiles));
        if self.math.is_int16_tiles() {
            out.extend_from_slice(self.row(row));
            return;
        }
        if self.math.is_tiles() {
            let (tile, t) = self.tiling.place(row);
            let (start, tokens) = self.tiling.tile(tile);
            for col in 0..self.cols {
                let at = 3 * (start * self.padded + col / BLOCK * BLOCK * tokens) + t * BLOCK + col % BLOCK;
                let piece = |piece: usize| {
                    let at = at + piece * tokens * BLOCK;
                    // SAFETY: as below.
                    f32::from_bits(u32::from(unsafe { self.blocks.part(at, 1) }[0]) << 16)
                };
                out.push(piece(0) + piece(1) + piece(2));
            }
            return;
        }
        for tile in 0..self.tiling.tiles {
            let (start, tokens) = self.tiling.tile(tile);
            if (start..start + tokens).contains(&row) {
                // SAFETY: inside `rows * padded` values, which nobody writes between the phases of a step.
                let values = unsafe { self.values.part(start * self.padded, self.cols * tokens) };
                out.extend(values.iter().skip(row - start).step_by(tokens));
            }
        }
    }

    #[inline(always)]
    pub(super) fn tile_values(&self, tile: usize) -> *const f32 {
        let (start, _) = self.tiling.tile(tile);
        // SAFETY: inside the values, which hold rows * padded, or the pairs, which hold half as many, or the blocks' pieces.
        unsafe {
            match self.math {
                Arithmetic::Bf16Pairs => self.pairs.get().add(start * self.padded / 2).cast(),
                Arithmetic::Bf16Tiles if self.tiling.rows == 1 => self.values.get().cast_const(),
                Arithmetic::F32Tiles { .. } | Arithmetic::Bf16Tiles => {
                    self.blocks.get().add(start * self.padded * self.math.pieces()).cast()
                }
                _ => self.values.get().add(start * self.padded),
            }
        }
    }
}

/// The bits of `value` rounded to the nearest even bf16 in the upper half; the lower half is left over.
#[inline(always)]
fn round_to_bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    bits.wrapping_add(0x7fff + (bits >> 16 & 1))
}
