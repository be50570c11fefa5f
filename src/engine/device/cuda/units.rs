//! Every kernel source in the binary, as units to compile. A new `.cu` file is one entry here; the tests compile each for
//! every target and read its registers and spills.

use super::compile::Unit;

pub const NORM: Unit = Unit {
    file: "norm.cu",
    source: include_str!("../../../../cuda/norm.cu"),
    defines: &[],
    hot: &["embed_norm", "add_norm"],
    min_capability: 80,
};

/// All of them.
pub const ALL: &[&Unit] = &[&NORM];
