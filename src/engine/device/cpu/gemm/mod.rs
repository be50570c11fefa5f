//! Products of matrices: y[T, rows] = x[T, cols] Wᵀ, by tiles of one panel (32 rows) times up to [`MAX_TILE`] tokens.
//!
//! A tile keeps all its sums in registers and walks the columns once: per column it loads 32 weights, widens them and
//! multiplies them with one broadcast activation a token. With one token that is a matrix-vector product at the speed
//! of memory; with twelve, 24 multiply-adds for 14 loads, which is bound by the multipliers. Every tile size adds in the
//! same order (see `matrix.rs`), so how tokens are grouped into tiles never shows in a result.
//!
//! Where the CPU has AMX, matrices of f16 and bf16 are multiplied by its tiles instead (`tiles.rs`): in bf16 arithmetic always, so
//! that again every number of tokens gives the same bits, and in f32 from `F32_TILES_FROM_ROWS` (`arithmetic.rs`) rows on. There a row's last
//! bits tell whether it was computed among fewer or more. 4-bit weights in int16 arithmetic have tiles of bytes for the same bits
//! (`int16_tiles.rs`).
//!
//! A lone row of f32 arithmetic meets 4-bit weights as fixed-point numbers cut into bytes (`pieces.rs`), with errors no larger than
//! those of multiply-adds and other last bits: there too they tell whether a row was computed alone. In int16 they do not.
//!
//! The tiles of this file serve attention too: 16 keys of a cache tile are half a panel with head_dim columns, and the values of a
//! block are a panel whose columns are tokens.

#[cfg(target_arch = "x86_64")]
mod amx;
mod arithmetic;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_int4;
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
mod pieces;
#[cfg(target_arch = "x86_64")]
mod pieces_avx2;
#[cfg(target_arch = "x86_64")]
mod pieces_avx512;
mod portable;
mod product;
#[cfg(target_arch = "x86_64")]
mod settle;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tile_rows;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod values;

use super::isa::{self, Isa, has_vnni};
use super::matrix::Packing;
pub use arithmetic::Arithmetic;
pub use packed::{Activations, Packed, Tiling};
pub use peak::Peak;
pub use product::{Product, TileSpace, first_read, first_read_of_pair, for_each_tile};
pub use values::{Values, values};

/// Most tokens of a tile: 24 sums of 16 lanes and what they need fill the 32 AVX-512 registers.
pub const MAX_TILE: usize = 12;

/// Most tokens of a product's tile in any arithmetic: AMX takes most.
#[cfg(target_arch = "x86_64")]
const MAX_ROWS: usize = tiles::MAX_TOKENS;
#[cfg(not(target_arch = "x86_64"))]
const MAX_ROWS: usize = MAX_TILE;

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
    /// As in [`Tile`], with T = 1; for products of bytes as [`pieces::Cut`] says.
    pub x: *const f32,
    pub x_scales: *const f32,
    pub x_sums: *const i32,
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

/// The functions for one token and 1 to [`ROW_PANELS`] panels, where the instruction set has them; `form` is that of the grouped
/// activations.
fn rows(
    isa: Isa,
    packing: Packing,
    math: Arithmetic,
    form: Option<grouped::Form>,
) -> Option<[RowsFn; ROW_PANELS]> {
    #[cfg(target_arch = "x86_64")]
    if let (Packing::Int4 { zero_points, bf16_scales, .. }, Some(grouped::Form::Pieces(cut))) =
        (packing, form)
    {
        return Some(pieces::rows(isa, cut, zero_points, bf16_scales));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = form;
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
        _ => None,
    }
}

fn int4(isa: Isa, zero_points: bool, bf16_scales: bool, tokens: usize) -> TileFn {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => avx512_int4::int4(zero_points, bf16_scales, tokens),
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
