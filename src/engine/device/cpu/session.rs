//! A session: pools, buffers, and the steps submitted but not yet run.
//!
//! `submit` copies and checks the step and returns; `wait` runs it, on the calling thread and the pool. The host's work
//! between the two is a few microseconds, which a thread of its own for the device would cost in hand-overs.

use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use super::attention::RopeTable;
use super::batch::{Batch, OwnedInput};
use super::cache::{KvPool, SlotMeta, StatePool};
use super::capture::Capture;
use super::forward::{Buffers, Forward};
use super::model::{Weights, lock};
use super::output::{Head, HeadBuffers};
use super::pool::Pool;
use super::trace::Trace;
use crate::engine::clock::Clock;
use crate::engine::device::check::StepBounds;
use crate::engine::device::{CachePlan, Session, Step, StepOutput, Ticket};
use crate::{Error, Result};

/// Steps whose sampled tokens can still be named by a later step's input.
const REMEMBERED_STEPS: usize = 4;

pub struct CpuSession {
    weights: Arc<Weights>,
    pool: Arc<Mutex<Pool>>,
    clock: Clock,
    kv: Option<KvPool>,
    state: Option<StatePool>,
    rope: RopeTable,
    bounds: StepBounds,
    buffers: Buffers,
    head: HeadBuffers,
    queued: VecDeque<(Ticket, Batch)>,
    next: u64,
    /// The last token sampled for each sequence of recent steps.
    sampled: VecDeque<(Ticket, Vec<Option<u32>>)>,
    /// Takes the inputs of linear modules, for a calibration.
    pub capture: Option<Capture>,
}

impl CpuSession {
    pub fn open(
        weights: &Arc<Weights>,
        pool: &Arc<Mutex<Pool>>,
        plan: &CachePlan,
        clock: &Clock,
    ) -> Result<Self> {
        let spec = weights.spec();
        let kv = if spec.attention_layers() > 0 { Some(KvPool::new(spec, plan)?) } else { None };
        let state = match &spec.delta_net {
            Some(delta) => Some(StatePool::new(delta, spec.delta_net_layers(), plan)?),
            None => None,
        };
        let bounds = StepBounds::new(spec, plan);
        Ok(Self {
            weights: Arc::clone(weights),
            pool: Arc::clone(pool),
            clock: clock.clone(),
            kv,
            state,
            rope: RopeTable::new(&spec.attention, bounds.positions),
            bounds,
            buffers: Buffers::default(),
            head: HeadBuffers::default(),
            queued: VecDeque::new(),
            next: 0,
            sampled: VecDeque::new(),
            capture: None,
        })
    }

    /// The token ids of all rows, sampled ones looked up.
    fn tokens(&self, batch: &Batch) -> Result<Vec<u32>> {
        let mut tokens = Vec::with_capacity(batch.rows);
        for sequence in &batch.sequences {
            match &sequence.input {
                OwnedInput::Known(ids) => tokens.extend_from_slice(ids),
                OwnedInput::SampledBy { ticket, sequence: index } => {
                    let step = self.sampled.iter().find(|(of, _)| of == ticket);
                    match step.and_then(|(_, sampled)| sampled.get(*index).copied().flatten()) {
                        Some(token) => tokens.push(token),
                        None => {
                            return Err(Error::bug(format!(
                                "step {} sampled no token for its sequence {index}",
                                ticket.0
                            )));
                        }
                    }
                }
            }
            tokens.extend_from_slice(&sequence.drafts);
        }
        Ok(tokens)
    }

    fn run(&mut self, ticket: Ticket, mut batch: Batch) -> Result<StepOutput> {
        let start_s = self.clock.now();
        let tokens = self.tokens(&batch)?;
        if let Some(state) = &mut self.state {
            for sequence in &mut batch.sequences {
                sequence.replay = state.replay(sequence.slot, sequence.context)?;
                state.slots[sequence.slot] =
                    SlotMeta { tokens: sequence.context + sequence.kept, stashed: sequence.drafts.len() };
            }
        }
        let mut trace = Trace::new(&self.clock, batch.trace);
        let mut pool = lock(&self.pool);
        let mut forward = Forward {
            pool: &mut pool,
            weights: &self.weights,
            buffers: &mut self.buffers,
            kv: self.kv.as_ref(),
            state: self.state.as_ref(),
            rope: &self.rope,
            batch: &batch,
            trace: &mut trace,
            not_finite: AtomicU64::new(u64::MAX),
            capture: self.capture.as_mut(),
        };
        forward.run(&tokens)?;
        let sequences = Head::new(&mut forward, &mut self.head).run()?;
        let sampled = sequences.iter().map(|sequence| sequence.tokens.last().copied()).collect();
        self.sampled.push_back((ticket, sampled));
        if self.sampled.len() > REMEMBERED_STEPS {
            self.sampled.pop_front();
        }
        let end_s = self.clock.now();
        let (bytes, kernels) = trace.take();
        let device_s = end_s - start_s;
        Ok(StepOutput { sequences, start_s, end_s, device_s, moved_bytes: Some(bytes), kernels })
    }
}

impl Session for CpuSession {
    fn submit(&mut self, step: &Step) -> Result<Ticket> {
        self.bounds.check(step)?;
        let batch = Batch::new(step);
        let ticket = Ticket(self.next);
        self.next += 1;
        self.queued.push_back((ticket, batch));
        Ok(ticket)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOutput> {
        match self.queued.pop_front() {
            Some((queued, batch)) if queued == ticket => self.run(ticket, batch),
            other => {
                let found = other.map_or("none is queued".to_string(), |(queued, batch)| {
                    self.queued.push_front((queued, batch));
                    format!("step {} comes first", queued.0)
                });
                Err(Error::bug(format!("waited for step {}, but {found}", ticket.0)))
            }
        }
    }
}
