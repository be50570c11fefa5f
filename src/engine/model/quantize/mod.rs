//! 16-bit checkpoints to 4-bit ones, in the two published formats: AutoAWQ GEMM and compressed-tensors pack-quantized.
//!
//! [`selection`] names the modules, [`grid`] rounds them to nearest, [`write`] streams the new files out: one module is in
//! memory at a time. [`awq`] finds scales from calibration text first, folded into what comes before a module.

mod awq;
mod config;
mod grid;
pub mod inputs;
mod selection;
mod write;

use std::path::Path;

use self::awq::Folds;
pub use self::awq::Gain;
use self::inputs::Inputs;
use super::folder::{self, Loaded};
use super::new_folder::NewFolder;
use crate::Result;

/// The format of the files to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileFormat {
    /// AutoAWQ GEMM, with zero points.
    Awq,
    /// compressed-tensors pack-quantized, symmetric.
    CompressedTensors,
}

#[derive(Debug, Clone)]
pub struct Options {
    pub format: FileFormat,
    /// Columns that share a scale.
    pub group: usize,
    /// Parts of the paths of modules that stay in 16 bits.
    pub skip: Vec<String>,
}

/// What was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Written {
    pub modules: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// What scales gained, where they were searched.
    pub gain: Option<Gain>,
}

/// Told what is being done, and how much of it: (what, done, total).
pub type Progress<'a> = &'a mut dyn FnMut(&str, u64, u64);

/// Runs calibration text through the model. Called once everything else has been checked.
pub type Calibrate<'a> = &'a mut dyn FnMut(Progress<'_>) -> Result<Inputs>;

/// Quantises the checkpoint folder `source` into the new folder `out`: with `calibrate` by AWQ, else to nearest.
///
/// # Errors
/// A module that the format cannot hold, a folder that is not empty.
pub fn run(
    source: &Path,
    name: &str,
    options: &Options,
    calibrate: Option<Calibrate<'_>>,
    out: &Path,
    progress: Progress<'_>,
) -> Result<Written> {
    NewFolder::check(out)?;
    let Loaded { checkpoint, layout, .. } = folder::load(source, name)?;
    let spec = &layout.spec;
    let grids = selection::select(&checkpoint, spec, options.format, options.group, &options.skip)?;
    // Before the calibration, which takes minutes: a place that cannot be written is known by then.
    let mut folder = NewFolder::create(out)?;
    let (folds, gain) = match calibrate {
        Some(calibrate) => {
            let inputs = calibrate(progress)?;
            let (folds, gain) = awq::plan(&checkpoint, spec, &grids, &inputs, &mut |done, total| {
                progress("scales of groups", done, total);
            })?;
            (folds, Some(gain))
        }
        None => (Folds::default(), None),
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let work = write::Work { checkpoint: &checkpoint, spec, grids: &grids, folds: &folds, threads };
    let bytes = work.write(&folder.file("model.safetensors"), &mut |done, total| {
        progress("writing bytes", done, total);
    })?;
    config::copy_companions(source, &mut folder)?;
    // Last, so that a folder with a config.json is whole.
    config::write(source, &folder.file("config.json"), options, &checkpoint, &grids)?;
    folder.keep();
    Ok(Written { modules: grids.len(), bytes, gain })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::inputs::Point;
    use super::*;
    use crate::engine::Engine;
    use crate::engine::cache::plan::plan_cache;
    use crate::engine::config::{CacheDtype, CpuMath, EngineConfig};
    use crate::engine::device::cpu::CpuDevice;
    use crate::engine::device::{Device, LoadOptions};
    use crate::engine::model::checkpoint::Checkpoint;
    use crate::engine::model::dequant::rows_to_f32;
    use crate::engine::model::safetensors_file::{Dtype, header_bytes};
    use crate::engine::model::spec::Linear;
    use crate::engine::model::tensor_files::widen;
    use crate::engine::model::weights::Weights;
    use crate::engine::model::{ModelRef, OpenOptions, open};

    /// Logits after each of some tokens.
    fn logits(folder: &Path) -> Vec<Vec<f32>> {
        let opened = open(&ModelRef::Folder(folder.to_path_buf()), &OpenOptions::default()).unwrap();
        let config = EngineConfig { max_num_seqs: 1, max_model_len: 64, ..EngineConfig::default() };
        let mut device = CpuDevice::new(Some(1)).unwrap();
        let f32 = (CacheDtype::F32, CacheDtype::F32);
        let pools = plan_cache(&opened.layout, &config, 1 << 32, 1 << 32, f32, Some(64)).unwrap();
        let options = LoadOptions { cpu_math: CpuMath::F32, threads: None };
        let model = device.load(&opened.layout, &opened.weights, &options, &mut |_| {}).unwrap();
        let mut engine = Engine::new(model.as_ref(), pools, config, None, device.clock()).unwrap();
        let tokens: Vec<u32> = (0..40).map(|i| i * 7 % 50).collect();
        engine.logits(&tokens, tokens.len()).unwrap()
    }

    /// The fixture with all its tensors in f32.
    fn widened(source: &Path, out: &Path) {
        let loaded = folder::load(source, "source").unwrap();
        let files = loaded.checkpoint.files();
        let all: Vec<_> = files.all().collect();
        let shapes =
            all.iter().map(|stored| (stored.entry.name.as_str(), Dtype::F32, stored.entry.shape.as_slice()));
        let (mut bytes, _) = header_bytes(shapes);
        for stored in &all {
            bytes.extend(widen(files, stored).unwrap().iter().flat_map(|value| value.to_le_bytes()));
        }
        std::fs::write(out.join("model.safetensors"), bytes).unwrap();
        std::fs::copy(source.join("config.json"), out.join("config.json")).unwrap();
        std::fs::copy(source.join("tokenizer.json"), out.join("tokenizer.json")).unwrap();
    }

    /// Inputs in which some channels are a thousand times others, so that every group is scaled.
    fn uneven(spec: &crate::engine::model::spec::ModelSpec) -> Inputs {
        let mut inputs = Inputs::new(spec.layers.len());
        for group in awq::groups::groups(spec) {
            let cols = group.classes.len();
            let rows = inputs.rows_mut(group.layer, group.point);
            rows.cols = cols;
            rows.values = (0..32 * cols)
                .map(|i| {
                    let class = group.classes[i % cols];
                    ((i * 37 + group.layer) as f32 * 0.71).sin() * 10f32.powi((class * 7 % 4) as i32 - 2)
                })
                .collect();
        }
        inputs
    }

    /// Scales change the tensors and nothing that the model says.
    #[test]
    fn folded_scales_cancel() {
        for name in ["hybrid-tiny", "dense-llama-tiny", "dense-qwen2-tiny", "dense-qwen3-tiny"] {
            let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
            let (before, after) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            widened(&fixture, before.path());
            let Loaded { checkpoint, layout, .. } = folder::load(before.path(), "source").unwrap();
            let spec = &layout.spec;
            let grids = selection::select(&checkpoint, spec, FileFormat::Awq, 32, &[]).unwrap();
            let (folds, gain) = awq::plan(&checkpoint, spec, &grids, &uneven(spec), &mut |_, _| {}).unwrap();
            assert!(gain.scaled == gain.groups && gain.error_ratio < 0.9, "{name}: {gain:?}");
            // Everything that was to be rounded is written as it is, scaled.
            let work = write::Work {
                checkpoint: &checkpoint,
                spec,
                grids: &HashMap::new(),
                folds: &folds,
                threads: 2,
            };
            work.write(&after.path().join("model.safetensors"), &mut |_, _| {}).unwrap();
            for file in ["config.json", "tokenizer.json"] {
                std::fs::copy(before.path().join(file), after.path().join(file)).unwrap();
            }
            let changed = folder::load(after.path(), "scaled").unwrap();
            let vector = "layers.0.post_attention_layernorm.weight";
            assert_ne!(
                changed.checkpoint.stored_vector(vector).unwrap(),
                checkpoint.stored_vector(vector).unwrap(),
                "{name}"
            );
            let (before, after) = (logits(before.path()), logits(after.path()));
            let size = before.iter().flatten().fold(0f32, |most, x| most.max(x.abs()));
            for (before, after) in before.iter().flatten().zip(after.iter().flatten()) {
                assert!((before - after).abs() < 2e-5 * size, "{name}: {before} {after}, largest {size}");
            }
        }
    }

    /// What the search is for: on the activations that it saw, the rounded modules' outputs are nearer to the original
    /// ones than those rounded to nearest. (The loss of a whole model of random weights may still go either way.)
    #[test]
    fn outputs_on_the_calibration_are_nearer_than_with_rounding_to_nearest() {
        for name in ["hybrid-tiny", "dense-llama-tiny", "dense-qwen2-tiny", "dense-qwen3-tiny"] {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
            let opened = open(&ModelRef::Folder(source.clone()), &OpenOptions::default()).unwrap();
            let Loaded { checkpoint, layout, .. } = folder::load(&source, "source").unwrap();
            let spec = &layout.spec;
            let tokens: Vec<u32> = (0..256).map(|i| (i * 13 + i * i / 7 * 5) % 60).collect();
            let windows: Vec<&[u32]> = tokens.chunks(64).collect();
            let mut device = CpuDevice::new(Some(1)).unwrap();
            let inputs =
                device.capture_inputs(&opened.layout, &opened.weights, &windows, 2, &mut |_, _| {}).unwrap();
            for format in [FileFormat::Awq, FileFormat::CompressedTensors] {
                let grids = selection::select(&checkpoint, spec, format, 32, &[]).unwrap();
                let (scaled, gain) = awq::plan(&checkpoint, spec, &grids, &inputs, &mut |_, _| {}).unwrap();
                assert!(gain.error_ratio <= 1.0, "{name} {format:?} {gain:?}");
                let read = |folds: &Folds| {
                    let out = tempfile::tempdir().unwrap();
                    let work =
                        write::Work { checkpoint: &checkpoint, spec, grids: &grids, folds, threads: 1 };
                    let mut folder = NewFolder::create(out.path()).unwrap();
                    work.write(&folder.file("model.safetensors"), &mut |_, _| {}).unwrap();
                    config::copy_companions(&source, &mut folder).unwrap();
                    let options = Options { format, group: 32, skip: Vec::new() };
                    let to = folder.file("config.json");
                    config::write(&source, &to, &options, &checkpoint, &grids).unwrap();
                    folder.keep();
                    let written = folder::load(out.path(), "written").unwrap().checkpoint;
                    let modules = grids.keys().map(|linear| (*linear, effective(&written, linear, folds)));
                    modules.collect::<HashMap<Linear, Vec<f32>>>()
                };
                let (scaled, nearest) = (read(&scaled), read(&Folds::default()));
                for point in [Point::MixerIn, Point::MixerOut, Point::MlpIn, Point::MlpOut] {
                    let (mut after, mut before) = (0.0, 0.0);
                    for group in awq::groups::groups(spec).iter().filter(|group| group.point == point) {
                        let rows = inputs.rows(group.layer, point);
                        for linear in group.linears.iter().filter(|linear| grids.contains_key(linear)) {
                            let original = effective(&checkpoint, linear, &Folds::default());
                            after += output_error(&rows.values, &original, &scaled[linear], linear.cols);
                            before += output_error(&rows.values, &original, &nearest[linear], linear.cols);
                        }
                    }
                    assert!(after < 0.9 * before, "{name} {format:?} {point:?}: {after} {before}");
                }
            }
        }
    }

    /// A module's weights with what was folded into them divided out again.
    fn effective(checkpoint: &Checkpoint, linear: &Linear, folds: &Folds) -> Vec<f32> {
        let Linear { rows, cols, .. } = *linear;
        let mut all = vec![0f32; rows * cols];
        rows_to_f32(&checkpoint.linear(linear).unwrap(), rows, cols, 0..rows, &mut all);
        for (row, values) in all.chunks_exact_mut(cols).enumerate() {
            let divisor = folds.rows.get(linear).map_or(1.0, |rows| rows[row]);
            for (col, value) in values.iter_mut().enumerate() {
                *value *= divisor / folds.columns.get(linear).map_or(1.0, |columns| columns[col]);
            }
        }
        all
    }

    /// Sum of squared differences of x Wᵀ over the rows of x.
    fn output_error(inputs: &[f32], right: &[f32], found: &[f32], cols: usize) -> f64 {
        let moved: Vec<f32> = right.iter().zip(found).map(|(right, found)| found - right).collect();
        let dot = |x: &[f32], d: &[f32]| x.iter().zip(d).map(|(x, d)| x * d).sum::<f32>();
        let of_row = |x: &[f32]| moved.chunks_exact(cols).map(|d| f64::from(dot(x, d)).powi(2)).sum::<f64>();
        inputs.chunks_exact(cols).map(of_row).sum()
    }

    #[test]
    fn a_place_that_cannot_be_written_is_known_before_the_calibration() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/dense-llama-tiny");
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("file"), "").unwrap();
        let options = Options { format: FileFormat::Awq, group: 32, skip: Vec::new() };
        let mut calibrate = |_: Progress<'_>| -> Result<Inputs> { panic!("calibrated") };
        let out = place.path().join("file/under");
        let error = run(&fixture, "source", &options, Some(&mut calibrate), &out, &mut |_, _, _| {});
        assert_eq!(error.unwrap_err().exit_code(), 2);
    }

    #[test]
    fn every_group_has_its_own_point_and_all_linears_but_the_head_are_in_one() {
        for preset in ["demo", "qwen2.5-7b", "qwen3.5-9b"] {
            let spec = crate::engine::model::synthetic_layout(preset).unwrap().spec;
            let groups = awq::groups::groups(&spec);
            assert_eq!(groups.len(), 4 * spec.layers.len());
            let linears: usize = groups.iter().map(|group| group.linears.len()).sum();
            assert_eq!(linears, spec.linears().len() - 1, "{preset}");
            for group in &groups {
                assert!(
                    group.linears.iter().all(|linear| linear.cols == group.classes.len()),
                    "{preset} {group:?}"
                );
                if group.point == Point::MlpOut {
                    assert_eq!(group.classes.len(), spec.intermediate_size);
                }
            }
        }
    }
}
