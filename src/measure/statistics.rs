//! Inference on few repeats: means, Welch's t test, effect size, correction for many metrics, batch means.
//!
//! Samples are always repeats (or batch means of one long run), never requests: requests of one run share its queue and
//! its luck and are not independent.

use statrs::distribution::{ContinuousCDF, StudentsT};

pub const CONFIDENCE: f64 = 0.95;

pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Sample variance, divided by n - 1; 0 for fewer than two values.
pub fn variance(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let mean = mean(values);
    values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (values.len() - 1) as f64
}

pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    super::quantile::quantile(&sorted, 0.5)
}

/// Two-sided quantile of Student's t: the half width of an interval in standard errors.
pub fn t_quantile(confidence: f64, degrees: f64) -> f64 {
    StudentsT::new(0.0, 1.0, degrees).map_or(f64::INFINITY, |law| law.inverse_cdf(0.5 + confidence / 2.0))
}

/// Mean with its 95 % interval from repeats (Student's t, n - 1 degrees of freedom); no interval for one value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    pub mean: f64,
    pub low: f64,
    pub high: f64,
}

pub fn interval(values: &[f64]) -> Option<Interval> {
    if values.len() < 2 {
        return None;
    }
    let mean = mean(values);
    let half =
        t_quantile(CONFIDENCE, values.len() as f64 - 1.0) * (variance(values) / values.len() as f64).sqrt();
    Some(Interval { mean, low: mean - half, high: mean + half })
}

/// Welch's test of two samples with unequal variances.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Welch {
    pub degrees: f64,
    /// Two-sided.
    pub p: f64,
}

/// `None` unless both sides have two values or more and at least one of them varies.
pub fn welch(before: &[f64], after: &[f64]) -> Option<Welch> {
    let (error_before, error_after) = (squared_error(before)?, squared_error(after)?);
    let total = error_before + error_after;
    let degrees = satterthwaite(error_before, before.len(), error_after, after.len())?;
    let t = (mean(after) - mean(before)) / total.sqrt();
    let law = StudentsT::new(0.0, 1.0, degrees).ok()?;
    Some(Welch { degrees, p: 2.0 * law.cdf(-t.abs()) })
}

/// Change of the mean, after/before - 1, with its 95 % interval: the delta method on the logarithm of the ratio.
/// `None` when a mean is not above 0, or without variance to judge by.
pub fn relative_change_interval(before: &[f64], after: &[f64]) -> Option<(f64, f64)> {
    let (mean_before, mean_after) = (mean(before), mean(after));
    if !(mean_before > 0.0 && mean_after > 0.0) {
        return None;
    }
    let error_before = squared_error(before)? / mean_before.powi(2);
    let error_after = squared_error(after)? / mean_after.powi(2);
    let degrees = satterthwaite(error_before, before.len(), error_after, after.len())?;
    let half = t_quantile(CONFIDENCE, degrees) * (error_before + error_after).sqrt();
    let ratio = mean_after / mean_before;
    Some((ratio * (-half).exp() - 1.0, ratio * half.exp() - 1.0))
}

/// Squared standard error of the mean; `None` for fewer than two values.
fn squared_error(values: &[f64]) -> Option<f64> {
    (values.len() >= 2).then(|| variance(values) / values.len() as f64)
}

/// Degrees of freedom of a difference of means with unequal variances (Welch and Satterthwaite).
fn satterthwaite(error_a: f64, n_a: usize, error_b: f64, n_b: usize) -> Option<f64> {
    let total = error_a + error_b;
    let degrees =
        total.powi(2) / (error_a.powi(2) / (n_a as f64 - 1.0) + error_b.powi(2) / (n_b as f64 - 1.0));
    (total > 0.0 && degrees.is_finite()).then_some(degrees)
}

/// Hedges' g: the difference of means in pooled standard deviations, corrected for small samples.
pub fn effect_size(before: &[f64], after: &[f64]) -> Option<f64> {
    if before.len() < 2 || after.len() < 2 {
        return None;
    }
    let (n_a, n_b) = (before.len() as f64, after.len() as f64);
    let pooled = ((n_a - 1.0) * variance(before) + (n_b - 1.0) * variance(after)) / (n_a + n_b - 2.0);
    let correction = 1.0 - 3.0 / (4.0 * (n_a + n_b) - 9.0);
    (pooled > 0.0).then(|| correction * (mean(after) - mean(before)) / pooled.sqrt())
}

/// Holm's step-down correction: p values adjusted so that the chance of any false alarm among them is what a single
/// one would have. Order is kept.
pub fn holm(p_values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p_values.len()).collect();
    order.sort_by(|&a, &b| p_values[a].total_cmp(&p_values[b]));
    let mut adjusted = vec![1.0; p_values.len()];
    let mut largest: f64 = 0.0;
    for (rank, &index) in order.iter().enumerate() {
        largest = largest.max((p_values[index] * (p_values.len() - rank) as f64).min(1.0));
        adjusted[index] = largest;
    }
    adjusted
}

/// Fewest values in a batch, and most batches, of [`batch_means`].
const BATCH_SIZE: usize = 10;
const MOST_BATCHES: usize = 20;

/// Means of consecutive batches of one run's values in order of arrival: samples that are nearly independent where
/// the batches are longer than the queue's memory. `None` below five batches of ten.
pub fn batch_means(in_order: &[f64]) -> Option<Vec<f64>> {
    let batches = (in_order.len() / BATCH_SIZE).min(MOST_BATCHES);
    if batches < 5 {
        return None;
    }
    let edge = |batch: usize| batch * in_order.len() / batches;
    Some((0..batches).map(|batch| mean(&in_order[edge(batch)..edge(batch + 1)])).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(got: f64, expected: f64) {
        assert!((got - expected).abs() < 1e-6 * expected.abs().max(1e-3), "{got} against {expected}");
    }

    const BEFORE: [f64; 5] = [27.5, 21.0, 19.0, 23.6, 17.0];
    const AFTER: [f64; 5] = [27.1, 22.0, 20.8, 23.4, 39.3];

    #[test]
    fn welch_agrees_with_scipy() {
        let welch = welch(&BEFORE, &AFTER).unwrap();
        close(welch.p, 0.24689775108584114);
        close(welch.degrees, 6.178050371871553);
    }

    #[test]
    fn intervals_agree_with_scipy() {
        let interval = interval(&BEFORE).unwrap();
        close(interval.low, 16.534934915564026);
        close(interval.high, 26.70506508443597);
        assert_eq!(super::interval(&[1.0]), None);
    }

    #[test]
    fn the_interval_of_a_change_holds_it_and_covers_at_its_rate() {
        let (low, high) = relative_change_interval(&[100.0, 101.0, 99.0], &[105.0, 106.0, 104.0]).unwrap();
        assert!(low < 0.05 && 0.05 < high && low > 0.02 && high < 0.08, "{low} {high}");
        assert_eq!(relative_change_interval(&[0.0, 0.0], &[1.0, 2.0]), None);
        assert_eq!(relative_change_interval(&[1.0, 1.0], &[1.0, 1.0]), None);
    }

    #[test]
    fn holm_is_the_textbook_s_table() {
        let adjusted = holm(&[0.01, 0.04, 0.03, 0.005]);
        for (got, expected) in adjusted.iter().zip([0.03, 0.06, 0.06, 0.02]) {
            close(*got, expected);
        }
        assert_eq!(holm(&[0.9, 0.8]), [1.0, 1.0]);
    }

    #[test]
    fn effect_size_is_hedges_g() {
        // d = 1 by construction (means 0 and 1, both standard deviations 1), corrected by 1 - 3/(4*6 - 9).
        let g = effect_size(&[-1.0, 0.0, 1.0], &[0.0, 1.0, 2.0]).unwrap();
        close(g, 1.0 - 3.0 / 15.0);
        assert_eq!(effect_size(&[1.0, 1.0], &[2.0, 2.0]), None);
    }

    #[test]
    fn batch_means_cover_every_value_once() {
        let values: Vec<f64> = (0..107).map(f64::from).collect();
        let means = batch_means(&values).unwrap();
        assert_eq!(means.len(), 10);
        assert!(means.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(batch_means(&values[..49]), None);
    }

    #[test]
    fn samples_without_variance_have_no_test() {
        assert_eq!(welch(&[1.0, 1.0], &[2.0, 2.0]), None);
        assert_eq!(welch(&[1.0], &[2.0, 3.0]), None);
        assert!(welch(&[1.0, 1.0], &[2.0, 3.0]).is_some());
    }
}
