//! `inferwall predict`: a capacity planner's table for a model on a GPU, without a run.

use clap::Args;

use super::output;
use crate::engine::config::{EngineConfig, KvLayout};
use crate::engine::device::Device;
use crate::engine::device::sim::SimDevice;
use crate::engine::model::{ModelRef, OpenOptions, open};
use crate::experiment::knobs::{self, Knob, Section};
use crate::numbers::{bytes, number, optional};
use crate::report::format::Format;
use crate::report::table;
use crate::simulation::SimulatedArm;
use crate::simulation::predict::{Prediction, predict};
use crate::workload::spec::{LoadSpec, MOST_TOKENS};
use crate::{Error, Result};

#[derive(Debug, Args)]
pub struct PredictFlags {
    /// A folder, a hub id, or synthetic: and demo, qwen3.5-0.8b, -2b, -4b, -9b, -9b-awq, -9b-awq-mlp or qwen2.5-7b
    #[arg(long, value_name = "MODEL", default_value = "synthetic:qwen3.5-4b")]
    model: String,

    /// a10g, l4, rtx4090, rtx5090, a100-80, h100, h200, series, or custom:gb_per_s=..,tflops=..,gb=..
    #[arg(long, value_name = "GPU", default_value = "h100")]
    gpu: String,

    /// Prompt tokens of the load
    #[arg(long, value_name = "N", default_value_t = 256)]
    input_len: usize,

    /// Generated tokens of the load
    #[arg(long, value_name = "N", default_value_t = 128)]
    output_len: usize,

    /// Lengths of prompts to give the time to first token of
    #[arg(long, value_name = "A,B,C", value_delimiter = ',', default_value = "256,2048,8192")]
    prompts: Vec<usize>,

    /// Set a knob of the engine, lengths, sampling or quantization
    #[arg(long, value_name = "KNOB=VALUE")]
    set: Vec<String>,

    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

impl PredictFlags {
    /// # Errors
    /// A model, GPU or setting that is unknown or cannot be told of.
    pub fn run(self) -> Result<()> {
        let device = SimDevice::parse(&self.gpu)?;
        if self.prompts.contains(&0) || self.input_len == 0 || self.output_len == 0 {
            return Err(Error::invalid(
                "a prompt or an answer of 0 tokens",
                "--prompts, --input-len and --output-len are 1 or more",
            ));
        }
        if let Some(tokens) = self.prompts.iter().find(|tokens| **tokens > MOST_TOKENS) {
            return Err(Error::invalid(
                format!("--prompts {tokens} is out of bounds"),
                format!("prompts have 1 to {MOST_TOKENS} tokens"),
            ));
        }
        let arm = self.arm()?;
        let prediction = predict(&arm, &device, &self.prompts)?;
        match self.format {
            Format::Json => {
                let text = serde_json::to_string_pretty(&prediction).map_err(|error| {
                    Error::failed(format!("cannot write json: {error}"), "try --format table")
                })?;
                output::data(&(text + "\n"))
            }
            Format::Csv => output::data(&batch_table(&prediction, Format::Csv)?),
            format => output::data(&draw(&prediction, &device, format)?),
        }
    }

    fn arm(&self) -> Result<SimulatedArm> {
        let (mut engine, mut load) = (toml::Table::new(), toml::Table::new());
        for (name, tokens) in [("input_len", self.input_len), ("output_len", self.output_len)] {
            load.insert(name.to_string(), toml::Value::Integer(tokens as i64));
        }
        let mut model = self.model.clone();
        for assignment in &self.set {
            let (knob, setting) = knobs::parse_assignment(assignment)?;
            if !says_something(knob) {
                return Err(Error::invalid(
                    format!("--set {}: `{}` has no meaning in a prediction", assignment, knob.name),
                    "it is of decode steps at every batch and of a flood of four times the seats: simulate another load \
                     with `inferwall sweep --device sim:GPU`",
                ));
            }
            if knob.section == Section::Model {
                model = knobs::quantized(&model, &setting)?;
            }
            knob.set(&mut engine, &mut load, &setting);
        }
        let reference: ModelRef = model.parse()?;
        let layout = open(&reference, &OpenOptions::default())?.layout;
        let wrong = |error: toml::de::Error| Error::invalid(error.message().to_string(), "check --set");
        let mut engine: EngineConfig = toml::Value::Table(engine).try_into().map_err(wrong)?;
        let load: LoadSpec = toml::Value::Table(load).try_into().map_err(wrong)?;
        load.validate()?;
        engine.max_model_len = engine.max_model_len.max(load.input_len + load.output_len);
        engine.validate()?;
        Ok(SimulatedArm { layout, engine, load, seed: 0, stop_s: None, stall_s: 0.0 })
    }
}

/// Whether a prediction can tell of a knob. Its load is its own, but for lengths and sampling; the other devices' knobs
/// are no simulated GPU's.
fn says_something(knob: &Knob) -> bool {
    const OF_THE_LOAD: [&str; 5] = ["input_len", "output_len", "temperature", "top_k", "top_p"];
    const OF_OTHER_DEVICES: [&str; 3] = ["cpu_math", "threads", "cuda_kernels"];
    match knob.section {
        Section::Load => OF_THE_LOAD.contains(&knob.name),
        Section::Engine => !OF_OTHER_DEVICES.contains(&knob.name),
        Section::Model => true,
    }
}

fn layout_name(layout: KvLayout) -> &'static str {
    match layout {
        KvLayout::Split => "split",
        KvLayout::Unified => "unified",
    }
}

fn batch_table(prediction: &Prediction, format: Format) -> Result<String> {
    let plain = format == Format::Csv;
    let shown = |value: f64| if plain { value.to_string() } else { number(value) };
    let ms = |seconds: f64| shown(seconds * 1e3);
    let rows: Vec<Vec<String>> = prediction
        .batches
        .iter()
        .map(|row| {
            vec![
                row.batch.to_string(),
                shown(row.step_ms),
                shown(row.tokens_per_s),
                ms(row.time.weights_s),
                ms(row.time.compute_s),
                ms(row.time.state_s),
                ms(row.time.kv_s),
                ms(row.time.fixed_s + row.time.sampling_s),
                row.bound_by.to_string(),
            ]
        })
        .collect();
    let header = ["batch", "step_ms", "tok_per_s", "weights", "compute", "state", "kv", "fixed", "bound_by"];
    table::render(format, &header, &rows, &[0, 1, 2, 3, 4, 5, 6, 7])
}

fn draw(prediction: &Prediction, device: &SimDevice, format: Format) -> Result<String> {
    let memory = &prediction.memory;
    let gb = |value: u64| bytes(value as f64);
    let mut text = format!("{} on {}: simulated, nothing was run\n\n", prediction.model, device.info().name);
    text += &format!(
        "memory: {} of {} may be used: weights {} ({} streamed by every step), caches {}\n",
        gb(memory.budget_bytes),
        gb(memory.memory_bytes),
        gb(memory.weight_bytes),
        gb(memory.streamed_bytes),
        gb(memory.cache_bytes)
    );
    for layout in &prediction.layouts {
        text += &format!(
            "seats, {} layout: {} sequences of {} + {} tokens ({} blocks of {} tokens)\n",
            layout_name(layout.layout),
            layout.seats,
            prediction.input_len,
            prediction.output_len,
            layout.blocks,
            layout.block_tokens
        );
    }
    text += "\na decode step half way through an answer, in ms:\n\n";
    text += &batch_table(prediction, format)?;
    text += &match prediction.crossover {
        Some(crossover) if crossover >= 1.0 => {
            format!("\ncrossover: at {} sequences what each adds equals what all share\n", number(crossover))
        }
        Some(_) => "\ncrossover: each sequence adds more than all share, at every batch\n".to_string(),
        None => String::new(),
    };
    text += &format!(
        "saturation: {} requests/s, {} tokens/s with {} running (a flood of four times the seats); token gaps p50 {} ms, \
         p99 {} ms\n",
        number(prediction.saturation_rate),
        number(prediction.saturation_tokens_per_s),
        prediction.saturation_running,
        number(prediction.flood_itl_p50_ms),
        number(prediction.flood_itl_p99_ms)
    );
    text += "time to first token, alone:";
    for prompt in &prediction.prompts {
        text += &format!(" {} tokens {} ms;", prompt.tokens, optional(Some(prompt.ttft_ms)));
    }
    text.pop();
    text += "\n\nwalls:\n";
    for wall in &prediction.walls {
        text += &format!("- {}\n", wall.text);
    }
    text += "\nfigures of this GPU:\n";
    for (name, fact) in &device.info().facts {
        text += &format!("- {name}: {fact}\n");
    }
    Ok(text)
}
