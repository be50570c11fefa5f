//! What happened, in numbers: per-token times, summaries by stated definitions, and verdicts on differences.
//!
//! [`drive`] runs a schedule against a [`target`], for real and simulated arms alike; a [`recorder::Recorder`] turns the step
//! reports into an [`recorder::ArmRecord`]. Nearly all else here is a pure function of records or of result files.

pub mod axis;
pub mod bound;
pub mod checks;
pub mod cold;
pub mod compare;
pub mod drive;
pub mod fairness;
pub mod gpu_state;
pub mod kernels;
pub mod max_t;
pub mod nvml;
pub mod populations;
pub mod quantile;
pub mod recorder;
pub mod roofs;
pub mod rows;
pub mod saturate;
pub mod statistics;
pub mod steady;
pub mod step_fit;
pub mod summarize;
pub mod summary;
pub mod summary_file;
pub mod target;
#[cfg(test)]
pub(crate) mod testing;
pub mod verdict;
pub mod warmup;
