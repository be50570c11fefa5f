//! The clock a run lives on: real time, or the virtual time of a simulated device.
//!
//! Every time in the program is seconds since the start of its clock, as `f64`. A virtual clock moves only
//! when the engine waits for a step or for an arrival, so a simulated run is exact and reproducible.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[derive(Debug, Clone)]
pub enum Clock {
    Real {
        start: Instant,
    },
    /// Seconds as the bits of an `f64`; clones share the time.
    Virtual {
        now: Arc<AtomicU64>,
    },
}

impl Clock {
    pub fn real() -> Self {
        Self::Real { start: Instant::now() }
    }

    pub fn virtual_time() -> Self {
        Self::Virtual { now: Arc::new(AtomicU64::new(0f64.to_bits())) }
    }

    pub fn is_virtual(&self) -> bool {
        matches!(self, Self::Virtual { .. })
    }

    /// Seconds since the clock started.
    pub fn now(&self) -> f64 {
        match self {
            Self::Real { start } => start.elapsed().as_secs_f64(),
            Self::Virtual { now } => f64::from_bits(now.load(Ordering::Relaxed)),
        }
    }

    /// Returns once `now() >= time_s`: sleeps in real time, jumps in virtual time. Never goes back.
    pub fn wait_until(&self, time_s: f64) {
        match self {
            Self::Real { start } => {
                let wait_s = time_s - start.elapsed().as_secs_f64();
                if wait_s > 0.0 {
                    std::thread::sleep(Duration::from_secs_f64(wait_s));
                }
            }
            Self::Virtual { now } => {
                if time_s > self.now() {
                    now.store(time_s.to_bits(), Ordering::Relaxed);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_time_jumps_forward_only_and_is_shared() {
        let clock = Clock::virtual_time();
        let shared = clock.clone();
        clock.wait_until(2.5);
        clock.wait_until(1.0);
        assert_eq!(shared.now(), 2.5);
    }
}
