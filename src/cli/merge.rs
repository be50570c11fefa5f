//! `inferwall merge`: one results folder from the shards of a plan.
//!
//! Rows are put into the order of the plan, so that a merged run is the run that was not sharded, row for row.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;

use super::flags::Format;
use super::{execute, output};
use crate::experiment::folder::{KERNELS_FILE, ResultsFolder};
use crate::experiment::plan::{Cell, Plan};
use crate::experiment::record::{self, RunRecord, Status};
use crate::report::csv::Rows;
use crate::{Error, Result};

#[derive(Debug, Args)]
pub struct MergeFlags {
    /// Folders of the shards
    #[arg(required = true, value_name = "DIR")]
    folders: Vec<PathBuf>,

    /// Folder that the result goes under
    #[arg(long, value_name = "DIR", default_value = "results/local")]
    out: PathBuf,

    /// Merge although plan, build, device or weights differ; the result is marked
    #[arg(long)]
    force: bool,

    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// Files with rows, summary.csv last as in a run.
const FILES: [&str; 8] = [
    "cold.csv",
    "populations.csv",
    "checks.csv",
    "requests.csv",
    "tokens.csv",
    "steps.csv",
    KERNELS_FILE,
    "summary.csv",
];

impl MergeFlags {
    pub fn run(self) -> Result<()> {
        let records: Vec<RunRecord> =
            self.folders.iter().map(|folder| RunRecord::read(folder)).collect::<Result<_>>()?;
        let mut merged = records[0].clone();
        merged.plan.shard = None;
        merged.options.shard = None;
        for (folder, record) in self.folders.iter().zip(&records).skip(1) {
            let differences = merged.differences(record);
            if !differences.is_empty() && !self.force {
                return Err(Error::invalid(
                    format!("{} is no shard of the same run: {}", folder.display(), differences.join("; ")),
                    "merge shards of one plan, build, device and model, or mix them with --force, which marks the result",
                ));
            }
            merged.forced.extend(differences);
            merged.warnings.extend(record.warnings.iter().cloned());
            merged.arm_ceilings.extend(record.arm_ceilings.iter().cloned());
            for skipped in &record.skipped {
                if !merged.skipped.contains(skipped) {
                    merged.skipped.push(skipped.clone());
                }
            }
        }
        merged.command = record::command_line();
        merged.ended = Some(record::now());
        merged.warn_of_ceilings();

        let mut by_cell: BTreeMap<(usize, usize), Vec<(&str, Rows)>> = BTreeMap::new();
        for folder in &self.folders {
            for (cell, rows) in cells_of(folder, &merged.plan)? {
                if by_cell.insert((cell.repeat, cell.arm), rows).is_some() {
                    let arm = &merged.plan.arms[cell.arm].name;
                    return Err(Error::invalid(
                        format!("{} has arm {arm}, repeat {} again", folder.display(), cell.repeat),
                        "give each shard once",
                    ));
                }
            }
        }
        let skipped =
            |arm: usize| merged.skipped.iter().any(|skipped| skipped.arm == merged.plan.arms[arm].name);
        let missing = |cell: &Cell| !by_cell.contains_key(&(cell.repeat, cell.arm)) && !skipped(cell.arm);
        let missing = merged.plan.cells().iter().filter(|cell| missing(cell)).count();
        merged.status = if missing == 0 { Status::Complete } else { Status::Interrupted };
        if missing > 0 {
            let warning = format!("{missing} of {} runs of an arm are missing", merged.plan.cells().len());
            output::warning(&warning);
            merged.warnings.push(warning);
        }
        let mut folder =
            ResultsFolder::create(&self.out, &merged.experiment, &merged.device.id, &merged.plan_hash)?;
        for ((repeat, arm), rows) in &by_cell {
            folder.append(Cell { arm: *arm, repeat: *repeat }, rows)?;
        }
        execute::report(&folder, merged, self.format).map(|_| ())
    }
}

/// Rows of one cell, by file.
type CellRows = Vec<(&'static str, Rows)>;

/// Rows of a folder, by the cell they belong to.
fn cells_of(folder: &Path, plan: &Plan) -> Result<Vec<(Cell, CellRows)>> {
    let finished = ResultsFolder::finished_in(folder)?;
    let mut cells: Vec<(Cell, CellRows)> = finished.into_iter().map(|cell| (cell, Vec::new())).collect();
    for name in FILES {
        let path = folder.join(name);
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let damaged = |what: String| {
            Error::invalid(format!("{}: {what}", path.display()), "the file is damaged: run that shard again")
        };
        let mut reader = csv::Reader::from_reader(text.as_bytes());
        let headers = reader.headers().map_err(|error| damaged(error.to_string()))?.clone();
        let column = |name: &str| {
            headers
                .iter()
                .position(|header| header == name)
                .ok_or_else(|| damaged(format!("no column `{name}`")))
        };
        let (arm_column, repeat_column) = (column("arm")?, column("repeat")?);
        let header = line(&headers)?;
        let mut grouped: BTreeMap<(String, String), String> = BTreeMap::new();
        for record in reader.records() {
            let record = record.map_err(|error| damaged(error.to_string()))?;
            let key = (record[arm_column].to_string(), record[repeat_column].to_string());
            *grouped.entry(key).or_default() += &line(&record)?;
        }
        for (cell, rows) in &mut cells {
            let arm =
                plan.arms.get(cell.arm).ok_or_else(|| damaged("an arm outside the plan".to_string()))?;
            if let Some(text) = grouped.remove(&(arm.name.clone(), cell.repeat.to_string())) {
                rows.push((name, Rows { header: header.clone(), rows: text }));
            }
        }
    }
    Ok(cells)
}

fn line(record: &csv::StringRecord) -> Result<String> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(record).map_err(|error| Error::failed(error.to_string(), ""))?;
    let bytes = writer.into_inner().map_err(|error| Error::failed(error.to_string(), ""))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
