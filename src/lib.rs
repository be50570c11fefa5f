//! `inferwall`: turn one knob of an LLM server until something breaks, and see why.
//!
//! Data flows one way: `experiments.toml -> Experiment -> Plan -> (Workload -> Engine -> Device) ->
//! Recorder -> Summary -> Report`. Each module imports only from those in front of it: [`engine`], [`workload`],
//! [`measure`], [`experiment`], [`results`], [`simulation`], [`explain`], [`report`], [`run`], [`cli`].

pub mod cli;
pub mod engine;
pub mod error;
pub mod experiment;
pub mod explain;
pub mod hardware;
pub mod interrupt;
pub mod measure;
pub mod numbers;
pub mod paths;
pub mod report;
pub mod results;
pub mod run;
pub mod simulation;
pub mod workload;

pub use error::{Error, Result};
