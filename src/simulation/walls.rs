//! The walls ahead of an arm, by arithmetic on its model, pools and device: at how many sequences or tokens a step each
//! resource takes over.

use serde::Serialize;

use crate::engine::account::{Ceilings, CostModel};
use crate::engine::cache::shape::CacheShape;
use crate::engine::config::KvLayout;
use crate::engine::device::CachePlan;
use crate::engine::model::layout::ModelLayout;
use crate::workload::spec::LoadSpec;

/// Where a resource takes over.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Wall {
    /// `compute`, `state`, `kv`, `blocks`, `seats`, `token_budget`.
    pub resource: &'static str,
    pub at: f64,
    /// `sequences`, `tokens a step`, `prompts a step`.
    pub unit: &'static str,
    pub text: String,
}

/// Sequences of `tokens` tokens that the pools hold at once, and those that the same memory would hold in the other layout.
pub fn seats(layout: &ModelLayout, plan: &CachePlan, tokens: usize) -> (usize, usize) {
    let shape = CacheShape::new(&layout.spec, plan.kv_dtype, plan.state_dtype, plan.max_drafts);
    let block_bytes = shape.block_bytes(plan.block_tokens);
    let unified = |blocks: u64, block_tokens: usize| {
        (blocks.saturating_sub(1) / shape.unified_request_blocks(tokens, block_tokens).max(1) as u64) as usize
    };
    let small_blocks = 16;
    let split_seat_bytes =
        shape.state_bytes() + tokens.div_ceil(small_blocks) as u64 * shape.block_bytes(small_blocks);
    match plan.layout {
        KvLayout::Unified => {
            let pool_bytes = plan.kv_blocks as u64 * block_bytes;
            (
                unified(plan.kv_blocks as u64, plan.block_tokens),
                (pool_bytes / split_seat_bytes.max(1)) as usize,
            )
        }
        KvLayout::Split => {
            let by_blocks = plan.kv_blocks / tokens.div_ceil(plan.block_tokens).max(1);
            let here = if shape.is_hybrid() { by_blocks.min(plan.state_slots) } else { by_blocks };
            let pool_bytes =
                plan.kv_blocks as u64 * block_bytes + plan.state_slots as u64 * shape.state_bytes();
            let block_tokens = shape.unified_block_tokens(plan.block_tokens);
            (here, unified(pool_bytes / shape.block_bytes(block_tokens).max(1), block_tokens))
        }
    }
}

/// All walls that apply, nearest kinds first: pools, then memory classes, then compute, then the budget.
pub fn of(
    layout: &ModelLayout,
    plan: &CachePlan,
    costs: &CostModel,
    ceilings: Option<&Ceilings>,
    load: &LoadSpec,
) -> Vec<Wall> {
    let mut walls = Vec::new();
    let tokens = load.input_len + load.output_len;
    let (here, other) = seats(layout, plan, tokens);
    let other_layout = match plan.layout {
        KvLayout::Unified => "split",
        KvLayout::Split => "unified",
    };
    let alternative = if layout.spec.is_hybrid() {
        format!("; with the {other_layout} layout the same memory would hold {other}")
    } else {
        String::new()
    };
    // A pool that holds all the seats is no wall: it is as large as they can use, or larger.
    let seats_stop = plan.max_num_seqs <= here;
    walls.push(Wall {
        resource: if seats_stop { "seats" } else { "blocks" },
        at: here.min(plan.max_num_seqs) as f64,
        unit: "sequences",
        text: match (seats_stop, plan.max_num_seqs == here) {
            (true, true) => {
                format!("max_num_seqs stops at {here} sequences, and the pool is sized for them ({tokens} tokens each)")
            }
            (true, false) => format!(
                "max_num_seqs stops at {} sequences; the pool would hold {here} of {tokens} tokens{alternative}",
                plan.max_num_seqs
            ),
            (false, _) => format!("the pool fills at {here} sequences of {tokens} tokens{alternative}"),
        },
    });

    let weights = (costs.layer_weight_bytes + costs.head_weight_bytes) as f64;
    if let Some(ceilings) = ceilings {
        let stream_s = weights / ceilings.read_bytes_per_s;
        let decode_s = (costs.layer_flops_per_token + costs.head_flops_per_row) as f64 / ceilings.flops_per_s;
        let prefill_s = costs.prefill_flops_per_token() as f64 / ceilings.flops_per_s;
        walls.push(Wall {
            resource: "compute",
            at: stream_s / prefill_s,
            unit: "tokens a step",
            text: format!(
                "products take longer than the weights' stream from {:.0} prompt tokens a step on ({:.0} decodes, whose \
                 head counts too)",
                stream_s / prefill_s,
                stream_s / decode_s
            ),
        });
    }
    let mean_context = load.input_len as f64 + load.output_len as f64 / 2.0;
    let state = costs.decode_state_bytes() as f64;
    let kv = mean_context * costs.kv_bytes_per_token as f64;
    if state > 0.0 {
        walls.push(Wall {
            resource: "state",
            at: weights / state,
            unit: "sequences",
            text: format!(
                "recurrent states move as many bytes as the weights at {:.0} sequences ({:.1} MB each, read and written)",
                weights / state,
                state / 1e6
            ),
        });
    }
    if kv > 0.0 {
        walls.push(Wall {
            resource: "kv",
            at: weights / kv,
            unit: "sequences",
            text: format!(
                "K and V of {mean_context:.0} tokens a sequence move as many bytes as the weights at {:.0} sequences \
                 ({:.1} MB each)",
                weights / kv,
                kv / 1e6
            ),
        });
    }
    let prompts = plan.max_num_batched_tokens as f64 / load.input_len.max(1) as f64;
    walls.push(Wall {
        resource: "token_budget",
        at: prompts,
        unit: "prompts a step",
        text: format!(
            "a step takes {} new tokens: {prompts:.1} prompts of {} tokens",
            plan.max_num_batched_tokens, load.input_len
        ),
    });
    walls
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::config::{CacheDtype, LastLayer};
    use crate::engine::model::presets::synthetic_layout;

    #[test]
    fn the_series_pool_holds_146_and_would_hold_158_split() {
        let layout = synthetic_layout("qwen3.5-4b").unwrap();
        let plan = CachePlan {
            layout: KvLayout::Unified,
            block_tokens: 528,
            kv_blocks: 586,
            state_slots: 256,
            kv_dtype: CacheDtype::F16,
            state_dtype: CacheDtype::F32,
            state_write_interval: 1,
            last_layer: LastLayer::All,
            max_model_len: 2048,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            max_drafts: 0,
        };
        assert_eq!(seats(&layout, &plan, 384), (146, 158));
        let ceilings = Ceilings {
            read_bytes_per_s: 483e9,
            copy_bytes_per_s: 483e9,
            flops_per_s: 48.7e12,
            launch_s: 0.0,
            measured: false,
        };
        let walls =
            of(&layout, &plan, &CostModel::new(&layout, &plan), Some(&ceilings), &LoadSpec::default());
        let at = |resource| walls.iter().find(|wall| wall.resource == resource).unwrap().at;
        assert_eq!(at("blocks"), 146.0);
        assert!((at("compute") - 118.8).abs() < 1.0, "{}", at("compute"));
        assert!((at("state") - 81.6).abs() < 0.5, "{}", at("state"));
        assert_eq!(at("token_budget"), 8.0);
    }
}
