//! GPUs by name: what their data sheets say, what has been measured, and from which source.
//!
//! Simulated devices and capacity planning run on the effective figures: measured where there is a measurement,
//! else the data sheet's times the share that is usually reached.

use serde::Serialize;

use crate::{Error, Result};

/// A figure and where it comes from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Sourced {
    /// In the unit that what holds it says.
    pub value: f64,
    pub source: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Gpu {
    /// As typed after `sim:`.
    pub id: &'static str,
    pub name: &'static str,
    /// CUDA compute capability, times ten.
    pub capability: i32,
    pub streaming_multiprocessors: u32,
    /// Memory a program can use, bytes.
    pub memory_bytes: u64,
    /// Memory bandwidth of the data sheet, bytes a second.
    pub sheet_bytes_per_s: f64,
    /// Dense 16-bit matrix rate with 32-bit sums of the data sheet, FLOP a second.
    pub sheet_flops_per_s: f64,
    pub sheet: &'static str,
    /// Read bandwidth a streaming kernel reaches.
    pub measured_bytes_per_s: Option<Sourced>,
    /// Rate that large 16-bit products reach.
    pub measured_flops_per_s: Option<Sourced>,
}

/// Share of the data sheet's bandwidth taken where nothing was measured: an H200 reaches 4.63 of 4.8 TB/s, an
/// A10G 483 of 600 GB/s (both measured); GDDR and HBM cards lie between.
const BANDWIDTH_SHARE: Sourced =
    Sourced { value: 0.90, source: "0.90 of the data sheet (measured cards: 0.81 to 0.96)" };

/// Share of the data sheet's matrix rate: 790 of 989 TFLOP/s on an H200, 49 of 70 on an A10G.
const RATE_SHARE: Sourced =
    Sourced { value: 0.75, source: "0.75 of the data sheet (measured cards: 0.70 to 0.80)" };

/// What one launch of a step adds to its floor: ramp-up and tail of a kernel that streams a matrix. One launch a
/// matrix of a 4B step (129 of them) took 2.43 ms in a CUDA graph on an H200, and its bytes alone 1.815 ms.
pub const LAUNCH_S: Sourced =
    Sourced { value: 4.77e-6, source: "(2.43 - 1.815) ms over 129 launches in a graph, measured on an H200" };

const GIB: u64 = 1 << 30;

pub const GPUS: [Gpu; 7] = [
    Gpu {
        id: "a10g",
        name: "NVIDIA A10G",
        capability: 86,
        streaming_multiprocessors: 80,
        memory_bytes: 23_028 << 20,
        sheet_bytes_per_s: 600e9,
        sheet_flops_per_s: 70e12,
        sheet: "NVIDIA A10G data sheet: 24 GB GDDR6, 600 GB/s, 70 TFLOP/s fp16 tensor, dense",
        measured_bytes_per_s: Some(Sourced {
            value: 483e9,
            source: "copy test of the series \"The Inference Wall\"",
        }),
        measured_flops_per_s: Some(Sourced {
            value: 48.7e12,
            source: "a 2,044-token chunk and a 5,408-token prompt of the series, Part 2",
        }),
    },
    Gpu {
        id: "l4",
        name: "NVIDIA L4",
        capability: 89,
        streaming_multiprocessors: 58,
        memory_bytes: 23_034 << 20,
        sheet_bytes_per_s: 300e9,
        sheet_flops_per_s: 121e12,
        sheet: "NVIDIA L4 data sheet: 24 GB GDDR6, 300 GB/s, 242 TFLOP/s fp16 tensor with sparsity, 121 without",
        measured_bytes_per_s: None,
        measured_flops_per_s: None,
    },
    Gpu {
        id: "rtx4090",
        name: "NVIDIA GeForce RTX 4090",
        capability: 89,
        streaming_multiprocessors: 128,
        memory_bytes: 24_564 << 20,
        sheet_bytes_per_s: 1008e9,
        sheet_flops_per_s: 165.2e12,
        sheet: "NVIDIA Ada architecture paper: 24 GB GDDR6X, 1,008 GB/s, 165.2 TFLOP/s fp16 tensor with fp32 sums",
        measured_bytes_per_s: None,
        measured_flops_per_s: None,
    },
    Gpu {
        id: "rtx5090",
        name: "NVIDIA GeForce RTX 5090",
        capability: 120,
        streaming_multiprocessors: 170,
        memory_bytes: 32_607 << 20,
        sheet_bytes_per_s: 1792e9,
        sheet_flops_per_s: 209.5e12,
        sheet: "NVIDIA Blackwell RTX architecture paper: 32 GB GDDR7, 1,792 GB/s, 209.5 TFLOP/s fp16 tensor with fp32 sums",
        measured_bytes_per_s: None,
        measured_flops_per_s: None,
    },
    Gpu {
        id: "a100-80",
        name: "NVIDIA A100 80GB SXM",
        capability: 80,
        streaming_multiprocessors: 108,
        memory_bytes: 81_920 << 20,
        sheet_bytes_per_s: 2039e9,
        sheet_flops_per_s: 312e12,
        sheet: "NVIDIA A100 data sheet: 80 GB HBM2e, 2,039 GB/s, 312 TFLOP/s fp16 tensor, dense",
        measured_bytes_per_s: None,
        measured_flops_per_s: None,
    },
    Gpu {
        id: "h100",
        name: "NVIDIA H100 SXM",
        capability: 90,
        streaming_multiprocessors: 132,
        memory_bytes: 81_559 << 20,
        sheet_bytes_per_s: 3352e9,
        sheet_flops_per_s: 989.4e12,
        sheet: "NVIDIA H100 data sheet: 80 GB HBM3, 3.35 TB/s, 1,979 TFLOP/s fp16 tensor with sparsity, 989 without",
        measured_bytes_per_s: None,
        measured_flops_per_s: None,
    },
    Gpu {
        id: "h200",
        name: "NVIDIA H200 SXM",
        capability: 90,
        streaming_multiprocessors: 132,
        memory_bytes: 143_771 << 20,
        sheet_bytes_per_s: 4800e9,
        sheet_flops_per_s: 989.4e12,
        sheet: "NVIDIA H200 data sheet: 141 GB HBM3e, 4.8 TB/s, 1,979 TFLOP/s fp16 tensor with sparsity, 989 without",
        measured_bytes_per_s: Some(Sourced {
            value: 4.63e12,
            source: "a plain streaming read kernel on one H200",
        }),
        measured_flops_per_s: Some(Sourced {
            value: 790e12,
            source: "a large 16-bit matrix product on one H200",
        }),
    },
];

impl Gpu {
    /// The bandwidth to plan with, bytes a second.
    pub fn effective_bytes_per_s(&self) -> Sourced {
        self.measured_bytes_per_s.unwrap_or(Sourced {
            value: self.sheet_bytes_per_s * BANDWIDTH_SHARE.value,
            source: BANDWIDTH_SHARE.source,
        })
    }

    /// The matrix rate to plan with, FLOP a second.
    pub fn effective_flops_per_s(&self) -> Sourced {
        self.measured_flops_per_s.unwrap_or(Sourced {
            value: self.sheet_flops_per_s * RATE_SHARE.value,
            source: RATE_SHARE.source,
        })
    }
}

/// The entry called `id`, in letters of any case, with or without its maker's name: `H100`, `NVIDIA GeForce RTX 4090`.
///
/// # Errors
/// [`Error::Invalid`] with the names there are.
pub fn gpu(id: &str) -> Result<&'static Gpu> {
    let plain = id.to_lowercase().replace("nvidia", "").replace("geforce", "");
    let plain: String = plain.split([' ', '_']).filter(|word| !word.is_empty()).collect();
    let plain = plain.trim_matches('-');
    let named = GPUS.iter().find(|gpu| gpu.id == plain);
    let product = || by_product_name(id).filter(|_| id.to_lowercase().starts_with("nvidia "));
    named.or_else(product).ok_or_else(|| {
        let all: Vec<_> = GPUS.iter().map(|gpu| gpu.id).collect();
        let similar = all.iter().map(|name| (strsim::jaro_winkler(name, plain), name));
        let nearest = similar.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(similarity, _)| *similarity > 0.6);
        let meant = nearest.map_or_else(String::new, |(_, name)| format!("did you mean `{name}`? "));
        Error::invalid(format!("no GPU `{id}` in the table"), format!("{meant}GPUs: {}", all.join(", ")))
    })
}

/// The entry of a product as a driver names it (`NVIDIA H100 80GB HBM3`), if there is one.
pub fn by_product_name(product: &str) -> Option<&'static Gpu> {
    let product = product.to_lowercase();
    let has = |words: &[&str]| words.iter().all(|word| product.contains(word));
    let id = match () {
        () if has(&["a10g"]) => "a10g",
        () if has(&["h200"]) => "h200",
        () if has(&["h100"]) => "h100",
        () if has(&["a100", "80"]) => "a100-80",
        () if has(&["rtx", "4090"]) => "rtx4090",
        () if has(&["rtx", "5090"]) => "rtx5090",
        () if product.split_whitespace().any(|word| word == "l4") => "l4",
        () => return None,
    };
    GPUS.iter().find(|gpu| gpu.id == id)
}

/// Bytes as GiB.
pub fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_takes_the_place_of_the_data_sheet_and_never_exceeds_it() {
        for gpu in &GPUS {
            assert!(gpu.effective_bytes_per_s().value < gpu.sheet_bytes_per_s, "{}", gpu.id);
            assert!(gpu.effective_flops_per_s().value < gpu.sheet_flops_per_s, "{}", gpu.id);
        }
        assert_eq!(gpu("a10g").unwrap().effective_bytes_per_s().value, 483e9);
        assert_eq!(gpu("l4").unwrap().effective_bytes_per_s().value, 270e9);
    }

    #[test]
    fn an_unknown_name_offers_the_nearest() {
        let error = gpu("h10").unwrap_err();
        assert!(error.hint().contains("did you mean `h100`"), "{}", error.hint());
        // (What resembles none of them is like none of them.)
        let error = gpu("cpu").unwrap_err();
        assert!(error.hint().starts_with("GPUs: a10g"), "{}", error.hint());
    }

    #[test]
    fn names_are_taken_as_people_write_them() {
        for (written, id) in [
            ("H100", "h100"),
            ("NVIDIA H200", "h200"),
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("RTX 4090", "rtx4090"),
            ("NVIDIA GeForce RTX 5090", "rtx5090"),
            ("A100-80", "a100-80"),
        ] {
            assert_eq!(gpu(written).unwrap().id, id, "{written}");
        }
        assert!(gpu("nvidia").is_err() && gpu("").is_err());
    }

    #[test]
    fn product_names_of_drivers_are_found() {
        assert_eq!(by_product_name("NVIDIA H100 80GB HBM3").map(|gpu| gpu.id), Some("h100"));
        assert_eq!(by_product_name("NVIDIA A10G").map(|gpu| gpu.id), Some("a10g"));
        assert_eq!(by_product_name("NVIDIA L4").map(|gpu| gpu.id), Some("l4"));
        assert_eq!(by_product_name("NVIDIA A100-SXM4-40GB"), None);
    }
}
