//! Products by tiles of AMX: 16 tokens times 16 rows of W and 32 columns, one instruction.
//!
//! In bf16 arithmetic a panel's pairs of columns are what the instruction takes: for each block of 32 columns
//! sum += x w. In f32 arithmetic operands are split exactly into bf16 of 8 significant bits each: an activation into x = a + b + c,
//! a weight in f16 into w = h + l (a weight in bf16 is h alone), and for each block of 32 columns, one product of tiles after
//! the other,
//!   sum += c h; sum += b h; sum += a h; sum += a l; sum += b l,
//! which leaves out c l, at most 2^-24 of x w. Each of these adds up even and odd columns in order, then both, then the sum (see
//! `amx.rs`): fewer roundings than a chain of multiply-adds has, so errors are those of f32 or less.
//!
//! A row's sums are the same whatever other rows a tile holds, and blocks of columns are taken in ascending order at every
//! number of tokens: of rows multiplied so the bits do not depend on their company.
//!
//! A lone row is bound by memory, and products of tiles leave memory waiting: in bf16 arithmetic multiply-adds of vectors make the same
//! sums in the same order (`tile_rows.rs`). In f32 they would be ten where a chain is two, so up to 8 rows are multiplied without
//! tiles there (`arithmetic.rs`), in other bits.
//!
//! Up to 32 tokens all sums stay in tiles while the panel streams by once, and a block of f16 weights is split one block ahead
//! of its use, between the products of another: the two need different units. With more tokens, up to [`MAX_TOKENS`], the panel is
//! taken in parts that stay in the L1, each split once, and sums wait in memory between parts.

use std::arch::x86_64::*;

use super::amx::{Lines, TILE_ROW_BYTES, TILE_ROWS, configure, load, multiply_bf16, store, zero};
use super::avx512::load_f16;
use super::{Tile, TileFn};
use crate::engine::device::cpu::matrix::Packing;
use crate::engine::device::cpu::pool::{LINE, prefetch_line, prefetch_line_to_l2};

/// Most tokens of a tile.
pub const MAX_TOKENS: usize = 128;
/// Columns of one product of tiles.
pub(super) const BLOCK_COLUMNS: usize = 32;
/// Bytes of a panel's block of columns, in 16 bits: 32 rows of 32.
pub(super) const BLOCK_BYTES: usize = 2048;
/// Bytes of a tile.
const TILE_BYTES: usize = TILE_ROWS * TILE_ROW_BYTES;
/// Bytes from one token's sums to the next.
const OUT_STRIDE: usize = 128;
/// Blocks of a part of a panel: they stay in the L1 while all tokens' activations pass by.
const fn part_blocks(kind: u8) -> usize {
    if kind == BF16 { 8 } else { 4 }
}
/// Bytes of a block whose weights are split: four tiles.
const SPLIT_BYTES: usize = 4 * TILE_BYTES;
/// Blocks that are split before they are used, and buffers for that and the one in use.
const SPLIT_AHEAD: usize = 2;

/// The kind of product.
pub(super) const BF16: u8 = 0;
const F32_OF_BF16: u8 = 1;
const F32_OF_F16: u8 = 2;

/// Products of tiles for one multiplication of f32 arithmetic, by what the weights are; `None`: not multiplied so.
pub fn products_in_f32(packing: Packing) -> Option<usize> {
    match packing {
        Packing::Bf16 => Some(3),
        Packing::F16 => Some(5),
        _ => None,
    }
}

/// The function for a matrix of bf16 in bf16 arithmetic.
pub fn bf16() -> TileFn {
    tile::<BF16>
}

/// The function for a matrix in f32 arithmetic that [`products_in_f32`] knows.
pub fn f32(packing: Packing) -> TileFn {
    if packing == Packing::F16 { tile::<F32_OF_F16> } else { tile::<F32_OF_BF16> }
}

/// Pieces of an activation, which lie one after the other in a block of columns: [pieces][tokens][32].
const fn pieces(kind: u8) -> usize {
    if kind == BF16 { 1 } else { 3 }
}

/// A panel's blocks of columns.
pub(super) struct Panel {
    start: *const u8,
    pub(super) blocks: usize,
    /// The last block, filled up with zeros, where the columns do not end with it.
    last: *const u8,
}

impl Panel {
    /// `padded` is where the last block is filled up.
    ///
    /// # Safety
    /// The panel at `start` has `cols` columns.
    #[inline(always)]
    pub(super) unsafe fn new<const K: u8>(
        start: *const u8,
        cols: usize,
        padded: &mut Lines<BLOCK_BYTES>,
    ) -> Self {
        let blocks = cols.div_ceil(BLOCK_COLUMNS);
        let mut panel = Self { start, blocks, last: start.wrapping_add((blocks - 1) * BLOCK_BYTES) };
        let left = cols % BLOCK_COLUMNS;
        if left != 0 {
            // Columns of f16, pairs of columns of bf16.
            let bytes = if K == F32_OF_F16 { left * 64 } else { left.div_ceil(2) * 128 };
            // SAFETY: so much of the last block is there; a whole one has room in `padded`.
            unsafe {
                std::ptr::copy_nonoverlapping(panel.last, padded.at(), bytes);
                padded.at().add(bytes).write_bytes(0, BLOCK_BYTES - bytes);
            }
            panel.last = padded.at();
        }
        panel
    }

    #[inline(always)]
    pub(super) fn block(&self, block: usize) -> *const u8 {
        if block + 1 == self.blocks { self.last } else { self.start.wrapping_add(block * BLOCK_BYTES) }
    }
}

/// What part of the operands a run of products takes.
#[derive(Clone, Copy)]
struct Activations {
    /// Of the first block; the first token's line of its first piece.
    start: *const u8,
    /// Bytes from piece to piece: of all tokens.
    piece: usize,
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn tile<const K: u8>(tile: &Tile) {
    // SAFETY: the contract of `TileFn` covers the panel and the activations; `out` holds `tokens` rows of 32, rounded up to 16.
    // Loads of A may run up to 15 lines past a tile's activations, where `Activations::shape` leaves room.
    unsafe {
        configure();
        let mut padded = Lines::<BLOCK_BYTES>::new();
        let panel = Panel::new::<K>(tile.w0, tile.cols, &mut padded);
        let x = Activations { start: tile.x.cast(), piece: tile.tokens * TILE_ROW_BYTES };
        match (K, tile.tokens) {
            (F32_OF_F16, ..=16) => split_stream::<1>(tile, &panel, x),
            (F32_OF_F16, ..=32) => split_stream::<2>(tile, &panel, x),
            (_, ..=16) => stream::<K, 1>(tile, &panel, x),
            (_, ..=32) => stream::<K, 2>(tile, &panel, x),
            _ => parts::<K>(tile, &panel, x),
        }
    }
}

#[inline(always)]
unsafe fn zero_sums<const S: usize>() {
    // SAFETY: the caller has configured the tiles.
    unsafe {
        zero::<0>();
        zero::<1>();
        if S == 2 {
            zero::<2>();
            zero::<3>();
        }
    }
}

#[inline(always)]
unsafe fn load_sums<const S: usize>(out: *const u8) {
    // SAFETY: as in `store_sums`.
    unsafe {
        load::<0>(out, OUT_STRIDE);
        load::<1>(out.add(64), OUT_STRIDE);
        if S == 2 {
            load::<2>(out.add(TILE_ROWS * OUT_STRIDE), OUT_STRIDE);
            load::<3>(out.add(TILE_ROWS * OUT_STRIDE + 64), OUT_STRIDE);
        }
    }
}

/// Sums of S times 16 tokens: tiles 0 and 1 are rows 0 to 15 and 16 to 31 of the panel for the first 16 tokens, 2 and 3 for the others.
#[inline(always)]
unsafe fn store_sums<const S: usize>(out: *mut u8) {
    // SAFETY: the caller has configured the tiles, and `out` holds S times 16 rows.
    unsafe {
        store::<0>(out, OUT_STRIDE);
        store::<1>(out.add(64), OUT_STRIDE);
        if S == 2 {
            store::<2>(out.add(TILE_ROWS * OUT_STRIDE), OUT_STRIDE);
            store::<3>(out.add(TILE_ROWS * OUT_STRIDE + 64), OUT_STRIDE);
        }
    }
}

/// Tiles 6 and 7 = S times 16 tokens of a piece.
#[inline(always)]
unsafe fn load_tokens<const S: usize>(at: *const u8) {
    // SAFETY: as in `tile`.
    unsafe {
        load::<6>(at, TILE_ROW_BYTES);
        if S == 2 {
            load::<7>(at.add(TILE_BYTES), TILE_ROW_BYTES);
        }
    }
}

/// Adds the products of tiles 6 and 7 with tiles 4 and 5.
#[inline(always)]
unsafe fn multiply<const S: usize>() {
    // SAFETY: the caller has configured the tiles.
    unsafe {
        multiply_bf16::<0, 6, 4>();
        multiply_bf16::<1, 6, 5>();
        if S == 2 {
            multiply_bf16::<2, 7, 4>();
            multiply_bf16::<3, 7, 5>();
        }
    }
}

/// One block of columns of a panel of bf16, at `w`, or of the upper pieces of split weights.
#[inline(always)]
unsafe fn add_block<const K: u8, const S: usize>(w: *const u8, x: *const u8, piece: usize) {
    // SAFETY: as in `tile`.
    unsafe {
        load::<4>(w, 128);
        load::<5>(w.add(64), 128);
        if K != BF16 {
            load_tokens::<S>(x.add(2 * piece));
            multiply::<S>();
            load_tokens::<S>(x.add(piece));
            multiply::<S>();
        }
        load_tokens::<S>(x);
        multiply::<S>();
    }
}

/// One block of columns of split weights: four tiles one after the other, `h` of both halves of the panel and `l` of both.
#[inline(always)]
unsafe fn add_split_block<const S: usize>(split: *const u8, x: *const u8, piece: usize) {
    // SAFETY: as in `tile`.
    unsafe {
        load::<4>(split, TILE_ROW_BYTES);
        load::<5>(split.add(TILE_BYTES), TILE_ROW_BYTES);
        load_tokens::<S>(x.add(2 * piece));
        multiply::<S>();
        load_tokens::<S>(x.add(piece));
        multiply::<S>();
        load_tokens::<S>(x);
        multiply::<S>();
        load::<4>(split.add(2 * TILE_BYTES), TILE_ROW_BYTES);
        load::<5>(split.add(3 * TILE_BYTES), TILE_ROW_BYTES);
        multiply::<S>();
        load_tokens::<S>(x.add(piece));
        multiply::<S>();
    }
}

/// Asks for line `line` after `ahead`, and into the L2 for the one `far` bytes on.
#[inline(always)]
pub(super) fn prefetch_both(ahead: *const u8, far: usize, line: usize) {
    prefetch_line(ahead.wrapping_add(LINE * line));
    prefetch_line_to_l2(ahead.wrapping_add(far).wrapping_add(LINE * line));
}

/// A panel of bf16 and up to S times 16 tokens.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn stream<const K: u8, const S: usize>(tile: &Tile, panel: &Panel, x: Activations) {
    // SAFETY: as in `tile`.
    unsafe {
        zero_sums::<S>();
        let mut at = x.start;
        let mut ahead = tile.ahead;
        for block in 0..panel.blocks {
            let w = panel.block(block);
            let prefetch = |lines: std::ops::Range<usize>| {
                lines.for_each(|line| prefetch_both(ahead, tile.far, line));
            };
            // As `add_block`, with prefetches in between.
            load::<4>(w, 128);
            prefetch(0..8);
            load::<5>(w.add(64), 128);
            prefetch(8..16);
            if K != BF16 {
                load_tokens::<S>(at.add(2 * x.piece));
                multiply::<S>();
                load_tokens::<S>(at.add(x.piece));
                multiply::<S>();
            }
            prefetch(16..24);
            load_tokens::<S>(at);
            prefetch(24..32);
            multiply::<S>();
            ahead = ahead.wrapping_add(BLOCK_BYTES);
            at = at.wrapping_add(pieces(K) * x.piece);
        }
        store_sums::<S>(tile.out.cast());
    }
}

/// Splits one pair of columns of 32 weights in f16 at `w` into line `pair` of the four tiles at `to`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn split_pair(w: *const u8, to: *mut u8, pair: usize) {
    let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    for half in 0..2 {
        // SAFETY: a pair of columns is 128 bytes, a tile 16 lines.
        unsafe {
            let at = w.add(128 * pair + 32 * half);
            let (even, odd) = (load_f16(at), load_f16(at.add(64)));
            let (even_h, odd_h) = (
                _mm512_and_si512(_mm512_castps_si512(even), upper),
                _mm512_and_si512(_mm512_castps_si512(odd), upper),
            );
            // The rest is exact: f16 has 11 significant bits.
            let even_l = _mm512_castps_si512(_mm512_sub_ps(even, _mm512_castsi512_ps(even_h)));
            let odd_l = _mm512_castps_si512(_mm512_sub_ps(odd, _mm512_castsi512_ps(odd_h)));
            // (Of both the lower 16 bits are zero.)
            let h = _mm512_or_si512(_mm512_srli_epi32::<16>(even_h), odd_h);
            let l = _mm512_or_si512(_mm512_srli_epi32::<16>(even_l), odd_l);
            _mm512_store_si512(to.add(half * TILE_BYTES + pair * TILE_ROW_BYTES).cast(), h);
            _mm512_store_si512(to.add((2 + half) * TILE_BYTES + pair * TILE_ROW_BYTES).cast(), l);
        }
    }
}

/// A panel of f16 and up to S times 16 tokens.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn split_stream<const S: usize>(tile: &Tile, panel: &Panel, x: Activations) {
    let mut buffers = Lines::<{ (SPLIT_AHEAD + 1) * SPLIT_BYTES }>::new();
    let first = buffers.at();
    // The block in use, the next, and the one that is being split. It is used two blocks later: a load of a tile waits for
    // lines that are still in the store buffer.
    let (mut now, mut next, mut to) =
        (first, first.wrapping_add(SPLIT_BYTES), first.wrapping_add(2 * SPLIT_BYTES));
    let (mut ahead, far) = (tile.ahead, tile.far);
    // SAFETY: as in `tile`.
    unsafe {
        zero_sums::<S>();
        for (block, to) in [now, next].into_iter().enumerate().take(panel.blocks) {
            split_pairs::<0, 16>(panel.block(block), to, ahead, far);
            ahead = ahead.wrapping_add(BLOCK_BYTES);
        }
        let mut at = x.start;
        for block in SPLIT_AHEAD..panel.blocks {
            let w = panel.block(block);
            let split = now.cast_const();
            // As `add_split_block`, with the other block in between.
            load::<4>(split, TILE_ROW_BYTES);
            load::<5>(split.add(TILE_BYTES), TILE_ROW_BYTES);
            load_tokens::<S>(at.add(2 * x.piece));
            multiply::<S>();
            split_pairs::<0, 4>(w, to, ahead, far);
            load_tokens::<S>(at.add(x.piece));
            multiply::<S>();
            split_pairs::<4, 7>(w, to, ahead, far);
            load_tokens::<S>(at);
            multiply::<S>();
            split_pairs::<7, 10>(w, to, ahead, far);
            load::<4>(split.add(2 * TILE_BYTES), TILE_ROW_BYTES);
            load::<5>(split.add(3 * TILE_BYTES), TILE_ROW_BYTES);
            multiply::<S>();
            split_pairs::<10, 13>(w, to, ahead, far);
            load_tokens::<S>(at.add(x.piece));
            multiply::<S>();
            split_pairs::<13, 16>(w, to, ahead, far);
            ahead = ahead.wrapping_add(BLOCK_BYTES);
            at = at.wrapping_add(3 * x.piece);
            (now, next, to) = (next, to, now);
        }
        for split in [now, next].into_iter().take(panel.blocks) {
            add_split_block::<S>(split, at, x.piece);
            at = at.wrapping_add(3 * x.piece);
        }
        store_sums::<S>(tile.out.cast());
    }
}

/// Splits pairs FROM to END of a block and prefetches as many of the lines that follow `ahead`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn split_pairs<const FROM: usize, const END: usize>(
    w: *const u8,
    to: *mut u8,
    ahead: *const u8,
    far: usize,
) {
    for pair in FROM..END {
        prefetch_both(ahead, far, 2 * pair);
        prefetch_both(ahead, far, 2 * pair + 1);
        // SAFETY: as in `tile`.
        unsafe { split_pair(w, to, pair) };
    }
}

/// More than 32 tokens: the panel in parts, each for all tokens.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn parts<const K: u8>(tile: &Tile, panel: &Panel, x: Activations) {
    let mut split = Lines::<{ part_blocks(F32_OF_F16) * SPLIT_BYTES }>::new();
    // The panel that follows is asked for at an even pace.
    let pairs = tile.tokens.div_ceil(2 * TILE_ROWS);
    let lines = tile.next.1.div_ceil(LINE).div_ceil(panel.blocks * pairs);
    let mut ahead = tile.next.0;
    for first in (0..panel.blocks).step_by(part_blocks(K)) {
        let end = panel.blocks.min(first + part_blocks(K));
        if K == F32_OF_F16 {
            for block in first..end {
                for pair in 0..BLOCK_COLUMNS / 2 {
                    let to = split.at().wrapping_add((block - first) * SPLIT_BYTES);
                    // SAFETY: as in `tile`.
                    unsafe { split_pair(panel.block(block), to, pair) };
                }
            }
        }
        for pair in 0..pairs {
            let part = PartOf { tile, panel, x, blocks: (first, end), split: split.at(), ahead, lines };
            // SAFETY: as in `tile`.
            unsafe {
                if tile.tokens - 2 * pair * TILE_ROWS > TILE_ROWS {
                    part.run::<K, 2>(pair);
                } else {
                    part.run::<K, 1>(pair);
                }
            }
            ahead = ahead.wrapping_add((end - first) * lines * LINE);
        }
    }
}

struct PartOf<'a> {
    tile: &'a Tile,
    panel: &'a Panel,
    x: Activations,
    blocks: (usize, usize),
    /// These blocks, split.
    split: *const u8,
    /// What to prefetch, `lines` for each block.
    ahead: *const u8,
    lines: usize,
}

impl PartOf<'_> {
    /// Up to S times 16 tokens from the 32 times `pair`-th on.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn run<const K: u8, const S: usize>(&self, pair: usize) {
        let (first, end) = self.blocks;
        // SAFETY: as in `tile`.
        unsafe {
            let out = self.tile.out.cast::<u8>().add(2 * pair * TILE_ROWS * OUT_STRIDE);
            if first == 0 {
                zero_sums::<S>()
            } else {
                load_sums::<S>(out)
            }
            let mut ahead = self.ahead;
            for block in first..end {
                for _ in 0..self.lines {
                    prefetch_line_to_l2(ahead);
                    ahead = ahead.wrapping_add(LINE);
                }
                let at = self.x.start.add(block * pieces(K) * self.x.piece + 2 * pair * TILE_BYTES);
                if K == F32_OF_F16 {
                    let split = self.split.add((block - first) * SPLIT_BYTES);
                    add_split_block::<S>(split, at, self.x.piece);
                } else {
                    add_block::<K, S>(self.panel.block(block), at, self.x.piece);
                }
            }
            store_sums::<S>(out);
        }
    }
}

/// Independent products of tiles in a round of [`rounds`].
pub const ROUND_PRODUCTS: usize = 4;

/// Rounds of products of tiles in registers, one operand of each loaded from the L1: what the units can do at most.
///
/// # Safety
/// The CPU has products of tiles of bf16.
pub unsafe fn rounds(rounds: usize) -> f32 {
    let zeros = [0u64; TILE_BYTES / 8];
    let at = std::hint::black_box(&zeros).as_ptr().cast::<u8>();
    // SAFETY: the CPU was asked; a tile is as large as `zeros`.
    unsafe {
        configure();
        zero_sums::<2>();
        load::<4>(at, TILE_ROW_BYTES);
        load::<5>(at, TILE_ROW_BYTES);
        load::<6>(at, TILE_ROW_BYTES);
        load::<7>(at, TILE_ROW_BYTES);
        for _ in 0..rounds {
            multiply::<2>();
        }
    }
    0.0
}
