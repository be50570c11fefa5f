//! Samples a GPU's clocks, power and temperature in the background, through NVML.
//!
//! NVML is loaded at run time. Where it is absent there are no readings and the reason is said; nothing else changes.

use std::ffi::OsStr;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::{Device, Nvml};

use super::gpu_state::{GpuSample, GpuState, Throttle};
use crate::engine::device::{DeviceInfo, DeviceKind};

/// Which GPU to watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WhichGpu {
    /// In the order of the PCI bus, which is CUDA's only with `CUDA_DEVICE_ORDER=PCI_BUS_ID` and all GPUs visible.
    Index(u32),
    /// As CUDA prints it, `0000:3b:00.0`: safe whatever is visible.
    PciBusId(String),
}

impl WhichGpu {
    /// The GPU behind a device: by the PCI bus id among its facts, else by the number in `cuda:N`. `None` for devices
    /// that are no GPU.
    pub fn of(info: &DeviceInfo) -> Option<Self> {
        if info.kind != DeviceKind::Cuda {
            return None;
        }
        let bus_id = info.facts.iter().find(|(name, _)| name == PCI_BUS_ID).map(|(_, id)| id.clone());
        let ordinal = || info.id.rsplit(':').next().and_then(|number| number.parse().ok()).unwrap_or(0);
        Some(bus_id.map_or_else(|| Self::Index(ordinal()), Self::PciBusId))
    }
}

/// Name of the fact that tells GPUs apart.
pub const PCI_BUS_ID: &str = "PCI bus id";

pub struct GpuMonitor {
    stop: Sender<()>,
    thread: JoinHandle<(Vec<GpuSample>, Option<f64>)>,
}

impl GpuMonitor {
    /// Starts to sample every `interval`.
    ///
    /// # Errors
    /// The reason why there are no readings, as a sentence: no NVML, no such GPU, no thread.
    pub fn start(gpu: WhichGpu, interval: Duration) -> Result<Self, String> {
        let nvml = open().map_err(|error| format!("no GPU readings: {error}"))?;
        find(&nvml, &gpu).map_err(|error| format!("no GPU readings: {error}"))?;
        let (stop, stopped) = mpsc::channel();
        let sample = move || {
            let Ok(device) = find(&nvml, &gpu) else { return (Vec::new(), None) };
            let limit_w = device.enforced_power_limit().ok().map(watts);
            let start = Instant::now();
            let mut samples = Vec::new();
            loop {
                samples.push(read(&device, start.elapsed().as_secs_f64()));
                match stopped.recv_timeout(interval) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => {
                        samples.push(read(&device, start.elapsed().as_secs_f64()));
                        return (samples, limit_w);
                    }
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("gpu-monitor".to_string())
            .spawn(sample)
            .map_err(|error| format!("no GPU readings: {error}"))?;
        Ok(Self { stop, thread })
    }

    /// Takes a last reading and ends. `None` when the GPU went away.
    pub fn stop(self) -> Option<GpuState> {
        // A thread that has already ended has dropped its end; there is nothing to tell it then.
        self.stop.send(()).ok();
        let (samples, limit_w) = self.thread.join().ok()?;
        GpuState::of(&samples, limit_w)
    }
}

/// Systems without development files have only the versioned name.
fn open() -> Result<Nvml, nvml_wrapper::error::NvmlError> {
    Nvml::builder().lib_path(OsStr::new("libnvidia-ml.so.1")).init().or_else(|_| Nvml::init())
}

fn find<'a>(nvml: &'a Nvml, gpu: &WhichGpu) -> Result<Device<'a>, nvml_wrapper::error::NvmlError> {
    match gpu {
        WhichGpu::Index(index) => nvml.device_by_index(*index),
        WhichGpu::PciBusId(id) => nvml.device_by_pci_bus_id(id.as_str()),
    }
}

fn read(device: &Device, at_s: f64) -> GpuSample {
    GpuSample {
        at_s,
        sm_mhz: device.clock_info(Clock::SM).ok(),
        memory_mhz: device.clock_info(Clock::Memory).ok(),
        power_w: device.power_usage().ok().map(watts),
        temperature_c: device.temperature(TemperatureSensor::Gpu).ok(),
        throttle: device.current_throttle_reasons().map_or(Throttle::default(), throttle),
    }
}

fn watts(milliwatts: u32) -> f64 {
    f64::from(milliwatts) / 1e3
}

fn throttle(reasons: ThrottleReasons) -> Throttle {
    Throttle {
        power: reasons.contains(ThrottleReasons::SW_POWER_CAP),
        thermal: reasons
            .intersects(ThrottleReasons::SW_THERMAL_SLOWDOWN | ThrottleReasons::HW_THERMAL_SLOWDOWN),
        hardware: reasons.intersects(ThrottleReasons::HW_SLOWDOWN | ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs with and without a GPU: either there are readings, or a sentence says why not.
    #[test]
    fn there_are_readings_or_a_reason() {
        match GpuMonitor::start(WhichGpu::Index(0), Duration::from_millis(5)) {
            Ok(monitor) => {
                std::thread::sleep(Duration::from_millis(50));
                let state = monitor.stop().unwrap();
                assert!(state.samples >= 2 && state.sm_mhz_median.is_some(), "{state:?}");
            }
            Err(reason) => assert!(reason.starts_with("no GPU readings: "), "{reason}"),
        }
    }

    #[test]
    fn the_gpu_is_found_by_its_bus_then_by_its_number() {
        let mut info = DeviceInfo {
            kind: DeviceKind::Cuda,
            id: "cuda:2".to_string(),
            name: String::new(),
            memory_bytes: 0,
            facts: Vec::new(),
        };
        assert_eq!(WhichGpu::of(&info), Some(WhichGpu::Index(2)));
        info.facts.push((PCI_BUS_ID.to_string(), "0000:3b:00.0".to_string()));
        assert_eq!(WhichGpu::of(&info), Some(WhichGpu::PciBusId("0000:3b:00.0".to_string())));
        info.kind = DeviceKind::Cpu;
        assert_eq!(WhichGpu::of(&info), None);
    }

    #[test]
    fn only_slowdowns_count_as_throttling() {
        assert!(!throttle(ThrottleReasons::GPU_IDLE | ThrottleReasons::APPLICATIONS_CLOCKS_SETTING).any());
        assert!(throttle(ThrottleReasons::SW_POWER_CAP).power);
        assert!(throttle(ThrottleReasons::HW_THERMAL_SLOWDOWN).thermal);
    }
}
