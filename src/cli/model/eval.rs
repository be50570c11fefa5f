//! `model eval`: how well a model predicts a text, over windows of fixed length that do not overlap.
//!
//! Perplexity is exp of the mean of -ln p over all predicted tokens: every token of a window but its first. Bits per
//! byte divides the same sum by the bytes of those tokens' text, so that models with other tokenizers compare.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::super::flags::Format;
use super::super::output;
use crate::engine::Engine;
use crate::engine::account::Ceilings;
use crate::engine::cache::plan::plan_for;
use crate::engine::config::EngineConfig;
use crate::engine::device::LoadOptions;
use crate::engine::tokenizer::Tokenizer;
use crate::experiment::{device, knobs};
use crate::{Error, Result};

#[derive(Debug, Args)]
pub struct EvalFlags {
    /// A folder, a hub id, or synthetic:PRESET
    #[arg(long, value_name = "MODEL")]
    model: String,

    /// The text to predict
    #[arg(long, value_name = "FILE")]
    text: PathBuf,

    /// Tokens of a window
    #[arg(long, value_name = "N", default_value_t = 2048)]
    window: usize,

    /// Most windows, from the start of the text; all if not given
    #[arg(long, value_name = "N")]
    windows: Option<usize>,

    /// auto, cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: String,

    /// Set a knob of the engine
    #[arg(long, value_name = "KNOB=VALUE")]
    set: Vec<String>,

    /// What goes to stdout: table or json
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// The result, as `--format json` prints it.
#[derive(Debug, Serialize)]
struct Evaluation {
    model: String,
    hash: String,
    device: String,
    text: String,
    window: usize,
    windows: usize,
    /// Predicted tokens.
    tokens: usize,
    /// Sum of -ln p.
    nats: f64,
    perplexity: f64,
    bits_per_byte: f64,
}

pub fn run(flags: &EvalFlags) -> Result<()> {
    let json = super::json_wanted(flags.format)?;
    let evaluation = evaluate(flags)?;
    if json {
        let text = serde_json::to_string_pretty(&evaluation)
            .map_err(|error| Error::failed(format!("cannot write the result as JSON: {error}"), ""))?;
        return output::data(&format!("{text}\n"));
    }
    output::data(&format!(
        "perplexity {:.4}\n{} tokens in {} windows of {}, {:.2} nats, {:.4} bits per byte\n",
        evaluation.perplexity,
        evaluation.tokens,
        evaluation.windows,
        evaluation.window,
        evaluation.nats,
        evaluation.bits_per_byte
    ))
}

fn evaluate(flags: &EvalFlags) -> Result<Evaluation> {
    if flags.window < 2 {
        return Err(Error::invalid(
            format!("--window {} predicts nothing", flags.window),
            "a window needs 2 tokens or more",
        ));
    }
    let model = super::open(&flags.model, true)?;
    let text = std::fs::read_to_string(&flags.text).map_err(|error| Error::read(&flags.text, &error))?;
    let tokenizer = match &model.tokenizer {
        Some(path) => Tokenizer::from_file(path)?,
        None => Tokenizer::Bytes,
    };
    let tokens = tokenizer.encode(&text, true)?;
    let windows: Vec<&[u32]> = windows(&tokens, flags.window, flags.windows.unwrap_or(usize::MAX));
    if windows.is_empty() {
        return Err(Error::invalid(
            format!("{} has {} tokens, expected 2 or more", flags.text.display(), tokens.len()),
            "give a longer text",
        ));
    }

    let config = config(flags, &tokens)?;
    let mut device = device::open(&flags.device, config.threads)?.device;
    if device.info().simulated() {
        return Err(Error::invalid(
            format!("{} computes no probabilities", device.info().id),
            "use --device cpu or cuda",
        ));
    }
    let plan = plan_for(device.as_ref(), &model.layout, &config, Some(flags.window.min(tokens.len()) + 1))?;
    let options = LoadOptions { cpu_math: config.cpu_math, threads: config.threads };
    let loaded = device.load(&model.layout, &model.weights, &options, &mut |_| ())?;
    let mut engine = Engine::new(loaded.as_ref(), plan, config, UNUSED, device.clock())?;

    let (mut nats, mut predicted, mut bytes) = (0.0, 0, 0);
    for window in &windows {
        let logprobs = engine.logprobs(window)?;
        nats -= logprobs.iter().map(|&logprob| f64::from(logprob)).sum::<f64>();
        predicted += logprobs.len();
        bytes += tokenizer.decode(&window[1..])?.len();
    }
    Ok(Evaluation {
        model: model.layout.spec.name.clone(),
        hash: model.layout.hash.clone(),
        device: device.info().id.clone(),
        text: flags.text.display().to_string(),
        window: flags.window,
        windows: windows.len(),
        tokens: predicted,
        nats,
        perplexity: (nats / predicted as f64).exp(),
        bits_per_byte: nats / std::f64::consts::LN_2 / bytes.max(1) as f64,
    })
}

/// Windows of `length` tokens; the last may be shorter, but holds something to predict.
fn windows(tokens: &[u32], length: usize, most: usize) -> Vec<&[u32]> {
    tokens.chunks(length).take(most).filter(|window| window.len() >= 2).collect()
}

/// One sequence that fills a window, and the knobs that were set.
fn config(flags: &EvalFlags, tokens: &[u32]) -> Result<EngineConfig> {
    let longest = flags.window.min(tokens.len()) + 1;
    let mut engine = toml::Table::new();
    let mut load = toml::Table::new();
    for assignment in &flags.set {
        let (knob, setting) = knobs::parse_assignment(assignment)?;
        knob.set(&mut engine, &mut load, &setting);
    }
    if !load.is_empty() {
        return Err(Error::invalid(
            format!("`{}` has no meaning here", load.keys().next().map_or("", String::as_str)),
            "set knobs of the engine, such as cpu_math or threads",
        ));
    }
    for (knob, value) in [("max_num_seqs", 1), ("max_model_len", longest as i64)] {
        engine.entry(knob).or_insert(toml::Value::Integer(value));
    }
    let config: EngineConfig = engine
        .try_into()
        .map_err(|error| Error::invalid(format!("--set: {error}"), "check the knob's value"))?;
    config.validate()?;
    Ok(config)
}

/// Floors of steps are not reported here, so nothing is measured for them.
const UNUSED: Ceilings = Ceilings {
    read_bytes_per_s: 1e9,
    copy_bytes_per_s: 1e9,
    flops_per_s: 1e9,
    launch_s: 0.0,
    measured: false,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_cover_the_text_and_predict_something() {
        let tokens: Vec<u32> = (0..10).collect();
        let lengths =
            |length, most| windows(&tokens, length, most).iter().map(|w| w.len()).collect::<Vec<_>>();
        assert_eq!(lengths(4, usize::MAX), [4, 4, 2]);
        assert_eq!(lengths(3, usize::MAX), [3, 3, 3]);
        assert_eq!(lengths(4, 1), [4]);
        assert_eq!(lengths(2048, usize::MAX), [10]);
    }
}
