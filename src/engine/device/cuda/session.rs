//! A session: steps in flight, captured graphs, and what comes back.
//!
//! A step's metadata is written to one of [`RING`] page-locked slots and copied to the GPU in front of its kernels. Sampled
//! tokens stay on the GPU in a ring with a slot for each step in flight, where the next step's embedding finds them, and
//! go to page-locked memory for the host. `submit` waits for nothing; `wait` waits for the step's last event.
//!
//! Plain decode steps (one token and one sample a sequence) are padded to a batch size of [`graph_size`], captured at the
//! first use of that size and replayed from then on; all others are launched kernel by kernel.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::batch::{Batch, Offsets, Wanted, graph_size};
use super::driver::{DeviceBuffer, Event, Gpu, PinnedBuffer};
use super::forward::{Forward, Limits, StepView};
use super::kernels::sample::{Logits, NOT_FINITE};
use super::launch::{Graph, Launched, Record, Stream};
use super::prefill_attention::Tiles;
use super::trace::{self, Timing};
use super::weights::GpuWeights;
use crate::engine::clock::Clock;
use crate::engine::config::{CudaKernels, EngineConfig};
use crate::engine::device::check::StepBounds;
use crate::engine::device::{
    CachePlan, KernelRecord, SequenceOutput, Session, Step, StepOutput, Ticket, TraceEnd,
};
use crate::engine::model::spec::ModelSpec;
use crate::{Error, Result};

/// Steps that may be queued, and one more to write while they are.
const RING: usize = 4;
/// Rows of logits kept at a time when whole rows are wanted.
const MIN_OUTPUTS: usize = 64;

struct Slot {
    metadata: PinnedBuffer,
    start: Event,
    end: Event,
}

struct InFlight {
    ticket: u64,
    wanted: Vec<Wanted>,
    /// Rows of logits and log probabilities on their way to the host.
    logits: Option<PinnedBuffer>,
    log_probs: Option<PinnedBuffer>,
    moved_bytes: u64,
    /// Launches and their events, when each was timed by them.
    launches: Vec<Launched>,
    events: Vec<Event>,
}

/// A decode step of one batch size, and the bytes that its launches declare: those at some length of the contexts, and
/// those of each token that a context is longer.
struct Captured {
    graph: Graph,
    bytes: u64,
    context: u64,
    token_bytes: u64,
}

impl Captured {
    fn moved_bytes(&self, context: u64) -> u64 {
        (self.bytes + context * self.token_bytes).saturating_sub(self.context * self.token_bytes)
    }
}

pub struct CudaSession {
    gpu: Gpu,
    stream: Stream,
    forward: Forward,
    graphs: HashMap<(usize, bool), Captured>,
    slots: Vec<Slot>,
    metadata: DeviceBuffer,
    /// Sampled tokens, [RING][rows], on the device and on the host.
    ring: DeviceBuffer,
    tokens: PinnedBuffer,
    ring_rows: usize,
    in_flight: VecDeque<InFlight>,
    /// Output row of each sequence's token for the last steps, by ticket modulo RING.
    sampled: [(u64, Vec<Option<u32>>); RING],
    bounds: StepBounds,
    /// By state slot: tokens that are in its stored states.
    stored: Vec<usize>,
    next_ticket: u64,
    clock: Clock,
    /// When the last step that was waited for ended, on the clock.
    last_end_s: f64,
    vocab_size: usize,
    real_vocab_size: usize,
    max_num_seqs: usize,
    use_graphs: bool,
    /// Set while a traced pass runs, and after one that has to be run again.
    timing: Option<Timing>,
}

impl CudaSession {
    /// Pools, buffers and kernels for the plan; graphs are captured as steps need them.
    ///
    /// # Errors
    /// No memory for pools and buffers; a kernel that does not compile or load.
    pub fn new(
        gpu: &Gpu,
        spec: &ModelSpec,
        weights: Arc<GpuWeights>,
        plan: &CachePlan,
        config: &EngineConfig,
        clock: &Clock,
    ) -> Result<Self> {
        gpu.bind()?;
        let rows = plan.max_num_batched_tokens.max(plan.max_num_seqs);
        let outputs = (plan.max_num_seqs * (1 + plan.max_drafts)).min(rows).max(MIN_OUTPUTS);
        let portable = config.cuda_kernels == CudaKernels::Portable;
        let forward = Forward::new(gpu, spec, weights, plan, Limits { rows, outputs, portable })?;
        let max_blocks = plan.max_model_len.div_ceil(plan.block_tokens) + 1;
        let bytes = Offsets::capacity(rows, plan.max_num_seqs, max_blocks);
        let slots = (0..RING).map(|_| {
            Ok(Slot { metadata: gpu.allocate_pinned(bytes)?, start: Event::new(gpu)?, end: Event::new(gpu)? })
        });
        Ok(Self {
            gpu: gpu.clone(),
            stream: Stream::new(gpu)?,
            forward,
            graphs: HashMap::new(),
            slots: slots.collect::<Result<Vec<_>>>()?,
            metadata: gpu.allocate_zeroed(bytes as u64)?,
            ring: gpu.allocate_zeroed((4 * RING * outputs) as u64)?,
            tokens: gpu.allocate_pinned(4 * RING * outputs)?,
            ring_rows: outputs,
            in_flight: VecDeque::new(),
            sampled: std::array::from_fn(|_| (u64::MAX, Vec::new())),
            bounds: StepBounds::new(spec, plan),
            stored: vec![0; plan.state_slots],
            next_ticket: 0,
            clock: clock.clone(),
            last_end_s: clock.now(),
            vocab_size: spec.vocab_size,
            real_vocab_size: spec.real_vocab_size,
            max_num_seqs: plan.max_num_seqs,
            use_graphs: config.cuda_graphs,
            timing: None,
        })
    }

    fn layout(&self, step: &Step) -> Result<Batch> {
        let ring_rows = self.ring_rows as u32;
        Batch::new(step, |ticket, sequence| {
            let (known, rows) = &self.sampled[ticket as usize % RING];
            let row = if *known == ticket { rows.get(sequence).copied().flatten() } else { None };
            row.map(|row| (ticket as usize % RING) as u32 * ring_rows + row)
        })
    }

    /// Queues the kernels of a step whose metadata is on its way.
    fn run(
        &mut self,
        batch: &Batch,
        tiles: &Tiles,
        offsets: Offsets,
        in_flight: &mut InFlight,
    ) -> Result<()> {
        let view = StepView {
            batch,
            offsets,
            metadata: self.metadata.pointer(),
            tiles,
            ring: self.ring.pointer(),
            host: self.tokens.pointer(),
        };
        let (vocab_size, sampled) = (self.vocab_size, batch.samples.len());
        let first_log_prob = sampled + batch.logit_rows;
        if batch.logit_rows > 0 {
            in_flight.logits = Some(self.gpu.allocate_pinned(4 * batch.logit_rows * vocab_size)?);
        }
        if !batch.targets.is_empty() {
            in_flight.log_probs = Some(self.gpu.allocate_pinned(4 * batch.targets.len())?);
        }
        let samplers = &self.forward.samplers;
        let mut on_logits = |stream: &Stream, first: usize, count: usize, at: u64| -> Result<()> {
            match (&in_flight.logits, &in_flight.log_probs) {
                (Some(logits), _) if first < first_log_prob => {
                    let offset = 4 * (first - sampled) * vocab_size;
                    // SAFETY: sized above for all rows wanted; read only after the step's event.
                    unsafe { stream.copy_out(logits, offset, at, 4 * count * vocab_size) }
                }
                (_, Some(log_probs)) => {
                    let logits = Logits { at, pitch: vocab_size, vocab: vocab_size };
                    let targets = self.metadata.at((offsets.targets + 4 * first) as u64);
                    let result = log_probs.pointer() + 4 * (first - first_log_prob) as u64;
                    // SAFETY: `targets` has a word for each output row; the result is page-locked, valid on the device,
                    // sized above, and read only after the step's event.
                    unsafe { samplers.log_probability(stream, count, logits, targets, result) }
                }
                _ => Ok(()),
            }
        };
        // SAFETY: the metadata is `batch`'s, copied in front on the same stream; the engine owns blocks and slots and
        // names them within the plan; buffers live as long as the session, which drains the stream before it drops.
        unsafe { self.forward.run(&self.stream, &view, &mut on_logits) }
    }
}

impl Session for CudaSession {
    fn submit(&mut self, step: &Step) -> Result<Ticket> {
        self.bounds.check(step)?;
        self.gpu.bind()?;
        if self.in_flight.len() >= RING - 1 {
            return Err(Error::bug(format!("more than {} steps in flight", RING - 1)));
        }
        if step.trace && self.timing.is_none() {
            self.start_trace()?;
        }
        let by_events = step.trace && matches!(self.timing, Some(Timing::Events { .. }));
        let ticket = self.next_ticket;
        let turn = ticket as usize % RING;
        let mut batch = self.layout(step)?;
        self.forward.narrow(&mut batch);
        let draws = batch.draws;
        let graph = if self.use_graphs && !by_events && batch.is_plain_decode() {
            let size = graph_size(batch.rows.len(), self.max_num_seqs);
            batch.pad(size);
            Some((size, draws))
        } else {
            None
        };
        let (most_pending, capacity) = self.forward.most_pending(&batch);
        batch.place_states(&mut self.stored, most_pending, capacity)?;
        // States are brought up to date now and then only, so no graph has that.
        let graph = graph.filter(|_| batch.settle_from.is_none());
        let tiles = self.forward.tiles(&batch);
        let offsets = Offsets::new(&batch.counts(tiles.list.len()));
        let ring_offset = (turn * self.ring_rows) as u32;
        let slot = &mut self.slots[turn];
        // SAFETY: the step that used this slot last was waited for: at most RING - 1 are in flight.
        let metadata = unsafe { slot.metadata.slice_mut() };
        let needed = offsets.table + 4 * batch.table.len();
        if needed > metadata.len() {
            return Err(Error::bug(format!(
                "a step's metadata takes {needed} bytes, and {} were planned",
                metadata.len()
            )));
        }
        let bytes = batch.write(&offsets, ring_offset, &tiles.list, metadata);

        let wanted = std::mem::take(&mut batch.wanted);
        let rows = wanted.iter().map(|wanted| match wanted {
            Wanted::Token(row) => Some(*row as u32),
            _ => None,
        });
        self.sampled[turn] = (ticket, rows.collect());
        let mut in_flight = InFlight {
            ticket,
            wanted,
            logits: None,
            log_probs: None,
            moved_bytes: 0,
            launches: Vec::new(),
            events: Vec::new(),
        };
        if let Some(key) = graph.filter(|key| !self.graphs.contains_key(key)) {
            let captured = self.capture(&batch, &tiles, offsets)?;
            self.graphs.insert(key, captured);
        }
        let counted =
            if step.trace && graph.is_some() { Some(self.count(&batch, &tiles, offsets)?) } else { None };
        self.stream.record(&self.slots[turn].start)?;
        // SAFETY: the slot's bytes are not written before the step was waited for; `metadata` is as long as the slot.
        unsafe { self.stream.copy_in(self.metadata.pointer(), &self.slots[turn].metadata, 0, bytes)? };
        let launches = match graph.and_then(|key| self.graphs.get(&key)) {
            Some(captured) => {
                self.stream.launch_graph(&captured.graph)?;
                in_flight.moved_bytes = captured.moved_bytes(batch.short_context);
                counted.unwrap_or_default()
            }
            None => {
                self.stream.start_recording(if by_events { Record::Time } else { Record::Run })?;
                let done = self.run(&batch, &tiles, offsets, &mut in_flight);
                let (launches, events) = self.stream.stop_recording();
                in_flight.events = events;
                if let Err(error) = done {
                    // Copies that are queued already write to `in_flight`'s page-locked memory.
                    self.stream.synchronize()?;
                    return Err(error);
                }
                in_flight.moved_bytes = moved_bytes(&launches);
                launches
            }
        };
        self.stream.record(&self.slots[turn].end)?;
        match &mut self.timing {
            Some(Timing::Cupti { steps, .. }) if step.trace => steps.push((Ticket(ticket), launches)),
            Some(Timing::Events { .. }) if step.trace => in_flight.launches = launches,
            _ => {}
        }
        self.in_flight.push_back(in_flight);
        self.next_ticket += 1;
        Ok(Ticket(ticket))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOutput> {
        self.gpu.bind()?;
        let step = match self.in_flight.pop_front() {
            Some(step) if step.ticket == ticket.0 => step,
            other => {
                other.into_iter().for_each(|step| self.in_flight.push_front(step));
                return Err(Error::bug(format!("step {} is not the oldest in flight", ticket.0)));
            }
        };
        let turn = ticket.0 as usize % RING;
        let slot = &self.slots[turn];
        let was_done = slot.end.is_done()?;
        slot.end.synchronize()?;
        let now_s = self.clock.now();
        let device_s = slot.end.seconds_since(&slot.start)?;
        // A step that had ended before it was waited for is placed by the device's own clock, behind the one before it.
        let previous = &self.slots[(turn + RING - 1) % RING];
        let end_s = if was_done && ticket.0 > 0 {
            (self.last_end_s + slot.end.seconds_since(&previous.end)?).min(now_s)
        } else {
            now_s
        };
        self.last_end_s = end_s;
        let start_s = end_s - device_s;
        let mut kernels = Vec::with_capacity(step.launches.len());
        for (launched, pair) in step.launches.iter().zip(step.events.windows(2)) {
            let at = pair[0].seconds_since(&slot.start)?;
            kernels.push(KernelRecord {
                name: trace::name(launched),
                start_s: start_s + at,
                end_s: start_s + at + pair[1].seconds_since(&pair[0])?,
                bytes: launched.cost.bytes,
                flops: launched.cost.flops,
            });
        }
        let sequences = self.read_outputs(&step, turn)?;
        let moved_bytes = Some(step.moved_bytes);
        Ok(StepOutput { sequences, start_s, end_s, device_s, moved_bytes, kernels })
    }

    fn finish_trace(&mut self) -> Result<TraceEnd> {
        let Some(timing) = self.timing.take() else { return Ok(TraceEnd::default()) };
        self.gpu.bind()?;
        self.stream.synchronize()?;
        let (end, next) = timing.finish(&self.clock);
        self.timing = next;
        Ok(end)
    }
}

impl CudaSession {
    /// Kernels of the steps from here on are to be timed.
    fn start_trace(&mut self) -> Result<()> {
        // No kernel of an earlier step is to be among them.
        self.stream.synchronize()?;
        self.timing = Some(Timing::start(self.gpu.facts().driver));
        Ok(())
    }

    /// Records a padded decode step.
    fn capture(&self, batch: &Batch, tiles: &Tiles, offsets: Offsets) -> Result<Captured> {
        // SAFETY: what a plain decode step points to is the session's own and lives as long as its graphs.
        let graph = unsafe { self.stream.capture(|| self.plain(batch, tiles, offsets))? };
        // The only launches whose bytes depend on more than the batch size are those over the contexts.
        const LONGER: u64 = 1 << 10;
        let longer = Batch { short_context: batch.short_context + LONGER, ..batch.clone() };
        let bytes = moved_bytes(&graph.launches);
        let token_bytes = (moved_bytes(&self.count(&longer, tiles, offsets)?) - bytes) / LONGER;
        Ok(Captured { graph, bytes, context: batch.short_context, token_bytes })
    }

    /// The launches of a decode step, with their costs.
    fn count(&self, batch: &Batch, tiles: &Tiles, offsets: Offsets) -> Result<Vec<Launched>> {
        self.stream.count(|| self.plain(batch, tiles, offsets))
    }

    /// Queues, records or counts a plain decode step.
    fn plain(&self, batch: &Batch, tiles: &Tiles, offsets: Offsets) -> Result<()> {
        let view = StepView {
            batch,
            offsets,
            metadata: self.metadata.pointer(),
            tiles,
            ring: self.ring.pointer(),
            host: self.tokens.pointer(),
        };
        // SAFETY: as in `run`; a plain decode step has no logits to hand out, and nothing it points to moves.
        unsafe { self.forward.run(&self.stream, &view, &mut |_, _, _, _| Ok(())) }
    }

    fn read_outputs(&self, step: &InFlight, turn: usize) -> Result<Vec<SequenceOutput>> {
        let token = |row: usize| -> Result<u32> {
            let at = 4 * (turn * self.ring_rows + row);
            // SAFETY: the step that wrote this word is done, and the slot's next step is not submitted yet.
            let bytes = unsafe { self.tokens.slice() };
            let token = u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
            if token == NOT_FINITE { Err(not_finite()) } else { Ok(token) }
        };
        let floats = |buffer: &Option<PinnedBuffer>, range: std::ops::Range<usize>| -> Vec<f32> {
            let Some(buffer) = buffer else { return Vec::new() };
            // SAFETY: the step that wrote these bytes is done.
            let bytes = unsafe { buffer.slice() };
            let words = bytes[4 * range.start..4 * range.end].chunks_exact(4);
            words.map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
        };
        let mut outputs = Vec::with_capacity(step.wanted.len());
        for wanted in &step.wanted {
            let mut output = SequenceOutput::default();
            match wanted {
                Wanted::Nothing => {}
                Wanted::Token(row) => output.tokens.push(token(*row)?),
                Wanted::Drafted { first, drafts } => {
                    // A draft is kept if it is the very token that is sampled in its place.
                    output.tokens.push(token(*first)?);
                    for (index, draft) in drafts.iter().enumerate() {
                        if output.tokens[index] != *draft {
                            break;
                        }
                        output.accepted += 1;
                        output.tokens.push(token(first + index + 1)?);
                    }
                }
                Wanted::Logits(rows) => {
                    for row in rows.clone() {
                        let logits = floats(&step.logits, row * self.vocab_size..(row + 1) * self.vocab_size);
                        if logits[..self.real_vocab_size].iter().any(|logit| !logit.is_finite()) {
                            return Err(not_finite());
                        }
                        output.logits.push(logits);
                    }
                }
                Wanted::LogProbs(rows) => {
                    output.logprobs = floats(&step.log_probs, rows.clone());
                    if output.logprobs.iter().any(|log_prob| !log_prob.is_finite()) {
                        return Err(not_finite());
                    }
                }
            }
            outputs.push(output);
        }
        Ok(outputs)
    }
}

impl Drop for CudaSession {
    fn drop(&mut self) {
        // Queued work may still write to buffers that are about to go.
        if self.gpu.bind().is_ok() {
            let _ = self.stream.synchronize();
        }
    }
}

fn moved_bytes(launches: &[Launched]) -> u64 {
    launches.iter().map(|launched| launched.cost.bytes).sum()
}

fn not_finite() -> Error {
    Error::invalid(
        "a logit is NaN or infinite",
        "the weights hold NaN or infinity, or overflow in fp16; --device cpu computes in fp32",
    )
}
