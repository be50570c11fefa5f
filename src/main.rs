//! Parse, run, print one error, set the exit code.

use std::process::ExitCode;

use clap::Parser;
use inferwall::cli::{self, output};

fn main() -> ExitCode {
    let arguments = cli::Arguments::parse();
    match cli::run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::print_error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}
