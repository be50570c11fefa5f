//! Which arithmetic a product takes: what the `cpu_math` knob asks for, on the CPU at hand and for the matrices at hand.

#[cfg(target_arch = "x86_64")]
use super::int16_tiles;
use crate::engine::config::CpuMath;
use crate::engine::device::cpu::isa::{self, Isa};
use crate::engine::device::cpu::matrix::{Matrix, Packing};

/// Rows from which on f32 arithmetic takes products of tiles: a tile costs the same for one row as for 16, and with fewer than this
/// multiply-adds leave memory less to wait for (docs/perf-log.md, "AMX on Intel").
const F32_TILES_FROM_ROWS: usize = 9;

/// How products are computed: what [`CpuMath`] asks for, as this CPU does it fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// By multiply-adds; a lone row times 4-bit weights by products of bytes, with other last bits (`pieces.rs`).
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

    pub(super) fn of_packings(math: CpuMath, isa: Isa, packings: impl IntoIterator<Item = Packing>) -> Self {
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

    pub(super) fn is_tiles(self) -> bool {
        self.in_blocks() || self.is_int16_tiles()
    }

    pub fn is_int16_tiles(self) -> bool {
        matches!(self, Self::Int16Tiles { .. })
    }

    /// By products of tiles whose activations are packed as they read them.
    pub(super) fn in_blocks(self) -> bool {
        matches!(self, Self::F32Tiles { .. } | Self::Bf16Tiles)
    }

    /// Numbers of bf16 for each activation, in products of tiles.
    pub(super) fn pieces(self) -> usize {
        if matches!(self, Self::F32Tiles { .. }) { 3 } else { 1 }
    }

    /// Bytes of packed activations that should stay in a core's L2 while panels pass by.
    pub(super) fn activation_block_bytes(self) -> usize {
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
