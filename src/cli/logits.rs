//! `inferwall logits`: what the model says after given tokens, for parity with other implementations.

use clap::{Args, ValueEnum};

use super::output;
use super::session::{ModelFlags, parse_tokens};
use crate::engine::config::{CpuMath, EngineConfig};
use crate::{Error, Result};

#[derive(Debug, Args)]
pub struct LogitsFlags {
    #[command(flatten)]
    model: ModelFlags,

    /// Token ids: 1,2,3 or @FILE
    #[arg(long, value_name = "IDS", allow_negative_numbers = true)]
    tokens: String,

    /// Only the last N positions
    #[arg(long, value_name = "N")]
    last: Option<usize>,

    #[arg(long, value_enum, default_value_t = LogitsFormat::Json)]
    format: LogitsFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogitsFormat {
    /// {"logits": [[...], ...]}, a row a position
    Json,
    /// A line a position
    Csv,
}

impl LogitsFlags {
    /// # Errors
    /// A model or tokens that are wrong, logits that are not finite.
    pub fn run(self) -> Result<()> {
        let tokens = parse_tokens(&self.tokens)?;
        let last = self.last.unwrap_or(tokens.len());
        if last == 0 || last > tokens.len() {
            return Err(Error::invalid(
                format!("--last {last} is out of bounds for --tokens of length {}", tokens.len()),
                format!("give 1 to {}, or leave it out for all positions", tokens.len()),
            ));
        }
        // (The reference arithmetic, whatever --set says.)
        let config = EngineConfig { max_num_seqs: 1, max_model_len: tokens.len(), ..EngineConfig::default() };
        let checked = self.model.check(config)?.with_cpu_math(CpuMath::F32);
        checked.check_tokens(&tokens)?;
        let mut model = checked.load(tokens.len())?;
        let rows = model.engine.logits(&tokens, last)?;
        output::data(&match self.format {
            LogitsFormat::Json => json(&rows)?,
            LogitsFormat::Csv => csv(&rows),
        })
    }
}

fn json(rows: &[Vec<f32>]) -> Result<String> {
    #[derive(serde::Serialize)]
    struct Logits<'a> {
        logits: &'a [Vec<f32>],
    }
    let text = serde_json::to_string(&Logits { logits: rows });
    Ok(text.map_err(|error| Error::bug(format!("cannot write JSON: {error}")))? + "\n")
}

fn csv(rows: &[Vec<f32>]) -> String {
    rows.iter().map(|row| row.iter().map(ToString::to_string).collect::<Vec<_>>().join(",") + "\n").collect()
}
