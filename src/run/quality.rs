//! The price of quantisation in a run that compares models: perplexity of the built-in passage, once a model with real
//! weights is on the device.

use crate::engine::Engine;
use crate::engine::cache::plan::plan_cache;
use crate::engine::config::EngineConfig;
use crate::engine::device::{Device, LoadOptions, Model};
use crate::engine::model::OpenedModel;
use crate::engine::tokenizer::Tokenizer;
use crate::workload::prompts::PASSAGE;
use crate::{Error, Result};

/// exp of the mean of -ln p over the passage's tokens but the first; `None` without a tokenizer. `max_batched_tokens` is
/// what an arm of the model takes in a step: memory holds that beside the weights, but maybe no more.
///
/// # Errors
/// What the device says; memory that does not hold one sequence of the passage's length beside the weights.
pub fn perplexity(
    device: &dyn Device,
    opened: &OpenedModel,
    model: &dyn Model,
    options: &LoadOptions,
    max_batched_tokens: usize,
) -> Result<Option<f64>> {
    let Some(tokenizer) = &opened.tokenizer else { return Ok(None) };
    let tokens = Tokenizer::from_file(tokenizer)?.encode(PASSAGE, true)?;
    let layout = &opened.layout;
    let mut config = EngineConfig {
        max_num_seqs: 1,
        max_model_len: tokens.len(),
        max_num_batched_tokens: max_batched_tokens.min(tokens.len()),
        cpu_math: options.cpu_math,
        threads: options.threads,
        ..EngineConfig::default()
    };
    device.configure(layout, &mut config)?;
    // The plan takes the weights off again.
    let free = device.free_bytes() + layout.weight_bytes();
    let total = device.info().memory_bytes;
    let pools = plan_cache(layout, &config, free, total, device.default_dtypes(), Some(tokens.len()))?;
    let mut engine = Engine::new(model, pools, config, None, device.clock())?;
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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::engine::account::Ceilings;
    use crate::engine::config::{CacheDtype, CpuMath};
    use crate::engine::device::cpu::CpuDevice;
    use crate::engine::device::{DeviceInfo, LoadProgress};
    use crate::engine::model::layout::ModelLayout;
    use crate::engine::model::weights::WeightSource;
    use crate::engine::model::{ModelRef, OpenOptions, open};

    /// A CPU with little memory left.
    struct Tight(CpuDevice, u64);

    impl Device for Tight {
        fn info(&self) -> &DeviceInfo {
            self.0.info()
        }

        fn free_bytes(&self) -> u64 {
            self.1
        }

        fn ceilings(&mut self) -> Result<Option<Ceilings>> {
            Ok(None)
        }

        fn default_dtypes(&self) -> (CacheDtype, CacheDtype) {
            self.0.default_dtypes()
        }

        fn configure(&self, layout: &ModelLayout, config: &mut EngineConfig) -> Result<()> {
            self.0.configure(layout, config)
        }

        fn load(
            &mut self,
            layout: &ModelLayout,
            source: &WeightSource,
            options: &LoadOptions,
            progress: &mut dyn FnMut(LoadProgress),
        ) -> Result<Box<dyn Model>> {
            self.0.load(layout, source, options, progress)
        }
    }

    #[test]
    fn the_passage_takes_no_more_memory_than_the_arm() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/dense-llama-tiny");
        let reference = ModelRef::Folder(PathBuf::from(folder));
        let opened = open(&reference, &OpenOptions::default()).unwrap();
        let options = LoadOptions { cpu_math: CpuMath::F32, threads: Some(1) };
        let mut device = Tight(CpuDevice::new(Some(1)).unwrap(), 0);
        let model = device.load(&opened.layout, &opened.weights, &options, &mut |_| {}).unwrap();
        let mut measure = |free_bytes, max_batched_tokens| {
            device.1 = free_bytes;
            perplexity(&device, &opened, model.as_ref(), &options, max_batched_tokens)
        };
        let ample = measure(1 << 30, 2048).unwrap().unwrap();
        // The least that a small budget gets by with.
        let least = (1u64..1 << 14).map(|pages| pages << 16).find(|&free| measure(free, 16).is_ok()).unwrap();
        let tight = measure(least, 16).unwrap().unwrap();
        assert!((tight / ample - 1.0).abs() < 1e-3, "{tight} {ample}");
        assert!(measure(least, 2048).is_err(), "{least} bytes are enough for any budget");
    }
}
