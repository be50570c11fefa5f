//! `inferwall diff`: two result files, arm by arm and metric by metric.
//!
//! Reads summary.csv, requests.csv, a run folder, the JSON of `--format json`, and `vllm bench serve --save-result`.
//! Arms are paired by name, or as the only arm of each file. Verdicts are corrected for the number of metrics of an arm.

mod metrics;
mod read;
mod requests;
mod rows;
mod vllm;

pub use metrics::{METRICS, Metric, quantile_of};
pub use read::read;
pub use rows::{DiffRow, to_csv, to_json};

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::max_t;
use super::statistics::{CONFIDENCE, holm};
use super::verdict::{Difference, Verdict};
use crate::{Error, Result};

/// All arms of one result file.
#[derive(Debug, Clone, PartialEq)]
pub struct ResultSet {
    pub source: PathBuf,
    /// In order of first appearance.
    pub arms: Vec<ArmSamples>,
}

/// The repeats of one arm.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ArmSamples {
    pub arm: String,
    /// What makes rows comparable, by column name (`model`, `load`, `device`, ...), as written in the file.
    pub identity: BTreeMap<String, String>,
    /// A value a repeat, by metric.
    pub values: BTreeMap<String, Vec<f64>>,
    /// The values are batch means of a single run rather than repeats.
    pub batches: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    pub rows: Vec<DiffRow>,
    /// Differences in what should be equal, and arms without a partner.
    pub warnings: Vec<String>,
    /// Of each side, before and after: the simulated devices that its arms ran on. Empty: none was simulated.
    pub simulated: [Vec<String>; 2],
}

impl Comparison {
    /// Whether any metric got this verdict: what `--fail-on` asks.
    pub fn has(&self, verdict: Verdict) -> bool {
        self.rows.iter().any(|row| row.verdict == verdict)
    }
}

/// Columns whose difference makes two arms hard to compare.
const IDENTITY: [&str; 8] =
    ["model", "weights", "load", "device", "simulated", "quick", "cpu_math", "schema"];

/// # Errors
/// [`Error::Invalid`] when no arm of one has a partner in the other.
pub fn compare(before: &ResultSet, after: &ResultSet) -> Result<Comparison> {
    let (pairs, mut warnings) = pair(before, after);
    if pairs.is_empty() {
        let names = |set: &ResultSet| {
            let names: Vec<&str> = set.arms.iter().map(|arm| arm.arm.as_str()).collect();
            format!("{} has {}", set.source.display(), names.join(", "))
        };
        return Err(Error::invalid(
            format!("no arm is in both files: {}; {}", names(before), names(after)),
            "compare runs of the same experiment, or files of one arm each",
        ));
    }
    let mut rows = Vec::new();
    for (one, other) in pairs {
        warnings.extend(identity_warnings(one, other));
        rows.extend(compare_arms(one, other));
    }
    Ok(Comparison { rows, warnings, simulated: [simulated(before), simulated(after)] })
}

fn simulated(set: &ResultSet) -> Vec<String> {
    let says = |arm: &&ArmSamples| arm.identity.get("simulated").is_some_and(|word| word == "true");
    let device =
        |arm: &ArmSamples| arm.identity.get("device").cloned().unwrap_or("a simulated device".into());
    let devices: BTreeSet<String> = set.arms.iter().filter(says).map(device).collect();
    devices.into_iter().collect()
}

type Pair<'a> = (&'a ArmSamples, &'a ArmSamples);

fn pair<'a>(before: &'a ResultSet, after: &'a ResultSet) -> (Vec<Pair<'a>>, Vec<String>) {
    if let ([one], [other]) = (before.arms.as_slice(), after.arms.as_slice()) {
        return (vec![(one, other)], Vec::new());
    }
    let find = |set: &'a ResultSet, name: &str| set.arms.iter().find(|arm| arm.arm == name);
    let pairs: Vec<_> = before.arms.iter().filter_map(|one| Some((one, find(after, &one.arm)?))).collect();
    let alone = |set: &'a ResultSet, other: &'a ResultSet| {
        let arms = set.arms.iter().filter(|arm| find(other, &arm.arm).is_none());
        let names: Vec<&str> = arms.map(|arm| arm.arm.as_str()).collect();
        (!names.is_empty()).then(|| format!("only in {}: {}", set.source.display(), names.join(", ")))
    };
    (pairs, alone(before, after).into_iter().chain(alone(after, before)).collect())
}

fn identity_warnings(before: &ArmSamples, after: &ArmSamples) -> Vec<String> {
    let differing = IDENTITY.iter().filter_map(|column| {
        let (one, other) = (before.identity.get(*column)?, after.identity.get(*column)?);
        (one != other).then(|| format!("{}: {column} differs: {one} before, {other} after", after.arm))
    });
    differing.collect()
}

fn compare_arms(before: &ArmSamples, after: &ArmSamples) -> Vec<DiffRow> {
    let differences: Vec<(&Metric, Difference)> = METRICS
        .iter()
        .filter_map(|metric| {
            let (one, other) = (before.values.get(metric.name)?, after.values.get(metric.name)?);
            Some((metric, Difference::of(one, other)?))
        })
        .collect();
    let corrected = corrected_p_values(before, after, &differences);
    let arm =
        if before.arm == after.arm { before.arm.clone() } else { format!("{} -> {}", before.arm, after.arm) };
    differences
        .iter()
        .zip(corrected)
        .map(|((metric, difference), corrected_p)| DiffRow::new(&arm, metric, difference, corrected_p))
        .collect()
}

/// p values after correction for the number of metrics: by relabelling the repeats where there are enough of them for it
/// to be able to decide (four a side), by Holm's rule otherwise. In order; `None` where there is no p value.
fn corrected_p_values(
    before: &ArmSamples,
    after: &ArmSamples,
    differences: &[(&Metric, Difference)],
) -> Vec<Option<f64>> {
    let tested = || differences.iter().filter(|(_, difference)| difference.p.is_some());
    let sides: Vec<max_t::Sides> = tested()
        .filter_map(|(metric, _)| {
            Some((before.values.get(metric.name)?.as_slice(), after.values.get(metric.name)?.as_slice()))
        })
        .collect();
    let sizes = |sides: &max_t::Sides| (sides.0.len(), sides.1.len());
    let alike = sides.windows(2).all(|pair| sizes(&pair[0]) == sizes(&pair[1]));
    let least_p = sides.first().map(sizes).map_or(1.0, |(one, other)| max_t::least_p(one, other));
    let corrected = if alike && least_p < 1.0 - CONFIDENCE {
        max_t::corrected(&sides)
    } else {
        holm(&tested().filter_map(|(_, difference)| difference.p).collect::<Vec<_>>())
    };
    let mut corrected = corrected.into_iter();
    differences.iter().map(|(_, difference)| difference.p.and_then(|_| corrected.next())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arm(name: &str, throughput: &[f64], identity: &[(&str, &str)]) -> ArmSamples {
        ArmSamples {
            arm: name.to_string(),
            identity: identity.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect(),
            values: BTreeMap::from([("request_throughput".to_string(), throughput.to_vec())]),
            batches: false,
        }
    }

    fn set(arms: &[ArmSamples]) -> ResultSet {
        ResultSet { source: "a.csv".into(), arms: arms.to_vec() }
    }

    #[test]
    fn arms_pair_by_name_and_strays_are_named() {
        let before = set(&[arm("x=1", &[1.0, 1.1], &[]), arm("x=2", &[2.0, 2.1], &[])]);
        let after = set(&[arm("x=2", &[4.0, 4.1], &[]), arm("x=3", &[3.0, 3.1], &[])]);
        let comparison = compare(&before, &after).unwrap();
        assert_eq!(comparison.rows.len(), 1);
        assert_eq!((comparison.rows[0].arm.as_str(), comparison.rows[0].verdict), ("x=2", Verdict::Improved));
        assert_eq!(comparison.warnings.len(), 2);
        assert!(comparison.has(Verdict::Improved) && !comparison.has(Verdict::Regressed));
    }

    #[test]
    fn the_only_arms_pair_whatever_their_names() {
        let comparison =
            compare(&set(&[arm("a", &[1.0, 1.0], &[])]), &set(&[arm("b", &[1.0, 1.0], &[])])).unwrap();
        assert_eq!(comparison.rows[0].arm, "a -> b");
        let error = compare(&set(&[arm("a", &[1.0], &[])]), &set(&[])).unwrap_err();
        assert!(error.to_string().contains("no arm is in both files"));
    }

    #[test]
    fn what_should_be_equal_and_is_not_is_a_warning() {
        let before = set(&[arm("a", &[1.0, 1.0], &[("model", "m"), ("device", "cpu"), ("quick", "false")])]);
        let after = set(&[arm("a", &[1.0, 1.0], &[("model", "m"), ("device", "cuda:0"), ("quick", "true")])]);
        let warnings = compare(&before, &after).unwrap().warnings;
        assert_eq!(warnings.len(), 2);
        assert!(warnings[0].contains("device differs: cpu before, cuda:0 after"), "{warnings:?}");
    }

    /// With enough repeats, metrics that move together do not drown each other.
    #[test]
    fn metrics_that_move_together_are_not_charged_for_each() {
        let (mut before, mut after) = (arm("a", &[], &[]), arm("a", &[], &[]));
        for (index, metric) in METRICS.iter().enumerate() {
            let scaled = |values: [f64; 5]| values.map(|value| value * (1.0 + index as f64)).to_vec();
            before.values.insert(metric.name.to_string(), scaled([100.0, 102.0, 98.0, 101.0, 99.0]));
            after.values.insert(metric.name.to_string(), scaled([105.0, 107.0, 103.0, 106.0, 104.0]));
        }
        let rows = compare(&set(&[before]), &set(&[after])).unwrap().rows;
        assert_eq!(rows.len(), METRICS.len());
        assert!(rows.iter().all(|row| matches!(row.verdict, Verdict::Improved | Verdict::Regressed)));
        assert!(rows[0].p.unwrap() * 34.0 > 0.02, "Holm alone would have charged for all of them");
    }

    /// A p value that would count alone does not count among many.
    #[test]
    fn verdicts_are_corrected_for_the_number_of_metrics() {
        let mut before = arm("a", &[100.0, 102.0, 98.0], &[]);
        let mut after = arm("a", &[106.0, 108.0, 104.0], &[]);
        let alone = compare(&set(&[before.clone()]), &set(&[after.clone()])).unwrap();
        assert_eq!(alone.rows[0].verdict, Verdict::Improved, "{:?}", alone.rows[0]);
        for metric in &METRICS[1..12] {
            before.values.insert(metric.name.to_string(), vec![100.0, 102.0, 98.0]);
            after.values.insert(metric.name.to_string(), vec![100.1, 101.9, 98.2]);
        }
        let many = compare(&set(&[before]), &set(&[after])).unwrap();
        assert_eq!(many.rows[0].verdict, Verdict::NotToldApart);
        assert_eq!(many.rows[0].p, alone.rows[0].p);
    }
}
