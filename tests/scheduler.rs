//! The scheduler's known answers, on a device of fixed cost and a virtual clock: no weights, no arithmetic.

mod scheduler_rig;

use inferwall::engine::config::{EngineConfig, KvLayout, Preemption, Speculation};
use inferwall::engine::device::sim::fixed::fake_token;
use inferwall::engine::model::synthetic_layout;
use inferwall::engine::request::{FinishReason, Request, RequestId};
use inferwall::engine::step_report::{Event, HeldBack};
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

/// Seats of 256/128 floods on the published pools.
#[test]
fn floods_fill_the_published_seats() {
    for (preset, blocks, speculation, seats) in [
        ("qwen3.5-4b", 586, Speculation::Off, 146),
        ("qwen3.5-9b-awq", 413, Speculation::Off, 103),
        ("qwen3.5-4b", 542, Speculation::Ngram, 28),
    ] {
        let config = EngineConfig {
            kv_layout: KvLayout::Unified,
            kv_blocks: Some(blocks),
            speculation,
            async_scheduling: Some(2),
            ..EngineConfig::default()
        };
        let mut rig = Rig::new(preset, config);
        (0..300).for_each(|_| rig.submit(request(256, 128)));
        let run = rig.drain();
        let peak = run.reports.iter().map(|report| report.running).max();
        assert_eq!((peak, run.preemptions()), (Some(seats), 0), "{preset} with {blocks} blocks");
        let full = run.reports.iter().find(|report| report.running == seats && report.waiting > 0).unwrap();
        assert_eq!(full.held_back_by, Some(HeldBack::Blocks));
    }
}

/// Dense, four blocks of 16 tokens: two requests grow until the newer one has to go.
fn two_that_outgrow_the_pool(preemption: Preemption) -> Rig {
    let config = EngineConfig {
        max_model_len: 64,
        kv_blocks: Some(4),
        preemption,
        async_scheduling: Some(1),
        ..EngineConfig::default()
    };
    let mut rig = Rig::new("qwen2.5-7b", config);
    rig.submit(request(16, 20));
    rig.submit(request(30, 20));
    rig
}

#[test]
fn the_newest_is_preempted_keeps_its_tokens_and_is_recomputed() {
    let run = two_that_outgrow_the_pool(Preemption::Recompute).drain();
    // Blocks: 1 + 2 at once, 2 + 2 from the first decode; the second needs its third at 33 tokens.
    let preempted = run.reports.iter().position(|report| {
        report.events.contains(&Event::Preempted { request: RequestId(1), computed_tokens: 32 })
    });
    assert_eq!(preempted, Some(3));
    assert_eq!(run.reports[3].held_back_by, Some(HeldBack::Blocks));
    assert_eq!((run.reports[3].running, run.reports[3].waiting), (1, 1));
    let again = run
        .reports
        .iter()
        .find(|report| report.events.contains(&Event::Scheduled { request: RequestId(1), again: true }))
        .unwrap();
    // 30 of the prompt and 3 generated; the last of these was never computed before.
    assert_eq!((again.prefill_tokens, again.recomputed_tokens), (33, 32));
    let vocabulary = synthetic_layout("qwen2.5-7b").unwrap().spec.real_vocab_size as u64;
    for (id, prompt) in [(0, 16), (1, 30)] {
        let expected: Vec<u32> =
            (0..20).map(|position| fake_token(1, prompt + position, vocabulary)).collect();
        assert_eq!(run.tokens_of(id).len(), 20);
        assert_eq!(run.finish_of(id), [FinishReason::Length]);
        assert_eq!(run.tokens_of(id), expected, "request {id}");
    }
}

#[test]
fn with_preemption_never_a_request_waits_for_all_its_blocks() {
    let run = two_that_outgrow_the_pool(Preemption::Never).drain();
    assert_eq!(run.preemptions(), 0);
    assert_eq!(run.reports.iter().map(|report| report.recomputed_tokens).sum::<usize>(), 0);
    assert_eq!(run.reports[0].held_back_by, Some(HeldBack::Blocks));
    assert!(run.reports.iter().all(|report| report.running == 1));
    assert_eq!(run.reports.len(), 40);
}

#[test]
fn two_steps_deep_a_seat_returns_one_step_late() {
    let steps_until_second = |depth| {
        let config =
            EngineConfig { max_num_seqs: 1, async_scheduling: Some(depth), ..EngineConfig::default() };
        let mut rig = Rig::new("qwen3.5-4b", config);
        (0..2).for_each(|_| rig.submit(request(7, 5)));
        rig.drain().kinds()
    };
    assert_eq!(steps_until_second(1), "PDDDDPDDDD");
    // The schedule made while the fifth step runs cannot know its result, and has nothing else to run.
    assert_eq!(steps_until_second(2), "PDDDDPDDDD");
    let config = EngineConfig { max_num_seqs: 2, async_scheduling: Some(2), ..EngineConfig::default() };
    let mut rig = Rig::new("qwen3.5-4b", config);
    rig.submit(request(7, 3));
    (0..2).for_each(|_| rig.submit(request(7, 9)));
    let run = rig.drain();
    let admitted = run
        .reports
        .iter()
        .position(|report| report.events.contains(&Event::Scheduled { request: RequestId(2), again: false }));
    // The first ends with step 2; step 3 was scheduled before that.
    assert_eq!(admitted, Some(4));
    assert_eq!(run.reports[3].running, 2);
}

#[test]
fn a_stop_token_is_seen_late_and_the_overrun_is_dropped() {
    let tokens: Vec<u32> = (0..10).map(|position| fake_token(1, 7 + position, 248_077)).collect();
    for (depth, overrun) in [(0, 0), (1, 0), (2, 1)] {
        let config = EngineConfig { async_scheduling: Some(depth), ..EngineConfig::default() };
        let mut rig = Rig::new("qwen3.5-4b", config);
        let stopping = Request { stop_tokens: vec![tokens[3]], ignore_eos: false, ..request(7, 10) };
        rig.submit(stopping.clone());
        rig.submit(Request { ignore_eos: true, ..stopping });
        let run = rig.drain();
        assert_eq!(run.tokens_of(0), tokens[..4]);
        assert_eq!(run.finish_of(0), [FinishReason::Stop]);
        assert_eq!(run.tokens_of(1), tokens);
        assert_eq!(run.finish_of(1), [FinishReason::Length]);
        let dropped: usize = run.reports.iter().map(|report| report.overrun_tokens).sum();
        assert_eq!(dropped, overrun, "async_scheduling = {depth}");
    }
}

#[test]
fn an_arrival_waits_for_the_steps_in_flight() {
    for (depth, expected) in [(1, 3), (2, 4)] {
        let config = EngineConfig { async_scheduling: Some(depth), ..EngineConfig::default() };
        let mut rig = Rig::new("qwen3.5-4b", config);
        rig.submit(request(7, 20));
        (0..3).for_each(|_| drop(rig.engine.step().unwrap()));
        // Three steps have ended; two steps deep, the fourth is already running.
        rig.submit(request(7, 5));
        let run = rig.drain();
        let admitted = run
            .reports
            .iter()
            .find(|report| report.events.contains(&Event::Scheduled { request: RequestId(1), again: false }));
        assert_eq!(admitted.unwrap().index, expected, "async_scheduling = {depth}");
    }
}

#[test]
fn a_cancelled_request_ends_once_and_gives_everything_back() {
    let config = EngineConfig { async_scheduling: Some(2), ..EngineConfig::default() };
    let mut rig = Rig::new("qwen3.5-4b", config);
    (0..2).for_each(|_| rig.submit(request(40, 30)));
    (0..5).for_each(|_| drop(rig.engine.step().unwrap()));
    rig.engine.cancel(RequestId(0));
    rig.engine.cancel(RequestId(0));
    rig.engine.cancel(RequestId(9));
    let run = rig.drain();
    assert_eq!(run.finish_of(0), [FinishReason::Cancelled]);
    assert!(run.tokens_of(0).is_empty(), "tokens in flight are dropped");
    assert_eq!(run.reports[0].overrun_tokens, 1);
    assert_eq!(run.finish_of(1), [FinishReason::Length]);
    assert_eq!(rig.engine.held(), (0, 0));
    // The last one alive, cancelled: nothing is left to run.
    rig.submit(request(40, 30));
    rig.engine.step().unwrap();
    rig.engine.cancel(RequestId(2));
    while rig.engine.step().unwrap().is_some() {}
    assert!(rig.engine.is_idle());
}

#[test]
fn an_equal_prompt_takes_over_the_blocks_of_an_earlier_one() {
    let config = EngineConfig { prefix_caching: true, async_scheduling: Some(1), ..EngineConfig::default() };
    let mut rig = Rig::new("qwen2.5-7b", config.clone());
    rig.submit(request(100, 4));
    assert_eq!(rig.drain().reports[0].prefill_tokens, 100);
    // Six full blocks of 16 are known; of an equal prompt of 96 tokens the last block is computed for its logits.
    rig.submit(request(100, 4));
    rig.submit(request(96, 4));
    let run = rig.drain();
    assert_eq!(run.reports[0].prefill_tokens, 4 + 16);
    assert_eq!(run.reports[0].recomputed_tokens, 0);
    assert_eq!(run.reports[0].blocks_used, 8, "five blocks are shared");
    let refused = std::panic::catch_unwind(|| Rig::new("qwen3.5-4b", config));
    assert!(refused.is_err(), "a hybrid model has no prefix to share");
}

#[test]
fn right_drafts_shorten_a_run_and_change_nothing_else() {
    // Two tokens in all: the text repeats itself soon, and about half of the drafts are right.
    let mut layout = synthetic_layout("demo").unwrap();
    layout.spec.real_vocab_size = 2;
    let drain = |speculation| {
        let config = EngineConfig { speculation, async_scheduling: Some(2), ..EngineConfig::default() };
        let mut rig = Rig::with_layout(layout.clone(), config);
        (0..3).for_each(|seed| rig.submit(Request { seed, ..request(20, 100) }));
        rig.drain()
    };
    let (plain, drafting) = (drain(Speculation::Off), drain(Speculation::Ngram));
    assert_eq!(plain.reports.len(), 100);
    assert!(drafting.reports.len() < 80, "{} steps", drafting.reports.len());
    let (drafted, accepted) = drafting
        .reports
        .iter()
        .fold((0, 0), |(drafted, accepted), report| (drafted + report.drafted, accepted + report.accepted));
    assert!(accepted > 60 && accepted < drafted, "{accepted} of {drafted}");
    for id in 0..3 {
        assert_eq!(plain.tokens_of(id), drafting.tokens_of(id));
    }
}

#[test]
fn requests_that_could_never_run_are_refused() {
    let config = EngineConfig {
        max_model_len: 64,
        kv_blocks: Some(4),
        async_scheduling: Some(1),
        ..EngineConfig::default()
    };
    let mut rig = Rig::new("qwen2.5-7b", config);
    let mut sampled = request(4, 4);
    sampled.sampling.temperature = f32::NAN;
    let mut cut = request(4, 4);
    cut.sampling.top_p = 0.0;
    for (request, part) in [
        (request(0, 4), "0 prompt tokens"),
        (request(4, 0), "0 output tokens"),
        (request(60, 5), "max_model_len = 64"),
        (Request { prompt: vec![1, 152_064], ..request(1, 1) }, "token 152064 at position 1"),
        (sampled, "temperature = NaN"),
        (cut, "top_p = 0"),
    ] {
        let error = rig.engine.submit(request).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
        assert_eq!(error.exit_code(), 2);
    }
    assert!(rig.engine.is_idle());
    let error = rig.engine.logits(&[1, 2], 1).unwrap_err();
    assert!(error.to_string().contains("no logits"), "{error}");
    assert_eq!(rig.engine.held(), (0, 0));
}
