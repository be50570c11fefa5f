//! The warm-up of a cell: rounds of the arm's own load until step times are stationary. Its rows go nowhere but to
//! cold.csv, and there only those of the first round.

use super::prepare;
use super::progress::Progress;
use crate::Result;
use crate::engine::Engine;
use crate::engine::model::OpenedModel;
use crate::experiment::plan::{Arm, Cell, Plan};
use crate::measure::cold::ColdRow;
use crate::measure::drive::{Submission, drive};
use crate::measure::rows::CheckRow;
use crate::measure::target::Embedded;
use crate::measure::warmup::Stationarity;

/// What a warm-up leaves behind.
#[derive(Default)]
pub struct WarmUp {
    /// Its first round; `None` without one.
    pub cold: Option<ColdRow>,
    /// When its first step ended, on the session's clock.
    pub first_step_end_s: Option<f64>,
    /// How many rounds it took, for checks.csv.
    pub check: Option<CheckRow>,
}

/// Warms `engine` for a cell; `label` and `position` are for the progress bar.
///
/// # Errors
/// As [`drive`].
pub fn warm_up(
    engine: &mut Engine,
    plan: &Plan,
    arm: &Arm,
    model: &OpenedModel,
    cell: Cell,
    progress: &mut dyn Progress,
    (label, position): (&str, (usize, usize)),
) -> Result<WarmUp> {
    let mut stationarity = Stationarity::default();
    let (mut cold, mut first_step_end_s) = (None, None);
    for round in 0..arm.load.warmup.max_rounds {
        let Some(schedule) = prepare::warmup(plan, arm, model, cell.repeat, round)? else { break };
        progress.begin(position.0, position.1, label, schedule.requests.len() as u64);
        let mut advance = |done| progress.advance(done as u64);
        let record = drive(&mut Embedded { engine }, schedule, Submission::default(), None, &mut advance)?;
        cold.get_or_insert_with(|| ColdRow {
            model: arm.model.clone(),
            ..ColdRow::of(&record, &arm.name, cell.repeat as u32)
        });
        first_step_end_s =
            first_step_end_s.or(record.steps.first().map(|step| record.origin_s + step.report.end_s));
        stationarity.begin_round();
        record.steps.iter().for_each(|step| stationarity.observe(&step.report));
        if stationarity.is_stationary() {
            break;
        }
    }
    let check = stationarity.check_row(&arm.name, cell.repeat as u32, arm.load.warmup.max_rounds);
    Ok(WarmUp { cold, first_step_end_s, check })
}
