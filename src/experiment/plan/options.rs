//! What the flags of a run ask for, as kept in run.json.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// What the flags of a run ask for: enough to make the same plan again, so it is kept in run.json.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PlanOptions {
    /// The declared experiment, or `sweep`.
    pub experiment: String,
    pub experiments_file: Option<PathBuf>,
    /// As [`super::Plan::folder`].
    #[serde(skip)]
    pub folder: PathBuf,
    pub device: String,
    pub values: Option<String>,
    /// Names of the arms to run, `*` for any letters; none: all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub arms: Vec<String>,
    pub prompts: Option<usize>,
    /// Limits on latency in place of those declared: they set what counts as goodput.
    pub slo: Option<String>,
    pub model: Option<String>,
    pub set: Vec<String>,
    /// Keys of the load with their values in TOML, for what no knob says: `ramp = { shape = "linear", to = 8 }`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub load: Vec<String>,
    pub repeats: Option<usize>,
    pub seed: Option<u64>,
    pub quick: bool,
    pub shard: Option<Shard>,
    /// Knobs of a sweep with their values.
    pub sweep: Vec<(String, String)>,
    /// Pair the values of a sweep's knobs instead of crossing them.
    pub zip: bool,
    /// Of `saturate`, where the search begins and ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub search: Option<SearchSpan>,
}

/// The rate a search begins at, requests a second, and the share by which the rates on both sides of its answer differ.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SearchSpan {
    pub start: f64,
    pub precision: f64,
}

/// The i-th of n parts of a plan, i from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    pub index: usize,
    pub of: usize,
}

impl std::str::FromStr for Shard {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parsed =
            text.split_once('/').and_then(|(index, of)| Some((index.parse().ok()?, of.parse().ok()?)));
        match parsed {
            Some((index, of)) if index >= 1 && index <= of => Ok(Self { index, of }),
            _ => Err(Error::invalid(
                format!("`{text}` is not a shard"),
                "write i/n with i from 1 to n, for example --shard 1/4",
            )),
        }
    }
}
