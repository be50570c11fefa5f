//! Small tables: for a terminal, as Markdown, or as CSV.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use super::format::Format;
use crate::{Error, Result};

/// Draws rows under a header; `right` lists the columns to align to the right. JSON is not made from tables.
///
/// # Errors
/// A fault of the program alone.
pub fn render(format: Format, header: &[&str], rows: &[Vec<String>], right: &[usize]) -> Result<String> {
    match format {
        Format::Csv => {
            let mut writer = csv::Writer::from_writer(Vec::new());
            let failed = |error: csv::Error| Error::bug(format!("cannot write CSV: {error}"));
            writer.write_record(header).map_err(failed)?;
            for row in rows {
                writer.write_record(row).map_err(failed)?;
            }
            let bytes =
                writer.into_inner().map_err(|error| Error::bug(format!("cannot write CSV: {error}")))?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        }
        Format::Md => Ok(markdown(header, rows, right)),
        Format::Table | Format::Json => Ok(terminal(header, rows, right)),
    }
}

/// A plain table as wide as its content, or as the terminal where that is narrower.
fn terminal(header: &[&str], rows: &[Vec<String>], right: &[usize]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(header);
    for row in rows {
        table.add_row(row);
    }
    let last = header.len().saturating_sub(1);
    for (index, column) in table.column_iter_mut().enumerate() {
        if right.contains(&index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        column.set_padding((0, if index == last { 0 } else { 2 }));
    }
    let mut text: String = table.to_string().lines().map(|line| format!("{}\n", line.trim_end())).collect();
    if text.is_empty() {
        text.push('\n');
    }
    text
}

pub fn markdown(header: &[&str], rows: &[Vec<String>], right: &[usize]) -> String {
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let escape = |cell: &str| cell.replace('|', "\\|").replace('\n', " ");
    let rule = (0..header.len()).map(|index| if right.contains(&index) { "---:" } else { "---" }.to_string());
    let mut text = line(header.iter().map(|cell| escape(cell)).collect());
    text += &format!("|{}|\n", rule.collect::<Vec<_>>().join("|"));
    for row in rows {
        text += &line(row.iter().map(|cell| escape(cell)).collect());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats() {
        let rows = vec![vec!["a|b".to_string(), "1".to_string()]];
        let draw = |format| render(format, &["name", "n"], &rows, &[1]).unwrap();
        assert_eq!(draw(Format::Md), "| name | n |\n|---|---:|\n| a\\|b | 1 |\n");
        assert_eq!(draw(Format::Csv), "name,n\na|b,1\n");
        assert_eq!(draw(Format::Table), "name  n\na|b   1\n");
    }
}
