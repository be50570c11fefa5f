//! How evenly a run treated its requests, and what prefills cost the decodes beside them.

use super::recorder::{ArmRecord, RequestRecord};
use crate::engine::step_report::StepKind;

/// Jain's index of `values`: (sum x)² / (n sum x²), from 1/n (one takes all) to 1 (all equal). `None` when empty.
pub fn jain(values: &[f64]) -> Option<f64> {
    let sum: f64 = values.iter().sum();
    let squares: f64 = values.iter().map(|value| value * value).sum();
    (squares > 0.0).then(|| sum * sum / (values.len() as f64 * squares))
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Fairness {
    /// Jain's index of slowdown: E2EL over the time the request's own steps would take if it never waited, which is
    /// its tokens (prompt and answer) times the run's least E2EL per token.
    pub jain_slowdown: Option<f64>,
    /// Longest time from intended arrival to the first step.
    pub max_wait_s: Option<f64>,
    /// Share of requests that another one, due later, overtook: it was first scheduled before.
    pub overtaken: Option<f64>,
}

pub fn fairness(record: &ArmRecord) -> Fairness {
    let completed: Vec<&RequestRecord> =
        record.requests.iter().filter(|request| request.completed()).collect();
    let per_token: Vec<f64> = completed
        .iter()
        .filter_map(|request| {
            Some(request.e2el_s()? / (request.input_tokens + request.tokens_s.len()) as f64)
        })
        .collect();
    let least = per_token.iter().copied().fold(f64::INFINITY, f64::min);
    let slowdowns: Vec<f64> = per_token.iter().map(|value| value / least).collect();
    Fairness {
        jain_slowdown: jain(&slowdowns).filter(|_| least > 0.0),
        max_wait_s: record.requests.iter().filter_map(RequestRecord::queue_s).max_by(f64::total_cmp),
        overtaken: overtaken(&record.requests),
    }
}

fn overtaken(requests: &[RequestRecord]) -> Option<f64> {
    let mut starts: Vec<(f64, f64)> = requests
        .iter()
        .filter_map(|request| Some((request.intended_s, *request.scheduled_s.first()?)))
        .collect();
    starts.sort_by(|a, b| a.0.total_cmp(&b.0));
    // From the back: the earliest start of any request that is due later than the one looked at.
    let mut count = 0;
    let mut earliest_later = f64::INFINITY;
    let mut group_end = starts.len();
    while group_end > 0 {
        let due_s = starts[group_end - 1].0;
        let group_start = starts[..group_end].partition_point(|(other_s, _)| *other_s < due_s);
        let group = &starts[group_start..group_end];
        count += group.iter().filter(|(_, start_s)| earliest_later < *start_s).count();
        earliest_later = group.iter().map(|(_, start_s)| *start_s).fold(earliest_later, f64::min);
        group_end = group_start;
    }
    (!starts.is_empty()).then(|| count as f64 / starts.len() as f64)
}

/// Interference factor: the mean gap between tokens that ends with a step that held a prefill, over the mean gap that
/// ends with a pure decode step, minus 1. A gap in which the request was evicted and computed again is neither: its length
/// is the wait for memory. `None` where one of the two never happened.
pub fn interference(record: &ArmRecord) -> Option<f64> {
    let mut steps: Vec<(f64, bool)> =
        record.steps.iter().map(|step| (step.delivered_s, step.report.kind != StepKind::Decode)).collect();
    steps.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut with, mut without) = ((0.0, 0usize), (0.0, 0usize));
    let gaps = record.requests.iter().flat_map(|request| {
        let resumed_s = request.scheduled_s.get(1..).unwrap_or_default();
        let evicted = |pair: &&[f64]| resumed_s.iter().any(|start_s| (pair[0]..pair[1]).contains(start_s));
        request.tokens_s.windows(2).filter(move |pair| !evicted(pair))
    });
    for pair in gaps {
        if pair[1] <= pair[0] {
            continue; // Tokens of one speculative step: no step lies between them.
        }
        let step = steps.partition_point(|(delivered_s, _)| *delivered_s < pair[1]);
        let Some(&(_, prefill)) = steps.get(step) else { continue };
        let side = if prefill { &mut with } else { &mut without };
        side.0 += pair[1] - pair[0];
        side.1 += 1;
    }
    let mean = |(sum, count): (f64, usize)| (count > 0).then(|| sum / count as f64);
    Some(mean(with)? / mean(without)? - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::testing::{answered, record_of, step};

    #[test]
    fn jain_is_one_for_equals_and_one_in_n_for_a_monopoly() {
        assert_eq!(jain(&[3.0, 3.0, 3.0]), Some(1.0));
        assert_eq!(jain(&[1.0, 0.0, 0.0, 0.0]), Some(0.25));
        assert_eq!(jain(&[]), None);
    }

    #[test]
    fn slowdown_is_relative_to_the_best_served_request() {
        // Equal lengths: 1 s and 3 s. Jain of (1, 3) is 16 / (2 x 10).
        let record =
            record_of(vec![answered(0.0, 0.0, &[0.5, 1.0]), answered(0.0, 0.0, &[2.0, 3.0])], vec![]);
        let fairness = fairness(&record);
        assert!((fairness.jain_slowdown.unwrap() - 0.8).abs() < 1e-12);
    }

    #[test]
    fn overtaking_needs_a_later_arrival_that_starts_earlier() {
        let record = record_of(
            vec![
                answered(0.0, 0.0, &[1.0]),
                answered(1.0, 9.0, &[10.0]), // overtaken by the next two
                answered(2.0, 3.0, &[4.0]),
                answered(3.0, 4.0, &[5.0]),
                answered(3.0, 3.5, &[5.0]), // due together with the one above: no overtaking
            ],
            vec![],
        );
        let fairness = fairness(&record);
        assert_eq!(fairness.overtaken, Some(0.2));
        assert_eq!(fairness.max_wait_s, Some(8.0));
    }

    #[test]
    fn interference_compares_gaps_that_end_with_a_prefill_to_those_that_do_not() {
        let steps = vec![
            step(StepKind::Prefill, 0.0, 1.0),
            step(StepKind::Decode, 1.0, 1.1),
            step(StepKind::Mixed, 1.1, 1.5),
            step(StepKind::Decode, 1.5, 1.6),
        ];
        let record = record_of(vec![answered(0.0, 0.0, &[1.0, 1.1, 1.5, 1.6])], steps.clone());
        assert!((interference(&record).unwrap() - 3.0).abs() < 1e-9);
        // Another one lost its place after its first token, and waited for room until 1.5 s.
        let mut evicted = record.clone();
        evicted.requests.push(answered(0.0, 0.0, &[1.0, 1.6]));
        evicted.requests[1].scheduled_s.push(1.5);
        assert_eq!(interference(&evicted), interference(&record));
        let quiet = record_of(vec![answered(0.0, 0.0, &[1.0, 1.1])], steps);
        assert_eq!(interference(&quiet), None);
    }
}
