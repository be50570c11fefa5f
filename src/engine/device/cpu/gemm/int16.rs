//! 4-bit weights times 16-bit activations (`cpu_math = int16`): exact integers within a group, f32 from group to group.
//!
//! A row's activations of one group of columns become x = scale * i with scale = max |x| / 32639, so that each is off by
//! at most 1/65278 of the group's largest, and cuts into two signed bytes. A product is then, group after group in ascending order,
//!   total = (weight scale * scale) * (sum of q i - zero * sum of i) + total,
//! both sums exact in 32 bits. Integer sums have no order, so every instruction set and tile gives the same bits.
//! That holds for tiles of AMX as well (`int16_tiles.rs`), which multiply many rows, and for a lone row in bytes (`pieces.rs`).
//! One instruction multiplies and adds two 16-bit columns in each lane, twice what a multiply-add of floats does, and a
//! nibble is an operand as it is, without becoming a float.

use super::super::isa::{Isa, Plain, fma, has_vnni};
use super::portable::{widen_bf16, widen_f16};
use super::{MAX_TILE, Tile, TileFn};

/// Most tokens of a tile: sums, operands and masks of more do not fit the registers.
pub fn max_tokens(isa: Isa) -> usize {
    if isa == Isa::Avx512 && has_vnni() { MAX_TILE } else { 4 }
}

/// The largest integer that is 256 a + b with a and b signed bytes of a magnitude of at most 127.
pub const MOST: f32 = 32639.0;

/// Largest group whose sums of 15 * 256 * 128 stay within 31 bits.
const MAX_GROUP: usize = 4096;

/// Whether these functions multiply matrices of such groups.
pub fn fits(group: usize) -> bool {
    group <= MAX_GROUP
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
