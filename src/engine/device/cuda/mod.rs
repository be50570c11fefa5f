//! The CUDA device: hand-written kernels (`cuda/*.cu`), compiled at run time for the GPU at hand, in fp16 with fp32 sums.
//!
//! Layers, lowest first: [`libraries`] finds the driver and NVRTC; [`nvrtc`] and [`compile`] turn sources into machine code;
//! [`driver`] and [`launch`] are memory, streams, launches and graphs.

pub mod compile;
pub mod delta_prefill;
pub mod driver;
pub mod launch;
pub mod libraries;
pub mod matrix;
pub mod nvrtc;
pub mod prefill_attention;
pub mod units;

pub use driver::{GpuFacts, probe};
