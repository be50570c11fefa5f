//! Roughly how long a plan will take, from bytes and FLOPs alone: an order of magnitude for `show`, never a result.

use super::plan::{Arm, Plan};
use super::spec::Rig;
use crate::engine::device::DeviceKind;
use crate::engine::model::layout::ModelLayout;
use crate::engine::model::{ModelRef, synthetic_layout};

/// Bytes and FLOPs a second that a machine of the class may be expected to sustain.
fn rates(rig: &Rig) -> (f64, f64) {
    match rig.kind {
        // Two cores of a server.
        DeviceKind::Cpu => (20e9, 150e9),
        DeviceKind::Cuda => (3e12, 300e12),
        // The series' A10G.
        DeviceKind::Sim => (483e9, 48.7e12),
    }
}

/// Seconds of all cells, warm-up included; `None` for models that are not built-in shapes, and for replays.
pub fn plan_seconds(plan: &Plan, rig: &Rig) -> Option<f64> {
    let cells = plan.cells();
    cells.iter().map(|cell| arm_seconds(&plan.arms[cell.arm], rig)).sum()
}

fn arm_seconds(arm: &Arm, rig: &Rig) -> Option<f64> {
    let layout = match arm.model.parse().ok()? {
        ModelRef::Synthetic { preset } => synthetic_layout(&preset).ok()?,
        _ => return None,
    };
    let load = &arm.load;
    if let Some(probe) = load.probe {
        let prefill = (probe.injectors * probe.injector_input_len) as f64;
        return Some(probe.inject_after_s + probe.drain_s + prefill * token_s(&layout, rig));
    }
    let seats = arm.engine.max_num_seqs;
    if load.replay.is_some() {
        return None;
    }
    let prompts = load.requests(seats);
    // Further rounds are short.
    let warm = load.warmup.prompts.resolve(seats) * load.warmup.max_rounds.min(1);
    let flood_s = |requests: usize| {
        let batch = requests.min(seats).min(load.concurrency.unwrap_or(usize::MAX)).max(1);
        let waves = requests.div_ceil(batch) as f64;
        let step_s =
            (layout.streamed_bytes() as f64 / rates(rig).0).max(batch as f64 * token_s(&layout, rig));
        waves * load.output_len as f64 * step_s + (requests * load.input_len) as f64 * token_s(&layout, rig)
    };
    let arrivals_s = load.request_rate.finite().map_or(0.0, |per_s| prompts as f64 / per_s);
    Some(flood_s(prompts).max(arrivals_s) + flood_s(warm.max(1)) * f64::from(u8::from(warm > 0)))
}

/// Seconds of arithmetic for one token.
fn token_s(layout: &ModelLayout, rig: &Rig) -> f64 {
    let elements: u64 =
        layout.linears.iter().map(|(linear, _)| linear.rows as u64 * linear.cols as u64).sum();
    2.0 * elements as f64 / rates(rig).1
}
