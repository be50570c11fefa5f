//! The rig of the series "The Inference Wall": one A10G run by vLLM 0.18, as parameters of a step's time.
//!
//! Six parameters, each calibrated on one published fact, serve every experiment. Three more factors belong to a model
//! or a mode; each has a physical reason and names the one cell it was chosen on.

use super::cost::{ByteFactors, SimParameters};
use crate::engine::config::{EngineConfig, KvLayout, Speculation};
use crate::engine::model::layout::{ModelLayout, WeightFormat};
use crate::engine::model::spec::Role;
use crate::hardware::Sourced;

/// The author's copy test.
pub const READ_BYTES_PER_S: f64 = 483e9;
/// From the two prefill facts of Part 2, which disagree by 3 %: a 2,044-token chunk in 345 ms and a 5,408-token
/// prompt in 830 ms. 70 % of the data sheet's 70 TFLOP/s.
pub const FLOPS_PER_S: f64 = 48.7e12;
/// Launches, norms and small kernels: the decode points of Part 1 at batch 1, 8, 64, 146.
pub const STEP_FIXED_S: f64 = 2.5e-3;
/// A step with a prompt chunk leaves the full CUDA graph: the token gap p99 of Part 1 at 1 request/s.
pub const MIXED_STEP_S: f64 = 8e-3;
/// vLLM before 0.24 sends every sequence of a step with a prefill through the chunked kernel, its state gathered and
/// scattered: the token gap p99 of Part 1's flood. Traffic alone would make it 3.5.
pub const MIXED_STATE_FACTOR: f64 = 4.5;
/// The sampler's passes over 248,320 logits a row: the token gap p50 of the flood.
pub const SAMPLED_ROW_S: f64 = 20e-6;

/// HTTP and tokenising before the engine sees a request: assumed, not fitted.
pub const CLIENT_S: f64 = 5e-3;
/// The server takes in the requests of a flood one after another: a token gap p99 of Part 3 at a small cap.
pub const SUBMISSION_GAP_S: f64 = 2e-3;

/// Rate of the 9B's products (larger matrices fill the tensor cores better): Part 6's flood.
pub const RATE_FACTOR_9B: f64 = 1.08;
/// Rate of the dense 7B's products (no delta rule inside it): the slope of Part 8's time to first token.
pub const RATE_FACTOR_DENSE: f64 = 1.242;
/// n-gram proposer on the host with async scheduling off: the token gap p50 of Part 7 at 1 request/s.
pub const SPECULATION_HOST_S: f64 = 2.5e-3;
/// Draft and mixed steps miss the graphs while speculation is on: the token gap p50 of Part 7's flood.
pub const DRAFT_STEP_S: f64 = 6e-3;

/// Share of (sequence, step) pairs that carry a draft on random text: drafted tokens over steps in the log lines of
/// Part 7's flood.
pub const DRAFT_RATE: f64 = 0.025;
/// Share of positions that end a repeated pair of tokens, in texts of 128: the first pair has nothing to repeat.
pub const REPEAT_RATE: f64 = DRAFT_RATE + 1.0 / 128.0;
/// Share of drafts kept, by position: one log line of Part 7 (k = 5).
pub const DRAFT_ACCEPTANCE: [f64; 5] = [0.32, 0.22, 0.18, 0.15, 0.10];

/// Parameters for `layout`: the six, and its own factor.
pub fn parameters(layout: &ModelLayout) -> SimParameters {
    let dense = !layout.spec.is_hybrid();
    let factor = match layout.spec.hidden_size {
        _ if dense => RATE_FACTOR_DENSE,
        4096 => RATE_FACTOR_9B,
        _ => 1.0,
    };
    SimParameters {
        read_bytes_per_s: READ_BYTES_PER_S,
        flops_per_s: FLOPS_PER_S * factor,
        delta_rule_in_rate: true,
        launch_s: 0.0,
        step_fixed_s: STEP_FIXED_S,
        // A dense model has no states to gather, and its mixed steps keep their graphs in pieces.
        mixed_step_s: if dense { 0.0 } else { MIXED_STEP_S },
        mixed_state_factor: MIXED_STATE_FACTOR,
        sampled_row_s: SAMPLED_ROW_S,
        speculation_host_s: SPECULATION_HOST_S,
        draft_step_s: DRAFT_STEP_S,
        byte_factors: ByteFactors::default(),
    }
}

/// Sets the knobs that the rig's logs fix: vLLM's unified pool with the blocks its memory left (the logs print
/// 9.45, 9.01, 6.65 and 4.94 GiB), and its scheduling depth. A number of blocks that was asked for stays; models that
/// the series did not run get what memory holds.
pub fn configure(layout: &ModelLayout, config: &mut EngineConfig) {
    let speculating = config.speculation != Speculation::Off;
    config.async_scheduling.get_or_insert(if speculating { 1 } else { 2 });
    let mut int4 =
        layout.linears.iter().filter(|(_, format)| matches!(format, WeightFormat::Int4 { .. })).peekable();
    let quantised = int4.peek().is_some();
    // The series' checkpoint: mixers in 16 bits.
    let mlp_only =
        quantised && int4.all(|(linear, _)| matches!(linear.role, Role::Gate | Role::Up | Role::Down));
    let blocks = match (layout.spec.is_hybrid(), layout.spec.hidden_size, quantised) {
        (true, 2560, false) if speculating => Some(542),
        (true, 2560, false) => Some(586),
        (true, 4096, true) if mlp_only => Some(413),
        // 5,781 blocks of which none is the null block here: vLLM keeps one of them empty.
        (false, 3584, false) => Some(5780),
        _ => None,
    };
    if layout.spec.is_hybrid() {
        config.kv_layout = KvLayout::Unified;
    }
    if config.kv_blocks.is_none() {
        config.kv_blocks = blocks;
    }
}

/// The parameters with the published cell each came from, for tables and run.json.
pub fn sources() -> Vec<(&'static str, Sourced)> {
    let entry = |name, value, source| (name, Sourced { value, source });
    vec![
        entry("bandwidth GB/s", READ_BYTES_PER_S / 1e9, "the author's copy test (Part 1)"),
        entry(
            "rate TFLOP/s",
            FLOPS_PER_S / 1e12,
            "Part 2: 2,044-token chunk 345 ms, 5,408-token prompt 830 ms",
        ),
        entry("fixed ms a step", STEP_FIXED_S * 1e3, "Part 1: decode steps at batch 1, 8, 64, 146"),
        entry("mixed step ms", MIXED_STEP_S * 1e3, "Part 1: ITL p99 at 1 request/s"),
        entry("state factor of mixed steps", MIXED_STATE_FACTOR, "Part 1: ITL p99 of the flood"),
        entry("sampled row us", SAMPLED_ROW_S * 1e6, "Part 3: ITL p50 of the flood"),
        entry("client ms", CLIENT_S * 1e3, "assumed: HTTP and tokenising, on TTFT"),
        entry("submission gap ms", SUBMISSION_GAP_S * 1e3, "Part 3: ITL p99 at cap 4"),
        entry("9B rate factor", RATE_FACTOR_9B, "Part 6: throughput of the 9B's flood"),
        entry("dense 7B rate factor", RATE_FACTOR_DENSE, "Part 8: slope of the time to first token"),
        entry("speculation host ms", SPECULATION_HOST_S * 1e3, "Part 7: ITL p50 at 1 request/s, k = 5"),
        entry("draft step ms", DRAFT_STEP_S * 1e3, "Part 7: ITL p50 of the flood, k = 5"),
        entry("drafts a sequence-step", DRAFT_RATE, "Part 7: drafted tokens in the flood's log lines"),
    ]
}
