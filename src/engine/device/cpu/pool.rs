//! The worker threads of the CPU device.
//!
//! A step is a few hundred short parallel phases, so handing over a phase must cost about a microsecond. Threads spin
//! briefly for the next phase and then park, and a worker that has not come by the time all work is taken is not waited
//! for: a busy neighbour on a core costs its share of time and no more, where threads that meet at a barrier would wait for
//! a descheduled one at every phase. The calling thread is one of the workers.
//!
//! Which thread takes which part of a phase never decides a result: every output is computed by one thread alone.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};

/// Turns of the spin loop before a thread parks: some tens of microseconds.
const SPIN_TURNS: u32 = 3000;

/// A phase: called once on every thread with the thread's index.
type Phase<'a> = &'a (dyn Fn(usize) + Sync);

struct Shared {
    /// The phase of the current epoch. Written by the caller before the gate shows the epoch.
    phase: UnsafeCell<Option<Phase<'static>>>,
    /// Whom the last worker wakes. Written as the phase.
    caller: UnsafeCell<Option<Thread>>,
    /// epoch << 32 | [`CLOSED`] | workers that have entered the phase.
    gate: AtomicU64,
    /// Workers that have left the phase again.
    left: AtomicUsize,
    stop: AtomicBool,
    panicked: AtomicBool,
    asleep: Vec<AtomicBool>,
    caller_asleep: AtomicBool,
}

/// No worker may enter the phase any more.
const CLOSED: u64 = 1 << 31;
const ENTERED: u64 = CLOSED - 1;

// SAFETY: the two cells are written only by the caller while no worker is inside a phase, and are read by workers only
// after they entered the phase through the gate, which orders the reads after the writes.
unsafe impl Sync for Shared {}
// SAFETY: as above; the phase itself is `Sync`.
unsafe impl Send for Shared {}

pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// `threads` counts the calling thread.
    pub fn new(threads: usize) -> Self {
        let helpers = threads.max(1) - 1;
        let shared = Arc::new(Shared {
            phase: UnsafeCell::new(None),
            caller: UnsafeCell::new(None),
            gate: AtomicU64::new(CLOSED),
            left: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            asleep: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
            caller_asleep: AtomicBool::new(false),
        });
        let spawn = |index: usize| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name(format!("cpu-{}", index + 1))
                .spawn(move || work(&shared, index))
                .ok()
        };
        // A system that refuses a thread gives a smaller pool, not a failure.
        let workers = (0..helpers).map_while(spawn).collect();
        Self { shared, workers }
    }

    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `phase` once on every thread and returns when all have finished.
    pub fn run(&mut self, phase: &(dyn Fn(usize) + Sync)) {
        self.launch(phase, true);
    }

    /// Runs a phase on this thread and, if `all`, on every worker, else on those that come before this thread is done.
    fn launch(&mut self, phase: &(dyn Fn(usize) + Sync), all: bool) {
        if self.workers.is_empty() {
            phase(0);
            return;
        }
        let shared = &*self.shared;
        // SAFETY: the lifetime is extended only until this function returns, and it returns after every worker that
        // entered the phase has left it and no other can enter. `&mut self` keeps a second caller out.
        unsafe {
            *shared.phase.get() = Some(std::mem::transmute::<Phase<'_>, Phase<'static>>(phase));
            *shared.caller.get() = Some(std::thread::current());
        }
        shared.left.store(0, Ordering::Relaxed);
        self.next_epoch(0);
        let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| phase(0)));
        let entered = if all {
            self.workers.len()
        } else {
            (shared.gate.fetch_or(CLOSED, Ordering::SeqCst) & ENTERED) as usize
        };
        wait_until(|| shared.left.load(Ordering::SeqCst) == entered, &shared.caller_asleep);
        // Workers that come late find the gate closed.
        shared.gate.fetch_or(CLOSED, Ordering::SeqCst);
        if let Err(panic) = own {
            std::panic::resume_unwind(panic);
        }
        assert!(!shared.panicked.load(Ordering::Relaxed), "a worker thread of the CPU device panicked");
    }

    /// Shows the next epoch at the gate and wakes who sleeps.
    fn next_epoch(&self, flags: u64) {
        let shared = &*self.shared;
        let epoch = ((shared.gate.load(Ordering::Relaxed) >> 32) as u32).wrapping_add(1);
        shared.gate.store(u64::from(epoch) << 32 | flags, Ordering::SeqCst);
        for (worker, asleep) in self.workers.iter().zip(&shared.asleep) {
            if asleep.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
    }

    /// Splits `0..items` into runs of `grain` that threads take as they come free, and calls `body` with each run.
    pub fn split(
        &mut self,
        items: usize,
        grain: usize,
        body: &(dyn Fn(std::ops::Range<usize>, usize) + Sync),
    ) {
        let grain = grain.max(1);
        if items <= grain {
            if items > 0 {
                body(0..items, 0);
            }
            return;
        }
        let next = AtomicUsize::new(0);
        let take = |thread: usize| {
            loop {
                let start = next.fetch_add(grain, Ordering::Relaxed);
                if start >= items {
                    break;
                }
                body(start..(start + grain).min(items), thread);
            }
        };
        self.launch(&take, false);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.next_epoch(CLOSED);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker never panics outside a phase, and a phase's panic is caught.
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared, index: usize) {
    let mut seen = 0;
    let epoch_of = |gate: u64| (gate >> 32) as u32;
    loop {
        wait_until(|| epoch_of(shared.gate.load(Ordering::SeqCst)) != seen, &shared.asleep[index]);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        let gate = shared.gate.load(Ordering::SeqCst);
        if gate & CLOSED == 0 {
            let entering = shared.gate.compare_exchange(gate, gate + 1, Ordering::SeqCst, Ordering::SeqCst);
            if entering.is_err() {
                // Another worker entered at the same time, or the gate moved on: look again.
                continue;
            }
        }
        seen = epoch_of(gate);
        if gate & CLOSED != 0 {
            continue;
        }
        // SAFETY: this worker is inside the phase, so the caller keeps both cells unchanged until it has left.
        let (phase, caller) = unsafe { (*shared.phase.get(), (*shared.caller.get()).clone()) };
        if let Some(phase) = phase {
            let run = std::panic::AssertUnwindSafe(|| phase(index + 1));
            if std::panic::catch_unwind(run).is_err() {
                shared.panicked.store(true, Ordering::Relaxed);
            }
        }
        shared.left.fetch_add(1, Ordering::SeqCst);
        if shared.caller_asleep.load(Ordering::SeqCst)
            && let Some(caller) = caller
        {
            caller.unpark();
        }
    }
}

/// Spins, then parks until `done`. Whoever makes `done` true must afterwards read `asleep` and unpark.
fn wait_until(done: impl Fn() -> bool, asleep: &AtomicBool) {
    for _ in 0..SPIN_TURNS {
        if done() {
            return;
        }
        std::hint::spin_loop();
    }
    asleep.store(true, Ordering::SeqCst);
    while !done() {
        std::thread::park();
    }
    asleep.store(false, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_visited_once_whatever_the_threads() {
        for threads in [1, 2, 5] {
            let mut pool = Pool::new(threads);
            for items in [0, 1, 7, 1000] {
                let visits: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                pool.split(items, 3, &|range, thread| {
                    assert!(thread < threads);
                    for item in range {
                        visits[item].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(visits.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn phases_follow_each_other_after_a_pause_long_enough_to_park() {
        let mut pool = Pool::new(3);
        let calls = AtomicUsize::new(0);
        for round in 0..200 {
            if round % 50 == 0 {
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            pool.run(&|_| {
                calls.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(calls.load(Ordering::Relaxed), 3 * (round + 1));
        }
    }

    #[test]
    fn a_panic_in_a_phase_reaches_the_caller() {
        let mut pool = Pool::new(2);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(&|thread| assert!(thread == 0, "worker fails"));
        }));
        assert!(caught.is_err());
    }
}
