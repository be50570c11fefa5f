//! What a run drives: something that takes requests and reports what became of them.

use std::time::Duration;

use crate::engine::Engine;
use crate::engine::clock::Clock;
use crate::engine::request::{Request, RequestId};
use crate::engine::step_report::StepReport;
use crate::{Result, interrupt};

pub trait Target {
    /// Seconds on the target's clock.
    fn now(&self) -> f64;

    /// Hands a request in; it runs as [`Self::next_event`] is called.
    ///
    /// # Errors
    /// A request that the target cannot serve.
    fn submit(&mut self, request: Request) -> Result<RequestId>;

    fn cancel(&mut self, id: RequestId);

    /// The next thing that happens: a step, or nothing before `deadline_s`. With nothing to do and no deadline it
    /// returns at once.
    ///
    /// # Errors
    /// A step that failed; an interruption.
    fn next_event(&mut self, deadline_s: Option<f64>) -> Result<TargetEvent>;
}

#[derive(Debug)]
pub enum TargetEvent {
    Step(Box<StepReport>),
    /// The deadline passed (or there was none) with nothing to do.
    Idle,
}

/// The engine in this process.
pub struct Embedded<'a> {
    pub engine: &'a mut Engine,
}

/// Longest sleep between two looks at the Ctrl-C flag.
const SLICE: Duration = Duration::from_millis(50);

impl Target for Embedded<'_> {
    fn now(&self) -> f64 {
        self.engine.clock().now()
    }

    fn submit(&mut self, request: Request) -> Result<RequestId> {
        self.engine.submit(request)
    }

    fn cancel(&mut self, id: RequestId) {
        self.engine.cancel(id);
    }

    fn next_event(&mut self, deadline_s: Option<f64>) -> Result<TargetEvent> {
        if let Some(report) = self.engine.step()? {
            return Ok(TargetEvent::Step(Box::new(report)));
        }
        if let Some(deadline_s) = deadline_s {
            wait(self.engine.clock(), deadline_s)?;
        }
        Ok(TargetEvent::Idle)
    }
}

/// Waits in slices, so that Ctrl-C is seen in time.
fn wait(clock: &Clock, deadline_s: f64) -> Result<()> {
    if clock.is_virtual() {
        clock.wait_until(deadline_s);
        return Ok(());
    }
    while clock.now() < deadline_s {
        interrupt::check()?;
        clock.wait_until(deadline_s.min(clock.now() + SLICE.as_secs_f64()));
    }
    Ok(())
}
