//! Whatever the knobs, the load and the order of arrivals: every request ends exactly once with the tokens it would
//! have got alone, no block or slot is shared or leaked, no limit is exceeded, and order is first come first served.

mod scheduler_rig;

use std::collections::HashMap;

use inferwall::engine::Engine;
use inferwall::engine::account::Ceilings;
use inferwall::engine::cache::plan::plan_cache;
use inferwall::engine::clock::Clock;
use inferwall::engine::config::{CacheDtype, EngineConfig, KvLayout, Preemption, Speculation};
use inferwall::engine::model::layout::ModelLayout;
use inferwall::engine::model::synthetic_layout;
use inferwall::engine::request::{FinishReason, Request, RequestId, SamplingParams};
use inferwall::engine::step_report::{Event, StepReport};
use proptest::prelude::*;
use scheduler_rig::memory_device::{Log, MemoryModel, VOCABULARY, expected};

const LONGEST: usize = 96;
const CEILINGS: Ceilings = Ceilings {
    read_bytes_per_s: 1e12,
    copy_bytes_per_s: 1e12,
    flops_per_s: 1e14,
    launch_s: 0.0,
    measured: false,
};

#[derive(Debug, Clone)]
struct Arrival {
    request: Request,
    /// Steps that have been reported before it comes.
    after_steps: usize,
    /// Cancelled so many steps after that.
    cancel_after: Option<usize>,
}

#[derive(Debug, Clone)]
struct Case {
    hybrid: bool,
    config: EngineConfig,
    arrivals: Vec<Arrival>,
}

/// A hybrid whose state page is as large as 16 tokens of KV, or a dense model: small blocks, so that pools run out.
fn layout(hybrid: bool) -> ModelLayout {
    let mut layout = synthetic_layout(if hybrid { "demo" } else { "qwen2.5-7b" }).unwrap();
    layout.spec.vocab_size = 64;
    if let Some(delta) = &mut layout.spec.delta_net {
        (delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim) = (1, 1, 8, 8);
    }
    layout
}

fn config() -> impl Strategy<Value = EngineConfig> {
    let limits = (1usize..9, prop_oneof![Just(1usize), 2usize..40, Just(LONGEST)], any::<bool>());
    let spare_blocks = prop_oneof![3 => 0usize..4, 1 => 0usize..24];
    let caches = (any::<bool>(), spare_blocks, prop_oneof![Just(4usize), Just(16)], 1usize..9, any::<bool>());
    let modes = (any::<bool>(), 0usize..4, 0usize..=2, 1usize..6, 1usize..3, 0usize..3);
    (limits, caches, modes).prop_map(|(limits, caches, modes)| {
        let (max_num_seqs, budget, chunked_prefill) = limits;
        let (unified, spare_blocks, kv_block_tokens, state_slots, prefix_caching) = caches;
        let (never, speculation, depth, speculative_tokens, ngram_min, ngram_span) = modes;
        EngineConfig {
            max_num_seqs,
            max_num_batched_tokens: if chunked_prefill { budget } else { LONGEST.max(budget) },
            chunked_prefill,
            max_model_len: LONGEST,
            // From just enough for one longest request upwards (set to the layout's need below).
            kv_blocks: Some(spare_blocks),
            kv_block_tokens,
            kv_layout: if unified { KvLayout::Unified } else { KvLayout::Split },
            state_slots: Some(state_slots),
            prefix_caching,
            preemption: if never { Preemption::Never } else { Preemption::Recompute },
            speculation: if speculation == 0 { Speculation::Ngram } else { Speculation::Off },
            speculative_tokens,
            ngram_min,
            ngram_max: ngram_min + ngram_span,
            async_scheduling: Some(depth),
            ..EngineConfig::default()
        }
    })
}

fn arrival() -> impl Strategy<Value = Arrival> {
    let stops = prop_oneof![3 => Just(Vec::new()), 1 => Just(vec![0u32])];
    let cancel = prop_oneof![6 => Just(None), 1 => (0usize..30).prop_map(Some)];
    // Few distinct prompts, so that prefixes are shared.
    (1usize..60, 1usize..36, 0u64..4, stops, any::<bool>(), prop_oneof![Just(0usize), 0usize..60], cancel)
        .prop_map(|(prompt, max_tokens, seed, stop_tokens, ignore_eos, after_steps, cancel_after)| {
            let request = Request {
                prompt: (0..prompt as u32)
                    .map(|token| (token * token + token / 5) % VOCABULARY as u32)
                    .collect(),
                max_tokens,
                sampling: SamplingParams::default(),
                seed,
                stop_tokens,
                ignore_eos,
            };
            Arrival { request, after_steps, cancel_after }
        })
}

fn case() -> impl Strategy<Value = Case> {
    (any::<bool>(), config(), prop::collection::vec(arrival(), 1..24)).prop_map(
        |(hybrid, mut config, mut arrivals)| {
            config.prefix_caching &= !hybrid;
            let drafts = if config.speculation == Speculation::Off { 0 } else { config.speculative_tokens };
            let unified = config.kv_layout == KvLayout::Unified;
            let block_tokens = if unified && hybrid { 16 } else { config.kv_block_tokens };
            let state_blocks = if unified && hybrid { 3 * (1 + drafts) } else { 0 };
            let needed = LONGEST.div_ceil(block_tokens) + state_blocks + usize::from(unified);
            config.kv_blocks = config.kv_blocks.map(|spare| needed + spare);
            arrivals.sort_by_key(|arrival| arrival.after_steps);
            Case { hybrid, config, arrivals }
        },
    )
}

struct Outcome {
    reports: Vec<StepReport>,
    log: Log,
    cancelled: Vec<RequestId>,
}

fn run(case: &Case) -> Outcome {
    let layout = layout(case.hybrid);
    let dtypes = (CacheDtype::F16, CacheDtype::F32);
    let memory = 1 << 40;
    let plan = plan_cache(&layout, &case.config, memory, memory, dtypes, None).unwrap();
    let model = MemoryModel { layout, log: Log::default() };
    let clock = Clock::virtual_time();
    let mut engine = Engine::new(&model, plan, case.config.clone(), Some(CEILINGS), clock).unwrap();
    let mut outcome = Outcome { reports: Vec::new(), log: model.log.clone(), cancelled: Vec::new() };
    let mut to_cancel: Vec<(usize, RequestId)> = Vec::new();
    let mut arrivals = case.arrivals.iter().peekable();
    loop {
        let steps = outcome.reports.len();
        let idle = engine.is_idle();
        while let Some(arrival) = arrivals.next_if(|arrival| arrival.after_steps <= steps || idle) {
            let id = engine.submit(arrival.request.clone()).unwrap();
            to_cancel.extend(arrival.cancel_after.map(|after| (steps + after, id)));
            if idle {
                break;
            }
        }
        to_cancel.retain(|&(at, id)| {
            if at <= steps {
                engine.cancel(id);
                outcome.cancelled.push(id);
            }
            at > steps
        });
        match engine.step().unwrap() {
            Some(report) => outcome.reports.push(report),
            None if arrivals.peek().is_none() => break,
            None => (),
        }
    }
    assert!(engine.is_idle());
    assert_eq!(engine.held(), (0, 0), "blocks or slots leaked");
    outcome
}

/// What became of a request, from the events.
#[derive(Debug, Default)]
struct Story {
    tokens: Vec<u32>,
    finished: Vec<FinishReason>,
    first_scheduled: Option<usize>,
    preempted: usize,
    rescheduled: usize,
}

fn check_events(case: &Case, outcome: &Outcome) -> Result<(), TestCaseError> {
    let mut stories: HashMap<RequestId, Story> = HashMap::new();
    let mut order = 0;
    // Preempted and not running again yet; the last one is at the head of the queue.
    let mut preempted: Vec<RequestId> = Vec::new();
    for event in outcome.reports.iter().flat_map(|report| &report.events) {
        match event {
            Event::Scheduled { request, again } => {
                let story = stories.entry(*request).or_default();
                prop_assert_eq!(*again, story.first_scheduled.is_some());
                if *again {
                    story.rescheduled += 1;
                    prop_assert_eq!(preempted.pop(), Some(*request), "not the head of the queue");
                } else {
                    prop_assert!(preempted.is_empty(), "{:?} overtook a preempted request", request);
                    story.first_scheduled = Some(order);
                    order += 1;
                }
            }
            Event::Tokens { request, tokens } => {
                let story = stories.entry(*request).or_default();
                prop_assert!(story.finished.is_empty(), "tokens after the end");
                story.tokens.extend(tokens);
            }
            Event::Preempted { request, .. } => {
                stories.entry(*request).or_default().preempted += 1;
                preempted.push(*request);
            }
            Event::Finished { request, reason } => {
                stories.entry(*request).or_default().finished.push(*reason);
                preempted.retain(|other| other != request);
            }
        }
    }
    let mut last_scheduled = None;
    for (id, arrival) in case.arrivals.iter().enumerate() {
        let id = RequestId(id as u64);
        let story = stories.remove(&id).unwrap_or_default();
        let expected = expected(&arrival.request);
        if story.finished == [FinishReason::Cancelled]
            || (story.finished.is_empty() && outcome.cancelled.contains(&id))
        {
            prop_assert!(outcome.cancelled.contains(&id));
            prop_assert!(expected.starts_with(&story.tokens));
        } else {
            let reason = if expected.len() < arrival.request.max_tokens || stops(&arrival.request, &expected)
            {
                FinishReason::Stop
            } else {
                FinishReason::Length
            };
            prop_assert_eq!(&story.finished, &[reason], "{:?}", id);
            prop_assert_eq!(&story.tokens, &expected, "{:?}", id);
            prop_assert!(story.rescheduled <= story.preempted);
        }
        // First come, first served: first scheduled in the order they were submitted.
        if let Some(scheduled) = story.first_scheduled {
            prop_assert!(last_scheduled < Some(scheduled), "{:?} overtook an earlier request", id);
            last_scheduled = Some(scheduled);
        }
        if case.config.preemption == Preemption::Never {
            prop_assert_eq!(story.preempted, 0);
        }
    }
    prop_assert!(stories.is_empty(), "events of unknown requests");
    Ok(())
}

fn stops(request: &Request, output: &[u32]) -> bool {
    !request.ignore_eos && output.last().is_some_and(|token| request.stop_tokens.contains(token))
}

fn check_limits(case: &Case, outcome: &Outcome) -> Result<(), TestCaseError> {
    let log = outcome.log.lock().unwrap();
    prop_assert_eq!(log.len(), outcome.reports.len());
    let mut last_end = 0.0;
    for (index, (report, step)) in outcome.reports.iter().zip(log.iter()).enumerate() {
        prop_assert_eq!(report.index, index as u64);
        let tokens: usize = step.iter().map(|&(_, _, input, drafts)| input + drafts).sum();
        prop_assert!(tokens <= case.config.max_num_batched_tokens, "{} tokens", tokens);
        prop_assert_eq!(tokens, report.decode_tokens + report.prefill_tokens + report.drafted);
        prop_assert_eq!(step.len(), report.decode_sequences + report.prefill_sequences);
        prop_assert!(report.running <= case.config.max_num_seqs && step.len() <= report.running);
        prop_assert!(report.blocks_used <= report.blocks_total && report.slots_used <= report.slots_total);
        prop_assert!(report.accepted <= report.drafted);
        prop_assert!(report.recomputed_tokens <= report.prefill_tokens);
        prop_assert_eq!(report.held_back_by.is_some(), report.waiting > 0);
        prop_assert!(report.start_s >= last_end && report.end_s > report.start_s);
        last_end = report.end_s;
        let preempted = report.events.iter().any(|event| matches!(event, Event::Preempted { .. }));
        let admitted = report.events.iter().any(|event| matches!(event, Event::Scheduled { .. }));
        // (Two steps deep, a schedule that only preempts is told with the next step's report.)
        let told_late = case.config.async_scheduling == Some(2);
        prop_assert!(!(preempted && admitted) || told_late, "admitted in a step that preempted");
        let overlaps = case.config.async_scheduling == Some(2) && case.config.speculation == Speculation::Off;
        prop_assert!(overlaps || report.overrun_tokens == 0 || report.drafted > 0);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_load_under_any_knobs_keeps_every_promise(case in case()) {
        let outcome = run(&case);
        check_events(&case, &outcome)?;
        check_limits(&case, &outcome)?;
    }

    #[test]
    fn the_same_load_gives_the_same_steps(case in case()) {
        let (first, second) = (run(&case), run(&case));
        prop_assert_eq!(first.reports, second.reports);
        prop_assert_eq!(&*first.log.lock().unwrap(), &*second.log.lock().unwrap());
    }
}

/// The properties mean little if the cases never get into trouble.
#[test]
fn the_cases_reach_every_corner() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut seen: HashMap<&str, usize> = HashMap::new();
    for _ in 0..400 {
        let case = proptest::strategy::ValueTree::current(&case().new_tree(&mut runner).unwrap());
        let outcome = run(&case);
        let mut count = |what, happened: usize| *seen.entry(what).or_default() += happened;
        for report in &outcome.reports {
            count("drafted", report.drafted);
            count("accepted", report.accepted);
            count("overrun", report.overrun_tokens);
            count("recomputed", report.recomputed_tokens);
            if let Some(reason) = report.held_back_by {
                count(reason.as_str(), 1);
            }
            let preempted =
                report.events.iter().filter(|event| matches!(event, Event::Preempted { .. })).count();
            count(
                if case.config.kv_layout == KvLayout::Unified {
                    "preempted, unified"
                } else {
                    "preempted, split"
                },
                preempted,
            );
            count(
                ["preempted, depth 0", "preempted, depth 1", "preempted, depth 2"]
                    [case.config.async_scheduling.unwrap()],
                preempted,
            );
        }
        count("cancelled", outcome.cancelled.len());
        let prefilled: usize =
            outcome.reports.iter().map(|report| report.prefill_tokens - report.recomputed_tokens).sum();
        let prompts: usize = case.arrivals.iter().map(|arrival| arrival.request.prompt.len()).sum();
        count(
            "taken from the prefix cache",
            if case.config.prefix_caching { prompts.saturating_sub(prefilled) } else { 0 },
        );
    }
    println!("{seen:#?}");
    for what in [
        "drafted",
        "accepted",
        "overrun",
        "recomputed",
        "seats",
        "state_slots",
        "blocks",
        "token_budget",
        "preempted, unified",
        "preempted, split",
        "preempted, depth 0",
        "preempted, depth 1",
        "preempted, depth 2",
        "cancelled",
        "taken from the prefix cache",
    ] {
        assert!(seen.get(what).is_some_and(|&count| count > 60), "{what}: {seen:?}");
    }
}
