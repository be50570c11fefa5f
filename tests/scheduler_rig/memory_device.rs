//! A device with memory and no arithmetic: KV blocks hold the tokens themselves and a state slot holds a hash of all
//! tokens so far, so any block or slot that is shared, stale, lost or too small shows at once.
//!
//! The next token is a hash of the whole text, hence of every context read back through the block table: output that
//! equals [`expected`] proves that each step saw the right cache.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};

use inferwall::Result;
use inferwall::engine::clock::Clock;
use inferwall::engine::config::{EngineConfig, KvLayout};
use inferwall::engine::device::{
    CachePlan, Input, Model, SequenceOutput, Session, Step, StepOutput, Ticket, Want,
};
use inferwall::engine::model::layout::ModelLayout;
use inferwall::engine::request::Request;
use inferwall::engine::sampling::{draw_bits, mix64};

/// A small vocabulary, so that texts repeat themselves and drafts are made and sometimes right.
pub const VOCABULARY: u64 = 3;

fn extend(hash: u64, token: u32) -> u64 {
    mix64(hash ^ (u64::from(token) + 1))
}

fn next_token(hash: u64, seed: u64, position: u64) -> u32 {
    // Mostly a function of the last few bits of text, as real text is predictable.
    let bits = draw_bits(seed, position) ^ hash;
    (mix64(bits) % VOCABULARY) as u32
}

/// What a request must generate, computed alone and with no cache at all.
pub fn expected(request: &Request) -> Vec<u32> {
    let mut hash = request.prompt.iter().fold(0, |hash, &token| extend(hash, token));
    let mut output = Vec::new();
    while output.len() < request.max_tokens {
        let position = (request.prompt.len() + output.len()) as u64;
        let token = next_token(hash, request.seed, position);
        hash = extend(hash, token);
        output.push(token);
        if !request.ignore_eos && request.stop_tokens.contains(&token) {
            break;
        }
    }
    output
}

/// Steps as submitted: request, context, new tokens, drafts of each sequence.
pub type Log = Arc<Mutex<Vec<Vec<(u64, usize, usize, usize)>>>>;

pub struct MemoryModel {
    pub layout: ModelLayout,
    pub log: Log,
}

impl Model for MemoryModel {
    fn layout(&self) -> &ModelLayout {
        &self.layout
    }

    fn memory_bytes(&self) -> u64 {
        0
    }

    fn open(&self, plan: &CachePlan, _config: &EngineConfig, clock: &Clock) -> Result<Box<dyn Session>> {
        Ok(Box::new(MemorySession {
            plan: plan.clone(),
            clock: clock.clone(),
            log: self.log.clone(),
            tokens: HashMap::new(),
            states: HashMap::new(),
            queue: VecDeque::new(),
            sampled: HashMap::new(),
            next: 0,
        }))
    }
}

struct MemorySession {
    plan: CachePlan,
    clock: Clock,
    log: Log,
    /// (block, offset) -> token.
    tokens: HashMap<(u32, usize), u32>,
    /// Slot -> hash of the text after each of its tokens.
    states: HashMap<u32, Vec<u64>>,
    queue: VecDeque<(Ticket, StepOutput)>,
    /// (step, sequence) -> last token sampled.
    sampled: HashMap<(Ticket, usize), u32>,
    next: u64,
}

impl MemorySession {
    fn cell(&self, blocks: &[u32], position: usize) -> (u32, usize) {
        (blocks[position / self.plan.block_tokens], position % self.plan.block_tokens)
    }

    fn check_tables(&self, step: &Step) {
        let mut slots = HashSet::new();
        let mut written = HashSet::new();
        let mut requests = HashSet::new();
        for sequence in &step.sequences {
            assert!(requests.insert(sequence.request), "{:?} twice in a step", sequence.request);
            let new = sequence.input.tokens() + sequence.drafts.len();
            assert!(new > 0 && sequence.drafts.len() <= self.plan.max_drafts);
            let end = sequence.context_tokens + new;
            assert!(
                sequence.blocks.len() * self.plan.block_tokens >= end,
                "blocks do not cover the new tokens"
            );
            let first = usize::from(self.plan.layout == KvLayout::Unified);
            assert!(
                sequence.blocks.iter().all(|&block| (first..self.plan.kv_blocks).contains(&(block as usize)))
            );
            for position in sequence.context_tokens..end {
                assert!(written.insert(self.cell(sequence.blocks, position)), "two sequences write one cell");
            }
            if let Some(slot) = sequence.state_slot {
                assert!(
                    (slot as usize) < self.plan.state_slots && slots.insert(slot),
                    "slot {slot} used twice"
                );
            }
            assert_eq!(sequence.state_slot.is_some(), self.plan.state_slots > 0);
        }
        for sequence in &step.sequences {
            for position in 0..sequence.context_tokens {
                let cell = self.cell(sequence.blocks, position);
                assert!(!written.contains(&cell), "a cell is read as context and written in one step");
            }
        }
        assert!(step.sequences.len() <= self.plan.max_num_seqs);
    }
}

impl Session for MemorySession {
    fn submit(&mut self, step: &Step) -> Result<Ticket> {
        self.check_tables(step);
        let ticket = Ticket(self.next);
        self.next += 1;
        let mut log = Vec::new();
        // Every context is read before anything is written.
        let mut hashes = Vec::new();
        for sequence in &step.sequences {
            let mut hash = 0;
            for position in 0..sequence.context_tokens {
                hash = extend(hash, self.tokens[&self.cell(sequence.blocks, position)]);
            }
            if let Some(slot) = sequence.state_slot {
                let history = self.states.entry(slot).or_default();
                assert!(
                    history.len() >= sequence.context_tokens,
                    "the state of {:?} is lost",
                    sequence.request
                );
                history.truncate(sequence.context_tokens);
                let state = history.last().copied().unwrap_or(0);
                assert_eq!(state, hash, "slot {slot} does not hold the state of {:?}", sequence.request);
            }
            hashes.push(hash);
        }
        let mut outputs = Vec::new();
        for (index, (sequence, mut hash)) in step.sequences.iter().zip(hashes).enumerate() {
            let input = match sequence.input {
                Input::Known(tokens) => tokens.to_vec(),
                Input::SampledBy { ticket, sequence } => {
                    assert!(ticket.0 + 2 > self.next - 1, "sampled by a step that is not in flight");
                    vec![self.sampled[&(ticket, sequence)]]
                }
            };
            log.push((sequence.request.0, sequence.context_tokens, input.len(), sequence.drafts.len()));
            let mut output = SequenceOutput::default();
            let last_input = input.len() - 1;
            for (offset, &token) in input.iter().chain(sequence.drafts).enumerate() {
                let cell = self.cell(sequence.blocks, sequence.context_tokens + offset);
                self.tokens.insert(cell, token);
                hash = extend(hash, token);
                if let Some(slot) = sequence.state_slot {
                    self.states.entry(slot).or_default().push(hash);
                }
                let Want::Sample { seed, position, .. } = sequence.want else { continue };
                assert_eq!(position, (sequence.context_tokens + input.len()) as u64);
                // After the last input token, and after each draft that was right.
                let due = offset.checked_sub(last_input);
                if due.is_some_and(|due| {
                    due == output.tokens.len() && (due == 0 || output.tokens[due - 1] == token)
                }) {
                    output.tokens.push(next_token(hash, seed, position + output.tokens.len() as u64));
                }
            }
            output.accepted = output.tokens.len().saturating_sub(1);
            if let Some(&token) = output.tokens.last() {
                self.sampled.insert((ticket, index), token);
            }
            outputs.push(output);
        }
        self.log.lock().unwrap().push(log);
        let start_s =
            self.queue.back().map_or(self.clock.now(), |(_, output)| output.end_s.max(self.clock.now()));
        let output = StepOutput {
            sequences: outputs,
            start_s,
            end_s: start_s + 1e-3,
            device_s: 1e-3,
            moved_bytes: None,
            kernels: Vec::new(),
        };
        self.queue.push_back((ticket, output));
        assert!(self.queue.len() <= 2, "more than two steps in flight");
        Ok(ticket)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOutput> {
        let (oldest, output) = self.queue.pop_front().expect("a step in flight");
        assert_eq!(oldest, ticket);
        self.clock.wait_until(output.end_s);
        Ok(output)
    }
}
