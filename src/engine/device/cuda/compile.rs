//! From the sources under `cuda/` (embedded in the binary) to machine code for one GPU, with a cache on disk.
//!
//! A [`Unit`] is one file with its definitions and the kernels it holds. The cache's key is a hash of the source, the
//! shared header, the options (with the architecture) and NVRTC's version, so it never has to be cleared; entries are
//! written whole under another name and renamed, so that two processes may fill it at once.

use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Instant;

use sha2::{Digest, Sha256};

use super::nvrtc::{Compiled, Nvrtc};
use crate::engine::device;
use crate::{Error, Result};

/// What this process has compiled so far.
static TALLY: Mutex<device::Compiled> =
    Mutex::new(device::Compiled { compiled: 0, cached: 0, compile_s: 0.0 });

/// What this process has compiled so far, and found in the cache.
pub fn tally() -> device::Compiled {
    *TALLY.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn count(add: impl FnOnce(&mut device::Compiled)) {
    add(&mut TALLY.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
}

/// One source file compiled with one set of definitions.
#[derive(Debug, Clone, Copy)]
pub struct Unit {
    /// File under `cuda/`.
    pub file: &'static str,
    pub source: &'static str,
    pub defines: &'static [(&'static str, &'static str)],
    /// Kernels a decode step or a prefill spends its time in: the resource test fails when one of them spills.
    pub hot: &'static [&'static str],
    /// Lowest compute capability it is compiled for (90 for files that need the bulk copy engine).
    pub min_capability: i32,
    /// Highest one (90 for files that need Hopper's warpgroup products, which later GPUs dropped).
    pub max_capability: i32,
}

impl Unit {
    /// Whether it can run on a GPU of this compute capability.
    pub fn supports(&self, capability: i32) -> bool {
        (self.min_capability..=self.max_capability).contains(&capability)
    }
}

/// For units that every later GPU can run.
pub const ANY_LATER: i32 = i32::MAX;

/// Targets that must always compile; a GPU at run time may be another.
pub const TARGETS: [&str; 5] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"];

const HEADERS: [(&str, &str); 11] = [
    ("half.cuh", include_str!("../../../../cuda/half.cuh")),
    ("fp16.cuh", include_str!("../../../../cuda/fp16.cuh")),
    ("int4.cuh", include_str!("../../../../cuda/int4.cuh")),
    ("product.cuh", include_str!("../../../../cuda/product.cuh")),
    ("products_hopper.cuh", include_str!("../../../../cuda/products_hopper.cuh")),
    ("best.cuh", include_str!("../../../../cuda/best.cuh")),
    ("wgmma.cuh", include_str!("../../../../cuda/wgmma.cuh")),
    ("cluster.cuh", include_str!("../../../../cuda/cluster.cuh")),
    ("step.cuh", include_str!("../../../../cuda/step.cuh")),
    ("delta.cuh", include_str!("../../../../cuda/delta.cuh")),
    ("delta_prefill.cuh", include_str!("../../../../cuda/delta_prefill.cuh")),
];

/// The name NVRTC knows a GPU by: Hopper and later datacentre parts with the suffix that unlocks their own instructions.
pub fn target(capability: i32) -> String {
    let suffix = if matches!(capability, 90 | 100 | 103) { "a" } else { "" };
    format!("sm_{capability}{suffix}")
}

fn options(unit: &Unit, target: &str) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={target}"),
        "--std=c++17".to_string(),
        "--device-as-default-execution-space".to_string(),
        "--generate-line-info".to_string(),
        "--ptxas-options=-v".to_string(),
    ];
    options.extend(unit.defines.iter().map(|(name, value)| format!("--define-macro={name}={value}")));
    options
}

/// Compiles without the cache.
///
/// # Errors
/// The compiler's own message, naming file and line.
pub fn compile(nvrtc: &Nvrtc, unit: &Unit, target: &str) -> Result<Compiled> {
    nvrtc.compile(unit.file, unit.source, &HEADERS, &options(unit, target))
}

/// Machine code of `unit` for `target`: from the cache, else compiled and put there. A cache that cannot be read or
/// written costs time, nothing else.
///
/// # Errors
/// As [`compile`].
pub fn cubin(nvrtc: &Nvrtc, unit: &Unit, target: &str) -> Result<Vec<u8>> {
    let path = cache_folder().map(|folder| folder.join(format!("{}.cubin", key(nvrtc, unit, target))));
    if let Some(bytes) = path.as_ref().and_then(|path| fs::read(path).ok()) {
        // Every cubin is an ELF file; anything else is a damaged entry.
        if bytes.starts_with(b"\x7fELF") {
            count(|tally| tally.cached += 1);
            return Ok(bytes);
        }
    }
    let began = Instant::now();
    let compiled = compile(nvrtc, unit, target)?;
    count(|tally| {
        tally.compiled += 1;
        tally.compile_s += began.elapsed().as_secs_f64();
    });
    if let Some(path) = path {
        let partial = path.with_extension(format!("{}.partial", std::process::id()));
        let written = path
            .parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| fs::write(&partial, &compiled.cubin))
            .and_then(|()| fs::rename(&partial, &path));
        if written.is_err() {
            let _ = fs::remove_file(&partial);
        }
    }
    Ok(compiled.cubin)
}

fn key(nvrtc: &Nvrtc, unit: &Unit, target: &str) -> String {
    let mut hash = Sha256::new();
    let headers = HEADERS.iter().map(|header| header.1);
    for part in headers.chain([unit.file, unit.source]) {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    for option in options(unit, target) {
        hash.update(option);
        hash.update([0]);
    }
    hash.update(format!("nvrtc {}.{}", nvrtc.version.0, nvrtc.version.1));
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// `$XDG_CACHE_HOME/inferwall/kernels`, else under `$HOME/.cache`.
pub fn cache_folder() -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = cache.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
    cache.map(|cache| cache.join("inferwall").join("kernels"))
}

/// What the assembler said of one kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resources {
    pub kernel: String,
    pub registers: u32,
    pub shared_bytes: u32,
    pub spill_bytes: u32,
    pub stack_bytes: u32,
}

/// Reads the log of `--ptxas-options=-v`.
///
/// # Errors
/// A log in another form, with the line.
pub fn resources(log: &str) -> Result<Vec<Resources>> {
    let number_before = |line: &str, words: &str| -> Option<u32> {
        let before = &line[..line.find(words)?];
        before.split(|c: char| !c.is_ascii_digit()).rfind(|part| !part.is_empty())?.parse().ok()
    };
    let mut all: Vec<Resources> = Vec::new();
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let kernel = rest.split('\'').next().unwrap_or_default().to_string();
            all.push(Resources { kernel, registers: 0, shared_bytes: 0, spill_bytes: 0, stack_bytes: 0 });
        }
        let Some(last) = all.last_mut() else { continue };
        if line.contains("bytes stack frame") {
            last.stack_bytes = number_before(line, " bytes stack frame").unwrap_or(0);
            last.spill_bytes = number_before(line, " bytes spill stores").unwrap_or(0)
                + number_before(line, " bytes spill loads").unwrap_or(0);
        }
        if line.contains("Used ") && line.contains(" registers") {
            last.registers = number_before(line, " registers").ok_or_else(|| {
                Error::failed(
                    format!("no register count in: {line}"),
                    "this version of NVRTC writes its log in another form: use 12 or 13",
                )
            })?;
            last.shared_bytes = number_before(line, " bytes smem").unwrap_or(0);
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_assembler_says_of_a_kernel() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'embed' for 'sm_90a'\n\
                   ptxas info    : Function properties for embed\n    \
                   16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n\
                   ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem\n";
        let expected = Resources {
            kernel: "embed".into(),
            registers: 40,
            shared_bytes: 128,
            spill_bytes: 20,
            stack_bytes: 16,
        };
        assert_eq!(resources(log).unwrap(), [expected]);
    }

    #[test]
    fn targets_carry_the_suffix_of_datacentre_parts() {
        assert_eq!([86, 90, 120].map(target), ["sm_86", "sm_90a", "sm_120"]);
    }
}
