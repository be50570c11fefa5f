//! One line of a comparison, and its forms as JSON and CSV.

use serde::Serialize;

use super::Metric;
use crate::measure::verdict::{Difference, Verdict};
use crate::{Error, Result};

/// Serialises to the JSON row of `diff --format json`: change and its bounds are fractions (0.05 is 5 % more), `p` is
/// Welch's two-sided value before correction, `effect_size` is Hedges' g (the difference over the pooled standard
/// deviation of the repeats, corrected for their small number); what does not apply is null.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DiffRow {
    pub arm: String,
    pub metric: &'static str,
    /// Means over the repeats.
    pub before: f64,
    pub after: f64,
    pub change: Option<f64>,
    pub low: Option<f64>,
    pub high: Option<f64>,
    pub p: Option<f64>,
    pub verdict: Verdict,
    pub effect_size: Option<f64>,
    #[serde(skip)]
    pub more: DiffDetails,
}

/// What CSV shows besides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DiffDetails {
    /// `p` after correction for the number of metrics of the arm; the verdict goes by it.
    pub p_corrected: Option<f64>,
    pub repeats_before: usize,
    pub repeats_after: usize,
    /// Neither side varies: the difference is exact, without a p value.
    pub deterministic: bool,
}

impl DiffRow {
    pub fn new(arm: &str, metric: &Metric, difference: &Difference, p_corrected: Option<f64>) -> Self {
        Self {
            arm: arm.to_string(),
            metric: metric.name,
            before: difference.before,
            after: difference.after,
            change: difference.change,
            low: difference.interval.map(|interval| interval.0),
            high: difference.interval.map(|interval| interval.1),
            p: difference.p,
            verdict: difference.verdict(p_corrected, metric.better),
            effect_size: difference.effect_size,
            more: DiffDetails {
                p_corrected,
                repeats_before: difference.repeats.0,
                repeats_after: difference.repeats.1,
                deterministic: difference.deterministic,
            },
        }
    }
}

/// # Errors
/// None that a user could cause; the signature is serde's.
pub fn to_json(rows: &[DiffRow]) -> Result<String> {
    serde_json::to_string_pretty(rows).map_err(|error| Error::bug(format!("cannot write JSON: {error}")))
}

/// The JSON columns, then `p_corrected, effect_size, repeats_before, repeats_after`.
///
/// # Errors
/// None that a user could cause; the signature is the CSV writer's.
pub fn to_csv(rows: &[DiffRow]) -> Result<String> {
    #[derive(Serialize)]
    struct CsvRow<'a> {
        arm: &'a str,
        metric: &'a str,
        before: f64,
        after: f64,
        change: Option<f64>,
        low: Option<f64>,
        high: Option<f64>,
        p: Option<f64>,
        verdict: Verdict,
        p_corrected: Option<f64>,
        effect_size: Option<f64>,
        repeats_before: usize,
        repeats_after: usize,
    }
    let mut writer = csv::Writer::from_writer(Vec::new());
    let failed = |error: String| Error::bug(format!("cannot write the comparison: {error}"));
    for row in rows {
        let line = CsvRow {
            arm: &row.arm,
            metric: row.metric,
            before: row.before,
            after: row.after,
            change: row.change,
            low: row.low,
            high: row.high,
            p: row.p,
            verdict: row.verdict,
            p_corrected: row.more.p_corrected,
            effect_size: row.effect_size,
            repeats_before: row.more.repeats_before,
            repeats_after: row.more.repeats_after,
        };
        writer.serialize(line).map_err(|error| failed(error.to_string()))?;
    }
    let bytes = writer.into_inner().map_err(|error| failed(error.to_string()))?;
    String::from_utf8(bytes).map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::compare::METRICS;

    fn row(before: &[f64], after: &[f64]) -> DiffRow {
        let difference = Difference::of(before, after).unwrap();
        DiffRow::new("a", &METRICS[0], &difference, difference.p)
    }

    #[test]
    fn json_rows_have_exactly_the_agreed_keys() {
        let json: serde_json::Value =
            serde_json::from_str(&to_json(&[row(&[10.0], &[20.0])]).unwrap()).unwrap();
        let keys: Vec<&String> = json[0].as_object().unwrap().keys().collect();
        assert_eq!(
            keys,
            ["arm", "metric", "before", "after", "change", "low", "high", "p", "verdict", "effect_size"]
        );
        assert_eq!(json[0]["change"], 1.0);
        assert!(json[0]["p"].is_null());
        assert_eq!(json[0]["verdict"], "too few repeats");
        assert!(json[0]["effect_size"].is_null());
        // Means 10 and 14, standard deviation 2: d = 2, times 1 - 3 / (4 x 4 - 1).
        let varied = to_json(&[row(&[8.0, 10.0, 12.0], &[12.0, 14.0, 16.0])]).unwrap();
        let varied: serde_json::Value = serde_json::from_str(&varied).unwrap();
        assert!((varied[0]["effect_size"].as_f64().unwrap() - 1.6).abs() < 1e-12, "{varied}");
    }

    #[test]
    fn csv_has_empty_fields_for_what_does_not_apply() {
        let csv = to_csv(&[row(&[10.0, 10.0], &[20.0, 20.0])]).unwrap();
        let lines: Vec<&str> = csv.lines().collect();
        assert_eq!(
            lines[0],
            "arm,metric,before,after,change,low,high,p,verdict,p_corrected,effect_size,repeats_before,repeats_after"
        );
        assert_eq!(lines[1], "a,request_throughput,10.0,20.0,1.0,1.0,1.0,,improved,,,2,2");
    }
}
