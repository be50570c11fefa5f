//! The worker threads of the CPU device.
//!
//! A step is a few hundred short parallel phases, so handing over a phase must cost about a microsecond. Threads spin
//! briefly for the next phase and then park, and a worker that has not come by the time all work is taken is not waited
//! for: a busy neighbour on a core costs its share of time and no more, where threads that meet at a barrier would wait for
//! a descheduled one at every phase. The calling thread is one of the workers.
//!
//! Each thread owns a run of a phase's items, which it takes front to back, so that what lies in order in memory is read
//! in order; a thread that is through takes from the back of the others' runs. Since a thread knows where its next run
//! will begin, it reads that into its cache while it waits ([`Ahead`]), and the memory is never idle between phases.
//!
//! Which thread takes which part of a phase never decides a result: every output is computed by one thread alone.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};

/// Turns of the spin loop before a thread parks: some tens of microseconds.
const SPIN_TURNS: u32 = 3000;

/// A phase: called once on every thread with the thread's index; gives what the thread reads first in the next one.
type Phase<'a> = &'a (dyn Fn(usize) -> Ahead + Sync);

/// Memory that a thread will read soon: up to two streams side by side, (start, bytes).
#[derive(Debug, Clone, Copy)]
pub struct Ahead([(*const u8, usize); 2]);

impl Ahead {
    pub const NOTHING: Self = Self([(std::ptr::null(), 0); 2]);

    /// # Safety
    /// The memory stays readable and unchanged until the thread has entered another phase: before it is freed, all must
    /// have met in [`Pool::run`].
    pub unsafe fn new(streams: [(*const u8, usize); 2]) -> Self {
        Self(streams)
    }

    /// Brings the next lines of each stream into the caches; false when there is nothing left.
    #[inline]
    fn read(&mut self, lines: usize) -> bool {
        let mut any = false;
        for (at, bytes) in &mut self.0 {
            for _ in 0..lines {
                if *bytes == 0 {
                    break;
                }
                // SAFETY: promised where this was made.
                unsafe { touch_line(*at) };
                *at = at.wrapping_add(LINE);
                *bytes = bytes.saturating_sub(LINE);
                any = true;
            }
        }
        any
    }
}

/// Bytes of a cache line.
pub const LINE: usize = 64;
/// Lines of each stream read in one turn of the spin loop.
const LINES_A_TURN: usize = 2;
/// Lines of each stream that the caller asks for before it goes on alone: as many as a core can wait for at once.
const LINES_BEFORE_LEAVING: usize = 16;

/// Brings a line into the caches, by a load that nothing waits for: some CPUs drop most of the prefetches that follow each
/// other closely.
///
/// # Safety
/// `at` can be read, and nobody writes there meanwhile.
#[inline(always)]
pub unsafe fn touch_line(at: *const u8) {
    // SAFETY: promised by the caller.
    unsafe { std::ptr::read_volatile(at) };
}

/// Asks for a line without waiting for it, wherever it is.
#[inline(always)]
pub fn prefetch_line(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, wherever it points.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// The same into the L2, not the L1.
#[inline(always)]
pub fn prefetch_line_to_l2(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// The items that a thread owns in a phase still untaken: start in the low half, end in the high one. Alone on its lines.
#[repr(align(128))]
struct Untaken(AtomicU64);

impl Untaken {
    fn set(&self, items: std::ops::Range<usize>) {
        self.0.store((items.end as u64) << 32 | items.start as u64, Ordering::Relaxed);
    }

    /// Takes up to `count` items from the front, and no more than half of those left, so that threads end together.
    #[inline]
    fn take_front(&self, count: usize) -> Option<std::ops::Range<usize>> {
        self.take(|start, end| {
            let next = start + count.min((end - start).div_ceil(2));
            (start..next, next..end)
        })
    }

    /// Takes one item from the back.
    #[inline]
    fn take_back(&self) -> Option<std::ops::Range<usize>> {
        self.take(|start, end| (end - 1..end, start..end - 1))
    }

    /// Takes what `part(start, end)` names first, and leaves what it names second.
    #[inline]
    fn take(
        &self,
        part: impl Fn(usize, usize) -> (std::ops::Range<usize>, std::ops::Range<usize>),
    ) -> Option<std::ops::Range<usize>> {
        let mut now = self.0.load(Ordering::Relaxed);
        loop {
            let (start, end) = ((now & 0xffff_ffff) as usize, (now >> 32) as usize);
            if start >= end {
                return None;
            }
            let (taken, left) = part(start, end);
            let next = (left.end as u64) << 32 | left.start as u64;
            match self.0.compare_exchange_weak(now, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(taken),
                Err(found) => now = found,
            }
        }
    }
}

/// The run of `items` that a thread owns.
pub fn share(items: usize, threads: usize, thread: usize) -> std::ops::Range<usize> {
    items * thread / threads..items * (thread + 1) / threads
}

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
    untaken: Vec<Untaken>,
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
        let workers: Vec<_> = (0..helpers).map_while(spawn).collect();
        let untaken = (0..=workers.len()).map(|_| Untaken(AtomicU64::new(0))).collect();
        Self { shared, workers, untaken }
    }

    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `phase` once on every thread and returns when all have finished.
    pub fn run(&mut self, phase: &(dyn Fn(usize) + Sync)) {
        let phase = |thread: usize| {
            phase(thread);
            Ahead::NOTHING
        };
        if self.workers.is_empty() {
            phase(0);
        } else {
            self.launch(&phase, true);
        }
    }

    /// Runs a phase on this thread and, if `all`, on every worker, else on those that come before this thread is done.
    fn launch(&self, phase: Phase<'_>, all: bool) {
        let shared = &*self.shared;
        // SAFETY: the lifetime is extended only until this function returns, and it returns after every worker that
        // entered the phase has left it and no other can enter. Callers hold `&mut self`, which keeps a second one out.
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
        let mut ahead = *own.as_ref().unwrap_or(&Ahead::NOTHING);
        wait_until(|| shared.left.load(Ordering::SeqCst) == entered, &shared.caller_asleep, &mut ahead);
        // Workers that come late find the gate closed.
        shared.gate.fetch_or(CLOSED, Ordering::SeqCst);
        // Taken back, since the pool outlives the panic: dropping the weights runs one more phase while it unwinds.
        let worker_panicked = shared.panicked.swap(false, Ordering::Relaxed);
        if let Err(panic) = own {
            std::panic::resume_unwind(panic);
        }
        assert!(!worker_panicked, "a worker thread of the CPU device panicked");
        ahead.read(LINES_BEFORE_LEAVING);
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

    /// Splits `0..items` over the threads, which take `grain` at a time, fewer where few are left, and calls `body` with each run
    /// taken.
    pub fn split(
        &mut self,
        items: usize,
        grain: usize,
        body: &(dyn Fn(std::ops::Range<usize>, usize) + Sync),
    ) {
        self.split_before(&|_| Ahead::NOTHING, items, grain, body);
    }

    /// As [`Pool::split`], before a phase in which thread t first reads `ahead(t)`.
    pub fn split_before(
        &mut self,
        ahead: &(dyn Fn(usize) -> Ahead + Sync),
        items: usize,
        grain: usize,
        body: &(dyn Fn(std::ops::Range<usize>, usize) + Sync),
    ) {
        let grain = grain.max(1);
        let threads = self.threads();
        if items <= grain || threads == 1 {
            (0..items).step_by(grain).for_each(|start| body(start..items.min(start + grain), 0));
            return;
        }
        assert!(items < 1 << 32, "too many items of work");
        for (thread, untaken) in self.untaken.iter().enumerate() {
            untaken.set(share(items, threads, thread));
        }
        let untaken = &self.untaken;
        let phase = |thread: usize| {
            while let Some(range) = untaken[thread].take_front(grain) {
                body(range, thread);
            }
            for other in 1..threads {
                while let Some(range) = untaken[(thread + other) % threads].take_back() {
                    body(range, thread);
                }
            }
            ahead(thread)
        };
        self.launch(&phase, false);
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
    let mut ahead = Ahead::NOTHING;
    let epoch_of = |gate: u64| (gate >> 32) as u32;
    loop {
        wait_until(
            || epoch_of(shared.gate.load(Ordering::SeqCst)) != seen,
            &shared.asleep[index],
            &mut ahead,
        );
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
            ahead = std::panic::catch_unwind(run).unwrap_or_else(|_| {
                shared.panicked.store(true, Ordering::Relaxed);
                Ahead::NOTHING
            });
        }
        shared.left.fetch_add(1, Ordering::SeqCst);
        if shared.caller_asleep.load(Ordering::SeqCst)
            && let Some(caller) = caller
        {
            caller.unpark();
        }
    }
}

/// Spins, reading ahead while there is something to, then parks until `done`. Whoever makes `done` true must afterwards
/// read `asleep` and unpark.
fn wait_until(done: impl Fn() -> bool, asleep: &AtomicBool, ahead: &mut Ahead) {
    for _ in 0..SPIN_TURNS {
        if done() {
            return;
        }
        if !ahead.read(LINES_A_TURN) {
            std::hint::spin_loop();
        }
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
    fn runs_grow_shorter_where_few_items_are_left() {
        let untaken = Untaken(AtomicU64::new(0));
        untaken.set(10..17);
        assert_eq!(untaken.take_back(), Some(16..17));
        let runs: Vec<_> = std::iter::from_fn(|| untaken.take_front(3)).collect();
        assert_eq!(runs, [10..13, 13..15, 15..16]);
        assert_eq!(untaken.take_back(), None);
    }

    #[test]
    fn every_item_is_visited_once_whatever_the_threads() {
        for threads in [1, 2, 5] {
            let next = vec![0u8; 4096];
            let mut pool = Pool::new(threads);
            for items in [0, 1, 2, 7, 1000] {
                let visits: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                // What is read ahead may end anywhere, also in the middle of a line.
                let streams = |thread: usize| [(next[thread..].as_ptr(), 1000 + thread), (next.as_ptr(), 0)];
                // SAFETY: `next` outlives the pool.
                let ahead = |thread: usize| unsafe { Ahead::new(streams(thread)) };
                pool.split_before(&ahead, items, 3, &|range, thread| {
                    assert!(thread < threads && range.len() <= 3);
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
