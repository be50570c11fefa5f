//! What if? The arm runs again on a simulated device with one resource doubled; a claim that it was bound by a resource
//! holds if doubling that one moves the result more than doubling any other.

use serde::Serialize;

use crate::Result;
use crate::engine::config::KvLayout;
use crate::engine::device::sim::{Figure, SimDevice};
use crate::engine::device::{CachePlan, Device};
use crate::measure::quantile::Distribution;
use crate::measure::recorder::RequestRecord;
use crate::simulation::{SimulatedArm, SimulatedRun};
use crate::workload::rate::Rate;

/// One resource doubled.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Counterfactual {
    /// As in `bound_by`.
    pub resource: &'static str,
    /// What was doubled, in words.
    pub change: &'static str,
    /// Generated tokens a second, before and after.
    pub output_throughput: (f64, f64),
    pub e2el_p50_ms: (f64, f64),
}

impl Counterfactual {
    /// Output tokens a second gained, as a share: the one figure that claims are compared by. (A latency would not do: it
    /// rises where a further resource lets more requests in, and a rate that is kept up with sets every throughput.)
    pub fn gain(&self) -> f64 {
        self.output_throughput.1 / self.output_throughput.0 - 1.0
    }
}

/// Whether the counterfactuals agree with what the arm was said to be bound by; gains are those of output throughput, as shares of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    pub claimed: String,
    pub claimed_gain: f64,
    pub largest: &'static str,
    pub largest_gain: f64,
    pub holds: bool,
}

/// A claim holds if doubling its resource gains at least this share of the largest gain...
const SHARE_OF_LARGEST: f64 = 0.5;
/// ...and at least so much at all.
const LEAST_GAIN: f64 = 0.01;

fn figures(run: &SimulatedRun) -> (f64, f64) {
    let record = &run.record;
    let tokens: usize = record.requests.iter().map(|request| request.tokens_s.len()).sum();
    let e2el = Distribution::of(record.requests.iter().filter_map(RequestRecord::e2el_s));
    (tokens as f64 / record.duration_s.max(f64::MIN_POSITIVE), e2el.map_or(f64::NAN, |e2el| e2el.p50 * 1e3))
}

/// In the split layout a pool is no larger than its seats can use: where it has a slot for each of them, memory was not
/// what limited it, and more seats would have had a larger pool.
fn pool_follows_seats(plan: &CachePlan) -> bool {
    plan.layout == KvLayout::Split && plan.state_slots >= plan.max_num_seqs
}

/// Runs every counterfactual that applies to the arm.
///
/// # Errors
/// A changed arm that cannot run.
pub fn run(arm: &SimulatedArm, device: &SimDevice, base: &SimulatedRun) -> Result<Vec<Counterfactual>> {
    let before = figures(base);
    let rate_figures = device.parameters(&arm.layout);
    let memory_gb = device.info().memory_bytes as f64 / 1e9;
    // Pools stay as they were unless they are what is doubled.
    let mut pinned = arm.clone();
    pinned.engine.kv_blocks = Some(base.plan.kv_blocks);
    if base.plan.state_slots > 0 {
        pinned.engine.state_slots = Some(base.plan.state_slots);
    }
    let roomy = device.with_figure(Figure::Gb, 4.0 * memory_gb);
    let mut all = Vec::new();
    let mut push = |resource, change, arm: &SimulatedArm, device: &SimDevice| -> Result<()> {
        let after = figures(&arm.run(device)?);
        all.push(Counterfactual {
            resource,
            change,
            output_throughput: (before.0, after.0),
            e2el_p50_ms: (before.1, after.1),
        });
        Ok(())
    };
    for (resource, change, figure) in [
        ("weights", "weights stream twice as fast", Figure::WeightsFactor),
        ("state", "recurrent states move twice as fast", Figure::StateFactor),
        ("kv", "K and V move twice as fast", Figure::KvFactor),
    ] {
        push(resource, change, &pinned, &device.with_figure(figure, 0.5))?;
    }
    let twice = device.with_figure(Figure::Tflops, 2.0 * rate_figures.flops_per_s / 1e12);
    push("compute", "twice the matrix rate", &pinned, &twice)?;

    let mut seats = pinned.clone();
    seats.engine.max_num_seqs *= 2;
    if pool_follows_seats(&base.plan) {
        seats.engine.kv_blocks = Some(2 * base.plan.kv_blocks);
        seats.engine.state_slots = seats.engine.state_slots.map(|slots| 2 * slots);
    }
    push("seats", "twice max_num_seqs", &seats, &roomy)?;

    let mut blocks = pinned.clone();
    blocks.engine.kv_blocks = Some(2 * base.plan.kv_blocks);
    if base.plan.state_slots > 0 {
        blocks.engine.state_slots = Some(2 * base.plan.state_slots);
    }
    push("blocks", "twice the cache memory", &blocks, &roomy)?;

    let mut budget = pinned.clone();
    budget.engine.max_num_batched_tokens *= 2;
    push("token_budget", "twice max_num_batched_tokens", &budget, &roomy)?;

    if let Some(per_s) = arm.load.request_rate.finite() {
        let mut arrivals = pinned.clone();
        arrivals.load.request_rate = Rate::new(2.0 * per_s)?;
        push("arrivals", "twice the request rate", &arrivals, device)?;
    }
    Ok(all)
}

/// `None` for a claim that no counterfactual can test (the host, or nothing).
pub fn check(claimed: &str, all: &[Counterfactual]) -> Option<Check> {
    let of_claim = all.iter().find(|counterfactual| counterfactual.resource == claimed)?;
    let largest = all.iter().max_by(|a, b| a.gain().total_cmp(&b.gain()))?;
    let (claimed_gain, largest_gain) = (of_claim.gain(), largest.gain());
    Some(Check {
        claimed: claimed.to_string(),
        claimed_gain,
        largest: largest.resource,
        largest_gain,
        holds: claimed_gain >= LEAST_GAIN && claimed_gain >= SHARE_OF_LARGEST * largest_gain,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doubled(resource: &'static str, throughput: f64, e2el_ms: f64) -> Counterfactual {
        Counterfactual {
            resource,
            change: "",
            output_throughput: (100.0, throughput),
            e2el_p50_ms: (1000.0, e2el_ms),
        }
    }

    #[test]
    fn a_claim_holds_if_its_resource_gains_most_or_nearly_so() {
        let all =
            [doubled("seats", 180.0, 600.0), doubled("weights", 150.0, 700.0), doubled("kv", 100.0, 1000.0)];
        assert!(check("seats", &all).unwrap().holds);
        // Half of the largest gain is enough: resources overlap.
        assert!(check("weights", &all).unwrap().holds);
        let kv = check("kv", &all).unwrap();
        assert!(!kv.holds);
        assert_eq!((kv.largest, kv.claimed_gain), ("seats", 0.0));
        assert_eq!(check("host", &all), None);
    }

    #[test]
    fn where_nothing_gains_no_claim_holds() {
        let all = [doubled("seats", 100.5, 1000.0), doubled("kv", 100.0, 1000.0)];
        assert!(!check("seats", &all).unwrap().holds);
    }

    #[test]
    fn a_saved_latency_is_not_set_against_a_gained_throughput() {
        // At a rate that is kept up with, a faster resource saves latency and gains next to no throughput.
        let all = [doubled("arrivals", 112.0, 1320.0), doubled("state", 110.0, 480.0)];
        let check = check("arrivals", &all).unwrap();
        assert!(check.holds);
        assert_eq!(check.largest, "arrivals");
    }
}
