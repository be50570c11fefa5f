//! The CPU device: SIMD and threads over weights kept in 16 bits or 4, every matrix read once a step.
//!
//! - [`matrix`] packs weights, [`gemm`] multiplies them: one order of additions for every batch size, so that in f32 and
//!   int16 a row has the same bits whatever else is in the batch. (On a CPU with AMX products of 16-bit weights in f32 have two,
//!   one for up to 8 rows: also in int16, where those weights are multiplied in f32. On x86 products of 4-bit weights in f32 have
//!   two, one for a lone row.)
//! - [`attention`] and [`delta`] mix tokens over the pools of [`cache`].
//! - [`forward`] runs the layers, [`output`] the head and sampling, [`session`] the queue of steps.
//! - [`isa`] chooses instructions at run time, [`pool`] hands phases to threads, [`ceilings`] measures the machine.

// Loops over lanes index several arrays by one number, which is what the compiler vectorises.
#![allow(clippy::needless_range_loop)]

mod attention;
mod batch;
mod cache;
mod capture;
pub mod ceilings;
mod chunked;
mod delta;
mod forward;
mod gemm;
pub mod isa;
mod lanes;
mod matrix;
mod memory;
mod model;
mod output;
mod pool;
mod recurrence;
mod session;
mod trace;

use std::sync::{Arc, Mutex};

use self::gemm::Peak;
use self::isa::{Isa, LANES};
use self::model::{CpuModel, lock};
use self::pool::Pool;
use super::{
    Device, DeviceInfo, DeviceKind, LoadOptions, LoadProgress, Model, refuse_cuda_kernels, refuse_last_layer,
};
use crate::engine::account::Ceilings;
use crate::engine::config::{CacheDtype, CpuMath, EngineConfig, THREADS};
use crate::engine::model::layout::ModelLayout;
use crate::engine::model::weights::WeightSource;
use crate::{Error, Result};

/// The fact of [`DeviceInfo`] that is there where memory could not be read as usual.
pub const MEMORY_LACK: &str = "memory is counted";

pub struct CpuDevice {
    info: DeviceInfo,
    pool: Arc<Mutex<Pool>>,
    threads: usize,
    /// Of the model loaded last: ceilings are given for it.
    peak: Peak,
    ceilings: Option<(Peak, usize, Ceilings)>,
    /// Bytes of weights that a step of that model streams.
    streamed_bytes: usize,
}

impl CpuDevice {
    /// `threads`: workers, the calling thread included; `None` is one a core.
    ///
    /// # Errors
    /// A number of threads out of bounds.
    pub fn new(threads: Option<usize>) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = threads.unwrap_or(cores);
        if !THREADS.contains(&threads) {
            return Err(Error::invalid(
                format!("threads = {threads} is out of bounds"),
                format!("threads must be 1 to {}; this machine has {cores} cores", THREADS.end()),
            ));
        }
        let isa = Isa::detect();
        let name = cpu_name();
        let memory = memory::memory();
        let mut info = DeviceInfo {
            kind: DeviceKind::Cpu,
            id: "cpu".to_string(),
            name: name.clone(),
            memory_bytes: memory.total,
            facts: vec![
                ("cpu".to_string(), name),
                ("cores".to_string(), cores.to_string()),
                ("threads".to_string(), threads.to_string()),
                ("instructions".to_string(), isa.name().to_string()),
                ("bf16 products".to_string(), isa::bf16_products().to_string()),
                ("tile products (AMX)".to_string(), isa::tile_products_found().to_string()),
                ("huge pages".to_string(), huge_pages()),
            ],
        };
        if let Some(lack) = memory.lack {
            info.facts.push((MEMORY_LACK.to_string(), lack.to_string()));
        }
        let pool = Arc::new(Mutex::new(Pool::new(threads)));
        let peak = Peak::of_math(isa, CpuMath::F32);
        Ok(Self { info, pool, threads, peak, ceilings: None, streamed_bytes: usize::MAX })
    }
}

impl CpuDevice {
    /// A block of `bytes` that this device's threads read between steps of the model loaded last, to measure the ceiling of
    /// the moment.
    ///
    /// # Errors
    /// The system refuses the memory.
    pub fn probe(&self, bytes: usize) -> Result<ceilings::Probe> {
        ceilings::Probe::new(&self.pool, Isa::detect(), &self.peak, bytes)
    }
}

/// The CPU's model name as the system gives it.
fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_string(), |(_, name)| name.trim().to_string())
}

/// The system's setting for huge pages, `unknown` where it has none.
fn huge_pages() -> String {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let chosen = setting.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    chosen.map_or_else(|| "unknown".to_string(), |(chosen, _)| chosen.to_string())
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_bytes(&self) -> u64 {
        memory::memory().free
    }

    fn ceilings(&mut self) -> Result<Option<Ceilings>> {
        let mut pool = lock(&self.pool);
        let threads = pool.threads();
        match &self.ceilings {
            Some((peak, of_threads, ceilings)) if *peak == self.peak && *of_threads == threads => {
                Ok(Some(*ceilings))
            }
            _ => {
                let ceilings = ceilings::measure(&mut pool, Isa::detect(), &self.peak)?;
                self.ceilings = Some((self.peak.clone(), threads, ceilings));
                Ok(Some(ceilings))
            }
        }
    }

    fn ceilings_now(&mut self) -> Result<Option<Ceilings>> {
        let Some(known) = self.ceilings()? else { return Ok(None) };
        let mut pool = lock(&self.pool);
        let (read, flops) = ceilings::now(&mut pool, Isa::detect(), &self.peak, self.streamed_bytes)?;
        Ok(Some(Ceilings { read_bytes_per_s: read, flops_per_s: flops, ..known }))
    }

    fn default_dtypes(&self) -> (CacheDtype, CacheDtype) {
        (CacheDtype::F32, CacheDtype::F32)
    }

    fn configure(&self, _layout: &ModelLayout, config: &mut EngineConfig) -> Result<()> {
        refuse_cuda_kernels(config, "the CPU device has its own")?;
        refuse_last_layer(config, "the CPU device runs the last layer on all rows")?;
        if !config.kv_block_tokens.is_multiple_of(LANES) {
            return Err(Error::invalid(
                format!(
                    "kv_block_tokens = {}: the CPU device keeps K and V in tiles of {LANES} tokens",
                    config.kv_block_tokens
                ),
                format!("set kv_block_tokens={LANES} or a multiple of it"),
            ));
        }
        match config.state_write_interval {
            Some(interval) if interval > 1 => Err(Error::invalid(
                format!(
                    "state_write_interval = {interval}: the CPU device writes recurrent states with every token"
                ),
                "leave state_write_interval at auto",
            )),
            _ => Ok(()),
        }
    }

    fn load(
        &mut self,
        layout: &ModelLayout,
        source: &WeightSource,
        options: &LoadOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Model>> {
        let threads = options.threads.unwrap_or(self.threads);
        let mut pool = lock(&self.pool);
        if pool.threads() != threads {
            *pool = Pool::new(threads);
        }
        drop(pool);
        self.peak = Peak::of_model(Isa::detect(), options.cpu_math, layout);
        self.streamed_bytes = layout.streamed_bytes() as usize;
        Ok(Box::new(CpuModel::load(&self.pool, threads, layout, source, options, progress)?))
    }
}
