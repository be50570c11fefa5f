//! `inferwall merge`: one results folder from the shards of a plan.
//!
//! Rows are put into the order of the plan, so that a merged run is the run that was not sharded, row for row.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::Args;

use super::{execute, output};
use crate::experiment::plan::{Arm, Cell};
use crate::report::format::Format;
use crate::results::csv::Rows;
use crate::results::folder::{KERNELS_FILE, ROW_FILES, ResultsFolder};
use crate::results::journal::{FinishedCell, JOURNAL, Journal};
use crate::results::record::{self, RunRecord, Status};
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

impl MergeFlags {
    /// # Errors
    /// Folders that are no shards of one plan (without `--force`), are damaged, or have a row twice.
    pub fn run(self) -> Result<()> {
        let records: Vec<RunRecord> =
            self.folders.iter().map(|folder| RunRecord::read(folder)).collect::<Result<_>>()?;
        let mut merged = self.merge_records(&records)?;

        let mut by_cell: BTreeMap<Place, (FinishedCell, CellRows)> = BTreeMap::new();
        for folder in &self.folders {
            for (cell, rows) in cells_of(folder)? {
                if let Some((cell, _)) = by_cell.insert(place(&merged, &cell), (cell, rows)) {
                    return Err(Error::invalid(
                        format!("{} has arm {}, repeat {} again", folder.display(), cell.arm, cell.repeat),
                        "give each shard once",
                    ));
                }
            }
        }
        let there = |cell: &Cell| {
            let arm = &merged.plan.arms[cell.arm].name;
            by_cell.contains_key(&(cell.repeat, cell.arm, arm.clone()))
                || merged.skipped.iter().any(|skipped| skipped.arm == *arm)
        };
        let missing = merged.plan.cells().iter().filter(|cell| !there(cell)).count();
        merged.status = if missing == 0 { Status::Complete } else { Status::Interrupted };
        if missing > 0 {
            let warning = format!("{missing} of {} runs of an arm are missing", merged.plan.cells().len());
            output::warning(&warning);
            merged.warnings.push(warning);
        }
        let mut folder =
            ResultsFolder::create(&self.out, &merged.experiment, &merged.device.id, &merged.plan_hash)?;
        folder.note_working_folder(&merged.plan.folder)?;
        for (cell, rows) in by_cell.into_values() {
            folder.append(cell, &rows)?;
        }
        execute::report(&folder, &mut merged, self.format)
    }

    /// What the shards' records say together. Arms that only a later one has (`--force`) follow those of the first.
    fn merge_records(&self, records: &[RunRecord]) -> Result<RunRecord> {
        let mut merged = records[0].clone();
        merged.plan.shard = None;
        merged.options.shard = None;
        for (folder, record) in self.folders.iter().zip(records).skip(1) {
            let differences = records[0].differences(record);
            if !differences.is_empty() && !self.force {
                return Err(Error::invalid(
                    format!("{} is no shard of the same run: {}", folder.display(), differences.join("; ")),
                    "merge shards of one plan, build, device and model, or mix them with --force, which marks the result",
                ));
            }
            merged.forced.extend(differences.into_iter().chain(record.forced.iter().cloned()));
            merged.warnings.extend(record.warnings.iter().cloned());
            merged.arm_ceilings.extend(record.arm_ceilings.iter().cloned());
            for skipped in &record.skipped {
                if !merged.skipped.contains(skipped) {
                    merged.skipped.push(skipped.clone());
                }
            }
            for arm in &record.plan.arms {
                if !merged.plan.arms.iter().any(|own| own.name == arm.name) {
                    merged.plan.arms.push(Arm { baseline: false, ..arm.clone() });
                }
            }
            merged.plan.repeats = merged.plan.repeats.max(record.plan.repeats);
            if record.seeds.len() > merged.seeds.len() {
                merged.seeds.clone_from(&record.seeds);
            }
            merged.add_facts(&record.arms, &record.models);
            merged.ceilings = merged.ceilings.or(record.ceilings);
            if merged.cold_start.is_none() {
                merged.cold_start.clone_from(&record.cold_start);
            }
        }
        merged.plan_hash = merged.plan.hash();
        merged.command = record::command_line();
        merged.ended = Some(record::now());
        merged.warn_of_ceilings();
        Ok(merged)
    }
}

/// Where the rows of a cell go: by repeat, then by the arm's place in the plan. (An arm that a plan lost follows.)
type Place = (usize, usize, String);

fn place(merged: &RunRecord, cell: &FinishedCell) -> Place {
    let arm = merged.plan.arms.iter().position(|arm| arm.name == cell.arm);
    (cell.repeat, arm.unwrap_or(usize::MAX), cell.arm.clone())
}

/// Rows of one cell, by file.
type CellRows = Vec<(&'static str, Rows)>;

/// Rows of a folder, by the cell they belong to.
fn cells_of(folder: &Path) -> Result<Vec<(FinishedCell, CellRows)>> {
    let journal = Journal::read(folder)?;
    let mut cells: Vec<(FinishedCell, CellRows)> =
        journal.cells.iter().map(|cell| (cell.clone(), Vec::new())).collect();
    for name in [KERNELS_FILE].into_iter().chain(ROW_FILES) {
        let path = folder.join(name);
        let damaged = |what: String| {
            Error::invalid(format!("{}: {what}", path.display()), "the file is damaged: run that shard again")
        };
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound && !journal.lengths.contains_key(name) => {
                continue;
            }
            Err(error) => return Err(Error::read(&path, &error)),
        };
        // What follows the finished rows is of a cell that was never finished.
        let text = match name {
            KERNELS_FILE => bytes.as_slice(),
            _ => journal.finished(&path, name, &bytes)?.0,
        };
        if text.is_empty() {
            continue;
        }
        let mut reader = csv::Reader::from_reader(text);
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
            if let Some(text) = grouped.remove(&(cell.arm.clone(), cell.repeat.to_string())) {
                rows.push((name, Rows { header: header.clone(), rows: text }));
            }
        }
        if let Some(((arm, repeat), _)) = grouped.first_key_value() {
            return Err(damaged(format!(
                "rows of arm {arm}, repeat {repeat}, which {JOURNAL} does not name"
            )));
        }
    }
    Ok(cells)
}

fn line(record: &csv::StringRecord) -> Result<String> {
    let failed = |error: String| Error::bug(format!("cannot write CSV: {error}"));
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(record).map_err(|error| failed(error.to_string()))?;
    let bytes = writer.into_inner().map_err(|error| failed(error.to_string()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
