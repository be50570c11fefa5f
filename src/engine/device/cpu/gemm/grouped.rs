//! Activations group by group, as products with 4-bit weights need them beside the packed ones: in int16 arithmetic rounded to
//! integers (see `int16.rs`); in f32 the total of each group, by which a tile takes zero points off once a group instead of
//! from every weight; of a lone row in both, bytes (see `pieces.rs`).

use super::super::isa::{Arch, Work};
use super::super::memory::{Scratch, Shared};
#[cfg(target_arch = "x86_64")]
use super::int16_tiles::Planes;
use super::pieces::{self, Cut};
use super::{Arithmetic, Packed, Tiling, int16};
use crate::Result;
use crate::engine::device::cpu::isa::Isa;
use crate::engine::device::cpu::matrix::Packing;

/// Columns of a block of planes, and what loads of 16 of its lines may read beyond the last, as pairs.
const PLANE_COLUMNS: usize = 64;
const PLANE_SLACK: usize = 15 * 16;

/// Buffers of grouped activations.
#[derive(Debug, Default)]
pub struct GroupedActivations {
    pairs: Scratch<i32>,
    scales: Scratch<f32>,
    sums: Scratch<i32>,
    totals: Scratch<f32>,
}

/// What a product reads of grouped activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Totals alone.
    Totals,
    /// Integers in pairs of columns, scales and sums.
    Pairs,
    /// Integers in planes of bytes, for products of tiles (see `int16_tiles.rs`), and scales.
    Planes,
    /// A lone row in bytes, scales and sums (see `pieces.rs`).
    Pieces(Cut),
}

/// A view of grouped activations. Tiles lie one after the other, as those of [`Packed`]; in a tile of T tokens pairs of
/// columns are `[cols/2][T]` (the even column low); scales, sums and totals are `[groups][T]`.
#[derive(Debug, Clone, Copy)]
pub struct Grouped {
    tiling: Tiling,
    cols: usize,
    pub group: usize,
    pub form: Form,
    pairs: Shared<i32>,
    scales: Shared<f32>,
    sums: Shared<i32>,
    totals: Shared<f32>,
    /// Columns, of planes in whole blocks.
    padded: usize,
}

/// The group by which products with a matrix need their activations grouped, and what they read.
pub fn form_of(isa: Isa, packing: Packing, packed: &Packed) -> Option<(usize, Form)> {
    let Packing::Int4 { group, zero_points, .. } = packing else { return None };
    let lone = packed.tiling.rows == 1;
    let form = match packed.math() {
        Arithmetic::Int16 if lone && pieces::in_int16(isa, group) => Form::Pieces(Cut::Int16),
        Arithmetic::Int16 if int16::fits(group) => Form::Pairs,
        Arithmetic::Int16Tiles { .. } => Form::Planes,
        Arithmetic::F32 if lone && pieces::in_f32(isa, group) => Form::Pieces(Cut::F32),
        Arithmetic::Bf16Pairs => return None,
        _ if zero_points => Form::Totals,
        _ => return None,
    };
    Some((group, form))
}

impl GroupedActivations {
    /// Room for the rows of `packed`, by what [`form_of`] gave; contents are whatever they were.
    pub fn shape(&mut self, packed: &Packed, (group, form): (usize, Form)) -> Result<Grouped> {
        let (tiling, cols) = (packed.tiling, packed.cols);
        debug_assert!(group.is_multiple_of(8) && cols.is_multiple_of(group));
        let groups = tiling.rows * cols / group;
        let mut padded = cols;
        let (mut integers, mut scales, mut sums) = (tiling.rows * cols / 2, groups, groups);
        match form {
            Form::Totals => {
                (integers, scales, sums) = (0, 0, 0);
                self.totals.reserve(groups)?;
            }
            Form::Pairs => {}
            Form::Planes => {
                padded = cols.next_multiple_of(PLANE_COLUMNS);
                integers = tiling.rows * padded / 2 + PLANE_SLACK;
            }
            Form::Pieces(cut) => {
                integers = cols / 8 * cut.block_words();
                let (of_scales, of_sums) = cut.ends();
                (scales, sums) = (groups * of_scales, groups * of_sums);
            }
        }
        self.pairs.reserve(integers)?;
        self.scales.reserve(scales)?;
        self.sums.reserve(sums)?;
        let (pairs, scales) = (self.pairs.ptr(), self.scales.ptr());
        let (sums, totals) = (self.sums.ptr(), self.totals.ptr());
        Ok(Grouped { tiling, cols, group, form, pairs, scales, sums, totals, padded })
    }
}

impl Grouped {
    /// Start of a tile's (pairs, planes or pieces, scales, sums), where they are integers. (Of planes there are no sums.)
    #[inline(always)]
    pub fn tile(&self, tile: usize) -> (*const i32, *const f32, *const i32) {
        debug_assert!(self.form != Form::Totals);
        let (start, _) = self.tiling.tile(tile);
        let groups = self.cols / self.group;
        // SAFETY: inside the buffers, which hold all rows.
        unsafe {
            (
                self.pairs.get().add(start * self.padded / 2),
                self.scales.get().add(start * groups),
                self.sums.get().add(start * groups),
            )
        }
    }

    /// Start of a tile's totals, where they are not.
    #[inline(always)]
    pub fn totals(&self, tile: usize) -> *const f32 {
        debug_assert!(self.form == Form::Totals);
        let (start, _) = self.tiling.tile(tile);
        // SAFETY: as above.
        unsafe { self.totals.get().add(start * (self.cols / self.group)) }
    }
}

/// Groups a packed unit, whose columns are written.
pub struct GroupUnit<'a> {
    pub packed: &'a Packed,
    pub grouped: &'a Grouped,
    pub unit: usize,
}

impl Work for GroupUnit<'_> {
    type Output = ();

    #[inline(always)]
    fn run<A: Arch>(self) {
        #[cfg(target_arch = "x86_64")]
        match self.grouped.form {
            Form::Planes => return round_row(&self),
            Form::Pieces(cut) => return cut_row(&self, cut),
            Form::Totals | Form::Pairs => {}
        }
        let tokens = self.grouped.tiling.tile(self.unit).1;
        if self.grouped.form == Form::Totals {
            return match tokens {
                1 => add_up_tile::<1, 8>(&self),
                2 => add_up_tile::<2, 16>(&self),
                3 => add_up_tile::<3, 24>(&self),
                4 => add_up_tile::<4, 32>(&self),
                5 => add_up_tile::<5, 40>(&self),
                6 => add_up_tile::<6, 48>(&self),
                7 => add_up_tile::<7, 56>(&self),
                8 => add_up_tile::<8, 64>(&self),
                9 => add_up_tile::<9, 72>(&self),
                10 => add_up_tile::<10, 80>(&self),
                11 => add_up_tile::<11, 88>(&self),
                _ => add_up_tile::<12, 96>(&self),
            };
        }
        match tokens {
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
pub const TO_INTEGER: f32 = 12_582_912.0;

/// Totals of T tokens: of eight columns side by side, L = 8 T lanes, then of halves of those, so that a token's do not depend on
/// how many there are.
#[inline(always)]
fn add_up_tile<const T: usize, const L: usize>(work: &GroupUnit<'_>) {
    let GroupUnit { packed, grouped, unit: tile } = *work;
    let (start, tokens) = grouped.tiling.tile(tile);
    debug_assert_eq!(tokens, T);
    let groups = grouped.cols / grouped.group;
    // SAFETY: one thread works on a tile; its columns were written before and are only read now.
    let (values, totals) = unsafe {
        (
            std::slice::from_raw_parts(packed.tile_values(tile), grouped.cols * T),
            grouped.totals.part(start * groups, groups * T),
        )
    };
    for (values, totals) in values.chunks_exact(grouped.group * T).zip(totals.chunks_exact_mut(T)) {
        let mut lanes = [0f32; L];
        for values in values.chunks_exact(L) {
            for l in 0..L {
                lanes[l] += values[l];
            }
        }
        fold_lanes::<f32, T, L>(&mut lanes, |a, b| a + b);
        totals.copy_from_slice(&lanes[..T]);
    }
}

/// T tokens, at most four, L lanes at a time: lane l is of token l % T.
#[inline(always)]
fn round_tile<const T: usize, const L: usize>(work: &GroupUnit<'_>) {
    let GroupUnit { packed, grouped, unit: tile } = *work;
    let (start, tokens) = grouped.tiling.tile(tile);
    debug_assert_eq!(tokens, T);
    let groups = grouped.cols / grouped.group;
    // SAFETY: one thread rounds a tile; its columns were written before and are only read now.
    let (values, integers, scales, sums) = unsafe {
        (
            std::slice::from_raw_parts(packed.tile_values(tile), grouped.cols * T),
            Shared(grouped.pairs.get().cast::<u16>()).part(start * grouped.cols, grouped.cols * T),
            grouped.scales.part(start * groups, groups * T),
            grouped.sums.part(start * groups, groups * T),
        )
    };
    let group_values = values.chunks_exact(grouped.group * T);
    let group_integers = integers.chunks_exact_mut(grouped.group * T);
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
fn round_wide_tile<const T: usize>(work: &GroupUnit<'_>) {
    let GroupUnit { packed, grouped, unit: tile } = *work;
    let (start, tokens) = grouped.tiling.tile(tile);
    debug_assert_eq!(tokens, T);
    let groups = grouped.cols / grouped.group;
    // SAFETY: as in `round_tile`.
    let (values, pairs, scales, sums) = unsafe {
        (
            std::slice::from_raw_parts(packed.tile_values(tile), grouped.cols * T),
            grouped.pairs.part(start * grouped.cols / 2, grouped.cols / 2 * T),
            grouped.scales.part(start * groups, groups * T),
            grouped.sums.part(start * groups, groups * T),
        )
    };
    let by_group = values.chunks_exact(grouped.group * T).zip(pairs.chunks_exact_mut(grouped.group / 2 * T));
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
        let (scale, of_token) = scale(largest[t]);
        scales[t] = scale + poison[t];
        inverse.iter_mut().skip(t).step_by(T).for_each(|inverse| *inverse = of_token);
    }
    inverse
}

/// A group's scale and its inverse, by its largest magnitude.
#[inline(always)]
pub fn scale(largest: f32) -> (f32, f32) {
    let scale = largest * (1.0 / int16::MOST);
    // Of zeros, or of numbers so small that their scale is no longer one, zeros.
    (scale, if scale >= f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 })
}

/// One row, in planes.
#[cfg(target_arch = "x86_64")]
fn round_row(work: &GroupUnit<'_>) {
    let GroupUnit { packed, grouped, unit: row } = *work;
    let (tile, t) = grouped.tiling.place(row);
    let (start, tokens) = grouped.tiling.tile(tile);
    let groups = grouped.cols / grouped.group;
    // SAFETY: one thread rounds a row; its columns were written before and are only read now. Planes are asked for only where the
    // CPU has products of tiles, and AVX-512.
    unsafe {
        let planes = Planes { start: grouped.pairs.get().add(start * grouped.padded / 2).cast(), tokens };
        let scales = grouped.scales.get().add(start * groups);
        super::int16_tiles::round_row(packed.row(row), grouped.group, t, planes, scales);
    }
}

/// A lone row, in pieces.
#[cfg(target_arch = "x86_64")]
fn cut_row(work: &GroupUnit<'_>, cut: Cut) {
    let GroupUnit { packed, grouped, .. } = *work;
    debug_assert_eq!(grouped.tiling.rows, 1);
    let cut_row = match cut {
        Cut::Int16 => pieces::cut_int16,
        Cut::F32 => pieces::cut_f32,
    };
    // SAFETY: one thread cuts the row; its columns were written before and are only read now. Pieces are asked for only where the
    // CPU has AVX2 and FMA, and `GroupedActivations::shape` made room for them.
    unsafe {
        let values = std::slice::from_raw_parts(packed.tile_values(0), grouped.cols);
        cut_row(values, grouped.group, grouped.pairs.get(), grouped.scales.get(), grouped.sums.get());
    }
}
