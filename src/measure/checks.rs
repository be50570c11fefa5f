//! checks.csv: figures about the run itself, and whether it can be trusted.
//!
//! Little's law ties two independent counts together: the time average of requests in the system, as the engine's steps
//! saw them, and arrival rate times time in system, as the client's clock saw them. They disagree when requests or
//! steps are lost, or when times are taken in the wrong place.

use super::fairness::{fairness, interference};
use super::quantile::Distribution;
use super::recorder::{ArmRecord, RequestRecord, StepRecord};
use super::rows::CheckRow;
use super::steady;

/// An engine takes requests between steps, so a request is on time until the step that ran when it was due has ended.
/// Beyond that it is late when the delay exceeds this, and this share of its time to first token. The generator fell
/// behind when more than one request in a hundred was late.
const LATE_S: f64 = 0.005;
const LATE_SHARE: f64 = 0.1;
/// Relative difference of the two sides of Little's law that is still taken as agreement, or absolute in requests.
const LITTLE_TOLERANCE: f64 = 0.1;
const LITTLE_REQUESTS: f64 = 1.0;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Little {
    /// Time average of requests running and waiting, from step reports.
    pub in_system: f64,
    /// Arrival rate times mean time from submission to end, from the client's times.
    pub rate_times_stay: f64,
}

impl Little {
    pub fn agrees(&self) -> bool {
        let difference = (self.in_system - self.rate_times_stay).abs();
        difference <= LITTLE_REQUESTS || difference <= LITTLE_TOLERANCE * self.rate_times_stay
    }
}

/// Both sides of Little's law over the whole run; `None` for a run without steps.
pub fn little(record: &ArmRecord) -> Option<Little> {
    if record.steps.is_empty() || record.duration_s <= 0.0 {
        return None;
    }
    let in_system: f64 = record
        .steps
        .iter()
        .map(|step| (step.report.running + step.report.waiting) as f64 * step.wall_s)
        .sum();
    let stay_s: f64 =
        record.requests.iter().filter_map(|request| Some(request.finish_s? - request.submitted_s?)).sum();
    Some(Little { in_system: in_system / record.duration_s, rate_times_stay: stay_s / record.duration_s })
}

/// Share of requests that were handed over late: the generator's own fault, not the engine's.
pub fn late_share(record: &ArmRecord) -> f64 {
    let late = |request: &&RequestRecord| {
        lateness_s(request, &record.steps).is_some_and(|lateness_s| {
            lateness_s > LATE_S && lateness_s > LATE_SHARE * request.ttft_s().unwrap_or(f64::INFINITY)
        })
    };
    record.requests.iter().filter(late).count() as f64 / record.requests.len().max(1) as f64
}

/// How long after it was due, or after the end of the step that ran then, a request was handed over.
fn lateness_s(request: &RequestRecord, steps: &[StepRecord]) -> Option<f64> {
    let next = steps.partition_point(|step| step.delivered_s <= request.intended_s);
    let running = steps.get(next).filter(|step| step.report.end_s - step.wall_s <= request.intended_s);
    let on_time_s = running.map_or(request.intended_s, |step| step.delivered_s);
    Some(request.submitted_s? - on_time_s)
}

/// Rows of checks.csv. `limited` says that the load limits requests in flight, so that late ones are its own wish.
pub fn check_rows(record: &ArmRecord, arm: &str, repeat: u32, limited: bool) -> Vec<CheckRow> {
    let row = |check: &str, value: Option<f64>, status: &str, note: String| CheckRow {
        arm: arm.to_string(),
        repeat,
        check: check.to_string(),
        value,
        status: status.to_string(),
        note,
    };
    let judged = |ok: bool| if ok { "ok" } else { "warning" };
    let mut rows = Vec::new();
    if let Some(little) = little(record) {
        let note = format!(
            "steps saw {:.2} requests in the system, arrival rate times stay is {:.2}",
            little.in_system, little.rate_times_stay
        );
        let ratio = (little.rate_times_stay > 0.0).then(|| little.in_system / little.rate_times_stay);
        rows.push(row("littles_law_ratio", ratio, judged(little.agrees()), note));
    }
    let delays = Distribution::of(record.requests.iter().filter_map(RequestRecord::schedule_delay_s));
    rows.push(row(
        "schedule_delay_p99_ms",
        delays.map(|delays| delays.p99 * 1e3),
        "info",
        "intended arrival to being handed to the engine".to_string(),
    ));
    let late = late_share(record);
    let status = if limited { "info" } else { judged(late <= 0.01) };
    let note = if status == "warning" {
        "the generator fell behind: requests were handed over late"
    } else {
        "share of requests that were handed over late"
    };
    rows.push(row("late_share", Some(late), status, note.to_string()));
    rows.push(row(
        "steady_window_s",
        steady::window(record).map(|window| window.length_s()),
        "info",
        steady::RULE.to_string(),
    ));
    let interference_note = "mean gap between tokens in steps with a prefill over without, minus 1";
    rows.push(row("interference_factor", interference(record), "info", interference_note.to_string()));
    let fairness = fairness(record);
    let jain_note = "Jain's index of slowdown (E2EL per token over the least of the run)";
    rows.push(row("jain_slowdown", fairness.jain_slowdown, "info", jain_note.to_string()));
    let wait_ms = fairness.max_wait_s.map(|seconds| seconds * 1e3);
    rows.push(row("max_wait_ms", wait_ms, "info", "longest time to the first step".to_string()));
    let overtaken_note = "share of requests that one due later started before";
    rows.push(row("overtaken_share", fairness.overtaken, "info", overtaken_note.to_string()));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::step_report::StepKind;
    use crate::measure::testing::{answered, record_of, step};

    /// One request in the system throughout: both sides are 1.
    fn busy() -> ArmRecord {
        let requests =
            (0..10).map(|index| answered(f64::from(index), f64::from(index), &[f64::from(index) + 1.0]));
        let steps = (0..10).map(|index| step(StepKind::Decode, f64::from(index), f64::from(index) + 1.0));
        record_of(requests.collect(), steps.collect())
    }

    fn status(record: &ArmRecord, check: &str, limited: bool) -> String {
        let rows = check_rows(record, "a", 0, limited);
        rows.into_iter().find(|row| row.check == check).unwrap().status
    }

    #[test]
    fn littles_law_holds_for_a_whole_record_and_fails_when_requests_are_lost() {
        let record = busy();
        let little = little(&record).unwrap();
        assert_eq!((little.in_system, little.rate_times_stay), (1.0, 1.0));
        assert_eq!(status(&record, "littles_law_ratio", false), "ok");
        let mut lost = busy();
        lost.steps.iter_mut().for_each(|step| step.report.waiting = 4);
        assert_eq!(status(&lost, "littles_law_ratio", false), "warning");
    }

    #[test]
    fn a_generator_that_falls_behind_is_flagged_unless_the_load_asked_for_it() {
        let mut record = busy();
        assert_eq!(status(&record, "late_share", false), "ok");
        record.requests.iter_mut().for_each(|request| request.submitted_s = Some(request.intended_s + 1.5));
        assert_eq!(status(&record, "late_share", false), "warning");
        assert_eq!(status(&record, "late_share", true), "info");
        // Until the running step has ended a request is on time: engines take them between steps.
        record.requests.iter_mut().for_each(|request| request.submitted_s = Some(request.intended_s + 0.9));
        assert_eq!(status(&record, "late_share", false), "ok");
    }
}
