//! A request inside the engine: its tokens, how many of them are computed, and what it holds.
//!
//! `computed` counts tokens whose computation has been *scheduled*; a step in flight may not have done it yet.
//! `tokens` holds known tokens, prompt then output; a sampled token still in flight is counted in `in_flight` and
//! becomes known when its step is waited for. A decode always has `computed + 1 == len()`.

use crate::engine::cache::Holding;
use crate::engine::device::Ticket;
use crate::engine::request::{Request, RequestId};
use crate::engine::speculate::NgramIndex;

#[derive(Debug)]
pub struct Sequence {
    pub id: RequestId,
    pub request: Request,
    /// Prompt, then output known so far.
    pub tokens: Vec<u32>,
    pub prompt_tokens: usize,
    /// Tokens whose KV and state are there once every submitted step has run.
    pub computed: usize,
    /// Sampled tokens of submitted steps that are not known yet.
    pub in_flight: usize,
    /// Where the last sampled token in flight comes from.
    pub sampled_by: Option<(Ticket, usize)>,
    /// Tokens below this are prefill, also when they were generated before a preemption.
    pub prefill_until: usize,
    /// Most tokens that were ever computed: what is computed below this is recomputed.
    pub high_water: usize,
    pub admitted_before: bool,
    pub holding: Holding,
    pub drafts: Vec<u32>,
    pub index: Option<NgramIndex>,
}

impl Sequence {
    pub fn new(id: RequestId, mut request: Request, index: Option<NgramIndex>) -> Self {
        let tokens = std::mem::take(&mut request.prompt);
        Self {
            id,
            request,
            prompt_tokens: tokens.len(),
            prefill_until: tokens.len(),
            tokens,
            computed: 0,
            in_flight: 0,
            sampled_by: None,
            high_water: 0,
            admitted_before: false,
            holding: Holding::default(),
            drafts: Vec::new(),
            index,
        }
    }

    /// Tokens known or in flight.
    pub fn len(&self) -> usize {
        self.tokens.len() + self.in_flight
    }

    /// Tokens still to be sampled, beyond those known and in flight.
    pub fn remaining(&self) -> usize {
        (self.prompt_tokens + self.request.max_tokens).saturating_sub(self.len())
    }

    /// Tokens computed in all when the request is done: the last one sampled is never computed.
    pub fn final_computed(&self) -> usize {
        self.prompt_tokens + self.request.max_tokens - 1
    }
}
