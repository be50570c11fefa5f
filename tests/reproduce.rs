//! The series on its simulated rig: the gates of every part, reproducibility, and speed against simulated time.

use inferwall::engine::device::sim::SimDevice;
use inferwall::measure::recorder::RequestRecord;
use inferwall::simulation::reproduce::{self, Verdict, report};
use inferwall::workload::schedule::Role;

fn check(part: u32) {
    let device = SimDevice::parse("sim:series").unwrap();
    let result = reproduce::run_part(part, &device, 0).unwrap();
    let outside: Vec<(&str, &str)> = result
        .cells
        .iter()
        .filter(|cell| matches!(cell.verdict, Verdict::DoesNotHold | Verdict::NotSimulated))
        .map(|cell| (cell.cell.arm.as_str(), cell.cell.metric.as_str()))
        .collect();
    let known: Vec<(&str, &str)> = KNOWN_MISSES
        .iter()
        .filter(|(of_part, ..)| *of_part == part)
        .map(|&(_, arm, metric)| (arm, metric))
        .collect();
    assert_eq!(outside, known, "cells outside their gates:\n{}", report::markdown(&result));
}

/// Cells whose gate the simulation does not reach, each with a reason in the output.
const KNOWN_MISSES: [(u32, &str, &str); 1] = [(2, "chunked off, light", "victims_all_p99_ms")];

#[test]
fn part_1_is_inside_its_gates() {
    check(1);
}

#[test]
fn part_2_is_inside_its_gates() {
    check(2);
}

#[test]
fn part_3_is_inside_its_gates() {
    check(3);
}

#[test]
fn part_5_is_inside_its_gates() {
    check(5);
}

#[test]
fn part_6_is_inside_its_gates() {
    check(6);
}

#[test]
fn part_7_is_inside_its_gates() {
    check(7);
}

#[test]
fn a_part_is_the_same_to_the_last_bit_when_run_again() {
    let device = SimDevice::parse("sim:series").unwrap();
    let first = reproduce::run_part(3, &device, 0).unwrap();
    let again = reproduce::run_part(3, &device, 0).unwrap();
    assert_eq!(first.figures, again.figures);
}

#[test]
fn other_arrivals_change_the_result() {
    let device = SimDevice::parse("sim:series").unwrap();
    let arm = reproduce::plan::arms(1).unwrap().remove(3);
    let (first, _) = reproduce::run_arm(&arm, &device, 0).unwrap();
    let (other, _) = reproduce::run_arm(&arm, &device, 1).unwrap();
    assert_ne!(first["ttft_p99_ms"], other["ttft_p99_ms"]);
}

/// An arm of the plan by name.
fn arm(part: u32, name: &str) -> reproduce::plan::PlannedArm {
    reproduce::plan::arms(part).unwrap().into_iter().find(|arm| arm.name == name).unwrap()
}

#[test]
fn the_valley_comes_from_the_state_cost_of_mixed_steps() {
    let device = SimDevice::parse("sim:series").unwrap();
    let without = SimDevice::parse("sim:series:mixed_state_factor=1").unwrap();
    let throughput = |device: &SimDevice| reproduce::run_arm(&arm(1, "rate 10"), device, 0).unwrap().0["request_throughput"];
    assert!(throughput(&device) < 6.6);
    assert!(throughput(&without) > 7.8);
}

/// 30 answers of 64 tokens, as published; and the first prompt runs when five of the victims have 8 tokens of their third.
#[test]
fn the_victims_are_as_many_and_as_far_as_the_series_had_them() {
    let device = SimDevice::parse("sim:series").unwrap();
    for name in ["chunked on, light", "chunked on, heavy", "chunked off, light", "chunked off, heavy"] {
        let record = arm(2, name).simulated(0).unwrap().run(&device).unwrap().record;
        let victims: Vec<_> = record.requests.iter().filter(|request| request.role == Role::Victim).collect();
        assert_eq!(victims.iter().map(|request| request.tokens_s.len()).sum::<usize>(), 1920, "{name}");
        let first = record.steps.iter().find(|step| step.report.prefill_tokens > 1000).unwrap();
        let before = |request: &RequestRecord| {
            request.tokens_s.iter().filter(|time_s| **time_s <= first.report.start_s + 1e-9).count()
        };
        let tokens: Vec<usize> = victims.iter().skip(12).take(6).map(|request| before(request)).collect();
        assert_eq!(tokens, [10, 8, 8, 8, 8, 8], "{name}");
    }
}

/// The one cell outside its gate: five victims wait two steps for the first one's here, and three give what was published.
#[test]
fn the_published_wait_of_the_light_run_is_three_steps() {
    let device = SimDevice::parse("sim:series").unwrap();
    let p99_ms = |restart_s: f64| {
        let mut light = arm(2, "chunked off, light");
        light.load.probe.as_mut().unwrap().victim_restart_s = restart_s;
        reproduce::run_arm(&light, &device, 0).unwrap().0["victims_all_p99_ms"]
    };
    assert_eq!(p99_ms(0.0), p99_ms(0.02));
    assert!(p99_ms(0.0) < 90.0);
    for restart_s in [0.03, 0.035, 0.04] {
        assert!((p99_ms(restart_s) / 102.8 - 1.0).abs() < 0.02, "{}", p99_ms(restart_s));
    }
}

#[test]
fn seats_come_from_the_pool_and_its_growth_from_a_second_block() {
    let device = SimDevice::parse("sim:series").unwrap();
    let roomy = SimDevice::parse("sim:series:gb=48").unwrap();
    let mut flood = arm(3, "cap 256");
    flood.engine.kv_blocks = Some(4 * 256 + 1);
    assert_eq!(reproduce::run_arm(&flood, &roomy, 0).unwrap().0["running_max"], 256.0);
    let mut short = arm(5, "4B natural, 1024/512");
    assert!(reproduce::run_arm(&short, &device, 0).unwrap().0["preemptions"] > 0.0);
    // Answers that end before token 1,056 never ask for another block.
    short.load.output_len = 32;
    assert_eq!(reproduce::run_arm(&short, &device, 0).unwrap().0["preemptions"], 0.0);
}

#[test]
fn a_recomputed_request_gets_the_tokens_it_had() {
    let device = SimDevice::parse("sim:series").unwrap();
    let tight = arm(5, "4B 40 blocks, 512/512 +-90 %");
    let mut roomy = tight.clone();
    roomy.engine.kv_blocks = None;
    let outputs = |arm: &reproduce::plan::PlannedArm| -> Vec<Vec<u32>> {
        let run = arm.simulated(0).unwrap().run(&device).unwrap();
        run.record.requests.iter().map(|request| request.output.clone()).collect()
    };
    assert_eq!(outputs(&tight), outputs(&roomy));
}
