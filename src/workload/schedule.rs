//! A [`Schedule`]: every request of a run with the time it is due, drawn whole before the run starts.

use serde::{Deserialize, Serialize};

use super::probe::Probe;
use super::rate::Rate;
use crate::Result;
use crate::engine::request::Request;

/// A tokenizer, as far as a load needs one.
pub type Encode<'a> = dyn Fn(&str) -> Result<Vec<u32>> + 'a;

/// What a schedule needs to know of model, engine and plan.
#[derive(Clone, Copy)]
pub struct ScheduleContext<'a> {
    /// Tokens that exist: [`crate::engine::model::spec::ModelSpec::real_vocab_size`].
    pub vocab_size: usize,
    /// Ids that random prompts never contain (special tokens).
    pub special_tokens: &'a [u32],
    /// Ids that end an answer unless `ignore_eos`.
    pub stop_tokens: &'a [u32],
    /// `max_num_seqs`, for counts that are rules.
    pub seats: usize,
    /// Of the repeat: [`super::seeds::repeat_seed`].
    pub seed: u64,
    /// Text to token ids, for prompts of text.
    pub encode: Option<&'a Encode<'a>>,
}

/// What part a request plays in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Load,
    Victim,
    Injector,
}

impl Role {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Victim => "victim",
            Self::Injector => "injector",
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct PlannedRequest {
    /// When it is due, seconds from the start of the run. 0 in a closed loop, where the answer before decides.
    pub arrival_s: f64,
    /// In a closed loop: the client's pause before it.
    pub think_s: f64,
    pub role: Role,
    pub request: Request,
}

/// What makes a request due.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pacing {
    /// Its arrival time; at most `max_in_flight` at once, and one that must wait is late.
    Open { max_in_flight: Option<usize> },
    /// A client that is free: each takes the next request of the list once its own is answered and its pause is over.
    Closed { clients: usize },
    /// Part 2: `requests[..victims]` are repeated in loops, `requests[victims..]` are injected.
    Probe(Probe),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// In order of arrival.
    pub requests: Vec<PlannedRequest>,
    pub pacing: Pacing,
    /// Nominal rate of arrivals; `None` where the answers set it (closed loop, probe).
    pub offered_rate: Option<Rate>,
}

impl Schedule {
    /// Longest request in tokens, prompt plus answer: what `max_model_len` and the pools must hold.
    pub fn longest_request_tokens(&self) -> usize {
        self.requests
            .iter()
            .map(|planned| planned.request.prompt.len() + planned.request.max_tokens)
            .max()
            .unwrap_or(0)
    }

    /// Prompt and generated tokens of all requests, each as asked for.
    pub fn total_tokens(&self) -> (usize, usize) {
        self.requests.iter().fold((0, 0), |(input, output), planned| {
            (input + planned.request.prompt.len(), output + planned.request.max_tokens)
        })
    }
}
