//! Correction for many metrics that move together: Westfall and Young's max-T permutation test (1993).
//!
//! Metrics of one run are near copies of each other (every latency falls when steps get faster), which Holm's correction
//! cannot know: it charges for each. Here the repeats themselves are relabelled in all ways; a metric's corrected p value
//! is the share of relabellings whose *largest* t over all metrics reaches the metric's own. Under no change labels mean
//! nothing, so the chance of any false alarm among all metrics is at most that of one.

use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use super::statistics::{mean, variance};

/// All relabellings are tried up to this many; beyond, so many are drawn.
const MOST: usize = 4000;

/// Before and after values of one metric, a value a repeat.
pub type Sides<'a> = (&'a [f64], &'a [f64]);

/// Least p value that relabelling can give: the labels as they are, and mirrored when the sides are equally large.
pub fn least_p(before: usize, after: usize) -> f64 {
    let labellings = binomial(before + after, before);
    if before == after { 2.0 / labellings } else { 1.0 / labellings }
}

fn binomial(n: usize, k: usize) -> f64 {
    (0..k).map(|index| (n - index) as f64 / (index + 1) as f64).product()
}

/// Corrected p values in the order of `metrics`, which must all have the same numbers of repeats.
pub fn corrected(metrics: &[Sides]) -> Vec<f64> {
    let Some((before, after)) = metrics.first().map(|(before, after)| (before.len(), after.len())) else {
        return Vec::new();
    };
    let pooled: Vec<Vec<f64>> = metrics.iter().map(|(before, after)| [*before, *after].concat()).collect();
    let observed: Vec<f64> =
        pooled.iter().map(|values| t(values, &(0..before).collect::<Vec<_>>())).collect();
    let labellings = labellings(before, before + after);
    let mut reached = vec![0usize; metrics.len()];
    for labelling in &labellings {
        let largest = pooled.iter().map(|values| t(values, labelling)).fold(0.0, f64::max);
        for (count, own) in reached.iter_mut().zip(&observed) {
            // Mirrored labels give the same t but for rounding.
            *count += usize::from(largest >= own * (1.0 - 1e-9));
        }
    }
    reached.into_iter().map(|count| count as f64 / labellings.len() as f64).collect()
}

/// Size of Welch's t between the values named by `chosen` (ascending) and the others; 0 where nothing varies.
fn t(values: &[f64], chosen: &[usize]) -> f64 {
    let (mut one, mut other) = (Vec::with_capacity(values.len()), Vec::with_capacity(values.len()));
    let mut next = chosen.iter().peekable();
    for (index, value) in values.iter().enumerate() {
        if next.next_if(|chosen| **chosen == index).is_some() { one.push(*value) } else { other.push(*value) }
    }
    let error = variance(&one) / one.len() as f64 + variance(&other) / other.len() as f64;
    if error > 0.0 { (mean(&one) - mean(&other)).abs() / error.sqrt() } else { 0.0 }
}

/// Which values are called "before": every choice of `size` of `total`, or a seeded draw of them. The actual labels,
/// the first `size`, are always among them.
fn labellings(size: usize, total: usize) -> Vec<Vec<usize>> {
    let mut chosen: Vec<usize> = (0..size).collect();
    let mut all = vec![chosen.clone()];
    if binomial(total, size) > MOST as f64 {
        let mut random = ChaCha8Rng::seed_from_u64(0);
        let mut order: Vec<usize> = (0..total).collect();
        while all.len() < MOST {
            order.shuffle(&mut random);
            let mut draw = order[..size].to_vec();
            draw.sort_unstable();
            all.push(draw);
        }
        return all;
    }
    // The next combination in lexical order: raise the last index that can rise.
    while let Some(place) = (0..size).rev().find(|&place| chosen[place] < total - size + place) {
        chosen[place] += 1;
        for later in place + 1..size {
            chosen[later] = chosen[later - 1] + 1;
        }
        all.push(chosen.clone());
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_labelling_comes_once() {
        let all = labellings(2, 4);
        assert_eq!(all, [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]);
        assert_eq!((labellings(5, 10).len(), labellings(20, 40).len()), (252, MOST));
        assert_eq!((least_p(5, 5), least_p(3, 3), least_p(3, 4)), (2.0 / 252.0, 0.1, 1.0 / 35.0));
    }

    #[test]
    fn a_clear_change_has_the_least_p_and_copies_of_it_cost_nothing() {
        let (before, after) = ([10.0, 10.1, 9.9, 10.05, 9.95], [11.0, 11.1, 10.9, 11.05, 10.95]);
        let one = corrected(&[(&before, &after)]);
        assert!((one[0] - 2.0 / 252.0).abs() < 1e-12, "{one:?}");
        let copies: Vec<Sides> = vec![(&before, &after); 30];
        assert_eq!(corrected(&copies), vec![one[0]; 30]);
    }

    #[test]
    fn a_metric_is_charged_for_the_luck_of_the_others() {
        // Alone, the first has p = 4/252 or so; beside metrics with chance differences it needs more.
        let shaky = ([10.0, 10.4, 9.8, 10.3, 9.9], [10.8, 10.35, 11.0, 10.7, 10.9]);
        let alone = corrected(&[(&shaky.0, &shaky.1)])[0];
        let others: [([f64; 5], [f64; 5]); 3] = [
            ([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 4.0, 1.0, 5.0, 3.0]),
            ([5.0, 1.0, 4.0, 2.0, 3.0], [1.0, 5.0, 2.0, 3.0, 4.0]),
            ([2.0, 2.5, 1.0, 9.0, 3.0], [8.0, 1.0, 2.0, 3.0, 4.0]),
        ];
        let mut metrics: Vec<Sides> = vec![(&shaky.0, &shaky.1)];
        metrics.extend(others.iter().map(|(before, after)| (before.as_slice(), after.as_slice())));
        let beside = corrected(&metrics);
        assert!(beside[0] > alone, "{} against {alone}", beside[0]);
        assert!(beside[1..].iter().all(|p| *p > 0.5), "{beside:?}");
    }
}
