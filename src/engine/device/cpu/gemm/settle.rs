//! Unrolled loops that stay in their registers.
//!
//! A compiler begins a loop of several columns with the loads of all of them, finds too few of the 16 registers of AVX2 left for the
//! sums, and sends those through memory. The functions here are no instruction, but order what is around them: the compiler
//! must have the sums before them, and what is read by the pointer is read after them. (Instructions bind a tile where its core is
//! shared: docs/perf-log.md, "Tiles by the number of their instructions".)

use std::arch::asm;
use std::arch::x86_64::{__m256, __m256i};

macro_rules! settle {
    ($name:ident, $register:ty) => {
        /// Sums of a column before reads of the next one by `pointer`.
        #[allow(clippy::pointers_in_nomem_asm_block, reason = "the blocks are empty: nothing is read by it")]
        #[inline]
        #[target_feature(enable = "avx2")]
        pub fn $name<T>(sums: &mut [$register], pointer: &mut *const T) {
            // SAFETY: no instruction at all. Blocks that may have effects keep their order.
            unsafe {
                for sum in sums {
                    asm!("/* {0} */", inout(ymm_reg) * sum, options(nomem, nostack, preserves_flags));
                }
                asm!("/* {0} */", inout(reg) * pointer, options(nomem, nostack, preserves_flags));
            }
        }
    };
}

settle!(floats, __m256);
settle!(integers, __m256i);
