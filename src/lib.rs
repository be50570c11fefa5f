//! `inferwall`: turn one knob of an LLM server until something breaks, and see why.
//!
//! Data flows one way: `experiments.toml -> Experiment -> Plan -> (Workload -> Engine -> Device) ->
//! Recorder -> Summary -> Report`. Nothing in [`engine`] imports from the layers above it.

pub mod cli;
pub mod engine;
pub mod error;
pub mod experiment;
pub mod explain;
pub mod hardware;
pub mod interrupt;
pub mod measure;
pub mod report;
pub mod simulation;
pub mod workload;

pub use error::{Error, Result};
