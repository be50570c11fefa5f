//! `--device cuda`: one GPU, what it holds, and the sessions opened on it.

use std::sync::Arc;

use libloading::Library;

use super::driver::Gpu;
use super::kernels::delta::Delta;
use super::session::CudaSession;
use super::weights::{self, GpuWeights};
use super::{ceilings, compile, cublaslt, libraries, units};
use crate::Result;
use crate::engine::account::Ceilings;
use crate::engine::clock::Clock;
use crate::engine::config::{CacheDtype, CudaKernels, EngineConfig};
use crate::engine::device::deferred_states::WRITE_INTERVAL;
use crate::engine::device::{
    CachePlan, Compiled, Device, DeviceInfo, DeviceKind, LoadOptions, LoadProgress, Model, Session,
    choose_last_layer,
};
use crate::engine::model::layout::ModelLayout;
use crate::engine::model::weights::WeightSource;

pub struct CudaDevice {
    gpu: Gpu,
    info: DeviceInfo,
    ceilings: Option<Ceilings>,
    /// Held, so that sessions need not read it again.
    _library: Option<Library>,
}

impl CudaDevice {
    /// Opens GPU `ordinal` and makes sure that its kernels can be compiled.
    ///
    /// # Errors
    /// No driver, no NVRTC, no such GPU, or one that is too old: one sentence and a hint each.
    pub fn new(ordinal: i32) -> Result<Self> {
        let gpu = Gpu::open(ordinal)?;
        let compiler = gpu.compiler()?;
        let library = libraries::open(&cublaslt::NAMES);
        let products = library.as_ref().map_or_else(
            || "not found: products of prompts by the program's own kernels".to_string(),
            |(_, path)| path.display().to_string(),
        );
        let facts = gpu.facts();
        let rows = [
            ("compute capability", format!("{}.{}", facts.capability / 10, facts.capability % 10)),
            ("multiprocessors", facts.multiprocessors.to_string()),
            ("L2 bytes", facts.l2_bytes.to_string()),
            ("driver CUDA", format!("{}.{}", facts.driver.0, facts.driver.1)),
            ("NVRTC", compiler),
            ("cuBLASLt", products),
            ("PCI bus id", facts.pci_bus_id.clone()),
        ];
        let info = DeviceInfo {
            kind: DeviceKind::Cuda,
            id: format!("cuda:{ordinal}"),
            name: facts.name.clone(),
            memory_bytes: facts.memory_bytes,
            facts: rows.map(|(name, value)| (name.to_string(), value)).into(),
        };
        let library = library.map(|(library, _)| library);
        Ok(Self { gpu, info, ceilings: None, _library: library })
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn prepare(&mut self) -> Result<()> {
        self.gpu.prepare(units::ALL)
    }

    fn compiled(&self) -> Option<Compiled> {
        Some(compile::tally())
    }

    fn free_bytes(&self) -> u64 {
        self.gpu.memory().map_or(0, |(free, _)| free)
    }

    fn ceilings(&mut self) -> Result<Option<Ceilings>> {
        if self.ceilings.is_none() {
            self.ceilings = Some(ceilings::measure(&self.gpu)?);
        }
        Ok(self.ceilings)
    }

    fn default_dtypes(&self) -> (CacheDtype, CacheDtype) {
        (CacheDtype::F16, CacheDtype::F32)
    }

    fn default_async_scheduling(&self) -> usize {
        2
    }

    fn configure(&self, layout: &ModelLayout, config: &mut EngineConfig) -> Result<()> {
        let portable = config.cuda_kernels == CudaKernels::Portable;
        let defers = layout
            .spec
            .delta_net
            .as_ref()
            .is_some_and(|delta| Delta::defers(&self.gpu, delta, config.state_dtype, portable));
        if defers {
            config.state_write_interval.get_or_insert(WRITE_INTERVAL);
        }
        choose_last_layer(layout, config)
    }

    fn load(
        &mut self,
        layout: &ModelLayout,
        source: &WeightSource,
        _options: &LoadOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Model>> {
        self.prepare()?;
        let weights = Arc::new(weights::load(&self.gpu, layout, source, progress)?);
        Ok(Box::new(CudaModel { gpu: self.gpu.clone(), layout: layout.clone(), weights }))
    }
}

struct CudaModel {
    gpu: Gpu,
    layout: ModelLayout,
    weights: Arc<GpuWeights>,
}

impl Model for CudaModel {
    fn layout(&self) -> &ModelLayout {
        &self.layout
    }

    fn memory_bytes(&self) -> u64 {
        self.weights.bytes
    }

    fn open(&self, plan: &CachePlan, config: &EngineConfig, clock: &Clock) -> Result<Box<dyn Session>> {
        let weights = self.weights.clone();
        let session = CudaSession::new(&self.gpu, &self.layout.spec, weights, plan, config, clock)?;
        Ok(Box::new(session))
    }
}
