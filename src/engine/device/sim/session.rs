//! A simulated session: a step ends at max(submit, end of the previous) + cost, on the session's virtual clock.

use std::collections::VecDeque;

use super::cost::{SimParameters, StepExtras, StepTime};
use super::noise::Noise;
use super::text::{DraftModel, Text};
use crate::engine::account::{CostModel, SequenceShape, StepCounts, StepPhases};
use crate::engine::clock::Clock;
use crate::engine::config::EngineConfig;
use crate::engine::device::{
    CachePlan, KernelRecord, Model, SequenceOutput, SequenceStep, Session, Step, StepOutput, Ticket, Want,
};
use crate::engine::model::layout::ModelLayout;
use crate::{Error, Result};

pub struct SimModel {
    layout: ModelLayout,
    parameters: SimParameters,
    drafts: DraftModel,
}

impl SimModel {
    pub fn new(layout: ModelLayout, parameters: SimParameters, drafts: DraftModel) -> Self {
        Self { layout, parameters, drafts }
    }
}

impl Model for SimModel {
    fn layout(&self) -> &ModelLayout {
        &self.layout
    }

    fn memory_bytes(&self) -> u64 {
        self.layout.weight_bytes()
    }

    fn open(&self, plan: &CachePlan, config: &EngineConfig, clock: &Clock) -> Result<Box<dyn Session>> {
        let spec = &self.layout.spec;
        let vocab = spec.real_vocab_size.min(spec.vocab_size);
        let mut drafts = self.drafts.clone();
        if plan.max_drafts == 0 {
            drafts.repeat_rate = 0.0;
        }
        Ok(Box::new(SimSession {
            cost: CostModel::new(&self.layout, plan),
            text: Text::new(vocab, &spec.eos_tokens, drafts),
            layout: self.layout.clone(),
            parameters: self.parameters.clone(),
            speculating: plan.max_drafts > 0,
            noise: Noise::new(config.sim_noise),
            clock: clock.clone(),
            last_end_s: 0.0,
            tickets: 0,
            in_flight: VecDeque::new(),
            shapes: Vec::new(),
        }))
    }
}

struct SimSession {
    layout: ModelLayout,
    cost: CostModel,
    parameters: SimParameters,
    text: Text,
    speculating: bool,
    noise: Noise,
    clock: Clock,
    last_end_s: f64,
    tickets: u64,
    in_flight: VecDeque<(Ticket, StepOutput)>,
    /// Reused between steps.
    shapes: Vec<SequenceShape>,
}

/// A sequence as the account sees it. One token behind a context is a decode: a prompt's last chunk of one token runs the
/// same way.
fn shape(sequence: &SequenceStep) -> SequenceShape {
    let input = sequence.input.tokens();
    let new_tokens = input + sequence.drafts.len();
    let sampled_rows = match sequence.want {
        Want::Nothing => 0,
        Want::Sample { .. } => 1 + sequence.drafts.len(),
        Want::Logits { rows } => rows,
        Want::LogProbOf { targets } => targets.len(),
    };
    SequenceShape {
        new_tokens,
        context_tokens: sequence.context_tokens,
        sampled_rows,
        decode: input == 1 && sequence.context_tokens > 0,
    }
}

impl SimSession {
    fn output(&self, sequence: &SequenceStep) -> Result<SequenceOutput> {
        match sequence.want {
            Want::Nothing => Ok(SequenceOutput::default()),
            Want::Sample { seed, position, .. } => {
                let drafts = sequence.drafts;
                let accepted = self.text.accepted(seed, position, drafts.len());
                let mut tokens = drafts[..accepted].to_vec();
                tokens.push(self.text.token(seed, position + accepted as u64));
                Ok(SequenceOutput { tokens, accepted, ..SequenceOutput::default() })
            }
            Want::Logits { .. } | Want::LogProbOf { .. } => Err(Error::invalid(
                "a simulated device computes no logits",
                "use --device cpu or --device cuda for logits, probabilities and perplexity",
            )),
        }
    }

    fn kernels(&self, start_s: f64, time: &StepTime, factor: f64, phases: &StepPhases) -> Vec<KernelRecord> {
        let parts = [
            ("fixed (simulated)", time.fixed_s + time.sampling_s, 0, 0),
            (
                "weights and products (simulated)",
                time.weights_s + time.compute_s,
                phases.weights.bytes,
                phases.weights.flops,
            ),
            ("recurrent states (simulated)", time.state_s, phases.state.bytes, phases.state.flops),
            ("attention (simulated)", time.kv_s, phases.attention.bytes, phases.attention.flops),
        ];
        let mut at_s = start_s;
        let mut records = Vec::with_capacity(parts.len());
        for (name, seconds, bytes, flops) in parts {
            let end_s = at_s + seconds * factor;
            records.push(KernelRecord { name: name.to_string(), start_s: at_s, end_s, bytes, flops });
            at_s = end_s;
        }
        records
    }
}

impl Session for SimSession {
    fn submit(&mut self, step: &Step) -> Result<Ticket> {
        let mut extras = StepExtras { speculating: self.speculating, ..StepExtras::default() };
        self.shapes.clear();
        let mut sequences = Vec::with_capacity(step.sequences.len());
        for sequence in &step.sequences {
            self.shapes.push(shape(sequence));
            if let Want::Sample { seed, params, .. } = sequence.want {
                if params.temperature > 0.0 {
                    extras.random_rows += 1 + sequence.drafts.len() as u64;
                }
                if self.noise.needs_seed() {
                    self.noise.set_seed(seed);
                }
            }
            if !sequence.drafts.is_empty() {
                extras.drafting_sequences += 1;
                extras.drafts += sequence.drafts.len() as u64;
            }
            sequences.push(self.output(sequence)?);
        }
        let counts = StepCounts::new(&self.shapes);
        let time = self.parameters.step_time(&self.cost, &self.layout.spec, &counts, &extras);
        let factor = self.noise.next_factor();
        let start_s = self.clock.now().max(self.last_end_s);
        let device_s = time.total_s() * factor;
        let end_s = start_s + device_s;
        self.last_end_s = end_s;
        let kernels = if step.trace {
            self.kernels(start_s, &time, factor, &self.cost.phases_of(&counts))
        } else {
            Vec::new()
        };
        let ticket = Ticket(self.tickets);
        self.tickets += 1;
        self.in_flight.push_back((
            ticket,
            StepOutput { sequences, start_s, end_s, device_s, moved_bytes: None, kernels },
        ));
        Ok(ticket)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOutput> {
        match self.in_flight.pop_front() {
            Some((oldest, output)) if oldest == ticket => {
                self.clock.wait_until(output.end_s);
                Ok(output)
            }
            other => Err(Error::failed(
                format!("step {} was waited for out of order (next is {:?})", ticket.0, other.map(|s| s.0.0)),
                "this is a defect: please report it with the command line",
            )),
        }
    }
}
