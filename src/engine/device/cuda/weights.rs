//! A model's weights on the GPU, in the shapes the step loop uses them in: modules that read the same input are one matrix
//! where their formats allow, gate and up rows take turns, norm weights are fp32 with the one already added.

use super::driver::{DeviceBuffer, Gpu};
use super::int4::{self, Packer};
use super::matrix::{GATE_UP_INTERLEAVE, Matrix, MatrixFormat, UNIT};
use super::upload::{Place, Uploader};
use crate::engine::device::LoadProgress;
use crate::engine::model::layout::{ModelLayout, WeightFormat};
use crate::engine::model::spec::{DeltaNet, Linear, Mixer, Role};
use crate::engine::model::weights::{MatrixData, WeightSource};
use crate::{Error, Result};

/// Matrices that read the same input and write side by side: `.1` is the first output column.
pub type Parts = Vec<(Matrix, usize)>;

pub struct GpuWeights {
    /// fp16 [vocabulary, hidden]; also the head when that is tied.
    pub embedding: Matrix,
    pub head: Option<Matrix>,
    /// fp32 `[hidden]`.
    pub final_norm: DeviceBuffer,
    pub layers: Vec<Layer>,
    /// Of all weights as they are held.
    pub bytes: u64,
}

impl GpuWeights {
    pub fn head(&self) -> &Matrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    fn int4_matrices(&self) -> impl Iterator<Item = &Matrix> {
        let layers = self.layers.iter().flat_map(|layer| {
            let (input, output) = match &layer.mixer {
                MixerWeights::Delta(delta) => (&delta.input, &delta.output),
                MixerWeights::Attention(attention) => (&attention.input, &attention.output),
            };
            input.iter().map(|(matrix, _)| matrix).chain([output, &layer.gate_up, &layer.down])
        });
        layers.chain(&self.head).filter(|matrix| matches!(matrix.format, MatrixFormat::Int4 { .. }))
    }

    /// Elements of the largest 4-bit matrix, 0 when there is none.
    pub fn int4_elements(&self) -> usize {
        self.int4_matrices().map(|matrix| matrix.rows * matrix.cols).max().unwrap_or(0)
    }

    /// Whether groups of so many columns share a scale in every 4-bit matrix there is.
    pub fn groups_are(&self, columns: usize) -> bool {
        self.int4_matrices()
            .all(|matrix| matches!(matrix.format, MatrixFormat::Int4 { group, .. } if group == columns))
    }
}

pub struct Layer {
    pub input_norm: DeviceBuffer,
    pub mixer: MixerWeights,
    pub post_norm: DeviceBuffer,
    pub gate_up: Matrix,
    pub down: Matrix,
}

pub enum MixerWeights {
    Delta(Box<DeltaWeights>),
    Attention(Box<AttentionWeights>),
}

/// Output columns: qkv, z, b, a.
pub struct DeltaWeights {
    pub input: Parts,
    /// fp32 `[4][channels]`.
    pub taps: DeviceBuffer,
    pub a_log: DeviceBuffer,
    pub dt_bias: DeviceBuffer,
    pub norm: DeviceBuffer,
    pub output: Matrix,
}

/// Output columns: q (with gate), k, v.
pub struct AttentionWeights {
    pub input: Parts,
    /// In the last layer, where most rows of a prompt need only k and v.
    pub apart: Option<Apart>,
    pub q_norm: Option<DeviceBuffer>,
    pub k_norm: Option<DeviceBuffer>,
    pub output: Matrix,
}

/// q apart from k and v, on the memory of the whole input.
pub struct Apart {
    pub queries: Parts,
    pub keys: Parts,
}

struct Loader<'a> {
    layout: &'a ModelLayout,
    source: &'a WeightSource,
    uploader: Uploader,
    progress: &'a mut dyn FnMut(LoadProgress),
    packer: Option<Packer>,
    bytes: u64,
}

/// Loads every weight of `layout`.
///
/// # Errors
/// What the source says of a tensor; weights that are not finite or do not fit fp16; a full GPU.
pub fn load(
    gpu: &Gpu,
    layout: &ModelLayout,
    source: &WeightSource,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<GpuWeights> {
    let mut loader =
        Loader { layout, source, uploader: Uploader::new(gpu)?, progress, packer: None, bytes: 0 };
    let spec = &layout.spec;
    let (vocab, hidden) = (spec.vocab_size, spec.hidden_size);
    let embedding = loader.empty(vocab, hidden)?;
    let data = source.embedding()?;
    loader.uploader.half("embed_tokens", &data, vocab, hidden, &embedding.weights, Place::together(0))?;
    loader.advance(embedding.bytes());
    let mut layers = Vec::with_capacity(spec.layers.len());
    for (index, mixer) in spec.layers.iter().enumerate() {
        layers.push(loader.layer(index, *mixer)?);
    }
    let head = if spec.tied_head { None } else { Some(loader.module(None, Role::Head)?) };
    let final_norm = loader.norm("norm.weight", hidden)?;
    loader.uploader.finish()?;
    Ok(GpuWeights { embedding, head, final_norm, layers, bytes: loader.bytes })
}

impl Loader<'_> {
    fn layer(&mut self, index: usize, mixer: Mixer) -> Result<Layer> {
        let spec = &self.layout.spec;
        let name = |rest: &str| format!("layers.{index}.{rest}");
        let layer = Some(index);
        let mixer = match (mixer, &spec.delta_net) {
            (Mixer::DeltaNet, Some(delta)) => MixerWeights::Delta(Box::new(DeltaWeights {
                input: self.fused(layer, &[Role::InQkv, Role::InZ, Role::InB, Role::InA], None, 0)?,
                taps: self.taps(&name("linear_attn.conv1d.weight"), delta)?,
                a_log: self.vector(&name("linear_attn.A_log"), delta.value_heads)?,
                dt_bias: self.vector(&name("linear_attn.dt_bias"), delta.value_heads)?,
                norm: self.vector(&name("linear_attn.norm.weight"), delta.value_dim)?,
                output: self.module(layer, Role::DeltaOut)?,
            })),
            _ => {
                let attention = &spec.attention;
                let bias = if attention.qkv_bias { Some(self.qkv_bias(index)?) } else { None };
                let mut norms = (None, None);
                if attention.qk_norm {
                    norms.0 = Some(self.norm(&name("self_attn.q_norm.weight"), attention.head_dim)?);
                    norms.1 = Some(self.norm(&name("self_attn.k_norm.weight"), attention.head_dim)?);
                }
                let bias = bias.as_deref();
                let (input, apart) = if index + 1 == spec.layers.len() {
                    let (input, apart) = self.input_apart(layer, bias)?;
                    (input, Some(apart))
                } else {
                    (self.fused(layer, &[Role::Q, Role::K, Role::V], bias, 0)?, None)
                };
                MixerWeights::Attention(Box::new(AttentionWeights {
                    input,
                    apart,
                    q_norm: norms.0,
                    k_norm: norms.1,
                    output: self.module(layer, Role::O)?,
                }))
            }
        };
        Ok(Layer {
            input_norm: self.norm(&name("input_layernorm.weight"), spec.hidden_size)?,
            mixer,
            post_norm: self.norm(&name("post_attention_layernorm.weight"), spec.hidden_size)?,
            gate_up: self.gate_up(index)?,
            down: self.module(layer, Role::Down)?,
        })
    }

    /// The input of the last layer, and the same apart.
    fn input_apart(&mut self, layer: Option<usize>, bias: Option<&[f32]>) -> Result<(Parts, Apart)> {
        let roles = [Role::Q, Role::K, Role::V];
        let modules = roles.iter().map(|&role| self.find(layer, role)).collect::<Result<Vec<_>>>()?;
        let queries = modules[0].0.rows;
        // Of 4-bit matrices only whole units can be told apart on the GPU.
        let int4 = modules.iter().any(|(_, format)| matches!(format, WeightFormat::Int4 { .. }));
        let loaded = if int4 && !queries.is_multiple_of(UNIT) {
            let mut loaded = self.fused(layer, &roles[..1], bias, 0)?;
            loaded.extend(self.fused(layer, &roles[1..], bias, queries)?);
            loaded
        } else {
            self.fused(layer, &roles, bias, 0)?
        };
        let mut input = Parts::new();
        let mut apart = Apart { queries: Parts::new(), keys: Parts::new() };
        for (matrix, column) in loaded {
            let rows = matrix.rows;
            // Queries come first: this matrix has so many rows of them.
            let first = queries.saturating_sub(column).min(rows);
            let (whole, parts) = matrix.cut(&[0..first, first..rows])?;
            input.push((whole, column));
            let columns = [column, column + first];
            for ((list, part), column) in
                [&mut apart.queries, &mut apart.keys].into_iter().zip(parts).zip(columns)
            {
                if part.rows > 0 {
                    list.push((part, column));
                }
            }
        }
        Ok((input, apart))
    }

    /// Modules side by side, from output column `column` on: runs of one format become one matrix. `bias` covers all output
    /// columns.
    fn fused(
        &mut self,
        layer: Option<usize>,
        roles: &[Role],
        bias: Option<&[f32]>,
        mut column: usize,
    ) -> Result<Parts> {
        let modules = roles.iter().map(|&role| self.find(layer, role)).collect::<Result<Vec<_>>>()?;
        let mut parts = Parts::new();
        let mut begin = 0;
        while begin < modules.len() {
            // Every 16-bit format becomes fp16.
            let kind =
                |at: usize| Some(modules[at].1).filter(|format| matches!(format, WeightFormat::Int4 { .. }));
            let mut end = begin + 1;
            while end < modules.len() && kind(end) == kind(begin) {
                end += 1;
            }
            let run = &modules[begin..end];
            let rows: usize = run.iter().map(|(linear, _)| linear.rows).sum();
            let (head, format) = &run[0];
            let mut matrix = self.empty_as(head, *format, rows)?;
            let mut first = 0;
            for (linear, _) in run {
                self.fill(linear, &matrix, Place::together(first))?;
                first += linear.rows;
            }
            if let Some(bias) = bias {
                matrix.bias = Some(self.uploader.gpu().upload(&bias[column..column + rows])?);
            }
            parts.push((matrix, column));
            column += rows;
            begin = end;
        }
        Ok(parts)
    }

    fn gate_up(&mut self, index: usize) -> Result<Matrix> {
        let (gate, format) = self.find(Some(index), Role::Gate)?;
        let (up, up_format) = self.find(Some(index), Role::Up)?;
        if format != up_format {
            return Err(Error::invalid(
                format!("layers.{index}: gate_proj is {format:?} and up_proj is {up_format:?}"),
                "the CUDA device needs one format for both; use --device cpu",
            ));
        }
        if gate.rows % GATE_UP_INTERLEAVE != 0 {
            return Err(Error::invalid(
                format!("intermediate_size = {} is not a multiple of {GATE_UP_INTERLEAVE}", gate.rows),
                "use --device cpu for this model",
            ));
        }
        let matrix = self.empty_as(&gate, format, 2 * gate.rows)?;
        self.fill(&gate, &matrix, Place::in_turn(GATE_UP_INTERLEAVE, 0))?;
        self.fill(&up, &matrix, Place::in_turn(GATE_UP_INTERLEAVE, 1))?;
        Ok(matrix)
    }

    fn module(&mut self, layer: Option<usize>, role: Role) -> Result<Matrix> {
        let (linear, format) = self.find(layer, role)?;
        let matrix = self.empty_as(&linear, format, linear.rows)?;
        self.fill(&linear, &matrix, Place::together(0))?;
        Ok(matrix)
    }

    /// A matrix of `rows` rows in the format of `linear`, 4-bit or fp16.
    fn empty_as(&self, linear: &Linear, format: WeightFormat, rows: usize) -> Result<Matrix> {
        match format {
            WeightFormat::Int4 { group, zero_points } => {
                int4::empty(self.uploader.gpu(), &linear.name(), (rows, linear.cols), group, zero_points)
            }
            _ => self.empty(rows, linear.cols),
        }
    }

    fn fill(&mut self, linear: &Linear, matrix: &Matrix, place: Place) -> Result<()> {
        let MatrixFormat::Int4 { group, zero_points } = matrix.format else {
            return self.half(linear, &matrix.weights, place);
        };
        if self.packer.is_none() {
            self.packer = Some(Packer::new(self.uploader.gpu())?);
        }
        let data = self.source.linear(linear)?;
        let shape = (linear.rows, linear.cols);
        if let Some(packer) = &self.packer {
            packer.pack(self.uploader.stream(), &linear.name(), &data, shape, place, matrix)?;
        }
        self.advance(WeightFormat::Int4 { group, zero_points }.bytes(linear.rows, linear.cols));
        Ok(())
    }

    fn half(&mut self, linear: &Linear, to: &DeviceBuffer, place: Place) -> Result<()> {
        let data: MatrixData = self.source.linear(linear)?;
        self.uploader.half(&linear.name(), &data, linear.rows, linear.cols, to, place)?;
        self.advance(2 * linear.rows as u64 * linear.cols as u64);
        Ok(())
    }

    fn find(&self, layer: Option<usize>, role: Role) -> Result<(Linear, WeightFormat)> {
        let found =
            self.layout.linears.iter().find(|(linear, _)| linear.layer == layer && linear.role == role);
        found.copied().ok_or_else(|| Error::bug(format!("layer {layer:?} has no {role:?} module")))
    }

    fn empty(&self, rows: usize, cols: usize) -> Result<Matrix> {
        let weights = self.uploader.gpu().allocate(2 * rows as u64 * cols as u64)?;
        Ok(Matrix { format: MatrixFormat::F16, rows, cols, weights, scales: None, bias: None })
    }

    fn vector(&mut self, name: &str, elements: usize) -> Result<DeviceBuffer> {
        self.vector_of(self.source.vector(name, elements)?)
    }

    fn vector_of(&mut self, values: Vec<f32>) -> Result<DeviceBuffer> {
        let buffer = self.uploader.gpu().upload(&values)?;
        self.advance(2 * values.len() as u64);
        Ok(buffer)
    }

    /// A norm's weight as a factor: one is added in fp32 where the model stores it less one.
    fn norm(&mut self, name: &str, elements: usize) -> Result<DeviceBuffer> {
        let mut values = self.source.vector(name, elements)?;
        if self.layout.spec.norm_plus_one {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        self.vector_of(values)
    }

    /// [channels][1][4] to [4][channels], so that neighbouring threads read neighbouring taps.
    fn taps(&mut self, name: &str, delta: &DeltaNet) -> Result<DeviceBuffer> {
        let (channels, width) = (delta.conv_channels(), delta.conv_width);
        if width != 4 {
            return Err(Error::invalid(
                format!("linear_conv_kernel_dim = {width}: the CUDA kernels are made for 4"),
                "use --device cpu for this model",
            ));
        }
        let values = self.source.vector(name, channels * width)?;
        let turned = (0..width).flat_map(|tap| (0..channels).map(move |channel| (channel, tap)));
        self.vector_of(turned.map(|(channel, tap)| values[channel * width + tap]).collect())
    }

    fn qkv_bias(&mut self, index: usize) -> Result<Vec<f32>> {
        let attention = &self.layout.spec.attention;
        let kv = attention.kv_heads * attention.head_dim;
        let mut all = Vec::new();
        for (module, elements) in [("q", attention.heads * attention.head_dim), ("k", kv), ("v", kv)] {
            all.extend(
                self.source.vector(&format!("layers.{index}.self_attn.{module}_proj.bias"), elements)?,
            );
        }
        Ok(all)
    }

    fn advance(&mut self, bytes: u64) {
        self.bytes += bytes;
        let total_bytes = self.layout.weight_bytes();
        (self.progress)(LoadProgress { done_bytes: self.bytes.min(total_bytes), total_bytes });
    }
}
