//! Limits on latency: what `saturate` must meet, and what makes a request count towards goodput.
//!
//! Written as `ttft_p99=500,itl_p99=100` (milliseconds) or as the table `slo = { ttft_p99 = 500 }`.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Names of limits that may be set: a latency and a statistic of it.
const LATENCIES: [&str; 5] = ["ttft", "tpot", "itl", "e2el", "queue"];
const STATISTICS: [&str; 4] = ["mean", "p50", "p90", "p99"];

/// Limit in milliseconds by name (`ttft_p99`). Empty: no limits.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, f64>", into = "BTreeMap<String, f64>")]
pub struct Slo(BTreeMap<String, f64>);

/// One limit, taken apart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limit<'a> {
    /// `ttft_p99`: the summary's column without its unit.
    pub name: &'a str,
    /// `ttft`.
    pub latency: &'a str,
    /// `p99`.
    pub statistic: &'a str,
    pub limit_ms: f64,
}

impl Slo {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn limits(&self) -> impl Iterator<Item = Limit<'_>> {
        self.0.iter().map(|(name, &limit_ms)| {
            // Checked when the limits were made: a name always has the form latency_statistic.
            let (latency, statistic) = name.split_once('_').unwrap_or((name, ""));
            Limit { name, latency, statistic, limit_ms }
        })
    }
}

impl TryFrom<BTreeMap<String, f64>> for Slo {
    type Error = Error;

    fn try_from(limits: BTreeMap<String, f64>) -> Result<Self> {
        for (name, &limit_ms) in &limits {
            let known = name.split_once('_').is_some_and(|(latency, statistic)| {
                LATENCIES.contains(&latency) && STATISTICS.contains(&statistic)
            });
            if !known {
                return Err(Error::invalid(
                    format!("`{name}` is not a limit that can be set"),
                    format!("a limit is one of {} with _mean, _p50, _p90 or _p99", LATENCIES.join(", ")),
                ));
            }
            if !(limit_ms > 0.0 && limit_ms.is_finite()) {
                return Err(Error::invalid(
                    format!("limit {name} = {limit_ms} is out of bounds"),
                    "a limit is a number of milliseconds above 0",
                ));
            }
        }
        Ok(Self(limits))
    }
}

impl From<Slo> for BTreeMap<String, f64> {
    fn from(slo: Slo) -> Self {
        slo.0
    }
}

impl FromStr for Slo {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut limits = BTreeMap::new();
        for part in text.split(',').filter(|part| !part.trim().is_empty()) {
            let parsed = part.split_once('=').and_then(|(name, value)| {
                Some((name.trim().to_string(), value.trim().trim_end_matches("ms").parse().ok()?))
            });
            let Some((name, limit_ms)) = parsed else {
                return Err(Error::invalid(
                    format!("`{part}` is not a limit"),
                    "write limits as ttft_p99=500,itl_p99=100 (milliseconds)",
                ));
            };
            if limits.contains_key(&name) {
                return Err(Error::invalid(format!("limit {name} is given twice"), "give each limit once"));
            }
            limits.insert(name, limit_ms);
        }
        limits.try_into()
    }
}

impl fmt::Display for Slo {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let parts: Vec<_> = self.0.iter().map(|(name, limit)| format!("{name}={limit}")).collect();
        f.write_str(&parts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_from_the_command_line_form() {
        let slo: Slo = "ttft_p99=500, itl_p99=100ms".parse().unwrap();
        let names: Vec<_> =
            slo.limits().map(|limit| (limit.latency, limit.statistic, limit.limit_ms)).collect();
        assert_eq!(names, [("itl", "p99", 100.0), ("ttft", "p99", 500.0)]);
        assert_eq!(slo.to_string(), "itl_p99=100,ttft_p99=500");
    }

    #[test]
    fn unknown_limits_are_refused_with_what_is_allowed() {
        let error = "latency_p99=3".parse::<Slo>().unwrap_err();
        assert!(error.to_string().contains("latency_p99") && error.hint().contains("ttft"));
        assert!("ttft_p99".parse::<Slo>().is_err());
        assert!("ttft_p99=-1".parse::<Slo>().is_err());
        let twice = "ttft_p99=1,ttft_p99=2".parse::<Slo>().unwrap_err();
        assert!(twice.to_string().contains("ttft_p99 is given twice"), "{twice}");
    }
}
