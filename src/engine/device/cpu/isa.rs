//! Which instructions this CPU has, found at run time, and how code is compiled for each set.
//!
//! Most loops here are written once over arrays of [`LANES`] floats and compiled once per instruction set:
//! [`Isa::run`] calls a [`Work`] inside a function that has the set enabled, and everything it calls is inlined into it.
//! Products of matrices are written with intrinsics instead (`gemm/`). Where the set has fused multiply-add, all sets
//! give the same bits, since the order of additions is fixed by the source.

use std::sync::LazyLock;

use crate::{Error, Result};

/// Width of every vectorised loop, whatever the registers' width: one AVX-512 register, two of AVX2, four of NEON.
pub const LANES: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 F, BW, DQ and VL. (Made by [`Isa::detect`] and [`Isa::available`] alone, as is the next.)
    #[non_exhaustive]
    Avx512,
    /// AVX2 with FMA and F16C.
    #[non_exhaustive]
    Avx2,
    /// Plain Rust, which is NEON on aarch64.
    Portable,
}

impl Isa {
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx2 && avx512 {
                return Self::Avx512;
            }
            if avx2 {
                return Self::Avx2;
            }
        }
        Self::Portable
    }

    /// Every set this CPU can run, best first.
    pub fn available() -> Vec<Self> {
        match Self::detect() {
            Self::Avx512 => vec![Self::Avx512, Self::Avx2, Self::Portable],
            Self::Avx2 => vec![Self::Avx2, Self::Portable],
            Self::Portable => vec![Self::Portable],
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Avx512 => "AVX-512",
            Self::Avx2 => "AVX2, FMA, F16C",
            Self::Portable if cfg!(target_arch = "aarch64") => "NEON",
            Self::Portable => "portable",
        }
    }

    /// Runs `work` compiled for this set.
    #[inline]
    pub fn run<W: Work>(self, work: W) -> W::Output {
        match self {
            // SAFETY: a value of these variants comes from `detect` or `available`, which asked the CPU; no other crate can
            // make one, and this one does not.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { run_avx512(work) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { run_avx2(work) },
            _ => work.run::<Plain>(),
        }
    }
}

/// True where the CPU multiplies pairs of bf16 into f32 sums.
pub fn has_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        Isa::detect() == Isa::Avx512 && is_x86_feature_detected!("avx512bf16")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// True where pairs of bf16 by VDPBF16PS are taken to be faster than multiply-adds of f32: not on Intel's CPUs, since two cores
/// of the one measured, a Xeon of family 6 and model 207, make 170 GFLOP/s with it and 350 with multiply-adds, where AMD's Zen 5
/// makes 1,050 and 530. (By maker and not timed, so that a run that is resumed computes the same.)
pub fn has_fast_bf16() -> bool {
    has_bf16() && !is_intel()
}

/// Whether this CPU has bf16 products, for `doctor`.
pub fn bf16_products() -> &'static str {
    match (has_bf16(), has_fast_bf16()) {
        (false, _) => "no",
        (true, false) if tile_products().bf16 => {
            "yes, but slower than f32 multiply-adds, with which cpu_math=bf16 multiplies 4-bit weights; 16-bit ones by tiles"
        }
        (true, false) => {
            "yes, but slower than f32 multiply-adds, which cpu_math=bf16 uses on rounded operands"
        }
        (true, true) => "yes",
    }
}

/// True on CPUs of Intel.
pub fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        static INTEL: LazyLock<bool> = LazyLock::new(|| {
            // SAFETY: every x86-64 CPU has the instruction and leaf 0.
            #[allow(unused_unsafe, reason = "newer toolchains have it as a safe function")]
            let id = unsafe { std::arch::x86_64::__cpuid(0) };
            (id.ebx, id.edx, id.ecx) == (0x756e_6547, 0x4965_6e69, 0x6c65_746e) // "Genu", "ineI", "ntel"
        });
        *INTEL
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// True where the CPU multiplies pairs of 16-bit integers in 512 bits and adds them to 32-bit sums (AVX512-VNNI).
pub fn has_vnni() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        Isa::detect() == Isa::Avx512 && is_x86_feature_detected!("avx512vnni")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Products of matrix tiles (AMX) that this CPU has and that the system lets this process use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TileProducts {
    /// Of pairs of bf16, summed in f32 (AMX-BF16).
    pub bf16: bool,
    /// Of four 8-bit integers each, summed in 32 bits (AMX-INT8).
    pub int8: bool,
}

/// The tile products of this CPU: none without AVX-512 as well, or where the system refuses their registers.
pub fn tile_products() -> TileProducts {
    static FOUND: LazyLock<TileProducts> = LazyLock::new(find_tile_products);
    *FOUND
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn find_tile_products() -> TileProducts {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    /// ARCH_REQ_XCOMP_PERM, which asks for a part of the registers for the whole process.
    const REQUEST_PERMISSION: libc::c_ulong = 0x1023;
    /// XTILEDATA.
    const TILE_DATA: libc::c_ulong = 18;
    if Isa::detect() != Isa::Avx512 {
        return TileProducts::default();
    }
    // SAFETY: every x86-64 CPU has the instruction, and the leaf is asked for only where there is one.
    #[allow(unused_unsafe, reason = "newer toolchains have them as safe functions")]
    let features = unsafe { if __cpuid(0).eax < 7 { 0 } else { __cpuid_count(7, 0).edx } };
    let has = |bit: u32| features >> bit & 1 == 1;
    let (bf16, tiles, int8) = (has(22), has(24), has(25));
    // SAFETY: the call touches no memory of this process; systems that do not know it give an error.
    let granted = tiles && unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) } == 0;
    TileProducts { bf16: granted && bf16, int8: granted && int8 }
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn find_tile_products() -> TileProducts {
    TileProducts::default()
}

/// Which tile products this CPU has, for `doctor`.
pub fn tile_products_found() -> &'static str {
    match tile_products() {
        TileProducts { bf16: true, int8: true } => "bf16 and 8-bit integers",
        TileProducts { bf16: true, int8: false } => "bf16",
        TileProducts { bf16: false, int8: true } => "8-bit integers",
        TileProducts { bf16: false, int8: false } => "no",
    }
}

/// # Errors
/// `cpu_math = bf16` on a CPU without bf16 products.
pub fn require_bf16() -> Result<()> {
    if has_bf16() {
        return Ok(());
    }
    Err(Error::invalid(
        format!("cpu_math = bf16 needs a CPU with AVX512-BF16; this one has {}", Isa::detect().name()),
        "set cpu_math=f32",
    ))
}

/// A loop to be compiled for several instruction sets. `run` and everything it calls must be `#[inline(always)]`.
pub trait Work {
    type Output;
    fn run<A: Arch>(self) -> Self::Output;
}

/// What the source must know of the set it is compiled for.
pub trait Arch {
    /// Fused multiply-add is one instruction, not a library call.
    const FMA: bool;
}

pub struct Fused;
impl Arch for Fused {
    const FMA: bool = true;
}

pub struct Plain;
impl Arch for Plain {
    const FMA: bool = cfg!(target_arch = "aarch64");
}

/// a * b + c, rounded once where the set can.
#[inline(always)]
pub fn fma<A: Arch>(a: f32, b: f32, c: f32) -> f32 {
    if A::FMA { a.mul_add(b, c) } else { a * b + c }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn run_avx512<W: Work>(work: W) -> W::Output {
    work.run::<Fused>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_avx2<W: Work>(work: W) -> W::Output {
    work.run::<Fused>()
}
