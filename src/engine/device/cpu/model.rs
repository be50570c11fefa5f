//! Weights in the CPU's memory: every matrix packed into one block of huge pages, small tensors as f32.

use std::sync::{Arc, Mutex};

use super::attention::{AttentionWeights, MAX_HEAD_DIM};
use super::delta::{DeltaWeights, MAX_REPEATS};
use super::gemm::Arithmetic;
use super::isa::{self, Isa};
use super::matrix::{Arena, Matrix, Packing};
use super::pool::Pool;
use super::session::CpuSession;
use crate::engine::clock::Clock;
use crate::engine::config::{CpuMath, EngineConfig};
use crate::engine::device::{CachePlan, LoadOptions, LoadProgress, Model, Session};
use crate::engine::model::layout::{ModelLayout, WeightFormat};
use crate::engine::model::spec::{DeltaNet, Mixer, ModelSpec, Role};
use crate::engine::model::weights::{MatrixData, WeightSource};
use crate::{Error, Result};

pub enum MixerWeights {
    Attention { small: AttentionWeights, inputs: Vec<Matrix>, output: Matrix },
    DeltaNet { small: DeltaWeights, inputs: Vec<Matrix>, output: Matrix },
}

pub struct LayerWeights {
    /// [hidden], as is `post_norm`, which is in front of the MLP.
    pub input_norm: Vec<f32>,
    pub post_norm: Vec<f32>,
    pub mixer: MixerWeights,
    /// [intermediate, hidden], as is `up`.
    pub gate: Matrix,
    pub up: Matrix,
    /// [hidden, intermediate].
    pub down: Matrix,
}

pub struct Weights {
    /// Dropped first.
    _fence: Fence,
    pub layout: ModelLayout,
    math: CpuMath,
    pub isa: Isa,
    pub embedding: Matrix,
    /// `None`: the embedding.
    head: Option<Matrix>,
    pub final_norm: Vec<f32>,
    pub layers: Vec<LayerWeights>,
}

/// Threads read weights ahead while they wait; before the weights are freed all must be past that.
struct Fence(Arc<Mutex<Pool>>);

impl Drop for Fence {
    fn drop(&mut self) {
        lock(&self.0).run(&|_| ());
    }
}

impl Weights {
    pub fn head(&self) -> &Matrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.layout.spec
    }

    /// How the input of a mixer is held: see [`Arithmetic::of_inputs`].
    pub fn arithmetic_of_inputs(&self, matrices: &[Matrix]) -> Arithmetic {
        Arithmetic::of_inputs(self.math, self.isa, matrices)
    }

    /// How an input of all of `matrices` is multiplied.
    pub fn arithmetic<'m>(&self, matrices: impl IntoIterator<Item = &'m Matrix>) -> Arithmetic {
        Arithmetic::of(self.math, self.isa, matrices)
    }
}

pub struct CpuModel {
    weights: Arc<Weights>,
    pool: Arc<Mutex<Pool>>,
    /// Threads when a session does not say.
    threads: usize,
    bytes: u64,
}

fn planned_bytes(layout: &ModelLayout, math: CpuMath) -> usize {
    let bytes = |format: WeightFormat, rows: usize, cols: usize| {
        // Sizes depend on the format alone, not on where the values come from.
        Packing::of(&MatrixData::Synthetic { format, seed: 0, std: 0.0 }, math).bytes(rows, cols)
    };
    let spec = &layout.spec;
    let linears = layout.linears.iter().filter(|(linear, _)| linear.role != Role::Head || !spec.tied_head);
    bytes(layout.embedding, spec.vocab_size, spec.hidden_size)
        + linears.map(|(linear, format)| bytes(*format, linear.rows, linear.cols)).sum::<usize>()
}

struct Loader<'a> {
    source: &'a WeightSource,
    layout: &'a ModelLayout,
    arena: Arena,
    pool: &'a mut Pool,
    math: CpuMath,
    done: u64,
    progress: &'a mut dyn FnMut(LoadProgress),
    /// Next module of `layout.linears`.
    next: usize,
}

impl Loader<'_> {
    fn pack(&mut self, name: &str, rows: usize, cols: usize, data: &MatrixData<'_>) -> Result<Matrix> {
        let matrix = Matrix::pack(&mut self.arena, self.pool, name, (rows, cols), data, self.math)?;
        self.source.release();
        self.done += matrix.bytes() as u64;
        (self.progress)(LoadProgress {
            done_bytes: self.done.min(self.layout.weight_bytes()),
            total_bytes: self.layout.weight_bytes(),
        });
        Ok(matrix)
    }

    /// The next module in order, which must have this role.
    fn linear(&mut self, role: Role) -> Result<Matrix> {
        let Some((linear, _)) = self.layout.linears.get(self.next) else {
            return Err(Error::failed(
                format!("the model's layout ends before {}", role.path()),
                "this is a fault of the program: please report it",
            ));
        };
        debug_assert_eq!(linear.role, role);
        self.next += 1;
        let source = self.source;
        let data = source.linear(linear)?;
        self.pack(&linear.name(), linear.rows, linear.cols, &data)
    }

    fn vector(&self, name: &str, elements: usize) -> Result<Vec<f32>> {
        let values = self.source.vector(name, elements)?;
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Err(Error::invalid(
                format!("{name}: element {at} is {}", values[at]),
                "the checkpoint is damaged: fetch or convert it again",
            ));
        }
        Ok(values)
    }

    /// A norm's weight, with one added where the family stores it minus one.
    fn norm(&self, name: &str, elements: usize) -> Result<Vec<f32>> {
        let mut values = self.vector(name, elements)?;
        if self.layout.spec.norm_plus_one {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        Ok(values)
    }

    fn attention(&mut self, layer: usize) -> Result<MixerWeights> {
        let inputs = vec![self.linear(Role::Q)?, self.linear(Role::K)?, self.linear(Role::V)?];
        let output = self.linear(Role::O)?;
        let spec = &self.layout.spec.attention;
        let mut small = AttentionWeights::default();
        if spec.qkv_bias {
            for (part, matrix) in ["q", "k", "v"].iter().zip(&inputs) {
                small
                    .bias
                    .extend(self.vector(&format!("layers.{layer}.self_attn.{part}_proj.bias"), matrix.rows)?);
            }
        }
        if spec.qk_norm {
            small.q_norm = self.norm(&format!("layers.{layer}.self_attn.q_norm.weight"), spec.head_dim)?;
            small.k_norm = self.norm(&format!("layers.{layer}.self_attn.k_norm.weight"), spec.head_dim)?;
        }
        Ok(MixerWeights::Attention { small, inputs, output })
    }

    fn delta_net(&mut self, layer: usize, spec: &DeltaNet) -> Result<MixerWeights> {
        let inputs = vec![
            self.linear(Role::InQkv)?,
            self.linear(Role::InZ)?,
            self.linear(Role::InB)?,
            self.linear(Role::InA)?,
        ];
        let output = self.linear(Role::DeltaOut)?;
        let name = |tensor: &str| format!("layers.{layer}.linear_attn.{tensor}");
        let (channels, taps) = (spec.conv_channels(), spec.conv_width);
        let stored = self.vector(&name("conv1d.weight"), channels * taps)?;
        let mut conv = vec![0.0; channels * taps];
        for (channel, weights) in stored.chunks_exact(taps).enumerate() {
            for (tap, weight) in weights.iter().enumerate() {
                conv[tap * channels + channel] = *weight;
            }
        }
        let mut decay = self.vector(&name("A_log"), spec.value_heads)?;
        decay.iter_mut().for_each(|a| *a = -a.exp());
        let dt_bias = self.vector(&name("dt_bias"), spec.value_heads)?;
        let norm = self.vector(&name("norm.weight"), spec.value_dim)?;
        let small = DeltaWeights { conv, decay, dt_bias, norm };
        Ok(MixerWeights::DeltaNet { small, inputs, output })
    }

    fn layer(&mut self, layer: usize, mixer: Mixer) -> Result<LayerWeights> {
        let layout = self.layout;
        let hidden = layout.spec.hidden_size;
        let mixer = match (mixer, &layout.spec.delta_net) {
            (Mixer::DeltaNet, Some(delta)) => self.delta_net(layer, delta)?,
            _ => self.attention(layer)?,
        };
        Ok(LayerWeights {
            input_norm: self.norm(&format!("layers.{layer}.input_layernorm.weight"), hidden)?,
            post_norm: self.norm(&format!("layers.{layer}.post_attention_layernorm.weight"), hidden)?,
            mixer,
            gate: self.linear(Role::Gate)?,
            up: self.linear(Role::Up)?,
            down: self.linear(Role::Down)?,
        })
    }
}

fn check_supported(spec: &ModelSpec) -> Result<()> {
    let refuse = |fact: String| {
        Err(Error::invalid(format!("{}: {fact}", spec.name), "this shape is not supported on the CPU"))
    };
    if spec.attention.head_dim > MAX_HEAD_DIM {
        return refuse(format!("head_dim {} is above {MAX_HEAD_DIM}", spec.attention.head_dim));
    }
    if let Some(delta) = &spec.delta_net {
        let repeats = delta.value_heads / delta.key_heads.max(1);
        if repeats == 0 || repeats > MAX_REPEATS || !delta.value_heads.is_multiple_of(delta.key_heads) {
            return refuse(format!(
                "{} value heads over {} key heads (1 to {MAX_REPEATS} each, whole)",
                delta.value_heads, delta.key_heads
            ));
        }
        if delta.conv_width == 0 || !delta.key_dim.is_multiple_of(2) || !delta.value_dim.is_multiple_of(2) {
            return refuse("odd linear head dims or no convolution".to_string());
        }
    }
    Ok(())
}

impl CpuModel {
    pub fn weights(&self) -> &Arc<Weights> {
        &self.weights
    }

    pub fn load(
        pool: &Arc<Mutex<Pool>>,
        threads: usize,
        layout: &ModelLayout,
        source: &WeightSource,
        options: &LoadOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self> {
        if options.cpu_math == CpuMath::Bf16 {
            isa::require_bf16()?;
        }
        let spec = &layout.spec;
        check_supported(spec)?;
        let bytes = planned_bytes(layout, options.cpu_math);
        let mut guard = lock(pool);
        let mut loader = Loader {
            source,
            layout,
            arena: Arena::new(bytes)?,
            pool: &mut guard,
            math: options.cpu_math,
            done: 0,
            progress,
            next: 0,
        };
        let embedding_data = source.embedding()?;
        let embedding =
            loader.pack("embed_tokens.weight", spec.vocab_size, spec.hidden_size, &embedding_data)?;
        let mut layers = Vec::with_capacity(spec.layers.len());
        for (layer, mixer) in spec.layers.iter().enumerate() {
            layers.push(loader.layer(layer, *mixer)?);
        }
        let head = if spec.tied_head { None } else { Some(loader.linear(Role::Head)?) };
        let final_norm = loader.norm("norm.weight", spec.hidden_size)?;
        let weights = Weights {
            _fence: Fence(Arc::clone(pool)),
            layout: layout.clone(),
            math: options.cpu_math,
            isa: Isa::detect(),
            embedding,
            head,
            final_norm,
            layers,
        };
        drop(guard);
        Ok(Self { weights: Arc::new(weights), pool: Arc::clone(pool), threads, bytes: bytes as u64 })
    }
}

/// A lock that a panicking phase left behind is still a whole pool: its threads caught the panic.
pub fn lock(pool: &Mutex<Pool>) -> std::sync::MutexGuard<'_, Pool> {
    pool.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Model for CpuModel {
    fn layout(&self) -> &ModelLayout {
        &self.weights.layout
    }

    fn memory_bytes(&self) -> u64 {
        self.bytes
    }

    fn open(&self, plan: &CachePlan, config: &EngineConfig, clock: &Clock) -> Result<Box<dyn Session>> {
        let threads = config.threads.unwrap_or(self.threads);
        let mut pool = lock(&self.pool);
        if pool.threads() != threads {
            *pool = Pool::new(threads);
        }
        drop(pool);
        Ok(Box::new(CpuSession::open(&self.weights, &self.pool, plan, clock)?))
    }
}
