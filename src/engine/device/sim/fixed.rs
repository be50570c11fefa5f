//! `sim:fixed[:ms]`: every step takes the same time on a virtual clock, and tokens are a hash of (seed, position).
//!
//! The device of scheduler tests: it needs no weights and does no arithmetic, so what is left is scheduling alone.
//! A step ends at max(submit, end of the previous) + cost. Drafts are verified against the same hash, so speculation
//! is exact here as it is on a real device.

use std::collections::VecDeque;

use crate::engine::account::Ceilings;
use crate::engine::clock::Clock;
use crate::engine::config::{CacheDtype, EngineConfig};
use crate::engine::device::{
    CachePlan, Device, DeviceInfo, DeviceKind, LoadOptions, LoadProgress, Model, SequenceOutput, Session,
    Step, StepOutput, Ticket, Want, refuse_cuda_kernels, refuse_last_layer,
};
use crate::engine::model::layout::ModelLayout;
use crate::engine::model::spec::Linear;
use crate::engine::model::weights::{MatrixData, WeightSource, Weights};
use crate::engine::sampling::draw_bits;
use crate::{Error, Result};

const DEFAULT_STEP_MS: f64 = 1.0;
/// As much memory as any plan of a test wants.
const MEMORY_BYTES: u64 = 1 << 40;

#[derive(Debug)]
pub struct FixedDevice {
    info: DeviceInfo,
    step_s: f64,
}

impl FixedDevice {
    /// A device whose steps take `step_ms` milliseconds.
    pub fn new(step_ms: f64) -> Self {
        let info = DeviceInfo {
            kind: DeviceKind::Sim,
            id: format!("sim:fixed:{step_ms}"),
            name: format!("fixed cost of {step_ms} ms a step (simulated)"),
            memory_bytes: MEMORY_BYTES,
            facts: vec![("step_ms".to_string(), step_ms.to_string())],
        };
        Self { info, step_s: step_ms / 1e3 }
    }

    /// Reads `sim:fixed` or `sim:fixed:<milliseconds>`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the milliseconds are not a number above 0.
    pub fn parse(id: &str) -> Result<Self> {
        let wrong = || {
            Error::invalid(
                format!("device {id} is not sim:fixed[:milliseconds a step]"),
                "for example --device sim:fixed:2",
            )
        };
        let rest = id.strip_prefix("sim:fixed").ok_or_else(wrong)?;
        let step_ms = match rest.strip_prefix(':') {
            Some(number) => number.parse::<f64>().map_err(|_| wrong())?,
            None if rest.is_empty() => DEFAULT_STEP_MS,
            None => return Err(wrong()),
        };
        if step_ms > 0.0 && step_ms.is_finite() { Ok(Self::new(step_ms)) } else { Err(wrong()) }
    }
}

impl Device for FixedDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn clock(&self) -> Clock {
        Clock::virtual_time()
    }

    fn free_bytes(&self) -> u64 {
        MEMORY_BYTES
    }

    /// None: a step costs the same whatever it moves.
    fn ceilings(&mut self) -> Result<Option<Ceilings>> {
        Ok(None)
    }

    fn default_dtypes(&self) -> (CacheDtype, CacheDtype) {
        (CacheDtype::F16, CacheDtype::F32)
    }

    fn default_async_scheduling(&self) -> usize {
        2
    }

    fn configure(&self, _layout: &ModelLayout, config: &mut EngineConfig) -> Result<()> {
        refuse_cuda_kernels(config, "a device of fixed cost has none")?;
        refuse_last_layer(config, "a device of fixed cost has no layers")
    }

    fn load(
        &mut self,
        layout: &ModelLayout,
        _source: &WeightSource,
        _options: &LoadOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Model>> {
        let bytes = layout.weight_bytes();
        progress(LoadProgress { done_bytes: bytes, total_bytes: bytes });
        Ok(Box::new(FixedModel { layout: layout.clone(), step_s: self.step_s }))
    }
}

#[derive(Debug)]
pub struct FixedModel {
    layout: ModelLayout,
    step_s: f64,
}

impl Model for FixedModel {
    fn layout(&self) -> &ModelLayout {
        &self.layout
    }

    fn memory_bytes(&self) -> u64 {
        self.layout.weight_bytes()
    }

    fn open(&self, _plan: &CachePlan, _config: &EngineConfig, clock: &Clock) -> Result<Box<dyn Session>> {
        Ok(Box::new(FixedSession {
            clock: clock.clone(),
            step_s: self.step_s,
            vocabulary: self.layout.spec.real_vocab_size.max(1) as u64,
            next_ticket: 0,
            last_end_s: 0.0,
            queue: VecDeque::new(),
        }))
    }
}

struct FixedSession {
    clock: Clock,
    step_s: f64,
    vocabulary: u64,
    next_ticket: u64,
    last_end_s: f64,
    queue: VecDeque<(Ticket, StepOutput)>,
}

impl Session for FixedSession {
    fn submit(&mut self, step: &Step) -> Result<Ticket> {
        let mut sequences = Vec::with_capacity(step.sequences.len());
        for sequence in &step.sequences {
            sequences.push(match sequence.want {
                Want::Nothing => SequenceOutput::default(),
                Want::Sample { seed, position, .. } => {
                    sample(seed, position, sequence.drafts, |seed, position| {
                        fake_token(seed, position, self.vocabulary)
                    })
                }
                Want::Logits { .. } | Want::LogProbOf { .. } => return Err(no_logits()),
            });
        }
        let start_s = self.clock.now().max(self.last_end_s);
        let end_s = start_s + self.step_s;
        self.last_end_s = end_s;
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        let output = StepOutput {
            sequences,
            start_s,
            end_s,
            device_s: self.step_s,
            moved_bytes: None,
            kernels: Vec::new(),
        };
        self.queue.push_back((ticket, output));
        Ok(ticket)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOutput> {
        match self.queue.pop_front() {
            Some((oldest, output)) if oldest == ticket => {
                self.clock.wait_until(output.end_s);
                Ok(output)
            }
            _ => Err(Error::bug(format!("step {} was waited for out of order", ticket.0))),
        }
    }
}

/// A token that is a function of (seed, position) alone, as a draw on a real device is.
pub fn fake_token(seed: u64, position: u64, vocabulary: u64) -> u32 {
    (draw_bits(seed, position) % vocabulary) as u32
}

/// The sampled tokens of a sequence: drafts are kept as long as they equal what would have been sampled.
fn sample(seed: u64, position: u64, drafts: &[u32], token_at: impl Fn(u64, u64) -> u32) -> SequenceOutput {
    let mut tokens = vec![token_at(seed, position)];
    for (offset, &draft) in drafts.iter().enumerate() {
        if tokens[offset] != draft {
            break;
        }
        tokens.push(token_at(seed, position + 1 + offset as u64));
    }
    let accepted = tokens.len() - 1;
    SequenceOutput { tokens, accepted, ..SequenceOutput::default() }
}

fn no_logits() -> Error {
    Error::invalid("a simulated device computes no logits", "choose --device cpu or cuda")
}

/// A source for devices that need no weights.
pub fn no_weights() -> WeightSource {
    struct NoWeights;
    impl Weights for NoWeights {
        fn linear(&self, linear: &Linear) -> Result<MatrixData<'_>> {
            Err(missing(&linear.name()))
        }
        fn embedding(&self) -> Result<MatrixData<'_>> {
            Err(missing("embed_tokens.weight"))
        }
        fn vector(&self, name: &str, _elements: usize) -> Result<Vec<f32>> {
            Err(missing(name))
        }
    }
    fn missing(name: &str) -> Error {
        Error::invalid(
            format!("{name}: this model has a shape and no weights"),
            "name a model with weights: --model DIR",
        )
    }
    Box::new(NoWeights)
}
