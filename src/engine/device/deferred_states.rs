//! Recurrent states that are read in every step and written in one of a few: on which GPUs, and how often. What the real
//! devices do, their simulations do.

use crate::engine::config::CacheDtype;
use crate::engine::model::spec::DeltaNet;

/// Tokens from one write of a state to the next, where nothing else is asked for: beyond it reading the pairs costs as much
/// as the writes that are saved.
pub const WRITE_INTERVAL: usize = 8;

/// Whether a GPU of this compute capability (times ten) has kernels that leave such states unwritten for a few tokens. What
/// they take is Hopper's shared memory: the GPUs of capability 12 have its instructions, and less than half of it.
pub fn defers_states(capability: i32, shape: &DeltaNet, state: CacheDtype) -> bool {
    (90..120).contains(&capability)
        && (shape.key_dim, shape.value_dim) == (128, 128)
        && matches!(state, CacheDtype::F32 | CacheDtype::Auto)
}
