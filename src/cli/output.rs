//! Everything the commands print: data to stdout, errors and notes to stderr.
//!
//! A reader that closes the pipe early (`inferwall list | head -1`) is not an error. Colour is an extra on a
//! terminal, never the only carrier of a meaning, and off when `NO_COLOR` is set.

use std::io::{ErrorKind, IsTerminal, Write};

use crate::{Error, Result};

/// Writes data to stdout as it is.
///
/// # Errors
/// A stdout that cannot be written to; one that was closed is none.
pub fn data(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Error::failed(format!("cannot write to stdout: {error}"), "check where stdout leads to"))
        }
        _ => Ok(()),
    }
}

/// A line for the person at the terminal. A stderr that cannot be written to is ignored.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

pub fn warning(text: &str) {
    note(&format!("{} {text}", paint("warning:", "33;1")));
}

/// `error: <fact>` and, where there is one, `hint: <what to try>`.
pub fn print_error(error: &Error) {
    let label = if matches!(error, Error::Interrupted { .. }) {
        format!("{error}")
    } else {
        format!("{} {error}", paint("error:", "31;1"))
    };
    note(&label);
    if !error.hint().is_empty() {
        note(&format!("{} {}", paint("hint:", "36;1"), error.hint()));
    }
}

fn paint(text: &str, code: &str) -> String {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if plain || !std::io::stderr().is_terminal() {
        text.to_string()
    } else {
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}
