//! Tiles in plain Rust: the fallback on CPUs without AVX2, NEON on aarch64 (whose compiler vectorises these loops), and
//! what the other sets are tested against.

use super::super::isa::{Plain, fma};
use super::{Element, Tile, TileFn};

const HALF: usize = 16;

pub fn dense(element: Element, tokens: usize) -> TileFn {
    match element {
        Element::F32 => pick::<0>(tokens),
        Element::F16 => pick::<1>(tokens),
        Element::Bf16 => pick::<2>(tokens),
        Element::Bf16Pairs => pick::<3>(tokens),
    }
}

fn pick<const E: u8>(tokens: usize) -> TileFn {
    [dense_tile::<E, 1>, dense_tile::<E, 2>, dense_tile::<E, 3>, dense_tile::<E, 4>][tokens - 1]
}

pub fn int4(zero_points: bool, bf16_scales: bool, tokens: usize) -> TileFn {
    match (zero_points, bf16_scales) {
        (false, false) => pick_int4::<false, false>(tokens),
        (false, true) => pick_int4::<false, true>(tokens),
        (true, false) => pick_int4::<true, false>(tokens),
        (true, true) => pick_int4::<true, true>(tokens),
    }
}

fn pick_int4<const Z: bool, const B: bool>(tokens: usize) -> TileFn {
    [int4_tile::<Z, B, 1>, int4_tile::<Z, B, 2>, int4_tile::<Z, B, 3>, int4_tile::<Z, B, 4>][tokens - 1]
}

/// f16 to f32 by integer operations that vectorise: right for all finite values (weights are checked when packed).
#[inline(always)]
pub fn widen_f16(bits: u16) -> f32 {
    let magnitude = f32::from_bits((u32::from(bits) & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    f32::from_bits(magnitude.to_bits() | (u32::from(bits) & 0x8000) << 16)
}

#[inline(always)]
pub fn widen_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

type Sums<const T: usize> = [[[f32; HALF]; 2]; T];

#[inline(always)]
unsafe fn load_sums<const T: usize>(tile: &Tile) -> Sums<T> {
    let mut sums = [[[0f32; HALF]; 2]; T];
    if tile.accumulate {
        for (t, sum) in sums.iter_mut().enumerate() {
            // SAFETY: `out` holds T rows of 32, by the contract of `TileFn`.
            *sum = unsafe { tile.out.add(t * tile.out_stride).cast::<[[f32; HALF]; 2]>().read_unaligned() };
        }
    }
    sums
}

#[inline(always)]
unsafe fn store_sums<const T: usize>(tile: &Tile, sums: &Sums<T>) {
    for (t, sum) in sums.iter().enumerate() {
        // SAFETY: as in `load_sums`.
        unsafe { tile.out.add(t * tile.out_stride).cast::<[[f32; HALF]; 2]>().write_unaligned(*sum) };
    }
}

#[inline(always)]
fn add_column<const T: usize>(sums: &mut Sums<T>, weights: &[[f32; HALF]; 2], x: &[f32]) {
    for (sum, &x) in sums.iter_mut().zip(x) {
        for half in 0..2 {
            for lane in 0..HALF {
                sum[half][lane] = fma::<Plain>(weights[half][lane], x, sum[half][lane]);
            }
        }
    }
}

unsafe fn dense_tile<const E: u8, const T: usize>(tile: &Tile) {
    // SAFETY: the contract of `TileFn` covers every access below.
    unsafe {
        let mut sums = load_sums::<T>(tile);
        let step = if E == 3 { 2 } else { 1 };
        let mut weights = [[[0f32; HALF]; 2]; 2];
        for k in 0..tile.cols.div_ceil(step) {
            for (half, base) in [tile.w0, tile.w1].into_iter().enumerate() {
                let at = base.add(k * tile.stride);
                for lane in 0..HALF {
                    match E {
                        0 => weights[0][half][lane] = at.cast::<f32>().add(lane).read_unaligned(),
                        1 => weights[0][half][lane] = widen_f16(at.cast::<u16>().add(lane).read_unaligned()),
                        2 => weights[0][half][lane] = widen_bf16(at.cast::<u16>().add(lane).read_unaligned()),
                        _ => {
                            for parity in 0..2 {
                                let bits = at.cast::<u16>().add(2 * lane + parity).read_unaligned();
                                weights[parity][half][lane] = widen_bf16(bits);
                            }
                        }
                    }
                }
            }
            for (parity, weights) in weights.iter().enumerate().take(step) {
                let x = std::slice::from_raw_parts(tile.x.add((step * k + parity) * T), T);
                add_column(&mut sums, weights, x);
            }
        }
        store_sums(tile, &sums);
    }
}

/// Per group: part = sum of (q - 8) x in column order, then (8 - zero) * total of x added to it, then total = scale * part + total.
unsafe fn int4_tile<const Z: bool, const B: bool, const T: usize>(tile: &Tile) {
    // SAFETY: the contract of `TileFn` covers every access below.
    unsafe {
        let mut total = load_sums::<T>(tile);
        for g in 0..tile.cols / tile.group {
            let mut offsets = [[0f32; HALF]; 2];
            let mut scales = [[0f32; HALF]; 2];
            for lane in 0..HALF {
                for half in 0..2 {
                    let bits = tile.scales.cast::<u16>().add((2 * g + half) * HALF + lane).read_unaligned();
                    scales[half][lane] = if B { widen_bf16(bits) } else { widen_f16(bits) };
                }
                if Z {
                    let pair = tile.zeros.add(g * HALF + lane).read();
                    offsets[0][lane] = 8.0 - f32::from(pair & 15);
                    offsets[1][lane] = 8.0 - f32::from(pair >> 4);
                }
            }
            let mut part = [[[0f32; HALF]; 2]; T];
            for block in g * tile.group / 8..(g + 1) * tile.group / 8 {
                for i in 0..8 {
                    let shift = 4 * (i / 2 + 4 * (i % 2));
                    let mut weights = [[0f32; HALF]; 2];
                    for (half, base) in [tile.w0, tile.w1].into_iter().enumerate() {
                        for lane in 0..HALF {
                            let word = base.add(block * tile.stride).cast::<u32>().add(lane).read_unaligned();
                            weights[half][lane] = ((word >> shift) & 15) as f32 - 8.0;
                        }
                    }
                    let x = std::slice::from_raw_parts(tile.x.add((8 * block + i) * T), T);
                    add_column(&mut part, &weights, x);
                }
            }
            if Z {
                add_column(&mut part, &offsets, std::slice::from_raw_parts(tile.x_totals.add(g * T), T));
            }
            for (total, part) in total.iter_mut().zip(&part) {
                for half in 0..2 {
                    for lane in 0..HALF {
                        total[half][lane] =
                            fma::<Plain>(scales[half][lane], part[half][lane], total[half][lane]);
                    }
                }
            }
        }
        store_sums(tile, &total);
    }
}

pub fn rounds(rounds: usize) -> f32 {
    let mut sums = [[1f32; HALF]; 8];
    let factor = std::hint::black_box(0.999);
    let term = std::hint::black_box(0.001);
    for _ in 0..rounds {
        for sum in &mut sums {
            for lane in sum {
                *lane = fma::<Plain>(*lane, factor, term);
            }
        }
    }
    sums.iter().flatten().sum()
}
