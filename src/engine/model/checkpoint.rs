//! A checkpoint: the tensors of a folder's weight files, matched by name, type and shape against the model's shape before
//! anything is loaded.

use std::collections::{HashMap, HashSet};

use super::layout::WeightFormat;
use super::packed::{self, Packing};
use super::quantization::Scheme;
use super::spec::{Linear, ModelSpec, Role};
use super::tensor_files::{Stored, TensorFiles, some_of, widen};
use super::weights::{MatrixData, Weights};
use crate::{Error, Result};

/// A folder's weights, matched with a model's shape.
pub struct Checkpoint {
    files: TensorFiles,
    linears: HashMap<Linear, Matrix>,
    embedding: Matrix,
}

/// Where a matrix is and how it is stored.
#[derive(Debug, Clone)]
enum Matrix {
    Dense { tensor: Stored, format: WeightFormat },
    Packed(Packing),
}

impl Matrix {
    fn format(&self) -> WeightFormat {
        match self {
            Self::Dense { format, .. } => *format,
            Self::Packed(packing) => packing.format(),
        }
    }
}

impl Checkpoint {
    /// Matches every tensor against `spec`; nothing may be missing, left over or of another shape.
    pub fn new(files: TensorFiles, spec: &ModelSpec, scheme: &Scheme) -> Result<Self> {
        let mut used = Vec::new();
        let mut missing = Vec::new();
        let mut linears = HashMap::new();
        for linear in spec.linears() {
            if linear.role == Role::Head && spec.tied_head {
                continue;
            }
            match matrix(&files, &linear.name(), linear.rows, linear.cols, scheme, &mut used)? {
                Some(matrix) => {
                    linears.insert(linear, matrix);
                }
                None => missing.push(format!("{}.weight", linear.name())),
            }
        }
        let embedding =
            matrix(&files, "embed_tokens", spec.vocab_size, spec.hidden_size, &Scheme::None, &mut used)?;
        if embedding.is_none() {
            missing.push("embed_tokens.weight".to_string());
        }
        for (name, shape) in vectors(spec) {
            match files.get(&name) {
                Some(stored) => check_vector(&files, stored, &shape)?,
                None => missing.push(name.clone()),
            }
            used.push(name);
        }
        let (Some(embedding), true) = (embedding, missing.is_empty()) else {
            let names: Vec<&str> = missing.iter().map(String::as_str).collect();
            return Err(Error::invalid(
                format!("{}: {} tensors are missing: {}", files.first_path(), names.len(), some_of(&names)),
                "config.json and the weights may be of different models, or files are missing: fetch them again",
            ));
        };
        let mut checkpoint = Self { files, linears, embedding };
        checkpoint.refuse_left_over(&used, spec)?;
        Ok(checkpoint)
    }

    fn refuse_left_over(&mut self, used: &[String], spec: &ModelSpec) -> Result<()> {
        let used: HashSet<&str> = used.iter().map(String::as_str).collect();
        let mut left: Vec<&str> = self.files.names().filter(|name| !used.contains(name)).collect();
        if spec.tied_head {
            // A copy of the embedding that some exports carry.
            left.retain(|name| *name != "lm_head.weight");
        }
        if !left.is_empty() {
            return Err(self.unexpected(&left));
        }
        if spec.tied_head {
            self.files.skip("lm_head.weight");
        }
        Ok(())
    }

    fn unexpected(&self, names: &[&str]) -> Error {
        Error::invalid(
            format!(
                "{}: {} tensors have no place in this architecture: {}",
                self.files.first_path(),
                names.len(),
                some_of(names)
            ),
            "the model computes something that this engine does not: choose another checkpoint",
        )
    }

    /// The format of each linear module; a tied head has the embedding's.
    pub fn formats(&self, spec: &ModelSpec) -> Vec<(Linear, WeightFormat)> {
        let format = |linear: &Linear| self.linears.get(linear).unwrap_or(&self.embedding).format();
        spec.linears().into_iter().map(|linear| (linear, format(&linear))).collect()
    }

    /// Linear modules that have tensors of their own: a tied head has none.
    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.linears.keys()
    }

    pub fn embedding_format(&self) -> WeightFormat {
        self.embedding.format()
    }

    pub fn files(&self) -> &TensorFiles {
        &self.files
    }

    fn data(&self, matrix: &Matrix) -> MatrixData<'_> {
        match matrix {
            Matrix::Dense { tensor, format } => {
                MatrixData::Dense { format: *format, bytes: self.files.bytes(tensor) }
            }
            Matrix::Packed(packing) => packing.data(&self.files),
        }
    }
}

impl Checkpoint {
    /// A tensor that is no matrix, widened, and the type it is stored in.
    pub fn stored_vector(&self, name: &str) -> Result<(Vec<f32>, WeightFormat)> {
        let stored = self.files.get(name).ok_or_else(|| unknown(name))?;
        Ok((widen(&self.files, stored)?, stored.entry.dtype.weight_format().unwrap_or(WeightFormat::F32)))
    }
}

impl Weights for Checkpoint {
    fn linear(&self, linear: &Linear) -> Result<MatrixData<'_>> {
        match self.linears.get(linear) {
            Some(matrix) => Ok(self.data(matrix)),
            None if linear.role == Role::Head => self.embedding(),
            None => Err(unknown(&linear.name())),
        }
    }

    fn embedding(&self) -> Result<MatrixData<'_>> {
        Ok(self.data(&self.embedding))
    }

    fn vector(&self, name: &str, elements: usize) -> Result<Vec<f32>> {
        let stored = self.files.get(name).ok_or_else(|| unknown(name))?;
        if stored.entry.elements() != elements as u64 {
            return Err(self.files.wrong(
                stored,
                format!("shape {:?}", stored.entry.shape),
                format!("{elements} values"),
            ));
        }
        widen(&self.files, stored)
    }

    fn release(&self) {
        self.files.release();
    }
}

fn unknown(name: &str) -> Error {
    Error::failed(
        format!("`{name}` is not a tensor of this model"),
        "this is a fault of the program: please report it",
    )
}

/// The matrix of module `name`, dense or packed. `None` if the file has neither.
fn matrix(
    files: &TensorFiles,
    name: &str,
    rows: usize,
    cols: usize,
    scheme: &Scheme,
    used: &mut Vec<String>,
) -> Result<Option<Matrix>> {
    let dense = format!("{name}.weight");
    let packed = packed::find(files, name, rows, cols, scheme, used)?;
    let Some(stored) = files.get(&dense) else { return Ok(packed.map(Matrix::Packed)) };
    if packed.is_some() {
        return Err(Error::invalid(
            format!("{}: module `{name}` has both a packed and a plain tensor", files.place(stored)),
            "the checkpoint was put together from two: fetch it again",
        ));
    }
    used.push(dense);
    if stored.entry.shape != [rows, cols] {
        return Err(files.wrong(
            stored,
            format!("shape {:?}", stored.entry.shape),
            format!("[{rows}, {cols}]"),
        ));
    }
    match stored.entry.dtype.weight_format() {
        Some(format) => Ok(Some(Matrix::Dense { tensor: stored.clone(), format })),
        None => Err(files.wrong(stored, format!("type {}", stored.entry.dtype.name()), "BF16, F16 or F32")),
    }
}

/// Name and shape of every tensor that is no matrix.
pub fn vectors(spec: &ModelSpec) -> Vec<(String, Vec<usize>)> {
    let mut all = vec![("norm.weight".to_string(), vec![spec.hidden_size])];
    let attention = &spec.attention;
    for (layer, mixer) in spec.layers.iter().enumerate() {
        let mut push =
            |name: &str, shape: &[usize]| all.push((format!("layers.{layer}.{name}"), shape.to_vec()));
        push("input_layernorm.weight", &[spec.hidden_size]);
        push("post_attention_layernorm.weight", &[spec.hidden_size]);
        match (mixer, &spec.delta_net) {
            (super::spec::Mixer::DeltaNet, Some(delta)) => {
                push("linear_attn.conv1d.weight", &[delta.conv_channels(), 1, delta.conv_width]);
                push("linear_attn.A_log", &[delta.value_heads]);
                push("linear_attn.dt_bias", &[delta.value_heads]);
                push("linear_attn.norm.weight", &[delta.value_dim]);
            }
            _ => {
                if attention.qk_norm {
                    push("self_attn.q_norm.weight", &[attention.head_dim]);
                    push("self_attn.k_norm.weight", &[attention.head_dim]);
                }
                if attention.qkv_bias {
                    push("self_attn.q_proj.bias", &[attention.heads * attention.head_dim]);
                    push("self_attn.k_proj.bias", &[attention.kv_heads * attention.head_dim]);
                    push("self_attn.v_proj.bias", &[attention.kv_heads * attention.head_dim]);
                }
            }
        }
    }
    all
}

fn check_vector(files: &TensorFiles, stored: &Stored, shape: &[usize]) -> Result<()> {
    if stored.entry.shape != shape {
        let error = files.wrong(stored, format!("shape {:?}", stored.entry.shape), format!("{shape:?}"));
        let Error::Invalid { fact, hint } = error else { return Err(error) };
        // GGUF squeezes the convolution, MLX puts its taps in the middle.
        let converted = shape.len() == 3 && stored.entry.elements() == shape.iter().product::<usize>() as u64;
        let hint = if converted {
            "the weights were converted for another engine (GGUF, MLX): use the published checkpoint"
                .to_string()
        } else {
            hint
        };
        return Err(Error::Invalid { fact, hint });
    }
    if stored.entry.dtype.weight_format().is_none() {
        return Err(files.wrong(stored, format!("type {}", stored.entry.dtype.name()), "BF16, F16 or F32"));
    }
    Ok(())
}
