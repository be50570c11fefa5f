//! The tile registers of AMX: eight of 16 rows of 64 bytes, and the instructions on them.
//!
//! All eight are configured alike, once for each thread and for good ([`configure`]): the system keeps a thread's tiles and
//! their configuration as it keeps its other registers. Other code may use tiles on threads of its own; on a thread that steps
//! the engine it must leave this configuration as it is. Fewer rows than 16 are
//! computed as 16, of which the surplus is not looked at: a product of tiles takes 16 cycles whatever its rows, and a row of the result
//! depends on that row of A alone.
//!
//! The compiler knows tile registers only as what an instruction may overwrite. It never uses them itself, so what one of
//! these functions leaves in a tile is there for the next.

use std::arch::asm;
use std::cell::Cell;
use std::mem::MaybeUninit;

/// Rows of a tile.
pub const TILE_ROWS: usize = 16;
/// Bytes of a tile's row.
pub const TILE_ROW_BYTES: usize = 64;

/// Room for operands that tiles are loaded from, uninitialised.
#[repr(C, align(64))]
pub struct Lines<const BYTES: usize>(MaybeUninit<[u8; BYTES]>);

impl<const BYTES: usize> Lines<BYTES> {
    pub fn new() -> Self {
        Self(MaybeUninit::uninit())
    }

    pub fn at(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}

/// The operand of LDTILECFG.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Eight whole tiles; palette 1 has no more.
static WHOLE_TILES: Configuration = Configuration {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

thread_local! {
    static CONFIGURED: Cell<bool> = const { Cell::new(false) };
}

/// Makes the tiles of this thread ready, if they are not. To be called before any other function here, in each function that
/// multiplies tiles: it is a look at a flag but for the first time.
///
/// # Safety
/// [`super::super::isa::tile_products`] has said that there are tile products.
#[inline]
pub unsafe fn configure() {
    if !CONFIGURED.get() {
        // SAFETY: the operand is 64 bytes of a valid configuration, and the system has granted the registers.
        unsafe {
            asm!("ldtilecfg [{at}]", at = in(reg) &raw const WHOLE_TILES,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags, readonly));
        }
        CONFIGURED.set(true);
    }
}

/// Tile T = 0.
///
/// # Safety
/// This thread is configured.
#[inline(always)]
pub unsafe fn zero<const T: usize>() {
    // SAFETY: promised by the caller.
    unsafe {
        asm!("tilezero tmm{t}", t = const T,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nomem, nostack, preserves_flags));
    }
}

/// Tile T = 16 rows of 64 bytes, `stride` bytes apart.
///
/// # Safety
/// This thread is configured, and the rows can be read.
#[inline(always)]
pub unsafe fn load<const T: usize>(at: *const u8, stride: usize) {
    // SAFETY: promised by the caller.
    unsafe {
        asm!("tileloadd tmm{t}, [{at} + {stride}]", t = const T, at = in(reg) at, stride = in(reg) stride,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, preserves_flags, readonly));
    }
}

/// Writes tile T to 16 rows of 64 bytes, `stride` bytes apart.
///
/// # Safety
/// This thread is configured, and the rows can be written.
#[inline(always)]
pub unsafe fn store<const T: usize>(at: *mut u8, stride: usize) {
    // SAFETY: promised by the caller.
    unsafe {
        asm!("tilestored [{at} + {stride}], tmm{t}", t = const T, at = in(reg) at, stride = in(reg) stride,
            options(nostack, preserves_flags));
    }
}

/// A function for one instruction that multiplies tiles.
macro_rules! product_of_tiles {
    ($(#[$doc:meta])* $name:ident, $instruction:literal) => {
        $(#[$doc])*
        #[inline(always)]
        pub unsafe fn $name<const C: usize, const A: usize, const B: usize>() {
            // SAFETY: promised by the caller.
            unsafe {
                asm!(concat!($instruction, " tmm{c}, tmm{a}, tmm{b}"), c = const C, a = const A, b = const B,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nomem, nostack, preserves_flags));
            }
        }
    };
}

product_of_tiles! {
    /// C += A B in f32: row m of A holds 32 bf16, row k of B the numbers 2k and 2k+1 of each of 16 columns, side by side.
    ///
    /// Of each sum the products of even k are added up in order from zero, those of odd k likewise, and then their sum is added to
    /// C; each addition is rounded to the nearest even. Numbers below the normal range count as zero.
    ///
    /// # Safety
    /// This thread is configured, and the CPU has AMX-BF16.
    multiply_bf16, "tdpbf16ps"
}

product_of_tiles! {
    /// C += A B in 32 bits: row m of A holds 64 signed bytes, row k of B the bytes 4k to 4k+3 of each of 16 columns, side by side.
    ///
    /// # Safety
    /// This thread is configured, and the CPU has AMX-INT8.
    multiply_i8, "tdpbssd"
}

product_of_tiles! {
    /// The same for unsigned bytes in A and signed ones in B.
    ///
    /// # Safety
    /// As [`multiply_i8`].
    multiply_u8_i8, "tdpbusd"
}

#[cfg(test)]
mod tests {
    use super::super::super::isa::tile_products;
    use super::*;
    use half::bf16;

    #[test]
    fn a_product_of_bf16_tiles_is_two_chains_of_sums() {
        if !tile_products().bf16 {
            eprintln!("SKIPPED: products of tiles of bf16, which this CPU does not have");
            return;
        }
        #[repr(C, align(64))]
        struct Tile<V>([[V; 32]; TILE_ROWS]);
        #[repr(C, align(64))]
        struct Sums([[f32; TILE_ROWS]; TILE_ROWS]);
        let noise = |seed: usize, i: usize, j: usize| {
            bf16::from_f32(((i * 67 + j * 31 + seed * 977) as f32 * 0.737).sin())
        };
        let a = Tile(std::array::from_fn(|m| std::array::from_fn(|k| noise(1, m, k))));
        // [16 pairs][16 columns][2].
        let b =
            Tile(std::array::from_fn(|pair| std::array::from_fn(|at| noise(2, 2 * pair + at % 2, at / 2))));
        let mut c = Sums(std::array::from_fn(|m| std::array::from_fn(|n| (m + n) as f32)));
        let start = c.0;
        // SAFETY: the CPU was asked; all tiles are 16 rows of 64 bytes.
        unsafe {
            configure();
            load::<0>((&raw const c).cast(), TILE_ROW_BYTES);
            load::<4>((&raw const a).cast(), TILE_ROW_BYTES);
            load::<6>((&raw const b).cast(), TILE_ROW_BYTES);
            multiply_bf16::<0, 4, 6>();
            store::<0>((&raw mut c).cast(), TILE_ROW_BYTES);
        }
        for m in 0..TILE_ROWS {
            for n in 0..TILE_ROWS {
                let chain = |odd: usize| {
                    (0..16).fold(0f32, |sum, pair| {
                        a.0[m][2 * pair + odd].to_f32().mul_add(b.0[pair][2 * n + odd].to_f32(), sum)
                    })
                };
                let right = start[m][n] + (chain(0) + chain(1));
                assert_eq!(c.0[m][n].to_bits(), right.to_bits(), "row {m}, column {n}");
            }
        }
        // SAFETY: as above.
        unsafe {
            zero::<0>();
            store::<0>((&raw mut c).cast(), TILE_ROW_BYTES);
        }
        assert!(c.0.iter().flatten().all(|value| value.to_bits() == 0));
    }
}
