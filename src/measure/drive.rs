//! Runs one schedule against a target: the one loop that owns the clock.

use std::collections::VecDeque;

use super::recorder::{ArmRecord, Recorder};
use super::target::{Target, TargetEvent};
use crate::interrupt;
use crate::workload::feed::{Due, Feed};
use crate::workload::schedule::Schedule;
use crate::{Error, Result};

/// How requests reach the engine: `delay_s` after they are due, and no two within `gap_s` (see
/// [`crate::engine::device::Device::submission_delay_s`]).
#[derive(Debug, Clone, Copy, Default)]
pub struct Submission {
    pub delay_s: f64,
    pub gap_s: f64,
}

/// Runs `schedule` to its end, or until `stop_s` seconds after its start whatever is still running then. `progress` is
/// called with the number of answers so far.
///
/// # Errors
/// What the target says; [`Error::Interrupted`] after Ctrl-C; [`Error::Failed`] for a load that waits for an answer while
/// the target has nothing to do.
pub fn drive(
    target: &mut dyn Target,
    schedule: Schedule,
    submission: Submission,
    stop_s: Option<f64>,
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
        if stop_s.is_some_and(|stop_s| now_s - origin_s >= stop_s) {
            return Ok(recorder.finish());
        }
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
            TargetEvent::Idle if deadline_s.is_some() => {}
            TargetEvent::Idle if feed.is_done() => return Ok(recorder.finish()),
            TargetEvent::Idle => return Err(Error::bug("the load waits for an answer that will not come")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::request::{Request, RequestId};
    use crate::workload::schedule::ScheduleContext;
    use crate::workload::spec::LoadSpec;

    /// Takes every request and answers none.
    struct Silent(u64);

    impl Target for Silent {
        fn now(&self) -> f64 {
            0.0
        }

        fn submit(&mut self, _request: Request) -> Result<RequestId> {
            self.0 += 1;
            Ok(RequestId(self.0))
        }

        fn cancel(&mut self, _id: RequestId) {}

        fn next_event(&mut self, _deadline_s: Option<f64>) -> Result<TargetEvent> {
            Ok(TargetEvent::Idle)
        }
    }

    fn driven(stop_s: Option<f64>) -> Result<ArmRecord> {
        let load: LoadSpec =
            toml::from_str("prompts = 2\nconcurrency = 1\ninput_len = 8\noutput_len = 4").unwrap();
        let schedule = load.schedule(&ScheduleContext {
            vocab_size: 100,
            special_tokens: &[],
            stop_tokens: &[],
            seats: 1,
            seed: 0,
            encode: None,
        });
        drive(&mut Silent(0), schedule.unwrap(), Submission::default(), stop_s, &mut |_| {})
    }

    #[test]
    fn a_load_that_is_stuck_is_an_error_unless_the_clock_stops_it() {
        let error = driven(None).unwrap_err();
        assert!(error.to_string().contains("will not come") && error.exit_code() == 1, "{error}");
        assert_eq!(driven(Some(0.0)).unwrap().steps.len(), 0);
    }
}
