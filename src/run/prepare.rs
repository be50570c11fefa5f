//! Before anything is loaded: every model of a plan is opened and checked, and every arm gets its engine settings and
//! the memory it will need. An arm that cannot run is an error here, not half an hour later.

use std::collections::BTreeMap;

use crate::engine::cache::plan::{plan_cache, plan_simulated_cache};
use crate::engine::cache::shape::{CacheShape, UnifiedFigures};
use crate::engine::config::{EngineConfig, KvLayout};
use crate::engine::device::{CachePlan, Device, DeviceKind};
use crate::engine::model::spec::ModelSpec;
use crate::engine::model::{ModelRef, OpenOptions, OpenedModel, open};
use crate::engine::tokenizer::Tokenizer;
use crate::experiment::plan::{Arm, Plan};
use crate::results::record::{ModelRecord, ResolvedArm, Seats, SkippedArm};
use crate::workload::schedule::{Schedule, ScheduleContext};
use crate::workload::seeds::repeat_seed;
use crate::{Error, Result};

/// An arm ready to run.
pub struct PreparedArm {
    pub config: EngineConfig,
    pub pools: CachePlan,
    pub seats: Seats,
}

pub struct Prepared {
    /// By the name the plan has for them.
    pub models: BTreeMap<String, OpenedModel>,
    /// One an arm of the plan; `None` for an optional arm that cannot run here.
    pub arms: Vec<Option<PreparedArm>>,
    pub skipped: Vec<SkippedArm>,
}

/// Opens and checks everything the plan needs.
///
/// # Errors
/// [`Error::Invalid`] naming the arm: a model that cannot be opened, a request too long, memory that cannot hold it.
pub fn prepare(plan: &Plan, device: &dyn Device) -> Result<Prepared> {
    let mut prepared = Prepared { models: BTreeMap::new(), arms: Vec::new(), skipped: Vec::new() };
    prepare_more(plan, &mut prepared, device)?;
    if prepared.arms.iter().all(Option::is_none) {
        let reasons: Vec<String> = prepared.skipped.iter().map(|skipped| skipped.reason.clone()).collect();
        return Err(Error::invalid(
            format!("no arm of the plan can run here: {}", reasons.join("; ")),
            "choose another device, or a smaller --model",
        ));
    }
    Ok(prepared)
}

/// The same for the arms that the plan has gained since.
///
/// # Errors
/// As [`prepare`].
pub fn prepare_more(plan: &Plan, prepared: &mut Prepared, device: &dyn Device) -> Result<()> {
    for arm in &plan.arms[prepared.arms.len()..] {
        let result = prepare_arm(plan, arm, device, &mut prepared.models)
            .map_err(|error| error.context(format!("arm `{}`", arm.name)));
        match result {
            Ok(ready) => prepared.arms.push(Some(ready)),
            Err(error @ Error::Invalid { .. }) if arm.optional => {
                prepared.skipped.push(SkippedArm { arm: arm.name.clone(), reason: error.to_string() });
                prepared.arms.push(None);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn prepare_arm(
    plan: &Plan,
    arm: &Arm,
    device: &dyn Device,
    models: &mut BTreeMap<String, OpenedModel>,
) -> Result<PreparedArm> {
    if !models.contains_key(&arm.model) {
        let reference = ModelRef::find(&arm.model, &plan.folder)?;
        let options = OpenOptions { seed: plan.seed, download: true, show_progress: true };
        models.insert(arm.model.clone(), open(&reference, &options)?);
    }
    let model = &models[&arm.model];
    let mut config = arm.engine.clone();
    device.configure(&model.layout, &mut config)?;
    config.async_scheduling.get_or_insert(device.default_async_scheduling());
    config.validate()?;
    let longest_tokens = schedule(plan, arm, model, 0)?.longest_request_tokens();
    if longest_tokens > config.max_model_len {
        return Err(Error::invalid(
            format!(
                "its longest request has {longest_tokens} tokens, but max_model_len = {}",
                config.max_model_len
            ),
            format!("set max_model_len={longest_tokens} or more, or shorten input_len and output_len"),
        ));
    }
    let plan_pools = if device.info().kind == DeviceKind::Sim { plan_simulated_cache } else { plan_cache };
    let pools = |config: &EngineConfig| {
        plan_pools(
            &model.layout,
            config,
            device.free_bytes(),
            device.info().memory_bytes,
            device.default_dtypes(),
            Some(longest_tokens),
        )
    };
    let own = pools(&config)?;
    // (Pools given by number are of the arm's own layout; the other one gets what memory holds.)
    let other = |kv_layout| EngineConfig { kv_layout, kv_blocks: None, state_slots: None, ..config.clone() };
    let seats = |kv_layout| {
        let plan =
            if kv_layout == config.kv_layout { Some(own.clone()) } else { pools(&other(kv_layout)).ok() };
        plan.map(|plan| seats(&model.layout.spec, &plan, longest_tokens))
    };
    let seats = Seats { split: seats(KvLayout::Split), unified: seats(KvLayout::Unified) };
    Ok(PreparedArm { config, pools: own, seats })
}

/// Requests of `tokens` tokens that these pools hold at once.
fn seats(spec: &ModelSpec, plan: &CachePlan, tokens: usize) -> usize {
    let shape = CacheShape::new(spec, plan.kv_dtype, plan.state_dtype, plan.max_drafts);
    let seats = match plan.layout {
        KvLayout::Unified => UnifiedFigures::new(&shape, plan, tokens).seats,
        KvLayout::Split => {
            let by_blocks = plan.kv_blocks / tokens.div_ceil(plan.block_tokens).max(1);
            if shape.is_hybrid() { by_blocks.min(plan.state_slots) } else { by_blocks }
        }
    };
    seats.min(plan.max_num_seqs)
}

/// The requests of one repeat of an arm.
///
/// # Errors
/// A file of the load or a tokenizer that cannot be read; a load out of bounds.
pub fn schedule(plan: &Plan, arm: &Arm, model: &OpenedModel, repeat: usize) -> Result<Schedule> {
    with_context(plan, arm, model, repeat, |context| arm.load.with_files_in(&plan.folder).schedule(context))
}

/// One round of an arm's warm-up; `None` when it has none.
///
/// # Errors
/// As [`schedule`].
pub fn warmup(
    plan: &Plan,
    arm: &Arm,
    model: &OpenedModel,
    repeat: usize,
    round: usize,
) -> Result<Option<Schedule>> {
    with_context(plan, arm, model, repeat, |context| {
        arm.load.with_files_in(&plan.folder).warmup_schedule(context, round)
    })
}

fn with_context<T>(
    plan: &Plan,
    arm: &Arm,
    model: &OpenedModel,
    repeat: usize,
    make: impl Fn(&ScheduleContext) -> Result<T>,
) -> Result<T> {
    let encode = |text: &str| {
        let tokenizer = match &model.tokenizer {
            Some(path) => Tokenizer::from_file(path)?,
            None => Tokenizer::Bytes,
        };
        tokenizer.encode(text, false)
    };
    make(&ScheduleContext {
        vocab_size: model.layout.spec.real_vocab_size,
        special_tokens: &model.layout.spec.eos_tokens,
        stop_tokens: &model.generation.eos_tokens,
        seats: arm.engine.max_num_seqs,
        seed: repeat_seed(plan.seed, repeat as u32),
        encode: Some(&encode),
    })
}

impl Prepared {
    /// For run.json.
    pub fn model_records(&self) -> Vec<ModelRecord> {
        let record = |(reference, model): (&String, &OpenedModel)| ModelRecord {
            reference: reference.clone(),
            name: model.layout.spec.name.clone(),
            hash: model.layout.hash.clone(),
            weights: weights_word(model.layout.synthetic).to_string(),
            weight_bytes: model.layout.weight_bytes(),
            streamed_bytes: model.layout.streamed_bytes(),
            load_s: None,
            cold_step_ms: None,
            perplexity: None,
        };
        self.models.iter().map(record).collect()
    }

    /// For run.json.
    pub fn arm_records(&self, plan: &Plan) -> Vec<ResolvedArm> {
        let word = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
        let both = plan.arms.iter().zip(&self.arms).filter_map(|(arm, ready)| Some((arm, ready.as_ref()?)));
        both.map(|(arm, ready)| ResolvedArm {
            name: arm.name.clone(),
            model: arm.model.clone(),
            config_hash: arm.config_hash(),
            engine: ready.config.clone(),
            kv_blocks: ready.pools.kv_blocks,
            kv_block_tokens: ready.pools.block_tokens,
            state_slots: ready.pools.state_slots,
            kv_dtype: word(&ready.pools.kv_dtype),
            state_dtype: word(&ready.pools.state_dtype),
            seats: ready.seats,
        })
        .collect()
    }
}

pub fn weights_word(synthetic: bool) -> &'static str {
    if synthetic { "synthetic" } else { "real" }
}
