//! Hand-made records for the tests of this module.

use super::recorder::{ArmRecord, Outcome, RequestRecord, StepRecord};
use crate::engine::account::StepCost;
use crate::engine::request::FinishReason;
use crate::engine::step_report::{StepKind, StepReport};
use crate::workload::schedule::Role;

/// An answered request of 10 prompt tokens.
pub fn answered(intended_s: f64, scheduled_s: f64, tokens_s: &[f64]) -> RequestRecord {
    RequestRecord {
        index: 0,
        role: Role::Load,
        intended_s,
        submitted_s: Some(intended_s),
        scheduled_s: vec![scheduled_s],
        preempted_s: Vec::new(),
        recomputed_tokens: 0,
        tokens_s: tokens_s.to_vec(),
        output: vec![0; tokens_s.len()],
        finish_s: tokens_s.last().copied(),
        input_tokens: 10,
        outcome: Outcome::Finished(FinishReason::Length),
    }
}

/// A step of one running sequence that keeps the device busy all the time.
pub fn step(kind: StepKind, start_s: f64, end_s: f64) -> StepRecord {
    StepRecord {
        report: report(kind, start_s, end_s),
        wall_s: end_s - start_s,
        delivered_s: end_s,
        tokens: 1,
    }
}

pub fn report(kind: StepKind, start_s: f64, end_s: f64) -> StepReport {
    StepReport {
        index: 0,
        kind,
        start_s,
        end_s,
        device_s: end_s - start_s,
        host_s: 0.0,
        decode_sequences: 1,
        decode_tokens: 1,
        prefill_sequences: 0,
        prefill_tokens: 0,
        recomputed_tokens: 0,
        drafted: 0,
        accepted: 0,
        overrun_tokens: 0,
        running: 1,
        waiting: 0,
        blocks_used: 0,
        blocks_total: 0,
        slots_used: 0,
        slots_total: 0,
        held_back_by: None,
        cost: StepCost::default(),
        events: Vec::new(),
        moved_bytes: None,
        kernels: Vec::new(),
    }
}

pub fn record_of(mut requests: Vec<RequestRecord>, steps: Vec<StepRecord>) -> ArmRecord {
    for (index, request) in requests.iter_mut().enumerate() {
        request.index = index;
    }
    let duration_s = requests.iter().filter_map(|request| request.finish_s).fold(0.0, f64::max);
    ArmRecord { requests, steps, duration_s, ..ArmRecord::default() }
}
