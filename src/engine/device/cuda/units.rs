//! Every kernel source in the binary, as units to compile. A new `.cu` file is one entry here; the tests compile each for
//! every target and read its registers and spills.

use super::compile::{ANY_LATER, Unit};

pub const NORM: Unit = Unit {
    file: "norm.cu",
    source: include_str!("../../../../cuda/norm.cu"),
    defines: &[],
    hot: &["embed_norm", "add_norm"],
    min_capability: 80,
    max_capability: ANY_LATER,
};

pub const PREFILL_ATTENTION: Unit = Unit {
    file: "prefill_attention.cu",
    source: include_str!("../../../../cuda/prefill_attention.cu"),
    defines: &[],
    hot: &["prefill_attention_64", "prefill_attention_128", "prefill_attention_256"],
    min_capability: 80,
    max_capability: ANY_LATER,
};

pub const PREFILL_ATTENTION_HOPPER: Unit = Unit {
    file: "prefill_attention_hopper.cu",
    source: include_str!("../../../../cuda/prefill_attention_hopper.cu"),
    defines: &[],
    hot: &["prefill_attention_128", "prefill_attention_256"],
    min_capability: 90,
    max_capability: 90,
};

/// All of them.
pub const ALL: &[&Unit] = &[&NORM, &PREFILL_ATTENTION, &PREFILL_ATTENTION_HOPPER];
