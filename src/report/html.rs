//! report.html: one self-contained file with table, plots, explanation and claims.

use super::format::Format;
use super::{overview, plots, why};
use crate::Result;
use crate::numbers::grouped;
use crate::results::RunResults;
use crate::results::claims::{self, Verdict};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}\
table{border-collapse:collapse;margin:1rem 0}th,td{padding:.25rem .6rem;border-bottom:1px solid #ddd;text-align:right}\
th:first-child,td:first-child,th:last-child,td:last-child{text-align:left}pre{overflow-x:auto;background:#f6f6f6;\
padding:.8rem}figure{margin:1.5rem 0}figcaption{color:#555}svg{max-width:100%;height:auto}.sim{color:#a33;font-weight:600}";

/// The whole report as one page that needs no other file.
///
/// # Errors
/// A fault of the program alone.
pub fn report(results: &RunResults) -> Result<String> {
    let record = &results.record;
    let title = escape(&overview::title(results));
    let mut body = format!("<h1>{title}</h1>\n<p>{}</p>\n", escape(&record.plan.question));
    if record.device.simulated {
        body += "<p class=\"sim\">Every figure on this page is simulated.</p>\n";
    }
    body += &table(&overview::header(results), &overview::rows(results));
    for plot in plots::all(results)? {
        let label = if record.device.simulated { " (simulated)" } else { "" };
        body += &format!(
            "<figure>{}<figcaption>{}{label}</figcaption></figure>\n",
            plot.svg,
            escape(&plot.title)
        );
    }
    body += &format!("<h2>Why</h2>\n<pre>{}</pre>\n", escape(&why::render(results, Format::Table)?));
    let claims = record.claims.iter().map(Verdict::line).chain(claims::left_out(&record.plan));
    let items: String = claims.map(|line| format!("<li>{}</li>\n", escape(&line))).collect();
    if !items.is_empty() {
        body += &format!("<h2>Claims</h2>\n<ul>\n{items}</ul>\n");
    }
    body += &format!(
        "<p>{} rows of {} arms; command: <code>inferwall {}</code>; build {}; started {}</p>\n",
        grouped(&results.summaries.len().to_string()),
        results.arms().len(),
        escape(&record.command.join(" ")),
        escape(&record.build),
        escape(&record.started),
    );
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\
         <style>{STYLE}</style></head>\n<body>\n{body}</body></html>\n"
    ))
}

fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let line = |tag: &str, cells: Vec<String>| {
        let cells: String = cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect();
        format!("<tr>{cells}</tr>\n")
    };
    let head = line("th", header.iter().map(ToString::to_string).collect());
    let body: String = rows.iter().map(|row| line("td", row.clone())).collect();
    format!("<table>\n{head}{body}</table>\n")
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
