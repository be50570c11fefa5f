//! Products of [`super::int16`] by tiles of AMX, for a few tokens and more: the same integers, the same float operations in the
//! same order, so the same bits.
//!
//! A 16-bit activation is 256 a + b, a signed and b unsigned, and a weight less its zero point is a signed 8-bit integer: two
//! products of tiles give the sums of a w and of b w, for 16 tokens, 16 rows and 64 columns in 16 cycles each. What remains
//! is done by AVX-512 meanwhile: a block of weights is unpacked one block ahead of its use (five instructions for 128 weights),
//! and the sums of a group become floats while the next group is multiplied.
//!
//! Groups are 32 columns, or a multiple of 64. Of groups of 32 the other half of a product's columns meets rows of zeros.

use std::arch::x86_64::*;

use super::amx::{
    Lines, TILE_ROW_BYTES, TILE_ROWS, configure, load, multiply_i8, multiply_u8_i8, store, zero,
};
use super::avx512::{load as widen, prefetch_pair};
use super::avx512_int4::prefetch_group;
use super::{Tile, TileFn};

/// Columns of one product of tiles.
pub const BLOCK_COLUMNS: usize = 64;
/// Lines of one half of a panel's unpacked block: 16, and with groups of 32 eight of zeros between those of two groups.
const HALF_LINES: usize = 24;
const UNPACKED_BYTES: usize = 2 * HALF_LINES * TILE_ROW_BYTES;
/// Blocks of a part of a panel that many tokens meet, unpacked once for all: 24 KB.
const PART_BLOCKS: usize = 8;
/// Sums of a group: `a` and `b` of both halves, [4][16 tokens][16 rows].
const SUMS: usize = 4 * TILE_ROWS * 16;

/// From how many rows of activations on matrices of such groups are multiplied so, if they can be: with fewer, AVX512-VNNI's tiles
/// are as fast, since of few tokens and small groups moving the sums from tiles to memory takes most of the time.
pub fn from_rows(group: usize) -> Option<usize> {
    match group {
        32 => Some(8),
        _ if group.is_multiple_of(BLOCK_COLUMNS) && group <= PART_BLOCKS * BLOCK_COLUMNS => Some(4),
        _ => None,
    }
}

pub fn tile(zero_points: bool, bf16_scales: bool) -> TileFn {
    match (zero_points, bf16_scales) {
        (false, false) => any_tokens::<false, false>,
        (false, true) => any_tokens::<false, true>,
        (true, false) => any_tokens::<true, false>,
        (true, true) => any_tokens::<true, true>,
    }
}

/// Where a tile's rows of activations lie: for each block of 64 columns `[a, b][tokens][64]` bytes.
#[derive(Clone, Copy)]
pub struct Planes {
    pub start: *mut u8,
    pub tokens: usize,
}

impl Planes {
    /// The line of token `t` and the next ones in a block: of `a`, or of `b`.
    #[inline(always)]
    fn at(self, block: usize, low: usize, t: usize) -> *mut u8 {
        self.start.wrapping_add(((2 * block + low) * self.tokens + t) * TILE_ROW_BYTES)
    }
}

/// Rounds one row, token `t` of its tile, group by group as `grouped.rs` does. In a line each eight columns lie as the nibbles of
/// a word that are unpacked together: 0, 4, 1, 5, then 2, 6, 3, 7.
///
/// # Safety
/// The CPU has AVX-512 BW. `values` are whole groups; `planes` and `scales`, [groups][tokens], hold the row, which no other
/// thread writes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub unsafe fn round_row(values: &[f32], group: usize, t: usize, planes: Planes, scales: *mut f32) {
    const LANES: usize = 16;
    let to_integer = _mm512_set1_ps(super::grouped::TO_INTEGER);
    // Of eight columns in 16 bits: the lower bytes in the order of a line, then the upper ones.
    let split = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15));
    let (low, high) =
        (_mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14), _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15));
    let steps = group.min(BLOCK_COLUMNS) / LANES;
    for (g, values) in values.chunks_exact(group).enumerate() {
        let (mut largest, mut poison) = (_mm512_setzero_ps(), _mm512_setzero_ps());
        for values in values.chunks_exact(LANES) {
            // SAFETY: 16 floats.
            let value = _mm512_abs_ps(unsafe { _mm512_loadu_ps(values.as_ptr()) });
            // (The second operand where one is not a number.)
            largest = _mm512_max_ps(value, largest);
            poison = _mm512_add_ps(poison, _mm512_mul_ps(value, _mm512_setzero_ps()));
        }
        let (scale, inverse) = super::grouped::scale(_mm512_reduce_max_ps(largest));
        // SAFETY: the row has a scale for each group.
        unsafe { *scales.add(g * planes.tokens + t) = scale + _mm512_reduce_add_ps(poison) };
        let inverse = _mm512_set1_ps(inverse);
        for (part, values) in values.chunks_exact(steps * LANES).enumerate() {
            let mut halves = [_mm512_setzero_si512(); 2];
            for (half, values) in halves.iter_mut().zip(values.chunks_exact(2 * LANES)) {
                let integers = [0, LANES].map(|at| {
                    // SAFETY: 16 floats each.
                    let values = unsafe { _mm512_loadu_ps(values.as_ptr().add(at)) };
                    let sum = _mm512_add_ps(_mm512_mul_ps(values, inverse), to_integer);
                    _mm512_cvtepi32_epi16(_mm512_castps_si512(sum))
                });
                let words = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(integers[0]), integers[1]);
                *half = _mm512_shuffle_epi8(words, split);
            }
            let upper = _mm512_permutex2var_epi64(halves[0], high, halves[1]);
            let lower = _mm512_permutex2var_epi64(halves[0], low, halves[1]);
            let column = g * group + part * steps * LANES;
            let (block, within) = (column / BLOCK_COLUMNS, column % BLOCK_COLUMNS);
            for (line, bytes) in [upper, lower].into_iter().enumerate() {
                let at = planes.at(block, line, t).wrapping_add(within);
                // SAFETY: the row's line, or the half of it that is this group's.
                unsafe {
                    if steps == 4 {
                        _mm512_storeu_si512(at.cast(), bytes);
                    } else {
                        _mm256_storeu_si256(at.cast(), _mm512_castsi512_si256(bytes));
                    }
                }
            }
        }
    }
}

/// One panel's product.
struct Panel<'a> {
    tile: &'a Tile,
    planes: Planes,
    groups: usize,
    blocks: usize,
}

/// A group's sums of up to 16 tokens, from token `first` on, that lie in memory and are still to become floats.
#[derive(Clone, Copy)]
struct Pending {
    sums: *const i32,
    group: usize,
    first: usize,
    count: usize,
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn any_tokens<const Z: bool, const B: bool>(tile: &Tile) {
    let planes = Planes { start: tile.x.cast::<u8>().cast_mut(), tokens: tile.tokens };
    let blocks = tile.cols.div_ceil(BLOCK_COLUMNS);
    let panel = Panel { tile, planes, groups: tile.cols / tile.group, blocks };
    // SAFETY: the contract of `TileFn` covers every access below; loads of activations may run up to 15 lines past a tile's,
    // where `GroupedActivations::shape` leaves room.
    unsafe {
        configure();
        for t in 0..tile.tokens {
            let out = tile.out.add(t * tile.out_stride);
            _mm512_storeu_ps(out, _mm512_setzero_ps());
            _mm512_storeu_ps(out.add(16), _mm512_setzero_ps());
        }
        if tile.tokens <= TILE_ROWS {
            panel.stream::<Z, B>();
        } else {
            panel.parts::<Z, B>();
        }
    }
}

impl Panel<'_> {
    /// Columns of a group in one product.
    #[inline(always)]
    fn narrow(&self) -> bool {
        self.tile.group < BLOCK_COLUMNS
    }

    /// The groups that end in a block, or that it is the whole of.
    #[inline(always)]
    fn groups_before(&self, block: usize) -> usize {
        (block * BLOCK_COLUMNS / self.tile.group).min(self.groups)
    }

    /// Writes the rows of zeros of an unpacked block of groups of 32.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn clear(&self, to: *mut u8) {
        for half in 0..2 {
            for line in 8..16 {
                // SAFETY: `to` is an unpacked block.
                unsafe {
                    let at = to.add((half * HALF_LINES + line) * TILE_ROW_BYTES);
                    _mm512_store_si512(at.cast(), _mm512_setzero_si512());
                }
            }
        }
    }

    /// Unpacks a block of the panel: of each half 16 lines of 4 columns of 16 rows, less zero points.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
    unsafe fn unpack<const Z: bool>(&self, block: usize, to: *mut u8) {
        let tile = self.tile;
        let nibble = _mm512_set1_epi8(15);
        let spread =
            _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
        let mut zeros = [_mm512_set1_epi8(8); 2];
        let mut at_group = usize::MAX;
        let words = (tile.cols / 8 - 8 * block).min(8);
        for word in 0..words {
            // SAFETY: a panel holds all its words, scales and zero points; prefetches never fault.
            unsafe {
                let g = (8 * block + word) * 8 / tile.group;
                if (word == 0 || self.narrow() && word == 4) && g != at_group {
                    at_group = g;
                    prefetch_group::<Z>(tile, g);
                    if Z {
                        let pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(tile.zeros.add(16 * g).cast()));
                        zeros[0] =
                            _mm512_shuffle_epi8(_mm512_and_si512(pairs, _mm512_set1_epi32(15)), spread);
                        zeros[1] = _mm512_shuffle_epi8(_mm512_srli_epi32::<4>(pairs), spread);
                    }
                }
                let at = 8 * block + word;
                prefetch_pair(tile.ahead.wrapping_add(at * tile.ahead_stride), tile.far);
                // Lines of the second group of 32 come after those of zeros.
                let line = 2 * word + if self.narrow() && word >= 4 { 8 } else { 0 };
                for (half, zeros) in zeros.iter().enumerate() {
                    let words = _mm512_loadu_si512(tile.w0.add(at * tile.stride + 64 * half).cast());
                    let low = _mm512_and_si512(words, nibble);
                    let high = _mm512_and_si512(_mm512_srli_epi32::<4>(words), nibble);
                    let to = to.add((half * HALF_LINES + line) * TILE_ROW_BYTES);
                    _mm512_store_si512(to.cast(), _mm512_sub_epi8(low, *zeros));
                    _mm512_store_si512(to.add(TILE_ROW_BYTES).cast(), _mm512_sub_epi8(high, *zeros));
                }
            }
        }
    }

    /// Adds an unpacked block, from line `line` on, times 16 tokens from `t` on to tiles 0 to 3. Line 0 comes first of a block: the
    /// activations stay in their tiles for the other.
    #[inline(always)]
    unsafe fn multiply(&self, block: usize, unpacked: *const u8, line: usize, t: usize) {
        // SAFETY: the thread's tiles are configured; 16 lines of each operand can be read.
        unsafe {
            if line == 0 {
                load::<4>(self.planes.at(block, 0, t), TILE_ROW_BYTES);
                load::<5>(self.planes.at(block, 1, t), TILE_ROW_BYTES);
            }
            load::<6>(unpacked.add(line * TILE_ROW_BYTES), TILE_ROW_BYTES);
            load::<7>(unpacked.add((HALF_LINES + line) * TILE_ROW_BYTES), TILE_ROW_BYTES);
            multiply_i8::<0, 4, 6>();
            multiply_u8_i8::<1, 5, 6>();
            multiply_i8::<2, 4, 7>();
            multiply_u8_i8::<3, 5, 7>();
        }
    }

    /// Moves the sums of a group from tiles 0 to 3 to memory, and zeroes them.
    #[inline(always)]
    unsafe fn take_sums(to: *mut i32) {
        // SAFETY: the thread's tiles are configured; `to` holds a group's sums.
        unsafe {
            store::<0>(to.cast(), TILE_ROW_BYTES);
            store::<1>(to.add(256).cast(), TILE_ROW_BYTES);
            store::<2>(to.add(512).cast(), TILE_ROW_BYTES);
            store::<3>(to.add(768).cast(), TILE_ROW_BYTES);
            zero_sums();
        }
    }

    /// total = (weight scale * scale) * (256 a + b) + total for some tokens of a group, counted from `pending.first`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn finish<const B: bool>(&self, pending: &Pending, tokens: std::ops::Range<usize>) {
        let tile = self.tile;
        // SAFETY: a group has 32 scales of 16 bits; sums hold 16 tokens, `out` all of the tile's.
        unsafe {
            let scales = tile.scales.add(64 * pending.group);
            let scales = [scales, scales.add(32)].map(|at| if B { widen::<2>(at) } else { widen::<1>(at) });
            let x_scales = tile.x_scales.add(pending.group * tile.tokens + pending.first);
            let out = tile.out.add(pending.first * tile.out_stride);
            for t in tokens {
                let x_scale = _mm512_set1_ps(*x_scales.add(t));
                for (v, scale) in scales.iter().enumerate() {
                    let sums = pending.sums.add(512 * v + 16 * t);
                    let a = _mm512_load_si512(sums.cast());
                    let b = _mm512_load_si512(sums.add(256).cast());
                    let exact = _mm512_add_epi32(_mm512_slli_epi32::<8>(a), b);
                    let to = out.add(t * tile.out_stride + 16 * v);
                    let scale = _mm512_mul_ps(*scale, x_scale);
                    let sum = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(exact), _mm512_loadu_ps(to));
                    _mm512_storeu_ps(to, sum);
                }
            }
        }
    }

    /// Up to 16 tokens: the panel streams by once.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn stream<const Z: bool, const B: bool>(&self) {
        /// Blocks unpacked before their use, and buffers for them.
        const AHEAD: usize = 1;
        let mut unpacked = Lines::<{ (AHEAD + 1) * UNPACKED_BYTES }>::new();
        let mut sums = Lines::<{ 2 * 4 * SUMS }>::new();
        let count = self.planes.tokens;
        // SAFETY: as in `any_tokens`.
        unsafe {
            zero_sums();
            if self.narrow() {
                (0..=AHEAD).for_each(|buffer| self.clear(unpacked.at().add(buffer * UNPACKED_BYTES)));
            }
            let mut pending: Option<Pending> = None;
            // Products of a group, and those done of the one at hand.
            let products = self.tile.group.div_ceil(BLOCK_COLUMNS);
            let (mut done, mut group) = (0, 0);
            for step in 0..self.blocks + AHEAD {
                if step < self.blocks {
                    self.unpack::<Z>(step, unpacked.at().add(step % (AHEAD + 1) * UNPACKED_BYTES));
                }
                let Some(block) = step.checked_sub(AHEAD) else { continue };
                let from = unpacked.at().add(block % (AHEAD + 1) * UNPACKED_BYTES);
                let halves = if self.narrow() { self.groups_before(block + 1) - group } else { 1 };
                for half in 0..halves {
                    self.multiply(block, from, 8 * half, 0);
                    done += 1;
                    if let Some(pending) = &pending {
                        self.finish::<B>(pending, count * (done - 1) / products..count * done / products);
                    }
                    if done == products {
                        let to = sums.at().cast::<i32>().add(group % 2 * SUMS);
                        Self::take_sums(to);
                        pending = Some(Pending { sums: to, group, first: 0, count });
                        (done, group) = (0, group + 1);
                    }
                }
            }
            if let Some(pending) = &pending {
                self.finish::<B>(pending, 0..pending.count);
            }
        }
    }

    /// More tokens: the panel is taken in parts that stay in the L1, each unpacked once. A part holds whole groups.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn parts<const Z: bool, const B: bool>(&self) {
        let mut unpacked = Lines::<{ PART_BLOCKS * UNPACKED_BYTES }>::new();
        let mut sums = Lines::<{ 2 * 4 * SUMS }>::new();
        let products = self.tile.group.div_ceil(BLOCK_COLUMNS);
        let part_blocks = PART_BLOCKS / products * products;
        // SAFETY: as in `any_tokens`.
        unsafe {
            zero_sums();
            if self.narrow() {
                (0..PART_BLOCKS).for_each(|block| self.clear(unpacked.at().add(block * UNPACKED_BYTES)));
            }
            let mut pending: Option<Pending> = None;
            let mut turn = 0;
            for first in (0..self.blocks).step_by(part_blocks) {
                let blocks = first..self.blocks.min(first + part_blocks);
                for block in blocks.clone() {
                    self.unpack::<Z>(block, unpacked.at().add((block - first) * UNPACKED_BYTES));
                }
                let groups = self.groups_before(blocks.start)..self.groups_before(blocks.end);
                for t in (0..self.planes.tokens).step_by(TILE_ROWS) {
                    let count = (self.planes.tokens - t).min(TILE_ROWS);
                    for group in groups.clone() {
                        let start = group * self.tile.group / BLOCK_COLUMNS;
                        let line = if self.narrow() { group % 2 * 8 } else { 0 };
                        for block in start..start + products {
                            let from = unpacked.at().add((block - first) * UNPACKED_BYTES);
                            self.multiply(block, from, line, t);
                            if let Some(pending) = &pending {
                                let done = block - start;
                                let tokens =
                                    pending.count * done / products..pending.count * (done + 1) / products;
                                self.finish::<B>(pending, tokens);
                            }
                        }
                        let to = sums.at().cast::<i32>().add(turn % 2 * SUMS);
                        Self::take_sums(to);
                        pending = Some(Pending { sums: to, group, first: t, count });
                        turn += 1;
                    }
                }
            }
            if let Some(pending) = &pending {
                self.finish::<B>(pending, 0..pending.count);
            }
        }
    }
}

#[inline(always)]
unsafe fn zero_sums() {
    // SAFETY: the caller has configured the tiles.
    unsafe {
        zero::<0>();
        zero::<1>();
        zero::<2>();
        zero::<3>();
    }
}
