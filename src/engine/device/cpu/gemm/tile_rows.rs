//! A lone row by multiply-adds of vectors, with the sums of products of tiles (`tiles.rs`).
//!
//! For each block of 32 columns and each product of tiles that it stands for, a chain of multiply-adds of the even columns and one
//! of the odd ones, both from zero; then both are added up, and that to the sum. Products of two numbers of bf16 are exact in f32,
//! so this is what a tile gives, bit for bit. With f16 weights that is ten multiply-adds where a chain would be two, and still faster
//! than memory.

use std::arch::x86_64::*;

use super::avx512::load_f16;
use super::tiles::{
    BF16, BLOCK_BYTES, BLOCK_COLUMNS, F32_OF_BF16, F32_OF_F16, Lines, Panel, pieces, prefetch_both,
};
use super::{PREFETCH_BYTES, ROW_PANELS, Rows, RowsFn};
use crate::engine::device::cpu::matrix::Packing;

/// One token, 1 to 3 panels of bf16, in bf16 arithmetic.
pub fn bf16_of() -> [RowsFn; ROW_PANELS] {
    [row::<BF16, 1>, row::<BF16, 2>, row::<BF16, 3>]
}

/// The same in f32 arithmetic, of bf16 or f16.
pub fn f32_of(packing: Packing) -> [RowsFn; ROW_PANELS] {
    match packing {
        Packing::F16 => [row::<F32_OF_F16, 1>, row::<F32_OF_F16, 2>, row::<F32_OF_F16, 3>],
        _ => [row::<F32_OF_BF16, 1>, row::<F32_OF_BF16, 2>, row::<F32_OF_BF16, 3>],
    }
}

/// One token times N panels one after the other: what products of tiles give, by multiply-adds.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn row<const K: u8, const N: usize>(rows: &Rows) {
    let mut padded = Lines::<BLOCK_BYTES>::new();
    // SAFETY: the contract of `RowsFn` covers every access; prefetches never fault.
    unsafe {
        for (n, start) in rows.panels.iter().enumerate().take(N) {
            let panel = Panel::new::<K>(*start, rows.cols, &mut padded);
            let mut sums = [_mm512_setzero_ps(); 2];
            for block in 0..panel.blocks {
                let x = rows.x.add(block * pieces(K) * BLOCK_COLUMNS);
                let ahead = start.wrapping_add(block * BLOCK_BYTES + PREFETCH_BYTES);
                for (half, sum) in sums.iter_mut().enumerate() {
                    *sum = row_block::<K>(panel.block(block), half, x, *sum, ahead, rows.far);
                }
            }
            _mm512_storeu_ps(rows.out.add(32 * n), sums[0]);
            _mm512_storeu_ps(rows.out.add(32 * n + 16), sums[1]);
        }
    }
}

/// `sum` and the products of one block of 16 rows with one token's pieces, [pieces][32] at `x`. Each half prefetches half of the
/// lines after `ahead`, one at a time: many at once keep loads waiting.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn row_block<const K: u8>(
    w: *const u8,
    half: usize,
    x: *const f32,
    mut sum: __m512,
    ahead: *const u8,
    far: usize,
) -> __m512 {
    let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    let (and, sub) = (_mm512_and_si512, _mm512_sub_ps);
    // Chains of even and odd columns, of c h, b h, a h, a l and b l.
    let mut chains = [[_mm512_setzero_ps(); 2]; 5];
    for pair in 0..BLOCK_COLUMNS / 2 {
        prefetch_both(ahead, far, half * BLOCK_COLUMNS / 2 + pair);
        // SAFETY: a pair of columns is 128 bytes, a token's piece of a block 32 numbers.
        unsafe {
            let (h, l) = if K == F32_OF_F16 {
                let at = w.add(128 * pair + 32 * half);
                let w = [load_f16(at), load_f16(at.add(64))];
                let h = w.map(|w| _mm512_castsi512_ps(and(_mm512_castps_si512(w), upper)));
                (h, [sub(w[0], h[0]), sub(w[1], h[1])])
            } else {
                let words = _mm512_loadu_si512(w.add(128 * pair + 64 * half).cast());
                let h = [_mm512_slli_epi32::<16>(words), and(words, upper)].map(|w| _mm512_castsi512_ps(w));
                (h, h)
            };
            for odd in 0..2 {
                let piece = |piece: usize| _mm512_set1_ps(*x.add(piece * BLOCK_COLUMNS + 2 * pair + odd));
                let mut add = |chain: usize, w: __m512, x: __m512| {
                    chains[chain][odd] = _mm512_fmadd_ps(w, x, chains[chain][odd]);
                };
                let a = piece(0);
                add(2, h[odd], a);
                if K != BF16 {
                    let b = piece(1);
                    add(0, h[odd], piece(2));
                    add(1, h[odd], b);
                    if K == F32_OF_F16 {
                        add(3, l[odd], a);
                        add(4, l[odd], b);
                    }
                }
            }
        }
    }
    let used = match K {
        BF16 => 2..3,
        F32_OF_BF16 => 0..3,
        _ => 0..5,
    };
    for chain in used {
        sum = _mm512_add_ps(sum, _mm512_add_ps(chains[chain][0], chains[chain][1]));
    }
    sum
}
