//! NVRTC, the run-time compiler, bound by hand: eight functions, from whichever library [`super::libraries`] finds
//! (cudarc's own loader knows fewer names and places, and panics). Needs no GPU.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::ptr;

use libloading::{Library, Symbol};

use super::libraries;
use crate::{Error, Result};

type Program = *mut std::ffi::c_void;
type Sized = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Filled = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// What a compilation made: machine code for one architecture, and the compiler's words (with `--ptxas-options=-v`
/// the registers, shared memory and spills of each kernel).
#[derive(Debug)]
pub struct Compiled {
    pub cubin: Vec<u8>,
    pub log: String,
}

pub struct Nvrtc {
    library: Library,
    pub path: PathBuf,
    /// Major, minor.
    pub version: (i32, i32),
}

const NAMES: &[&str] = &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"];

impl Nvrtc {
    /// Opens the newest-first candidate that is not newer than `driver` (major, minor; its cubins might not load there),
    /// else the first that opens.
    ///
    /// # Errors
    /// None was found.
    pub fn find(driver: Option<(i32, i32)>) -> Result<Self> {
        let mut fallback = None;
        for path in libraries::candidates(NAMES) {
            let Some(nvrtc) = libraries::open_path(&path).and_then(|library| Self::new(library, path)) else {
                continue;
            };
            if driver.is_none_or(|(major, _)| nvrtc.version.0 <= major) {
                return Ok(nvrtc);
            }
            fallback.get_or_insert(nvrtc);
        }
        fallback.ok_or_else(|| {
            Error::invalid(
                "NVRTC (libnvrtc.so), which compiles the GPU kernels, was not found",
                "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc` into the active Python environment, \
                 or point CUDA_HOME at a toolkit; or use --device cpu",
            )
        })
    }

    fn new(library: Library, path: PathBuf) -> Option<Self> {
        let (mut major, mut minor) = (0, 0);
        {
            // SAFETY: the signature of nvrtcVersion in every NVRTC.
            let version: Symbol<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int> =
                unsafe { library.get(b"nvrtcVersion") }.ok()?;
            // SAFETY: both pointers are to live integers.
            if unsafe { version(&mut major, &mut minor) } != 0 {
                return None;
            }
        }
        Some(Self { library, path, version: (major, minor) })
    }

    /// Architectures this NVRTC makes machine code for, ascending: 80, 86, 90, ...
    pub fn architectures(&self) -> Vec<i32> {
        let mut count = 0;
        // SAFETY: signatures from NVRTC's interface; the array has the length the library asked for.
        unsafe {
            let Ok(number) =
                self.get::<unsafe extern "C" fn(*mut c_int) -> c_int>("nvrtcGetNumSupportedArchs")
            else {
                return Vec::new();
            };
            let Ok(list) = self.get::<unsafe extern "C" fn(*mut c_int) -> c_int>("nvrtcGetSupportedArchs")
            else {
                return Vec::new();
            };
            if number(&mut count) != 0 || count <= 0 {
                return Vec::new();
            }
            let mut all = vec![0; count as usize];
            if list(all.as_mut_ptr()) != 0 { Vec::new() } else { all }
        }
    }

    /// Compiles one self-contained source; `headers` are (name, text) pairs that it may include.
    ///
    /// # Errors
    /// The compiler's own message, naming file and line.
    pub fn compile(
        &self,
        name: &str,
        source: &str,
        headers: &[(&str, &str)],
        options: &[String],
    ) -> Result<Compiled> {
        let c_string = |text: &str| {
            CString::new(text).map_err(|_| Error::bug(format!("{name}: a zero byte in a kernel source")))
        };
        let source = c_string(source)?;
        let file = c_string(name)?;
        let header_names = headers.iter().map(|(name, _)| c_string(name)).collect::<Result<Vec<_>>>()?;
        let header_texts = headers.iter().map(|(_, text)| c_string(text)).collect::<Result<Vec<_>>>()?;
        let options = options.iter().map(|option| c_string(option)).collect::<Result<Vec<_>>>()?;
        let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (names, texts, flags) = (pointers(&header_names), pointers(&header_texts), pointers(&options));

        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        let mut program: Program = ptr::null_mut();
        // SAFETY: signatures from NVRTC's interface; every pointer outlives the calls, and the program is destroyed once.
        unsafe {
            let create: Symbol<Create> = self.get("nvrtcCreateProgram")?;
            let compile: Symbol<Compile> = self.get("nvrtcCompileProgram")?;
            let destroy: Symbol<unsafe extern "C" fn(*mut Program) -> c_int> =
                self.get("nvrtcDestroyProgram")?;
            let code = create(
                &mut program,
                source.as_ptr(),
                file.as_ptr(),
                names.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            );
            if code != 0 {
                return Err(self.failed(name, "could not create a program", code));
            }
            let code = compile(program, flags.len() as c_int, flags.as_ptr());
            let log = self.output(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog");
            let cubin = if code == 0 {
                self.output(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
            } else {
                Err(self.failed(name, "does not compile", code))
            };
            destroy(&mut program);
            let log = String::from_utf8_lossy(&log?).trim_end_matches('\0').trim_end().to_string();
            match cubin {
                Ok(cubin) => Ok(Compiled { cubin, log }),
                Err(error) => Err(Error::failed(format!("{error}\n{log}"), error.hint())),
            }
        }
    }

    /// SAFETY: `program` is live, and the two functions are a size and a fill of the same output.
    unsafe fn output(&self, program: Program, size: &str, fill: &str) -> Result<Vec<u8>> {
        let mut bytes = 0usize;
        // SAFETY: as above; the buffer has the size the library asked for.
        unsafe {
            let code = self.get::<Sized>(size)?(program, &mut bytes);
            let mut buffer = vec![0u8; bytes];
            let code =
                if code == 0 { self.get::<Filled>(fill)?(program, buffer.as_mut_ptr().cast()) } else { code };
            if code == 0 { Ok(buffer) } else { Err(self.failed(fill, "gave no output", code)) }
        }
    }

    /// SAFETY: `T` is the function's type in NVRTC's interface.
    unsafe fn get<T>(&self, function: &str) -> Result<Symbol<'_, T>> {
        // SAFETY: the caller's.
        unsafe { self.library.get(function.as_bytes()) }.map_err(|_| {
            Error::invalid(
                format!("{} has no function {function}", self.path.display()),
                "NVRTC 12 or newer is needed",
            )
        })
    }

    fn failed(&self, name: &str, what: &str, code: c_int) -> Error {
        let words = self.error_string(code).unwrap_or_else(|| code.to_string());
        Error::failed(
            format!(
                "{name} {what}: {words} (NVRTC {}.{}, {})",
                self.version.0,
                self.version.1,
                self.path.display()
            ),
            "another NVRTC can be chosen by CUDA_HOME",
        )
    }

    fn error_string(&self, code: c_int) -> Option<String> {
        // SAFETY: the function returns a static string for every code.
        unsafe {
            let text: Symbol<unsafe extern "C" fn(c_int) -> *const c_char> =
                self.library.get(b"nvrtcGetErrorString").ok()?;
            Some(CStr::from_ptr(text(code)).to_string_lossy().into_owned())
        }
    }
}
