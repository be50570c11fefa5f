//! Kernel times from CUPTI, NVIDIA's tracing library: when each kernel began and ended by the GPU's own clock, inside
//! captured graphs too, with nothing put between the launches.
//!
//! The library is opened by hand like the others, since it may be missing. It hands records over in buffers, through two
//! callbacks without an argument of ours, so what it collects is kept in one place for the process, and one tracer at a
//! time uses it.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;

use super::libraries;
use crate::engine::clock::Clock;

pub const NAMES: [&str; 3] = ["libcupti.so.13", "libcupti.so.12", "libcupti.so"];

// Values of cupti_activity.h and cupti_result.h.
const CONCURRENT_KERNEL: c_int = 10;
const FLUSH_FORCED: u32 = 1;
const SUCCESS: c_int = 0;
/// From CUDA 13 on the interface's version is 10,000 times CUDA's own major; before it was a small count.
const VERSION_13: u32 = 130_000;

/// Bytes of a buffer of records, about 5,000 kernels.
const BUFFER_BYTES: usize = 1 << 20;

type Request = extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type Complete = extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

/// The functions used, by their C signatures (cupti_activity.h, cupti_version.h, cupti_result.h).
struct Functions {
    version: unsafe extern "C" fn(*mut u32) -> c_int,
    register: unsafe extern "C" fn(Request, Complete) -> c_int,
    enable: unsafe extern "C" fn(c_int) -> c_int,
    disable: unsafe extern "C" fn(c_int) -> c_int,
    flush: unsafe extern "C" fn(u32) -> c_int,
    next: unsafe extern "C" fn(*mut u8, usize, *mut *mut KernelActivity) -> c_int,
    dropped: unsafe extern "C" fn(*mut c_void, u32, *mut usize) -> c_int,
    timestamp: unsafe extern "C" fn(*mut u64) -> c_int,
    words: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
    /// Keeps the functions loaded.
    _library: Library,
}

/// The front of `CUpti_ActivityKernel4` and all later versions (CUDA 9 to 13), which only add fields at the end. Packed to 8
/// bytes in C, where each field lies as it does here.
#[repr(C)]
struct KernelActivity {
    kind: c_int,
    _configuration: [u8; 12],
    start_ns: u64,
    end_ns: u64,
    _completed_ns: u64,
    _place: [u32; 13],
    _correlation: u32,
    _grid: i64,
    name: *const c_char,
}

/// When a kernel ran, nanoseconds on CUPTI's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelTime {
    /// Index into [`Collected::names`].
    pub name: u32,
    pub start_ns: u64,
    pub end_ns: u64,
}

/// What was recorded, in the order of the kernels' starts.
#[derive(Debug, Default)]
pub struct Collected {
    pub kernels: Vec<KernelTime>,
    pub names: Vec<String>,
    /// Records that CUPTI could not keep.
    pub dropped: usize,
    /// Names by the address CUPTI gives them, which is the same for every launch of a kernel.
    pub by_address: HashMap<usize, u32>,
}

static FUNCTIONS: OnceLock<Result<Functions, String>> = OnceLock::new();
static COLLECTED: Mutex<Option<Collected>> = Mutex::new(None);
static IN_USE: AtomicBool = AtomicBool::new(false);

fn collected() -> MutexGuard<'static, Option<Collected>> {
    COLLECTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Called by CUPTI when it needs room.
extern "C" fn request(buffer: *mut *mut u8, bytes: *mut usize, max_records: *mut usize) {
    let room = vec![0u64; BUFFER_BYTES / 8].into_boxed_slice();
    // SAFETY: CUPTI passes three valid places; `complete` takes the buffer back. Records need 8-byte alignment.
    unsafe {
        *buffer = Box::into_raw(room).cast();
        *bytes = BUFFER_BYTES;
        *max_records = 0;
    }
}

/// Called by CUPTI, on a thread of its own, with a buffer that is full or flushed.
extern "C" fn complete(context: *mut c_void, stream: u32, buffer: *mut u8, _: usize, valid: usize) {
    // SAFETY: `request` made the buffer, with this length, and it comes back once.
    let room: Box<[u64]> =
        unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(buffer.cast::<u64>(), BUFFER_BYTES / 8)) };
    let mut guard = collected();
    let (Some(Ok(functions)), Some(collected)) = (FUNCTIONS.get(), guard.as_mut()) else { return };
    let mut record: *mut KernelActivity = std::ptr::null_mut();
    // SAFETY: the buffer holds `valid` bytes of records, each of which has its kind in front; a kernel's has at least the
    // fields of `KernelActivity`, and its name is a C string that outlives its module.
    unsafe {
        while (functions.next)(buffer, valid, &mut record) == SUCCESS && !record.is_null() {
            if (*record).kind == CONCURRENT_KERNEL {
                collected.add((*record).name, (*record).start_ns, (*record).end_ns);
            }
        }
        let mut dropped = 0;
        if (functions.dropped)(context, stream, &mut dropped) == SUCCESS {
            collected.dropped += dropped;
        }
    }
    drop(room);
}

impl Collected {
    /// SAFETY: `name` is null or a C string.
    unsafe fn add(&mut self, name: *const c_char, start_ns: u64, end_ns: u64) {
        // A record without times is one that was lost.
        if name.is_null() || start_ns == 0 || end_ns < start_ns {
            self.dropped += 1;
            return;
        }
        let names = &mut self.names;
        let name = *self.by_address.entry(name as usize).or_insert_with(|| {
            // SAFETY: the caller's.
            names.push(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned());
            names.len() as u32 - 1
        });
        self.kernels.push(KernelTime { name, start_ns, end_ns });
    }

    pub fn name(&self, kernel: &KernelTime) -> &str {
        self.names.get(kernel.name as usize).map_or("", String::as_str)
    }
}

/// Records kernels while it lives. All launches of the process are seen; the caller sees to it that they are its own.
pub struct Tracer {
    functions: &'static Functions,
}

impl Tracer {
    /// Begins to record. `driver`: the driver's CUDA version.
    ///
    /// # Errors
    /// In words, why kernels cannot be timed by CUPTI: not installed, newer than the driver, refused, or in use.
    pub fn start(driver: (i32, i32)) -> Result<Self, String> {
        let functions = FUNCTIONS.get_or_init(|| functions(driver)).as_ref().map_err(Clone::clone)?;
        if IN_USE.swap(true, Ordering::AcqRel) {
            return Err("CUPTI is in use by another session".to_string());
        }
        *collected() = Some(Collected::default());
        // (From here on dropping it ends the recording.)
        let tracer = Self { functions };
        // SAFETY: the callbacks are functions that live as long as the program.
        functions
            .check("cuptiActivityRegisterCallbacks", unsafe { (functions.register)(request, complete) })?;
        // SAFETY: a kind of the interface.
        functions.check("cuptiActivityEnable", unsafe { (functions.enable)(CONCURRENT_KERNEL) })?;
        Ok(tracer)
    }

    /// A moment on CUPTI's clock, nanoseconds, and on `clock`, seconds: the pair of the closest of a few readings.
    ///
    /// # Errors
    /// CUPTI gives no time.
    pub fn moment(&self, clock: &Clock) -> Result<(u64, f64), String> {
        let mut best = (0, 0.0, f64::INFINITY);
        for _ in 0..16 {
            let (mut at_ns, before_s) = (0, clock.now());
            // SAFETY: writes one number.
            self.functions.check("cuptiGetTimestamp", unsafe { (self.functions.timestamp)(&mut at_ns) })?;
            let after_s = clock.now();
            if after_s - before_s < best.2 {
                best = (at_ns, (before_s + after_s) / 2.0, after_s - before_s);
            }
        }
        Ok((best.0, best.1))
    }

    /// Ends the recording; all work on the GPU is done.
    pub fn finish(self) -> Collected {
        // SAFETY: a flag of the interface. Records are whole by now: the GPU is idle.
        unsafe { (self.functions.flush)(FLUSH_FORCED) };
        let mut all = collected().take().unwrap_or_default();
        all.kernels.sort_by_key(|kernel| (kernel.start_ns, kernel.end_ns));
        all
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        // SAFETY: kinds and flags of the interface. Buffers that are still out come back, and are dropped.
        unsafe {
            (self.functions.disable)(CONCURRENT_KERNEL);
            (self.functions.flush)(FLUSH_FORCED);
        }
        *collected() = None;
        IN_USE.store(false, Ordering::Release);
    }
}

impl Functions {
    fn check(&self, what: &str, code: c_int) -> Result<(), String> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut words = std::ptr::null();
        // SAFETY: on success the place holds a static string.
        let text = unsafe {
            if (self.words)(code, &mut words) == SUCCESS && !words.is_null() {
                CStr::from_ptr(words).to_string_lossy().into_owned()
            } else {
                code.to_string()
            }
        };
        Err(format!("CUPTI: {what} failed with {text}"))
    }
}

/// The first CUPTI that is not newer than the driver.
fn functions(driver: (i32, i32)) -> Result<Functions, String> {
    let mut reason = "CUPTI (libcupti.so) was not found".to_string();
    for path in libraries::candidates(&NAMES) {
        let Some(library) = libraries::open_path(&path) else { continue };
        match load(library) {
            Ok(functions) => {
                let mut version = 0;
                // SAFETY: writes one number.
                let code = unsafe { (functions.version)(&mut version) };
                if code == SUCCESS && (version < VERSION_13 || version as i32 / 10_000 <= driver.0) {
                    return Ok(functions);
                }
                reason = format!("{} is newer than the driver (CUDA {})", path.display(), driver.0);
            }
            Err(error) => reason = format!("{}: {error}", path.display()),
        }
    }
    Err(reason)
}

fn load(library: Library) -> Result<Functions, libloading::Error> {
    // SAFETY: each name has the signature of its field in CUPTI's headers of CUDA 12 and 13.
    unsafe {
        Ok(Functions {
            version: *library.get(b"cuptiGetVersion")?,
            register: *library.get(b"cuptiActivityRegisterCallbacks")?,
            enable: *library.get(b"cuptiActivityEnable")?,
            disable: *library.get(b"cuptiActivityDisable")?,
            flush: *library.get(b"cuptiActivityFlushAll")?,
            next: *library.get(b"cuptiActivityGetNextRecord")?,
            dropped: *library.get(b"cuptiActivityGetNumDroppedRecords")?,
            timestamp: *library.get(b"cuptiGetTimestamp")?,
            words: *library.get(b"cuptiGetResultString")?,
            _library: library,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn the_front_of_a_kernel_s_record_lies_as_in_the_header() {
        let found = (
            offset_of!(KernelActivity, start_ns),
            offset_of!(KernelActivity, end_ns),
            offset_of!(KernelActivity, _grid),
            offset_of!(KernelActivity, name),
        );
        assert_eq!(found, (16, 24, 96, 104));
    }

    #[test]
    fn records_without_times_are_counted_as_lost() {
        let mut collected = Collected::default();
        let name = c"k";
        // SAFETY: C strings, or null.
        unsafe {
            collected.add(name.as_ptr(), 10, 20);
            collected.add(name.as_ptr(), 30, 40);
            collected.add(name.as_ptr(), 0, 0);
            collected.add(std::ptr::null(), 1, 2);
        }
        assert_eq!((collected.kernels.len(), collected.dropped, collected.names.len()), (2, 2, 1));
        assert_eq!(collected.name(&collected.kernels[1]), "k");
    }
}
