//! What is asked of the engine and when: arrivals, lengths, prompts, probes and replayed traces.
//!
//! A [`spec::LoadSpec`] (a table of experiments.toml) becomes a [`schedule::Schedule`], drawn whole and up front from a
//! seed; a [`feed::Feed`] then hands its requests out as they fall due. Nothing here measures anything.

pub mod arrivals;
pub mod describe;
pub mod feed;
pub mod lengths;
pub mod numpy_legacy;
pub mod numpy_pcg;
pub mod plan;
pub mod probe;
pub mod prompts;
pub mod rate;
pub mod replay;
pub mod schedule;
pub mod seeds;
pub mod slo;
pub mod spec;
