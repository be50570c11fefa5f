//! Softmax weights times values: out[T, width] += weights[T, tokens] V[tokens, width], where V lies in blocks anywhere.
//!
//! A tile of [`super::dense`] takes one block at a time, so that for 16 tokens it loads and stores as many sums as it multiplies
//! rows; here sums stay in registers from block to block. Weights are read as the softmax leaves them, row by row.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

#[cfg(target_arch = "x86_64")]
use super::avx2::load;
use super::{Element, Isa};
#[cfg(target_arch = "x86_64")]
use crate::engine::device::cpu::pool::{LINE, prefetch_line_to_l2};

/// Operands of a [`ValuesFn`] for T rows of weights.
#[derive(Debug, Clone, Copy)]
pub struct Values<'a> {
    /// Start of each block: rows of one token after the other.
    pub blocks: &'a [*const u8],
    pub block_tokens: usize,
    /// Tokens of all blocks; the last one may end early.
    pub tokens: usize,
    /// Elements of a token's row, a multiple of 32.
    pub width: usize,
    /// [T][weight_stride]
    pub weights: *const f32,
    pub weight_stride: usize,
    /// [T][width]: what is added to.
    pub out: *mut f32,
    /// What is asked for meanwhile at an even pace: starts of so many bytes each. Null ones, and what there is no time for, are
    /// left out.
    pub next: (&'a [*const u8], usize),
}

#[cfg(target_arch = "x86_64")]
impl Values<'_> {
    /// What lies so many bytes into what is asked for, or this item's own bytes.
    #[inline(always)]
    fn ahead(&self, at: usize) -> *const u8 {
        let (starts, bytes) = self.next;
        match starts.get(at / bytes) {
            Some(start) if !start.is_null() => start.wrapping_add(at % bytes),
            _ => self.blocks[0],
        }
    }
}

/// # Safety
/// All pointers cover what [`Values`] says for the T that the function was chosen for, and the CPU has the instructions.
pub type ValuesFn = unsafe fn(&Values<'_>);

/// The function for 1 to 6 rows, where the instruction set has one. Adds in the order of tokens, as tiles of [`super::dense`].
pub fn values(isa: Isa, element: Element, rows: usize) -> Option<ValuesFn> {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx2 {
        return match element {
            Element::F32 => Some(pick::<0>(rows)),
            Element::F16 => Some(pick::<1>(rows)),
            Element::Bf16 => Some(pick::<2>(rows)),
            Element::Bf16Pairs => None,
        };
    }
    let _ = (isa, element, rows);
    None
}

#[cfg(target_arch = "x86_64")]
fn pick<const E: u8>(rows: usize) -> ValuesFn {
    [
        blocks::<E, 1, 4>,
        blocks::<E, 2, 4>,
        blocks::<E, 3, 4>,
        blocks::<E, 4, 2>,
        blocks::<E, 5, 2>,
        blocks::<E, 6, 2>,
    ][rows - 1]
}

/// V registers of 8 values at a time, for all tokens.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn blocks<const E: u8, const T: usize, const V: usize>(values: &Values<'_>) {
    let size = if E == 0 { 4 } else { 2 };
    let passes = values.width / (8 * V);
    for (pass, column) in (0..values.width).step_by(8 * V).enumerate() {
        // SAFETY: the contract of `ValuesFn` covers every access below.
        unsafe {
            let out = values.out.add(column);
            let mut sums = [[_mm256_setzero_ps(); V]; T];
            for (t, sum) in sums.iter_mut().enumerate() {
                for (v, sum) in sum.iter_mut().enumerate() {
                    *sum = _mm256_loadu_ps(out.add(t * values.width + 8 * v));
                }
            }
            for (block, start) in values.blocks.iter().enumerate() {
                let first = block * values.block_tokens;
                let weights = values.weights.add(first);
                let ahead = values.ahead((block * passes + pass) * values.block_tokens * LINE);
                for token in 0..values.block_tokens.min(values.tokens - first) {
                    let row = start.add((token * values.width + column) * size);
                    prefetch_line_to_l2(ahead.wrapping_add(token * LINE));
                    let mut loaded = [_mm256_setzero_ps(); V];
                    for (v, loaded) in loaded.iter_mut().enumerate() {
                        *loaded = load::<E>(row.add(8 * v * size));
                    }
                    for (t, sum) in sums.iter_mut().enumerate() {
                        let weight = _mm256_set1_ps(*weights.add(t * values.weight_stride + token));
                        for (sum, loaded) in sum.iter_mut().zip(loaded) {
                            *sum = _mm256_fmadd_ps(loaded, weight, *sum);
                        }
                    }
                }
            }
            for (t, sum) in sums.iter().enumerate() {
                for (v, sum) in sum.iter().enumerate() {
                    _mm256_storeu_ps(out.add(t * values.width + 8 * v), *sum);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    #[test]
    fn values_of_blocks_add_up_in_the_order_of_tokens() {
        let noise = |seed: usize, len: usize| -> Vec<f32> {
            (0..len).map(|i| ((i * 31 + seed * 977) as f32 * 0.737).sin()).collect()
        };
        for (element, size) in [(Element::F32, 4), (Element::F16, 2), (Element::Bf16, 2)] {
            let shapes: [(usize, usize, usize); 4] = [(16, 1, 32), (16, 35, 64), (8, 64, 96), (48, 40, 32)];
            for (block_tokens, tokens, width) in shapes {
                let order = [3usize, 0, 7, 5, 1, 6, 2, 4];
                let values = noise(1, order.len() * block_tokens * width);
                let bytes: Vec<u8> = values
                    .iter()
                    .flat_map(|value| match element {
                        Element::F32 => value.to_le_bytes().to_vec(),
                        Element::F16 => f16::from_f32(*value).to_le_bytes().to_vec(),
                        _ => bf16::from_f32(*value).to_le_bytes().to_vec(),
                    })
                    .collect();
                let widened = |at: usize| match element {
                    Element::F32 => values[at],
                    Element::F16 => f16::from_f32(values[at]).to_f32(),
                    _ => bf16::from_f32(values[at]).to_f32(),
                };
                let starts: Vec<_> = (order.iter().take(tokens.div_ceil(block_tokens)))
                    .map(|block| bytes[block * block_tokens * width * size..].as_ptr())
                    .collect();
                for rows in 1..=6 {
                    let avx2 = Isa::available().into_iter().find(|isa| *isa == Isa::Avx2);
                    let Some(function) = avx2.and_then(|isa| super::values(isa, element, rows)) else {
                        eprintln!("SKIPPED: values of blocks, which need AVX2");
                        return;
                    };
                    let weight_stride = tokens + 5;
                    let weights = noise(2, rows * weight_stride);
                    let mut out = noise(3, rows * width);
                    let mut right = out.clone();
                    for (t, right) in right.chunks_exact_mut(width).enumerate() {
                        for (column, right) in right.iter_mut().enumerate() {
                            for token in 0..tokens {
                                let row = order[token / block_tokens] * block_tokens + token % block_tokens;
                                let weight = weights[t * weight_stride + token];
                                *right = widened(row * width + column).mul_add(weight, *right);
                            }
                        }
                    }
                    let operands = Values {
                        blocks: &starts,
                        block_tokens,
                        tokens,
                        width,
                        weights: weights.as_ptr(),
                        weight_stride,
                        out: out.as_mut_ptr(),
                        next: (&starts, block_tokens * width * size),
                    };
                    // SAFETY: the vectors hold what the operands say.
                    unsafe { function(&operands) };
                    assert_eq!(out, right, "{element:?}, {rows} rows, {tokens} tokens");
                }
            }
        }
    }
}
