//! Large fp16 products through cuBLASLt, where it is installed: y[rows, n] = x[rows, k] W[n, k]ᵀ with fp32 sums.
//!
//! The library is opened by hand, like the others, because its name carries CUDA's major version and a missing one must
//! not end the program. The algorithm for a shape is asked for once and kept, so that a captured step asks nothing.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::ptr;

use cudarc::cublaslt::sys as lt;
use libloading::Library;

use super::driver::{DeviceBuffer, Gpu};
use super::launch::{LaunchCost, Stream};
use super::libraries;
use crate::{Error, Result};

const NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
/// Scratch memory the library may use; 32 MB is what its own guide asks for on Hopper.
const WORKSPACE_BYTES: u64 = 32 << 20;

/// `cublasStatus_t`, 0 for success; a number, since a newer library may have values that no enum here knows.
type Status = c_int;

/// The functions used, by their C signatures (cublasLt.h).
struct Functions {
    create: unsafe extern "C" fn(*mut lt::cublasLtHandle_t) -> Status,
    destroy: unsafe extern "C" fn(lt::cublasLtHandle_t) -> Status,
    describe: unsafe extern "C" fn(*mut lt::cublasLtMatmulDesc_t, u32, u32) -> Status,
    forget: unsafe extern "C" fn(lt::cublasLtMatmulDesc_t) -> Status,
    set: unsafe extern "C" fn(lt::cublasLtMatmulDesc_t, u32, *const c_void, usize) -> Status,
    lay_out: unsafe extern "C" fn(*mut lt::cublasLtMatrixLayout_t, u32, u64, u64, i64) -> Status,
    forget_layout: unsafe extern "C" fn(lt::cublasLtMatrixLayout_t) -> Status,
    prefer: unsafe extern "C" fn(*mut lt::cublasLtMatmulPreference_t) -> Status,
    forget_preference: unsafe extern "C" fn(lt::cublasLtMatmulPreference_t) -> Status,
    set_preference: unsafe extern "C" fn(lt::cublasLtMatmulPreference_t, u32, *const c_void, usize) -> Status,
    heuristic: unsafe extern "C" fn(
        lt::cublasLtHandle_t,
        lt::cublasLtMatmulDesc_t,
        lt::cublasLtMatrixLayout_t,
        lt::cublasLtMatrixLayout_t,
        lt::cublasLtMatrixLayout_t,
        lt::cublasLtMatrixLayout_t,
        lt::cublasLtMatmulPreference_t,
        c_int,
        *mut lt::cublasLtMatmulHeuristicResult_t,
        *mut c_int,
    ) -> Status,
    matmul: unsafe extern "C" fn(
        lt::cublasLtHandle_t,
        lt::cublasLtMatmulDesc_t,
        *const c_void,
        *const c_void,
        lt::cublasLtMatrixLayout_t,
        *const c_void,
        lt::cublasLtMatrixLayout_t,
        *const c_void,
        *const c_void,
        lt::cublasLtMatrixLayout_t,
        *mut c_void,
        lt::cublasLtMatrixLayout_t,
        *const lt::cublasLtMatmulAlgo_t,
        *mut c_void,
        usize,
        *mut c_void,
    ) -> Status,
    /// Keeps the functions loaded.
    _library: Library,
}

// Values of cublasLt.h and library_types.h.
const COMPUTE_32F: u32 = 68;
const R_16F: u32 = 2;
const R_32F: u32 = 0;
const DESC_TRANSA: u32 = 3;
const PREFERENCE_WORKSPACE: u32 = 1;
const OP_T: i32 = 1;

/// What an algorithm is chosen for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    rows: usize,
    n: usize,
    k: usize,
    stride: usize,
    float: bool,
}

struct Plan {
    a: lt::cublasLtMatrixLayout_t,
    b: lt::cublasLtMatrixLayout_t,
    d: lt::cublasLtMatrixLayout_t,
    algorithm: lt::cublasLtMatmulAlgo_t,
}

/// Used by one thread at a time, on one stream.
pub struct CublasLt {
    gpu: Gpu,
    functions: Functions,
    handle: lt::cublasLtHandle_t,
    description: lt::cublasLtMatmulDesc_t,
    preference: lt::cublasLtMatmulPreference_t,
    workspace: DeviceBuffer,
    plans: RefCell<HashMap<Shape, Plan>>,
}

// SAFETY: the handles may move between threads; `RefCell` keeps them from being shared.
unsafe impl Send for CublasLt {}

impl CublasLt {
    /// Where the library would be loaded from; `None` when it is not installed.
    pub fn find() -> Option<PathBuf> {
        libraries::open(&NAMES).map(|(_, path)| path)
    }

    /// `None` when the library is not installed.
    ///
    /// # Errors
    /// A library that is there and does not work.
    pub fn open(gpu: &Gpu) -> Result<Option<Self>> {
        let Some((library, path)) = libraries::open(&NAMES) else { return Ok(None) };
        gpu.bind()?;
        let functions = functions(library).map_err(|error| {
            Error::failed(
                format!("{}: {error}", path.display()),
                "install the cuBLAS of CUDA 12 or 13, or remove this one: the program then uses its own product",
            )
        })?;
        let mut opened = Self {
            gpu: gpu.clone(),
            functions,
            handle: ptr::null_mut(),
            description: ptr::null_mut(),
            preference: ptr::null_mut(),
            workspace: gpu.allocate(WORKSPACE_BYTES)?,
            plans: RefCell::new(HashMap::new()),
        };
        let (workspace_bytes, transposed) = (WORKSPACE_BYTES as usize, OP_T);
        // SAFETY: each pointer is to a live value of the size given; what fails is null and is not destroyed.
        unsafe {
            check((opened.functions.create)(&mut opened.handle), "cublasLtCreate")?;
            check(
                (opened.functions.describe)(&mut opened.description, COMPUTE_32F, R_32F),
                "cublasLtMatmulDescCreate",
            )?;
            check(
                (opened.functions.set)(opened.description, DESC_TRANSA, (&raw const transposed).cast(), 4),
                "cublasLtMatmulDescSetAttribute",
            )?;
            check((opened.functions.prefer)(&mut opened.preference), "cublasLtMatmulPreferenceCreate")?;
            check(
                (opened.functions.set_preference)(
                    opened.preference,
                    PREFERENCE_WORKSPACE,
                    (&raw const workspace_bytes).cast(),
                    size_of::<usize>(),
                ),
                "cublasLtMatmulPreferenceSetAttribute",
            )?;
        }
        Ok(Some(opened))
    }

    /// Queues y[rows, n] = x Wᵀ, rows of y `stride` elements apart, fp16 or with `float` fp32.
    ///
    /// # Safety
    /// `x` [rows, k], `w` [n, k] and `y` are valid device addresses until the work is done.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn product(
        &self,
        stream: &Stream,
        x: u64,
        w: u64,
        y: u64,
        (rows, n, k): (usize, usize, usize),
        stride: usize,
        float: bool,
    ) -> Result<()> {
        let shape = Shape { rows, n, k, stride, float };
        let mut plans = self.plans.borrow_mut();
        let plan = match plans.entry(shape) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(self.plan(shape)?),
        };
        let (one, zero) = (1f32, 0f32);
        // SAFETY: the plan's layouts describe the caller's matrices; scalars are read before the call returns.
        let status = unsafe {
            (self.functions.matmul)(
                self.handle,
                self.description,
                (&raw const one).cast(),
                w as *const c_void,
                plan.a,
                x as *const c_void,
                plan.b,
                (&raw const zero).cast(),
                y as *const c_void,
                plan.d,
                y as *mut c_void,
                plan.d,
                &plan.algorithm,
                self.workspace.pointer() as *mut c_void,
                WORKSPACE_BYTES as usize,
                stream.raw().cast(),
            )
        };
        check(status, "cublasLtMatmul")?;
        let (rows, n, k) = (rows as u64, n as u64, k as u64);
        let bytes = 2 * (rows * k + n * k) + rows * n * if float { 4 } else { 2 };
        stream.note_library("cublaslt", LaunchCost::new(bytes, 2 * rows * n * k))
    }

    /// In cuBLAS's column-major words: D [n, rows] = Aᵀ B with A = W read as [k, n] and B = x read as [k, rows].
    fn plan(&self, shape: Shape) -> Result<Plan> {
        self.gpu.bind()?;
        let functions = &self.functions;
        let layout = |kind: u32, rows: usize, columns: usize, lead: usize| {
            let mut layout = ptr::null_mut();
            // SAFETY: the pointer is to a live value.
            let status =
                unsafe { (functions.lay_out)(&mut layout, kind, rows as u64, columns as u64, lead as i64) };
            check(status, "cublasLtMatrixLayoutCreate").map(|()| layout)
        };
        let a = layout(R_16F, shape.k, shape.n, shape.k)?;
        let b = layout(R_16F, shape.k, shape.rows, shape.k)?;
        let d = layout(if shape.float { R_32F } else { R_16F }, shape.n, shape.rows, shape.stride)?;
        // SAFETY: a plain C structure, for which all zeros is a value.
        let mut found: lt::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: all handles are live; room for the one result asked for.
        let status = unsafe {
            (functions.heuristic)(
                self.handle,
                self.description,
                a,
                b,
                d,
                d,
                self.preference,
                1,
                &mut found,
                &mut count,
            )
        };
        check(status, "cublasLtMatmulAlgoGetHeuristic")?;
        if count == 0 {
            return Err(Error::failed(format!("cuBLASLt has no product for {shape:?}"), ""));
        }
        Ok(Plan { a, b, d, algorithm: found.algo })
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        if self.gpu.bind().is_err() {
            return;
        }
        // SAFETY: each handle was made by the matching function, is destroyed once, and null ones are left out.
        unsafe {
            for plan in self.plans.borrow().values() {
                for layout in [plan.a, plan.b, plan.d] {
                    (self.functions.forget_layout)(layout);
                }
            }
            if !self.preference.is_null() {
                (self.functions.forget_preference)(self.preference);
            }
            if !self.description.is_null() {
                (self.functions.forget)(self.description);
            }
            if !self.handle.is_null() {
                (self.functions.destroy)(self.handle);
            }
        }
    }
}

fn check(status: Status, what: &str) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    Err(Error::failed(
        format!("cuBLASLt: {what} failed with status {status}"),
        "nvidia-smi shows whether the GPU has memory left",
    ))
}

fn functions(library: Library) -> Result<Functions, libloading::Error> {
    // SAFETY: each name has the signature of its field in cublasLt.h of CUDA 12 and 13.
    unsafe {
        Ok(Functions {
            create: *library.get(b"cublasLtCreate")?,
            destroy: *library.get(b"cublasLtDestroy")?,
            describe: *library.get(b"cublasLtMatmulDescCreate")?,
            forget: *library.get(b"cublasLtMatmulDescDestroy")?,
            set: *library.get(b"cublasLtMatmulDescSetAttribute")?,
            lay_out: *library.get(b"cublasLtMatrixLayoutCreate")?,
            forget_layout: *library.get(b"cublasLtMatrixLayoutDestroy")?,
            prefer: *library.get(b"cublasLtMatmulPreferenceCreate")?,
            forget_preference: *library.get(b"cublasLtMatmulPreferenceDestroy")?,
            set_preference: *library.get(b"cublasLtMatmulPreferenceSetAttribute")?,
            heuristic: *library.get(b"cublasLtMatmulAlgoGetHeuristic")?,
            matmul: *library.get(b"cublasLtMatmul")?,
            _library: library,
        })
    }
}
