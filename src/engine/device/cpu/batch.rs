//! A step as the device keeps it: its slices copied, its sequences given rows, every index checked once.

use super::cache::{KvPool, StatePool};
use crate::engine::device::{Input, Step, Ticket, Want};
use crate::engine::request::{RequestId, SamplingParams};
use crate::{Error, Result};

#[derive(Debug, Clone)]
pub enum OwnedInput {
    Known(Vec<u32>),
    SampledBy { ticket: Ticket, sequence: usize },
}

#[derive(Debug, Clone)]
pub enum OwnedWant {
    Nothing,
    Sample { seed: u64, position: u64, params: SamplingParams },
    Logits { rows: usize },
    LogProbOf { targets: Vec<u32> },
}

/// One sequence's part of a step.
#[derive(Debug, Clone)]
pub struct Sequence {
    pub request: RequestId,
    pub slot: usize,
    pub blocks: Vec<u32>,
    pub context: usize,
    pub input: OwnedInput,
    pub drafts: Vec<u32>,
    pub want: OwnedWant,
    /// First of its rows in the step.
    pub first_row: usize,
    /// New tokens that are sure to stay; drafts follow them.
    pub kept: usize,
    /// Stashed drafts of an earlier step to replay into the state.
    pub replay: usize,
}

impl Sequence {
    /// New tokens.
    pub fn tokens(&self) -> usize {
        self.kept + self.drafts.len()
    }

    /// (block, token within it) of a position.
    #[inline(always)]
    pub fn locate(&self, position: usize, block_tokens: usize) -> (usize, usize) {
        (self.blocks[position / block_tokens] as usize, position % block_tokens)
    }

    /// New tokens, counted from the first, whose logits are wanted.
    pub fn wanted(&self) -> std::ops::Range<usize> {
        match &self.want {
            OwnedWant::Nothing => 0..0,
            OwnedWant::Sample { .. } => self.kept - 1..self.tokens(),
            OwnedWant::Logits { rows } => self.tokens() - rows.min(&self.tokens())..self.tokens(),
            OwnedWant::LogProbOf { .. } => 0..self.tokens(),
        }
    }
}

#[derive(Debug, Clone)]
pub struct Batch {
    pub sequences: Vec<Sequence>,
    /// New tokens of all sequences.
    pub rows: usize,
    pub trace: bool,
}

impl Batch {
    /// Copies `step` and checks it against the pools.
    ///
    /// # Errors
    /// Anything that would read or write outside the pools: the caller's bookkeeping is wrong.
    pub fn new(
        step: &Step<'_>,
        kv: Option<&KvPool>,
        state: Option<&StatePool>,
        positions: usize,
    ) -> Result<Self> {
        let mut sequences = Vec::with_capacity(step.sequences.len());
        let mut rows = 0;
        for part in &step.sequences {
            let fault = |what: String| {
                Err(Error::failed(
                    format!("request {}: {what}", part.request.0),
                    "this is a fault of the program: please report it",
                ))
            };
            let tokens = part.input.tokens() + part.drafts.len();
            if part.input.tokens() == 0 {
                return fault("a step without a new token".to_string());
            }
            let end = part.context_tokens + tokens;
            if end > positions {
                return fault(format!("{end} tokens, where the session was opened for {positions}"));
            }
            if let Some(kv) = kv {
                let covered = part.blocks.len() * kv.block_tokens;
                if covered < end {
                    return fault(format!("blocks cover {covered} tokens of {end}"));
                }
                if let Some(&bad) = part.blocks.iter().find(|&&block| block as usize >= kv.blocks) {
                    return fault(format!("block {bad} of {}", kv.blocks));
                }
            }
            let mut slot = 0;
            if let Some(state) = state {
                match part.state_slot {
                    Some(given) if (given as usize) < state.slots.len() => slot = given as usize,
                    other => return fault(format!("state slot {other:?} of {}", state.slots.len())),
                }
                if part.drafts.len() > state.max_drafts {
                    return fault(format!("{} drafts of at most {}", part.drafts.len(), state.max_drafts));
                }
            }
            let want = match part.want {
                Want::Nothing => OwnedWant::Nothing,
                Want::Sample { seed, position, params } => OwnedWant::Sample { seed, position, params },
                Want::Logits { rows } => OwnedWant::Logits { rows },
                Want::LogProbOf { targets } if targets.len() == tokens => {
                    OwnedWant::LogProbOf { targets: targets.to_vec() }
                }
                Want::LogProbOf { targets } => {
                    return fault(format!("{} targets for {tokens} tokens", targets.len()));
                }
            };
            sequences.push(Sequence {
                request: part.request,
                slot,
                blocks: part.blocks.to_vec(),
                context: part.context_tokens,
                input: match part.input {
                    Input::Known(ids) => OwnedInput::Known(ids.to_vec()),
                    Input::SampledBy { ticket, sequence } => OwnedInput::SampledBy { ticket, sequence },
                },
                drafts: part.drafts.to_vec(),
                want,
                first_row: rows,
                kept: part.input.tokens(),
                replay: 0,
            });
            rows += tokens;
        }
        Ok(Self { sequences, rows, trace: step.trace })
    }
}
