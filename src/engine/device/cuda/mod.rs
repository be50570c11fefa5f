//! The CUDA device: hand-written kernels (`cuda/*.cu`), compiled at run time for the GPU at hand, in fp16 with fp32 sums.
//!
//! Layers, lowest first: [`libraries`] finds the driver and NVRTC; [`nvrtc`] and [`compile`] turn sources into machine code;
//! [`driver`] and [`launch`] are memory, streams, launches and graphs.

pub mod batch;
pub mod batch_product;
pub mod ceilings;
pub mod compile;
pub mod cublaslt;
pub mod cupti;
pub mod delta_prefill;
pub mod device;
pub mod driver;
pub mod forward;
mod gemm;
pub mod int4;
pub mod kernels;
pub mod launch;
pub mod libraries;
pub mod linear;
pub mod matrix;
pub mod nvrtc;
pub mod prefill_attention;
pub mod products;
pub mod session;
pub mod tensor_map;
pub mod trace;
pub mod tuned;
pub mod units;
pub mod upload;
pub mod weights;

pub use device::CudaDevice;
pub use driver::{GpuFacts, probe};
