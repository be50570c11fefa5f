//! Events: when a stream has come to a point, and the time between two.

use cudarc::driver::{result, sys};

use super::{Gpu, check, failure};
use crate::Result;

/// A point in a stream's work, with a time.
#[derive(Debug)]
pub struct Event {
    gpu: Gpu,
    raw: sys::CUevent,
}

// SAFETY: an event handle may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// An event that nothing has recorded yet.
    ///
    /// # Errors
    /// A failure of the driver, in its words.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        gpu.bind()?;
        let raw = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map_err(|error| failure(error, || "creating an event".to_string()))?;
        Ok(Self { gpu: gpu.clone(), raw })
    }

    pub(in crate::engine::device::cuda) fn raw(&self) -> sys::CUevent {
        self.raw
    }

    /// Blocks until the work before the event is done.
    ///
    /// # Errors
    /// A failure of the driver, earlier work's too.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the event is live.
        check(unsafe { result::event::synchronize(self.raw) }, || "waiting for a step".to_string())
    }

    /// Whether the work before the event is done.
    ///
    /// # Errors
    /// A failure of the driver, earlier work's too.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the event is live.
        match unsafe { result::event::query(self.raw) } {
            Ok(()) => Ok(true),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(failure(error, || "asking for a step".to_string())),
        }
    }

    /// Seconds from `earlier` to this event; both have been passed.
    ///
    /// # Errors
    /// A failure of the driver, in its words.
    pub fn seconds_since(&self, earlier: &Event) -> Result<f64> {
        // SAFETY: both events are live and recorded.
        let milliseconds = unsafe { result::event::elapsed(earlier.raw, self.raw) }
            .map_err(|error| failure(error, || "reading an event's time".to_string()))?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: created in `new` and destroyed only here.
            let _ = unsafe { result::event::destroy(self.raw) };
        }
    }
}
