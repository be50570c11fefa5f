//! Continuous batching in the manner of vLLM V1: decides what runs in each step, and keeps every request's books.
//!
//! A step takes running requests first, in order of admission (a decode takes one token of the budget, or one and its
//! drafts), then waiting ones, first come first served, splitting prompts to fill the budget when `chunked_prefill` is
//! on. Blocks are taken on demand. When none is free the most recently admitted request is preempted: it gives back
//! all it holds, keeps its generated tokens, goes to the head of the queue and is computed again; nothing is admitted
//! in that step.
//!
//! With steps in flight a schedule may be made before the last step's tokens are known. Lengths are known in advance,
//! so no request is ever scheduled past its last token; a stop token is seen late, and what was computed beyond it is
//! dropped.
//!
//! Invariants: a live request is in exactly one of `running` and `waiting`; `running` is in order of admission; only a
//! running request holds blocks; the sum of an entry list's tokens never exceeds the budget.

mod sequence;
mod slab;

use std::collections::{HashMap, VecDeque};

use super::cache::Cache;
use super::config::{EngineConfig, Preemption, Speculation};
use super::device::{StepOutput, Ticket};
use super::request::{FinishReason, Request, RequestId};
use super::speculate::NgramIndex;
use super::step_report::{Event, HeldBack};
use sequence::Sequence;
use slab::Slab;

/// One sequence's part of a scheduled step.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    pub key: usize,
    pub id: RequestId,
    /// Tokens computed before this step.
    pub context: usize,
    /// Input tokens, drafts not counted.
    pub input: usize,
    pub drafts: usize,
    /// A token is sampled: the input reaches the end of what is known.
    pub samples: bool,
    pub decode: bool,
    /// The one input token is the one sampled there, in a step in flight.
    pub source: Option<(Ticket, usize)>,
}

/// A step as scheduled, with the counts its report needs.
#[derive(Debug, Default)]
pub struct ScheduledStep {
    pub entries: Vec<Entry>,
    pub events: Vec<Event>,
    pub recomputed_tokens: usize,
    pub preemptions: usize,
    pub running: usize,
    pub waiting: usize,
    pub blocks_used: usize,
    pub slots_used: usize,
    pub held_back_by: Option<HeldBack>,
}

/// What the results of a step amounted to.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Completed {
    pub accepted: usize,
    pub overrun_tokens: usize,
}

pub struct Scheduler {
    max_num_seqs: usize,
    token_budget: usize,
    chunked_prefill: bool,
    preemption: Preemption,
    /// Shortest and longest suffix looked up, and drafts a step, when speculation is on.
    ngram: Option<(usize, usize, usize)>,
    cache: Cache,
    sequences: Slab<Sequence>,
    by_id: HashMap<RequestId, usize>,
    running: Vec<usize>,
    waiting: VecDeque<usize>,
    finished: Vec<usize>,
}

impl Scheduler {
    pub fn new(config: &EngineConfig, cache: Cache) -> Self {
        Self {
            max_num_seqs: config.max_num_seqs,
            token_budget: config.max_num_batched_tokens,
            chunked_prefill: config.chunked_prefill,
            preemption: config.preemption,
            ngram: match config.speculation {
                Speculation::Off => None,
                Speculation::Ngram => Some((config.ngram_min, config.ngram_max, config.speculative_tokens)),
            },
            cache,
            sequences: Slab::default(),
            by_id: HashMap::new(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            finished: Vec::new(),
        }
    }

    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    pub fn cache_mut(&mut self) -> &mut Cache {
        &mut self.cache
    }

    /// Nothing runs and nothing waits. Results of steps in flight may still be due, for requests that are gone.
    pub fn is_empty(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Tokens, block table, slot and drafts of an entry of a step that was scheduled last.
    pub fn sequence(&self, entry: &Entry) -> &Sequence {
        &self.sequences[entry.key]
    }

    /// Puts a request, already checked, at the end of the queue.
    pub fn add(&mut self, id: RequestId, request: Request) {
        let longest = request.prompt.len() + request.max_tokens;
        let index = self.ngram.map(|(min, max, _)| NgramIndex::new(min, max, &request.prompt, longest));
        let key = self.sequences.insert(Sequence::new(id, request, index));
        self.by_id.insert(id, key);
        self.waiting.push_back(key);
    }

    /// Ends a request now; results of it still in flight will be dropped. False when it is not live.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        let Some(&key) = self.by_id.get(&id) else { return false };
        self.running.retain(|&other| other != key);
        self.waiting.retain(|&other| other != key);
        self.remove(key);
        true
    }

    /// Decides the next step. No entries: nothing can run before a step in flight has ended.
    pub fn schedule(&mut self) -> ScheduledStep {
        let mut step = ScheduledStep::default();
        step.entries.reserve(self.running.len() + 8);
        let mut budget = self.token_budget;
        self.continue_running(&mut step, &mut budget);
        step.held_back_by = if self.waiting.is_empty() {
            None
        } else if step.preemptions > 0 {
            Some(HeldBack::Blocks)
        } else {
            self.admit_waiting(&mut step, budget)
        };
        step.running = self.running.len();
        step.waiting = self.waiting.len();
        step.blocks_used = self.cache.blocks_used();
        step.slots_used = self.cache.slots_used();
        step
    }

    fn continue_running(&mut self, step: &mut ScheduledStep, budget: &mut usize) {
        let mut position = 0;
        while position < self.running.len() && *budget > 0 {
            let key = self.running[position];
            let sequence = &mut self.sequences[key];
            let pending = sequence.len() - sequence.computed;
            if pending == 0 || sequence.remaining() == 0 {
                // All its tokens are computed or in flight; it leaves when they are known.
                position += 1;
                continue;
            }
            let input = pending.min(*budget);
            // Every running request behind this one keeps a token of the budget.
            let behind = self.running.len() - position - 1;
            let room = (*budget - input).saturating_sub(behind).min(sequence.remaining() - 1);
            sequence.drafts.clear();
            if let (Some((_, _, most)), Some(index)) = (self.ngram, sequence.index.as_mut())
                && input == pending
                && sequence.computed >= sequence.prefill_until
            {
                index.propose(&sequence.tokens, most.min(room), &mut sequence.drafts);
            }
            if !self.make_room(step, key, input) {
                // It was the newest itself, and is back in the queue.
                break;
            }
            let (entry, recomputed) = self.enter(key, input);
            *budget -= entry.input + entry.drafts;
            step.recomputed_tokens += recomputed;
            step.entries.push(entry);
            position += 1;
        }
    }

    /// Blocks for `input` tokens and the drafts of a running request, preempting newer ones if need be. Drafts are
    /// dropped rather than cost another request its place. False when the request itself had to go.
    fn make_room(&mut self, step: &mut ScheduledStep, key: usize, input: usize) -> bool {
        loop {
            let sequence = &mut self.sequences[key];
            let tokens = sequence.computed + input + sequence.drafts.len();
            if self.cache.grow(&mut sequence.holding, tokens) {
                return true;
            }
            if !sequence.drafts.is_empty() {
                sequence.drafts.clear();
                continue;
            }
            // `key` is in `running`, so there is one to take, and the loop ends with `key` at the latest.
            let Some(victim) = self.running.pop() else { return false };
            self.preempt(step, victim);
            if victim == key {
                return false;
            }
        }
    }

    fn preempt(&mut self, step: &mut ScheduledStep, key: usize) {
        let sequence = &mut self.sequences[key];
        self.cache.release(&mut sequence.holding);
        step.events.push(Event::Preempted { request: sequence.id, computed_tokens: sequence.computed });
        step.preemptions += 1;
        // Generated tokens stay known; everything is computed again from position 0.
        sequence.computed = 0;
        sequence.drafts.clear();
        self.waiting.push_front(key);
    }

    /// Admits from the head of the queue until something is short; says what.
    fn admit_waiting(&mut self, step: &mut ScheduledStep, mut budget: usize) -> Option<HeldBack> {
        while let Some(&key) = self.waiting.front() {
            if self.running.len() >= self.max_num_seqs {
                return Some(HeldBack::Seats);
            }
            let sequence = &mut self.sequences[key];
            if budget == 0 || sequence.in_flight > 0 {
                // (Preempted with a token in flight: it can be admitted once that token is known.)
                return Some(HeldBack::TokenBudget);
            }
            let known = sequence.tokens.len();
            let promise = (self.preemption == Preemption::Never).then(|| sequence.final_computed());
            let chunked = self.chunked_prefill;
            let admitted = self.cache.admit(&mut sequence.holding, &sequence.tokens, promise, |cached| {
                let pending = known - cached;
                (chunked || pending <= budget).then(|| pending.min(budget))
            });
            let admitted = match admitted {
                Ok(admitted) => admitted,
                Err(reason) => return Some(reason),
            };
            sequence.computed = admitted.cached_tokens;
            sequence.prefill_until = known;
            step.events.push(Event::Scheduled { request: sequence.id, again: sequence.admitted_before });
            sequence.admitted_before = true;
            self.waiting.pop_front();
            self.running.push(key);
            let (entry, recomputed) = self.enter(key, admitted.new_tokens);
            budget -= entry.input;
            step.recomputed_tokens += recomputed;
            step.entries.push(entry);
        }
        None
    }

    /// Books `input` tokens and the drafts of a sequence as computed by this step. Also returns how many of them had been
    /// computed before a preemption.
    fn enter(&mut self, key: usize, input: usize) -> (Entry, usize) {
        let sequence = &mut self.sequences[key];
        let context = sequence.computed;
        let drafts = sequence.drafts.len();
        let samples = context + input == sequence.len();
        let recomputed = sequence.high_water.min(context + input).saturating_sub(context);
        let source = if context >= sequence.tokens.len() { sequence.sampled_by } else { None };
        sequence.computed += input;
        sequence.high_water = sequence.high_water.max(sequence.computed);
        if samples {
            sequence.in_flight += 1;
        }
        let decode = context >= sequence.prefill_until;
        let entry = Entry { key, id: sequence.id, context, input, drafts, samples, decode, source };
        (entry, recomputed)
    }

    /// The step is on the device under `ticket`.
    pub fn submitted(&mut self, step: &ScheduledStep, ticket: Ticket) {
        for (position, entry) in step.entries.iter().enumerate() {
            let sequence = &mut self.sequences[entry.key];
            if entry.samples {
                sequence.sampled_by = Some((ticket, position));
            }
            if self.cache.prefix_caching() {
                self.cache.publish(&mut sequence.holding, &sequence.tokens, sequence.computed);
            }
        }
    }

    /// Takes in the results of a step, in the order steps were submitted.
    pub fn complete(
        &mut self,
        step: &ScheduledStep,
        output: StepOutput,
        events: &mut Vec<Event>,
    ) -> Completed {
        let mut completed = Completed::default();
        for (entry, result) in step.entries.iter().zip(output.sequences) {
            if !entry.samples {
                continue;
            }
            let live = self.sequences.get_mut(entry.key).filter(|sequence| sequence.id == entry.id);
            let Some(sequence) = live else {
                completed.overrun_tokens += result.tokens.len();
                continue;
            };
            sequence.in_flight -= 1;
            completed.accepted += result.accepted;
            // Positions of rejected drafts are computed again. (Speculation never overlaps steps, so nothing else moved
            // `computed`; a preempted request starts from 0 in any case.)
            if entry.drafts > 0 && sequence.computed == entry.context + entry.input {
                sequence.computed += result.accepted;
                sequence.high_water = sequence.high_water.max(sequence.computed);
            }
            let mut tokens = result.tokens;
            let stop = if sequence.request.ignore_eos {
                None
            } else {
                tokens.iter().position(|token| sequence.request.stop_tokens.contains(token))
            };
            if let Some(stop) = stop {
                completed.overrun_tokens += tokens.len() - stop - 1;
                tokens.truncate(stop + 1);
            }
            sequence.tokens.extend_from_slice(&tokens);
            let generated = sequence.tokens.len() - sequence.prompt_tokens;
            events.push(Event::Tokens { request: entry.id, tokens });
            let reason = if stop.is_some() {
                FinishReason::Stop
            } else if generated >= sequence.request.max_tokens {
                FinishReason::Length
            } else {
                continue;
            };
            events.push(Event::Finished { request: entry.id, reason });
            self.finished.push(entry.key);
        }
        self.remove_finished();
        completed
    }

    fn remove_finished(&mut self) {
        if self.finished.is_empty() {
            return;
        }
        let finished = std::mem::take(&mut self.finished);
        let sequences = &mut self.sequences;
        for &key in &finished {
            let sequence = &mut sequences[key];
            self.cache.release(&mut sequence.holding);
            self.by_id.remove(&sequence.id);
            sequences.remove(key);
        }
        self.running.retain(|&key| sequences.contains(key));
        // A request whose last token was in flight may have been preempted meanwhile.
        self.waiting.retain(|&key| sequences.contains(key));
    }

    fn remove(&mut self, key: usize) {
        let sequence = &mut self.sequences[key];
        self.cache.release(&mut sequence.holding);
        self.by_id.remove(&sequence.id);
        self.sequences.remove(key);
    }
}
