//! [`LoadSpec`]: the load of an arm as experiments.toml declares it. Every key is a knob of the load.
//!
//! Keys that are knobs of the command line too (`request_rate`, `concurrency`, `input_len`, ...) are plain fields of the
//! table, so `--set` replaces one value and deserialises again.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::probe::Probe;
use super::rate::Rate;
use super::slo::Slo;
use crate::engine::request::SamplingParams;
use crate::{Error, Result, paths};

/// Bounds of a load: what is drawn before a run has to fit in memory, and a run has to end. The knobs have the same ones.
pub const MOST_REQUESTS: usize = 1 << 20;
/// Of one prompt, and of one answer.
pub const MOST_TOKENS: usize = 1 << 24;
/// Of all prompts together, which are drawn whole: 1 GiB of them.
pub const MOST_PROMPT_TOKENS: usize = 1 << 28;
/// When the last request is due at the latest, seconds: 115 days.
pub const LATEST_ARRIVAL_S: f64 = 1e7;
pub const LONGEST_PAUSE_S: f64 = 1e6;
pub const BURSTINESS: std::ops::RangeInclusive<f64> = 1e-3..=1e6;
pub const MOST_ROUNDS: usize = 100;
/// Temperature: beyond it all tokens are as likely.
pub const HOTTEST: f64 = 100.0;

/// Names of the load's knobs for `--set` and `--knob`: scalar keys of [`LoadSpec`].
pub const LOAD_KNOBS: [&str; 13] = [
    "request_rate",
    "burstiness",
    "concurrency",
    "think_time_s",
    "input_len",
    "output_len",
    "prefix_len",
    "prefix_count",
    "ignore_eos",
    "temperature",
    "top_k",
    "top_p",
    "prompts",
];

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoadSpec {
    /// Requests in the measured run: a number, a rule such as `{ per_seat = 4, min = 48 }`, or `"all"` rows of a replay.
    pub prompts: Count,
    /// Requests a second, or `inf`: all at once (with `concurrency`: a closed loop).
    pub request_rate: Rate,
    /// Shape of the gamma distribution of gaps between arrivals: 1 is Poisson, below 1 burstier, above 1 more even.
    pub burstiness: f64,
    pub arrivals: Arrivals,
    /// Change the rate over the run, from `request_rate` to its `to`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ramp: Option<Ramp>,
    /// With `request_rate = inf`: clients that each wait for their answer before they ask again (a closed loop).
    /// With a finite rate: most requests in flight; one that is due waits, and its latency counts from when it was due.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<usize>,
    /// Mean pause of a client of a closed loop between an answer and its next request, seconds (exponential).
    pub think_time_s: f64,
    /// Prompt tokens (the mean, where lengths vary).
    pub input_len: usize,
    /// Generated tokens (the mean, where lengths vary).
    pub output_len: usize,
    pub lengths: Lengths,
    pub prompt: PromptKind,
    /// Tokens at the start of each prompt that are shared, within `input_len`.
    pub prefix_len: usize,
    /// Different shared prefixes; requests take them in turn.
    pub prefix_count: usize,
    /// Generate `output_len` tokens whatever the model says.
    pub ignore_eos: bool,
    pub temperature: f32,
    pub top_k: usize,
    pub top_p: f32,
    pub warmup: WarmUp,
    /// Replaces arrivals and lengths by the victims and injectors of Part 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probe: Option<Probe>,
    /// Replaces arrivals and lengths by those of a recorded trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replay: Option<Replay>,
    /// Limits on latency, in milliseconds: `{ ttft_p99 = 500 }`. They set what counts as goodput.
    #[serde(skip_serializing_if = "Slo::is_empty")]
    pub slo: Slo,
}

impl Default for LoadSpec {
    fn default() -> Self {
        Self {
            prompts: Count::Exact(200),
            request_rate: Rate::FLOOD,
            burstiness: 1.0,
            arrivals: Arrivals::Gamma,
            ramp: None,
            concurrency: None,
            think_time_s: 0.0,
            input_len: 256,
            output_len: 128,
            lengths: Lengths::Fixed,
            prompt: PromptKind::Random,
            prefix_len: 0,
            prefix_count: 1,
            ignore_eos: true,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            warmup: WarmUp::default(),
            probe: None,
            replay: None,
            slo: Slo::default(),
        }
    }
}

/// A number of requests: given, or so many for each seat (`max_num_seqs`) within bounds, or what a recorded trace has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a number of requests, or a rule such as { per_seat = 4, min = 48 }, or \"all\" of a replay"
)]
pub enum Count {
    Exact(usize),
    Rule(CountRule),
    Trace(WholeTrace),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WholeTrace {
    All,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CountRule {
    pub per_seat: usize,
    #[serde(default)]
    pub min: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<usize>,
    /// In place of all these at a finite rate: requests fill seats in a flood alone, and runs of unequal length differ by
    /// the time in which they empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_rate: Option<usize>,
}

impl Count {
    /// Of a flood; [`LoadSpec::requests`] knows more.
    pub fn resolve(self, seats: usize) -> usize {
        match self {
            Self::Exact(count) => count,
            Self::Trace(WholeTrace::All) => MOST_REQUESTS,
            Self::Rule(rule) => {
                rule.per_seat.saturating_mul(seats).max(rule.min).min(rule.max.unwrap_or(usize::MAX))
            }
        }
    }
}

/// How arrivals at a finite rate are spaced. The schedule is scaled so that the last of n requests arrives at n/rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrivals {
    /// Gaps drawn from a gamma distribution with shape `burstiness`.
    Gamma,
    /// Equal gaps.
    Constant,
    /// As `gamma`, drawn by NumPy's `RandomState(seed).gamma`: the trace that `vllm bench serve --seed` makes.
    NumpyGamma,
}

/// Rate r(t) goes from `request_rate` at the first arrival to `to` at the last.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ramp {
    pub shape: RampShape,
    /// Requests a second at the end; finite.
    pub to: Rate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RampShape {
    Linear,
    Exponential,
}

/// How input and output lengths are drawn around `input_len` and `output_len`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Lengths {
    Fixed,
    /// Uniform whole numbers within ±`ratio` of the mean, 0 <= ratio < 1.
    Uniform {
        ratio: f64,
    },
    /// As `uniform`, drawn by NumPy's `default_rng(seed).integers`, inputs first: the lengths of `vllm bench serve`.
    NumpyUniform {
        ratio: f64,
    },
    /// Log-normal with the given mean; `sigma` is the standard deviation of the logarithm.
    LogNormal {
        sigma: f64,
    },
    /// A CSV file with the columns `input_tokens` and `output_tokens`, used in order and over again.
    File {
        file: PathBuf,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum PromptKind {
    /// Tokens drawn evenly from the real vocabulary, special tokens left out.
    Random,
    /// Text cut to length with the model's tokenizer; each request starts at another place of it.
    Text {
        /// A UTF-8 file; none: a passage that comes with the program.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        file: Option<PathBuf>,
    },
    /// `period` random tokens over and over: what n-gram speculation guesses well.
    Repeat { period: usize },
}

/// Requests run before the measured ones, at the arm's own concurrency and lengths, in rounds, until step times are
/// stationary (`measure::warmup` has the rule). They are never mixed in; figures of the first round go to cold.csv.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WarmUp {
    /// Requests a round, at most as many as the measured run has; 0 turns warm-up off.
    pub prompts: Count,
    /// Most seconds of arrivals in a round: at a low rate a few requests reach the arm's own concurrency.
    pub max_arrivals_s: f64,
    /// Most rounds, stationary or not. Those after the first are short ([`LoadSpec::warmup_schedule`]).
    pub max_rounds: usize,
}

impl Default for WarmUp {
    fn default() -> Self {
        Self {
            prompts: Count::Rule(CountRule { per_seat: 2, min: 16, max: None, at_rate: None }),
            max_arrivals_s: 30.0,
            max_rounds: 4,
        }
    }
}

/// A recorded trace: arrival, input length and output length of each request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Replay {
    /// CSV or JSONL with this program's, Mooncake's, BurstGPT's or the Azure LLM traces' columns.
    pub file: PathBuf,
    /// Arrivals that many times as fast as recorded. A finite `request_rate` sets the mean rate instead.
    #[serde(default = "one")]
    pub speedup: f64,
}

fn one() -> f64 {
    1.0
}

impl LoadSpec {
    /// The same load with the files it names looked for in `folder` first ([`paths::find`]).
    pub fn with_files_in(&self, folder: &Path) -> Self {
        let mut load = self.clone();
        let files = [
            load.replay.as_mut().map(|replay| &mut replay.file),
            match &mut load.lengths {
                Lengths::File { file } => Some(file),
                _ => None,
            },
            match &mut load.prompt {
                PromptKind::Text { file } => file.as_mut(),
                _ => None,
            },
        ];
        for file in files.into_iter().flatten() {
            *file = paths::find(folder, file);
        }
        load
    }

    /// Requests that are asked for with that many seats. Of a replay: most rows of it; the trace may have fewer.
    pub fn requests(&self, seats: usize) -> usize {
        match self.prompts {
            Count::Rule(CountRule { at_rate: Some(count), .. }) if !self.request_rate.is_flood() => count,
            prompts => prompts.resolve(seats),
        }
    }

    pub fn sampling(&self) -> SamplingParams {
        SamplingParams { temperature: self.temperature, top_k: self.top_k, top_p: self.top_p }
    }

    /// Checks what can be said without the model.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the knob, its value and what is allowed.
    pub fn validate(&self) -> Result<()> {
        let check = |ok: bool, knob: &str, value: &dyn std::fmt::Display, allowed: &str| {
            if ok {
                return Ok(());
            }
            Err(Error::invalid(
                format!("{knob} = {value} is out of bounds"),
                format!("{knob} must be {allowed}"),
            ))
        };
        // (A rule's count has its bound once the seats are known.)
        for (name, count) in [("prompts", self.prompts), ("warmup.prompts", self.warmup.prompts)] {
            if let Count::Rule(CountRule { min, max: Some(max), .. }) = count {
                check(min <= max, &format!("{name}.max"), &max, &format!("its min, {min}, or more"))?;
            }
        }
        if self.replay.is_none() && matches!(self.prompts, Count::Trace(_)) {
            check(false, "prompts", &"all", "a number where there is no replay")?;
        }
        let prompts = self.requests(1);
        check((1..=MOST_REQUESTS).contains(&prompts), "prompts", &prompts, &up_to(MOST_REQUESTS))?;
        check(BURSTINESS.contains(&self.burstiness), "burstiness", &self.burstiness, "0.001 to 1000000")?;
        let clients = self.concurrency.unwrap_or(1);
        check((1..=MOST_REQUESTS).contains(&clients), "concurrency", &clients, &up_to(MOST_REQUESTS))?;
        let think_ok = (0.0..=LONGEST_PAUSE_S).contains(&self.think_time_s);
        check(think_ok, "think_time_s", &self.think_time_s, "0 to 1000000")?;
        for (knob, tokens) in [("input_len", self.input_len), ("output_len", self.output_len)] {
            check((1..=MOST_TOKENS).contains(&tokens), knob, &tokens, &up_to(MOST_TOKENS))?;
        }
        check(self.prefix_count > 0, "prefix_count", &self.prefix_count, "1 or more")?;
        let temperature_ok = (0.0..=HOTTEST).contains(&f64::from(self.temperature));
        check(temperature_ok, "temperature", &self.temperature, &format!("0 (greedy) to {HOTTEST}"))?;
        check(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", &self.top_p, "above 0 and at most 1")?;
        match self.lengths {
            Lengths::Uniform { ratio } | Lengths::NumpyUniform { ratio } => {
                check((0.0..1.0).contains(&ratio), "lengths.ratio", &ratio, "0 or more and below 1")?;
            }
            Lengths::LogNormal { sigma } => {
                check((0.0..=3.0).contains(&sigma), "lengths.sigma", &sigma, "0 to 3")?;
            }
            Lengths::Fixed | Lengths::File { .. } => {}
        }
        if let PromptKind::Repeat { period } = self.prompt {
            check((1..=MOST_TOKENS).contains(&period), "prompt.period", &period, &up_to(MOST_TOKENS))?;
        }
        let arrivals_s = self.warmup.max_arrivals_s;
        check(positive(arrivals_s), "warmup.max_arrivals_s", &arrivals_s, "a number of seconds above 0")?;
        let rounds = self.warmup.max_rounds;
        check(rounds <= MOST_ROUNDS, "warmup.max_rounds", &rounds, &format!("0 to {MOST_ROUNDS}"))?;
        if let Some(ramp) = self.ramp {
            check(!self.request_rate.is_flood(), "request_rate", &"inf", "finite when there is a ramp")?;
            check(!ramp.to.is_flood(), "ramp.to", &"inf", "a finite rate")?;
        }
        if let Some(replay) = &self.replay {
            check(positive(replay.speedup), "replay.speedup", &replay.speedup, "a number above 0")?;
            check(self.probe.is_none(), "probe", &"a table", "left out when there is a replay")?;
        }
        self.probe.as_ref().map_or(Ok(()), Probe::validate)
    }
}

fn up_to(most: usize) -> String {
    format!("1 to {most}")
}

fn positive(value: f64) -> bool {
    value > 0.0 && value.is_finite()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_every_kind_of_key_is_read() {
        let spec: LoadSpec = toml::from_str(
            r#"
            prompts = { per_seat = 4, min = 48 }
            request_rate = "inf"
            input_len = 512
            lengths = { kind = "numpy_uniform", ratio = 0.9 }
            prompt = { kind = "repeat", period = 16 }
            warmup = { prompts = { per_seat = 2, min = 16 } }
            slo = { ttft_p99 = 500 }
            "#,
        )
        .unwrap();
        assert_eq!([1, 4, 16, 64, 256].map(|cap| spec.prompts.resolve(cap)), [48, 48, 64, 256, 1024]);
        assert_eq!([1, 4, 16, 64, 256].map(|cap| spec.warmup.prompts.resolve(cap)), [16, 16, 32, 128, 512]);
        assert_eq!(spec.lengths, Lengths::NumpyUniform { ratio: 0.9 });
        spec.validate().unwrap();
        let again: LoadSpec = toml::from_str(&toml::to_string(&spec).unwrap()).unwrap();
        assert_eq!(again, spec);
    }

    #[test]
    fn seats_set_the_count_of_a_flood_alone() {
        let text = "prompts = { per_seat = 2, min = 48, max = 512, at_rate = 200 }";
        let flood: LoadSpec = toml::from_str(text).unwrap();
        let rate = LoadSpec { request_rate: Rate::new(2.0).unwrap(), ..flood.clone() };
        assert_eq!([16, 64, 512].map(|seats| flood.requests(seats)), [48, 128, 512]);
        assert_eq!([16, 64, 512].map(|seats| rate.requests(seats)), [200; 3]);
    }

    #[test]
    fn unknown_keys_are_errors_at_every_level() {
        for text in
            ["promts = 3", "ramp = { shape = \"linear\", to = 3, via = 2 }", "prompts = { per_seats = 4 }"]
        {
            assert!(toml::from_str::<LoadSpec>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn knobs_are_keys_of_the_table() {
        let json = serde_json::to_value(LoadSpec { concurrency: Some(4), ..Default::default() }).unwrap();
        for knob in LOAD_KNOBS {
            assert!(json.get(knob).is_some(), "{knob}");
        }
    }

    #[test]
    fn bounds_are_checked_and_named() {
        let wrong = |change: fn(&mut LoadSpec)| {
            let mut spec = LoadSpec::default();
            change(&mut spec);
            spec.validate().unwrap_err().to_string()
        };
        assert!(wrong(|spec| spec.burstiness = 0.0).contains("burstiness = 0"));
        assert!(wrong(|spec| spec.top_p = 1.5).contains("top_p"));
        assert!(wrong(|spec| spec.concurrency = Some(0)).contains("concurrency"));
        assert!(wrong(|spec| spec.lengths = Lengths::Uniform { ratio: 1.0 }).contains("ratio"));
        assert!(wrong(|spec| spec.output_len = 0).contains("output_len"));
        assert!(wrong(|spec| spec.output_len = 1 << 40).contains("output_len = 1099511627776"));
        assert!(wrong(|spec| spec.prompts = Count::Exact(1 << 40)).contains("prompts"));
        assert!(wrong(|spec| spec.concurrency = Some(1 << 40)).contains("concurrency"));
        assert!(wrong(|spec| spec.think_time_s = 1e18).contains("think_time_s"));
        assert!(wrong(|spec| spec.prompt = PromptKind::Repeat { period: 1 << 40 }).contains("prompt.period"));
        assert!(wrong(|spec| spec.warmup.max_rounds = 1 << 40).contains("warmup.max_rounds"));
        assert!(wrong(|spec| spec.temperature = 1e38).contains("temperature"));
        let unordered = CountRule { per_seat: 1, min: 5, max: Some(2), at_rate: None };
        assert!(LoadSpec { prompts: Count::Rule(unordered), ..Default::default() }.validate().is_err());
        assert!(wrong(|spec| spec.prompts = Count::Trace(WholeTrace::All)).contains("prompts = all"));
        let ramp = Ramp { shape: RampShape::Linear, to: Rate::new(4.0).unwrap() };
        assert!(LoadSpec { ramp: Some(ramp), ..Default::default() }.validate().is_err());
    }
}
