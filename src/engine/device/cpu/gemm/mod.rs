//! Products of matrices: y[T, rows] = x[T, cols] Wᵀ, by tiles of one panel (32 rows) times up to [`MAX_TILE`] tokens.
//!
//! A tile keeps all its sums in registers and walks the columns once: per column it loads 32 weights, widens them and
//! multiplies them with one broadcast activation a token. With one token that is a matrix-vector product at the speed
//! of memory; with twelve, 24 multiply-adds for 14 loads, which is bound by the multipliers. Every tile size adds in the
//! same order (see `matrix.rs`), so how tokens are grouped into tiles never shows in a result.
//!
//! Where the CPU has AMX, matrices of f16 and bf16 are multiplied by its tiles instead (`tiles.rs`): in bf16 arithmetic always, so
//! that again every number of tokens gives the same bits, and in f32 from [`F32_TILES_FROM_ROWS`] rows on. There a row's last
//! bits tell whether it was computed among fewer or more. 4-bit weights in int16 arithmetic have tiles of bytes for the same bits
//! (`int16_tiles.rs`).
//!
//! The tiles of this file serve attention too: 16 keys of a cache tile are half a panel with head_dim columns, and the values of a
//! block are a panel whose columns are tokens.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod grouped;
mod int16;
#[cfg(target_arch = "x86_64")]
mod int16_avx2;
#[cfg(target_arch = "x86_64")]
mod int16_avx512;
#[cfg(target_arch = "x86_64")]
mod int16_tiles;
mod packed;
mod peak;
mod portable;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tile_rows;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::mem::MaybeUninit;
use std::ops::Range;

use super::isa::{self, Isa, has_vnni};
use super::matrix::{Matrix, PANEL, Packing};
use super::pool::{Ahead, Pool, share};
use crate::engine::config::CpuMath;
use grouped::Grouped;
pub use packed::{Activations, Packed, Tiling};
pub use peak::Peak;

/// Most tokens of a tile: 24 sums of 16 lanes and what they need fill the 32 AVX-512 registers.
pub const MAX_TILE: usize = 12;

/// Most tokens of a product's tile in any arithmetic: AMX takes most.
#[cfg(target_arch = "x86_64")]
const MAX_ROWS: usize = tiles::MAX_TOKENS;
#[cfg(not(target_arch = "x86_64"))]
const MAX_ROWS: usize = MAX_TILE;

/// Rows from which on f32 arithmetic takes products of tiles: a tile costs the same for one row as for 16, and with fewer than this
/// multiply-adds leave memory less to wait for (docs/perf-log.md, "AMX on Intel").
const F32_TILES_FROM_ROWS: usize = 9;

/// How products are computed: what [`CpuMath`] asks for, as this CPU does it fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    F32,
    /// Pairs of bf16 by one instruction (AVX512-BF16). Made by [`Arithmetic::of`] alone, where the CPU has it.
    Bf16Pairs,
    /// The same operands, rounded to bf16, by multiply-adds of f32.
    Bf16InF32,
    Int16,
    /// f32 by products of tiles of bf16 (AMX) where there are `from_rows` rows, operands split exactly; by multiply-adds below.
    /// Made by [`Arithmetic::of`] alone, as the next.
    F32Tiles {
        from_rows: usize,
    },
    /// bf16 by products of tiles.
    Bf16Tiles,
    /// int16 by products of tiles of bytes where there are `from_rows` rows, with the same bits.
    Int16Tiles {
        from_rows: usize,
    },
}

impl Arithmetic {
    /// For products of one input with all of `matrices`, whatever its rows.
    pub fn of<'m>(math: CpuMath, isa: Isa, matrices: impl IntoIterator<Item = &'m Matrix>) -> Self {
        Self::of_packings(math, isa, matrices.into_iter().map(|matrix| matrix.packing))
    }

    /// For an input of which each product has a run of its own in int16 arithmetic: what that of its 4-bit matrices is multiplied by.
    pub fn of_inputs<'m>(
        math: CpuMath,
        isa: Isa,
        matrices: impl IntoIterator<Item = &'m Matrix> + Clone,
    ) -> Self {
        let is_int4 = |matrix: &&Matrix| matches!(matrix.packing, Packing::Int4 { .. });
        if math == CpuMath::Int16 && matrices.clone().into_iter().any(|matrix| is_int4(&matrix)) {
            return Self::of(math, isa, matrices.into_iter().filter(is_int4));
        }
        Self::of(math, isa, matrices)
    }

    fn of_packings(math: CpuMath, isa: Isa, packings: impl IntoIterator<Item = Packing>) -> Self {
        let (mut dense, mut int4, mut from_rows) = (true, true, 0);
        for packing in packings {
            dense &= matches!(packing, Packing::F16 | Packing::Bf16);
            let from = int16_tiles_from_rows(packing);
            int4 &= from.is_some();
            from_rows = from_rows.max(from.unwrap_or(0));
        }
        let tiles = isa == Isa::Avx512 && isa::tile_products().bf16 && dense;
        let int8_tiles = isa == Isa::Avx512 && isa::tile_products().int8 && int4;
        match math {
            CpuMath::F32 | CpuMath::Int16 if tiles => Self::F32Tiles { from_rows: F32_TILES_FROM_ROWS },
            CpuMath::Bf16 if tiles => Self::Bf16Tiles,
            CpuMath::F32 => Self::F32,
            CpuMath::Bf16 if isa::has_fast_bf16() => Self::Bf16Pairs,
            CpuMath::Bf16 => Self::Bf16InF32,
            CpuMath::Int16 if int8_tiles => Self::Int16Tiles { from_rows },
            CpuMath::Int16 => Self::Int16,
        }
    }

    fn is_tiles(self) -> bool {
        self.in_blocks() || self.is_int16_tiles()
    }

    pub fn is_int16_tiles(self) -> bool {
        matches!(self, Self::Int16Tiles { .. })
    }

    /// By products of tiles whose activations are packed as they read them.
    fn in_blocks(self) -> bool {
        matches!(self, Self::F32Tiles { .. } | Self::Bf16Tiles)
    }

    /// Numbers of bf16 for each activation, in products of tiles.
    fn pieces(self) -> usize {
        if matches!(self, Self::F32Tiles { .. }) { 3 } else { 1 }
    }

    /// Bytes of packed activations that should stay in a core's L2 while panels pass by.
    fn activation_block_bytes(self) -> usize {
        // CPUs with AMX have an L2 of 2 MB, and their products outrun memory unless a panel meets many tokens.
        if self.is_tiles() { 1 << 20 } else { 384 << 10 }
    }
}

/// From how many rows on a matrix is multiplied by tiles of bytes in int16 arithmetic, if it can be.
#[cfg(target_arch = "x86_64")]
fn int16_tiles_from_rows(packing: Packing) -> Option<usize> {
    match packing {
        Packing::Int4 { group, .. } => int16_tiles::from_rows(group),
        _ => None,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn int16_tiles_from_rows(_: Packing) -> Option<usize> {
    None
}

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
    /// T; functions that were chosen for a T do not look at it.
    pub tokens: usize,
    /// [cols][T] f32; for pairs of bf16 [cols/2][T] of them, for int16 [cols/2][T] pairs of integers, for products of tiles
    /// [cols/32][pieces][T][32] bf16, or f32 for a lone row in bf16 arithmetic.
    pub x: *const f32,
    /// Of int16 arithmetic, [groups][T] scales and sums of the integers.
    pub x_scales: *const f32,
    pub x_sums: *const i32,
    /// Of 4-bit weights with zero points in f32 arithmetic, [groups][T] totals of the activations.
    pub x_totals: *const f32,
    /// [T][32] sums, row t at `out + t * out_stride`.
    pub out: *mut f32,
    pub out_stride: usize,
    /// Go on from what `out` holds instead of zero (dense tiles).
    pub accumulate: bool,
    pub scales: *const u8,
    pub zeros: *const u8,
    pub group: usize,
    /// What to prefetch, `ahead_stride` further with every column: weights that a later column or tile needs.
    pub ahead: *const u8,
    /// A second such stream, where the two halves of a column lie on two lines (f32, and caches).
    pub ahead_high: *const u8,
    pub ahead_stride: usize,
    /// How far beyond these lines others are asked for into the L2, bytes; 0 for none. AVX-512 functions only.
    pub far: usize,
    /// This tile's part of the panel that follows, (start, bytes), for functions that spread its prefetch over all tiles.
    pub next: (*const u8, usize),
}

/// Panels that one token takes at once. Dense AVX2 functions take them side by side: a core reads several streams faster than
/// one, and their sums are more than the latency of a multiply-add asks for (twelve registers hold the sums of three). All others
/// take one after the other.
pub const ROW_PANELS: usize = 3;

/// One token times up to [`ROW_PANELS`] panels of a matrix.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    /// Start of each panel, of its scales and of its zero points.
    pub panels: [*const u8; ROW_PANELS],
    pub scales: [*const u8; ROW_PANELS],
    pub zeros: [*const u8; ROW_PANELS],
    pub group: usize,
    pub cols: usize,
    /// As in [`Tile`], with T = 1.
    pub x: *const f32,
    pub x_scales: *const f32,
    pub x_sums: *const i32,
    pub x_totals: *const f32,
    /// As in [`Tile`].
    pub far: usize,
    /// [panels][32] sums.
    pub out: *mut f32,
}

/// # Safety
/// As [`TileFn`]; the panels are as many as the function was chosen for.
pub type RowsFn = unsafe fn(&Rows);

/// How far ahead of the column at hand AVX-512 functions, and those of AVX2 for a lone row of 4-bit weights, prefetch weights,
/// bytes: beyond the page at hand, where the hardware stops. On AMD's Zen 5 a stream reaches the memory's speed from 6 KB on (4-bit weights: 36 GB/s at 2 KB, 51 at 6).
pub const PREFETCH_BYTES: usize = 6144;
/// What Intel's CPUs are asked for into the L2 beyond that: a core can wait for more lines of its L2 than of its
/// L1, of which those are too few at a cloud's latencies (docs/perf-log.md, "AVX-512 on Intel").
const FAR_BYTES: usize = 10 << 10;

/// [`Tile::far`] for a matrix that is read once, as one stream.
fn far() -> usize {
    if isa::is_intel() { FAR_BYTES } else { 0 }
}

impl Tile {
    /// A dense tile in f32 arithmetic.
    pub fn dense(w0: *const u8, w1: *const u8, stride: usize, cols: usize, x: *const f32) -> Self {
        Self {
            w0,
            w1,
            stride,
            cols,
            tokens: 0,
            x,
            x_scales: std::ptr::null(),
            x_sums: std::ptr::null(),
            x_totals: std::ptr::null(),
            out: std::ptr::null_mut(),
            out_stride: 0,
            accumulate: false,
            scales: std::ptr::null(),
            zeros: std::ptr::null(),
            group: 0,
            ahead: w0.wrapping_add(PREFETCH_BYTES),
            ahead_high: w1.wrapping_add(PREFETCH_BYTES),
            ahead_stride: stride,
            far: 0,
            next: (w0, 0),
        }
    }

    pub fn prefetching(self, ahead: *const u8, ahead_high: *const u8) -> Self {
        Self { ahead, ahead_high, ..self }
    }

    pub fn into(self, out: *mut f32, out_stride: usize, accumulate: bool) -> Self {
        Self { out, out_stride, accumulate, ..self }
    }
}

/// # Safety
/// All pointers of the tile cover what its fields say (with [`super::memory::SLACK_BYTES`] readable beyond for
/// prefetches), and the CPU has the instructions the function was chosen for.
pub type TileFn = unsafe fn(&Tile);

/// Whether dense tiles prefetch what [`Tile::ahead`] names. AVX2 tiles spread the prefetch of the next panel instead.
pub fn prefetches_ahead(isa: Isa) -> bool {
    isa == Isa::Avx512
}

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

/// The functions for one token and 1 to [`ROW_PANELS`] panels, where the instruction set has them.
fn rows(isa: Isa, packing: Packing, math: Arithmetic) -> Option<[RowsFn; ROW_PANELS]> {
    match (isa, packing, math) {
        #[cfg(target_arch = "x86_64")]
        (_, _, Arithmetic::Bf16Tiles) => Some(tile_rows::of()),
        (_, _, Arithmetic::F32Tiles { .. }) => None,
        (_, _, Arithmetic::Int16Tiles { .. }) => None,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Packing::F32, _) => Some(avx512::rows_of(Element::F32)),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Packing::F16, _) => Some(avx512::rows_of(Element::F16)),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Packing::Bf16, Arithmetic::Bf16Pairs) => Some(avx512::bf16_rows_of()),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Packing::Bf16, _) => Some(avx512::rows_of(Element::Bf16Pairs)),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, Packing::F32, _) => Some(avx2::rows_of(Element::F32)),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, Packing::F16, _) => Some(avx2::rows_of(Element::F16)),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, Packing::Bf16, _) => Some(avx2::rows_of(Element::Bf16Pairs)),
        (_, Packing::Int4 { group, zero_points, bf16_scales }, Arithmetic::Int16) if int16::fits(group) => {
            int16::rows(isa, zero_points, bf16_scales)
        }
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, Packing::Int4 { zero_points, bf16_scales, .. }, _) => {
            Some(avx2::int4_rows_of(zero_points, bf16_scales))
        }
        _ => None,
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

/// FLOPs of one round of [`multiply_add_rounds`].
pub fn multiply_add_flops(isa: Isa, math: Arithmetic) -> usize {
    match (isa, math) {
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Arithmetic::Int16) if has_vnni() => 4 * 16 * int16_avx512::ROUND_SUMS,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Avx2, Arithmetic::Int16) => 2 * 16 * int16_avx2::ROUND_SUMS,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Arithmetic::F32 | Arithmetic::Bf16InF32) => 2 * 16 * avx512::ROUND_SUMS,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Arithmetic::Bf16Pairs) => 4 * 16 * avx512::ROUND_SUMS,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Arithmetic::F32Tiles { .. } | Arithmetic::Bf16Tiles) => {
            2 * 16 * 16 * 32 * tiles::ROUND_PRODUCTS
        }
        (Isa::Avx2, _) => 2 * 8 * 12,
        _ => 2 * 16 * 8,
    }
}

/// Rounds of independent multiply-adds in registers: what the multipliers can do at most.
pub fn multiply_add_rounds(isa: Isa, math: Arithmetic, rounds: usize) -> f32 {
    match (isa, math) {
        // SAFETY: the CPU was asked.
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Arithmetic::Int16) if has_vnni() => unsafe { int16_avx512::rounds(rounds) },
        // SAFETY: a value of these variants comes from `detect`, and AVX-512 implies AVX2 there.
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Avx2, Arithmetic::Int16) => unsafe { int16_avx2::rounds(rounds) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Arithmetic::F32 | Arithmetic::Bf16InF32) => unsafe { avx512::rounds(rounds) },
        // SAFETY: bf16 arithmetic was checked when it was chosen.
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Arithmetic::Bf16Pairs) => unsafe { avx512::bf16_rounds(rounds) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Arithmetic::F32Tiles { .. } | Arithmetic::Bf16Tiles) => unsafe {
            tiles::rounds(rounds)
        },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, _) => unsafe { avx2::rounds(rounds) },
        _ => portable::rounds(rounds),
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

/// Most tokens of a product's tile in this arithmetic.
fn max_tile_of(isa: Isa, math: Arithmetic) -> usize {
    match math {
        Arithmetic::Int16 => max_tile(isa).min(int16::max_tokens(isa)),
        math if math.is_tiles() => MAX_ROWS,
        _ => max_tile(isa),
    }
}

/// A matrix made ready to be multiplied by a tiling: tile functions chosen once.
pub struct Product<'a> {
    matrix: &'a Matrix,
    packed: Packed,
    small: TileFn,
    larger: TileFn,
    /// For a lone row.
    rows: Option<[RowsFn; ROW_PANELS]>,
    far: usize,
    /// The activations group by group, where they are needed so.
    grouped: Option<Grouped>,
}

/// Room for the results of a product's tile.
pub struct TileSpace(MaybeUninit<[[f32; PANEL]; MAX_ROWS]>);

impl TileSpace {
    #[inline(always)]
    pub fn new() -> Self {
        Self(MaybeUninit::uninit())
    }
}

impl<'a> Product<'a> {
    /// `all_grouped` holds the activations for every size of group that [`grouped::group_of`] names.
    pub fn new(isa: Isa, matrix: &'a Matrix, packed: Packed, all_grouped: &[Grouped]) -> Self {
        debug_assert_eq!(matrix.cols, packed.cols);
        let group = grouped::group_of(matrix.packing, packed.math());
        let grouped = all_grouped.iter().find(|grouped| Some(grouped.group) == group).copied();
        assert_eq!(grouped.map(|grouped| grouped.group), group, "activations that were not grouped");
        let integers = grouped.is_some_and(|grouped| grouped.integers);
        let choose = |tokens: usize| match (matrix.packing, packed.math()) {
            #[cfg(target_arch = "x86_64")]
            (packing, Arithmetic::F32Tiles { .. }) => tiles::f32(packing),
            #[cfg(target_arch = "x86_64")]
            (_, Arithmetic::Bf16Tiles) => tiles::bf16(),
            #[cfg(target_arch = "x86_64")]
            (Packing::Int4 { zero_points, bf16_scales, .. }, Arithmetic::Int16Tiles { .. }) => {
                int16_tiles::tile(zero_points, bf16_scales)
            }
            (Packing::F32, _) => dense(isa, Element::F32, tokens),
            (Packing::F16, _) => dense(isa, Element::F16, tokens),
            #[cfg(target_arch = "x86_64")]
            (Packing::Bf16, Arithmetic::Bf16Pairs) => avx512::bf16(tokens),
            (Packing::Bf16, _) => dense(isa, Element::Bf16Pairs, tokens),
            #[cfg(target_arch = "x86_64")]
            (Packing::Int4 { zero_points, bf16_scales, .. }, Arithmetic::Bf16Pairs) => {
                avx512::int4_bf16(zero_points, bf16_scales, tokens)
            }
            (Packing::Int4 { zero_points, bf16_scales, .. }, _) if integers => {
                int16::tile(isa, zero_points, bf16_scales, tokens)
            }
            (Packing::Int4 { zero_points, bf16_scales, .. }, _) => {
                int4(isa, zero_points, bf16_scales, tokens)
            }
        };
        let small = packed.tiling.small;
        let rows = if packed.tiling.rows == 1 { rows(isa, matrix.packing, packed.math()) } else { None };
        Self {
            matrix,
            packed,
            small: choose(small),
            larger: choose((small + 1).min(max_tile_of(isa, packed.math()))),
            rows,
            far: far(),
            grouped,
        }
    }

    /// A tile of one panel, or of up to [`ROW_PANELS`] for a lone row; 32 rows of the matrix each. Gives the results of the
    /// tile's rows, or of the panels for a lone row (see [`Packed::place`]).
    #[inline]
    pub fn tile<'s>(
        &self,
        panels: Range<usize>,
        tile: usize,
        space: &'s mut TileSpace,
    ) -> &'s mut [[f32; PANEL]] {
        let out = space.0.as_mut_ptr().cast::<[f32; PANEL]>();
        let results = self.packed.results(&panels, tile);
        debug_assert!(results <= MAX_ROWS);
        match &self.rows {
            Some(functions) => {
                let none = [std::ptr::null(); ROW_PANELS];
                let (x, x_scales, x_sums, x_totals) = self.activations(tile);
                let mut rows = Rows {
                    panels: none,
                    scales: none,
                    zeros: none,
                    group: self.group(),
                    cols: self.matrix.cols,
                    x,
                    x_scales,
                    x_sums,
                    x_totals,
                    far: self.far,
                    out: out.cast(),
                };
                for (n, panel) in panels.clone().enumerate() {
                    (rows.panels[n], rows.scales[n], rows.zeros[n]) = self.matrix.panel(panel);
                }
                // SAFETY: as in `one_panel`; there are as many panels as the function takes, 1 to ROW_PANELS.
                unsafe { functions[panels.len() - 1](&rows) };
            }
            None if self.packed.tiling.rows == 1 => {
                for (index, panel) in panels.enumerate() {
                    self.one_panel(panel, tile, out.wrapping_add(index));
                }
            }
            None => self.one_panel(panels.start, tile, out),
        }
        // SAFETY: the functions have written all results.
        unsafe { std::slice::from_raw_parts_mut(out, results) }
    }

    fn group(&self) -> usize {
        match self.matrix.packing {
            Packing::Int4 { group, .. } => group,
            _ => 0,
        }
    }

    /// A tile's activations as its function reads them, their scales and sums in int16 arithmetic, and their totals.
    #[inline]
    fn activations(&self, tile: usize) -> (*const f32, *const f32, *const i32, *const f32) {
        let (no_scales, no_sums) = (std::ptr::null(), std::ptr::null());
        match &self.grouped {
            Some(grouped) if grouped.integers => {
                let (pairs, scales, sums) = grouped.tile(tile);
                (pairs.cast(), scales, sums, std::ptr::null())
            }
            Some(grouped) => (self.packed.tile_values(tile), no_scales, no_sums, grouped.totals(tile)),
            None => (self.packed.tile_values(tile), no_scales, no_sums, std::ptr::null()),
        }
    }

    /// Row t of a tile's result is `out[t]`, which has room for the tile's rows, of products of tiles for a multiple of 16.
    #[inline]
    fn one_panel(&self, panel: usize, tile: usize, out: *mut [f32; PANEL]) {
        let (weights, scales, zeros) = self.matrix.panel(panel);
        let half = match self.matrix.packing {
            Packing::F16 => 32,
            _ => 64,
        };
        let run = if tile < self.packed.tiling.larger { self.larger } else { self.small };
        // One tile prefetches its own columns; several share the panel that follows, so that memory never waits for them.
        let panel_bytes = self.matrix.packing.panel_bytes(self.matrix.cols).0;
        let tiles = self.packed.block_tiles();
        let next = weights.wrapping_add(panel_bytes + panel_bytes * (tile % tiles) / tiles);
        let ahead = if tiles == 1 { weights.wrapping_add(PREFETCH_BYTES) } else { next };
        let (x, x_scales, x_sums, x_totals) = self.activations(tile);
        let operands = Tile {
            w0: weights,
            // SAFETY: the second half of a column of the panel.
            w1: unsafe { weights.add(half) },
            stride: 2 * half,
            cols: self.matrix.cols,
            tokens: self.packed.tiling.tile(tile).1,
            x,
            x_scales,
            x_sums,
            x_totals,
            out: out.cast(),
            out_stride: PANEL,
            accumulate: false,
            scales,
            zeros,
            group: self.group(),
            ahead,
            ahead_high: ahead.wrapping_add(half),
            ahead_stride: (2 * half).div_ceil(tiles),
            far: if tiles == 1 { self.far } else { 0 },
            next: (next, panel_bytes / tiles),
        };
        // SAFETY: the panel and the packed tile hold `cols` columns (padded to pairs where the packing has pairs),
        // `out` has 32 values for each row of the tile, and the functions were chosen for this CPU.
        unsafe { run(&operands) };
    }
}

/// Calls `body(panels, tile)` for every tile of every panel (of up to [`ROW_PANELS`] side by side for a lone row), split over
/// the threads by panels, so that each panel is read from memory once for each block of activations that fits the L2
/// (once in all, for a decode step). `ahead` is what each thread reads first in the phase that follows.
pub fn for_each_tile(
    pool: &mut Pool,
    packed: &Packed,
    panels: usize,
    ahead: &(dyn Fn(usize) -> Ahead + Sync),
    body: &(dyn Fn(Range<usize>, usize) + Sync),
) {
    let tiling = packed.tiling;
    if tiling.rows == 1 {
        return pool.split_before(ahead, panels, ROW_PANELS, &|panels, _| body(panels, 0));
    }
    let block_tiles = packed.block_tiles();
    let blocks = tiling.tiles.div_ceil(block_tiles);
    pool.split_before(ahead, blocks * panels, 1, &|range, _| {
        for job in range {
            let (block, panel) = (job / panels, job % panels);
            for tile in block * block_tiles..((block + 1) * block_tiles).min(tiling.tiles) {
                body(panel..panel + 1, tile);
            }
        }
    });
}

/// What each thread reads first of matrices whose panels are taken one matrix after the other, where all panels are split
/// over `threads`.
pub fn first_read(matrices: &[Matrix], threads: usize, thread: usize) -> Ahead {
    let panels = matrices.iter().map(Matrix::panels).sum();
    let own = share(panels, threads, thread);
    let mut first = own.start;
    for matrix in matrices {
        if first < matrix.panels() {
            // SAFETY: weights never change, and are fenced before they are freed (`model::Fence`).
            return unsafe { Ahead::new([matrix.stream(first, own.len()), (std::ptr::null(), 0)]) };
        }
        first -= matrix.panels();
    }
    Ahead::NOTHING
}

/// As [`first_read`] for two matrices read side by side.
pub fn first_read_of_pair(pair: [&Matrix; 2], threads: usize, thread: usize) -> Ahead {
    let own = share(pair[0].panels(), threads, thread);
    let streams = pair.map(|matrix| {
        let (start, bytes) = matrix.stream(own.start, own.len());
        (start, bytes / 2)
    });
    // SAFETY: as above.
    unsafe { Ahead::new(streams) }
}
