//! A stream and what is put on it: kernel launches that declare their bytes and FLOPs, copies, events, graphs.
//!
//! Launches may overlap the kernel before them (programmatic dependent launch): such a kernel must call
//! `wait_for_previous_kernel()` (cuda/half.cuh) before it touches anything an earlier kernel writes, and every kernel in a
//! chain of overlapped launches must, since waiting is what makes "done" transitive.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;

use cudarc::driver::{result, sys};

use super::driver::plain::Plain;
use super::driver::{DeviceBuffer, Event, Gpu, Kernel, PinnedBuffer, check, failure};
use crate::Result;

/// Compulsory bytes and FLOPs of one launch: each input read once, each output written once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LaunchCost {
    pub bytes: u64,
    pub flops: u64,
}

impl LaunchCost {
    pub fn new(bytes: u64, flops: u64) -> Self {
        Self { bytes, flops }
    }
}

/// One kernel argument: a number of at most eight bytes, or a structure passed by value.
#[derive(Debug, Clone, Copy)]
pub enum Arg<'a> {
    Word(u64),
    Struct(&'a [u8]),
}

impl From<u64> for Arg<'_> {
    fn from(value: u64) -> Self {
        Self::Word(value)
    }
}
impl From<u32> for Arg<'_> {
    fn from(value: u32) -> Self {
        Self::Word(u64::from(value))
    }
}
impl From<i32> for Arg<'_> {
    fn from(value: i32) -> Self {
        Self::Word(u64::from(value as u32))
    }
}
impl From<f32> for Arg<'_> {
    fn from(value: f32) -> Self {
        Self::Word(u64::from(value.to_bits()))
    }
}
impl From<&DeviceBuffer> for Arg<'_> {
    fn from(buffer: &DeviceBuffer) -> Self {
        Self::Word(buffer.pointer())
    }
}

/// Shape of a launch. `Launch::new(blocks, threads)` and then the setters for what differs from the plain case.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    pub grid: [u32; 3],
    pub threads: u32,
    pub shared_bytes: u32,
    /// May start before the kernel in front of it has ended (sm_90 and later; ignored elsewhere).
    pub overlap: bool,
    /// Blocks of a cluster (sm_90 and later); 1 is none.
    pub cluster: u32,
    pub cost: LaunchCost,
}

impl Launch {
    pub fn new(blocks: u32, threads: u32) -> Self {
        Self::grid([blocks, 1, 1], threads)
    }

    pub fn grid(grid: [u32; 3], threads: u32) -> Self {
        Self { grid, threads, shared_bytes: 0, overlap: false, cluster: 1, cost: LaunchCost::default() }
    }

    pub fn shared(self, bytes: u32) -> Self {
        Self { shared_bytes: bytes, ..self }
    }

    pub fn overlapping(self) -> Self {
        Self { overlap: true, ..self }
    }

    pub fn cluster(self, blocks: u32) -> Self {
        Self { cluster: blocks, ..self }
    }

    pub fn cost(self, bytes: u64, flops: u64) -> Self {
        Self { cost: LaunchCost { bytes, flops }, ..self }
    }
}

/// A launch as a trace knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launched {
    pub name: &'static str,
    /// What it is for: [`Stream::set_role`].
    pub role: &'static str,
    pub cost: LaunchCost,
    /// A call of a library: one kernel or more, of unknown names.
    pub library: bool,
}

/// What is done with launches besides noting them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// They run.
    Run,
    /// They run one after the other, with an event before the first and after each.
    Time,
    /// Nothing: they are only counted.
    Count,
}

/// Launches seen since recording began, and their events.
struct Recording {
    launches: Vec<Launched>,
    how: Record,
    events: Vec<Event>,
}

/// A queue of work on one GPU. Everything on it runs in order. Used by one thread at a time.
pub struct Stream {
    gpu: Gpu,
    raw: sys::CUstream,
    /// Overlapped launches are allowed at all (off for timing kernel by kernel).
    overlap: Cell<bool>,
    role: Cell<&'static str>,
    recording: RefCell<Option<Recording>>,
}

// SAFETY: a stream handle may move between threads; `Cell` and `RefCell` keep it from being shared.
unsafe impl Send for Stream {}

impl Stream {
    /// A stream of its own, which waits for no other.
    ///
    /// # Errors
    /// A failure of the driver, in its words.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        gpu.bind()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| failure(error, || "creating a stream".to_string()))?;
        Ok(Self {
            gpu: gpu.clone(),
            raw,
            overlap: Cell::new(true),
            role: Cell::new(""),
            recording: RefCell::new(None),
        })
    }

    /// The driver's handle, for libraries that queue work of their own.
    pub fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// What the launches from here on are for, as traces name it.
    pub fn set_role(&self, role: &'static str) {
        self.role.set(role);
    }

    /// Launches are only counted now: a library is not to queue anything.
    pub fn only_counts(&self) -> bool {
        self.recording.borrow().as_ref().is_some_and(|recording| recording.how == Record::Count)
    }

    /// Notes work that a library queued, as `launch` does for a kernel.
    ///
    /// # Errors
    /// Of a timed recording, a failure of the driver.
    pub fn note_library(&self, name: &'static str, cost: LaunchCost) -> Result<()> {
        self.note(name, cost, true)
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Puts `kernel` on the stream.
    ///
    /// # Errors
    /// A launch that the driver refuses, in its words.
    ///
    /// # Safety
    /// `args` match the kernel's parameters in number, size and order, and every pointer among them is valid for what the
    /// kernel does until that work is done.
    pub unsafe fn launch(&self, kernel: &Kernel, launch: Launch, args: &[Arg]) -> Result<()> {
        if self.only_counts() {
            return self.note(kernel.name, launch.cost, false);
        }
        let mut words = [0u64; 32];
        let mut pointers = [std::ptr::null_mut::<c_void>(); 32];
        assert!(args.len() <= words.len(), "{}: more arguments than a launch holds", kernel.name);
        for (i, arg) in args.iter().enumerate() {
            pointers[i] = match arg {
                Arg::Word(word) => {
                    words[i] = *word;
                    (&raw mut words[i]).cast()
                }
                Arg::Struct(bytes) => bytes.as_ptr().cast_mut().cast(),
            };
        }
        let mut attributes: [sys::CUlaunchAttribute; 2] =
            // SAFETY: plain C structures, for which all zeros is a value.
            unsafe { std::mem::zeroed() };
        let mut count = 0;
        if launch.overlap && self.overlap.get() && self.gpu.is_hopper_or_newer() {
            attributes[count].id =
                sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count].value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        if launch.cluster > 1 {
            attributes[count].id = sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[count].value.clusterDim =
                sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: launch.cluster, y: 1, z: 1 };
            count += 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: self.raw,
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as u32,
        };
        // SAFETY: the structures live through the call, which copies them; the arguments are the caller's promise.
        let code = unsafe {
            sys::cuLaunchKernelEx(&config, kernel.function, pointers.as_mut_ptr(), std::ptr::null_mut())
                .result()
        };
        check(code, || {
            format!(
                "launching {} with a grid of {:?}, {} threads and {} bytes of shared memory",
                kernel.name, launch.grid, launch.threads, launch.shared_bytes
            )
        })?;
        self.note(kernel.name, launch.cost, false)
    }

    fn note(&self, name: &'static str, cost: LaunchCost, library: bool) -> Result<()> {
        let mut recording = self.recording.borrow_mut();
        let Some(recording) = recording.as_mut() else { return Ok(()) };
        recording.launches.push(Launched { name, role: self.role.get(), cost, library });
        if recording.how == Record::Time {
            let event = Event::new(&self.gpu)?;
            self.record(&event)?;
            recording.events.push(event);
        }
        Ok(())
    }

    /// Begins to note launches; timed ones do not overlap meanwhile.
    ///
    /// # Errors
    /// Of a timed recording, a failure of the driver.
    pub fn start_recording(&self, how: Record) -> Result<()> {
        let mut events = Vec::new();
        if how == Record::Time {
            let event = Event::new(&self.gpu)?;
            self.record(&event)?;
            events.push(event);
            self.overlap.set(false);
        }
        *self.recording.borrow_mut() = Some(Recording { launches: Vec::new(), how, events });
        Ok(())
    }

    /// The launches that `body` would make.
    ///
    /// # Errors
    /// What `body` returns.
    pub fn count(&self, body: impl FnOnce() -> Result<()>) -> Result<Vec<Launched>> {
        self.start_recording(Record::Count)?;
        let done = body();
        let (launches, _) = self.stop_recording();
        done.map(|()| launches)
    }

    /// Ends the recording: the launches, and when it was timed one event more than there are launches.
    pub fn stop_recording(&self) -> (Vec<Launched>, Vec<Event>) {
        self.overlap.set(true);
        let recording = self.recording.borrow_mut().take();
        recording.map_or_else(|| (Vec::new(), Vec::new()), |recording| (recording.launches, recording.events))
    }

    /// Marks this point of the stream.
    ///
    /// # Errors
    /// A failure of the driver, in its words.
    pub fn record(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles are live.
        check(unsafe { result::event::record(event.raw(), self.raw) }, || "recording an event".to_string())
    }

    /// Later work on this stream waits for `event`.
    ///
    /// # Errors
    /// A failure of the driver, in its words.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles are live.
        check(unsafe { result::stream::wait_event(self.raw, event.raw(), flags) }, || {
            "waiting for an event".to_string()
        })
    }

    /// Blocks until all work on this stream is done.
    ///
    /// # Errors
    /// A failure of the driver, earlier work's too.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is live.
        check(unsafe { result::stream::synchronize(self.raw) }, || "waiting for the stream".to_string())
    }

    /// Queues a copy of `bytes` from page-locked memory to the GPU.
    ///
    /// # Errors
    /// A failure of the driver, in its words.
    ///
    /// # Panics
    /// A range beyond the end of the page-locked buffer.
    ///
    /// # Safety
    /// The host bytes are not written, and both buffers live, until the copy is done.
    pub unsafe fn copy_in(&self, to: u64, from: &PinnedBuffer, offset: usize, bytes: usize) -> Result<()> {
        assert!(offset + bytes <= from.bytes(), "a copy past the end of a page-locked buffer");
        // SAFETY: the range was checked; the rest is the caller's promise.
        let code = unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, (from.pointer() + offset as u64) as *const c_void, bytes, self.raw)
                .result()
        };
        check(code, || format!("copying {bytes} bytes to the GPU"))
    }

    /// Queues a copy of `bytes` from the GPU to page-locked memory.
    ///
    /// # Errors
    /// A failure of the driver, in its words.
    ///
    /// # Panics
    /// A range beyond the end of the page-locked buffer.
    ///
    /// # Safety
    /// The host bytes are neither read nor written, and both buffers live, until the copy is done.
    pub unsafe fn copy_out(&self, to: &PinnedBuffer, offset: usize, from: u64, bytes: usize) -> Result<()> {
        assert!(offset + bytes <= to.bytes(), "a copy past the end of a page-locked buffer");
        // SAFETY: the range was checked; the rest is the caller's promise.
        let code = unsafe {
            sys::cuMemcpyDtoHAsync_v2((to.pointer() + offset as u64) as *mut c_void, from, bytes, self.raw)
                .result()
        };
        check(code, || format!("copying {bytes} bytes from the GPU"))
    }

    /// Queues a copy within the GPU.
    ///
    /// # Errors
    /// A failure of the driver, in its words.
    ///
    /// # Safety
    /// Both ranges are inside live buffers until the copy is done.
    pub unsafe fn copy_within(&self, to: u64, from: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe { result::memcpy_dtod_async(to, from, bytes as usize, self.raw) };
        check(code, || format!("copying {bytes} bytes within the GPU"))
    }

    /// Queues zeroing of `bytes` at `to`.
    ///
    /// # Errors
    /// A failure of the driver, in its words.
    ///
    /// # Safety
    /// The range is inside a live buffer until the work is done.
    pub unsafe fn zero(&self, to: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe { result::memset_d8_async(to, 0, bytes as usize, self.raw) };
        check(code, || format!("zeroing {bytes} bytes"))
    }

    /// Records what `body` puts on the stream into a graph instead of running it.
    ///
    /// # Safety
    /// The pointers captured stay valid as long as the graph is launched.
    ///
    /// # Errors
    /// What `body` returns; a call that cannot be captured.
    pub unsafe fn capture(&self, body: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live and not capturing; the capture is ended below on every path.
        check(unsafe { result::stream::begin_capture(self.raw, mode) }, || {
            "beginning a capture".to_string()
        })?;
        self.start_recording(Record::Run)?;
        let done = body();
        let (launches, _) = self.stop_recording();
        // SAFETY: begun above.
        let graph = unsafe { result::stream::end_capture(self.raw) };
        done?;
        let graph = graph.map_err(|error| failure(error, || "ending a capture".to_string()))?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: `graph` was just captured; it is destroyed once instantiated.
        let code = unsafe {
            let code = sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0).result();
            let _ = result::graph::destroy(graph);
            code
        };
        check(code, || "instantiating a graph".to_string())?;
        Ok(Graph { gpu: self.gpu.clone(), executable, launches })
    }

    /// Queues a captured graph.
    ///
    /// # Errors
    /// A failure of the driver, in its words.
    pub fn launch_graph(&self, graph: &Graph) -> Result<()> {
        // SAFETY: the graph is live; what it points to is the promise of `capture`.
        check(unsafe { result::graph::launch(graph.executable, self.raw) }, || {
            "launching a graph".to_string()
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: created in `new`, destroyed only here, after its work is done.
            unsafe {
                let _ = result::stream::synchronize(self.raw);
                let _ = result::stream::destroy(self.raw);
            }
        }
    }
}

/// A step recorded once and launched as one piece.
pub struct Graph {
    gpu: Gpu,
    executable: sys::CUgraphExec,
    /// What it launches, in order.
    pub launches: Vec<Launched>,
}

// SAFETY: a graph handle may move between threads.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: instantiated in `capture` and destroyed only here.
            let _ = unsafe { result::graph::exec_destroy(self.executable) };
        }
    }
}

/// The bytes of a plain value, for [`Arg::Struct`] and uploads.
pub fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: `Plain` values have no padding, and the length is that of the slice.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}
