//! A lone row by multiply-adds of vectors, with the sums of products of tiles (`tiles.rs`).
//!
//! In bf16 arithmetic: for each block of 32 columns a chain of multiply-adds of the even columns and one
//! of the odd ones, both from zero; then both are added up, and that to the sum. Products of two numbers of bf16 are exact in f32,
//! so this is what a tile gives, bit for bit (but for numbers below the normal range, which tiles take for zero).

use std::arch::x86_64::*;
use std::sync::atomic::{Ordering, compiler_fence};

use super::amx::Lines;
use super::tiles::{BF16, BLOCK_BYTES, BLOCK_COLUMNS, Panel, prefetch_both};
use super::{PREFETCH_BYTES, ROW_PANELS, Rows, RowsFn};

/// One token, 1 to 3 panels of bf16.
pub fn of() -> [RowsFn; ROW_PANELS] {
    [row::<1>, row::<2>, row::<3>]
}

/// One token times N panels one after the other: what products of tiles give, by multiply-adds.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn row<const N: usize>(rows: &Rows) {
    let mut padded = Lines::<BLOCK_BYTES>::new();
    // SAFETY: the contract of `RowsFn` covers every access; prefetches never fault.
    unsafe {
        for (n, start) in rows.panels.iter().enumerate().take(N) {
            let panel = Panel::new::<BF16>(*start, rows.cols, &mut padded);
            let mut sums = [_mm512_setzero_ps(); 2];
            for block in 0..panel.blocks {
                let x = rows.x.add(block * BLOCK_COLUMNS);
                let ahead = start.wrapping_add(block * BLOCK_BYTES + PREFETCH_BYTES);
                for (half, sum) in sums.iter_mut().enumerate() {
                    *sum = row_block(panel.block(block), half, x, *sum, ahead, rows.far);
                }
            }
            _mm512_storeu_ps(rows.out.add(32 * n), sums[0]);
            _mm512_storeu_ps(rows.out.add(32 * n + 16), sums[1]);
        }
    }
}

/// `sum` and the products of one block of 16 rows with one token's 32 numbers at `x`. Each half prefetches half of the lines after
/// `ahead`, one at a time: many at once keep loads waiting.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn row_block(
    w: *const u8,
    half: usize,
    x: *const f32,
    sum: __m512,
    ahead: *const u8,
    far: usize,
) -> __m512 {
    let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    // Of even and odd columns.
    let mut chains = [_mm512_setzero_ps(); 2];
    for pair in 0..BLOCK_COLUMNS / 2 {
        prefetch_both(ahead, far, half * BLOCK_COLUMNS / 2 + pair);
        // Or the compiler gathers the prefetches of all pairs.
        compiler_fence(Ordering::SeqCst);
        // SAFETY: a pair of columns is 128 bytes.
        unsafe {
            let words = _mm512_loadu_si512(w.add(128 * pair + 64 * half).cast());
            let w = [_mm512_slli_epi32::<16>(words), _mm512_and_si512(words, upper)];
            for odd in 0..2 {
                let x = _mm512_set1_ps(*x.add(2 * pair + odd));
                chains[odd] = _mm512_fmadd_ps(_mm512_castsi512_ps(w[odd]), x, chains[odd]);
            }
        }
    }
    _mm512_add_ps(sum, _mm512_add_ps(chains[0], chains[1]))
}
