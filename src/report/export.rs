//! The whole report as text, and the report files of a folder.

use super::format::Format;
use super::html;
use super::{markdown, overview, service, why};
use crate::Result;
use crate::explain::compare;
use crate::results::RunResults;
use crate::results::claims::{self, Outcome, Verdict};
use crate::results::record::RunRecord;

/// Table, explanation and claims, for a terminal or as Markdown.
///
/// # Errors
/// A fault of the program alone.
pub fn text(results: &RunResults, format: Format) -> Result<String> {
    let mut text = overview::render(results, format)?;
    text += &format!("\n{}", why::render(results, format)?);
    text += &format!("\n{}", service::render(results, format)?);
    if compare::by_default(results) {
        text += &format!("\n{}", super::compare::section(results, format));
    }
    text += &claims_text(&results.record, format == Format::Md);
    Ok(text)
}

/// Claims that say something here, each on a line; of the others only how many there are (`all` lists them too).
fn claims_text(record: &RunRecord, all: bool) -> String {
    let claims = &record.claims;
    let left_out = claims::left_out(&record.plan);
    let comparable = |verdict: &&Verdict| verdict.outcome != Outcome::NotComparable;
    let shown: Vec<&Verdict> = claims.iter().filter(|verdict| all || comparable(verdict)).collect();
    let hidden = claims.len() - shown.len();
    if claims.is_empty() && left_out.is_none() {
        return String::new();
    }
    let mut lines: String = shown.iter().map(|verdict| format!("- {}\n", verdict.line())).collect();
    if hidden > 0 {
        let more = if shown.is_empty() { "" } else { " more" };
        lines += &format!("- {hidden}{more} not comparable on this rig; report.md lists them\n");
    }
    lines += &left_out.map_or_else(String::new, |left_out| format!("- {left_out}\n"));
    format!("\nClaims:\n\n{lines}")
}

/// Names and contents of the files a report consists of.
///
/// # Errors
/// A fault of the program alone.
pub fn report_files(results: &RunResults) -> Result<Vec<(&'static str, String)>> {
    Ok(vec![("report.md", markdown::report(results)?), ("report.html", html::report(results)?)])
}
