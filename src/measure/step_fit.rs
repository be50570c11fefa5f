//! The line through the step times of a run: what all sequences of a step share, and what each adds.

use std::collections::BTreeMap;

use super::rows::StepRow;
use super::statistics::median;

/// Step time = shared + private x sequences, by least squares over the median step of each batch size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepFit {
    pub shared_ms: f64,
    pub private_ms: f64,
    pub r_squared: f64,
    /// Batch sizes it went over.
    pub points: usize,
    pub smallest: usize,
    pub largest: usize,
}

/// Fewest steps of a batch size that count as a point, and fewest points that make a line worth stating.
const STEPS_A_POINT: usize = 3;
const POINTS: usize = 3;

impl StepFit {
    /// What the line says a sequence adds is less than a thousandth of the step.
    pub fn is_flat(&self) -> bool {
        self.private_ms < 1e-3 * self.shared_ms.abs() / self.largest.max(1) as f64
    }

    /// Sequences at which the private part of a step equals the shared one; `None` when nothing is private.
    pub fn crossing(&self) -> Option<f64> {
        (!self.is_flat() && self.shared_ms > 0.0).then(|| self.shared_ms / self.private_ms)
    }
}

/// A step of decodes alone, each of one token.
pub fn is_pure_decode(step: &StepRow) -> bool {
    step.kind == "decode" && step.drafted == 0
}

/// Median of `value` over pure decode steps, by number of sequences.
pub fn decode_points<'a>(
    steps: impl Iterator<Item = &'a StepRow>,
    value: impl Fn(&StepRow) -> f64,
) -> BTreeMap<usize, f64> {
    let mut by_batch: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for step in steps.filter(|step| is_pure_decode(step)) {
        by_batch.entry(step.decode_sequences).or_default().push(value(step));
    }
    by_batch
        .into_iter()
        .filter(|(_, times)| times.len() >= STEPS_A_POINT)
        .filter_map(|(batch, times)| Some((batch, median(&times)?)))
        .collect()
}

/// `None` where too few batch sizes were met.
pub fn fit(points: &BTreeMap<usize, f64>) -> Option<StepFit> {
    if points.len() < POINTS {
        return None;
    }
    let count = points.len() as f64;
    let mean_x = points.keys().map(|&x| x as f64).sum::<f64>() / count;
    let mean_y = points.values().sum::<f64>() / count;
    let (mut xx, mut xy, mut yy) = (0.0, 0.0, 0.0);
    for (&x, &y) in points {
        let (dx, dy) = (x as f64 - mean_x, y - mean_y);
        xx += dx * dx;
        xy += dx * dy;
        yy += dy * dy;
    }
    let private_ms = xy / xx;
    Some(StepFit {
        shared_ms: mean_y - private_ms * mean_x,
        private_ms,
        // (Equal values differ by rounding at most: the line explains them all.)
        r_squared: if yy > 1e-12 * mean_y * mean_y { xy * xy / (xx * yy) } else { 1.0 },
        points: points.len(),
        smallest: *points.keys().next()?,
        largest: *points.keys().next_back()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_decode_points_give_the_published_fit() {
        // Part 1: 20.2, 21.9, 37.1 and 65.6 ms at 1, 8, 64 and 146 sequences.
        let points = BTreeMap::from([(1, 20.2), (8, 21.9), (64, 37.1), (146, 65.6)]);
        let fit = fit(&points).unwrap();
        assert!((fit.shared_ms - 19.07).abs() < 0.05, "{fit:?}");
        assert!((fit.private_ms - 0.3129).abs() < 0.0005, "{fit:?}");
        assert!((fit.crossing().unwrap() - 60.95).abs() < 0.2, "{fit:?}");
    }

    #[test]
    fn flat_steps_have_nothing_private_and_no_crossing() {
        let fit = fit(&BTreeMap::from([(1, 2.0), (2, 2.0), (4, 2.0)])).unwrap();
        assert_eq!((fit.shared_ms, fit.private_ms, fit.crossing()), (2.0, 0.0, None));
    }

    #[test]
    fn two_points_are_no_fit() {
        assert_eq!(fit(&BTreeMap::from([(1, 2.0), (2, 3.0)])), None);
    }
}
