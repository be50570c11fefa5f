//! The price of quantisation in a run that compares models: perplexity of the built-in passage, once a model with real
//! weights is on the device.

use super::device::NO_CEILINGS;
use crate::engine::Engine;
use crate::engine::cache::plan::plan_cache;
use crate::engine::config::EngineConfig;
use crate::engine::device::{Device, LoadOptions, Model};
use crate::engine::model::OpenedModel;
use crate::engine::tokenizer::Tokenizer;
use crate::workload::prompts::PASSAGE;
use crate::{Error, Result};

/// exp of the mean of -ln p over the passage's tokens but the first; `None` without a tokenizer.
///
/// # Errors
/// What the device says; memory that does not hold one sequence of the passage's length beside the weights.
pub fn perplexity(
    device: &dyn Device,
    opened: &OpenedModel,
    model: &dyn Model,
    options: &LoadOptions,
) -> Result<Option<f64>> {
    let Some(tokenizer) = &opened.tokenizer else { return Ok(None) };
    let tokens = Tokenizer::from_file(tokenizer)?.encode(PASSAGE, true)?;
    let layout = &opened.layout;
    let mut config = EngineConfig {
        max_num_seqs: 1,
        max_model_len: tokens.len(),
        cpu_math: options.cpu_math,
        threads: options.threads,
        ..EngineConfig::default()
    };
    device.configure(layout, &mut config)?;
    // The plan takes the weights off again.
    let free = device.free_bytes() + layout.weight_bytes();
    let total = device.info().memory_bytes;
    let pools = plan_cache(layout, &config, free, total, device.default_dtypes(), Some(tokens.len()))?;
    let mut engine = Engine::new(model, pools, config, NO_CEILINGS, device.clock())?;
    let logprobs = engine.logprobs(&tokens)?;
    let mean = logprobs.iter().map(|&p| f64::from(p)).sum::<f64>() / logprobs.len().max(1) as f64;
    let perplexity = (-mean).exp();
    if perplexity.is_finite() {
        return Ok(Some(perplexity));
    }
    Err(Error::invalid(
        format!("{}: the perplexity of the built-in passage is {perplexity}", layout.spec.name),
        "the weights hold NaN or infinity, or overflow: check the checkpoint",
    ))
}
