//! The steady window of a run: without the filling of the batch at its start and the drain at its end.
//!
//! Rule: let L be the number of running sequences that is reached or exceeded for a tenth of the time. The window goes
//! from the end of the first step with at least 0.9 L running to the end of the last such step. It must hold 10 steps or
//! more, else the run has no steady part and the columns stay empty.

use super::quantile::weighted_quantile;
use super::recorder::ArmRecord;

pub const RULE: &str = "from the end of the first to the end of the last step with at least 0.9 L sequences running, \
                        where L is exceeded for a tenth of the time; 10 steps or more";

const LEVEL_QUANTILE: f64 = 0.9;
const LEVEL_SHARE: f64 = 0.9;
const FEWEST_STEPS: usize = 10;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Window {
    /// Seconds from the start of the run.
    pub start_s: f64,
    pub end_s: f64,
}

impl Window {
    pub fn length_s(&self) -> f64 {
        self.end_s - self.start_s
    }

    /// After the start, up to and including the end: what a step delivered that ended inside.
    pub fn contains(&self, time_s: f64) -> bool {
        time_s > self.start_s && time_s <= self.end_s
    }

    /// Requests completed inside.
    pub fn requests(&self, record: &ArmRecord) -> usize {
        let completed = record.requests.iter().filter(|request| request.completed());
        completed.filter(|request| request.finish_s.is_some_and(|time_s| self.contains(time_s))).count()
    }

    /// Tokens received inside.
    pub fn tokens(&self, record: &ArmRecord) -> usize {
        record
            .requests
            .iter()
            .flat_map(|request| &request.tokens_s)
            .filter(|time_s| self.contains(**time_s))
            .count()
    }
}

pub fn window(record: &ArmRecord) -> Option<Window> {
    let steps = &record.steps;
    let running: Vec<(f64, f64)> =
        steps.iter().map(|step| (step.report.running as f64, step.wall_s)).collect();
    let level = LEVEL_SHARE * weighted_quantile(&running, LEVEL_QUANTILE)?;
    let at_level = |step: &&super::recorder::StepRecord| step.report.running as f64 >= level;
    let first = steps.iter().position(|step| at_level(&step))?;
    let last = steps.iter().rposition(|step| at_level(&step))?;
    let window = Window { start_s: steps[first].delivered_s, end_s: steps[last].delivered_s };
    (last - first >= FEWEST_STEPS && window.length_s() > 0.0).then_some(window)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::step_report::StepKind;
    use crate::measure::testing::{answered, record_of, step};

    /// Steps of one second with the given numbers running.
    fn record(running: &[usize]) -> ArmRecord {
        let steps = running.iter().enumerate().map(|(index, &running)| {
            let mut step = step(StepKind::Decode, index as f64, index as f64 + 1.0);
            step.report.running = running;
            step
        });
        let tokens: Vec<f64> = (1..=running.len()).map(|second| second as f64).collect();
        record_of(vec![answered(0.0, 0.0, &tokens)], steps.collect())
    }

    #[test]
    fn filling_and_drain_are_left_out() {
        let mut running = vec![2, 4, 6];
        running.extend([8; 20]);
        running.extend([6, 4, 2]);
        let record = record(&running);
        let window = window(&record).unwrap();
        assert_eq!((window.start_s, window.end_s), (4.0, 23.0));
        assert_eq!((window.tokens(&record), window.requests(&record)), (19, 0));
    }

    #[test]
    fn a_run_that_never_settles_has_no_steady_window() {
        assert_eq!(window(&record(&[1, 2, 4, 8, 4, 2, 1])), None);
        assert_eq!(window(&ArmRecord::default()), None);
    }
}
