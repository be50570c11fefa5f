//! Rows of kernels.csv: where the time of a traced step went, kernel by kernel, each beside its own floor.
//!
//! A kernel may start while the one in front of it still runs, and then waits for it. What counts here is the time by which
//! a kernel moved the end of the step: from its start, or from the end of everything before it where that is later, to
//! its own end. These times and what lies between kernels add up to the step.

use std::collections::BTreeMap;

use super::recorder::ArmRecord;
use super::rows::KernelRow;
use crate::engine::account::{Ceilings, Phase};
use crate::engine::device::KernelRecord;

/// Name of the row for the time in which no kernel ran.
pub const BETWEEN: &str = "(between kernels)";

/// Seconds by which each kernel moved the end of what had run before it, in the order of the kernels.
pub fn exclusive_s(kernels: &[KernelRecord]) -> impl Iterator<Item = f64> + '_ {
    let mut covered_s = f64::NEG_INFINITY;
    kernels.iter().map(move |kernel| {
        let alone_s = (kernel.end_s - kernel.start_s.max(covered_s)).max(0.0);
        covered_s = covered_s.max(kernel.end_s);
        alone_s
    })
}

/// Least time a launch could take, seconds; 0 without ceilings.
pub fn floor_s(kernel: &KernelRecord, ceilings: Option<&Ceilings>) -> f64 {
    let phase = Phase { bytes: kernel.bytes, flops: kernel.flops };
    ceilings.map_or(0.0, |ceilings| phase.floor_s(ceilings))
}

#[derive(Default)]
struct Sums {
    launches: usize,
    time_s: f64,
    floor_s: f64,
    bytes: u64,
    flops: u64,
}

/// A row a kernel and kind of step, the largest first within a kind. Empty for a record without kernels.
pub fn kernel_rows(
    record: &ArmRecord,
    arm: &str,
    repeat: u32,
    ceilings: Option<&Ceilings>,
) -> Vec<KernelRow> {
    // By kind: steps, their time, and the kernels' sums.
    let mut kinds: BTreeMap<&str, (usize, f64, BTreeMap<&str, Sums>)> = BTreeMap::new();
    for report in record.steps.iter().map(|step| &step.report).filter(|report| !report.kernels.is_empty()) {
        let (steps, step_s, kernels) = kinds.entry(report.kind.as_str()).or_default();
        let mut alone_s = 0.0;
        for (kernel, time_s) in report.kernels.iter().zip(exclusive_s(&report.kernels)) {
            let sums = kernels.entry(kernel.name.as_str()).or_default();
            sums.launches += 1;
            sums.time_s += time_s;
            sums.floor_s += floor_s(kernel, ceilings);
            sums.bytes += kernel.bytes;
            sums.flops += kernel.flops;
            alone_s += time_s;
        }
        // (The step is timed by another clock than its kernels on a GPU: it is never shorter than they are.)
        let total_s = (report.end_s - report.start_s).max(alone_s);
        kernels.entry(BETWEEN).or_default().time_s += total_s - alone_s;
        *steps += 1;
        *step_s += total_s;
    }
    let mut rows = Vec::new();
    for (kind, (steps, step_s, kernels)) in kinds {
        let mean = |sum: f64| sum / steps as f64;
        let mut of_kind: Vec<KernelRow> = kernels
            .into_iter()
            .map(|(kernel, sums)| KernelRow {
                arm: arm.to_string(),
                repeat,
                kind: kind.to_string(),
                steps,
                kernel: kernel.to_string(),
                launches: mean(sums.launches as f64),
                time_ms: mean(sums.time_s) * 1e3,
                share: if step_s > 0.0 { sums.time_s / step_s } else { 0.0 },
                bytes: mean(sums.bytes as f64),
                flops: mean(sums.flops as f64),
                floor_ms: mean(sums.floor_s) * 1e3,
                of_floor: (sums.floor_s > 0.0 && sums.time_s > 0.0).then(|| sums.floor_s / sums.time_s),
            })
            .collect();
        of_kind.sort_by(|a, b| b.time_ms.total_cmp(&a.time_ms));
        rows.extend(of_kind);
    }
    rows
}

/// The rows of one arm for the kind of step that took most of its traced time.
pub fn dominant<'a>(rows: &'a [KernelRow], arm: &str) -> Vec<&'a KernelRow> {
    let of_arm = || rows.iter().filter(|row| row.arm == arm);
    let mut kinds: BTreeMap<&str, f64> = BTreeMap::new();
    of_arm().for_each(|row| *kinds.entry(&row.kind).or_default() += row.time_ms * row.steps as f64);
    let longest = kinds.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).map(|(kind, _)| kind);
    of_arm().filter(|row| Some(row.kind.as_str()) == longest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::step_report::StepKind;
    use crate::measure::testing::{record_of, step};

    fn kernel(name: &str, start_ms: f64, end_ms: f64, bytes: u64, flops: u64) -> KernelRecord {
        KernelRecord { name: name.to_string(), start_s: start_ms * 1e-3, end_s: end_ms * 1e-3, bytes, flops }
    }

    const CEILINGS: Ceilings = Ceilings {
        read_bytes_per_s: 1e9,
        copy_bytes_per_s: 1e9,
        flops_per_s: 1e9,
        launch_s: 0.0,
        measured: true,
    };

    fn record() -> ArmRecord {
        let mut decode = step(StepKind::Decode, 0.0, 0.010);
        decode.report.kernels = vec![
            kernel("mlp", 1.0, 4.0, 2_000_000, 10),
            // Starts early and waits for the first: moves the end by 2 ms only.
            kernel("head", 1.5, 6.0, 1_000_000, 500),
            kernel("mlp", 7.0, 9.0, 1_000_000, 2_000_000),
        ];
        let mut prefill = step(StepKind::Prefill, 0.010, 0.011);
        prefill.report.kernels = vec![kernel("mlp", 10.0, 11.0, 1, 1)];
        record_of(Vec::new(), vec![decode, prefill])
    }

    #[test]
    fn times_of_kernels_that_overlap_add_up_to_the_step() {
        let rows = kernel_rows(&record(), "a", 3, Some(&CEILINGS));
        let decode: Vec<&KernelRow> = rows.iter().filter(|row| row.kind == "decode").collect();
        let names: Vec<&str> = decode.iter().map(|row| row.kernel.as_str()).collect();
        assert_eq!(names, ["mlp", BETWEEN, "head"]);
        let times: Vec<f64> = decode.iter().map(|row| (row.time_ms * 1e6).round() / 1e6).collect();
        assert_eq!(times, [5.0, 3.0, 2.0]);
        assert!((decode.iter().map(|row| row.share).sum::<f64>() - 1.0).abs() < 1e-12);
        // Floors are taken launch by launch: 2 ms of bytes, then 2 ms of products.
        assert!((decode[0].floor_ms - 4.0).abs() < 1e-9 && (decode[0].of_floor.unwrap() - 0.8).abs() < 1e-9);
        assert_eq!((decode[0].launches, decode[0].bytes, decode[1].of_floor), (2.0, 3e6, None));
    }

    #[test]
    fn the_kind_of_step_that_took_the_most_time_is_the_one_to_explain() {
        let rows = kernel_rows(&record(), "a", 0, Some(&CEILINGS));
        let dominant = dominant(&rows, "a");
        assert_eq!((dominant.len(), dominant[0].kind.as_str()), (3, "decode"));
        assert!(super::dominant(&rows, "b").is_empty());
    }

    #[test]
    fn without_ceilings_there_is_no_floor() {
        let rows = kernel_rows(&record(), "a", 0, None);
        assert!(rows.iter().all(|row| row.of_floor.is_none() && row.floor_ms == 0.0));
    }
}
