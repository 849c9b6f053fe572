//! The CUDA driver, loaded on first use.

use std::env;
use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::api::Api;
use super::error::DriverError;

/// Names another library than the system's, such as the stand-in that tests use.
const OVERRIDE: &str = "NOBOUNCE_CUDA";
const LIBRARY: &CStr = c"libcuda.so.1";

/// Set in a child of the process that loaded the driver: CUDA does not survive a fork.
static FORKED: AtomicBool = AtomicBool::new(false);

/// The CUDA driver of this process: one table of functions, loaded once and never unloaded.
///
/// Uses a `libcuda.so.1` that the process has already loaded; otherwise loads it.
/// `NOBOUNCE_CUDA=path` selects another library. `cuInit` is called, but no context is created
/// until memory is allocated or registered. Calls go through [`in_context`](Self::in_context) and
/// [`relaxed`](Self::relaxed) only.
#[derive(Debug)]
pub struct Driver {
    api: Api,
    library: String,
    version: u32,
    stand_in: bool,
}

impl Driver {
    /// The driver, loaded and initialised at the first call.
    pub fn get() -> Result<&'static Self, DriverError> {
        static DRIVER: OnceLock<Result<Driver, DriverError>> = OnceLock::new();
        // Before the lock: a child forked while another thread loaded the driver would deadlock.
        if Self::is_forked() {
            return Err(DriverError::Forked);
        }
        DRIVER.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    /// Whether there is a driver to load, and if not, why. Initialises nothing: a process may still
    /// fork and use CUDA in its child.
    pub fn is_installed() -> Result<(), DriverError> {
        open_library().map(|_| ())
    }

    /// The version of CUDA that the driver supports, as 1000 x major + 10 x minor: 13000 is CUDA
    /// 13.0.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The library that was loaded.
    #[must_use]
    pub fn library(&self) -> &str {
        &self.library
    }

    /// True where the library is the stand-in of the tests: its "GPU" is host memory, and reports
    /// must say so.
    #[must_use]
    pub fn is_stand_in(&self) -> bool {
        self.stand_in
    }

    pub(super) fn api(&self) -> &Api {
        &self.api
    }

    /// True in a child of the process that loaded the driver.
    pub(super) fn is_forked() -> bool {
        FORKED.load(Ordering::Relaxed)
    }

    fn load() -> Result<Self, DriverError> {
        // SAFETY: the handler stores to a static, which is permitted after a fork. If the
        // registration fails for lack of memory, the driver itself still refuses calls in a child.
        unsafe { libc::pthread_atfork(None, None, Some(mark_forked)) };
        let (handle, library) = open_library()?;
        let find = |symbol: &CStr| {
            // SAFETY: the handle is a live library's; the symbol ends in a zero byte.
            unsafe { libc::dlsym(handle, symbol.as_ptr()) }
        };
        // SAFETY: the library is libcuda, or one that the user configured as its equal; the
        // signatures are those of its header.
        let api = unsafe { Api::load(find) }
            .map_err(|symbol| DriverError::Symbol { library: library.clone(), symbol })?;
        let stand_in = !find(c"nobounce_stand_in").is_null();
        // SAFETY: cuInit may be called at any time and any number of times.
        unsafe { api.init(0) }.map_err(DriverError::init)?;
        let mut version = 0;
        // SAFETY: the call writes one int.
        unsafe { api.driver_version(&raw mut version) }.map_err(DriverError::init)?;
        Ok(Self { api, library, version: u32::try_from(version).unwrap_or(0), stand_in })
    }
}

extern "C" fn mark_forked() {
    FORKED.store(true, Ordering::Relaxed);
}

/// The library's handle and name.
fn open_library() -> Result<(*mut c_void, String), DriverError> {
    if let Some(path) = env::var_os(OVERRIDE).filter(|path| !path.is_empty()) {
        let name = path.to_string_lossy().into_owned();
        let path = CString::new(path.as_bytes())
            .map_err(|_| DriverError::Missing { detail: format!("{OVERRIDE} contains a NUL byte") })?;
        return open(&path, libc::RTLD_NOW)
            .map(|handle| (handle, name))
            .map_err(|detail| DriverError::Missing { detail: format!("set by {OVERRIDE}: {detail}") });
    }
    let name = LIBRARY.to_string_lossy().into_owned();
    // Adopt what the process has: a second copy from another folder would be a second driver.
    open(LIBRARY, libc::RTLD_NOW | libc::RTLD_NOLOAD)
        .or_else(|_| open(LIBRARY, libc::RTLD_NOW))
        .map(|handle| (handle, name))
        .map_err(|detail| DriverError::Missing { detail })
}

fn open(path: &CStr, flags: libc::c_int) -> Result<*mut c_void, String> {
    // SAFETY: the path ends in a zero byte. The library's constructors run; it is the system's
    // driver, or named by the user.
    let handle = unsafe { libc::dlopen(path.as_ptr(), flags) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: dlerror gives null or a string that lives until this thread's next call of the
    // loader.
    let detail = unsafe { libc::dlerror() };
    if detail.is_null() {
        return Err("no reason from the dynamic loader".to_owned());
    }
    // SAFETY: as above.
    Err(unsafe { CStr::from_ptr(detail) }.to_string_lossy().into_owned())
}
