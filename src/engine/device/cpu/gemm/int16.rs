//! 4-bit weights times 16-bit activations (`cpu_math = int16`): exact integers within a group, f32 from group to group.
//!
//! A row's activations of one group of columns become x = scale * i with scale = max |x| / 32767, so that each is off by
//! at most 2^-16 of the group's largest. A product is then, group after group in ascending order,
//!   total = (weight scale * scale) * (sum of q i - zero * sum of i) + total,
//! both sums exact in 32 bits. Integer sums have no order, so every instruction set and tile gives the same bits.
//! One instruction multiplies and adds two 16-bit columns in each lane, twice what a multiply-add of floats does, and a
//! nibble is an operand as it is, without becoming a float.

use super::super::isa::{Arch, Isa, Plain, Work, fma, has_vnni};
use super::super::memory::{Scratch, Shared};
use super::portable::{widen_bf16, widen_f16};
use super::{MAX_TILE, Packed, ROW_PANELS, RowsFn, Tile, TileFn, Tiling};
use crate::Result;
use crate::engine::device::cpu::matrix::Packing;

/// Most tokens of a tile: sums, operands and masks of more do not fit the registers.
pub fn max_tokens(isa: Isa) -> usize {
    if isa == Isa::Avx512 && has_vnni() { MAX_TILE } else { 4 }
}

/// Largest group whose sums of 15 * 32767 stay within 31 bits.
const MAX_GROUP: usize = 4096;

/// The group of a matrix that these functions multiply, `None` for other matrices.
pub fn group_of(packing: Packing) -> Option<usize> {
    match packing {
        Packing::Int4 { group, .. } if group <= MAX_GROUP => Some(group),
        _ => None,
    }
}

/// Buffers of rounded activations.
#[derive(Debug, Default)]
pub struct Int16Activations {
    pairs: Scratch<i32>,
    scales: Scratch<f32>,
    sums: Scratch<i32>,
}

/// A view of rounded activations. Tiles lie one after the other, as those of [`Packed`]; in a tile of T tokens pairs of
/// columns are `[cols/2][T]` (the even column low), scales and sums `[groups][T]`.
#[derive(Debug, Clone, Copy)]
pub struct Rounded {
    tiling: Tiling,
    cols: usize,
    pub group: usize,
    pairs: Shared<i32>,
    scales: Shared<f32>,
    sums: Shared<i32>,
}

impl Int16Activations {
    /// Room for the rows of `packed`; contents are whatever they were.
    pub fn shape(&mut self, packed: &Packed, group: usize) -> Result<Rounded> {
        let (tiling, cols) = (packed.tiling, packed.cols);
        debug_assert!(group.is_multiple_of(8) && cols.is_multiple_of(group));
        self.pairs.reserve(tiling.rows * cols / 2)?;
        self.scales.reserve(tiling.rows * cols / group)?;
        self.sums.reserve(tiling.rows * cols / group)?;
        let (pairs, scales, sums) = (self.pairs.ptr(), self.scales.ptr(), self.sums.ptr());
        Ok(Rounded { tiling, cols, group, pairs, scales, sums })
    }
}

impl Rounded {
    /// Start of a tile's (pairs, scales, sums).
    #[inline(always)]
    pub fn tile(&self, tile: usize) -> (*const i32, *const f32, *const i32) {
        let (start, _) = self.tiling.tile(tile);
        let groups = self.cols / self.group;
        // SAFETY: inside the buffers, which hold all rows.
        unsafe {
            (
                self.pairs.get().add(start * self.cols / 2),
                self.scales.get().add(start * groups),
                self.sums.get().add(start * groups),
            )
        }
    }
}

/// Rounds a packed tile, whose columns are written.
pub struct RoundTile<'a> {
    pub packed: &'a Packed,
    pub rounded: &'a Rounded,
    pub tile: usize,
}

impl Work for RoundTile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<A: Arch>(self) {
        match self.rounded.tiling.tile(self.tile).1 {
            1 => round_tile::<1, 8>(&self),
            2 => round_tile::<2, 8>(&self),
            3 => round_tile::<3, 12>(&self),
            4 => round_tile::<4, 8>(&self),
            5 => round_wide_tile::<5>(&self),
            6 => round_wide_tile::<6>(&self),
            7 => round_wide_tile::<7>(&self),
            8 => round_wide_tile::<8>(&self),
            9 => round_wide_tile::<9>(&self),
            10 => round_wide_tile::<10>(&self),
            11 => round_wide_tile::<11>(&self),
            _ => round_wide_tile::<12>(&self),
        }
    }
}

/// Adding and subtracting this rounds a float below 2^22 to the nearest even integer, whose bits lie in the sum's lowest.
const TO_INTEGER: f32 = 12_582_912.0;

/// T tokens, at most four, L lanes at a time: lane l is of token l % T.
#[inline(always)]
fn round_tile<const T: usize, const L: usize>(work: &RoundTile<'_>) {
    let RoundTile { packed, rounded, tile } = *work;
    let (start, tokens) = rounded.tiling.tile(tile);
    debug_assert_eq!(tokens, T);
    let groups = rounded.cols / rounded.group;
    // SAFETY: one thread rounds a tile; its columns were written before and are only read now.
    let (values, integers, scales, sums) = unsafe {
        (
            std::slice::from_raw_parts(packed.tile_values(tile), rounded.cols * T),
            Shared(rounded.pairs.get().cast::<u16>()).part(start * rounded.cols, rounded.cols * T),
            rounded.scales.part(start * groups, groups * T),
            rounded.sums.part(start * groups, groups * T),
        )
    };
    let group_values = values.chunks_exact(rounded.group * T);
    let group_integers = integers.chunks_exact_mut(rounded.group * T);
    let group_ends = scales.chunks_exact_mut(T).zip(sums.chunks_exact_mut(T));
    for ((values, integers), (scales, sums)) in group_values.zip(group_integers).zip(group_ends) {
        let inverse = scale_group::<T, L>(values, scales);
        let mut totals = [0i32; L];
        for (columns, out) in values.chunks_exact(8 * T).zip(integers.chunks_exact_mut(8 * T)) {
            let mut by_column = [0u16; 8 * 4];
            for (values, integers) in columns.chunks_exact(L).zip(by_column.chunks_exact_mut(L)) {
                for l in 0..L {
                    let integer = (values[l] * inverse[l] + TO_INTEGER).to_bits() as u16;
                    integers[l] = integer;
                    totals[l] += i32::from(integer as i16);
                }
            }
            // The two columns of a pair lie side by side.
            for k in 0..4 {
                for t in 0..T {
                    for odd in 0..2 {
                        out[(k * T + t) * 2 + odd] = by_column[(2 * k + odd) * T + t];
                    }
                }
            }
        }
        fold_lanes::<i32, T, L>(&mut totals, |a, b| a + b);
        sums.copy_from_slice(&totals[..T]);
    }
}

/// As [`round_tile`] for more tokens than that: they are the lanes.
#[inline(always)]
fn round_wide_tile<const T: usize>(work: &RoundTile<'_>) {
    let RoundTile { packed, rounded, tile } = *work;
    let (start, tokens) = rounded.tiling.tile(tile);
    debug_assert_eq!(tokens, T);
    let groups = rounded.cols / rounded.group;
    // SAFETY: as in `round_tile`.
    let (values, pairs, scales, sums) = unsafe {
        (
            std::slice::from_raw_parts(packed.tile_values(tile), rounded.cols * T),
            rounded.pairs.part(start * rounded.cols / 2, rounded.cols / 2 * T),
            rounded.scales.part(start * groups, groups * T),
            rounded.sums.part(start * groups, groups * T),
        )
    };
    let by_group = values.chunks_exact(rounded.group * T).zip(pairs.chunks_exact_mut(rounded.group / 2 * T));
    let group_ends = scales.chunks_exact_mut(T).zip(sums.chunks_exact_mut(T));
    for ((values, pairs), (scales, sums)) in by_group.zip(group_ends) {
        let inverse = scale_group::<T, T>(values, scales);
        let mut totals = [0i32; T];
        for (columns, out) in values.chunks_exact(2 * T).zip(pairs.chunks_exact_mut(T)) {
            for t in 0..T {
                let even = (columns[t] * inverse[t] + TO_INTEGER).to_bits();
                let odd = (columns[T + t] * inverse[t] + TO_INTEGER).to_bits();
                out[t] = (even & 0xffff | odd << 16) as i32;
                totals[t] += i32::from(even as i16) + i32::from(odd as i16);
            }
        }
        sums.copy_from_slice(&totals);
    }
}

/// Joins the lanes of each token in the first T, by halves: L is T times a power of two.
#[inline(always)]
fn fold_lanes<V: Copy, const T: usize, const L: usize>(lanes: &mut [V; L], join: impl Fn(V, V) -> V) {
    let mut width = L;
    while width > T {
        width /= 2;
        for l in 0..width {
            lanes[l] = join(lanes[l], lanes[l + width]);
        }
    }
}

/// Stores each token's scale of a group, and gives its inverse in every lane: lane l is of token l % T.
#[inline(always)]
fn scale_group<const T: usize, const L: usize>(values: &[f32], scales: &mut [f32]) -> [f32; L] {
    let mut largest = [0f32; L];
    // Zero times anything finite is zero, times anything else NaN: it must not be lost.
    let mut poison = [0f32; L];
    for values in values.chunks_exact(L) {
        for l in 0..L {
            let value = values[l].abs();
            largest[l] = if value > largest[l] { value } else { largest[l] };
            poison[l] += value * 0.0;
        }
    }
    fold_lanes::<f32, T, L>(&mut largest, |a, b| if b > a { b } else { a });
    fold_lanes::<f32, T, L>(&mut poison, |a, b| a + b);
    let mut inverse = [0f32; L];
    for t in 0..T {
        let scale = largest[t] * (1.0 / 32767.0);
        scales[t] = scale + poison[t];
        // Of zeros, or of numbers so small that their scale is no longer one, zeros.
        let of_token = if scale >= f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 };
        inverse.iter_mut().skip(t).step_by(T).for_each(|inverse| *inverse = of_token);
    }
    inverse
}

/// The function for `tokens` tokens, 1 to [`max_tokens`].
pub fn tile(isa: Isa, zero_points: bool, bf16_scales: bool, tokens: usize) -> TileFn {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 if has_vnni() => super::int16_avx512::tile(zero_points, bf16_scales, tokens),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx2 => super::int16_avx2::tile(zero_points, bf16_scales, tokens),
        _ => match (zero_points, bf16_scales) {
            (false, false) => pick::<false, false>(tokens),
            (false, true) => pick::<false, true>(tokens),
            (true, false) => pick::<true, false>(tokens),
            (true, true) => pick::<true, true>(tokens),
        },
    }
}

/// The functions for one token and several panels, where the instruction set has them.
pub fn rows(isa: Isa, zero_points: bool, bf16_scales: bool) -> Option<[RowsFn; ROW_PANELS]> {
    match isa {
        // One panel at a time is a stream at the memory's speed there.
        Isa::Avx512 if has_vnni() => None,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx2 => Some(super::int16_avx2::rows(zero_points, bf16_scales)),
        _ => None,
    }
}

fn pick<const Z: bool, const B: bool>(tokens: usize) -> TileFn {
    [plain_tile::<Z, B, 1>, plain_tile::<Z, B, 2>, plain_tile::<Z, B, 3>, plain_tile::<Z, B, 4>][tokens - 1]
}

const HALF: usize = 16;

unsafe fn plain_tile<const Z: bool, const B: bool, const T: usize>(tile: &Tile) {
    // SAFETY: the contract of `TileFn` covers every access below.
    unsafe {
        let mut total = [[[0f32; HALF]; 2]; T];
        for g in 0..tile.cols / tile.group {
            let mut part = [[[0i32; HALF]; 2]; T];
            for block in g * tile.group / 8..(g + 1) * tile.group / 8 {
                for (half, base) in [tile.w0, tile.w1].into_iter().enumerate() {
                    let words = base.add(block * tile.stride).cast::<[u32; HALF]>().read_unaligned();
                    for j in 0..4 {
                        let x = tile.x.cast::<i32>().add((4 * block + j) * T);
                        for (t, part) in part.iter_mut().enumerate() {
                            let (even, odd) = (*x.add(t) as i16, (*x.add(t) >> 16) as i16);
                            for lane in 0..HALF {
                                let nibbles = words[lane] >> (4 * j);
                                part[half][lane] += (nibbles & 15) as i32 * i32::from(even)
                                    + (nibbles >> 16 & 15) as i32 * i32::from(odd);
                            }
                        }
                    }
                }
            }
            for half in 0..2 {
                for lane in 0..HALF {
                    let bits = tile.scales.cast::<u16>().add((2 * g + half) * HALF + lane).read_unaligned();
                    let scale = if B { widen_bf16(bits) } else { widen_f16(bits) };
                    let pair = if Z { tile.zeros.add(g * HALF + lane).read() } else { 0x88 };
                    let zero = i32::from(if half == 0 { pair & 15 } else { pair >> 4 });
                    for t in 0..T {
                        let x_scale = *tile.x_scales.add(g * T + t);
                        let exact = part[t][half][lane] - zero * *tile.x_sums.add(g * T + t);
                        let total = &mut total[t][half][lane];
                        *total = fma::<Plain>(scale * x_scale, exact as f32, *total);
                    }
                }
            }
        }
        for (t, total) in total.iter().enumerate() {
            tile.out.add(t * tile.out_stride).cast::<[[f32; HALF]; 2]>().write_unaligned(*total);
        }
    }
}
