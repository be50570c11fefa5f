//! Percentiles by linear interpolation between order statistics, with the count that backs them.

use serde::Serialize;

/// The `q` quantile (0 to 1) of ascending `sorted`: position q(n-1), linearly interpolated (NumPy's default).
/// `None` when empty.
pub fn quantile(sorted: &[f64], q: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let position = q.clamp(0.0, 1.0) * last as f64;
    let below = position.floor() as usize;
    let above = (below + 1).min(last);
    Some(sorted[below] + (sorted[above] - sorted[below]) * (position - below as f64))
}

/// The `q` quantile of values that carry weights (a time average's counterpart): the least value whose cumulated
/// weight reaches q of the total. `None` when the total weight is 0.
pub fn weighted_quantile(values_weights: &[(f64, f64)], q: f64) -> Option<f64> {
    let mut sorted = values_weights.to_vec();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let total: f64 = sorted.iter().map(|(_, weight)| weight).sum();
    let mut cumulated = 0.0;
    sorted.iter().find_map(|&(value, weight)| {
        cumulated += weight;
        (total > 0.0 && cumulated >= q * total).then_some(value)
    })
}

/// Mean and percentiles of one population.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Distribution {
    pub n: usize,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Distribution {
    /// `None` for no values.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        Some(Self {
            n,
            mean: sorted.iter().sum::<f64>() / n as f64,
            p50: quantile(&sorted, 0.50)?,
            p90: quantile(&sorted, 0.90)?,
            p99: quantile(&sorted, 0.99)?,
            max: *sorted.last()?,
        })
    }
}

/// Whether n values can support a percentile: p99 needs 100, p90 10, p50 2 (1/(1 - q), and one to interpolate with).
pub fn supported(n: usize, q: f64) -> bool {
    n as f64 >= (1.0 / (1.0 - q)).round()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_match_numpy_percentile() {
        // numpy.percentile([15, 20, 35, 40, 50], [40, 50, 90, 99])
        let values = [15.0, 20.0, 35.0, 40.0, 50.0];
        let got = [0.4, 0.5, 0.9, 0.99].map(|q| quantile(&values, q).unwrap());
        for (got, expected) in got.iter().zip([29.0, 35.0, 46.0, 49.6]) {
            assert!((got - expected).abs() < 1e-12, "{got} against {expected}");
        }
        assert_eq!(quantile(&[], 0.5), None);
        assert_eq!(quantile(&[7.0], 0.99), Some(7.0));
    }

    #[test]
    fn a_percentile_needs_enough_values() {
        assert!(supported(100, 0.99) && !supported(99, 0.99));
        assert!(supported(10, 0.9) && !supported(9, 0.9));
        assert!(supported(2, 0.5) && !supported(1, 0.5));
    }

    #[test]
    fn weights_count_as_repetitions() {
        assert_eq!(weighted_quantile(&[(1.0, 1.0), (2.0, 8.0), (3.0, 1.0)], 0.5), Some(2.0));
        assert_eq!(weighted_quantile(&[(1.0, 9.0), (2.0, 1.0)], 0.95), Some(2.0));
        assert_eq!(weighted_quantile(&[(1.0, 0.0)], 0.5), None);
    }
}
