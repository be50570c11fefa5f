//! From experiments.toml to what will run: what is declared ([`spec`], [`knobs`]) and every arm resolved ([`plan`]).

pub mod estimate;
pub mod knobs;
pub mod plan;
pub mod spec;
pub mod sweep;
