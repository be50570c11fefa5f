//! `--device`, turned into a device in one place: what `auto` picks, and why.

use crate::engine::device::cpu::{CpuDevice, MEMORY_LACK};
use crate::engine::device::sim::SimDevice;
use crate::engine::device::sim::fixed::FixedDevice;
use crate::engine::device::{Device, DeviceKind, cuda};
use crate::experiment::spec::Rig;
use crate::{Error, Result};

/// The model a command works on when none is named.
pub fn default_model(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Cpu => "synthetic:demo",
        DeviceKind::Cuda | DeviceKind::Sim => "synthetic:qwen3.5-4b",
    }
}

/// Where the system does not say how much memory is free, checks of what fits are only as good as what stands in for it.
pub fn memory_warning(device: &dyn Device) -> Option<String> {
    let (_, how) = device.info().facts.iter().find(|(key, _)| key == MEMORY_LACK)?;
    Some(format!("memory is counted {how}; set gpu_memory where that is wrong"))
}

pub struct Chosen {
    pub device: Box<dyn Device>,
    /// Why `auto` picked it; empty when it was named.
    pub reason: String,
}

/// What a device's name stands for, before it is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Name {
    Cpu,
    Cuda(i32),
    Sim(String),
}

fn resolve(name: &str) -> Result<(Name, String)> {
    match name {
        "" | "auto" => Ok(match cuda::probe() {
            Ok(gpus) if !gpus.is_empty() => (Name::Cuda(0), "auto: a usable GPU was found".to_string()),
            Ok(_) => (Name::Cpu, "auto: no GPU was found".to_string()),
            Err(error) => (Name::Cpu, format!("auto: no usable GPU ({error})")),
        }),
        "cpu" => Ok((Name::Cpu, String::new())),
        "cuda" => Ok((Name::Cuda(0), String::new())),
        _ if name.starts_with("sim:") => Ok((Name::Sim(name.to_string()), String::new())),
        _ => match name.strip_prefix("cuda:").map(str::parse) {
            Some(Ok(ordinal)) if ordinal >= 0 => Ok((Name::Cuda(ordinal), String::new())),
            _ => Err(Error::invalid(
                format!("unknown device `{name}`"),
                "devices: auto, cpu, cuda, cuda:N, sim:GPU (such as sim:a10g), sim:series, sim:fixed",
            )),
        },
    }
}

/// The class and id of a rig without opening its device, and why it was chosen.
///
/// # Errors
/// [`Error::Invalid`] for a name that is none.
pub fn rig(name: &str) -> Result<(Rig, String)> {
    let (name, reason) = resolve(name)?;
    let rig = match name {
        Name::Cpu => Rig { kind: DeviceKind::Cpu, id: "cpu".to_string() },
        Name::Cuda(ordinal) => Rig { kind: DeviceKind::Cuda, id: format!("cuda:{ordinal}") },
        // (Parsing a simulated device costs nothing and checks the name.)
        Name::Sim(id) => Rig { kind: DeviceKind::Sim, id: open_sim(&id)?.info().id.clone() },
    };
    Ok((rig, reason))
}

/// Opens the device. `threads` is for the CPU alone.
///
/// # Errors
/// What the device says is missing.
pub fn open(name: &str, threads: Option<usize>) -> Result<Chosen> {
    let (name, reason) = resolve(name)?;
    let device: Box<dyn Device> = match name {
        Name::Cpu => Box::new(CpuDevice::new(threads)?),
        Name::Cuda(ordinal) => Box::new(cuda::CudaDevice::new(ordinal)?),
        Name::Sim(id) => open_sim(&id)?,
    };
    Ok(Chosen { device, reason })
}

fn open_sim(id: &str) -> Result<Box<dyn Device>> {
    if id.starts_with("sim:fixed") {
        return Ok(Box::new(FixedDevice::parse(id)?));
    }
    Ok(Box::new(SimDevice::parse(id)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_resolved_or_refused() {
        assert_eq!(rig("cpu").unwrap().0.kind, DeviceKind::Cpu);
        assert_eq!(rig("sim:fixed:2").unwrap().0.kind, DeviceKind::Sim);
        for name in ["gpu", "cuda:x", "sim:nothing"] {
            assert_eq!(rig(name).unwrap_err().exit_code(), 2, "{name}");
        }
    }
}
