//! Loads whose answers are known beforehand, on a device of fixed cost (1 ms a step) and a virtual clock.

mod load_rig;

use inferwall::engine::config::EngineConfig;
use inferwall::engine::device::sim::fixed::FixedDevice;
use inferwall::measure::checks::{check_rows, little};
use inferwall::measure::recorder::ArmRecord;
use inferwall::workload::probe::Probe;
use inferwall::workload::rate::Rate;
use inferwall::workload::schedule::Role;
use inferwall::workload::spec::{Arrivals, Count, LoadSpec};
use load_rig::Rig;

fn rig(max_num_seqs: usize) -> Rig {
    let config = EngineConfig {
        max_num_seqs,
        max_model_len: 8192,
        async_scheduling: Some(1),
        ..EngineConfig::default()
    };
    Rig::simulated(Box::new(FixedDevice::new(1.0)), "qwen3.5-4b", config)
}

/// Every request takes `output_len` steps of 1 ms: one for its prompt, one for each further token.
fn load(prompts: usize, rate: f64, output_len: usize) -> LoadSpec {
    LoadSpec {
        prompts: Count::Exact(prompts),
        request_rate: Rate::new(rate).unwrap(),
        input_len: 8,
        output_len,
        ..LoadSpec::default()
    }
}

fn mean_queue_s(record: &ArmRecord) -> f64 {
    let waits: Vec<f64> = record.requests.iter().map(|request| request.queue_s().unwrap()).collect();
    waits.iter().sum::<f64>() / waits.len() as f64
}

/// Poisson arrivals, one seat, service of exactly D: the M/D/1 queue. Mean wait is l D / (2 (1 - l)) at load l
/// (Pollaczek and Khinchine).
#[test]
fn one_seat_and_poisson_arrivals_wait_as_in_an_m_d_1_queue() {
    let rig = rig(1);
    let service_s = 10e-3;
    for utilisation in [0.3, 0.6, 0.8] {
        let (record, _) = rig.run(&load(12_000, utilisation / service_s, 10), 5);
        let expected_s = utilisation * service_s / (2.0 * (1.0 - utilisation));
        let got_s = mean_queue_s(&record);
        assert!(
            (got_s / expected_s - 1.0).abs() < 0.08,
            "load {utilisation}: mean wait {got_s} s, expected {expected_s} s"
        );
        let little = little(&record).unwrap();
        assert!(little.agrees(), "load {utilisation}: {little:?}");
    }
}

/// Even arrivals below capacity never wait (D/D/1); above it each waits longer than the last by D - 1/rate.
#[test]
fn even_arrivals_never_wait_below_capacity_and_pile_up_evenly_above() {
    let rig = rig(1);
    let even = |rate| LoadSpec { arrivals: Arrivals::Constant, ..load(200, rate, 10) };
    let (record, _) = rig.run(&even(80.0), 0);
    assert!(record.requests.iter().all(|request| request.queue_s().unwrap() < 1e-9));
    let (record, _) = rig.run(&even(125.0), 0);
    for (index, request) in record.requests.iter().enumerate() {
        let expected_s = index as f64 * (10e-3 - 8e-3);
        assert!((request.queue_s().unwrap() - expected_s).abs() < 1e-9, "request {index}");
    }
}

/// A flood through one seat: request i waits i D; percentiles are those of that ladder.
#[test]
fn a_flood_through_one_seat_is_a_ladder() {
    let rig = rig(1);
    let flood = LoadSpec { request_rate: Rate::FLOOD, ..load(101, 1.0, 10) };
    let summary = rig.summary(&flood, 0);
    let close = |got: Option<f64>, expected: f64| {
        let got = got.unwrap();
        assert!((got - expected).abs() < 1e-6, "{got} against {expected}");
    };
    close(summary.ttft_p50_ms, 50.0 * 10.0 + 1.0);
    close(summary.ttft_p99_ms, 99.0 * 10.0 + 1.0);
    close(summary.queue_mean_ms, 50.0 * 10.0);
    close(summary.e2el_p90_ms, 91.0 * 10.0);
    close(summary.itl_p99_ms, 1.0);
    close(summary.tpot_mean_ms, 1.0);
    close(summary.output_throughput, 1000.0);
    close(summary.request_throughput, 100.0);
    // Tokens arrive at 1, 2, ... 1,010 ms: 999 of them in the first second, whose end belongs to the next.
    close(summary.peak_output_throughput, 999.0);
    close(summary.running_mean, 1.0);
    close(summary.step_ms_p50, 1.0);
    close(summary.host_fraction, 0.0);
    assert_eq!((summary.requests, summary.completed, summary.failed), (101, 101, 0));
    assert_eq!((summary.running_max, summary.waiting_max), (1, 100));
    assert_eq!((summary.offered_rate, summary.achieved_rate), (Some(Rate::FLOOD), Some(Rate::FLOOD)));
    assert_eq!(summary.bound_by, "seats");
}

/// A closed loop of N clients with think time Z and enough seats: throughput is N / (D + Z), the response time law.
#[test]
fn a_closed_loop_follows_the_response_time_law() {
    let closed = |clients, think_time_s| LoadSpec {
        request_rate: Rate::FLOOD,
        concurrency: Some(clients),
        think_time_s,
        ..load(4000, 1.0, 10)
    };
    let (record, offered) = rig(64).run(&closed(4, 0.0), 0);
    assert_eq!(offered, None);
    let throughput = 4000.0 / record.duration_s;
    assert!((throughput - 400.0).abs() < 1e-6, "{throughput}");
    let busiest = record.steps.iter().map(|step| step.report.running).max();
    assert_eq!(busiest, Some(4));
    let (record, _) = rig(64).run(&closed(4, 0.03), 0);
    let throughput = 4000.0 / record.duration_s;
    // Arrivals wait for the step that runs: half a step on average when others run.
    let expected = 4.0 / (10e-3 + 30e-3);
    assert!((throughput / expected - 1.0).abs() < 0.05, "{throughput} against {expected}");
}

/// A limit on requests in flight keeps latency counting from when a request was due.
#[test]
fn a_request_held_back_by_the_load_s_own_limit_is_late_from_its_due_time() {
    let limited = LoadSpec { arrivals: Arrivals::Constant, concurrency: Some(1), ..load(50, 200.0, 10) };
    let (record, _) = rig(64).run(&limited, 0);
    let last = record.requests.last().unwrap();
    assert!((last.intended_s - 0.25).abs() < 1e-9);
    assert!((last.e2el_s().unwrap() - (0.005 + 0.5 - 0.25)).abs() < 1e-6, "{:?}", last.e2el_s());
    assert!(last.schedule_delay_s().unwrap() > 0.2);
    let late = |limited| {
        let rows = check_rows(&record, "a", 0, limited);
        rows.into_iter().find(|row| row.check == "late_share").unwrap().status
    };
    assert_eq!((late(true).as_str(), late(false).as_str()), ("info", "warning"));
}

/// The steady window leaves out the drain, where the batch empties: with lengths that differ, its throughput is that of
/// a full batch, and the whole run's is less.
#[test]
fn the_steady_window_has_the_throughput_of_a_full_batch() {
    let flood = LoadSpec {
        request_rate: Rate::FLOOD,
        lengths: toml::from_str::<LoadSpec>("lengths = { kind = \"uniform\", ratio = 0.9 }").unwrap().lengths,
        ..load(60, 1.0, 100)
    };
    let summary = rig(8).summary(&flood, 0);
    let steady = summary.steady_output_throughput.unwrap();
    assert!((steady / 8000.0 - 1.0).abs() < 0.02, "{steady}");
    assert!(summary.output_throughput.unwrap() < 0.97 * steady);
    assert!(summary.steady_s.unwrap() < summary.duration_s);
}

#[test]
fn the_probe_injects_beside_its_victims_and_ends_after_the_drain() {
    let probe = Probe { inject_after_s: 0.2, drain_s: 0.1, ..Probe::default() };
    let load = LoadSpec { probe: Some(probe), ..LoadSpec::default() };
    let (record, _) = rig(256).run(&load, 0);
    let of = |role| record.requests.iter().filter(move |request| request.role == role);
    assert_eq!(of(Role::Injector).count(), 12);
    assert!(of(Role::Injector).all(|request| (request.intended_s - 0.2).abs() < 1e-9));
    let (start_s, end_s) = record.injection_window_s.unwrap();
    assert!((start_s - 0.2).abs() < 1e-9);
    // 12 x 5,408 tokens at 2,048 a step less 6 decodes, then 31 more tokens for the last.
    let steps = ((end_s - start_s) * 1e3).round();
    assert!((62.0..=66.0).contains(&steps), "{steps} steps");
    // Victims restart at once until the drain is over, and end the request they are at.
    let last_start_s = of(Role::Victim).map(|request| request.intended_s).fold(0.0, f64::max);
    assert!(last_start_s < end_s + 0.1 && record.duration_s > end_s + 0.1);
    assert!(record.requests.iter().all(|request| request.completed()));
    let restarts: Vec<f64> = of(Role::Victim).map(|request| request.schedule_delay_s().unwrap()).collect();
    assert!(restarts.iter().all(|delay_s| *delay_s < 1e-9));
}

#[test]
fn the_time_a_victim_takes_to_ask_again_counts_in_its_latency() {
    let at_once = Probe { inject_after_s: 0.2, drain_s: 0.1, injectors: 1, ..Probe::default() };
    let later = Probe { victim_restart_s: 0.02, ..at_once };
    let ttfts_ms = |probe| -> Vec<f64> {
        let (record, _) = rig(256).run(&LoadSpec { probe: Some(probe), ..LoadSpec::default() }, 0);
        let second = record.requests.iter().filter(|request| request.role == Role::Victim).skip(6).take(6);
        second.map(|request| (request.ttft_s().unwrap() * 1e3).round()).collect()
    };
    let expected: Vec<f64> = ttfts_ms(at_once).iter().map(|ttft_ms| ttft_ms + 20.0).collect();
    assert_eq!(ttfts_ms(later), expected);
}

#[test]
fn a_pinned_injection_happens_at_the_chosen_token_of_the_first_victim() {
    let probe = Probe { inject_after_s: 0.1, inject_at_token: Some(16), drain_s: 0.0, ..Probe::default() };
    let load = LoadSpec { probe: Some(probe), ..LoadSpec::default() };
    let (record, _) = rig(256).run(&load, 0);
    let (start_s, _) = record.injection_window_s.unwrap();
    let first_victim_token = record
        .requests
        .iter()
        .filter(|request| request.role == Role::Victim)
        .find_map(|request| (request.tokens_s.get(15) == Some(&start_s)).then_some(request.index));
    // All victims are in step, so the first one's sixteenth token is also theirs.
    assert!(first_victim_token.is_some(), "injected at {start_s}");
    assert!(start_s >= 0.1);
}

/// The same seed gives the same record; another seed another one.
#[test]
fn a_run_is_reproduced_by_its_seed() {
    let rig = rig(4);
    let poisson = load(100, 150.0, 10);
    assert_eq!(rig.run(&poisson, 3).0, rig.run(&poisson, 3).0);
    assert_ne!(rig.run(&poisson, 3).0.requests, rig.run(&poisson, 4).0.requests);
}
