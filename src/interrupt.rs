//! Ctrl-C. The runner looks at the flag between steps and ends cleanly; when a step takes longer than the grace
//! period, a watchdog ends the process instead, so that it never takes a second.
//!
//! Ending in the middle of a write loses nothing: rows count only once the journal names them (see `folder`).

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::{Error, Result};

/// How long the runner has to notice the flag before the watchdog ends the process.
const GRACE: Duration = Duration::from_millis(600);

static REQUESTED: AtomicBool = AtomicBool::new(false);
static RESUME: Mutex<String> = Mutex::new(String::new());

/// Catches SIGINT and SIGTERM. Call once, before long work.
///
/// # Errors
/// The system lets the process handle no signals, or it is called twice.
pub fn install() -> Result<()> {
    ctrlc::set_handler(|| {
        REQUESTED.store(true, Ordering::SeqCst);
        std::thread::sleep(GRACE);
        eprintln!("interrupted");
        let hint = hint();
        if !hint.is_empty() {
            eprintln!("hint: {hint}");
        }
        std::process::exit(130);
    })
    .map_err(|error| {
        Error::failed(
            format!("cannot catch Ctrl-C: {error}"),
            "the system lets this process handle no signals: start it from a shell",
        )
    })
}

/// What to tell the user when interrupted from now on.
pub fn set_hint(text: String) {
    if let Ok(mut hint) = RESUME.lock() {
        *hint = text;
    }
}

/// What an interrupted run would tell.
pub fn hint() -> String {
    RESUME.lock().map(|hint| hint.clone()).unwrap_or_default()
}

pub fn requested() -> bool {
    REQUESTED.load(Ordering::SeqCst)
}

/// # Errors
/// [`Error::Interrupted`] once Ctrl-C was pressed.
pub fn check() -> Result<()> {
    if requested() { Err(Error::Interrupted { hint: hint() }) } else { Ok(()) }
}
