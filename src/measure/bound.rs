//! Which resource bound an arm, from what its steps cost and from what kept requests waiting.
//!
//! Rule, in this order:
//! 1. `host`: the device was idle for more than half of the step time.
//! 2. `arrivals`: no request was held back for most of the time, and steps or seats stood idle for want of requests.
//! 3. `seats`, `blocks`, `token_budget`: requests were held back by that limit for at least half of the step time, and
//!    the part of a step that is shared by its sequences (the weights' stream) takes at least half of its floor, so that
//!    a further sequence would have been cheap.
//! 4. Otherwise the dearest class of the floor: `weights`, `state`, `kv` or `compute`.
//!
//! The floor of a step is split on the device's ceilings: weights and GEMMs overlap, so that the larger of the two counts
//! (`weights` or `compute`), then state, then KV and activations.

use super::recorder::ArmRecord;
use crate::engine::account::{Ceilings, StepCost};
use crate::engine::step_report::HeldBack;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BoundBy {
    Weights,
    State,
    Kv,
    Compute,
    Seats,
    Blocks,
    TokenBudget,
    Arrivals,
    Host,
}

impl BoundBy {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::State => "state",
            Self::Kv => "kv",
            Self::Compute => "compute",
            Self::Seats => "seats",
            Self::Blocks => "blocks",
            Self::TokenBudget => "token_budget",
            Self::Arrivals => "arrivals",
            Self::Host => "host",
        }
    }
}

/// Seconds of a floor by class.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct FloorShares {
    pub weights_s: f64,
    pub state_s: f64,
    pub kv_s: f64,
    pub compute_s: f64,
}

impl FloorShares {
    pub fn of(cost: &StepCost, ceilings: &Ceilings) -> Self {
        let stream_s = |bytes: u64| per(bytes as f64, ceilings.read_bytes_per_s);
        let weights_s = stream_s(cost.bytes.weights);
        let compute_s = per(cost.flops as f64, ceilings.flops_per_s);
        let overlapped = if compute_s > weights_s { (0.0, compute_s) } else { (weights_s, 0.0) };
        Self {
            weights_s: overlapped.0,
            state_s: stream_s(cost.bytes.state),
            kv_s: stream_s(cost.bytes.kv + cost.bytes.activations),
            compute_s: overlapped.1,
        }
    }

    fn add(&mut self, other: Self) {
        self.weights_s += other.weights_s;
        self.state_s += other.state_s;
        self.kv_s += other.kv_s;
        self.compute_s += other.compute_s;
    }

    pub fn total_s(&self) -> f64 {
        self.weights_s + self.state_s + self.kv_s + self.compute_s
    }

    /// The dearest class; `None` when nothing was counted.
    fn dearest(&self) -> Option<BoundBy> {
        let classes = [
            (self.weights_s, BoundBy::Weights),
            (self.state_s, BoundBy::State),
            (self.kv_s, BoundBy::Kv),
            (self.compute_s, BoundBy::Compute),
        ];
        let dearest = classes.into_iter().max_by(|a, b| a.0.total_cmp(&b.0))?;
        (dearest.0 > 0.0).then_some(dearest.1)
    }
}

fn per(amount: f64, ceiling: f64) -> f64 {
    if ceiling > 0.0 { amount / ceiling } else { 0.0 }
}

/// Share of step time for which something kept the head of the queue waiting, and what did so for longest.
pub fn held_back(record: &ArmRecord) -> (f64, Option<HeldBack>) {
    let limits = [HeldBack::Seats, HeldBack::StateSlots, HeldBack::Blocks, HeldBack::TokenBudget];
    let wall_s: f64 = record.steps.iter().map(|step| step.wall_s).sum();
    let by = |limit| -> f64 {
        let steps = record.steps.iter().filter(|step| step.report.held_back_by == Some(limit));
        steps.map(|step| step.wall_s).sum()
    };
    let longest = limits.into_iter().map(|limit| (by(limit), limit)).max_by(|a, b| a.0.total_cmp(&b.0));
    let held_s: f64 = limits.into_iter().map(by).sum();
    let share = if wall_s > 0.0 { held_s / wall_s } else { 0.0 };
    (share, longest.filter(|(seconds, _)| *seconds > 0.0).map(|(_, limit)| limit))
}

/// `None` for a record without steps, or whose steps carry no cost and were not held back.
pub fn bound_by(record: &ArmRecord, ceilings: &Ceilings) -> Option<BoundBy> {
    let wall_s: f64 = record.steps.iter().map(|step| step.wall_s).sum();
    if wall_s <= 0.0 {
        return None;
    }
    let device_s: f64 = record.steps.iter().map(|step| step.report.device_s).sum();
    if device_s < 0.5 * wall_s {
        return Some(BoundBy::Host);
    }
    let mut floor = FloorShares::default();
    record.steps.iter().for_each(|step| floor.add(FloorShares::of(&step.report.cost, ceilings)));
    let (held_share, limit) = held_back(record);
    if held_share < 0.5 && !is_flood(record) {
        return Some(BoundBy::Arrivals);
    }
    let shared_dominates = floor.total_s() == 0.0 || floor.weights_s >= 0.5 * floor.total_s();
    match limit {
        Some(limit) if held_share >= 0.5 && shared_dominates => Some(match limit {
            HeldBack::Seats => BoundBy::Seats,
            HeldBack::StateSlots | HeldBack::Blocks => BoundBy::Blocks,
            HeldBack::TokenBudget => BoundBy::TokenBudget,
        }),
        _ => floor.dearest(),
    }
}

/// All requests were due at the start: more of them at once could not have been asked for.
fn is_flood(record: &ArmRecord) -> bool {
    record.requests.iter().all(|request| request.intended_s <= 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::account::ByteClasses;
    use crate::engine::step_report::StepKind;
    use crate::measure::testing::{answered, record_of, step};

    const CEILINGS: Ceilings = Ceilings {
        read_bytes_per_s: 1e9,
        copy_bytes_per_s: 1e9,
        flops_per_s: 1e12,
        launch_s: 0.0,
        measured: true,
    };

    /// Ten steps of 10 ms, with bytes in megabytes (a millisecond each) and FLOPs in milliseconds.
    fn record(weights: u64, state: u64, kv: u64, compute: u64, held: Option<HeldBack>) -> ArmRecord {
        let steps = (0..10).map(|index| {
            let mut step = step(StepKind::Decode, f64::from(index) * 0.01, f64::from(index + 1) * 0.01);
            let bytes =
                ByteClasses { weights: weights << 20, state: state << 20, kv: kv << 20, activations: 0 };
            step.report.cost = StepCost { bytes, flops: compute * 1_050_000_000, ..StepCost::default() };
            step.report.held_back_by = held;
            step
        });
        record_of(vec![answered(0.0, 0.0, &[0.1])], steps.collect())
    }

    fn bound(record: &ArmRecord) -> &'static str {
        bound_by(record, &CEILINGS).map_or("", BoundBy::as_str)
    }

    #[test]
    fn a_limit_binds_while_a_further_sequence_would_be_cheap() {
        assert_eq!(bound(&record(8, 1, 0, 2, Some(HeldBack::Seats))), "seats");
        assert_eq!(bound(&record(8, 1, 0, 2, Some(HeldBack::StateSlots))), "blocks");
        assert_eq!(bound(&record(8, 1, 0, 2, Some(HeldBack::TokenBudget))), "token_budget");
        // Once private work dominates, more seats would not help: the work itself binds.
        assert_eq!(bound(&record(4, 6, 1, 2, Some(HeldBack::Seats))), "state");
        assert_eq!(bound(&record(4, 1, 6, 2, Some(HeldBack::Seats))), "kv");
        assert_eq!(bound(&record(4, 1, 1, 9, Some(HeldBack::Blocks))), "compute");
    }

    #[test]
    fn a_flood_without_a_limit_is_bound_by_its_dearest_class() {
        assert_eq!(bound(&record(8, 1, 0, 2, None)), "weights");
        assert_eq!(bound(&record(8, 9, 0, 2, None)), "state");
    }

    #[test]
    fn arrivals_and_the_host_come_first() {
        let mut trickle = record(8, 1, 0, 2, None);
        trickle.requests[0].intended_s = 0.02;
        assert_eq!(bound(&trickle), "arrivals");
        let mut idle = record(8, 1, 0, 2, Some(HeldBack::Seats));
        idle.steps.iter_mut().for_each(|step| step.report.device_s = 0.004);
        assert_eq!(bound(&idle), "host");
        assert_eq!(bound(&ArmRecord::default()), "");
    }
}
