//! The scheduler's known answers, on a device of fixed cost and a virtual clock: no weights, no arithmetic.

mod scheduler_rig;

use inferwall::engine::config::{EngineConfig, KvLayout};
use inferwall::engine::step_report::HeldBack;
use scheduler_rig::{Rig, request};

#[test]
fn one_request_takes_a_prefill_and_a_decode_a_token() {
    for depth in 0..=2 {
        let config = EngineConfig { async_scheduling: Some(depth), ..EngineConfig::default() };
        let mut rig = Rig::new("qwen3.5-4b", config);
        rig.submit(request(7, 5));
        let run = rig.drain();
        assert_eq!(run.kinds(), "PDDDD", "async_scheduling = {depth}");
        assert_eq!(run.reports.last().unwrap().end_s, 5e-3);
        assert_eq!(run.tokens_of(0).len(), 5);
    }
}

#[test]
fn decodes_come_first_and_prompts_fill_the_budget() {
    let config =
        EngineConfig { max_num_batched_tokens: 100, async_scheduling: Some(1), ..EngineConfig::default() };
    let mut rig = Rig::new("qwen3.5-4b", config);
    (0..3).for_each(|_| rig.submit(request(80, 10)));
    let run = rig.drain();
    let prefill: Vec<usize> = run.reports.iter().map(|report| report.prefill_tokens).take(3).collect();
    // 80 and the first 20; then one decode, the other 60, and 39; then two decodes and 41.
    assert_eq!(prefill, [100, 99, 41]);
    assert_eq!(run.reports[0].held_back_by, Some(HeldBack::TokenBudget));
    assert_eq!(run.kinds()[..4], *"PMMD");
}

#[test]
fn without_chunking_prompts_run_whole() {
    let config = EngineConfig {
        max_num_batched_tokens: 100,
        max_model_len: 100,
        chunked_prefill: false,
        async_scheduling: Some(1),
        ..EngineConfig::default()
    };
    let mut rig = Rig::new("qwen3.5-4b", config);
    (0..3).for_each(|_| rig.submit(request(60, 10)));
    let run = rig.drain();
    let prefill: Vec<usize> = run.reports.iter().map(|report| report.prefill_tokens).take(4).collect();
    assert_eq!(prefill, [60, 60, 60, 0]);
}

/// 1024/512 requests on vLLM's pool of 586 blocks: five blocks at admission, six after token 1,056, so 117 seats
/// shrink to 97 while they run.
#[test]
fn the_unified_pool_of_586_blocks_peaks_then_holds_97() {
    let config = EngineConfig {
        kv_layout: KvLayout::Unified,
        kv_blocks: Some(586),
        async_scheduling: Some(2),
        ..EngineConfig::default()
    };
    let mut rig = Rig::new("qwen3.5-4b", config);
    (0..200).for_each(|_| rig.submit(request(1024, 512)));
    let run = rig.drain();
    let running: Vec<usize> = run.reports.iter().map(|report| report.running).collect();
    let peak = running.iter().copied().max().unwrap();
    let held = running.iter().filter(|&&running| running == 97).count();
    println!("peak {peak}, {held} of {} steps at 97, {} preemptions", running.len(), run.preemptions());
    assert!((104..=108).contains(&peak), "peak {peak}");
    assert!(held > 300, "{held} steps at 97");
    assert!((15..=19).contains(&run.preemptions()), "{} preemptions", run.preemptions());
}
