//! Times steps of a checkpoint on the CPU device, as asked on stdin, so that another program can measure in turns with it:
//! `cargo run --release --example step_times -- MODEL [f32|bf16|int16]`.
//!
//! `prefill TOKENS` answers with the milliseconds of one prompt; `decode SEQUENCES STEPS` with those of the fastest
//! step that gives each of them one token, at contexts from 128 on. Answers are one line each; the first line says what
//! was loaded.

#[path = "../benches/cpu_rig/mod.rs"]
mod cpu_rig;

use std::io::{BufRead, Write};

use cpu_rig::{CONTEXT, decode, prefill, prefill_slot};
use inferwall::engine::clock::Clock;
use inferwall::engine::config::{CpuMath, EngineConfig};
use inferwall::engine::device::cpu::CpuDevice;
use inferwall::engine::device::{Device, LoadOptions, Session};
use inferwall::engine::model::{OpenOptions, open};
use inferwall::{Error, Result};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let usage = || Error::invalid("no model is named", "step_times MODEL [f32|bf16|int16]");
    let opened = open(&arguments.next().ok_or_else(usage)?.parse()?, &OpenOptions::default())?;
    let cpu_math = match arguments.next().as_deref() {
        Some("bf16") => CpuMath::Bf16,
        Some("int16") => CpuMath::Int16,
        None | Some("f32") => CpuMath::F32,
        Some(other) => {
            return Err(Error::invalid(format!("no arithmetic is called `{other}`"), "f32, bf16 or int16"));
        }
    };
    let mut device = CpuDevice::new(None)?;
    let options = LoadOptions { cpu_math, threads: None };
    let model = device.load(&opened.layout, &opened.weights, &options, &mut |_| {})?;
    let plan = cpu_rig::plan(&opened.layout.spec);
    let mut session = model.open(&plan, &EngineConfig::default(), &Clock::real())?;
    println!("{:.1} MB streamed a step", opened.layout.streamed_bytes() as f64 / 1e6);
    if opened.layout.spec.is_hybrid() {
        return Err(Error::invalid(
            "steps are timed at the same contexts again and again, which a recurrent state can't go back to",
            "name a model of attention layers only",
        ));
    }
    // Sequences that have a prompt in the cache.
    let mut filled = 0;
    for line in std::io::stdin().lock().lines().map_while(|line| line.ok()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<usize>().ok());
        let seconds = match (words.first().copied(), number(1), number(2)) {
            (Some("prefill"), Some(tokens), _) => {
                filled = 0;
                prefill(session.as_mut(), tokens, false).0
            }
            (Some("decode"), Some(sequences), Some(steps)) => {
                for slot in filled..sequences {
                    prefill_slot(session.as_mut(), slot, CONTEXT);
                }
                filled = filled.max(sequences);
                fastest_step(session.as_mut(), sequences, steps)
            }
            _ => {
                return Err(Error::invalid(
                    format!("asked: {line}"),
                    "prefill TOKENS or decode SEQUENCES STEPS",
                ));
            }
        };
        println!("{}", 1e3 * seconds);
        let _ = std::io::stdout().flush();
    }
    Ok(())
}

fn fastest_step(session: &mut dyn Session, sequences: usize, steps: usize) -> f64 {
    let step = |step: usize| decode(session, sequences, CONTEXT + step, false).0;
    (0..steps.max(1)).map(step).fold(f64::INFINITY, f64::min)
}
