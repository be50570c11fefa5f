//! Claims checked against results: *holds*, *does not hold*, or *not comparable* here, with the reason.

use serde::{Deserialize, Serialize};

use super::RunResults;
use crate::engine::device::DeviceKind;
use crate::experiment::plan::{Plan, means};
use crate::experiment::spec::{ClaimSpec, FitTerm, MODEL_METRICS};
use crate::measure::step_fit::StepFit;
use crate::numbers::{median, number, optional};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Holds,
    DoesNotHold,
    NotComparable,
}

impl Outcome {
    pub fn words(self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::DoesNotHold => "does not hold",
            Self::NotComparable => "not comparable on this rig",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    pub text: String,
    /// What was asked for, in words.
    pub expected: String,
    pub measured: Option<f64>,
    pub outcome: Outcome,
    /// Why it is not comparable; empty otherwise.
    #[serde(default)]
    pub reason: String,
}

impl Verdict {
    /// `[holds] text (expected ..., measured ...)`.
    pub fn line(&self) -> String {
        let reason = if self.reason.is_empty() { String::new() } else { format!(" ({})", self.reason) };
        format!(
            "[{}{reason}] {}: expected {}, measured {}",
            self.outcome.words(),
            self.text,
            self.expected,
            optional(self.measured)
        )
    }
}

/// A line on the claims that a plan left out; `None` where there are none.
pub fn left_out(plan: &Plan) -> Option<String> {
    let (count, more) = (plan.claims_left_out, if plan.claims.is_empty() { "" } else { " more" });
    (count > 0).then(|| format!("{count}{more} left out, of arms that were not chosen"))
}

pub fn check(results: &RunResults) -> Vec<Verdict> {
    results.record.plan.claims.iter().map(|claim| verdict(results, claim)).collect()
}

fn verdict(results: &RunResults, claim: &ClaimSpec) -> Verdict {
    let measured = measure(results, claim);
    let reason =
        if measured.is_none() { Some(missing(results, claim)) } else { not_comparable(results, claim) };
    let outcome = match (measured, &reason) {
        (Some(value), None) if within(claim, value) => Outcome::Holds,
        (Some(_), None) => Outcome::DoesNotHold,
        _ => Outcome::NotComparable,
    };
    Verdict {
        text: claim.text.clone(),
        expected: expected(claim),
        measured,
        outcome,
        reason: reason.unwrap_or_default(),
    }
}

fn measure(results: &RunResults, claim: &ClaimSpec) -> Option<f64> {
    if let Some(term) = claim.fit {
        let fitted = |fit: StepFit| match term {
            FitTerm::SharedMs => Some(fit.shared_ms),
            FitTerm::PrivateMs => Some(fit.private_ms),
            FitTerm::CrossingSequences => fit.crossing(),
        };
        let of_model = |arm: &str| {
            fitted(if arm.contains('*') {
                results.step_fit_of(|name| means(arm, name))?
            } else {
                results.step_fit(model_of(results, arm)?)?
            })
        };
        let value = match claim.arm.as_deref() {
            Some(arm) => of_model(arm)?,
            None => fitted(results.only_step_fit()?)?,
        };
        return match claim.over.as_deref() {
            None => Some(value),
            Some(over) => Some(value / of_model(over)?).filter(|ratio| ratio.is_finite()),
        };
    }
    let metric = claim.metric.as_deref()?;
    let of_arm = |arm: &str| match &claim.population {
        None if MODEL_METRICS.contains(&metric) => of_model_record(results, arm, metric),
        None => results.median(arm, |summary| summary.metric(metric)),
        Some(population) => {
            let rows =
                results.populations.iter().filter(|row| row.arm == arm && row.population == *population);
            median(rows.filter_map(|row| serde_json::to_value(row).ok()?.get(metric)?.as_f64()))
        }
    };
    let value = of_arm(claim.arm.as_deref()?)?;
    match &claim.over {
        None => Some(value),
        Some(over) => Some(value / of_arm(over)?).filter(|ratio| ratio.is_finite()),
    }
}

/// The model of an arm that has rows.
fn model_of<'a>(results: &'a RunResults, arm: &str) -> Option<&'a str> {
    let summary = results.summaries.iter().find(|summary| summary.arm == arm)?;
    Some(summary.model.as_str())
}

fn of_model_record(results: &RunResults, arm: &str, metric: &str) -> Option<f64> {
    let model = model_of(results, arm)?;
    let record = results.record.models.iter().find(|record| record.reference == model)?;
    match metric {
        "weight_bytes" => Some(record.weight_bytes as f64),
        "streamed_bytes" => Some(record.streamed_bytes as f64),
        _ => record.perplexity,
    }
}

fn missing(results: &RunResults, claim: &ClaimSpec) -> String {
    let arms = results.arms();
    let absent =
        [&claim.arm, &claim.over].into_iter().flatten().find(|arm| !arms.iter().any(|name| means(arm, name)));
    match absent {
        Some(arm) => format!("arm {arm} was not run"),
        None if claim.fit.is_some() => "too few batch sizes for a fit".to_string(),
        None => "nothing measured".to_string(),
    }
}

/// Why a claim that was measured says nothing here; `None` when it does.
fn not_comparable(results: &RunResults, claim: &ClaimSpec) -> Option<String> {
    if claim.rig == "any" {
        return None;
    }
    let device = &results.record.device;
    let class = match device.kind {
        DeviceKind::Cpu => "cpu",
        DeviceKind::Cuda => "cuda",
        DeviceKind::Sim => "sim",
    };
    // (A simulated H200 is not the H200 a figure was published for.)
    let by_name = !device.simulated && device.name.contains(&claim.rig);
    if claim.rig != class && claim.rig != device.id && !by_name {
        return Some(format!("published for {}", claim.rig));
    }
    results.record.plan.altered.then(|| "the load or the engine was changed by flags".to_string())
}

fn within(claim: &ClaimSpec, value: f64) -> bool {
    match (claim.expect, claim.tolerance) {
        (Some(expect), Some(tolerance)) => (value - expect).abs() <= tolerance * expect.abs() * (1.0 + 1e-12),
        _ => {
            claim.at_least.is_none_or(|least| value >= least)
                && claim.at_most.is_none_or(|most| value <= most)
        }
    }
}

/// The limits in words.
pub fn expected(claim: &ClaimSpec) -> String {
    match (claim.expect, claim.tolerance, claim.at_least, claim.at_most) {
        (Some(expect), Some(tolerance), ..) => format!("{} ±{} %", number(expect), number(tolerance * 100.0)),
        (.., Some(least), Some(most)) if least == most => number(least),
        (.., Some(least), Some(most)) => format!("{} to {}", number(least), number(most)),
        (.., Some(least), None) => format!("{} or more", number(least)),
        (.., None, Some(most)) => format!("{} or less", number(most)),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(expect: Option<(f64, f64)>, least: Option<f64>, most: Option<f64>) -> ClaimSpec {
        ClaimSpec {
            text: "t".into(),
            metric: Some("output_throughput".into()),
            population: None,
            arm: Some("a".into()),
            over: None,
            fit: None,
            expect: expect.map(|pair| pair.0),
            tolerance: expect.map(|pair| pair.1),
            at_least: least,
            at_most: most,
            rig: "any".into(),
        }
    }

    #[test]
    fn a_tolerance_is_relative_and_its_edge_is_inside() {
        let band = claim(Some((22.0, 0.05)), None, None);
        assert!(within(&band, 23.1) && within(&band, 20.9) && !within(&band, 23.2));
        assert_eq!(expected(&band), "22.0 ±5.00 %");
    }

    #[test]
    fn bounds_include_their_ends() {
        let exact = claim(None, Some(146.0), Some(146.0));
        assert!(within(&exact, 146.0) && !within(&exact, 145.0));
        assert_eq!(expected(&exact), "146");
        assert!(within(&claim(None, Some(2.0), None), 2.0) && !within(&claim(None, None, Some(1.0)), 1.01));
    }
}
