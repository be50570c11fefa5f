//! Who holds which block and which state slot. [`plan`] sizes the pools, [`shape`] knows the bytes and the unified
//! layout's arithmetic, [`pool`] hands out blocks, [`prefix`] finds blocks of equal prompts.
//!
//! Invariants: everything a request holds is in its [`Holding`], and only [`Cache`] changes one; a holding is given
//! back exactly once, when its request finishes or is preempted. Blocks and slots given back may still be written by
//! a step in flight: a device runs steps in order, so whoever gets them next starts after that.

pub mod plan;
pub mod pool;
pub mod prefix;
pub mod shape;

use super::config::KvLayout;
use super::device::CachePlan;
use super::step_report::HeldBack;
use crate::{Error, Result};
use pool::BlockPool;
use prefix::PrefixCache;
use shape::CacheShape;

/// What one request holds.
#[derive(Debug, Default)]
pub struct Holding {
    /// Attention blocks in order of position.
    pub blocks: Vec<u32>,
    /// Device slot of the recurrent state; `None` for dense models.
    pub slot: Option<u32>,
    /// Unified layout: blocks that stand for the recurrent state.
    state_blocks: Vec<u32>,
    /// Blocks promised to this request and not yet taken (`preemption = never`).
    promised: usize,
    prefix: prefix::Chain,
}

#[derive(Debug)]
pub struct Cache {
    pool: BlockPool,
    free_slots: Vec<u32>,
    slots_total: usize,
    hybrid: bool,
    block_tokens: usize,
    /// State blocks of a request (unified, hybrid).
    state_blocks: usize,
    /// Blocks promised to running requests and not yet taken: free, but not for others.
    promised: usize,
    prefix: Option<PrefixCache>,
}

impl Cache {
    /// Empty pools of the plan's sizes.
    ///
    /// # Errors
    /// [`Error::Invalid`] for prefix caching with a hybrid model.
    pub fn new(shape: &CacheShape, plan: &CachePlan, prefix_caching: bool) -> Result<Self> {
        if prefix_caching && shape.is_hybrid() {
            return Err(Error::invalid(
                "prefix_caching = true with a hybrid model: its recurrent state after a prefix is not kept in blocks, \
                 so a cached prefix could not be continued",
                "set prefix_caching=false, or use a dense model (qwen2, qwen3, llama)",
            ));
        }
        let unified = plan.layout == KvLayout::Unified;
        Ok(Self {
            pool: BlockPool::new(plan.kv_blocks, unified),
            free_slots: (0..plan.state_slots as u32).rev().collect(),
            slots_total: plan.state_slots,
            hybrid: shape.is_hybrid(),
            block_tokens: plan.block_tokens,
            state_blocks: if unified { shape.unified_state_blocks() } else { 0 },
            promised: 0,
            prefix: prefix_caching.then(|| PrefixCache::new(plan.kv_blocks, plan.block_tokens)),
        })
    }

    pub fn blocks_total(&self) -> usize {
        self.pool.usable()
    }

    pub fn blocks_used(&self) -> usize {
        self.pool.used()
    }

    pub fn slots_total(&self) -> usize {
        self.slots_total
    }

    pub fn slots_used(&self) -> usize {
        self.slots_total - self.free_slots.len()
    }

    /// Blocks that a request holds once `tokens` of its tokens are computed.
    pub fn request_blocks(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens) + self.state_blocks
    }

    /// Gives a new request its slot and blocks for its first `first_tokens` tokens beyond those found in the prefix
    /// cache; with `promise_tokens`, blocks for that many tokens in all are set aside for it. Returns the tokens
    /// found in the prefix cache. Nothing changes when it fails.
    ///
    /// `limit` bounds what may be computed in this step, given the tokens found; it returns how many will be.
    ///
    /// # Errors
    /// What held the request back.
    pub fn admit(
        &mut self,
        holding: &mut Holding,
        tokens: &[u32],
        promise_tokens: Option<usize>,
        limit: impl FnOnce(usize) -> Option<usize>,
    ) -> Result<Admitted, HeldBack> {
        debug_assert!(holding.blocks.is_empty() && holding.slot.is_none());
        if self.hybrid && self.free_slots.is_empty() {
            // In the unified layout there are as many slots as the pool could ever seat.
            return Err(if self.state_blocks > 0 { HeldBack::Blocks } else { HeldBack::StateSlots });
        }
        let mut found = Vec::new();
        if let Some(prefix) = &self.prefix {
            prefix.find(&mut holding.prefix, tokens, &mut found);
        }
        let cached_tokens = found.len() * self.block_tokens;
        let Some(new_tokens) = limit(cached_tokens) else {
            return Err(HeldBack::TokenBudget);
        };
        let first = (cached_tokens + new_tokens).div_ceil(self.block_tokens);
        let promised = promise_tokens.map_or(first, |all| all.div_ceil(self.block_tokens)).max(first);
        let found_free = found.iter().filter(|&&block| self.pool.owners(block) == 0).count();
        let must_be_free = promised - found.len() + found_free + self.state_blocks;
        if self.pool.free() - self.promised < must_be_free {
            return Err(HeldBack::Blocks);
        }
        for &block in &found {
            self.pool.share(block);
        }
        holding.prefix.skip(found.len());
        holding.blocks = found;
        self.take_blocks(holding, first);
        for _ in 0..self.state_blocks {
            holding.state_blocks.extend(self.pool.take());
        }
        holding.promised = promised - first;
        self.promised += holding.promised;
        if self.hybrid {
            holding.slot = self.free_slots.pop();
        }
        Ok(Admitted { cached_tokens, new_tokens })
    }

    /// Makes the blocks of a running request cover `tokens` tokens. False, with nothing changed, when too few are free.
    pub fn grow(&mut self, holding: &mut Holding, tokens: usize) -> bool {
        let wanted = tokens.div_ceil(self.block_tokens);
        let missing = wanted.saturating_sub(holding.blocks.len());
        if missing == 0 {
            return true;
        }
        let from_promise = missing.min(holding.promised);
        if self.pool.free() - self.promised < missing - from_promise {
            return false;
        }
        holding.promised -= from_promise;
        self.promised -= from_promise;
        self.take_blocks(holding, wanted);
        true
    }

    /// Gives back all that a request holds. Its last blocks are freed first, so that a shared prefix outlives its tail.
    pub fn release(&mut self, holding: &mut Holding) {
        for block in holding.blocks.drain(..).rev() {
            self.pool.give_back(block);
        }
        for block in holding.state_blocks.drain(..) {
            self.pool.give_back(block);
        }
        self.free_slots.extend(holding.slot.take());
        self.promised -= holding.promised;
        holding.promised = 0;
        holding.prefix.rewind();
    }

    /// Makes the full blocks among the first `computed` tokens findable by later requests. To be called once the step
    /// that computes them is submitted, never before: a block must not be found by a request of the same step.
    pub fn publish(&mut self, holding: &mut Holding, tokens: &[u32], computed: usize) {
        if let Some(prefix) = &mut self.prefix {
            let known = computed.min(tokens.len());
            prefix.publish(&mut holding.prefix, &tokens[..known], &holding.blocks);
        }
    }

    pub fn prefix_caching(&self) -> bool {
        self.prefix.is_some()
    }

    /// Callers have checked that enough are free, so every `take` succeeds.
    fn take_blocks(&mut self, holding: &mut Holding, wanted: usize) {
        while holding.blocks.len() < wanted {
            let Some(block) = self.pool.take() else { break };
            if let Some(prefix) = &mut self.prefix {
                prefix.forget(block);
            }
            holding.blocks.push(block);
        }
        debug_assert_eq!(holding.blocks.len(), wanted.max(holding.blocks.len()));
    }
}

/// What a request got when it was admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admitted {
    pub cached_tokens: usize,
    pub new_tokens: usize,
}
