//! The driver in small, checked pieces: a GPU with its context, streams, events, and memory that frees itself.
//!
//! cudarc's raw layer is used rather than its owning one: steps are captured into graphs with programmatic launches, and
//! all buffers live as long as the session, so per-buffer event tracking would only be in the way. A context is current
//! on a thread after [`Gpu::bind`]; every public entry of this device calls it first.

mod buffers;
mod event;

use std::collections::HashMap;
use std::ffi::CString;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::{result, sys};

use super::compile::{self, Unit};
use super::libraries;
use super::nvrtc::Nvrtc;
use crate::{Error, Result};

pub use buffers::{DeviceBuffer, PinnedBuffer};
pub use event::Event;

/// Oldest compute capability the kernels compile for.
pub const MIN_CAPABILITY: i32 = 80;
/// Oldest driver interface (CUDA 12.0): launches with attributes.
const MIN_DRIVER: i32 = 12000;

/// What the driver says of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuFacts {
    pub ordinal: i32,
    pub name: String,
    /// 90 for compute capability 9.0.
    pub capability: i32,
    pub multiprocessors: u32,
    pub memory_bytes: u64,
    pub l2_bytes: u64,
    /// Most shared memory a block may ask for.
    pub shared_bytes: u32,
    /// The driver's CUDA version, (13, 0).
    pub driver: (i32, i32),
    /// `0000:3b:00.0`: the same GPU whatever is visible to this process.
    pub pci_bus_id: String,
}

/// Turns a driver code into an error that says what was being done.
///
/// # Errors
/// Any code but success.
pub fn check(code: Result<(), result::DriverError>, what: impl FnOnce() -> String) -> Result<()> {
    code.map_err(|error| failure(error, what))
}

pub fn failure(error: result::DriverError, what: impl FnOnce() -> String) -> Error {
    let words =
        error.error_string().map_or_else(|_| format!("{:?}", error.0), |s| s.to_string_lossy().into_owned());
    let hint = match error.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            "lower gpu_memory_utilization, max_num_seqs or kv_blocks, or end what else uses the GPU (nvidia-smi)"
        }
        sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS | sys::CUresult::CUDA_ERROR_LAUNCH_FAILED => {
            "a kernel went wrong; please report it with the command line"
        }
        sys::CUresult::CUDA_ERROR_INVALID_IMAGE | sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => {
            "the driver may be older than NVRTC; update the driver or choose an older toolkit by CUDA_HOME"
        }
        _ => "nvidia-smi shows whether the driver sees the GPU",
    };
    Error::failed(format!("CUDA: {}: {words}", what()), hint)
}

/// Initialises the driver once.
///
/// # Errors
/// One sentence for each thing that can be missing.
fn driver() -> Result<(i32, i32)> {
    static STATE: OnceLock<Result<(i32, i32)>> = OnceLock::new();
    STATE
        .get_or_init(|| {
            let Some((library, _)) = libraries::open(&["libcuda.so.1", "libcuda.so"]) else {
                return Err(Error::invalid(
                    "no NVIDIA driver (libcuda.so.1) was found",
                    "install the NVIDIA driver, or use --device cpu",
                ));
            };
            // cudarc opens the library again by its bare name; while this handle lives, the loader gives it this one.
            std::mem::forget(library);
            // SAFETY: asks whether the library loads, nothing more.
            if !unsafe { sys::is_culib_present() } {
                return Err(Error::invalid(
                    "the NVIDIA driver's libcuda was found, but not under a name the loader knows",
                    "add its folder to the loader's path (ldconfig or LD_LIBRARY_PATH)",
                ));
            }
            result::init().map_err(|error| {
                let Error::Failed { fact, .. } = failure(error, || "the driver does not start".to_string())
                else {
                    return Error::bug("the driver does not start");
                };
                Error::invalid(fact, "nvidia-smi shows whether the driver sees a GPU; or use --device cpu")
            })?;
            let mut version = 0;
            // SAFETY: writes one integer.
            let code = unsafe { sys::cuDriverGetVersion(&mut version) }.result();
            check(code, || "asking the driver's version".to_string())?;
            new_enough(version)
        })
        .clone()
}

/// Major and minor of a driver's CUDA version, if it will do.
fn new_enough(version: i32) -> Result<(i32, i32)> {
    let pair = (version / 1000, version % 1000 / 10);
    if version < MIN_DRIVER {
        return Err(Error::invalid(
            format!("the NVIDIA driver speaks CUDA {}.{}, and 12.0 or newer is needed", pair.0, pair.1),
            "update the driver",
        ));
    }
    Ok(pair)
}

/// GPU `ordinal` of those the driver shows, if it will do.
fn usable(all: &[GpuFacts], ordinal: i32) -> Result<&GpuFacts> {
    let Some(facts) = all.iter().find(|facts| facts.ordinal == ordinal) else {
        return Err(Error::invalid(
            format!("there is no GPU {ordinal}: the driver shows {}", all.len()),
            "nvidia-smi lists the GPUs; CUDA_VISIBLE_DEVICES may hide some",
        ));
    };
    if facts.capability < MIN_CAPABILITY {
        return Err(Error::invalid(
            format!(
                "GPU {ordinal} ({}) has compute capability {}.{}, and 8.0 (Ampere) or newer is needed",
                facts.name,
                facts.capability / 10,
                facts.capability % 10
            ),
            "use a newer GPU, or --device cpu",
        ));
    }
    Ok(facts)
}

/// All GPUs the driver shows, usable or not.
///
/// # Errors
/// No driver, a driver that does not start, or one that is too old.
pub fn probe() -> Result<Vec<GpuFacts>> {
    let driver = driver()?;
    let count =
        result::device::get_count().map_err(|error| failure(error, || "counting GPUs".to_string()))?;
    (0..count).map(|ordinal| facts(ordinal, driver)).collect()
}

fn facts(ordinal: i32, driver: (i32, i32)) -> Result<GpuFacts> {
    use sys::CUdevice_attribute as Attribute;
    let asked = |error| failure(error, || format!("asking about GPU {ordinal}"));
    let device = result::device::get(ordinal).map_err(asked)?;
    // SAFETY: `device` is a handle the driver just gave.
    let attribute = |which| unsafe { result::device::get_attribute(device, which) }.map_err(asked);
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let domain = attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?;
    let bus = attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?;
    let slot = attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?;
    Ok(GpuFacts {
        ordinal,
        name: result::device::get_name(device).map_err(asked)?,
        capability: 10 * major + minor,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        // SAFETY: as above.
        memory_bytes: unsafe { result::device::total_mem(device) }.map_err(asked)? as u64,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as u64,
        shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32,
        driver,
        pci_bus_id: format!("{domain:04x}:{bus:02x}:{slot:02x}.0"),
    })
}

/// Waits for the null stream. Its copies and fills may still be under way when their calls return, and streams of this
/// device, which are non-blocking, do not wait for it by themselves.
fn settle() -> Result<()> {
    // SAFETY: the null stream of the current context always exists.
    check(unsafe { result::stream::synchronize(std::ptr::null_mut()) }, || "waiting for a copy".to_string())
}

/// A kernel ready to launch. Valid as long as its [`Gpu`], which never unloads modules.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    pub(super) function: sys::CUfunction,
    pub name: &'static str,
    /// Registers a thread.
    pub registers: u32,
}

// SAFETY: a function handle is a name within its context, usable from any thread that has the context current.
unsafe impl Send for Kernel {}
// SAFETY: as above; launching does not change it.
unsafe impl Sync for Kernel {}

struct Modules {
    loaded: HashMap<ModuleKey, sys::CUmodule>,
    nvrtc: Option<Arc<Nvrtc>>,
}

// SAFETY: module handles and the compiler's library may be used from any thread; the mutex around this orders it.
unsafe impl Send for Modules {}

struct Inner {
    facts: GpuFacts,
    device: sys::CUdevice,
    context: sys::CUcontext,
    modules: Mutex<Modules>,
}

// SAFETY: the context handle may be made current on any thread; everything mutable is behind the mutex.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: retained once in `Gpu::open`; every buffer and stream holds a `Gpu`, so none outlives this.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Units with the same file and the same definitions are one module.
type ModuleKey = (&'static str, &'static [(&'static str, &'static str)]);

fn module_key(unit: &Unit) -> ModuleKey {
    (unit.file, unit.defines)
}

/// One GPU: its primary context and the kernels loaded into it. Clones share it.
#[derive(Clone)]
pub struct Gpu {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("facts", &self.inner.facts).finish()
    }
}

impl Gpu {
    /// Opens GPU `ordinal`.
    ///
    /// # Errors
    /// No driver, no such GPU, or one that is too old.
    pub fn open(ordinal: i32) -> Result<Self> {
        let facts = usable(&probe()?, ordinal)?.clone();
        let opening = |error| failure(error, || format!("opening GPU {ordinal}"));
        let device = result::device::get(ordinal).map_err(opening)?;
        // SAFETY: `device` is valid; the context is released once, in `Inner::drop`.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(opening)?;
        let modules = Mutex::new(Modules { loaded: HashMap::new(), nvrtc: None });
        let gpu = Self { inner: Arc::new(Inner { facts, device, context, modules }) };
        gpu.bind()?;
        Ok(gpu)
    }

    pub fn facts(&self) -> &GpuFacts {
        &self.inner.facts
    }

    /// Hopper or newer: bulk copies, overlapped launches.
    pub fn is_hopper_or_newer(&self) -> bool {
        self.inner.facts.capability >= 90
    }

    /// Makes the context current on this thread.
    ///
    /// # Errors
    /// A failure of the driver, in its words.
    pub fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained as long as `self` lives.
        let code = unsafe { result::ctx::set_current(self.inner.context) };
        check(code, || "making the context current".to_string())
    }

    /// Free and total bytes of the GPU's memory now.
    ///
    /// # Errors
    /// A failure of the driver, in its words.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.bind()?;
        let (free, total) =
            result::mem_get_info().map_err(|e| failure(e, || "asking for free memory".to_string()))?;
        Ok((free as u64, total as u64))
    }

    /// Waits for everything queued on this GPU.
    ///
    /// # Errors
    /// A failure of the driver, in its words.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        check(result::ctx::synchronize(), || "waiting for the GPU".to_string())
    }

    /// A kernel of `unit`, compiling (or reading from the cache) and loading its module at the first call.
    ///
    /// # Errors
    /// A unit that is not for this GPU; as [`compile::cubin`]; a failure of the driver.
    pub fn kernel(&self, unit: &Unit, name: &'static str) -> Result<Kernel> {
        let facts = &self.inner.facts;
        if !unit.supports(facts.capability) {
            return Err(Error::bug(format!(
                "{} is not for compute capability {}",
                unit.file, facts.capability
            )));
        }
        let module = self.module(unit)?;
        let symbol = CString::new(name).map_err(|_| Error::bug(format!("kernel name {name:?}")))?;
        let loading = |error| failure(error, || format!("loading kernel {name} of {}", unit.file));
        // SAFETY: the module is loaded and stays so; attributes are read from and set on a valid function.
        unsafe {
            let function = result::module::get_function(module, symbol).map_err(loading)?;
            use sys::CUfunction_attribute_enum as Attribute;
            let attribute =
                |which| result::function::get_function_attribute(function, which).map_err(loading);
            let fixed = attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
            let registers = attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)? as u32;
            let most = facts.shared_bytes as i32 - fixed;
            let which = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            result::function::set_function_attribute(function, which, most).map_err(loading)?;
            Ok(Kernel { function, name, registers })
        }
    }

    fn modules(&self) -> MutexGuard<'_, Modules> {
        self.inner.modules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn nvrtc(&self) -> Result<Arc<Nvrtc>> {
        let mut modules = self.modules();
        if let Some(found) = &modules.nvrtc {
            return Ok(found.clone());
        }
        let found = Arc::new(Nvrtc::find(Some(self.inner.facts.driver))?);
        modules.nvrtc = Some(found.clone());
        Ok(found)
    }

    fn module(&self, unit: &Unit) -> Result<sys::CUmodule> {
        if let Some(&module) = self.modules().loaded.get(&module_key(unit)) {
            return Ok(module);
        }
        let nvrtc = self.nvrtc()?;
        let cubin = compile::cubin(&nvrtc, unit, &compile::target(self.inner.facts.capability))?;
        self.load_module(unit, &cubin)
    }

    fn load_module(&self, unit: &Unit, cubin: &[u8]) -> Result<sys::CUmodule> {
        self.bind()?;
        // SAFETY: `cubin` is a whole ELF image and the driver copies it.
        let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) }
            .map_err(|error| failure(error, || format!("loading {}", unit.file)))?;
        self.modules().loaded.insert(module_key(unit), module);
        Ok(module)
    }

    /// Compiles (or reads from the cache) and loads all of `units` that this GPU can run, side by side: the compiler takes
    /// a second or more for each.
    ///
    /// # Errors
    /// One that does not compile.
    pub fn prepare(&self, units: &[&Unit]) -> Result<()> {
        let (nvrtc, target) = (self.nvrtc()?, compile::target(self.inner.facts.capability));
        let loaded = |unit: &Unit| self.modules().loaded.contains_key(&module_key(unit));
        let wanted: Vec<&Unit> = units
            .iter()
            .copied()
            .filter(|unit| unit.supports(self.inner.facts.capability) && !loaded(unit))
            .collect();
        let cubins: Vec<OnceLock<Result<Vec<u8>>>> = wanted.iter().map(|_| OnceLock::new()).collect();
        let next = AtomicUsize::new(0);
        let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get()).min(wanted.len());
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    loop {
                        let at = next.fetch_add(1, Ordering::Relaxed);
                        let Some(unit) = wanted.get(at) else { break };
                        cubins[at].get_or_init(|| compile::cubin(&nvrtc, unit, &target));
                    }
                });
            }
        });
        for (unit, cubin) in wanted.iter().zip(cubins) {
            if let Some(cubin) = cubin.into_inner() {
                self.load_module(unit, &cubin?)?;
            }
        }
        Ok(())
    }

    /// Path and version of the compiler in use.
    ///
    /// # Errors
    /// No NVRTC was found.
    pub fn compiler(&self) -> Result<String> {
        let nvrtc = self.nvrtc()?;
        Ok(format!("{}.{} ({})", nvrtc.version.0, nvrtc.version.1, nvrtc.path.display()))
    }

    /// Uninitialised memory.
    ///
    /// # Errors
    /// No memory; a failure of the driver.
    pub fn allocate(&self, bytes: u64) -> Result<DeviceBuffer> {
        self.bind()?;
        // SAFETY: freed once, in `DeviceBuffer::drop`. Zero-sized buffers get a byte so that every pointer is valid.
        let pointer = unsafe { result::malloc_sync(bytes.max(16) as usize) }
            .map_err(|error| failure(error, || format!("allocating {bytes} bytes")))?;
        Ok(DeviceBuffer { gpu: self.clone(), pointer, bytes, whole: None })
    }

    /// Memory of zeros.
    ///
    /// # Errors
    /// As [`Self::allocate`].
    pub fn allocate_zeroed(&self, bytes: u64) -> Result<DeviceBuffer> {
        let buffer = self.allocate(bytes)?;
        // SAFETY: the buffer holds at least `bytes`.
        let code = unsafe { result::memset_d8_sync(buffer.pointer, 0, bytes as usize) };
        check(code, || format!("zeroing {bytes} bytes"))?;
        settle()?;
        Ok(buffer)
    }

    /// A buffer holding `values`.
    ///
    /// # Errors
    /// As [`Self::allocate`].
    pub fn upload<T: plain::Plain>(&self, values: &[T]) -> Result<DeviceBuffer> {
        let buffer = self.allocate(size_of_val(values) as u64)?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// Page-locked host memory, which the GPU reads and writes without a staging copy.
    ///
    /// # Errors
    /// Memory that the system does not let be locked.
    pub fn allocate_pinned(&self, bytes: usize) -> Result<PinnedBuffer> {
        self.bind()?;
        // SAFETY: freed once, in `PinnedBuffer::drop`.
        let pointer = unsafe { result::malloc_host(bytes.max(16), 0) }
            .map_err(|error| failure(error, || format!("page-locking {bytes} bytes")))?;
        // SAFETY: the memory was just given to us, `bytes` long.
        unsafe { ptr::write_bytes(pointer.cast::<u8>(), 0, bytes.max(16)) };
        Ok(PinnedBuffer { gpu: self.clone(), pointer: pointer.cast(), bytes: bytes.max(16) })
    }
}

/// Types whose bytes may be copied to and from a GPU.
pub mod plain {
    /// # Safety
    /// Every bit pattern is a value and there is no padding.
    pub unsafe trait Plain: Copy + 'static {}
    // SAFETY: plain numbers.
    unsafe impl Plain for u8 {}
    // SAFETY: plain numbers.
    unsafe impl Plain for u16 {}
    // SAFETY: plain numbers.
    unsafe impl Plain for u32 {}
    // SAFETY: plain numbers.
    unsafe impl Plain for u64 {}
    // SAFETY: plain numbers.
    unsafe impl Plain for i32 {}
    // SAFETY: plain numbers.
    unsafe impl Plain for f32 {}
    // SAFETY: a u16 inside.
    unsafe impl Plain for half::f16 {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(ordinal: i32, capability: i32) -> GpuFacts {
        GpuFacts {
            ordinal,
            name: "Tesla T4".into(),
            capability,
            multiprocessors: 40,
            memory_bytes: 16 << 30,
            l2_bytes: 4 << 20,
            shared_bytes: 64 << 10,
            driver: (12, 4),
            pci_bus_id: String::new(),
        }
    }

    #[test]
    fn a_driver_or_a_gpu_that_is_too_old_is_one_sentence_with_a_hint() {
        assert_eq!(new_enough(12040).unwrap(), (12, 4));
        let old = new_enough(11080).unwrap_err();
        assert_eq!(old.to_string(), "the NVIDIA driver speaks CUDA 11.8, and 12.0 or newer is needed");
        let all = [gpu(0, 90), gpu(1, 75)];
        assert_eq!(usable(&all, 0).unwrap().capability, 90);
        let turing = usable(&all, 1).unwrap_err();
        assert!(turing.to_string().contains("(Tesla T4) has compute capability 7.5"), "{turing}");
        let absent = usable(&all, 2).unwrap_err();
        assert!(absent.to_string().contains("there is no GPU 2: the driver shows 2"), "{absent}");
        assert!([&old, &turing, &absent].iter().all(|e| e.exit_code() == 2 && !e.hint().is_empty()));
    }
}
