//! Steps of a session on the CPU device, timed: prompts and decode of up to [`SLOTS`] sequences.

use std::time::Instant;

use inferwall::engine::config::{CacheDtype, KvLayout, LastLayer};
use inferwall::engine::device::{CachePlan, Input, KernelRecord, SequenceStep, Session, Step, Want};
use inferwall::engine::model::spec::ModelSpec;
use inferwall::engine::request::{RequestId, SamplingParams};

const GREEDY: SamplingParams = SamplingParams { temperature: 0.0, top_k: 0, top_p: 1.0 };
const BLOCK_TOKENS: usize = 16;
const MAX_LEN: usize = 1024;
/// Most sequences at once.
const SLOTS: usize = 16;
/// Context that decode starts from.
pub const CONTEXT: usize = 128;

pub fn plan(spec: &ModelSpec) -> CachePlan {
    CachePlan {
        layout: KvLayout::Split,
        block_tokens: BLOCK_TOKENS,
        kv_blocks: SLOTS * MAX_LEN / BLOCK_TOKENS,
        state_slots: if spec.is_hybrid() { SLOTS } else { 0 },
        kv_dtype: CacheDtype::F32,
        state_dtype: CacheDtype::F32,
        state_write_interval: 1,
        last_layer: LastLayer::All,
        max_model_len: MAX_LEN,
        max_num_seqs: SLOTS,
        max_num_batched_tokens: 2048,
        max_drafts: 0,
    }
}

fn blocks(slot: usize) -> Vec<u32> {
    (0..MAX_LEN / BLOCK_TOKENS).map(|i| (i * SLOTS + slot) as u32).collect()
}

pub fn prefill(session: &mut dyn Session, tokens: usize, trace: bool) -> (f64, Vec<KernelRecord>) {
    let ids: Vec<u32> = (0..tokens).map(|i| (i * 7919 % 30_000) as u32).collect();
    run(session, &[(0, 0, &ids)], trace)
}

pub fn prefill_slot(session: &mut dyn Session, slot: usize, tokens: usize) {
    let ids: Vec<u32> = (0..tokens).map(|i| ((i + slot) * 7919 % 30_000) as u32).collect();
    run(session, &[(slot, 0, &ids)], false);
}

pub fn decode(
    session: &mut dyn Session,
    batch: usize,
    context: usize,
    trace: bool,
) -> (f64, Vec<KernelRecord>) {
    let ids: Vec<[u32; 1]> = (0..batch).map(|slot| [(slot * 31 + context) as u32]).collect();
    let parts: Vec<(usize, usize, &[u32])> =
        ids.iter().enumerate().map(|(slot, ids)| (slot, context, &ids[..])).collect();
    run(session, &parts, trace)
}

/// Seconds of one step of (slot, context, tokens), each sampled greedily.
fn run(session: &mut dyn Session, parts: &[(usize, usize, &[u32])], trace: bool) -> (f64, Vec<KernelRecord>) {
    let tables: Vec<Vec<u32>> = parts.iter().map(|part| blocks(part.0)).collect();
    let sequences = parts
        .iter()
        .zip(&tables)
        .map(|(&(slot, context, ids), table)| SequenceStep {
            request: RequestId(slot as u64),
            state_slot: Some(slot as u32),
            blocks: &table[..(context + ids.len()).div_ceil(BLOCK_TOKENS)],
            context_tokens: context,
            input: Input::Known(ids),
            drafts: &[],
            want: Want::Sample { seed: 0, position: (context + ids.len()) as u64, params: GREEDY },
        })
        .collect();
    let start = Instant::now();
    let ticket = session.submit(&Step { sequences, trace }).expect("a step");
    let output = session.wait(ticket).expect("a step's output");
    (start.elapsed().as_secs_f64(), output.kernels)
}
