//! The CPU device against golden checkpoints: every family, any way to cut a prompt, alone and in company, slots reused,
//! drafts kept and rejected.

mod cpu_rig;
mod skip;

use cpu_rig::*;
use inferwall::engine::config::{CacheDtype, CpuMath};
use inferwall::engine::device::Want;
use inferwall::engine::device::cpu::isa;
use skip::skip;

const FOLDERS: [&str; 6] = [
    "hybrid-tiny",
    "hybrid-tiny-sharded",
    "hybrid-tiny-predictable",
    "dense-qwen2-tiny",
    "dense-qwen3-tiny",
    "dense-llama-tiny",
];

fn rig(name: &str) -> (Rig, Golden) {
    (Rig::open(&fixture(name), Options::default()), Golden::read(&fixture(name)))
}

#[test]
fn whole_prompts_match() {
    for name in FOLDERS {
        let (mut rig, golden) = rig(name);
        let found = rig.logits(0, &golden.ids, &[golden.ids.len()]);
        assert_close(name, &found[golden.first..], &golden.logits);
    }
}

#[test]
fn four_bit_checkpoints_match() {
    for name in ["hybrid-geom-awq", "hybrid-geom-awq-mlp", "hybrid-geom-ct"] {
        let (mut rig, golden) = rig(name);
        for pieces in [&[golden.ids.len()][..], &[1], &[64, 86]] {
            let found = rig.logits(0, &golden.ids, pieces);
            assert_close(&format!("{name} {pieces:?}"), &found[golden.first..], &golden.logits);
        }
    }
}

#[test]
fn any_split_matches() {
    for name in FOLDERS {
        let (mut rig, golden) = rig(name);
        for pieces in
            [&[1][..], &[2], &[3], &[70, 80], &[64, 86], &[63, 1, 65, 21], &[17], &[100, 1], &[5, 13]]
        {
            let found = rig.logits(1, &golden.ids, pieces);
            assert_close(&format!("{name} {pieces:?}"), &found[golden.first..], &golden.logits);
        }
    }
}

#[test]
fn greedy_text_matches() {
    for name in FOLDERS {
        let (mut rig, golden) = rig(name);
        let want = Want::Sample { seed: 0, position: golden.ids.len() as u64, params: GREEDY };
        let mut tokens = rig.run(&[Part::new(0, 0, &golden.ids, want)]).sequences.remove(0).tokens;
        while tokens.len() < golden.greedy.len() {
            let context = golden.ids.len() + tokens.len() - 1;
            let last = [tokens[tokens.len() - 1]];
            let output = rig.run(&[Part::new(0, context, &last, want)]);
            tokens.extend(&output.sequences[0].tokens);
        }
        assert_eq!(tokens, golden.greedy, "{name}");
    }
}

#[test]
fn decode_logits_match() {
    for name in FOLDERS {
        let (mut rig, golden) = rig(name);
        let all: Vec<u32> = golden.ids.iter().chain(&golden.greedy).copied().collect();
        let found = rig.logits(0, &all, &[golden.ids.len(), 1]);
        let from = golden.ids.len() - 1;
        assert_close(name, &found[from..from + golden.greedy.len()], &golden.greedy_logits);
    }
}

#[test]
fn company_does_not_show_in_the_bits() {
    for name in FOLDERS {
        let (mut rig, golden) = rig(name);
        let ids = &golden.ids[..90];
        let alone: Vec<Vec<f32>> = rig.logits(0, ids, &[40, 30, 1]);
        // The same cuts with other sequences beside it: prompts, decodes, and all of them in other places of the step.
        let others: Vec<u32> = golden.ids.iter().chain(&golden.greedy).copied().collect();
        rig.logits(2, &others[..50], &[50]);
        rig.logits(3, &others[20..60], &[40]);
        let mut found = Vec::new();
        let first = rig.run(&[
            Part::logits(2, 50, &others[50..51]),
            Part::logits(1, 0, &ids[..40]),
            Part::logits(3, 40, &others[60..73]),
        ]);
        found.extend(first.sequences[1].logits.clone());
        let second = rig.run(&[Part::logits(1, 40, &ids[40..70]), Part::logits(2, 51, &others[51..75])]);
        found.extend(second.sequences[0].logits.clone());
        for at in 70..90 {
            let step = rig.run(&[
                Part::logits(3, at - 17, &others[at..at + 1]),
                Part::logits(2, at + 5, &others[at + 5..at + 6]),
                Part::logits(1, at, &ids[at..at + 1]),
            ]);
            found.extend(step.sequences[2].logits.clone());
        }
        assert_same_bits(name, &found, &alone);
    }
}

#[test]
fn threads_do_not_show_in_the_bits() {
    for name in ["hybrid-tiny", "dense-qwen2-tiny"] {
        let golden = Golden::read(&fixture(name));
        let of = |threads: usize| {
            let mut rig = Rig::open(&fixture(name), Options { threads, ..Options::default() });
            rig.logits(0, &golden.ids, &[100, 7, 1])
        };
        let one = of(1);
        for threads in [2, 3, 7] {
            assert_same_bits(name, &of(threads), &one);
        }
    }
}

#[test]
fn block_size_only_moves_the_cache() {
    for name in ["hybrid-tiny", "dense-llama-tiny"] {
        let golden = Golden::read(&fixture(name));
        for block_tokens in [1, 5, 16, 24, 48, 176] {
            let mut rig = Rig::open(&fixture(name), Options { block_tokens, ..Options::default() });
            let found = rig.logits(2, &golden.ids, &[33, 60, 1]);
            assert_close(
                &format!("{name}, blocks of {block_tokens}"),
                &found[golden.first..],
                &golden.logits,
            );
        }
    }
}

#[test]
fn a_reused_slot_starts_from_nothing() {
    for name in FOLDERS {
        let (mut rig, golden) = rig(name);
        let fresh = rig.logits(0, &golden.ids, &[30, 1]);
        rig.logits(1, &golden.ids[7..], &[60, 1]);
        assert_same_bits(name, &rig.logits(1, &golden.ids, &[30, 1]), &fresh);
    }
}

#[test]
fn drafts_kept_or_rejected_leave_the_bits_of_plain_decoding() {
    for name in ["hybrid-tiny", "hybrid-tiny-predictable", "dense-qwen3-tiny"] {
        let (mut rig, golden) = rig(name);
        let all: Vec<u32> = golden.ids.iter().chain(&golden.greedy).copied().collect();
        let prompt = golden.ids.len();
        let plain = rig.logits(0, &all, &[prompt, 1]);
        rig.logits(1, &golden.ids, &[prompt]);
        let mut context = prompt;
        // (right drafts, wrong drafts after them), no drafts after rounds of both kinds included.
        let rounds =
            [(2, 2), (0, 0), (3, 0), (0, 0), (0, 6), (6, 0), (0, 1), (1, 0), (0, 0), (4, 2), (5, 1), (0, 3)];
        for (right, wrong) in rounds {
            let mut drafts = all[context + 1..context + 1 + right].to_vec();
            drafts.extend((0..wrong).map(|i| (all[context + 1 + right] + 1 + i) % 400));
            let part = Part {
                slot: 1,
                context,
                tokens: &all[context..context + 1],
                drafts: &drafts,
                want: Want::Logits { rows: 1 + drafts.len() },
            };
            let found = rig.run(&[part]).sequences.remove(0).logits;
            assert_same_bits(
                &format!("{name}, {right} right and {wrong} wrong at {context}"),
                &found[..=right],
                &plain[context..=context + right],
            );
            context += 1 + right;
        }
    }
}

#[test]
fn drafts_are_kept_as_far_as_they_are_what_sampling_gives() {
    let (mut rig, golden) = rig("hybrid-tiny-predictable");
    let prompt = golden.ids.len();
    let greedy = &golden.greedy;
    rig.logits(0, &golden.ids, &[prompt]);
    let drafts = [greedy[1], greedy[2], (greedy[3] + 1) % 400, greedy[4]];
    let output = rig.run(&[Part {
        slot: 0,
        context: prompt,
        tokens: &greedy[..1],
        drafts: &drafts,
        want: Want::Sample { seed: 3, position: prompt as u64 + 1, params: GREEDY },
    }]);
    assert_eq!(output.sequences[0].accepted, 2);
    assert_eq!(output.sequences[0].tokens, greedy[1..4]);
}

#[test]
fn log_probabilities_are_those_of_the_logits() {
    let (mut rig, golden) = rig("dense-llama-tiny");
    let tokens = &golden.ids[..60];
    let rows = rig.logits(0, tokens, &[60]);
    let targets = &golden.ids[1..61];
    let output = rig.run(&[Part::new(1, 0, tokens, Want::LogProbOf { targets })]);
    for ((row, &target), found) in rows.iter().zip(targets).zip(&output.sequences[0].logprobs) {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
        let right = f64::from(row[target as usize] - largest) - sum.ln();
        assert!((f64::from(*found) - right).abs() < 1e-5);
    }
}

#[test]
fn sixteen_bit_caches_are_close() {
    // 16-bit K and V cost about what the goldens' own 16-bit columns show; a state rounded after every step more.
    let golden = Golden::read(&fixture("hybrid-tiny"));
    for (kv_dtype, state_dtype, limit) in [
        (CacheDtype::F16, CacheDtype::F32, 2e-3),
        (CacheDtype::Bf16, CacheDtype::F32, 2e-2),
        (CacheDtype::F32, CacheDtype::F16, 5e-3),
        (CacheDtype::F32, CacheDtype::Bf16, 5e-2),
    ] {
        let mut rig =
            Rig::open(&fixture("hybrid-tiny"), Options { kv_dtype, state_dtype, ..Options::default() });
        let found = rig.logits(0, &golden.ids, &[20, 1]);
        let (_, relative) = errors(&found, &golden.logits);
        assert!(relative < limit && relative > 1e-6, "{kv_dtype:?} {state_dtype:?}: rms rel {relative:.2e}");
    }
}

#[test]
fn bf16_arithmetic_stays_within_the_bf16_columns() {
    if !isa::has_bf16() {
        skip("bf16_arithmetic_stays_within_the_bf16_columns", "this CPU has no bf16 products");
        return;
    }
    for name in ["dense-qwen2-tiny", "dense-qwen3-tiny", "dense-llama-tiny", "hybrid-tiny-predictable"] {
        let golden = Golden::read(&fixture(name));
        let mut rig = Rig::open(&fixture(name), Options { math: CpuMath::Bf16, ..Options::default() });
        let limit = golden.json["suggested_tolerance"]["bfloat16_rms_rel"].as_f64().unwrap();
        for pieces in [&[150][..], &[40, 1]] {
            let found = rig.logits(0, &golden.ids, pieces);
            let (_, relative) = errors(&found[golden.first..], &golden.logits);
            assert!(relative < limit, "{name} {pieces:?}: rms rel {relative:.2e}, limit {limit:.2e}");
            assert!(relative > 1e-5, "{name}: this was not bf16 arithmetic");
        }
    }
}

#[test]
fn activations_of_16_bits_stay_close_and_apart() {
    for name in ["hybrid-geom-awq", "hybrid-geom-awq-mlp", "hybrid-geom-ct"] {
        let golden = Golden::read(&fixture(name));
        let mut rig = Rig::open(&fixture(name), Options { math: CpuMath::Int16, ..Options::default() });
        let mut alone = Vec::new();
        for pieces in [&[golden.ids.len()][..], &[64, 86], &[140, 1]] {
            alone = rig.logits(0, &golden.ids, pieces);
            let (_, relative) = errors(&alone[golden.first..], &golden.logits);
            assert!(relative < 5e-4, "{name} {pieces:?}: rms rel {relative:.2e}");
        }
        // The last step again, with company.
        rig.logits(1, &golden.ids, &[140, 1]);
        rig.logits(0, &golden.ids[..149], &[140, 1]);
        let last = [golden.ids[149]];
        let step = rig.run(&[Part::logits(1, 150, &last), Part::logits(0, 149, &last)]);
        assert_same_bits(name, &step.sequences[1].logits, &alone[149..]);
    }
}

#[test]
fn impossible_steps_are_errors() {
    let (mut rig, golden) = rig("hybrid-tiny");
    let error = rig.try_run(&[Part::logits(0, 0, &[1, 2, 512])]).unwrap_err();
    assert!(error.to_string().contains("512"), "{error}");
    assert_eq!(error.exit_code(), 2);
    // A slot that holds 10 tokens cannot go on from 12, nor from 9.
    rig.logits(1, &golden.ids[..10], &[10]);
    assert!(rig.try_run(&[Part::logits(1, 12, &[1])]).is_err());
    assert!(rig.try_run(&[Part::logits(1, 9, &[1])]).is_err());
    assert!(rig.try_run(&[Part::logits(1, 10, &[1])]).is_ok());
}
