//! The serving engine, called in-process. It knows nothing of experiments.
//!
//! [`Engine::submit`] queues a request; [`Engine::step`] runs the engine until one more step has ended and reports it.
//! There is no thread and no clock of its own: whoever calls decides when arrivals are seen, which is between steps.
//!
//! With `async_scheduling` 0 or 1, a step is scheduled from the results of the one before; 1 does the accounting of a
//! step while the device runs it. With 2, one step is always queued behind the one that runs: step n + 2 is scheduled
//! when n ends, so an arrival waits for all of n + 1, and what a finished request held returns one step late.

pub mod account;
pub mod cache;
pub mod clock;
pub mod config;
pub mod device;
mod evaluate;
pub mod model;
pub mod request;
pub mod sampling;
mod scheduler;
pub mod speculate;
pub mod step_report;
pub mod tokenizer;

use std::collections::VecDeque;

use self::account::{Ceilings, CostModel, SequenceShape, StepCost};
use self::cache::Cache;
use self::cache::shape::CacheShape;
use self::clock::Clock;
use self::config::{EngineConfig, Speculation};
use self::device::{CachePlan, Input, Model, SequenceStep, Session, Step, Ticket, TraceEnd, Want};
use self::request::{FinishReason, Request, RequestId};
use self::scheduler::{ScheduledStep, Scheduler};
use self::step_report::{Event, StepKind, StepReport};
use crate::{Error, Result};

pub struct Engine {
    session: Box<dyn Session>,
    scheduler: Scheduler,
    clock: Clock,
    plan: CachePlan,
    config: EngineConfig,
    costs: CostModel,
    ceilings: Option<Ceilings>,
    vocab_size: usize,
    /// Steps that may be in flight when the engine waits: 1 or 2.
    depth: usize,
    in_flight: VecDeque<InFlight>,
    /// Events of no step (cancellations, a schedule that only preempted), for the next step that is scheduled.
    pending_events: Vec<Event>,
    next_request: u64,
    next_step: u64,
    trace: bool,
    shapes: Vec<SequenceShape>,
}

struct InFlight {
    ticket: Ticket,
    step: ScheduledStep,
    cost: StepCost,
    host_s: f64,
}

impl Engine {
    /// Opens a session of `model` with pools of `plan`; `ceilings` are what steps are judged by. `config.async_scheduling` of `None` counts as 1: the caller
    /// knows the device's own default. N-gram speculation needs a step's tokens before it can propose the next ones,
    /// so it always schedules synchronously.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a knob out of bounds or prefix caching of a hybrid model; what the device says when its
    /// pools cannot be allocated.
    pub fn new(
        model: &dyn Model,
        plan: CachePlan,
        config: EngineConfig,
        ceilings: Option<Ceilings>,
        clock: Clock,
    ) -> Result<Self> {
        config.validate()?;
        let layout = model.layout();
        let shape = CacheShape::new(&layout.spec, plan.kv_dtype, plan.state_dtype, plan.max_drafts);
        let cache = Cache::new(&shape, &plan, config.prefix_caching)?;
        let session = model.open(&plan, &config, &clock)?;
        let depth = match config.speculation {
            Speculation::Off => config.async_scheduling.unwrap_or(1).max(1),
            Speculation::Ngram => 1,
        };
        Ok(Self {
            session,
            scheduler: Scheduler::new(&config, cache),
            clock,
            costs: CostModel::new(layout, &plan),
            ceilings,
            vocab_size: layout.spec.vocab_size,
            depth,
            in_flight: VecDeque::with_capacity(depth),
            pending_events: Vec::new(),
            next_request: 0,
            next_step: 0,
            trace: false,
            shapes: Vec::new(),
            plan,
            config,
        })
    }

    /// Queues a request. It is seen by the next step that is scheduled.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it could never run: empty, longer than `max_model_len` or the whole pool, a token
    /// outside the vocabulary, sampling parameters out of bounds.
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        self.check(&request)?;
        let id = RequestId(self.next_request);
        self.next_request += 1;
        self.scheduler.add(id, request);
        Ok(id)
    }

    /// Ends a request now. Tokens of it in flight are dropped, and the next report has its
    /// [`FinishReason::Cancelled`]; unknown and finished requests are left alone.
    pub fn cancel(&mut self, id: RequestId) {
        if self.scheduler.cancel(id) {
            self.pending_events.push(Event::Finished { request: id, reason: FinishReason::Cancelled });
        }
    }

    /// No request is live and no step is in flight.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_empty() && self.in_flight.is_empty()
    }

    /// Schedules and submits steps until as many as `async_scheduling` says are in flight, then waits for the oldest.
    /// `None` when idle.
    ///
    /// # Errors
    /// What the device says; the engine is of no use afterwards.
    pub fn step(&mut self) -> Result<Option<StepReport>> {
        while self.in_flight.len() < self.depth {
            if !self.submit_step()? {
                break;
            }
        }
        let Some(oldest) = self.in_flight.pop_front() else {
            return if self.scheduler.is_empty() { Ok(None) } else { Err(self.stuck()) };
        };
        let mut output = self.session.wait(oldest.ticket)?;
        let woke_s = self.clock.now();
        let InFlight { ticket: _, mut step, mut cost, host_s } = oldest;
        if self.config.async_scheduling == Some(0) {
            cost = self.cost(&step);
        }
        let mut events = std::mem::take(&mut step.events);
        let scheduled_events = events.len();
        // (Some are left only when no later step was scheduled, which would have taken them.)
        events.append(&mut self.pending_events);
        let mut report = self.report(&step, cost);
        report.start_s = output.start_s;
        report.end_s = output.end_s;
        report.device_s = output.device_s;
        report.moved_bytes = output.moved_bytes;
        report.kernels = std::mem::take(&mut output.kernels);
        let completed = self.scheduler.complete(&step, output, &mut events);
        report.accepted = completed.accepted;
        report.overrun_tokens = completed.overrun_tokens;
        self.tell_before_the_end(&mut events, scheduled_events);
        report.events = events;
        report.host_s = host_s + (self.clock.now() - woke_s);
        Ok(Some(report))
    }

    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Whether the device records the kernels of the steps submitted from now on.
    pub fn set_trace(&mut self, on: bool) {
        self.trace = on;
    }

    /// Stops tracing and gives what is known only now. Tickets count steps as reports do: from 0, one a step. Call it
    /// when idle.
    ///
    /// # Errors
    /// What the device says.
    pub fn finish_trace(&mut self) -> Result<TraceEnd> {
        self.trace = false;
        self.session.finish_trace()
    }

    pub fn plan(&self) -> &CachePlan {
        &self.plan
    }

    /// KV blocks and state slots held by live requests now.
    pub fn held(&self) -> (usize, usize) {
        let cache = self.scheduler.cache();
        (cache.blocks_used(), cache.slots_used())
    }

    /// Schedules one step and hands it to the device. False when there is nothing that could run now.
    fn submit_step(&mut self) -> Result<bool> {
        let began_s = self.clock.now();
        let mut scheduled = self.scheduler.schedule();
        if scheduled.entries.is_empty() {
            // (A preemption alone: its request is back in the queue, and is met again by the next schedule.)
            self.pending_events.extend(scheduled.events);
            return Ok(false);
        }
        // What happened since the last schedule comes first: events are told in the order they happened.
        scheduled.events.splice(0..0, self.pending_events.drain(..));
        let ticket = self.session.submit(&device_step(&self.scheduler, &scheduled, self.trace))?;
        self.scheduler.submitted(&scheduled, ticket);
        // From here on the device is at work.
        let cost =
            if self.config.async_scheduling == Some(0) { StepCost::default() } else { self.cost(&scheduled) };
        let host_s = self.clock.now() - began_s;
        self.in_flight.push_back(InFlight { ticket, step: scheduled, cost, host_s });
        Ok(true)
    }

    fn cost(&mut self, scheduled: &ScheduledStep) -> StepCost {
        self.shapes.clear();
        self.shapes.extend(scheduled.entries.iter().map(|entry| SequenceShape {
            new_tokens: entry.input + entry.drafts,
            context_tokens: entry.context,
            sampled_rows: if entry.samples { 1 + entry.drafts } else { 0 },
            decode: entry.decode,
        }));
        self.costs.cost(&self.shapes, self.ceilings.as_ref())
    }

    /// A request may be preempted by a schedule made while its last token was still in flight, or just before it is
    /// cancelled. Its preemption is reported with its end then, at `position`, and not in the step after.
    fn tell_before_the_end(&mut self, events: &mut Vec<Event>, position: usize) {
        for later in self.in_flight.iter_mut().filter(|later| later.step.preemptions > 0) {
            let ended = |event: &Event| {
                let Event::Preempted { request, .. } = event else { return false };
                events
                    .iter()
                    .any(|other| matches!(other, Event::Finished { request: id, .. } if id == request))
            };
            let (early, rest): (Vec<Event>, Vec<Event>) = later.step.events.drain(..).partition(ended);
            later.step.events = rest;
            events.splice(position..position, early);
        }
    }

    /// A report of what was scheduled; times and results are still to come.
    fn report(&mut self, step: &ScheduledStep, cost: StepCost) -> StepReport {
        let index = self.next_step;
        self.next_step += 1;
        let cache = self.scheduler.cache();
        let mut report = StepReport {
            index,
            kind: StepKind::Mixed,
            start_s: 0.0,
            end_s: 0.0,
            device_s: 0.0,
            host_s: 0.0,
            decode_sequences: 0,
            decode_tokens: 0,
            prefill_sequences: 0,
            prefill_tokens: 0,
            recomputed_tokens: step.recomputed_tokens,
            drafted: 0,
            accepted: 0,
            overrun_tokens: 0,
            running: step.running,
            waiting: step.waiting,
            blocks_used: step.blocks_used,
            blocks_total: cache.blocks_total(),
            slots_used: step.slots_used,
            slots_total: cache.slots_total(),
            held_back_by: step.held_back_by,
            cost,
            events: Vec::new(),
            moved_bytes: None,
            kernels: Vec::new(),
        };
        for entry in &step.entries {
            if entry.decode {
                report.decode_sequences += 1;
                report.decode_tokens += entry.input;
                report.drafted += entry.drafts;
            } else {
                report.prefill_sequences += 1;
                report.prefill_tokens += entry.input;
            }
        }
        report.kind = match (report.decode_sequences, report.prefill_sequences) {
            (_, 0) => StepKind::Decode,
            (0, _) => StepKind::Prefill,
            _ => StepKind::Mixed,
        };
        report
    }

    fn check(&self, request: &Request) -> Result<()> {
        let prompt = request.prompt.len();
        if prompt == 0 || request.max_tokens == 0 {
            return Err(Error::invalid(
                format!("a request of {prompt} prompt tokens and {} output tokens", request.max_tokens),
                "a request needs at least one token of prompt and one of output",
            ));
        }
        let total = prompt.saturating_add(request.max_tokens);
        if total > self.plan.max_model_len {
            return Err(Error::invalid(
                format!(
                    "a request of {prompt} + {} tokens is longer than max_model_len = {}",
                    request.max_tokens, self.plan.max_model_len
                ),
                format!("set max_model_len={total} or shorten the request"),
            ));
        }
        self.check_tokens(&request.prompt)?;
        let cache = self.scheduler.cache();
        let blocks = cache.request_blocks(total - 1);
        if blocks > cache.blocks_total() {
            return Err(Error::invalid(
                format!(
                    "a request of {total} tokens takes {blocks} KV blocks, the pool has {} usable ones",
                    cache.blocks_total()
                ),
                "raise kv_blocks or shorten the request",
            ));
        }
        let sampling = &request.sampling;
        if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
            return Err(Error::invalid(
                format!("temperature = {} is out of bounds", sampling.temperature),
                "temperature must be 0 (greedy) or more",
            ));
        }
        if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
            return Err(Error::invalid(
                format!("top_p = {} is out of bounds", sampling.top_p),
                "top_p must be above 0 and at most 1",
            ));
        }
        Ok(())
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        match tokens.iter().position(|&token| token as usize >= self.vocab_size) {
            None => Ok(()),
            Some(position) => Err(Error::invalid(
                format!(
                    "token {} at position {position} is outside the vocabulary of {}",
                    tokens[position], self.vocab_size
                ),
                "check that the tokens come from this model's tokenizer",
            )),
        }
    }

    fn stuck(&self) -> Error {
        Error::failed(
            format!(
                "nothing can be scheduled: {} running, {} waiting, {} of {} blocks used",
                self.scheduler.running(),
                self.scheduler.waiting(),
                self.scheduler.cache().blocks_used(),
                self.scheduler.cache().blocks_total()
            ),
            "this is a fault of the scheduler; please report it with the command line",
        )
    }
}

/// The step as the device sees it; slices borrow from the scheduler's sequences.
fn device_step<'a>(scheduler: &'a Scheduler, scheduled: &ScheduledStep, trace: bool) -> Step<'a> {
    let sequences = scheduled.entries.iter().map(|entry| {
        let sequence = scheduler.sequence(entry);
        let request = &sequence.request;
        SequenceStep {
            request: entry.id,
            state_slot: sequence.holding.slot,
            blocks: &sequence.holding.blocks,
            context_tokens: entry.context,
            input: match entry.source {
                Some((ticket, sequence)) => Input::SampledBy { ticket, sequence },
                None => Input::Known(&sequence.tokens[entry.context..entry.context + entry.input]),
            },
            drafts: &sequence.drafts,
            want: if entry.samples {
                let position = (entry.context + entry.input) as u64;
                Want::Sample { seed: request.seed, position, params: request.sampling }
            } else {
                Want::Nothing
            },
        }
    });
    Step { sequences: sequences.collect(), trace }
}
