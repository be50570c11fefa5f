//! `inferwall doctor`: what this machine has, and how fast it is.

use std::time::Duration;

use clap::Args;
use serde_json::{Map, Value, json};

use super::output;
use crate::Result;
use crate::engine::account::Ceilings;
use crate::engine::device::cpu::CpuDevice;
use crate::engine::device::{Device, cuda};
use crate::hardware;
use crate::measure::roofs;
use crate::numbers::{bytes, number};
use crate::report::format::Format;
use crate::report::table;
use crate::results::record::build_id;

#[derive(Debug, Args)]
pub struct DoctorFlags {
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,

    /// Look, but measure nothing
    #[arg(long)]
    no_measure: bool,
}

/// One line of the answer: (about what, what, value).
type Line = (String, String, String);

/// Libraries that the CUDA device opens if they are there, the names they go by, and what their lack means.
const LIBRARIES: [(&str, &[&str], &str); 2] = [
    (
        "cuBLASLt",
        &cuda::cublaslt::NAMES,
        "not found: products of many rows run on the program's own kernels, slower ones on most GPUs; pip install nvidia-cublas",
    ),
    (
        "CUPTI",
        &cuda::cupti::NAMES,
        "not found: --trace times kernels by events, one by one; pip install nvidia-cuda-cupti",
    ),
];

impl DoctorFlags {
    /// # Errors
    /// Only a stdout that cannot be written to: what is missing is what it reports.
    pub fn run(self) -> Result<()> {
        let mut lines: Vec<Line> = vec![line("inferwall", "build", build_id())];
        self.cpu(&mut lines);
        self.cuda(&mut lines);
        match self.format {
            Format::Json => {
                let mut parts: Map<String, Value> = Map::new();
                for (part, key, value) in lines {
                    let entry = parts.entry(part).or_insert_with(|| json!({}));
                    if let Some(object) = entry.as_object_mut() {
                        object.insert(key, Value::String(value));
                    }
                }
                output::data(&(serde_json::to_string_pretty(&parts).unwrap_or_default() + "\n"))
            }
            format => {
                let rows: Vec<Vec<String>> =
                    lines.into_iter().map(|(part, key, value)| vec![part, key, value]).collect();
                output::data(&table::render(format, &["part", "what", "found"], &rows, &[])?)
            }
        }
    }

    fn cpu(&self, lines: &mut Vec<Line>) {
        let mut device = match CpuDevice::new(None) {
            Ok(device) => device,
            Err(error) => return lines.push(line("cpu", "device", error.to_string())),
        };
        self.device("cpu", &mut device, lines);
    }

    fn cuda(&self, lines: &mut Vec<Line>) {
        let gpus = match cuda::probe() {
            Ok(gpus) if gpus.is_empty() => return lines.push(line("cuda", "GPU", "none found".to_string())),
            Ok(gpus) => gpus,
            Err(error) => {
                lines.push(line("cuda", "GPU", sentence(&error)));
                Vec::new()
            }
        };
        let driver = gpus.first().map(|gpu| gpu.driver);
        lines.push(line(
            "cuda",
            "NVRTC",
            match cuda::nvrtc::Nvrtc::find(driver) {
                Ok(nvrtc) => format!("{}.{} ({})", nvrtc.version.0, nvrtc.version.1, nvrtc.path.display()),
                Err(error) => sentence(&error),
            },
        ));
        for (name, files, lack) in LIBRARIES {
            let found = cuda::libraries::open(files).map(|(_, path)| path.display().to_string());
            lines.push(line("cuda", name, found.unwrap_or_else(|| lack.to_string())));
        }
        for gpu in gpus {
            let part = format!("cuda:{}", gpu.ordinal);
            match cuda::CudaDevice::new(gpu.ordinal) {
                Ok(mut device) => self.device(&part, &mut device, lines),
                Err(error) => lines.push(line(&part, &gpu.name, sentence(&error))),
            }
        }
    }

    fn device(&self, part: &str, device: &mut dyn Device, lines: &mut Vec<Line>) {
        let info = device.info().clone();
        lines.push(line(part, "name", info.name.clone()));
        let free = bytes(device.free_bytes() as f64);
        lines.push(line(part, "memory", format!("{}, {free} free", bytes(info.memory_bytes as f64))));
        for (key, value) in info.facts.iter().filter(|(_, value)| *value != info.name) {
            lines.push(line(part, key, value.clone()));
        }
        if self.no_measure {
            return;
        }
        output::note(&format!("measuring {} ...", info.name));
        match measure(device) {
            Ok(None) => {}
            Ok(Some((ceilings, range))) => {
                ceiling_lines(part, &ceilings, range, lines);
                if let Some(gpu) = hardware::by_product_name(&info.name) {
                    lines.push(line(
                        part,
                        "data sheet",
                        format!(
                            "{}/s, {} GFLOP/s dense fp16",
                            bytes(gpu.sheet_bytes_per_s),
                            number(gpu.sheet_flops_per_s / 1e9)
                        ),
                    ));
                }
            }
            Err(error) => lines.push(line(part, "ceilings", sentence(&error))),
        }
    }
}

/// Short measurements after the long one, and the pauses before them: where ceilings wander, moments apart show it.
const AGAIN: usize = 4;
const PAUSE: Duration = Duration::from_millis(400);

/// The best of several measurements where ceilings wander, with the least and the most read bandwidth among them;
/// `None` for a device without ceilings.
fn measure(device: &mut dyn Device) -> Result<Option<(Ceilings, (f64, f64))>> {
    let Some(mut best) = device.ceilings()? else { return Ok(None) };
    let mut range = (best.read_bytes_per_s, best.read_bytes_per_s);
    for _ in 0..AGAIN {
        std::thread::sleep(PAUSE);
        let Some(now) = device.ceilings_now()? else { break };
        range = (range.0.min(now.read_bytes_per_s), range.1.max(now.read_bytes_per_s));
        best = best.best_of(&now);
    }
    Ok(Some((best, range)))
}

fn ceiling_lines(part: &str, ceilings: &Ceilings, (least, most): (f64, f64), lines: &mut Vec<Line>) {
    let wandered = if roofs::far(least, most) {
        format!(
            " at best, {}/s at another moment: other programs or machines use this memory too",
            bytes(least)
        )
    } else {
        String::new()
    };
    let read = bytes(ceilings.read_bytes_per_s);
    lines.push(line(part, "read bandwidth", format!("{read}/s measured{wandered}")));
    lines.push(line(
        part,
        "copy bandwidth",
        format!("{}/s measured (read plus written)", bytes(ceilings.copy_bytes_per_s)),
    ));
    lines.push(line(part, "arithmetic", format!("{} GFLOP/s measured", number(ceilings.flops_per_s / 1e9))));
    if ceilings.launch_s > 0.0 {
        lines.push(line(part, "launch", format!("{} us", number(ceilings.launch_s * 1e6))));
    }
}

fn line(part: &str, key: &str, value: String) -> Line {
    (part.to_string(), key.to_string(), value)
}

fn sentence(error: &crate::Error) -> String {
    if error.hint().is_empty() { error.to_string() } else { format!("{error}; {}", error.hint()) }
}
