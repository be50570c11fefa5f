//! From experiments.toml to finished results: what is declared ([`spec`], [`knobs`]), what will run ([`plan`]), running
//! it ([`runner`], [`target`]) and what it leaves behind ([`folder`]).

pub mod claims;
pub mod device;
pub mod drive;
pub mod estimate;
pub mod folder;
pub mod interrupt;
pub mod knobs;
mod messages;

pub mod plan;
pub mod prepare;
mod quality;
pub mod record;
pub mod runner;
pub mod spec;
pub mod target;
pub mod warm;
