//! From experiments.toml to finished results: what is declared ([`spec`], [`knobs`]), what will run ([`plan`]), running
//! it ([`run`], [`runner`]) and what it leaves behind ([`folder`]).

pub mod claims;
pub mod device;
pub mod estimate;
pub mod folder;
pub mod journal;
pub mod knobs;
pub mod plan;
pub mod prepare;
mod quality;
pub mod record;
pub mod run;
pub mod runner;
pub mod spec;
pub mod sweep;
pub mod warm;
