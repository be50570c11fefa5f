//! `inferwall generate`: text from a model, as it comes.

use clap::{Args, ValueEnum};
use serde_json::json;

use super::output;
use super::session::{ModelFlags, parse_tokens};
use crate::engine::config::EngineConfig;
use crate::engine::request::{Request, SamplingParams};
use crate::engine::step_report::Event;
use crate::engine::tokenizer::Tokenizer;
use crate::workload::spec::HOTTEST;
use crate::{Error, Result, interrupt};

#[derive(Debug, Args)]
pub struct GenerateFlags {
    #[command(flatten)]
    model: ModelFlags,

    /// Text to go on from
    #[arg(long, value_name = "TEXT", conflicts_with = "tokens")]
    prompt: Option<String>,

    /// Token ids to go on from: 1,2,3 or @FILE
    #[arg(long, value_name = "IDS", allow_negative_numbers = true)]
    tokens: Option<String>,

    /// Stop after this many tokens
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_tokens: usize,

    /// 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true)]
    temperature: f32,

    /// Sample from the K most likely tokens; 0: from all
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,

    /// Sample from the smallest set with this probability
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f32,

    /// Go on after a stop token
    #[arg(long)]
    ignore_eos: bool,

    #[arg(long, value_enum, default_value_t = GenerateFormat::Text)]
    format: GenerateFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum GenerateFormat {
    /// The text, as it comes
    Text,
    /// {"tokens": [...], "text": ...}: generated tokens only
    Json,
}

impl GenerateFlags {
    /// # Errors
    /// A model, prompt or flag that is wrong; generation that failed or was interrupted.
    pub fn run(self) -> Result<()> {
        if self.max_tokens == 0 {
            return Err(Error::invalid("--max-tokens 0 asks for nothing", "give 1 or more"));
        }
        if f64::from(self.temperature) > HOTTEST {
            return Err(Error::invalid(
                format!("temperature = {:e} is out of bounds", self.temperature),
                format!("temperature must be 0 (greedy) to {HOTTEST}"),
            ));
        }
        if self.model.device.starts_with("sim:") && !self.model.device.starts_with("sim:fixed") {
            return Err(Error::invalid(
                format!("{} has no weights and writes no text", self.model.device),
                "choose --device cpu or cuda; `inferwall predict` says how fast it would be",
            ));
        }
        let config = EngineConfig { max_num_seqs: 1, ..EngineConfig::default() };
        let checked = self.model.check(config)?;
        let (prompt, tokenizer) = match (&self.prompt, &self.tokens) {
            (Some(text), _) => {
                let tokenizer = checked.tokenizer()?;
                let prompt = tokenizer.encode(text, true)?;
                if prompt.is_empty() {
                    return Err(Error::invalid("the prompt has no tokens", "give some text"));
                }
                (prompt, Some(tokenizer))
            }
            // Ids need no tokenizer, but their text does.
            (None, Some(ids)) => (parse_tokens(ids)?, checked.tokenizer().ok()),
            (None, None) => {
                return Err(Error::invalid("nothing to go on from", "give --prompt TEXT or --tokens IDS"));
            }
        };
        checked.check_tokens(&prompt)?;
        let simulated = checked.simulated();
        if simulated {
            output::warning("SIMULATED: what follows is drawn at random and is no text of the model");
        }
        let stop_tokens = checked.opened.generation.eos_tokens.clone();
        let mut model = checked.load(prompt.len().saturating_add(self.max_tokens))?;
        let request = Request {
            prompt,
            max_tokens: self.max_tokens,
            sampling: SamplingParams { temperature: self.temperature, top_k: self.top_k, top_p: self.top_p },
            seed: self.model.seed,
            stop_tokens,
            ignore_eos: self.ignore_eos,
        };
        model.engine.submit(request)?;
        self.print(&mut model.engine, tokenizer.as_ref(), simulated)
    }

    fn print(
        &self,
        engine: &mut crate::engine::Engine,
        tokenizer: Option<&Tokenizer>,
        simulated: bool,
    ) -> Result<()> {
        let mut all = Vec::new();
        let mut stream = tokenizer.map(Tokenizer::stream);
        let text_wanted = self.format == GenerateFormat::Text;
        while let Some(report) = engine.step()? {
            interrupt::check()?;
            for event in report.events {
                let Event::Tokens { tokens, .. } = event else { continue };
                for &token in &tokens {
                    match stream.as_mut() {
                        Some(stream) if text_wanted => output::data(&stream.push(token)?)?,
                        None if text_wanted => output::data(&format!("<{token}>"))?,
                        _ => {}
                    }
                }
                all.extend(tokens);
            }
        }
        if text_wanted {
            let rest = stream.as_mut().map(|stream| stream.finish()).transpose()?.unwrap_or_default();
            return output::data(&(rest + "\n"));
        }
        let text = tokenizer.map(|tokenizer| tokenizer.decode(&all)).transpose()?;
        let mut answer = json!({"tokens": all, "text": text});
        if simulated {
            answer["simulated"] = true.into();
        }
        output::data(&(answer.to_string() + "\n"))
    }
}
