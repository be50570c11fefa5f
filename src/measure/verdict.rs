//! What to say of one metric measured before and after: criterion's four words, or that too little is known to say one.
//!
//! A change counts when its p value, corrected for the number of metrics, is below 5 %; it is then `within noise` unless its whole 95 % interval
//! lies beyond the noise floor of 1 %. One that does not count is `no change` only where its whole interval lies within
//! 5 % to either side; where it does not, the repeats do not tell the two apart, which says nothing of equality. Values without any variance are compared as they are: equal ones are `no change`,
//! different ones a deterministic difference, which has a verdict and no p value.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use super::statistics::{self, CONFIDENCE, mean, variance};
use crate::Error;

/// Relative changes within this are not worth a verdict.
pub const NOISE_FLOOR: f64 = 0.01;

/// A relative change whose whole interval lies within this to either side is none.
pub const NO_CHANGE_BAND: f64 = 0.05;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Improved,
    Regressed,
    NoChange,
    WithinNoise,
    NotToldApart,
    TooFewRepeats,
}

impl Verdict {
    pub const ALL: [Self; 6] = [
        Self::Improved,
        Self::Regressed,
        Self::NoChange,
        Self::WithinNoise,
        Self::NotToldApart,
        Self::TooFewRepeats,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Improved => "improved",
            Self::Regressed => "regressed",
            Self::NoChange => "no change",
            Self::WithinNoise => "within noise",
            Self::NotToldApart => "not told apart",
            Self::TooFewRepeats => "too few repeats",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Serialize for Verdict {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl FromStr for Verdict {
    type Err = Error;

    /// The word, with `-` or `_` for a blank.
    fn from_str(text: &str) -> Result<Self, Error> {
        let word = text.trim().replace(['-', '_'], " ");
        Self::ALL.into_iter().find(|verdict| verdict.as_str() == word).ok_or_else(|| {
            Error::invalid(
                format!("`{text}` is not a verdict"),
                "one of improved, regressed, no-change, within-noise, not-told-apart, too-few-repeats",
            )
        })
    }
}

/// Which way is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    Higher,
    Lower,
}

/// One metric of one pair of arms, before its verdict.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    pub before: f64,
    pub after: f64,
    /// after/before - 1; `None` when before is 0.
    pub change: Option<f64>,
    /// 95 % interval of the change.
    pub interval: Option<(f64, f64)>,
    pub p: Option<f64>,
    pub effect_size: Option<f64>,
    pub repeats: (usize, usize),
    /// Neither side varies.
    pub deterministic: bool,
}

impl Difference {
    /// Of two samples of repeats; `None` when a side is empty. Before and after are means.
    pub fn of(before: &[f64], after: &[f64]) -> Option<Self> {
        if before.is_empty() || after.is_empty() {
            return None;
        }
        let (mean_before, mean_after) = (exact_mean(before), exact_mean(after));
        let change = (mean_before != 0.0).then(|| mean_after / mean_before - 1.0);
        let enough = before.len() >= 2 && after.len() >= 2;
        let deterministic = enough && constant(before) && constant(after);
        let interval = if deterministic {
            change.map(|change| (change, change))
        } else {
            statistics::relative_change_interval(before, after)
        };
        Some(Self {
            before: mean_before,
            after: mean_after,
            change,
            interval,
            p: if deterministic { None } else { statistics::welch(before, after).map(|test| test.p) },
            effect_size: statistics::effect_size(before, after).filter(|_| !deterministic),
            repeats: (before.len(), after.len()),
            deterministic,
        })
    }

    /// `corrected_p` is [`Difference::p`] after correction for the number of metrics.
    pub fn verdict(&self, corrected_p: Option<f64>, better: Better) -> Verdict {
        if self.repeats.0 < 2 || self.repeats.1 < 2 {
            return Verdict::TooFewRepeats;
        }
        let significant = match corrected_p {
            _ if self.deterministic => self.before != self.after,
            Some(p) => p < 1.0 - CONFIDENCE,
            None => false,
        };
        if !significant {
            let within = |(low, high): (f64, f64)| low >= -NO_CHANGE_BAND && high <= NO_CHANGE_BAND;
            let none = self.before == self.after && self.deterministic || self.interval.is_some_and(within);
            return if none { Verdict::NoChange } else { Verdict::NotToldApart };
        }
        let rises = match (self.interval, self.change) {
            (Some((low, _)), _) if low > NOISE_FLOOR => true,
            (Some((_, high)), _) if high < -NOISE_FLOOR => false,
            // From or to 0 there is no ratio to hold against the noise floor; any change is beyond it.
            (None, _) => self.after > self.before,
            _ => return Verdict::WithinNoise,
        };
        if rises == (better == Better::Higher) { Verdict::Improved } else { Verdict::Regressed }
    }
}

fn constant(values: &[f64]) -> bool {
    values.iter().all(|value| *value == values[0]) || variance(values) == 0.0
}

/// The mean, without rounding where all values are equal.
fn exact_mean(values: &[f64]) -> f64 {
    if constant(values) { values[0] } else { mean(values) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(before: &[f64], after: &[f64], better: Better) -> Verdict {
        let difference = Difference::of(before, after).unwrap();
        difference.verdict(difference.p, better)
    }

    #[test]
    fn clear_changes_go_by_the_metric_s_direction() {
        let (before, after) = ([100.0, 101.0, 99.0, 100.5], [110.0, 111.0, 109.0, 110.5]);
        assert_eq!(verdict(&before, &after, Better::Higher), Verdict::Improved);
        assert_eq!(verdict(&before, &after, Better::Lower), Verdict::Regressed);
        assert_eq!(verdict(&after, &before, Better::Higher), Verdict::Regressed);
    }

    #[test]
    fn small_but_certain_changes_are_within_noise() {
        let before = [100.0, 100.01, 99.99, 100.0];
        let after = [100.5, 100.51, 100.49, 100.5];
        assert_eq!(verdict(&before, &after, Better::Higher), Verdict::WithinNoise);
    }

    #[test]
    fn overlapping_samples_are_equal_only_where_the_interval_is_narrow() {
        let wide = verdict(&[100.0, 110.0, 90.0], &[103.0, 95.0, 112.0], Better::Higher);
        assert_eq!(wide, Verdict::NotToldApart);
        let narrow = verdict(&[100.0, 101.0, 99.0], &[100.3, 99.5, 101.2], Better::Higher);
        assert_eq!(narrow, Verdict::NoChange);
        // To 0 and back there is no ratio, so no interval.
        assert_eq!(verdict(&[0.0, 0.0], &[0.0, 1.0], Better::Lower), Verdict::NotToldApart);
    }

    #[test]
    fn values_without_variance_are_compared_as_they_are() {
        assert_eq!(verdict(&[0.1; 3], &[0.1; 3], Better::Higher), Verdict::NoChange);
        assert_eq!(verdict(&[10.0; 2], &[11.0; 2], Better::Lower), Verdict::Regressed);
        assert_eq!(verdict(&[10.0; 2], &[10.05; 2], Better::Lower), Verdict::WithinNoise);
        let difference = Difference::of(&[10.0; 2], &[11.0; 2]).unwrap();
        assert!(difference.deterministic && difference.p.is_none());
        assert_eq!(difference.interval, difference.change.map(|change| (change, change)));
        // From 0 there is no relative change, and the difference is still seen.
        assert_eq!(verdict(&[0.0; 2], &[17.0; 2], Better::Lower), Verdict::Regressed);
    }

    #[test]
    fn one_repeat_is_too_few() {
        assert_eq!(verdict(&[10.0], &[20.0, 20.0], Better::Higher), Verdict::TooFewRepeats);
        assert_eq!(Difference::of(&[10.0], &[20.0]).unwrap().change, Some(1.0));
        assert_eq!(Difference::of(&[], &[20.0]), None);
    }

    #[test]
    fn words_are_read_back() {
        for verdict in Verdict::ALL {
            assert_eq!(verdict.as_str().replace(' ', "-").parse::<Verdict>().unwrap(), verdict);
        }
        assert!("worse".parse::<Verdict>().unwrap_err().hint().contains("regressed"));
    }
}
