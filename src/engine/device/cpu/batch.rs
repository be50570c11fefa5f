//! A step as the device keeps it: its slices copied, its sequences given rows.

use crate::engine::device::{Input, Step, Ticket, Want};
use crate::engine::request::{RequestId, SamplingParams};

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
    /// Of its recurrent states.
    pub slot: usize,
    /// Ids of its KV blocks, in the order of its tokens.
    pub blocks: Vec<u32>,
    /// Tokens in the caches before the step.
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
            OwnedWant::Logits { rows } => self.tokens() - rows..self.tokens(),
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
    /// Copies `step`, which has passed [`StepBounds::check`](crate::engine::device::check::StepBounds::check).
    pub fn new(step: &Step<'_>) -> Self {
        let mut sequences = Vec::with_capacity(step.sequences.len());
        let mut rows = 0;
        for part in &step.sequences {
            sequences.push(Sequence {
                request: part.request,
                slot: part.state_slot.map_or(0, |slot| slot as usize),
                blocks: part.blocks.to_vec(),
                context: part.context_tokens,
                input: match part.input {
                    Input::Known(ids) => OwnedInput::Known(ids.to_vec()),
                    Input::SampledBy { ticket, sequence } => OwnedInput::SampledBy { ticket, sequence },
                },
                drafts: part.drafts.to_vec(),
                want: match part.want {
                    Want::Nothing => OwnedWant::Nothing,
                    Want::Sample { seed, position, params } => OwnedWant::Sample { seed, position, params },
                    Want::Logits { rows } => OwnedWant::Logits { rows },
                    Want::LogProbOf { targets } => OwnedWant::LogProbOf { targets: targets.to_vec() },
                },
                first_row: rows,
                kept: part.input.tokens(),
                replay: 0,
            });
            rows += part.input.tokens() + part.drafts.len();
        }
        Self { sequences, rows, trace: step.trace }
    }
}
