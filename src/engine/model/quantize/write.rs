//! Streams the new `model.safetensors` out, module by module, in the order of the source's tensors. What does not
//! change is copied byte for byte: embedding, head, vision tower, multi-token prediction.
//!
//! Rows are rounded by several threads; which one takes a row changes nothing.

use std::collections::HashMap;
use std::io::{BufWriter, Write};
use std::path::Path;

use super::super::checkpoint::Checkpoint;
use super::super::dequant::rows_to_f32;
use super::super::layout::WeightFormat;
use super::super::safetensors_file::{Dtype, header_bytes};
use super::super::spec::{Linear, ModelSpec};
use super::super::tensor_files::{Stored, canonical};
use super::super::weights::Weights;
use super::FileFormat;
use super::awq::Folds;
use super::grid::{Grid, PackedModule, Step};
use crate::{Error, Result};

/// Rows read at a time: a multiple of the 8 of a packed word.
const ROWS: usize = 256;

pub struct Work<'a> {
    pub checkpoint: &'a Checkpoint,
    pub spec: &'a ModelSpec,
    /// The modules to round, and how.
    pub grids: &'a HashMap<Linear, Grid>,
    pub folds: &'a Folds,
    pub threads: usize,
}

/// One or more tensors of the new file that are made together.
struct Job<'a> {
    tensors: Vec<(String, Dtype, Vec<usize>)>,
    content: Content<'a>,
}

enum Content<'a> {
    Copy(&'a Stored),
    Packed(Linear, Grid),
    /// A 16-bit module whose columns or rows take a scale.
    Scaled(Linear, WeightFormat),
    Vector(&'a [f32], WeightFormat),
}

impl Work<'_> {
    /// Writes all tensors to `path`; returns their bytes. `progress` is told bytes done and in all.
    pub fn write(&self, path: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<u64> {
        let jobs = self.jobs()?;
        let tensors = jobs.iter().flat_map(|job| &job.tensors);
        let (header, total) =
            header_bytes(tensors.map(|(name, dtype, shape)| (name.as_str(), *dtype, shape.as_slice())));
        let failed = |error: std::io::Error| Error::write(path, &error);
        let mut file = BufWriter::with_capacity(1 << 20, std::fs::File::create(path).map_err(failed)?);
        file.write_all(&header).map_err(failed)?;
        let mut done = 0;
        for job in &jobs {
            let bytes = self.bytes(job)?;
            let bytes = match (&bytes, &job.content) {
                (None, Content::Copy(stored)) => self.checkpoint.files().bytes(stored),
                (bytes, _) => bytes.as_deref().unwrap_or_default(),
            };
            file.write_all(bytes).map_err(failed)?;
            done += bytes.len() as u64;
            progress(done, total);
        }
        let file = file.into_inner().map_err(|error| failed(error.into_error()))?;
        file.sync_all().map_err(failed)?;
        Ok(total)
    }

    fn jobs(&self) -> Result<Vec<Job<'_>>> {
        let linears: HashMap<String, Linear> = self
            .spec
            .linears()
            .into_iter()
            .map(|linear| (format!("{}.weight", linear.name()), linear))
            .collect();
        self.checkpoint.files().all().map(|stored| self.job(stored, &linears)).collect()
    }

    fn job<'a>(&'a self, stored: &'a Stored, linears: &HashMap<String, Linear>) -> Result<Job<'a>> {
        let entry = &stored.entry;
        let name = canonical(&entry.name);
        let same =
            |content| Job { tensors: vec![(entry.name.clone(), entry.dtype, entry.shape.clone())], content };
        let Some(format) = entry.dtype.weight_format() else { return Ok(same(Content::Copy(stored))) };
        if let Some(values) = self.folds.vectors.get(name) {
            return Ok(same(Content::Vector(values, format)));
        }
        let Some(linear) = linears.get(name) else { return Ok(same(Content::Copy(stored))) };
        let scaled = self.folds.columns.contains_key(linear) || self.folds.rows.contains_key(linear);
        match self.grids.get(linear) {
            Some(grid) => self.packed(&entry.name, *linear, *grid),
            None if scaled => Ok(same(Content::Scaled(*linear, format))),
            None => Ok(same(Content::Copy(stored))),
        }
    }

    fn packed(&self, name: &str, linear: Linear, grid: Grid) -> Result<Job<'_>> {
        let Linear { rows, cols, .. } = linear;
        let groups = cols / grid.group;
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let tensor =
            |part: &str, dtype, shape: [usize; 2]| (format!("{module}.{part}"), dtype, shape.to_vec());
        let tensors = match grid.format {
            FileFormat::Awq => vec![
                tensor("qweight", Dtype::I32, [cols, rows / 8]),
                tensor("qzeros", Dtype::I32, [groups, rows / 8]),
                tensor("scales", Dtype::F16, [groups, rows]),
            ],
            FileFormat::CompressedTensors => {
                let scales = if grid.scale_format == WeightFormat::Bf16 { Dtype::Bf16 } else { Dtype::F16 };
                vec![
                    tensor("weight_packed", Dtype::I32, [rows, cols / 8]),
                    tensor("weight_scale", scales, [rows, groups]),
                    (format!("{module}.weight_shape"), Dtype::I64, vec![2]),
                ]
            }
        };
        Ok(Job { tensors, content: Content::Packed(linear, grid) })
    }

    /// The bytes of a job's tensors one after the other; `None` for a copy.
    fn bytes(&self, job: &Job<'_>) -> Result<Option<Vec<u8>>> {
        let name = &job.tensors[0].0;
        let mut bytes = Vec::new();
        match &job.content {
            Content::Copy(_) => return Ok(None),
            Content::Vector(values, format) => store(name, *format, values, &mut bytes)?,
            Content::Scaled(linear, format) => {
                self.for_rows(linear, |_, values| store(name, *format, values, &mut bytes))?;
            }
            Content::Packed(linear, grid) => {
                let mut module = PackedModule::new(*grid, linear.rows, linear.cols);
                self.for_rows(linear, |first, values| {
                    let steps = self.steps(linear, *grid, values);
                    let rows =
                        values.chunks_exact(linear.cols).zip(steps.chunks_exact(linear.cols / grid.group));
                    for (row, (values, steps)) in rows.enumerate() {
                        let steps: Option<Vec<Step>> = steps.iter().copied().collect();
                        let steps = steps.ok_or_else(|| no_step(name, first + row))?;
                        module.set_row(first + row, values, &steps);
                    }
                    Ok(())
                })?;
                bytes.extend(module.weights.iter().flat_map(|word| word.to_le_bytes()));
                if grid.format == FileFormat::Awq {
                    bytes.extend(module.zeros.iter().flat_map(|word| word.to_le_bytes()));
                }
                bytes.extend(module.scales.iter().flat_map(|scale| scale.to_le_bytes()));
                if grid.format == FileFormat::CompressedTensors {
                    bytes.extend(
                        [linear.rows, linear.cols].iter().flat_map(|&size| (size as i64).to_le_bytes()),
                    );
                }
            }
        }
        Ok(Some(bytes))
    }

    /// The steps of all groups of some rows. NaN and infinities have none either; the former would round to the least
    /// integer.
    fn steps(&self, linear: &Linear, grid: Grid, values: &[f32]) -> Vec<Option<Step>> {
        let clip = self.folds.clips.get(linear);
        let groups = linear.cols / grid.group;
        let step = |at: usize, weights: &[f32]| {
            let finite = weights.iter().all(|weight| weight.is_finite());
            match clip {
                _ if !finite => None,
                Some(clip) => clip.step(grid, at % groups, weights),
                None => grid.step(weights, 1.0),
            }
        };
        let mut steps = vec![None; values.len() / grid.group];
        let part = steps.len().div_ceil(self.threads.max(1)).next_multiple_of(groups);
        std::thread::scope(|scope| {
            for (steps, values) in steps.chunks_mut(part).zip(values.chunks(part * grid.group)) {
                scope.spawn(move || {
                    for (at, (to, weights)) in
                        steps.iter_mut().zip(values.chunks_exact(grid.group)).enumerate()
                    {
                        *to = step(at, weights);
                    }
                });
            }
        });
        steps
    }

    /// Calls `take` with the first row and the values of a few rows at a time, scaled.
    fn for_rows(&self, linear: &Linear, mut take: impl FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        let Linear { rows, cols, .. } = *linear;
        let (columns, divisors) = (self.folds.columns.get(linear), self.folds.rows.get(linear));
        let mut values = vec![0f32; ROWS.min(rows) * cols];
        for start in (0..rows).step_by(ROWS) {
            let block = start..rows.min(start + ROWS);
            let values = &mut values[..block.len() * cols];
            rows_to_f32(&self.checkpoint.linear(linear)?, rows, cols, block.clone(), values);
            for (row, values) in block.zip(values.chunks_exact_mut(cols)) {
                if let Some(columns) = columns {
                    values.iter_mut().zip(columns).for_each(|(value, scale)| *value *= scale);
                }
                if let Some(divisors) = divisors {
                    values.iter_mut().for_each(|value| *value /= divisors[row]);
                }
            }
            take(start, values)?;
        }
        Ok(())
    }
}

/// Appends `values` in a float type.
fn store(name: &str, format: WeightFormat, values: &[f32], bytes: &mut Vec<u8>) -> Result<()> {
    for &value in values {
        let finite = match format {
            WeightFormat::F16 => {
                let value = half::f16::from_f32(value);
                bytes.extend(value.to_le_bytes());
                value.is_finite()
            }
            WeightFormat::Bf16 => {
                let value = half::bf16::from_f32(value);
                bytes.extend(value.to_le_bytes());
                value.is_finite()
            }
            _ => {
                bytes.extend(value.to_le_bytes());
                value.is_finite()
            }
        };
        if !finite {
            return Err(Error::invalid(
                format!("tensor `{name}`: {value} does not fit its type once scaled"),
                "use --method rtn, or keep the modules beside it in 16 bits with --skip",
            ));
        }
    }
    Ok(())
}

fn no_step(name: &str, row: usize) -> Error {
    Error::invalid(
        format!(
            "row {row} of tensor `{name}` has a weight that is not finite or too large for a 16-bit scale"
        ),
        "the checkpoint may be damaged: fetch it again, or keep the module in 16 bits with --skip",
    )
}
