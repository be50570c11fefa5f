//! Says which test is skipped and why, loudly: past the harness, which would keep the words of a passing test to itself.

use std::io::Write;

pub fn skip(test: &str, why: impl std::fmt::Display) {
    // A test has no better place to say that stderr is closed.
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
}
