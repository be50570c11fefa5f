//! One model on one device with one engine: what `generate` and `logits` work on.

use std::path::Path;
use std::time::Instant;

use clap::Args;
use toml::{Table, Value};

use super::output;
use super::progress::Bar;
use crate::engine::Engine;
use crate::engine::cache::plan::{plan_cache, plan_simulated_cache};
use crate::engine::config::{CpuMath, EngineConfig};
use crate::engine::device::{Device, DeviceKind, LoadOptions, Model};
use crate::engine::model::{ModelRef, OpenOptions, OpenedModel, open};
use crate::engine::tokenizer::Tokenizer;
use crate::experiment::knobs;
use crate::numbers::{bytes, duration};
use crate::run::device;
use crate::run::progress::Progress;
use crate::{Error, Result};

/// Flags that choose model, device and engine.
#[derive(Debug, Args)]
pub struct ModelFlags {
    /// A folder, a hub id, or synthetic:PRESET; left out, synthetic:demo, and synthetic:qwen3.5-4b on a GPU
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,

    /// auto, cpu, cuda, cuda:N or sim:fixed
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: String,

    /// Set a knob of the engine
    #[arg(long, value_name = "KNOB=VALUE")]
    pub set: Vec<String>,

    /// Seed of synthetic weights and of sampling
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

/// Keeps the device alive as long as what is on it. Fields are dropped in this order.
pub struct OpenModel {
    pub engine: Engine,
    _model: Box<dyn Model>,
    device: Box<dyn Device>,
    pub opened: OpenedModel,
}

impl OpenModel {
    /// The device that was opened, whatever it was asked for by.
    pub fn device_id(&self) -> &str {
        &self.device.info().id
    }
}

/// A model that is opened and checked, but not loaded.
pub struct Checked {
    device: Box<dyn Device>,
    pub opened: OpenedModel,
    config: EngineConfig,
    /// `max_model_len`, where it was set.
    longest_tokens: Option<usize>,
}

impl ModelFlags {
    /// Opens device and model. `defaults` are the command's own settings, which `--set` overrides.
    ///
    /// # Errors
    /// A setting that is wrong, a device that is not there, a model that cannot be opened.
    pub fn check(&self, defaults: EngineConfig) -> Result<Checked> {
        let mut config = Table::try_from(&defaults).map_err(|error| Error::bug(error.to_string()))?;
        for text in &self.set {
            let (knob, setting) = knobs::parse_assignment(text)?;
            if knob.section != knobs::Section::Engine {
                return Err(Error::invalid(
                    format!("--set {text}: `{}` is no knob of the engine", knob.name),
                    "--set takes knobs of the engine here; sampling has flags of its own, such as --top-k",
                ));
            }
            knob.set(&mut config, &mut Table::new(), &setting);
        }
        let config: EngineConfig = Value::Table(config).try_into().map_err(|error: toml::de::Error| {
            Error::invalid(
                format!("--set: {}", error.message()),
                "see README.md for the knobs and their values",
            )
        })?;
        config.validate()?;
        let set = |text: &&String| text.split('=').next().is_some_and(|name| name.trim() == "max_model_len");
        let longest_tokens = self.set.iter().find(set).map(|_| config.max_model_len);
        let chosen = device::open(&self.device, config.threads)?;
        if !chosen.reason.is_empty() {
            output::note(&format!("device: {} ({})", chosen.device.info().id, chosen.reason));
        }
        if let Some(warning) = device::memory_warning(chosen.device.as_ref()) {
            output::warning(&warning);
        }
        let model = self.model.clone().unwrap_or_else(|| {
            let model = device::default_model(chosen.device.info().kind);
            output::note(&format!("model: {model} (random weights; --model takes a folder or a hub id)"));
            model.to_string()
        });
        let reference: ModelRef = model.parse()?;
        let opened = open(&reference, &OpenOptions { seed: self.seed, download: true, show_progress: true })?;
        if self.model.is_some() && opened.layout.synthetic {
            output::note(&format!("model: {model} (weights: synthetic)"));
        }
        Ok(Checked { device: chosen.device, opened, config, longest_tokens })
    }
}

impl Checked {
    pub fn simulated(&self) -> bool {
        self.device.info().simulated()
    }

    /// The model's tokenizer; bytes for synthetic weights.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a checkpoint has none.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        match &self.opened.tokenizer {
            Some(path) => Tokenizer::from_file(path),
            None if self.opened.layout.synthetic => Ok(Tokenizer::Bytes),
            None => Err(Error::invalid(
                format!("{} has no tokenizer.json", self.opened.layout.spec.name),
                "put the model's tokenizer.json beside its weights, or give token ids with --tokens",
            )),
        }
    }

    pub fn with_cpu_math(mut self, math: CpuMath) -> Self {
        self.config.cpu_math = math;
        self
    }

    /// # Errors
    /// [`Error::Invalid`] naming the first token outside the vocabulary, before anything is loaded.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let vocab_size = self.opened.layout.spec.vocab_size;
        match tokens.iter().position(|&token| token as usize >= vocab_size) {
            None => Ok(()),
            Some(index) => Err(Error::invalid(
                format!(
                    "token {} at position {index} is outside the vocabulary of {vocab_size}",
                    tokens[index]
                ),
                format!("give ids from 0 to {}", vocab_size - 1),
            )),
        }
    }

    /// Loads the weights and opens an engine for requests of up to `longest_tokens`.
    ///
    /// # Errors
    /// More tokens than max_model_len or the model take, memory that cannot hold it, weights that are damaged.
    pub fn load(mut self, longest_tokens: usize) -> Result<OpenModel> {
        let layout = &self.opened.layout;
        if let Some(most) = self.longest_tokens.filter(|most| longest_tokens > *most) {
            return Err(Error::invalid(
                format!("{longest_tokens} tokens, prompt and answer together, but max_model_len = {most}"),
                format!("give fewer tokens, or set max_model_len={longest_tokens} or more"),
            ));
        }
        self.config.max_model_len = longest_tokens.max(1);
        if longest_tokens > layout.spec.max_position {
            return Err(Error::invalid(
                format!("{longest_tokens} tokens, but the model was made for {}", layout.spec.max_position),
                "give fewer tokens",
            ));
        }
        self.device.configure(layout, &mut self.config)?;
        let plan = if self.device.info().kind == DeviceKind::Sim { plan_simulated_cache } else { plan_cache };
        let pools = plan(
            layout,
            &self.config,
            self.device.free_bytes(),
            self.device.info().memory_bytes,
            self.device.default_dtypes(),
            Some(longest_tokens),
        )?;
        let began = Instant::now();
        self.device.prepare()?;
        if let Some(compiled) = self.device.compiled().filter(|compiled| compiled.compiled > 0) {
            let took = duration(began.elapsed().as_secs_f64());
            output::note(&format!(
                "compiled {} kernel files in {took}, for this and later runs",
                compiled.compiled
            ));
        }
        let mut bar = Bar::new();
        bar.begin(1, 1, "loading", layout.weight_bytes());
        let began = Instant::now();
        let options = LoadOptions { cpu_math: self.config.cpu_math, threads: self.config.threads };
        let model = self
            .device
            .load(layout, &self.opened.weights, &options, &mut |progress| bar.advance(progress.done_bytes));
        bar.end();
        let model = model?;
        if !self.device.info().simulated() {
            let (loaded, load_s) = (layout.weight_bytes() as f64, began.elapsed().as_secs_f64());
            output::note(&format!(
                "loaded {} in {}: {}/s",
                bytes(loaded),
                duration(load_s),
                bytes(loaded / load_s)
            ));
        }
        let clock = self.device.clock();
        // Nothing is judged here, so no ceilings are measured.
        let engine = Engine::new(model.as_ref(), pools, self.config, None, clock)?;
        Ok(OpenModel { engine, _model: model, device: self.device, opened: self.opened })
    }
}

/// `1,2,3` or `@FILE` with ids separated by commas, white space or both; a JSON array is read too.
///
/// # Errors
/// A file that cannot be read, a word that is no id, no ids.
pub fn parse_tokens(text: &str) -> Result<Vec<u32>> {
    let (text, place) = match text.strip_prefix('@') {
        Some("") => {
            return Err(Error::invalid("--tokens @ names no file", "for example --tokens @ids.txt"));
        }
        Some(file) => {
            let path = Path::new(file);
            (std::fs::read_to_string(path).map_err(|error| Error::read(path, &error))?, file.to_string())
        }
        None => (text.to_string(), "--tokens".to_string()),
    };
    let ids = text.trim().trim_start_matches('[').trim_end_matches(']');
    let parts = ids.split(|c: char| c == ',' || c.is_whitespace()).filter(|part| !part.is_empty());
    let tokens: Result<Vec<u32>> = parts
        .map(|part| {
            part.parse().map_err(|_| {
                Error::invalid(
                    format!("{place}: `{part}` is not a token id"),
                    "give whole numbers of 0 or more, below the vocabulary's size, for example 1,2,3",
                )
            })
        })
        .collect();
    match tokens {
        Ok(tokens) if tokens.is_empty() => {
            Err(Error::invalid(format!("{place}: no token ids"), "give at least one"))
        }
        tokens => tokens,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_lists() {
        assert_eq!(parse_tokens("1,2, 3").unwrap(), [1, 2, 3]);
        assert_eq!(parse_tokens("[1, 2]\n").unwrap(), [1, 2]);
        for wrong in ["", "1,x", "-1", "4294967296", "@", "@/no/such/file"] {
            assert_eq!(parse_tokens(wrong).unwrap_err().exit_code(), 2, "{wrong}");
        }
    }
}
