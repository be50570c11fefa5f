//! From a results folder to what an explanation needs: each arm as it ran, on a simulated device that stands for its own.

use crate::engine::config::CacheDtype;
use crate::engine::device::DeviceKind;
use crate::engine::device::sim::SimDevice;
use crate::engine::model::layout::ModelLayout;
use crate::engine::model::{ModelRef, OpenOptions, open};
use crate::hardware;
use crate::measure::rows::StepRow;
use crate::results::RunResults;
use crate::results::record::{ResolvedArm, RunRecord};
use crate::simulation::SimulatedArm;
use crate::{Error, Result};

use super::{Evidence, Explanation, explain};

/// The simulated device that stands for the run's under an arm: the same one for a simulated run, the GPU's profile where
/// the table has it and `profile` is wanted, else one of the ceilings measured of arms like this one.
///
/// # Errors
/// [`Error::Invalid`] for a device without roofs (`sim:fixed`).
pub fn stand_in(results: &RunResults, arm: &str, profile: bool) -> Result<SimDevice> {
    let record = &results.record;
    let Some(ceilings) = record.ceilings_like(arm) else {
        return Err(Error::invalid(
            format!("{} has no bandwidth and no rate to simulate with", record.device.id),
            "explain a run on a CPU, a GPU or sim:<gpu>, or name a device with --sim",
        ));
    };
    if record.device.kind == DeviceKind::Sim {
        return SimDevice::parse(&record.device.id);
    }
    if let Some(gpu) = hardware::by_product_name(&record.device.name).filter(|_| profile) {
        return SimDevice::parse(&format!("sim:{}", gpu.id));
    }
    SimDevice::parse(&format!(
        "sim:custom:gb_per_s={},tflops={},gb={},launch_us={}",
        ceilings.read_bytes_per_s / 1e9,
        ceilings.flops_per_s / 1e12,
        // Room for any pool: its size is pinned to what the run had.
        4.0 * record.device.memory_bytes as f64 / 1e9,
        ceilings.launch_s * 1e6,
    ))
}

fn dtype(name: &str) -> CacheDtype {
    serde_json::from_value(serde_json::Value::String(name.to_lowercase())).unwrap_or(CacheDtype::Auto)
}

/// An arm of the run with the pools it got.
///
/// # Errors
/// A model that can no longer be opened; an arm that is not in the plan.
pub fn simulated_arm(results: &RunResults, resolved: &ResolvedArm) -> Result<SimulatedArm> {
    let record = &results.record;
    let planned = record.plan.arms.iter().find(|arm| arm.name == resolved.name).ok_or_else(|| {
        Error::invalid(
            format!("{}: arm `{}` is not in the plan", results.folder.display(), resolved.name),
            "run.json is damaged",
        )
    })?;
    let reference = ModelRef::find(&resolved.model, &record.plan.folder)?;
    let layout = open(&reference, &OpenOptions { seed: record.plan.seed, ..OpenOptions::default() })?.layout;
    require_same(record, &resolved.model, &layout)?;
    let mut engine = resolved.engine.clone();
    engine.kv_blocks = Some(resolved.kv_blocks);
    engine.state_slots = (resolved.state_slots > 0).then_some(resolved.state_slots);
    engine.gpu_memory = None;
    // As asked for: what auto means is the simulated rig's own.
    engine.last_layer = planned.engine.last_layer;
    engine.kv_dtype = dtype(&resolved.kv_dtype);
    engine.state_dtype = dtype(&resolved.state_dtype);
    Ok(SimulatedArm {
        layout,
        engine,
        load: planned.load.with_files_in(&record.plan.folder),
        seed: record.seeds.first().copied().unwrap_or(record.plan.seed),
        stop_s: None,
        stall_s: 0.0,
    })
}

/// # Errors
/// [`Error::Invalid`] for a checkpoint of another size than the run's: another model has come to be where that was.
fn require_same(record: &RunRecord, reference: &str, layout: &ModelLayout) -> Result<()> {
    let recorded = record.models.iter().find(|model| model.reference == reference);
    let bytes = layout.weight_bytes();
    match recorded {
        Some(recorded) if recorded.weight_bytes != bytes && !layout.synthetic => Err(Error::invalid(
            format!(
                "{reference} has {bytes} bytes of weights, the model of the run had {}",
                recorded.weight_bytes
            ),
            "another model is there now: put the run's own back, or run again",
        )),
        _ => Ok(()),
    }
}

/// # Errors
/// [`Error::Invalid`] where no step of the arm was kept: there is nothing to explain it by.
pub fn require_steps(results: &RunResults, arm: &str) -> Result<()> {
    if results.steps_of(arm).next().is_some() {
        return Ok(());
    }
    Err(Error::invalid(
        format!("{} has no steps of arm `{arm}`", results.folder.join("steps.csv").display()),
        "an explanation is made from the steps: keep steps.csv as the run wrote it",
    ))
}

/// Explains every finished arm of a run, or the one named; on `device`, else on what stands for the run's own.
///
/// # Errors
/// A run without roofs, an arm that is not there, a model that cannot be opened.
pub fn explain_run(
    results: &RunResults,
    device: Option<&SimDevice>,
    only: Option<&str>,
    with_counterfactuals: bool,
) -> Result<Vec<Explanation>> {
    let mut all = Vec::new();
    for arm in results.arms_named(only)? {
        crate::interrupt::check()?;
        let Some(resolved) = results.record.resolved(arm) else {
            continue;
        };
        let simulated = simulated_arm(results, resolved)?;
        let device = device.map_or_else(|| stand_in(results, arm, false), |device| Ok(device.clone()))?;
        require_steps(results, arm)?;
        let steps: Vec<StepRow> = results.steps_of(arm).cloned().collect();
        let evidence = Evidence {
            arm,
            steps: &steps,
            was_simulated: results.record.device.simulated,
            duration_s: results.of_arm(arm).map(|summary| summary.duration_s).sum(),
            bound_by: results.mostly_bound_by(arm),
            largest_kernels: results.largest_kernels(arm).into_iter().cloned().collect(),
            ceilings: results.record.typical_ceilings(|name| name == arm),
            simulated: &simulated,
            device: &device,
        };
        all.push(explain(&evidence, with_counterfactuals)?);
    }
    Ok(all)
}
