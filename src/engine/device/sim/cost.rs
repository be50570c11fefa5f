//! The time a step takes on a simulated GPU, from its bytes and FLOPs and a handful of parameters.
//!
//! ```text
//! t = fixed + sqrt((weights/BW)^2 + (products/RATE)^2)           a stream and products that overlap, as a 2-norm
//!   + state/BW (x mu beside a prompt chunk or drafts)            recurrent states, read and written
//!   + KV/BW + prefill scores/RATE
//!   + sampled rows x row + mixed (in a step with a prompt chunk)
//! ```
//! The 2-norm lies between perfect overlap (the larger of the two) and none (their sum).

use serde::Serialize;

use crate::engine::account::{CostModel, StepCounts};
use crate::engine::model::spec::ModelSpec;

/// What a simulated GPU is, as far as time goes. Each parameter has a physical meaning; [`super::SimDevice`] says
/// the source of its value.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SimParameters {
    /// One effective bandwidth for weights, states, K and V, bytes a second.
    pub read_bytes_per_s: f64,
    /// Effective rate of products and attention scores, FLOP a second.
    pub flops_per_s: f64,
    /// The rate was derived from whole prompts and holds the chunked delta rule (2 % of their FLOPs), which is then not
    /// charged again.
    pub delta_rule_in_rate: bool,
    /// What a launch adds, seconds; a step launches one kernel a matrix family: four a layer and the head.
    pub launch_s: f64,
    /// Time of a step beyond its bytes, FLOPs and launches, seconds.
    pub step_fixed_s: f64,
    /// What a step with a prompt chunk or drafts adds: it leaves the full CUDA graph.
    pub mixed_step_s: f64,
    /// State cost of every sequence in a step with a prompt chunk (and of those without drafts beside those with), times
    /// that in a pure decode step. 1 for an engine that keeps decodes on the recurrent kernel beside a prefill; more for
    /// one that gathers, chunks and scatters them all.
    pub mixed_state_factor: f64,
    /// Sampler time of a row drawn with a temperature, seconds.
    pub sampled_row_s: f64,
    /// Added to each step while speculation is on: proposing and checking on the host, not hidden.
    pub speculation_host_s: f64,
    /// Added to a step with drafts, or with a prompt chunk while speculation is on: it leaves the graphs.
    pub draft_step_s: f64,
    /// All 1 but in a counterfactual.
    pub byte_factors: ByteFactors,
}

/// Bytes charged over bytes counted, by class.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ByteFactors {
    pub weights: f64,
    pub state: f64,
    pub kv: f64,
}

impl Default for ByteFactors {
    fn default() -> Self {
        Self { weights: 1.0, state: 1.0, kv: 1.0 }
    }
}

/// Where the time of a step goes. The parts add up to its duration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct StepTime {
    /// Launches, graph exits, host work of speculation: whatever does not scale with bytes or FLOPs.
    pub fixed_s: f64,
    /// Streaming the weights and computing the products overlap; each is given its share of the 2-norm (its square over
    /// the sum of squares).
    pub weights_s: f64,
    pub compute_s: f64,
    pub state_s: f64,
    pub kv_s: f64,
    pub sampling_s: f64,
}

impl StepTime {
    pub fn total_s(&self) -> f64 {
        self.fixed_s + self.weights_s + self.compute_s + self.state_s + self.kv_s + self.sampling_s
    }

    /// The largest part.
    pub fn largest(&self) -> &'static str {
        let parts = [
            ("fixed", self.fixed_s),
            ("weights", self.weights_s),
            ("compute", self.compute_s),
            ("state", self.state_s),
            ("kv", self.kv_s),
            ("sampling", self.sampling_s),
        ];
        parts.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or("fixed", |(name, _)| name)
    }
}

/// Facts of a step that bytes and FLOPs do not show.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepExtras {
    /// Rows drawn with a temperature above 0.
    pub random_rows: u64,
    /// Sequences that bring drafts, and the drafts they bring.
    pub drafting_sequences: u64,
    pub drafts: u64,
    /// Speculation is switched on in this session.
    pub speculating: bool,
}

impl SimParameters {
    /// The time of a step with these counts.
    pub fn step_time(
        &self,
        model: &CostModel,
        spec: &ModelSpec,
        counts: &StepCounts,
        extras: &StepExtras,
    ) -> StepTime {
        let tokens = counts.decode_tokens + counts.prefill_tokens;
        if tokens == 0 {
            return StepTime::default();
        }
        let phases = model.phases_of(counts);
        let mixed = counts.prefill_sequences > 0;
        let drafting = extras.drafting_sequences;
        let launches = (4 * spec.layers.len() + 1) as f64;
        let mut fixed_s = self.step_fixed_s + launches * self.launch_s;
        if mixed || drafting > 0 {
            fixed_s += self.mixed_step_s;
        }
        if extras.speculating {
            fixed_s += self.speculation_host_s;
            if mixed || drafting > 0 {
                fixed_s += self.draft_step_s;
            }
        }

        let factors = self.byte_factors;
        let stream_s = factors.weights * phases.weights.bytes as f64 / self.read_bytes_per_s;
        let products_s = phases.weights.flops as f64 / self.flops_per_s;
        let overlapped_s = stream_s.hypot(products_s);

        // The chunked path gathers and scatters whole states, those of new sequences included; else a sequence that
        // starts has none to read. Sequences with drafts have a path of their own, and beside it the others take the
        // chunked one. A sequence with drafts writes its state after each of its tokens.
        let others = counts.decode_sequences + counts.prefill_sequences - drafting;
        let chunked = mixed || (drafting > 0 && others > 0);
        let moves = if chunked && self.mixed_state_factor > 1.0 {
            2.0 * (others as f64 * self.mixed_state_factor + drafting as f64)
        } else {
            counts.state_moves as f64
        } + extras.drafts as f64;
        let deferred = counts.decode_sequences * model.deferred_bytes_per_decode;
        let state_bytes = moves * model.state_bytes_per_sequence as f64 - deferred as f64;
        let mut state_s = factors.state * state_bytes / self.read_bytes_per_s;
        let mut delta_s = 0.0;
        if !self.delta_rule_in_rate {
            let arithmetic_s = phases.state.flops as f64 / self.flops_per_s;
            if arithmetic_s > state_s {
                (state_s, delta_s) = (0.0, arithmetic_s);
            }
        }

        let kv_s = factors.kv * phases.attention.bytes as f64 / self.read_bytes_per_s;
        let scores = model.prefill_attention_flops(counts) as f64;
        StepTime {
            fixed_s,
            weights_s: stream_s * stream_s / overlapped_s,
            compute_s: products_s * products_s / overlapped_s + scores / self.flops_per_s + delta_s,
            state_s,
            kv_s,
            sampling_s: extras.random_rows as f64 * self.sampled_row_s,
        }
    }
}
