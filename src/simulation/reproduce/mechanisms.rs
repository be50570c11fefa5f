//! The mechanisms behind the series' figures, each shown by switching it off.

use serde::Serialize;

use super::plan::{self, PlannedArm};
use super::{report::number, run_arm};
use crate::engine::config::KvLayout;
use crate::engine::device::sim::{Figure, SimDevice};
use crate::simulation::SimulatedRun;
use crate::{Error, Result};

/// One figure with a mechanism and without it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Mechanism {
    pub name: &'static str,
    pub figure: &'static str,
    pub published: &'static str,
    pub with: String,
    pub without: String,
}

fn arm(part: u32, name: &str) -> Result<PlannedArm> {
    plan::arms(part)?
        .into_iter()
        .find(|arm| arm.name == name)
        .ok_or_else(|| Error::bug(format!("the series' plan has no arm `{name}`")))
}

fn figure(arm: &PlannedArm, device: &SimDevice, seed: u64, metric: &str) -> Result<f64> {
    Ok(run_arm(arm, device, seed)?.0.get(metric).copied().unwrap_or(f64::NAN))
}

/// Every switch of the parts asked for.
///
/// # Errors
/// A device or load that cannot run the plan.
pub fn run(parts: &[u32], device: &SimDevice, seed: u64) -> Result<Vec<Mechanism>> {
    let mut all = Vec::new();
    if parts.contains(&1) {
        all.extend([valley(device, seed)?, dip(device, seed)?, queue_depth(device, seed)?]);
    }
    if parts.contains(&2) {
        all.push(restart(device, seed)?);
    }
    if parts.contains(&3) {
        all.extend([pool_limit(device, seed)?, per_sequence(device, seed)?]);
    }
    if parts.contains(&5) {
        all.push(growing_requests(device, seed)?);
    }
    if parts.contains(&7) {
        all.push(state_checkpoints(device, seed)?);
    }
    Ok(all)
}

/// The valley of throughput at 8 to 12 requests/s, by the state cost of mixed steps.
fn valley(device: &SimDevice, seed: u64) -> Result<Mechanism> {
    let throughputs = |device: &SimDevice| -> Result<String> {
        let at = |name: &str| figure(&arm(1, name)?, device, seed, "request_throughput");
        let (ten, flood) = (at("rate 10")?, at("rate inf")?);
        Ok(format!("{ten:.2} / {flood:.2} ({:+.0} %)", (ten / flood - 1.0) * 100.0))
    };
    Ok(Mechanism {
        name: "states cost 4.5 times in a step with a prefill (1 when off)",
        figure: "requests/s at rate 10 / flood",
        published: "6.22 / 8.53 (-27 %)",
        with: throughputs(device)?,
        without: throughputs(&device.with_figure(Figure::MixedStateFactor, 1.0))?,
    })
}

/// The dip from rate 8 to 10, over other arrival seeds.
fn dip(device: &SimDevice, seed: u64) -> Result<Mechanism> {
    const SEEDS: u64 = 20;
    let change = |seed: u64| -> Result<f64> {
        let at = |name: &str| figure(&arm(1, name)?, device, seed, "request_throughput");
        Ok(at("rate 10")? / at("rate 8")? - 1.0)
    };
    let this = change(seed)?;
    let mut others = Vec::new();
    for other in 1..=SEEDS {
        others.push(change(seed + other)?);
    }
    others.sort_by(f64::total_cmp);
    let fall = others.iter().filter(|change| **change < 0.0).count();
    let (low, high) = (others[0] * 100.0, others[others.len() - 1] * 100.0);
    Ok(Mechanism {
        name: "the published arrival trace (20 other seeds when off)",
        figure: "change of requests/s from rate 8 to 10",
        published: "-2.4 %",
        with: format!("{:+.1} %", this * 100.0),
        without: format!("{low:+.1} to {high:+.1} %, below 0 in {fall} of {SEEDS}"),
    })
}

/// Two steps in flight against one.
fn queue_depth(device: &SimDevice, seed: u64) -> Result<Mechanism> {
    let mut planned = arm(1, "rate 6")?;
    let with = figure(&planned, device, seed, "ttft_p50_ms")?;
    planned.engine.async_scheduling = Some(1);
    let without = figure(&planned, device, seed, "ttft_p50_ms")?;
    Ok(Mechanism {
        name: "a step is queued behind the running one (async depth 2; 1 when off)",
        figure: "TTFT p50 ms at rate 6",
        published: "198",
        with: number(with),
        without: format!("{} ({:+.0} %)", number(without), (without / with - 1.0) * 100.0),
    })
}

/// The p99 of the light injection over all tokens, by how long the victims' clients take to ask again.
fn restart(device: &SimDevice, seed: u64) -> Result<Mechanism> {
    const RESTART_MS: [u32; 4] = [10, 20, 30, 40];
    let mut planned = arm(2, "chunked off, light")?;
    let with = figure(&planned, device, seed, "victims_all_p99_ms")?;
    let mut others = Vec::new();
    for restart_ms in RESTART_MS {
        if let Some(probe) = &mut planned.load.probe {
            probe.victim_restart_s = f64::from(restart_ms) / 1e3;
        }
        others.push(figure(&planned, device, seed, "victims_all_p99_ms")?);
    }
    others.sort_by(f64::total_cmp);
    Ok(Mechanism {
        name: "victims ask again 5 ms after an answer (10 to 40 ms when off)",
        figure: "p99 ms of all their tokens, light, chunking off",
        published: "102.8",
        with: number(with),
        without: format!("{} to {}", number(others[0]), number(others[others.len() - 1])),
    })
}

/// The pool's 146 seats against no limit below the cap of 256.
fn pool_limit(device: &SimDevice, seed: u64) -> Result<Mechanism> {
    let mut planned = arm(3, "cap 256")?;
    let throughput_and_seats = |planned: &PlannedArm, device: &SimDevice| -> Result<String> {
        let metrics = run_arm(planned, device, seed)?.0;
        let get = |name| metrics.get(name).copied().unwrap_or(f64::NAN);
        Ok(format!("{} at {}", number(get("output_throughput")), number(get("running_max"))))
    };
    let with = throughput_and_seats(&planned, device)?;
    planned.engine.kv_blocks = Some(256 * 4 + 1);
    let without = throughput_and_seats(&planned, &device.with_figure(Figure::Gb, 48.0))?;
    Ok(Mechanism {
        name: "a pool of 586 blocks (one for 256 seats when off)",
        figure: "tok/s at cap 256, and most running",
        published: "1,091 at 146",
        with,
        without,
    })
}

/// What a sequence adds to a decode step: state, KV and compute.
fn per_sequence(device: &SimDevice, seed: u64) -> Result<Mechanism> {
    let step = |name: &str| -> Result<(f64, SimulatedRun)> {
        let run = arm(1, name)?.simulated(seed)?.run(device)?;
        let batch = run.record.steps.iter().map(|step| step.report.decode_sequences).max().unwrap_or(1);
        Ok((batch as f64, run))
    };
    let (batch, run) = step("decode batch 64")?;
    let layout = arm(1, "decode batch 64")?.simulated(seed)?.layout;
    let parameters = device.parameters(&layout);
    let costs = &run.costs;
    let state_ms = 2.0 * costs.state_bytes_per_sequence as f64 / parameters.read_bytes_per_s * 1e3;
    let full = run.record.steps.iter().filter(|step| step.report.decode_sequences as f64 == batch);
    let kv_bytes = full.clone().map(|step| step.report.cost.bytes.kv).max().unwrap_or(0);
    let kv_ms = kv_bytes as f64 / batch / parameters.read_bytes_per_s * 1e3;
    let stream_s = (costs.layer_weight_bytes + costs.head_weight_bytes) as f64 / parameters.read_bytes_per_s;
    let flops = batch * (costs.layer_flops_per_token + costs.head_flops_per_row) as f64;
    let compute_ms = (stream_s.hypot(flops / parameters.flops_per_s) - stream_s) / batch * 1e3;
    let total = state_ms + kv_ms + compute_ms;
    let share = |part: f64| format!("{:.0} %", part / total * 100.0);
    Ok(Mechanism {
        name: "what each sequence adds to a decode step at batch 64",
        figure: "ms: state + KV + compute",
        published: "0.31 in all",
        with: format!("{state_ms:.3} + {kv_ms:.3} + {compute_ms:.3} = {total:.3}"),
        without: format!("state {}, KV {}, compute {}", share(state_ms), share(kv_ms), share(compute_ms)),
    })
}

/// 104 running, then 97: requests that grow by a block past 1,056 tokens.
fn growing_requests(device: &SimDevice, seed: u64) -> Result<Mechanism> {
    let mut planned = arm(5, "4B natural, 1024/512")?;
    let running = |planned: &PlannedArm| -> Result<String> {
        let metrics = run_arm(planned, device, seed)?.0;
        let get = |name| number(metrics.get(name).copied().unwrap_or(f64::NAN));
        Ok(format!("{}, then {}; {}", get("running_max"), get("running_settled"), get("preemptions")))
    };
    let with = running(&planned)?;
    planned.load.output_len = 32;
    let without = running(&planned)?;
    Ok(Mechanism {
        name: "answers that cross a block (1,024 + 512 tokens; 1,024 + 32 when off)",
        figure: "most running, then; preemptions",
        published: "104, then 97; 17",
        with,
        without,
    })
}

/// State checkpoints of drafts take the seats; verification and host work the rest.
fn state_checkpoints(device: &SimDevice, seed: u64) -> Result<Mechanism> {
    let mut planned = arm(7, "k5, rate inf")?;
    let with = figure(&planned, device, seed, "output_throughput")?;
    // As many seats as without speculation: 146 requests of 19 blocks.
    planned.engine.kv_blocks = Some(146 * 19 + 1);
    planned.engine.kv_layout = KvLayout::Unified;
    let without = figure(&planned, &device.with_figure(Figure::Gb, 96.0), seed, "output_throughput")?;
    Ok(Mechanism {
        name: "state checkpoints of five drafts take blocks (a pool for 146 requests when off)",
        figure: "tok/s of the flood with k = 5",
        published: "473 (1,096 without speculation)",
        with: number(with),
        without: number(without),
    })
}
