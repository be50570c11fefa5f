//! `inferwall report`: reports made anew from results folders, claims checked again.

use std::path::PathBuf;

use clap::Args;

use super::output;
use crate::report::format::Format;
use crate::report::{export, json};
use crate::results::RunResults;
use crate::results::claims;
use crate::results::folder::ResultsFolder;
use crate::{Error, Result};

#[derive(Debug, Args)]
pub struct ReportFlags {
    /// Folders of runs
    #[arg(required = true, value_name = "DIR")]
    folders: Vec<PathBuf>,

    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

impl ReportFlags {
    /// # Errors
    /// A folder that is none of a run, or is damaged or has no rows; a folder that cannot be written to.
    pub fn run(self) -> Result<()> {
        let mut rows = Vec::new();
        for (index, path) in self.folders.iter().enumerate() {
            let mut results = RunResults::read(path)?;
            if results.summaries.is_empty() {
                return Err(Error::invalid(
                    format!("{} has no finished arm", path.display()),
                    "resume the run first: `inferwall run --resume DIR`",
                ));
            }
            results.record.claims = claims::check(&results);
            // (A folder that was thinned out for keeping: its report says what can no longer be made from what is left.)
            if results.steps.is_empty() && path.join("report.md").exists() {
                output::note(&format!(
                    "{}: steps.csv is missing, so report.md stays as it was",
                    path.display()
                ));
            } else {
                for (name, text) in export::report_files(&results)? {
                    ResultsFolder::write_whole(path, name, text.as_bytes())?;
                }
            }
            match self.format {
                Format::Table | Format::Md => {
                    let gap = if index > 0 { "\n" } else { "" };
                    output::data(&format!("{gap}{}", export::text(&results, self.format)?))?;
                }
                Format::Csv | Format::Json => rows.extend(results.summaries),
            }
        }
        match self.format {
            Format::Json => output::data(&json::array(&rows)?),
            Format::Csv => {
                let text = crate::results::csv::rows(&rows)?;
                output::data(&(text.header + &text.rows))
            }
            Format::Table | Format::Md => Ok(()),
        }
    }
}
