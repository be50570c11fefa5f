//! Every knob by name: the one table behind `--set`, `--knob` and the `load` and `engine` tables of experiments.toml.
//!
//! A knob's setter is its section and its kind: a value is parsed and checked here, then put under the knob's name
//! into the table that `EngineConfig` or `LoadSpec` is read from. So a new knob is a field there and a line here.

mod elsewhere;
mod values;

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::engine::config;
use crate::engine::model::ModelRef;
use crate::workload::rate::written;
use crate::workload::spec::{BURSTINESS, HOTTEST, LONGEST_PAUSE_S, MOST_REQUESTS, MOST_TOKENS};
use crate::{Error, Result};

pub use values::{parse_assignment, parse_values};
use values::{parse_bytes, shortened};

/// Which table a knob lives in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    Engine,
    Load,
    /// Changes which weights an arm's model has.
    Model,
}

/// What values a knob takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    Integer {
        min: i64,
        max: i64,
    },
    /// An integer, or `auto`: left to the engine.
    AutoInteger {
        min: i64,
        max: i64,
    },
    Float {
        min: f64,
        max: f64,
    },
    /// Above 0, or `inf`.
    Rate,
    Bool,
    /// A number of bytes: `24GB`, `22.5GiB`, 24000000000; or `auto`.
    AutoBytes,
    Choice(&'static [&'static str]),
}

#[derive(Debug)]
pub struct Knob {
    pub name: &'static str,
    pub section: Section,
    pub kind: Kind,
    pub doc: &'static str,
}

const PREFIXES: Kind = Kind::Integer { min: 1, max: MOST_REQUESTS as i64 };
const REQUESTS: Kind = Kind::Integer { min: 1, max: MOST_REQUESTS as i64 };
const TOKENS: Kind = Kind::Integer { min: 1, max: MOST_TOKENS as i64 };
const DTYPE: Kind = Kind::Choice(&["auto", "f32", "f16", "bf16"]);

const fn integer(bounds: RangeInclusive<usize>) -> Kind {
    Kind::Integer { min: *bounds.start() as i64, max: *bounds.end() as i64 }
}

const fn auto_integer(bounds: RangeInclusive<usize>) -> Kind {
    Kind::AutoInteger { min: *bounds.start() as i64, max: *bounds.end() as i64 }
}

const fn float(bounds: &RangeInclusive<f64>) -> Kind {
    Kind::Float { min: *bounds.start(), max: *bounds.end() }
}

const fn engine(name: &'static str, kind: Kind, doc: &'static str) -> Knob {
    Knob { name, section: Section::Engine, kind, doc }
}

const fn load(name: &'static str, kind: Kind, doc: &'static str) -> Knob {
    Knob { name, section: Section::Load, kind, doc }
}

pub static KNOBS: &[Knob] = &[
    engine("max_num_seqs", integer(config::SEQUENCES), "most sequences in one step"),
    engine(
        "max_num_batched_tokens",
        integer(config::TOKENS),
        "most new tokens in one step, decodes included",
    ),
    engine("chunked_prefill", Kind::Bool, "split prompts to fill the token budget"),
    engine("max_model_len", integer(config::TOKENS), "longest request, prompt plus output, in tokens"),
    engine("kv_blocks", auto_integer(config::BLOCKS), "KV blocks in the pool; auto: what memory holds"),
    engine("kv_block_tokens", integer(config::TOKENS), "tokens a KV block holds (split layout)"),
    engine("kv_layout", Kind::Choice(&["split", "unified"]), "how cache memory is divided"),
    engine("kv_dtype", DTYPE, "storage type of the KV cache"),
    engine("state_dtype", DTYPE, "storage type of the recurrent state"),
    engine(
        "state_write_interval",
        auto_integer(config::STATE_WRITE_INTERVALS),
        "decoded tokens from one write of a recurrent state to the next",
    ),
    engine(
        "last_layer",
        Kind::Choice(&["auto", "all", "outputs"]),
        "rows that go through the whole last layer: all, or those that an output is made of",
    ),
    engine(
        "state_slots",
        auto_integer(config::BLOCKS),
        "recurrent-state slots (split layout); auto: from memory",
    ),
    engine("gpu_memory_utilization", float(&config::MEMORY_SHARE), "share of memory the engine may use"),
    engine("gpu_memory", Kind::AutoBytes, "pretend the device has this much memory"),
    engine("prefix_caching", Kind::Bool, "reuse KV blocks of equal prompt prefixes (dense models)"),
    engine(
        "preemption",
        Kind::Choice(&["recompute", "never"]),
        "evict and recompute, or admit whole requests only",
    ),
    engine("speculation", Kind::Choice(&["off", "ngram"]), "propose tokens and verify several in one step"),
    engine("speculative_tokens", integer(config::DRAFTS), "drafted tokens a step"),
    engine("ngram_min", integer(config::NGRAM_LENGTHS), "shortest suffix n-gram speculation looks up"),
    engine("ngram_max", integer(config::NGRAM_LENGTHS), "longest suffix n-gram speculation looks up"),
    engine("async_scheduling", auto_integer(config::STEPS_IN_FLIGHT), "steps in flight"),
    engine("cuda_graphs", Kind::Bool, "capture decode steps as CUDA graphs"),
    engine(
        "cuda_kernels",
        Kind::Choice(&["auto", "portable"]),
        "kernels of the CUDA device: the best for the GPU, or those that every GPU runs",
    ),
    engine("cpu_math", Kind::Choice(&["f32", "bf16", "int16"]), "arithmetic of the CPU device"),
    engine("threads", auto_integer(config::THREADS), "worker threads of the CPU device"),
    engine("sim_noise", float(&config::SIM_NOISE), "scale of a simulated device's seeded noise"),
    Knob {
        name: "quantization",
        section: Section::Model,
        kind: Kind::Choice(&["none", "awq", "awq-mlp"]),
        doc: "which form of a synthetic model's weights",
    },
    load("request_rate", Kind::Rate, "requests offered a second; inf: all at once"),
    load("burstiness", float(&BURSTINESS), "shape of the gaps between arrivals; 1 is Poisson"),
    load(
        "concurrency",
        Kind::AutoInteger { min: 1, max: MOST_REQUESTS as i64 },
        "clients of a closed loop, each with one request in flight",
    ),
    load(
        "think_time_s",
        Kind::Float { min: 0.0, max: LONGEST_PAUSE_S },
        "mean pause of a closed loop's client, seconds",
    ),
    load("prompts", REQUESTS, "requests in the measured run"),
    load("input_len", TOKENS, "prompt tokens of a request"),
    load("output_len", TOKENS, "generated tokens of a request"),
    load(
        "prefix_len",
        Kind::Integer { min: 0, max: MOST_TOKENS as i64 },
        "tokens at the start of a prompt that are shared",
    ),
    load("prefix_count", PREFIXES, "different shared prefixes"),
    load("ignore_eos", Kind::Bool, "generate the full length whatever the tokens are"),
    load("temperature", Kind::Float { min: 0.0, max: HOTTEST }, "0 is greedy"),
    load(
        "top_k",
        Kind::Integer { min: 0, max: 1 << 30 },
        "sample from the k most likely tokens; 0: from all",
    ),
    load("top_p", Kind::Float { min: 1e-6, max: 1.0 }, "sample from the smallest set with this probability"),
];

/// A checked value of a knob, as tables and file names show it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Setting {
    Bool(bool),
    Integer(i64),
    Float(f64),
    /// A choice, `auto` or `inf`.
    Text(String),
}

impl std::fmt::Display for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bool(value) => write!(f, "{value}"),
            Self::Integer(value) => write!(f, "{value}"),
            Self::Float(value) => f.write_str(&written(*value)),
            Self::Text(value) => f.write_str(value),
        }
    }
}

/// The knob of that name.
///
/// # Errors
/// [`Error::Invalid`] that offers the nearest name.
pub fn find(name: &str) -> Result<&'static Knob> {
    KNOBS.iter().find(|knob| knob.name == name).ok_or_else(|| {
        let nearest = nearest(name, KNOBS.iter().map(|knob| knob.name));
        let hint = match (elsewhere::here(name), nearest) {
            (Some(here), _) => format!("vLLM's `{name}` is `{here}` here"),
            (None, Some(nearest)) => format!("did you mean `{nearest}`?"),
            (None, None) => {
                format!("knobs: {}", KNOBS.iter().map(|knob| knob.name).collect::<Vec<_>>().join(", "))
            }
        };
        Error::invalid(format!("unknown knob `{name}`"), hint)
    })
}

/// The only name that begins with what was typed, else the closest one, if any is close enough to be meant.
pub fn nearest<'a>(typed: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let names: Vec<&str> = names.collect();
    let mut begun = names.iter().filter(|name| !typed.is_empty() && name.starts_with(typed));
    if let (Some(only), None) = (begun.next(), begun.next()) {
        return Some(only);
    }
    names
        .into_iter()
        .map(|name| (strsim::jaro_winkler(typed, name), name))
        .filter(|(similarity, _)| *similarity > 0.85)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}

impl Knob {
    /// Reads a value as typed on a command line.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the knob, the value and what is allowed.
    pub fn parse(&self, text: &str) -> Result<Setting> {
        let text = text.trim();
        let wrong = || self.wrong(text);
        let lower = text.to_ascii_lowercase();
        let setting = match self.kind {
            Kind::AutoInteger { .. } | Kind::AutoBytes if lower == "auto" => Setting::Text(lower),
            Kind::Integer { .. } | Kind::AutoInteger { .. } => {
                Setting::Integer(text.replace('_', "").parse().map_err(|_| wrong())?)
            }
            Kind::AutoBytes => Setting::Integer(parse_bytes(text).ok_or_else(wrong)?),
            Kind::Rate if lower == "inf" => Setting::Text(lower),
            Kind::Rate | Kind::Float { .. } => Setting::Float(text.parse().map_err(|_| wrong())?),
            Kind::Bool => Setting::Bool(match lower.as_str() {
                "true" | "on" | "yes" | "1" => true,
                "false" | "off" | "no" | "0" => false,
                _ => return Err(wrong()),
            }),
            Kind::Choice(_) => Setting::Text(lower),
        };
        self.check(setting)
    }

    /// Reads a value from experiments.toml.
    ///
    /// # Errors
    /// A value that the knob does not take.
    pub fn from_toml(&self, value: &Value) -> Result<Setting> {
        match value {
            Value::String(text) => self.parse(text),
            Value::Integer(integer) if matches!(self.kind, Kind::Rate | Kind::Float { .. }) => {
                self.check(Setting::Float(*integer as f64))
            }
            Value::Integer(integer) => self.parse(&integer.to_string()),
            Value::Float(float) if float.is_infinite() && matches!(self.kind, Kind::Rate) => {
                self.parse("inf")
            }
            Value::Float(float) => self.parse(&float.to_string()),
            Value::Boolean(boolean) if matches!(self.kind, Kind::Bool) => self.check(Setting::Bool(*boolean)),
            other => Err(self.wrong(&other.to_string())),
        }
    }

    fn check(&self, setting: Setting) -> Result<Setting> {
        let allowed = match (&self.kind, &setting) {
            (Kind::AutoInteger { .. } | Kind::AutoBytes, Setting::Text(_)) => true,
            (Kind::Integer { min, max } | Kind::AutoInteger { min, max }, Setting::Integer(value)) => {
                (min..=max).contains(&value)
            }
            (Kind::AutoBytes, Setting::Integer(value)) => *value > 0,
            (Kind::Float { min, max }, Setting::Float(value)) => value >= min && value <= max,
            (Kind::Rate, Setting::Float(value)) => *value > 0.0 && value.is_finite(),
            (Kind::Rate, Setting::Text(_)) | (Kind::Bool, Setting::Bool(_)) => true,
            (Kind::Choice(choices), Setting::Text(value)) => choices.contains(&value.as_str()),
            _ => false,
        };
        if allowed { Ok(setting) } else { Err(self.wrong(&setting.to_string())) }
    }

    fn wrong(&self, found: &str) -> Error {
        let number = found.parse::<f64>().is_ok();
        let problem = if number { "is out of bounds" } else { "is not a value of this knob" };
        Error::invalid(
            format!("{} = {} {problem}", self.name, shortened(found)),
            format!("{} must be {} ({})", self.name, self.allowed(), self.doc),
        )
    }

    /// What values are allowed, in words.
    pub fn allowed(&self) -> String {
        let integers = |min: i64, max: i64| format!("a whole number from {min} to {max}");
        match self.kind {
            Kind::Integer { min, max } => integers(min, max),
            Kind::AutoInteger { min, max } => format!("{} or auto", integers(min, max)),
            Kind::Float { min, max } => format!("a number from {min} to {max}"),
            Kind::Rate => "a number above 0, or inf".to_string(),
            Kind::Bool => "true or false".to_string(),
            Kind::AutoBytes => "a size such as 24GB or 22GiB, or auto".to_string(),
            Kind::Choice(choices) => format!("one of {}", choices.join(", ")),
        }
    }

    /// Puts the value into its table. `auto` takes the key out, which leaves the choice to the engine.
    pub fn set(&self, engine: &mut Table, load: &mut Table, setting: &Setting) {
        let table = match self.section {
            Section::Engine => engine,
            Section::Load => load,
            // Its value goes into the model's name: see `quantized`.
            Section::Model => return,
        };
        let value = match setting {
            Setting::Text(text)
                if text == "auto" && matches!(self.kind, Kind::AutoInteger { .. } | Kind::AutoBytes) =>
            {
                table.remove(self.name);
                return;
            }
            Setting::Text(text) if text == "inf" => Value::Float(f64::INFINITY),
            Setting::Text(text) => Value::String(text.clone()),
            Setting::Bool(value) => Value::Boolean(*value),
            Setting::Integer(value) => Value::Integer(*value),
            Setting::Float(value) => Value::Float(*value),
        };
        table.insert(self.name.to_string(), value);
    }
}

/// The form of a synthetic model's weights that `quantization` names.
///
/// # Errors
/// [`Error::Invalid`] for a checkpoint, whose files say what is quantised, and for a form the preset does not have.
pub fn quantized(model: &str, form: &Setting) -> Result<String> {
    if !model.starts_with("synthetic:") {
        return Err(Error::invalid(
            format!(
                "quantization = {form} cannot be chosen for {model}: a checkpoint's files say what is quantised"
            ),
            "give the quantised checkpoint with --model",
        ));
    }
    let plain = model.trim_end_matches("-mlp").trim_end_matches("-awq");
    let name = match form.to_string().as_str() {
        "none" => plain.to_string(),
        suffix => format!("{plain}-{suffix}"),
    };
    match name.parse::<ModelRef>() {
        Ok(_) => Ok(name),
        Err(error) => Err(error.context(format!("quantization = {form} of {model}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(knob: &str, values: &str) -> Vec<String> {
        let settings = parse_values(find(knob).unwrap(), values).unwrap();
        settings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn an_unknown_knob_offers_the_nearest() {
        let error = find("max_num_seq").unwrap_err();
        assert_eq!(error.hint(), "did you mean `max_num_seqs`?");
        assert_eq!(error.exit_code(), 2);
    }

    #[test]
    fn lists_and_ranges() {
        assert_eq!(texts("max_num_seqs", "1,4, 16"), ["1", "4", "16"]);
        assert_eq!(texts("max_num_seqs", "1..16*2"), ["1", "2", "4", "8", "16"]);
        assert_eq!(texts("max_num_seqs", "1..9+4,20"), ["1", "5", "9", "20"]);
        assert_eq!(texts("request_rate", "0.5,2,inf"), ["0.5", "2", "inf"]);
    }

    #[test]
    fn values_out_of_bounds_name_the_knob_and_what_is_allowed() {
        let error = find("max_num_seqs").unwrap().parse("0").unwrap_err();
        assert_eq!(error.to_string(), "max_num_seqs = 0 is out of bounds");
        assert!(error.hint().contains("1 to 1048576"));
        for (knob, value) in [
            ("request_rate", "-1"),
            ("request_rate", "nan"),
            ("top_p", "1.5"),
            ("kv_layout", "both"),
            ("gpu_memory", "4XB"),
        ] {
            assert!(find(knob).unwrap().parse(value).is_err(), "{knob}={value}");
        }
        assert!(parse_values(find("max_num_seqs").unwrap(), "4,4").is_err());
    }

    #[test]
    fn bytes_and_auto() {
        let knob = find("gpu_memory").unwrap();
        assert_eq!(knob.parse("24GB").unwrap(), Setting::Integer(24_000_000_000));
        assert_eq!(knob.parse("1.5GiB").unwrap(), Setting::Integer(1_610_612_736));
        let (mut engine, mut load) = (Table::new(), Table::new());
        knob.set(&mut engine, &mut load, &Setting::Integer(5));
        knob.set(&mut engine, &mut load, &knob.parse("auto").unwrap());
        assert!(engine.is_empty());
    }

    #[test]
    fn quantization_chooses_a_preset() {
        let form =
            |model: &str, form: &str| quantized(model, &find("quantization").unwrap().parse(form).unwrap());
        assert_eq!(form("synthetic:qwen3.5-9b", "awq-mlp").unwrap(), "synthetic:qwen3.5-9b-awq-mlp");
        assert_eq!(form("synthetic:qwen3.5-9b-awq-mlp", "none").unwrap(), "synthetic:qwen3.5-9b");
        assert!(form("synthetic:demo", "awq").is_err() && form("Qwen/Qwen3.5-4B", "awq").is_err());
    }

    #[test]
    fn every_engine_knob_is_a_field_of_the_config() {
        for knob in KNOBS.iter().filter(|knob| knob.section == Section::Engine) {
            let text = match knob.kind {
                Kind::Integer { min, .. } | Kind::AutoInteger { min, .. } => min.to_string(),
                Kind::Float { max, .. } => max.to_string(),
                Kind::Rate => "1".to_string(),
                Kind::Bool => "true".to_string(),
                Kind::AutoBytes => "24GB".to_string(),
                Kind::Choice(choices) => choices[0].to_string(),
            };
            let (mut engine, mut load) = (Table::new(), Table::new());
            knob.set(&mut engine, &mut load, &knob.parse(&text).unwrap());
            let config: Result<crate::engine::config::EngineConfig, _> = Value::Table(engine).try_into();
            assert!(config.is_ok(), "{}: {config:?}", knob.name);
        }
    }

    #[test]
    fn every_load_knob_is_a_field_of_the_load() {
        for name in crate::workload::spec::LOAD_KNOBS {
            assert_eq!(find(name).unwrap().section, Section::Load);
        }
        for knob in KNOBS.iter().filter(|knob| knob.section == Section::Load) {
            assert!(crate::workload::spec::LOAD_KNOBS.contains(&knob.name), "{}", knob.name);
        }
    }
}
