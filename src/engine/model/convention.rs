//! Weights in another engine's convention, told by their values. Such a file loads without complaint and then talks
//! nonsense, so it is refused here with the reason.
//!
//! GGUF files (and folders converted back from them) hold -exp(A_log) in place of A_log, norms with the one already
//! added, and value heads in another order. The type of A_log says nothing: published files have it in f32.

use super::checkpoint::Checkpoint;
use super::spec::{Mixer, ModelSpec};
use super::weights::Weights;
use crate::{Error, Result};

const HINT: &str =
    "the weights were converted for another engine (GGUF or MLX): use the published checkpoint";

/// Reads every vector once, which also finds values that are not finite.
pub fn check(checkpoint: &Checkpoint, spec: &ModelSpec) -> Result<()> {
    let mut norms = Vec::new();
    let mut decays = Vec::new();
    for (name, shape) in super::checkpoint::vectors(spec) {
        let values = checkpoint.vector(&name, shape.iter().product())?;
        if name.ends_with("A_log") {
            decays.extend(values);
        } else if name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight") {
            norms.extend(values);
        }
    }
    if spec.layers.contains(&Mixer::DeltaNet) && already_negated(&decays) {
        return Err(Error::invalid(
            format!(
                "{}: none of the {} entries of `linear_attn.A_log` is positive, as of -exp(A_log); \
                 expected the logarithm itself",
                spec.name,
                decays.len()
            ),
            HINT,
        ));
    }
    if spec.norm_plus_one && already_plus_one(&norms) {
        return Err(Error::invalid(
            format!(
                "{}: the norm weights are centred on one, with hardly a negative entry; expected them minus one",
                spec.name
            ),
            HINT,
        ));
    }
    Ok(())
}

/// -exp(x) is never positive; among the logarithms of decay rates, which start between 0 and ln 16, some are.
fn already_negated(decays: &[f32]) -> bool {
    decays.iter().all(|&value| value <= 0.0)
}

/// Weights stored minus one have both signs. Those with the one added are positive but for rare outliers.
fn already_plus_one(norms: &[f32]) -> bool {
    let mean = norms.iter().map(|&w| f64::from(w)).sum::<f64>() / norms.len().max(1) as f64;
    let negative = norms.iter().filter(|&&w| w < 0.0).count();
    mean > 0.5 && negative * 1000 <= norms.len()
}
