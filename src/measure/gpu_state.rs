//! What the GPU itself did during a run: clocks, power, temperature, throttling; and whether the run is to be trusted.

use serde::Serialize;

/// One reading. What the driver does not tell is `None`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct GpuSample {
    /// Seconds from the start of sampling.
    pub at_s: f64,
    pub sm_mhz: Option<u32>,
    pub memory_mhz: Option<u32>,
    pub power_w: Option<f64>,
    pub temperature_c: Option<u32>,
    pub throttle: Throttle,
}

/// Reasons for which the driver lowered the clocks. Idling and clocks set by a person are not among them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Throttle {
    pub power: bool,
    pub thermal: bool,
    /// Slowdown by the hardware itself: heat, power brake, or a failing supply.
    pub hardware: bool,
}

impl Throttle {
    pub fn any(self) -> bool {
        self.power || self.thermal || self.hardware
    }
}

/// A run's readings in brief, for run.json.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GpuState {
    pub samples: usize,
    pub sm_mhz_min: Option<u32>,
    pub sm_mhz_median: Option<u32>,
    pub sm_mhz_max: Option<u32>,
    pub memory_mhz_median: Option<u32>,
    pub power_w_mean: Option<f64>,
    pub power_w_max: Option<f64>,
    pub power_limit_w: Option<f64>,
    pub temperature_c_start: Option<u32>,
    pub temperature_c_end: Option<u32>,
    pub temperature_c_max: Option<u32>,
    /// Share of readings with a reason to throttle, by power (the usual state of a GPU at full load) and otherwise.
    pub power_capped_share: f64,
    pub throttled_share: f64,
    /// Median SM clock of the last quarter of the readings over that of the first, minus 1.
    pub clock_drift: Option<f64>,
}

/// A clock that moved by more than this between the first and the last quarter makes early and late arms unequal.
const DRIFT: f64 = 0.03;
/// Thermal or hardware throttling in more than this share of the readings marks the run.
const THROTTLED: f64 = 0.02;

impl GpuState {
    /// `None` without readings.
    pub fn of(samples: &[GpuSample], power_limit_w: Option<f64>) -> Option<Self> {
        let (first, last) = (samples.first()?, samples.last()?);
        let clocks: Vec<u32> = samples.iter().filter_map(|sample| sample.sm_mhz).collect();
        let powers: Vec<f64> = samples.iter().filter_map(|sample| sample.power_w).collect();
        let share = |wanted: fn(Throttle) -> bool| {
            let count = samples.iter().filter(|sample| wanted(sample.throttle)).count();
            count as f64 / samples.len() as f64
        };
        let quarter = clocks.len().div_ceil(4);
        let drift = median(&clocks[..quarter])
            .zip(median(&clocks[clocks.len() - quarter..]))
            .filter(|(first, _)| *first > 0 && clocks.len() >= 8)
            .map(|(first, last)| f64::from(last) / f64::from(first) - 1.0);
        let memory: Vec<u32> = samples.iter().filter_map(|sample| sample.memory_mhz).collect();
        Some(Self {
            samples: samples.len(),
            sm_mhz_min: clocks.iter().min().copied(),
            sm_mhz_median: median(&clocks),
            sm_mhz_max: clocks.iter().max().copied(),
            memory_mhz_median: median(&memory),
            power_w_mean: (!powers.is_empty()).then(|| powers.iter().sum::<f64>() / powers.len() as f64),
            power_w_max: powers.iter().copied().max_by(f64::total_cmp),
            power_limit_w,
            temperature_c_start: first.temperature_c,
            temperature_c_end: last.temperature_c,
            temperature_c_max: samples.iter().filter_map(|sample| sample.temperature_c).max(),
            power_capped_share: share(|throttle| throttle.power),
            throttled_share: share(|throttle| throttle.thermal || throttle.hardware),
            clock_drift: drift,
        })
    }

    /// Name and value of each figure there is, for run.json.
    pub fn facts(&self) -> Vec<(String, String)> {
        let whole = |name: &str, value: Option<u32>| value.map(|value| (name.to_string(), value.to_string()));
        let watts =
            |name: &str, value: Option<f64>| value.map(|value| (name.to_string(), format!("{value:.0}")));
        let share = |name: &str, value: f64| Some((name.to_string(), format!("{value:.3}")));
        let facts = [
            whole("SM clock MHz, least", self.sm_mhz_min),
            whole("SM clock MHz, median", self.sm_mhz_median),
            whole("SM clock MHz, most", self.sm_mhz_max),
            whole("memory clock MHz, median", self.memory_mhz_median),
            watts("power W, mean", self.power_w_mean),
            watts("power W, most", self.power_w_max),
            watts("power limit W", self.power_limit_w),
            whole("temperature C, start", self.temperature_c_start),
            whole("temperature C, end", self.temperature_c_end),
            whole("temperature C, most", self.temperature_c_max),
            share("share of readings capped by power", self.power_capped_share),
            share("share of readings throttled", self.throttled_share),
            self.clock_drift.and_then(|drift| share("SM clock drift", drift)),
        ];
        facts.into_iter().flatten().collect()
    }

    /// What a reader must know before comparing arms of this run.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.throttled_share > THROTTLED {
            warnings.push(format!(
                "the GPU throttled by heat or hardware in {:.0} % of {} readings: figures are too low",
                self.throttled_share * 100.0,
                self.samples
            ));
        }
        if let Some(drift) = self.clock_drift.filter(|drift| drift.abs() > DRIFT) {
            warnings.push(format!(
                "the SM clock drifted by {:+.1} % from the first to the last quarter of the run: compare arms of the \
                 same repeat only",
                drift * 100.0
            ));
        }
        warnings
    }
}

fn median(values: &[u32]) -> Option<u32> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(clocks: impl Iterator<Item = u32>) -> Vec<GpuSample> {
        let sample = |(index, sm_mhz)| GpuSample {
            at_s: index as f64,
            sm_mhz: Some(sm_mhz),
            power_w: Some(300.0 + index as f64),
            temperature_c: Some(40 + index as u32),
            ..GpuSample::default()
        };
        clocks.enumerate().map(sample).collect()
    }

    #[test]
    fn a_level_run_has_no_warnings() {
        let state = GpuState::of(&samples((0..20).map(|_| 1980)), Some(700.0)).unwrap();
        assert_eq!(
            (state.sm_mhz_min, state.sm_mhz_max, state.clock_drift),
            (Some(1980), Some(1980), Some(0.0))
        );
        assert_eq!((state.temperature_c_start, state.temperature_c_end), (Some(40), Some(59)));
        assert_eq!((state.power_w_mean, state.power_w_max), (Some(309.5), Some(319.0)));
        assert!(state.warnings().is_empty());
        let facts = state.facts();
        assert!(facts.contains(&("power limit W".to_string(), "700".to_string())), "{facts:?}");
        assert!(!facts.iter().any(|(name, _)| name.contains("memory")), "what was not read is left out");
    }

    #[test]
    fn drift_and_throttling_are_marked() {
        let falling = GpuState::of(&samples((0..20).map(|index| 1980 - 10 * index)), None).unwrap();
        assert!(falling.warnings()[0].contains("drifted by -"), "{:?}", falling.warnings());
        let mut hot = samples((0..20).map(|_| 1980));
        hot[3].throttle.thermal = true;
        let state = GpuState::of(&hot, None).unwrap();
        assert_eq!(state.throttled_share, 0.05);
        assert!(state.warnings()[0].contains("throttled"));
        // A power cap is how a GPU at full load runs.
        hot[3].throttle = Throttle { power: true, ..Throttle::default() };
        assert!(GpuState::of(&hot, None).unwrap().warnings().is_empty());
    }

    #[test]
    fn readings_may_be_missing() {
        assert_eq!(GpuState::of(&[], None), None);
        let state = GpuState::of(&[GpuSample::default()], None).unwrap();
        assert_eq!((state.samples, state.sm_mhz_median, state.clock_drift), (1, None, None));
    }
}
