//! Large fp16 products through cuBLASLt, where it is installed: y[rows, n] = x[rows, k] W[n, k]ᵀ with fp32 sums.
//!
//! The library is opened by hand, like the others, because its name carries CUDA's major version and a missing one must
//! not end the program. The algorithm for a shape is asked for once and kept, so that a captured step asks nothing.
//! Its own first choice is up to 9 % slower than another of its first eight: [`CublasLt::tune`] times them, and our own product
//! beside them, on the model's matrices, once for a GPU, a version and a shape ([`super::tuned`] keeps what it found).

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{c_int, c_void};
use std::ptr;

use cudarc::cublaslt::sys as lt;
use libloading::Library;

use super::driver::{DeviceBuffer, Event, Gpu};
use super::launch::{LaunchCost, Stream};
use super::libraries;
use super::tuned::{Choice, Tuned};
use crate::{Error, Result};

pub const NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
/// Scratch memory the library may use; 32 MB is what its own guide asks for on Hopper.
const WORKSPACE_BYTES: u64 = 32 << 20;
/// Algorithms timed for a shape; the library offers no more for most.
const CANDIDATES: usize = 8;
/// Smaller matrices are left to the library's first choice.
const TUNED_BYTES: usize = 8 << 20;
/// Row counts that algorithms are chosen for: a number of rows takes that of the next one up.
/// (Close above 256: a prompt of as many tokens beside decodes is what most steps with a prompt are.)
const ROW_BUCKETS: [usize; 18] =
    [16, 32, 64, 128, 256, 320, 384, 448, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192];
/// Seconds of launches in one timing of a candidate.
const TIMING_S: f64 = 3e-4;

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
    check_algorithm: unsafe extern "C" fn(
        lt::cublasLtHandle_t,
        lt::cublasLtMatmulDesc_t,
        lt::cublasLtMatrixLayout_t,
        lt::cublasLtMatrixLayout_t,
        lt::cublasLtMatrixLayout_t,
        lt::cublasLtMatrixLayout_t,
        *const lt::cublasLtMatmulAlgo_t,
        *mut lt::cublasLtMatmulHeuristicResult_t,
    ) -> Status,
    version: unsafe extern "C" fn() -> usize,
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

/// What becomes of the sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sums {
    /// Rounded to fp16.
    Half,
    /// Kept in fp32.
    Float,
    /// Added to what fp32 y holds.
    Added,
}

impl Sums {
    fn bytes(self) -> usize {
        if self == Self::Half { 2 } else { 4 }
    }
}

/// y[rows, n] = x[rows, k] W[n, k]ᵀ, rows of y `stride` elements apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    pub rows: usize,
    pub n: usize,
    pub k: usize,
    pub stride: usize,
    pub sums: Sums,
}

/// Matrices of one shape that a model multiplies by, for [`CublasLt::tune`].
#[derive(Debug, Clone)]
pub struct Family {
    /// With the most rows there can be.
    pub shape: Shape,
    /// Addresses of W, of several layers where there are: so that timings do not read it from the L2.
    pub weights: Vec<u64>,
    /// Where y goes; whatever is there is overwritten.
    pub y: u64,
}

/// Queues our own product of a shape, from W at one address to y at another, as a rival of the library's algorithms.
pub type Rival<'a> = &'a dyn Fn(&Stream, Shape, u64, u64) -> Result<()>;

struct Plan {
    forget: unsafe extern "C" fn(lt::cublasLtMatrixLayout_t) -> Status,
    a: lt::cublasLtMatrixLayout_t,
    b: lt::cublasLtMatrixLayout_t,
    d: lt::cublasLtMatrixLayout_t,
    algorithm: lt::cublasLtMatmulAlgo_t,
}

impl Drop for Plan {
    fn drop(&mut self) {
        for layout in [self.a, self.b, self.d] {
            // SAFETY: made by the matching function, destroyed once; the library is unloaded after its plans.
            unsafe { (self.forget)(layout) };
        }
    }
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
    tuned: RefCell<Tuned>,
}

// SAFETY: the handles may move between threads; `RefCell` keeps them from being shared.
unsafe impl Send for CublasLt {}

impl CublasLt {
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
        // SAFETY: takes nothing and returns a number.
        let version = unsafe { (functions.version)() };
        let mut opened = Self {
            gpu: gpu.clone(),
            functions,
            handle: ptr::null_mut(),
            description: ptr::null_mut(),
            preference: ptr::null_mut(),
            workspace: gpu.allocate(WORKSPACE_BYTES)?,
            plans: RefCell::new(HashMap::new()),
            tuned: RefCell::new(Tuned::open(&gpu.facts().name, version)),
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

    /// Queues y[rows, n] = x Wᵀ (or += for [`Sums::Added`]).
    ///
    /// # Errors
    /// A status of the library's, by name; a shape it has no product for.
    ///
    /// # Safety
    /// `x` [rows, k], `w` [n, k] and `y` are valid device addresses until the work is done.
    pub unsafe fn product(&self, stream: &Stream, x: u64, w: u64, y: u64, shape: Shape) -> Result<()> {
        if !stream.only_counts() {
            let mut plans = self.plans.borrow_mut();
            let plan = match plans.entry(shape) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(self.plan(shape)?),
            };
            // SAFETY: the caller's promise.
            unsafe { self.multiply(stream, x, w, y, plan, &plan.algorithm, shape.sums)? };
        }
        let (rows, n, k) = (shape.rows as u64, shape.n as u64, shape.k as u64);
        let passes = if shape.sums == Sums::Added { 2 } else { 1 };
        let bytes = 2 * (rows * k + n * k) + passes * rows * n * shape.sums.bytes() as u64;
        stream.note_library("cublaslt", LaunchCost::new(bytes, 2 * rows * n * k))
    }

    /// # Safety
    /// As [`Self::product`]; `plan` is of the matrices' shape.
    #[expect(clippy::too_many_arguments, reason = "the operands of one call")]
    unsafe fn multiply(
        &self,
        stream: &Stream,
        x: u64,
        w: u64,
        y: u64,
        plan: &Plan,
        algorithm: &lt::cublasLtMatmulAlgo_t,
        sums: Sums,
    ) -> Result<()> {
        let (one, beta) = (1f32, if sums == Sums::Added { 1f32 } else { 0f32 });
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
                (&raw const beta).cast(),
                y as *const c_void,
                plan.d,
                y as *mut c_void,
                plan.d,
                algorithm,
                self.workspace.pointer() as *mut c_void,
                WORKSPACE_BYTES as usize,
                stream.raw().cast(),
            )
        };
        check(status, "cublasLtMatmul")
    }

    /// Chooses the algorithms of `families` by timing, for every bucket of rows from `least` to the family's own; what an
    /// earlier run on this GPU and version has found is not timed again. Takes some ten milliseconds a shape; returns how many
    /// shapes it timed. `rival` is timed beside them where it is for as many rows.
    ///
    /// # Errors
    /// A status of the library's, by name; a shape it has no product for.
    ///
    /// # Safety
    /// `x_bytes` of fp16 at `x` (numbers like those of real rows: how fast a product is depends on its power), and the
    /// families' matrices and outputs, are valid.
    pub unsafe fn tune(
        &self,
        families: &[Family],
        least: usize,
        x: u64,
        x_bytes: u64,
        rival: Option<(usize, Rival)>,
    ) -> Result<usize> {
        let stream = Stream::new(&self.gpu)?;
        let mut timed = 0;
        for family in families {
            let Shape { rows: most, n, k, .. } = family.shape;
            let buckets = ROW_BUCKETS.into_iter().filter(|&bucket| bucket >= least);
            for rows in buckets.filter(|&bucket| bucket <= most) {
                let shape = Shape { rows, ..family.shape };
                let known = self.tuned.borrow().get(&shape).is_some();
                if known || 2 * n * k < TUNED_BYTES || (2 * rows * k) as u64 > x_bytes {
                    continue;
                }
                // SAFETY: the caller's promise; x and y hold `rows` rows.
                let rival = rival.filter(|(from, _)| rows >= *from).map(|(_, rival)| rival);
                let best = unsafe { self.fastest(&stream, family, shape, x, rival)? };
                self.tuned.borrow_mut().put(shape, best);
                timed += 1;
            }
        }
        if timed > 0 {
            self.tuned.borrow().save();
        }
        Ok(timed)
    }

    /// # Safety
    /// As [`Self::tune`], for `shape.rows` rows.
    unsafe fn fastest(
        &self,
        stream: &Stream,
        family: &Family,
        shape: Shape,
        x: u64,
        rival: Option<Rival>,
    ) -> Result<Choice> {
        let plan = self.lay_out(shape)?;
        let candidates = self.heuristic(&plan, shape, CANDIDATES)?;
        let (start, end) = (Event::new(&self.gpu)?, Event::new(&self.gpu)?);
        let mut turn = 0;
        // Seconds of one launch, of so many; a candidate that cannot run is never the fastest.
        let mut time = |candidate: usize, launches: usize| -> Result<f64> {
            stream.record(&start)?;
            for _ in 0..launches {
                let w = family.weights[turn % family.weights.len()];
                turn += 1;
                let done = match (candidates.get(candidate), rival) {
                    (Some(algorithm), _) => {
                        // SAFETY: the caller's promise.
                        unsafe { self.multiply(stream, x, w, family.y, &plan, algorithm, shape.sums) }
                    }
                    (None, Some(rival)) => rival(stream, shape, w, family.y),
                    (None, None) => return Ok(f64::INFINITY),
                };
                if done.is_err() {
                    return Ok(f64::INFINITY);
                }
            }
            stream.record(&end)?;
            end.synchronize()?;
            Ok(end.seconds_since(&start)? / launches as f64)
        };
        let mut best = vec![f64::INFINITY; candidates.len() + 1];
        let mut launches = 1;
        // The first round loads each kernel; then the candidates take turns, since the GPU's clock drifts.
        for round in 0..3 {
            for (candidate, best) in best.iter_mut().enumerate() {
                let seconds = time(candidate, launches)?;
                if round > 0 {
                    *best = best.min(seconds);
                }
            }
            if round == 0 {
                let seconds = time(0, 1)?;
                launches = ((TIMING_S / seconds.max(1e-6)) as usize).clamp(2, 16);
            }
        }
        let fastest = (0..best.len()).min_by(|&a, &b| best[a].total_cmp(&best[b])).unwrap_or(0);
        Ok(candidates.get(fastest).map_or(Choice::Own, |algorithm| Choice::Library(algorithm.data)))
    }

    /// Whether our own product was found to be the faster one.
    pub fn prefers_own(&self, shape: Shape) -> bool {
        self.tuned.borrow().get(&bucket(shape)) == Some(Choice::Own)
    }

    fn plan(&self, shape: Shape) -> Result<Plan> {
        self.gpu.bind()?;
        let mut plan = self.lay_out(shape)?;
        let tuned = match self.tuned.borrow().get(&bucket(shape)) {
            Some(Choice::Library(data)) => Some(lt::cublasLtMatmulAlgo_t { data }),
            _ => None,
        };
        plan.algorithm = match tuned.filter(|algorithm| self.fits(&plan, algorithm)) {
            Some(algorithm) => algorithm,
            None => self.heuristic(&plan, shape, 1)?[0],
        };
        Ok(plan)
    }

    /// Whether an algorithm can make this product within the workspace.
    fn fits(&self, plan: &Plan, algorithm: &lt::cublasLtMatmulAlgo_t) -> bool {
        // SAFETY: a plain C structure, for which all zeros is a value; all handles are live.
        unsafe {
            let mut found: lt::cublasLtMatmulHeuristicResult_t = std::mem::zeroed();
            let status = (self.functions.check_algorithm)(
                self.handle,
                self.description,
                plan.a,
                plan.b,
                plan.d,
                plan.d,
                algorithm,
                &mut found,
            );
            status == 0 && found.workspaceSize as u64 <= WORKSPACE_BYTES
        }
    }

    /// In cuBLAS's column-major words: D [n, rows] = Aᵀ B with A = W read as [k, n] and B = x read as [k, rows].
    fn lay_out(&self, shape: Shape) -> Result<Plan> {
        let functions = &self.functions;
        let layout = |kind: u32, rows: usize, columns: usize, lead: usize| {
            let mut layout = ptr::null_mut();
            // SAFETY: the pointer is to a live value.
            let status =
                unsafe { (functions.lay_out)(&mut layout, kind, rows as u64, columns as u64, lead as i64) };
            check(status, "cublasLtMatrixLayoutCreate").map(|()| layout)
        };
        let kind = if shape.sums == Sums::Half { R_16F } else { R_32F };
        Ok(Plan {
            forget: functions.forget_layout,
            a: layout(R_16F, shape.k, shape.n, shape.k)?,
            b: layout(R_16F, shape.k, shape.rows, shape.k)?,
            d: layout(kind, shape.n, shape.rows, shape.stride)?,
            // SAFETY: a plain C structure, for which all zeros is a value.
            algorithm: unsafe { std::mem::zeroed() },
        })
    }

    /// The library's first choices for a product, at least one.
    fn heuristic(&self, plan: &Plan, shape: Shape, most: usize) -> Result<Vec<lt::cublasLtMatmulAlgo_t>> {
        // SAFETY: a plain C structure, for which all zeros is a value.
        let mut found: Vec<lt::cublasLtMatmulHeuristicResult_t> = vec![unsafe { std::mem::zeroed() }; most];
        let mut count = 0;
        // SAFETY: all handles are live; room for the results asked for.
        let status = unsafe {
            (self.functions.heuristic)(
                self.handle,
                self.description,
                plan.a,
                plan.b,
                plan.d,
                plan.d,
                self.preference,
                most as c_int,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        check(status, "cublasLtMatmulAlgoGetHeuristic")?;
        if count == 0 {
            return Err(Error::failed(
                format!("cuBLASLt has no product for {shape:?}"),
                "another version of the library may have one; without the library the program's own products are used",
            ));
        }
        Ok(found[..count as usize].iter().map(|result| result.algo).collect())
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        self.plans.borrow_mut().clear();
        if self.gpu.bind().is_err() {
            return;
        }
        // SAFETY: each handle was made by the matching function, is destroyed once, and null ones are left out.
        unsafe {
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

/// The shape whose choice is that of `shape`.
fn bucket(shape: Shape) -> Shape {
    let rows = ROW_BUCKETS.into_iter().find(|&bucket| bucket >= shape.rows);
    Shape { rows: rows.unwrap_or(ROW_BUCKETS[ROW_BUCKETS.len() - 1]), ..shape }
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
            check_algorithm: *library.get(b"cublasLtMatmulAlgoCheck")?,
            version: *library.get(b"cublasLtGetVersion")?,
            matmul: *library.get(b"cublasLtMatmul")?,
            _library: library,
        })
    }
}
