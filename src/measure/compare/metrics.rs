//! The metrics that are compared: columns of summary.csv that say how good an arm is, and which way is better.

use crate::measure::verdict::Better;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Metric {
    /// Column of summary.csv.
    pub name: &'static str,
    pub better: Better,
}

const fn higher(name: &'static str) -> Metric {
    Metric { name, better: Better::Higher }
}

const fn lower(name: &'static str) -> Metric {
    Metric { name, better: Better::Lower }
}

/// In the order they are printed.
pub const METRICS: [Metric; 34] = [
    higher("request_throughput"),
    higher("output_throughput"),
    higher("total_throughput"),
    higher("peak_output_throughput"),
    higher("steady_request_throughput"),
    higher("steady_output_throughput"),
    higher("goodput"),
    lower("ttft_mean_ms"),
    lower("ttft_p50_ms"),
    lower("ttft_p90_ms"),
    lower("ttft_p99_ms"),
    lower("tpot_mean_ms"),
    lower("tpot_p50_ms"),
    lower("tpot_p90_ms"),
    lower("tpot_p99_ms"),
    lower("itl_mean_ms"),
    lower("itl_p50_ms"),
    lower("itl_p90_ms"),
    lower("itl_p99_ms"),
    lower("e2el_mean_ms"),
    lower("e2el_p50_ms"),
    lower("e2el_p90_ms"),
    lower("e2el_p99_ms"),
    lower("queue_mean_ms"),
    lower("queue_p50_ms"),
    lower("queue_p90_ms"),
    lower("queue_p99_ms"),
    lower("step_ms_p50"),
    lower("step_ms_p99"),
    lower("device_ms_p50"),
    lower("host_fraction"),
    lower("preemptions"),
    lower("recomputed_tokens"),
    lower("failed"),
];

/// Latencies that are one value a request, so that a percentile of them needs so many requests.
pub fn per_request(name: &str) -> bool {
    ["ttft_", "tpot_", "e2el_", "queue_"].iter().any(|latency| name.starts_with(latency))
}

/// The quantile a column is, where it is one.
pub fn quantile_of(name: &str) -> Option<f64> {
    [("p50", 0.50), ("p90", 0.90), ("p99", 0.99)]
        .into_iter()
        .find(|(part, _)| name.contains(part))
        .map(|(_, quantile)| quantile)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_a_column_of_the_summary() {
        let columns = crate::measure::summary::columns();
        for metric in METRICS {
            assert!(columns.iter().any(|column| column == metric.name), "{}", metric.name);
        }
    }

    #[test]
    fn quantiles_are_read_from_names() {
        assert_eq!(quantile_of("ttft_p99_ms"), Some(0.99));
        assert_eq!(quantile_of("step_ms_p50"), Some(0.5));
        assert_eq!(quantile_of("ttft_mean_ms"), None);
        assert!(per_request("ttft_p99_ms") && !per_request("itl_p99_ms"));
    }
}
