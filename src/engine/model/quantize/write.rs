//! Streams the new `model.safetensors` out, module by module, in the order of the source's tensors. What does not
//! change is copied byte for byte: embedding, head, vision tower, multi-token prediction.

use std::collections::{HashMap, HashSet};
use std::io::{BufWriter, Write};
use std::path::Path;

use super::super::checkpoint::{Checkpoint, Stored, canonical};
use super::super::dequant::rows_to_f32;
use super::super::layout::WeightFormat;
use super::super::safetensors_file::{Dtype, header_bytes};
use super::super::spec::{Linear, ModelSpec};
use super::super::weights::Weights;
use super::FileFormat;
use super::grid::{Grid, PackedModule};
use super::selection::scale_format;
use crate::{Error, Result};

/// Rows read at a time: a multiple of the 8 of a packed word.
const ROWS: usize = 64;

pub struct Work<'a> {
    pub checkpoint: &'a Checkpoint,
    pub spec: &'a ModelSpec,
    pub chosen: &'a HashSet<Linear>,
    pub format: FileFormat,
    pub group: usize,
}

/// One or more tensors of the new file that are made together.
struct Job<'a> {
    tensors: Vec<(String, Dtype, Vec<usize>)>,
    content: Content<'a>,
}

enum Content<'a> {
    Copy(&'a Stored),
    Packed(Linear, Grid),
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
        match linears.get(name) {
            Some(linear) if self.chosen.contains(linear) => self.packed(&entry.name, *linear, format),
            _ => Ok(same(Content::Copy(stored))),
        }
    }

    fn packed(&self, name: &str, linear: Linear, format: WeightFormat) -> Result<Job<'_>> {
        let Linear { rows, cols, .. } = linear;
        let grid =
            Grid { format: self.format, group: self.group, scale_format: scale_format(self.format, format) };
        let groups = cols / grid.group;
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let tensor =
            |part: &str, dtype, shape: [usize; 2]| (format!("{module}.{part}"), dtype, shape.to_vec());
        let tensors = match self.format {
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
        let mut bytes = Vec::new();
        match &job.content {
            Content::Copy(_) => return Ok(None),
            Content::Packed(linear, grid) => {
                let mut module = PackedModule::new(*grid, linear.rows, linear.cols);
                self.for_rows(linear, |row, values| {
                    // NaN and infinities have no step either; the former would round to the least integer.
                    let finite = values.iter().all(|value| value.is_finite());
                    if finite && module.set_row(row, values) {
                        Ok(())
                    } else {
                        Err(no_step(&job.tensors[0].0, row))
                    }
                })?;
                bytes.extend(module.weights.iter().flat_map(|word| word.to_le_bytes()));
                if self.format == FileFormat::Awq {
                    bytes.extend(module.zeros.iter().flat_map(|word| word.to_le_bytes()));
                }
                bytes.extend(module.scales.iter().flat_map(|scale| scale.to_le_bytes()));
                if self.format == FileFormat::CompressedTensors {
                    bytes.extend(
                        [linear.rows, linear.cols].iter().flat_map(|&size| (size as i64).to_le_bytes()),
                    );
                }
            }
        }
        Ok(Some(bytes))
    }

    /// Calls `take` for each row of the module .
    fn for_rows(&self, linear: &Linear, mut take: impl FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        let mut values = vec![0f32; ROWS.min(linear.rows) * linear.cols];
        for start in (0..linear.rows).step_by(ROWS) {
            let rows = start..linear.rows.min(start + ROWS);
            let values = &mut values[..rows.len() * linear.cols];
            rows_to_f32(&self.checkpoint.linear(linear)?, linear.rows, linear.cols, rows.clone(), values);
            rows.zip(values.chunks_exact(linear.cols)).try_for_each(|(row, values)| take(row, values))?;
        }
        Ok(())
    }
}

fn no_step(name: &str, row: usize) -> Error {
    Error::invalid(
        format!(
            "row {row} of tensor `{name}` has a weight that is not finite or too large for a 16-bit scale"
        ),
        "the checkpoint may be damaged: fetch it again, or keep the module in 16 bits with --skip",
    )
}
