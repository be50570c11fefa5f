//! Parse, run, print one error, set the exit code.

use std::process::ExitCode;

use inferwall::cli::{self, output};

fn main() -> ExitCode {
    match cli::parse().and_then(cli::run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::print_error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}
