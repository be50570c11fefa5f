//! The serving engine, called in-process. It knows nothing of experiments.

pub mod account;
pub mod clock;
pub mod config;
pub mod device;
pub mod model;
pub mod request;
pub mod step_report;
