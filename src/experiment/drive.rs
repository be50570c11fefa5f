//! Runs one schedule against a target: the one loop that owns the clock.

use std::collections::VecDeque;

use super::interrupt;
use super::target::{Target, TargetEvent};
use crate::Result;
use crate::measure::recorder::{ArmRecord, Recorder};
use crate::workload::feed::{Due, Feed};
use crate::workload::schedule::Schedule;

/// How requests reach the engine: `delay_s` after they are due, and no two within `gap_s` (see
/// [`crate::engine::device::Device::submission_delay_s`]).
#[derive(Debug, Clone, Copy, Default)]
pub struct Submission {
    pub delay_s: f64,
    pub gap_s: f64,
}

/// Runs `schedule` to its end. `progress` is called with the number of answers so far.
///
/// # Errors
/// What the target says; [`crate::Error::Interrupted`] after Ctrl-C.
pub fn drive(
    target: &mut dyn Target,
    schedule: Schedule,
    submission: Submission,
    progress: &mut dyn FnMut(usize),
) -> Result<ArmRecord> {
    let origin_s = target.now();
    let mut feed = Feed::new(schedule, origin_s);
    let mut recorder = Recorder::new(origin_s);
    // Due, but still on their way to the engine: (when they arrive there, request).
    let mut on_the_way: VecDeque<(f64, Due)> = VecDeque::new();
    let mut last_arrival_s = f64::NEG_INFINITY;
    let mut answered = 0;
    loop {
        interrupt::check()?;
        let now_s = target.now();
        while let Some(due) = feed.take_due(now_s) {
            let arrival_s = (due.intended_s + submission.delay_s).max(last_arrival_s + submission.gap_s);
            last_arrival_s = arrival_s;
            on_the_way.push_back((arrival_s, due));
        }
        while on_the_way.front().is_some_and(|(arrival_s, _)| *arrival_s <= now_s) {
            let Some((_, due)) = on_the_way.pop_front() else { break };
            match target.submit(due.request.clone()) {
                Ok(id) => {
                    feed.submitted(due.index, id);
                    recorder.submitted(&due, id, now_s);
                }
                Err(error) => {
                    feed.refused(due.index, now_s);
                    recorder.refused(&due, &error);
                }
            }
        }
        let deadline_s = [on_the_way.front().map(|(arrival_s, _)| *arrival_s), feed.next_due_s()]
            .into_iter()
            .flatten()
            .min_by(f64::total_cmp);
        match target.next_event(deadline_s)? {
            TargetEvent::Step(report) => {
                let now_s = target.now();
                feed.observe(&report, now_s);
                recorder.step(*report, now_s);
                if recorder.finished() != answered {
                    answered = recorder.finished();
                    progress(answered);
                }
            }
            TargetEvent::Idle if deadline_s.is_none() => return Ok(recorder.finish()),
            TargetEvent::Idle => {}
        }
    }
}
