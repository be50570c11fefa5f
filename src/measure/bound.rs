//! Which resource bound an arm, from what its steps cost and from what kept requests waiting.
//!
//! Rule, in this order:
//! 1. `host`: the device was idle for more than half of the step time.
//! 2. `arrivals`: the engine had nothing to do for part of the time, or, at a finite rate, kept up with it; and no limit
//!    held requests back for most of the time, nor at the end of the arrivals. (An engine that answers fewer than come
//!    is overloaded, even where its seats hold all that wait.)
//! 3. `seats`, `blocks`, `token_budget`: requests were held back by that limit for at least half of the step time (at a
//!    finite rate also: of the last quarter of the arrivals), and the part of a step that is shared by its sequences
//!    (the weights' stream) takes at least half of its floor, so that a further sequence would have been cheap.
//! 4. Otherwise the dearest class of the floor: `weights`, `state`, `kv` or `compute`.
//!
//! The floor of a step is split on the device's ceilings: weights and GEMMs overlap, so that the larger of the two counts
//! (`weights` or `compute`), then state, then KV and activations.

use super::recorder::{ArmRecord, StepRecord};
use crate::engine::account::{Ceilings, StepCost};
use crate::engine::step_report::HeldBack;
use crate::workload::rate::Rate;

/// Share of the duration without a step from which on the engine counts as waiting for requests. (Floods and closed loops
/// without pauses have none, but for the hand-over of an answer.)
const IDLE_SHARE: f64 = 0.05;
/// Share of the requests of the second half of the arrivals that must be answered within it for a rate to be kept up with.
const KEPT_UP_SHARE: f64 = 0.8;

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
    /// All 0 without ceilings.
    pub fn of(cost: &StepCost, ceilings: Option<&Ceilings>) -> Self {
        let Some(ceilings) = ceilings else { return Self::default() };
        let stream_s = |bytes: u64| bytes as f64 / ceilings.read_bytes_per_s;
        let weights_s = stream_s(cost.bytes.weights);
        let compute_s = cost.flops as f64 / ceilings.flops_per_s;
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

/// Share of the time of some steps for which something kept the head of the queue waiting, and what did so for longest.
fn held_back<'a>(steps: impl Iterator<Item = &'a StepRecord>) -> (f64, Option<HeldBack>) {
    let limits = [HeldBack::Seats, HeldBack::StateSlots, HeldBack::Blocks, HeldBack::TokenBudget];
    let mut by = limits.map(|limit| (0.0, limit));
    let mut wall_s = 0.0;
    for step in steps {
        wall_s += step.wall_s;
        if let Some(held) = by.iter_mut().find(|(_, limit)| step.report.held_back_by == Some(*limit)) {
            held.0 += step.wall_s;
        }
    }
    let held_s: f64 = by.iter().map(|(seconds, _)| seconds).sum();
    let longest = by.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(seconds, _)| *seconds > 0.0);
    (if wall_s > 0.0 { held_s / wall_s } else { 0.0 }, longest.map(|(_, limit)| limit))
}

/// The limit that held requests back for most of the time, at a finite rate also of the last quarter of the arrivals.
/// (Arrivals that are over before half of the run is are a burst, and their last quarter a moment of it.)
fn limit_of(record: &ArmRecord, at_a_rate: bool) -> Option<HeldBack> {
    let (share, limit) = held_back(record.steps.iter());
    if share >= 0.5 {
        return limit;
    }
    let last_s = last_arrival_s(record);
    if !at_a_rate || last_s < 0.5 * record.duration_s {
        return None;
    }
    let late = |step: &&StepRecord| (0.75 * last_s..=last_s).contains(&step.report.start_s);
    let (share, limit) = held_back(record.steps.iter().filter(late));
    limit.filter(|_| share >= 0.5)
}

fn last_arrival_s(record: &ArmRecord) -> f64 {
    record.requests.iter().map(|request| request.intended_s).fold(0.0, f64::max)
}

/// Whether answers came as fast as requests in the second half of the arrivals.
fn kept_up(record: &ArmRecord) -> bool {
    let last_s = last_arrival_s(record);
    let in_second_half = |time_s: f64| time_s > 0.5 * last_s && time_s <= last_s;
    let arrived = record.requests.iter().filter(|request| in_second_half(request.intended_s)).count();
    let answered = record.requests.iter().filter(|request| request.finish_s.is_some_and(in_second_half));
    answered.count() as f64 >= KEPT_UP_SHARE * arrived as f64
}

/// `offered_rate` as in [`Schedule::offered_rate`](crate::workload::schedule::Schedule). `None` for a record without
/// steps, or whose steps carry no cost and were not held back.
pub fn bound_by(
    record: &ArmRecord,
    ceilings: Option<&Ceilings>,
    offered_rate: Option<Rate>,
) -> Option<BoundBy> {
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
    let at_a_rate = offered_rate.is_some_and(|rate| rate.finite().is_some());
    let limit = limit_of(record, at_a_rate);
    let idle_s = record.duration_s - wall_s;
    if limit.is_none() && (idle_s > IDLE_SHARE * record.duration_s || (at_a_rate && kept_up(record))) {
        return Some(BoundBy::Arrivals);
    }
    let shared_dominates = floor.total_s() == 0.0 || floor.weights_s >= 0.5 * floor.total_s();
    match limit {
        Some(limit) if shared_dominates => Some(match limit {
            HeldBack::Seats => BoundBy::Seats,
            HeldBack::StateSlots | HeldBack::Blocks => BoundBy::Blocks,
            HeldBack::TokenBudget => BoundBy::TokenBudget,
        }),
        _ => floor.dearest(),
    }
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
        bound_by(record, Some(&CEILINGS), Some(Rate::FLOOD)).map_or("", BoundBy::as_str)
    }

    /// The same steps under ten requests, 10 ms apart, each answered after `e2el_s`.
    fn bound_at_a_rate(mut record: ArmRecord, e2el_s: f64) -> &'static str {
        record.requests = (0..10)
            .map(|index| answered(f64::from(index) * 0.01, 0.0, &[f64::from(index) * 0.01 + e2el_s]))
            .collect();
        bound_by(&record, Some(&CEILINGS), Rate::new(100.0).ok()).map_or("", BoundBy::as_str)
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
    fn the_host_comes_first() {
        let mut idle = record(8, 1, 0, 2, Some(HeldBack::Seats));
        idle.steps.iter_mut().for_each(|step| step.report.device_s = 0.004);
        assert_eq!(bound(&idle), "host");
        assert_eq!(bound(&ArmRecord::default()), "");
    }

    #[test]
    fn arrivals_bind_an_engine_that_waits_for_requests_or_keeps_up_with_them() {
        assert_eq!(bound_at_a_rate(record(8, 1, 0, 2, None), 0.01), "arrivals");
        // No step for half of the time: whatever the load is.
        let mut pauses = record(8, 1, 0, 2, None);
        pauses.duration_s = 0.2;
        assert_eq!(bound(&pauses), "arrivals");
        assert_eq!(bound_by(&pauses, Some(&CEILINGS), None), Some(BoundBy::Arrivals));
        // A closed loop that never pauses waits for its own answers.
        pauses.duration_s = 0.1;
        pauses.requests[0].intended_s = 0.02;
        assert_eq!(bound_by(&pauses, Some(&CEILINGS), None), Some(BoundBy::Weights));
    }

    #[test]
    fn an_overloaded_engine_is_not_bound_by_arrivals() {
        // Seats for all of them, but they are answered far more slowly than they come.
        assert_eq!(bound_at_a_rate(record(8, 1, 0, 2, None), 0.08), "weights");
        // Kept up with on the whole; held back at the end of the arrivals, which is a queue that grew.
        let held_late = |mut record: ArmRecord| {
            record.steps[7..].iter_mut().for_each(|step| step.report.held_back_by = Some(HeldBack::Blocks));
            record
        };
        assert_eq!(bound_at_a_rate(held_late(record(8, 1, 0, 2, None)), 0.01), "blocks");
        assert_eq!(bound_at_a_rate(held_late(record(2, 1, 0, 8, None)), 0.01), "compute");
        // Held back for a moment in between.
        let mut burst = record(8, 1, 0, 2, None);
        burst.steps[3].report.held_back_by = Some(HeldBack::Seats);
        assert_eq!(bound_at_a_rate(burst, 0.01), "arrivals");
    }
}
