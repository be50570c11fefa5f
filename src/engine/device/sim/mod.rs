//! Simulated GPUs: no arithmetic, no weights. The same scheduler, caches, workload and measurement as on a real
//! device run on a virtual clock, and each step takes what its bytes and FLOPs cost on a named GPU.
//!
//! `sim:<gpu>` is a GPU of [`crate::hardware`] run by this engine; `sim:custom` one whose figures are given;
//! `sim:series` the series' own rig. Any figure may be set after a second colon: `sim:h100:gb_per_s=6700,gb=160`.

pub mod cost;
pub mod fixed;
mod noise;
pub mod series;
mod session;
mod text;

use serde::Serialize;

pub use cost::{ByteFactors, SimParameters, StepExtras, StepTime};
pub use text::DraftModel;

use self::session::SimModel;
use super::deferred_states::{WRITE_INTERVAL, defers_states};
use super::{
    Device, DeviceInfo, DeviceKind, LoadOptions, LoadProgress, Model, choose_last_layer, refuse_cuda_kernels,
    refuse_last_layer,
};
use crate::engine::account::Ceilings;
use crate::engine::clock::Clock;
use crate::engine::config::{CacheDtype, EngineConfig};
use crate::engine::model::layout::ModelLayout;
use crate::engine::model::weights::WeightSource;
use crate::hardware::{self, Gpu, LAUNCH_S};
use crate::{Error, Result};

/// A figure of a simulated GPU that may be given with the device's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Figure {
    GbPerS,
    Tflops,
    Gb,
    LaunchUs,
    FixedMs,
    MixedMs,
    MixedStateFactor,
    RowUs,
    /// What if a class of bytes were so many times as large? 0.5 is the counterfactual of "twice the bandwidth for it".
    WeightsFactor,
    StateFactor,
    KvFactor,
}

impl Figure {
    pub const ALL: [(&'static str, Self); 11] = [
        ("gb_per_s", Self::GbPerS),
        ("tflops", Self::Tflops),
        ("gb", Self::Gb),
        ("launch_us", Self::LaunchUs),
        ("fixed_ms", Self::FixedMs),
        ("mixed_ms", Self::MixedMs),
        ("mixed_state_factor", Self::MixedStateFactor),
        ("row_us", Self::RowUs),
        ("weights_factor", Self::WeightsFactor),
        ("state_factor", Self::StateFactor),
        ("kv_factor", Self::KvFactor),
    ];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, figure)| *figure == self).map_or("", |(name, _)| name)
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Base {
    Gpu(&'static Gpu),
    Custom,
    Series(&'static Gpu),
}

/// A GPU that exists as a handful of figures.
#[derive(Debug, Clone)]
pub struct SimDevice {
    info: DeviceInfo,
    base: Base,
    figures: Vec<(Figure, f64)>,
    drafts: DraftModel,
}

impl SimDevice {
    /// Ceilings of the GPU that is simulated, or as the figures in the device's name say.
    pub fn nominal_ceilings(&self) -> Ceilings {
        let (bandwidth, rate) = match self.base {
            Base::Gpu(gpu) => (gpu.effective_bytes_per_s().value, gpu.effective_flops_per_s().value),
            // The data sheet's rate: what vLLM reaches of it differs by model.
            Base::Series(gpu) => (series::READ_BYTES_PER_S, gpu.sheet_flops_per_s),
            Base::Custom => (1e12, 1e14),
        };
        let read_bytes_per_s = self.figure(Figure::GbPerS).map_or(bandwidth, |value| value * 1e9);
        Ceilings {
            read_bytes_per_s,
            copy_bytes_per_s: read_bytes_per_s,
            flops_per_s: self.figure(Figure::Tflops).map_or(rate, |value| value * 1e12),
            launch_s: self.figure(Figure::LaunchUs).map_or(LAUNCH_S.value, |value| value * 1e-6),
            measured: false,
        }
    }

    /// Reads what follows `--device`: `sim:<gpu>`, `sim:custom:gb_per_s=..,tflops=..,gb=..`, `sim:series`, each with
    /// `:figure=value,...` after it if wanted.
    ///
    /// # Errors
    /// [`Error::Invalid`] on an unknown GPU or figure, a value that is no positive number, or a custom GPU without its
    /// three figures.
    pub fn parse(text: &str) -> Result<Self> {
        let name = text.strip_prefix("sim:").unwrap_or(text);
        let (gpu, figures) = name.split_once(':').unwrap_or((name, ""));
        let figures = parse_figures(text, figures)?;
        let base = match gpu {
            "series" => Base::Series(hardware::gpu("a10g")?),
            "custom" => {
                for needed in [Figure::GbPerS, Figure::Tflops, Figure::Gb] {
                    if !figures.iter().any(|(figure, _)| *figure == needed) {
                        return Err(Error::invalid(
                            format!("{text}: a custom GPU needs {}", needed.name()),
                            "for instance sim:custom:gb_per_s=1000,tflops=150,gb=48,launch_us=5",
                        ));
                    }
                }
                Base::Custom
            }
            _ => Base::Gpu(hardware::gpu(gpu).map_err(|error| {
                Error::invalid(format!("{text}: {error}"), format!("{}, series, custom", error.hint()))
            })?),
        };
        // One name for one GPU, however it was written.
        let id = match base {
            Base::Gpu(known) => name.replacen(gpu, known.id, 1),
            Base::Custom | Base::Series(_) => name.to_string(),
        };
        Ok(Self::new(format!("sim:{id}"), base, figures))
    }

    fn new(id: String, base: Base, figures: Vec<(Figure, f64)>) -> Self {
        let mut facts: Vec<(String, String)> = Vec::new();
        let (name, sheet_bytes) = match base {
            Base::Gpu(gpu) => {
                let (bandwidth, rate) = (gpu.effective_bytes_per_s(), gpu.effective_flops_per_s());
                facts.push((
                    "bandwidth".into(),
                    format!("{:.0} GB/s: {}", bandwidth.value / 1e9, bandwidth.source),
                ));
                facts.push(("rate".into(), format!("{:.1} TFLOP/s: {}", rate.value / 1e12, rate.source)));
                facts.push(("launch".into(), format!("{:.2} us: {}", LAUNCH_S.value * 1e6, LAUNCH_S.source)));
                facts.push(("data sheet".into(), gpu.sheet.into()));
                (format!("simulated {}", gpu.name), gpu.memory_bytes)
            }
            Base::Series(gpu) => {
                let sources = series::sources().into_iter();
                facts.extend(
                    sources
                        .map(|(name, figure)| (name.into(), format!("{}: {}", figure.value, figure.source))),
                );
                (format!("simulated {} run by vLLM 0.18 (the series' rig)", gpu.name), gpu.memory_bytes)
            }
            Base::Custom => ("simulated GPU of given figures".to_string(), 0),
        };
        for (figure, value) in &figures {
            facts.push((figure.name().into(), format!("{value}: given")));
        }
        let given = figures.iter().rev().find(|(figure, _)| *figure == Figure::Gb);
        let memory_bytes = given.map_or(sheet_bytes, |(_, gigabytes)| (gigabytes * 1e9) as u64);
        let drafts =
            DraftModel { repeat_rate: series::REPEAT_RATE, acceptance: series::DRAFT_ACCEPTANCE.to_vec() };
        let info = DeviceInfo { kind: DeviceKind::Sim, id, name, memory_bytes, facts };
        Self { info, base, figures, drafts }
    }

    /// The same device with one figure changed: what if it had twice the bandwidth?
    pub fn with_figure(&self, figure: Figure, value: f64) -> Self {
        let mut figures = self.figures.clone();
        figures.push((figure, value));
        let separator = if self.figures.is_empty() { ':' } else { ',' };
        let id = format!("{}{separator}{}={value}", self.info.id, figure.name());
        Self { drafts: self.drafts.clone(), ..Self::new(id, self.base, figures) }
    }

    pub fn is_series(&self) -> bool {
        matches!(self.base, Base::Series(_))
    }

    /// The parameters a step of this model is charged with.
    pub fn parameters(&self, layout: &ModelLayout) -> SimParameters {
        let mut parameters = match self.base {
            Base::Series(_) => series::parameters(layout),
            Base::Gpu(gpu) => {
                own_engine(gpu.effective_bytes_per_s().value, gpu.effective_flops_per_s().value)
            }
            // Its bandwidth and rate are among the figures.
            Base::Custom => own_engine(1e12, 1e14),
        };
        for &(figure, value) in &self.figures {
            match figure {
                Figure::GbPerS => parameters.read_bytes_per_s = value * 1e9,
                Figure::Tflops => parameters.flops_per_s = value * 1e12,
                Figure::Gb => {}
                Figure::LaunchUs => parameters.launch_s = value * 1e-6,
                Figure::FixedMs => parameters.step_fixed_s = value * 1e-3,
                Figure::MixedMs => parameters.mixed_step_s = value * 1e-3,
                Figure::MixedStateFactor => parameters.mixed_state_factor = value,
                Figure::RowUs => parameters.sampled_row_s = value * 1e-6,
                Figure::WeightsFactor => parameters.byte_factors.weights = value,
                Figure::StateFactor => parameters.byte_factors.state = value,
                Figure::KvFactor => parameters.byte_factors.kv = value,
            }
        }
        parameters
    }

    fn figure(&self, wanted: Figure) -> Option<f64> {
        self.figures.iter().rev().find(|(figure, _)| *figure == wanted).map(|(_, value)| *value)
    }
}

/// This engine on a GPU: decodes keep the recurrent kernel beside a prefill, sampling is fused with the head.
fn own_engine(read_bytes_per_s: f64, flops_per_s: f64) -> SimParameters {
    SimParameters {
        read_bytes_per_s,
        flops_per_s,
        delta_rule_in_rate: false,
        launch_s: LAUNCH_S.value,
        step_fixed_s: 0.0,
        mixed_step_s: 0.0,
        mixed_state_factor: 1.0,
        sampled_row_s: 0.0,
        speculation_host_s: 0.0,
        draft_step_s: 0.0,
        byte_factors: ByteFactors::default(),
    }
}

fn parse_figures(text: &str, figures: &str) -> Result<Vec<(Figure, f64)>> {
    let names: Vec<_> = Figure::ALL.iter().map(|(name, _)| *name).collect();
    let hint = || format!("figures are name=number, by comma: {}", names.join(", "));
    let mut seen = Vec::new();
    figures
        .split(',')
        .filter(|entry| !entry.is_empty())
        .map(|entry| {
            let (name, value) = entry
                .split_once('=')
                .ok_or_else(|| Error::invalid(format!("{text}: `{entry}` is not name=number"), hint()))?;
            let figure = Figure::ALL
                .iter()
                .find(|(known, _)| *known == name)
                .ok_or_else(|| Error::invalid(format!("{text}: unknown figure `{name}`"), hint()))?
                .1;
            let number: f64 = value
                .parse()
                .map_err(|_| Error::invalid(format!("{text}: {name}={value} is not a number"), hint()))?;
            let may_be_zero =
                matches!(figure, Figure::LaunchUs | Figure::FixedMs | Figure::MixedMs | Figure::RowUs);
            if !number.is_finite() || number < 0.0 || (number == 0.0 && !may_be_zero) {
                return Err(Error::invalid(
                    format!("{text}: {name}={value} is out of bounds"),
                    format!("{name} must be {}", if may_be_zero { "0 or more" } else { "above 0" }),
                ));
            }
            if seen.contains(&figure) {
                return Err(Error::invalid(
                    format!("{text}: {name} is given twice"),
                    "give each figure once",
                ));
            }
            seen.push(figure);
            Ok((figure, number))
        })
        .collect()
}

impl Device for SimDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn clock(&self) -> Clock {
        Clock::virtual_time()
    }

    fn free_bytes(&self) -> u64 {
        self.info.memory_bytes
    }

    fn ceilings(&mut self) -> Result<Option<Ceilings>> {
        Ok(Some(self.nominal_ceilings()))
    }

    fn default_dtypes(&self) -> (CacheDtype, CacheDtype) {
        (CacheDtype::F16, CacheDtype::F32)
    }

    fn default_async_scheduling(&self) -> usize {
        if self.is_series() { 2 } else { 1 }
    }

    fn configure(&self, layout: &ModelLayout, config: &mut EngineConfig) -> Result<()> {
        refuse_cuda_kernels(config, "a simulated GPU has none")?;
        if self.is_series() {
            refuse_last_layer(config, "vLLM, which this rig stands for, runs the last layer on all rows")?;
        } else {
            choose_last_layer(layout, config)?;
        }
        match (self.base, &layout.spec.delta_net) {
            (Base::Series(_), _) => series::configure(layout, config),
            (Base::Gpu(gpu), Some(delta)) if defers_states(gpu.capability, delta, config.state_dtype) => {
                config.state_write_interval.get_or_insert(WRITE_INTERVAL);
            }
            _ => {}
        }
        Ok(())
    }

    fn submission_delay_s(&self) -> (f64, f64) {
        if self.is_series() { (series::CLIENT_S, series::SUBMISSION_GAP_S) } else { (0.0, 0.0) }
    }

    /// Takes the shape and leaves the weights where they are.
    fn load(
        &mut self,
        layout: &ModelLayout,
        _source: &WeightSource,
        _options: &LoadOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Model>> {
        let total_bytes = layout.weight_bytes();
        progress(LoadProgress { done_bytes: total_bytes, total_bytes });
        Ok(Box::new(SimModel::new(layout.clone(), self.parameters(layout), self.drafts.clone())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::presets::synthetic_layout;

    #[test]
    fn figures_after_the_name_change_the_device() {
        let layout = synthetic_layout("qwen3.5-4b").unwrap();
        let device = SimDevice::parse("sim:h100:gb_per_s=6700,gb=160").unwrap();
        assert_eq!(device.parameters(&layout).read_bytes_per_s, 6.7e12);
        assert_eq!(device.nominal_ceilings().read_bytes_per_s, 6.7e12);
        assert_eq!(device.free_bytes(), 160_000_000_000);
        assert!(device.info().simulated());
    }

    #[test]
    fn a_custom_gpu_needs_its_three_figures() {
        let error = SimDevice::parse("sim:custom:gb_per_s=1000,gb=48").unwrap_err();
        assert!(error.to_string().contains("needs tflops"), "{error}");
        let custom = SimDevice::parse("sim:custom:gb_per_s=1000,gb=48,tflops=150,launch_us=0").unwrap();
        assert_eq!(custom.parameters(&synthetic_layout("demo").unwrap()).launch_s, 0.0);
    }

    #[test]
    fn bad_names_and_figures_are_refused_with_the_choices() {
        for (text, part) in [
            ("sim:h300", "no GPU `h300`"),
            ("sim:h100:speed=3", "unknown figure `speed`"),
            ("sim:h100:gb", "`gb` is not name=number"),
            ("sim:h100:gb=many", "gb=many is not a number"),
            ("sim:h100:gb=-1", "gb=-1 is out of bounds"),
            ("sim:h100:gb_per_s=0", "gb_per_s=0 is out of bounds"),
        ] {
            let error = SimDevice::parse(text).unwrap_err();
            assert!(error.to_string().contains(part), "{text}: {error}");
            assert_eq!(error.exit_code(), 2);
        }
    }
}
