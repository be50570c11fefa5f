//! Products of matrices: y[T, rows] = x[T, cols] Wᵀ, by tiles of one panel (32 rows) times up to [`MAX_TILE`] tokens.
//!
//! A tile keeps all its sums in registers and walks the columns once: per column it loads 32 weights, widens them and
//! multiplies them with one broadcast activation a token. With one token that is a matrix-vector product at the speed
//! of memory; with twelve, 24 multiply-adds for 14 loads, which is bound by the multipliers. Every tile size adds in the
//! same order (see `matrix.rs`), so how tokens are grouped into tiles never shows in a result.
//!
//! The same tiles serve attention: 16 keys of a cache tile are half a panel with head_dim columns, and the values of a
//! block are a panel whose columns are tokens.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use super::isa::Isa;
use super::matrix::{Matrix, PANEL, Packing};
use super::memory::{Scratch, Shared};
use super::pool::Pool;
use crate::Result;
use crate::engine::config::CpuMath;

/// Most tokens of a tile: 24 sums of 16 lanes and what they need fill the 32 AVX-512 registers.
pub const MAX_TILE: usize = 12;

/// Elements of a tile's operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    F32,
    F16,
    /// One column after the other (caches).
    Bf16,
    /// Pairs of columns (weights).
    Bf16Pairs,
}

impl Element {
    pub fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}

/// One tile's operands. Column k of the two 16-row halves lies at `w0 + k * stride` and `w1 + k * stride` (bytes; for pairs
/// k counts pairs).
#[derive(Debug, Clone, Copy)]
pub struct Tile {
    pub w0: *const u8,
    pub w1: *const u8,
    pub stride: usize,
    /// Columns.
    pub cols: usize,
    /// [cols][T] f32; for bf16 arithmetic [cols/2][T] pairs of bf16.
    pub x: *const f32,
    /// [T][32] sums, row t at `out + t * out_stride`.
    pub out: *mut f32,
    pub out_stride: usize,
    /// Go on from what `out` holds instead of zero.
    pub accumulate: bool,
    pub scales: *const u8,
    pub zeros: *const u8,
    pub group: usize,
}

/// # Safety
/// All pointers of the tile cover what its fields say (with [`super::memory::SLACK_BYTES`] readable beyond for
/// prefetches), and the CPU has the instructions the function was chosen for.
pub type TileFn = unsafe fn(&Tile);

/// The tile function for dense operands in f32 arithmetic; `tokens` is 1 to [`max_tile`].
pub fn dense(isa: Isa, element: Element, tokens: usize) -> TileFn {
    debug_assert!((1..=max_tile(isa)).contains(&tokens));
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => avx512::dense(element, tokens),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::dense(element, tokens),
        _ => portable::dense(element, tokens),
    }
}

fn int4(isa: Isa, zero_points: bool, bf16_scales: bool, tokens: usize) -> TileFn {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => avx512::int4(zero_points, bf16_scales, tokens),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::int4(zero_points, bf16_scales, tokens),
        _ => portable::int4(zero_points, bf16_scales, tokens),
    }
}

/// Most tokens of a tile on this instruction set.
pub fn max_tile(isa: Isa) -> usize {
    match isa {
        Isa::Avx512 => MAX_TILE,
        Isa::Avx2 => 6,
        Isa::Portable => 4,
    }
}

/// How rows of activations are grouped into tiles: as few as possible, of equal size as far as possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    pub rows: usize,
    pub tiles: usize,
    small: usize,
    larger: usize,
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

    /// (tile, row within it).
    #[inline(always)]
    pub fn locate(&self, row: usize) -> (usize, usize) {
        let in_larger = self.larger * (self.small + 1);
        if row < in_larger {
            (row / (self.small + 1), row % (self.small + 1))
        } else {
            let rest = row - in_larger;
            (self.larger + rest / self.small, rest % self.small)
        }
    }
}

/// The input of a product, tile by tile and column by column, as the tiles read it.
#[derive(Debug, Default)]
pub struct Activations {
    values: Scratch<f32>,
    pairs: Scratch<u32>,
}

/// A view of packed activations that threads write and read.
#[derive(Debug, Clone, Copy)]
pub struct Packed {
    pub tiling: Tiling,
    pub cols: usize,
    /// Columns with padding to a pair.
    padded: usize,
    values: Shared<f32>,
    pairs: Shared<u32>,
    math: CpuMath,
}

impl Activations {
    /// Room for `rows` rows of `cols` columns; contents are whatever they were.
    pub fn shape(&mut self, isa: Isa, math: CpuMath, rows: usize, cols: usize) -> Result<Packed> {
        let padded = cols.next_multiple_of(2);
        self.values.reserve(rows * padded)?;
        if math == CpuMath::Bf16 {
            self.pairs.reserve(rows * padded / 2)?;
        }
        Ok(Packed {
            tiling: Tiling::new(rows, max_tile(isa)),
            cols,
            padded,
            values: self.values.ptr(),
            pairs: self.pairs.ptr(),
            math,
        })
    }
}

impl Packed {
    /// Stores `values` as columns `col..` of `row`.
    ///
    /// # Safety
    /// No other thread writes these elements (for bf16 arithmetic: these pairs of columns, so `col` and the length are
    /// even, or the end is the last column).
    #[inline(always)]
    pub unsafe fn write(&self, row: usize, col: usize, values: &[f32]) {
        debug_assert!(col + values.len() <= self.cols);
        let (tile, t) = self.tiling.locate(row);
        let (start, tokens) = self.tiling.tile(tile);
        if self.math == CpuMath::Bf16 {
            // SAFETY: inside `rows * padded / 2` pairs; disjointness is the caller's promise.
            let mut at = unsafe { self.pairs.get().add(start * self.padded / 2 + col / 2 * tokens + t) };
            for pair in values.chunks(2) {
                let low = half::bf16::from_f32(pair[0]).to_bits();
                let high = pair.get(1).map_or(0, |&value| half::bf16::from_f32(value).to_bits());
                // SAFETY: as above.
                unsafe {
                    at.write(u32::from(low) | u32::from(high) << 16);
                    at = at.add(tokens);
                }
            }
        }
        // SAFETY: inside `rows * padded` values; disjointness is the caller's promise.
        let mut at = unsafe { self.values.get().add(start * self.padded + col * tokens + t) };
        for &value in values {
            // SAFETY: as above.
            unsafe {
                at.write(value);
                at = at.add(tokens);
            }
        }
        if col + values.len() == self.cols && self.padded > self.cols {
            // SAFETY: the padding column of this row.
            unsafe { at.write(0.0) };
        }
    }

    #[inline(always)]
    fn tile_values(&self, tile: usize) -> *const f32 {
        let (start, _) = self.tiling.tile(tile);
        // SAFETY: inside the values, which hold rows * padded.
        unsafe { self.values.get().add(start * self.padded) }
    }
}

/// A matrix made ready to be multiplied by a tiling: tile functions chosen once.
pub struct Product<'a> {
    matrix: &'a Matrix,
    packed: Packed,
    small: TileFn,
    larger: TileFn,
}

impl<'a> Product<'a> {
    pub fn new(isa: Isa, matrix: &'a Matrix, packed: Packed) -> Self {
        debug_assert_eq!(matrix.cols, packed.cols);
        let choose = |tokens: usize| match matrix.packing {
            Packing::F32 => dense(isa, Element::F32, tokens),
            Packing::F16 => dense(isa, Element::F16, tokens),
            Packing::Bf16 => dense(isa, Element::Bf16Pairs, tokens),
            Packing::Int4 { zero_points, bf16_scales, .. } => int4(isa, zero_points, bf16_scales, tokens),
        };
        let small = packed.tiling.small;
        Self { matrix, packed, small: choose(small), larger: choose((small + 1).min(max_tile(isa))) }
    }

    /// Row t of a tile's result is `out[t]`: 32 rows of the matrix.
    #[inline]
    pub fn tile(&self, panel: usize, tile: usize, out: &mut [[f32; PANEL]; MAX_TILE]) {
        let (weights, scales, zeros) = self.matrix.panel(panel);
        let (half, group) = match self.matrix.packing {
            Packing::F32 => (64, 0),
            Packing::F16 => (32, 0),
            Packing::Bf16 => (64, 0),
            Packing::Int4 { group, .. } => (64, group),
        };
        let run = if tile < self.packed.tiling.larger { self.larger } else { self.small };
        // SAFETY: the panel and the packed tile hold `cols` columns (padded to pairs where the packing has pairs),
        // `out` has MAX_TILE rows of 32, and the functions were chosen for this CPU.
        unsafe {
            run(&Tile {
                w0: weights,
                w1: weights.add(half),
                stride: 2 * half,
                cols: self.matrix.cols,
                x: self.packed.tile_values(tile),
                out: out.as_mut_ptr().cast(),
                out_stride: PANEL,
                accumulate: false,
                scales,
                zeros,
                group,
            });
        }
    }
}

/// Bytes of packed activations that should stay in a core's L2 while panels pass by.
const ACTIVATION_BLOCK_BYTES: usize = 384 << 10;

/// Calls `body(panel, tile)` for every tile of every panel, split over the threads by panels, so that each panel is read
/// from memory once for each block of activations that fits the L2 (once in all, for a decode step).
pub fn for_each_tile(pool: &mut Pool, packed: &Packed, panels: usize, body: &(dyn Fn(usize, usize) + Sync)) {
    let tiling = packed.tiling;
    let tile_bytes = (tiling.rows * packed.padded * 4 / tiling.tiles).max(1);
    let block_tiles = (ACTIVATION_BLOCK_BYTES / tile_bytes).clamp(1, tiling.tiles);
    let blocks = tiling.tiles.div_ceil(block_tiles);
    // A few runs a thread: long enough to stream, short enough that a thread that lost its core delays little.
    let grain = if blocks > 1 { 1 } else { (panels / (4 * pool.threads())).max(1) };
    let runs = panels.div_ceil(grain);
    pool.split(blocks * runs, 1, &|range, _| {
        for job in range {
            let (block, run) = (job / runs, job % runs);
            let tiles = block * block_tiles..((block + 1) * block_tiles).min(tiling.tiles);
            for panel in run * grain..((run + 1) * grain).min(panels) {
                for tile in tiles.clone() {
                    body(panel, tile);
                }
            }
        }
    });
}
