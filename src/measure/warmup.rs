//! When an arm is warm: step times, each over its own floor, have stopped falling.
//!
//! Compilation, graph capture, page faults and clocks that ramp up make first steps slow by up to a few hundred times.
//! Steps differ in size, so each is held against what it must cost at least; the ratio of a warm engine is level.
//! Rule: a kind of step (decode, prefill, mixed) is stationary when the medians of its last two windows differ by at
//! most 10 % and no step of the last window took more than 3 times their median. A window is 8 steps, or a whole round
//! of warm-up for a kind that has fewer than 16 steps in one: rounds repeat the same shapes. The arm is warm when every
//! kind is stationary that made up a tenth of the step time of the first round, the one with the load's own lengths.

use super::quantile::quantile;
use super::rows::CheckRow;
use crate::engine::step_report::{StepKind, StepReport};

const WINDOW: usize = 8;
const TOLERANCE: f64 = 0.1;
const OUTLIER: f64 = 3.0;
const RELEVANT_SHARE: f64 = 0.1;

pub const RULE: &str = "step time over floor: medians of the last two windows (8 steps, or rounds of fewer than 16) within \
                        10 %, no step of the last beyond 3 medians, for every kind with a tenth of the first round's time";

/// Fed with the steps of the warm-up, in order.
#[derive(Debug, Clone, Default)]
pub struct Stationarity {
    kinds: [Kind; 3],
    rounds: usize,
}

#[derive(Debug, Clone, Default)]
struct Kind {
    ratios: Vec<f64>,
    /// Where the round before last and the last one begin in `ratios`.
    begins: [usize; 2],
    /// Of the first round.
    first_round_s: f64,
}

impl Stationarity {
    /// The steps that follow are of a new round.
    pub fn begin_round(&mut self) {
        self.rounds += 1;
        for kind in &mut self.kinds {
            kind.begins = [kind.begins[1], kind.ratios.len()];
        }
    }

    pub fn observe(&mut self, report: &StepReport) {
        let kind = &mut self.kinds[match report.kind {
            StepKind::Decode => 0,
            StepKind::Prefill => 1,
            StepKind::Mixed => 2,
        }];
        let took_s = report.end_s - report.start_s;
        if self.rounds <= 1 {
            kind.first_round_s += took_s;
        }
        kind.ratios.push(if report.cost.floor_s > 0.0 { took_s / report.cost.floor_s } else { took_s });
    }

    /// For checks.csv: rounds of warm-up and whether they sufficed. A load that declares a single round has one of that
    /// length whatever comes of it; where more were allowed, running out of them is a warning. `None` without warm-up.
    pub fn check_row(&self, arm: &str, repeat: u32, most: usize) -> Option<CheckRow> {
        let (status, outcome) = match (self.is_stationary(), most) {
            (true, _) => ("ok", "step times were stationary"),
            (false, ..=1) => ("info", "one round as declared, step times not yet stationary"),
            (false, _) => ("warning", "step times were not stationary after the last round"),
        };
        (self.rounds > 0).then(|| CheckRow {
            arm: arm.to_string(),
            repeat,
            check: "warmup_rounds".to_string(),
            value: Some(self.rounds as f64),
            status: status.to_string(),
            note: format!("{outcome}; rule: {RULE}"),
        })
    }

    pub fn is_stationary(&self) -> bool {
        let total_s: f64 = self.kinds.iter().map(|kind| kind.first_round_s).sum();
        let mut relevant =
            self.kinds.iter().filter(|kind| kind.first_round_s >= RELEVANT_SHARE * total_s).peekable();
        relevant.peek().is_some() && total_s > 0.0 && relevant.all(Kind::is_stationary)
    }
}

impl Kind {
    fn is_stationary(&self) -> bool {
        let Some((before, last)) = self.windows() else { return false };
        let (Some(median_before), Some(median)) = (median(before), median(last)) else { return false };
        let slowest = last.iter().copied().fold(0.0, f64::max);
        (median - median_before).abs() <= TOLERANCE * median_before && slowest <= OUTLIER * median
    }

    fn windows(&self) -> Option<(&[f64], &[f64])> {
        let (earlier, last_round) = self.ratios.split_at(self.begins[1]);
        let round_before = &earlier[self.begins[0]..];
        let few = last_round.len() < 2 * WINDOW;
        if few && !last_round.is_empty() && !round_before.is_empty() {
            return Some((round_before, last_round));
        }
        let last_two = &self.ratios[self.ratios.len().checked_sub(2 * WINDOW)?..];
        Some(last_two.split_at(WINDOW))
    }
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    quantile(&sorted, 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::account::StepCost;
    use crate::measure::testing::report;

    fn observe(stationarity: &mut Stationarity, kind: StepKind, took_s: f64, floor_s: f64) {
        let mut report = report(kind, 1.0, 1.0 + took_s);
        report.cost = StepCost { floor_s, ..StepCost::default() };
        stationarity.observe(&report);
    }

    fn in_a_round() -> Stationarity {
        let mut rule = Stationarity::default();
        rule.begin_round();
        rule
    }

    #[test]
    fn level_steps_are_stationary_after_two_windows() {
        let mut rule = in_a_round();
        for index in 0..16 {
            assert!(!rule.is_stationary(), "after {index}");
            // Sizes vary, time over floor does not.
            let floor_s = 0.01 * f64::from(1 + index % 3);
            observe(&mut rule, StepKind::Decode, 1.4 * floor_s, floor_s);
        }
        assert!(rule.is_stationary());
    }

    #[test]
    fn a_warm_up_that_did_not_suffice_is_said() {
        let mut rule = in_a_round();
        (0..32).for_each(|index| observe(&mut rule, StepKind::Decode, 0.1 * 0.95f64.powi(index), 0.01));
        let status = |rule: &Stationarity, most| rule.check_row("a", 0, most).unwrap().status;
        assert_eq!((status(&rule, 3).as_str(), status(&rule, 1).as_str()), ("warning", "info"));
        rule.begin_round();
        (0..16).for_each(|_| observe(&mut rule, StepKind::Decode, 0.02, 0.01));
        let row = rule.check_row("a", 0, 3).unwrap();
        assert_eq!((row.status.as_str(), row.value), ("ok", Some(2.0)));
        assert!(row.note.contains("10 %"));
        assert_eq!(Stationarity::default().check_row("a", 0, 3), None);
    }

    #[test]
    fn falling_times_and_late_spikes_are_not_stationary() {
        let mut rule = in_a_round();
        (0..32).for_each(|index| observe(&mut rule, StepKind::Decode, 0.1 * 0.95f64.powi(index), 0.01));
        assert!(!rule.is_stationary());
        (0..16).for_each(|_| observe(&mut rule, StepKind::Decode, 0.02, 0.01));
        assert!(rule.is_stationary());
        observe(&mut rule, StepKind::Decode, 2.0, 0.01);
        assert!(!rule.is_stationary(), "a compilation inside the last window");
        (0..8).for_each(|_| observe(&mut rule, StepKind::Decode, 0.02, 0.01));
        assert!(rule.is_stationary());
    }

    #[test]
    fn a_kind_with_few_steps_a_round_is_judged_round_by_round() {
        let mut rule = Stationarity::default();
        let mut round = |mixed_s: f64| {
            rule.begin_round();
            (0..4).for_each(|_| observe(&mut rule, StepKind::Mixed, mixed_s, 0.1));
            (0..20).for_each(|_| observe(&mut rule, StepKind::Decode, 0.02, 0.01));
            rule.is_stationary()
        };
        assert!(!round(5.0), "one round says nothing of a kind with four steps");
        assert!(!round(0.2), "the first one was cold");
        assert!(round(0.21));
        assert!(!round(0.3), "another shape, or another clock");
    }

    #[test]
    fn a_kind_counts_once_it_takes_a_tenth_of_the_first_round() {
        let mut rule = in_a_round();
        (0..40).for_each(|_| observe(&mut rule, StepKind::Decode, 0.02, 0.01));
        observe(&mut rule, StepKind::Prefill, 0.05, 0.04);
        assert!(rule.is_stationary(), "one short prefill is beside the point");
        rule.begin_round();
        (0..16).for_each(|_| observe(&mut rule, StepKind::Decode, 0.02, 0.01));
        observe(&mut rule, StepKind::Prefill, 0.5, 0.04);
        assert!(rule.is_stationary(), "a short round's shares are not the load's");
        let mut rule = in_a_round();
        (0..40).for_each(|_| observe(&mut rule, StepKind::Decode, 0.02, 0.01));
        (0..3).for_each(|_| observe(&mut rule, StepKind::Prefill, 0.5, 0.04));
        assert!(!rule.is_stationary(), "prefills dominate and have no two windows yet");
    }
}
