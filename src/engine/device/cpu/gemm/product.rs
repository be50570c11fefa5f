//! A matrix times packed activations, tile by tile, and how threads share its panels.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::grouped::{self, Form, Grouped};
use super::{
    Arithmetic, Element, MAX_ROWS, PREFETCH_BYTES, Packed, ROW_PANELS, Rows, RowsFn, Tile, TileFn, dense,
    far, int4, int16, max_tile_of, rows,
};
#[cfg(target_arch = "x86_64")]
use super::{avx512, avx512_int4, int16_tiles, tiles};
use crate::engine::device::cpu::isa::Isa;
use crate::engine::device::cpu::matrix::{Matrix, PANEL, Packing};
use crate::engine::device::cpu::pool::{Ahead, Pool, share};

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
        let needed = grouped::form_of(isa, matrix.packing, &packed);
        let form = |grouped: &Grouped| (grouped.group, grouped.form);
        let grouped = all_grouped.iter().find(|grouped| Some(form(grouped)) == needed).copied();
        assert_eq!(grouped.as_ref().map(form), needed, "activations that were not grouped");
        let form = grouped.map(|grouped| grouped.form);
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
                avx512_int4::int4_bf16(zero_points, bf16_scales, tokens)
            }
            (Packing::Int4 { zero_points, bf16_scales, .. }, _) if form == Some(Form::Pairs) => {
                int16::tile(isa, zero_points, bf16_scales, tokens)
            }
            (Packing::Int4 { zero_points, bf16_scales, .. }, _) => {
                int4(isa, zero_points, bf16_scales, tokens)
            }
        };
        let small = packed.tiling.small;
        let rows =
            if packed.tiling.rows == 1 { rows(isa, matrix.packing, packed.math(), form) } else { None };
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
                let (x, x_scales, x_sums, _) = self.activations(tile);
                let mut rows = Rows {
                    panels: none,
                    scales: none,
                    zeros: none,
                    group: self.group(),
                    cols: self.matrix.cols,
                    x,
                    x_scales,
                    x_sums,
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
            Some(grouped) if grouped.form != Form::Totals => {
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
