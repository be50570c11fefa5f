//! A request and what comes back for it.

use serde::{Deserialize, Serialize};

/// Chosen by the engine, counted up from 0 in order of submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestId(pub u64);

/// How the next token is picked from the logits. `temperature` 0 is greedy and ignores the rest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    pub temperature: f32,
    /// Keep the `top_k` most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of tokens whose probability reaches `top_p`, 0 < top_p <= 1.
    pub top_p: f32,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0 }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    pub prompt: Vec<u32>,
    /// Stop after this many generated tokens, 1 or more.
    pub max_tokens: usize,
    pub sampling: SamplingParams,
    /// Seed of this request's random draws; a draw is a function of (seed, position) alone.
    pub seed: u64,
    /// Generation ends after one of these (the stop token is part of the output), unless `ignore_eos`.
    pub stop_tokens: Vec<u32>,
    pub ignore_eos: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// `max_tokens` reached.
    Length,
    /// A stop token.
    Stop,
    Cancelled,
}
