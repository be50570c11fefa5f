//! `model eval`: how well a model predicts a text, over windows of fixed length that do not overlap.
//!
//! Perplexity is exp of the mean of -ln p over all predicted tokens: every token of a window but its first. Bits per
//! byte divides the same sum by the bytes of those tokens' text, so that models with other tokenizers compare.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::super::{output, session};
use crate::engine::config::EngineConfig;
use crate::report::format::Format;
use crate::run::prepare::weights_word;
use crate::{Error, Result};

#[derive(Debug, Args)]
pub struct EvalFlags {
    #[command(flatten)]
    model: session::ModelFlags,

    /// The text to predict
    #[arg(long, value_name = "FILE")]
    text: PathBuf,

    /// Tokens of a window
    #[arg(long, value_name = "N", default_value_t = 2048)]
    window: usize,

    /// Most windows, from the start of the text; all if not given
    #[arg(long, value_name = "N")]
    windows: Option<usize>,

    /// What goes to stdout: table or json
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// The result, as `--format json` prints it.
#[derive(Debug, Serialize)]
struct Evaluation {
    model: String,
    hash: String,
    /// `real` or `synthetic`.
    weights: &'static str,
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
            .map_err(|error| Error::bug(format!("cannot write the result as JSON: {error}")))?;
        return output::data(&format!("{text}\n"));
    }
    output::data(&format!(
        "perplexity {:.4}{}\n{} tokens in {} windows of {}, {:.2} nats, {:.4} bits per byte\n",
        evaluation.perplexity,
        if evaluation.weights == "synthetic" { " (weights: synthetic)" } else { "" },
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
    if flags.model.device.starts_with("sim:") {
        return Err(Error::invalid(
            format!("{} computes no probabilities", flags.model.device),
            "use --device cpu or cuda",
        ));
    }
    let text = std::fs::read_to_string(&flags.text).map_err(|error| Error::read(&flags.text, &error))?;
    let config = EngineConfig { max_num_seqs: 1, ..EngineConfig::default() };
    let checked = flags.model.check(config)?;
    let tokenizer = checked.tokenizer()?;
    let tokens = tokenizer.encode(&text, true)?;
    let windows: Vec<&[u32]> = windows(&tokens, flags.window, flags.windows.unwrap_or(usize::MAX));
    if windows.is_empty() {
        return Err(Error::invalid(
            format!("{} has {} tokens, expected 2 or more", flags.text.display(), tokens.len()),
            "give a longer text",
        ));
    }
    let mut model = checked.load(flags.window.min(tokens.len()))?;
    let (mut nats, mut predicted, mut bytes) = (0.0, 0, 0);
    for window in &windows {
        let logprobs = model.engine.logprobs(window)?;
        nats -= logprobs.iter().map(|&logprob| f64::from(logprob)).sum::<f64>();
        predicted += logprobs.len();
        bytes += tokenizer.decode(&window[1..])?.len();
    }
    let layout = &model.opened.layout;
    Ok(Evaluation {
        model: layout.spec.name.clone(),
        hash: layout.hash.clone(),
        weights: weights_word(layout.synthetic),
        device: model.device_id().to_string(),
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
