//! The system's libibverbs: which file it is, and the functions of it that are called.
//!
//! It is opened by its absolute path: the bare name could resolve to our own drop-in library.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nobounce_verbs as verbs;

/// The variable that names another file.
const VARIABLE: &str = "NOBOUNCE_VERBS";

/// Where distributions keep it, in the order in which it is looked for.
const PLACES: [&str; 8] = [
    "/usr/lib/x86_64-linux-gnu/libibverbs.so.1",
    "/usr/lib/aarch64-linux-gnu/libibverbs.so.1",
    "/lib/x86_64-linux-gnu/libibverbs.so.1",
    "/lib/aarch64-linux-gnu/libibverbs.so.1",
    "/usr/lib64/libibverbs.so.1",
    "/lib64/libibverbs.so.1",
    "/usr/lib/libibverbs.so.1",
    "/usr/local/lib/libibverbs.so.1",
];

/// The kernel's folder of RDMA devices.
const KERNEL: &str = "/sys/class/infiniband";

/// Why there is no libibverbs to drive a NIC with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// No file.
    #[error(
        "there is no libibverbs.so.1 in any of the usual places ({}): install rdma-core's libibverbs1 and \
         ibverbs-providers, or name the file by {VARIABLE}=/path/libibverbs.so.1",
        places()
    )]
    NotFound,
    /// The variable names no absolute path.
    #[error(
        "{VARIABLE}={0} is no absolute path: it must begin with /, for by its name alone our own drop-in could be found"
    )]
    Relative(String),
    /// It cannot be loaded.
    #[error("{path} cannot be loaded: {told}")]
    Load {
        /// Which file.
        path: String,
        /// What the loader says.
        told: String,
    },
    /// It lacks a function that every version has.
    #[error("{path} has no function {function}: it is no libibverbs, or a damaged one")]
    Lacks {
        /// Which file.
        path: String,
        /// The function.
        function: &'static str,
    },
}

fn places() -> String {
    PLACES.join(", ")
}

macro_rules! table {
    (required { $($field:ident = $symbol:literal : fn($($argument:ty),*) $(-> $result:ty)?;)* } optional { $($maybe:ident = $maybe_symbol:literal : fn($($maybe_argument:ty),*) -> $maybe_result:ty;)* }) => {
        /// The functions, by the names of libibverbs without their prefix. (Posting and polling are
        /// in the table of each open device.)
        #[derive(Clone, Copy)]
        pub(crate) struct VerbsApi {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            $(pub(crate) $maybe: Option<unsafe extern "C" fn($($maybe_argument),*) -> $maybe_result>,)*
        }

        impl VerbsApi {
            /// Takes the addresses, or says which function is missing.
            fn find(handle: *mut c_void) -> Result<Self, &'static str> {
                Ok(Self {
                    $($field: {
                        let found = symbol(handle, $symbol).ok_or($symbol.to_str().unwrap_or(""))?;
                        // SAFETY: that is its type in libibverbs' header.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(found) }
                    },)*
                    // SAFETY: as above.
                    $($maybe: symbol(handle, $maybe_symbol).map(|found| unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($maybe_argument),*) -> $maybe_result>(found)
                    }),)*
                })
            }
        }
    };
}

table! {
    required {
    get_device_list = c"ibv_get_device_list": fn(*mut c_int) -> *mut *mut verbs::Device;
    free_device_list = c"ibv_free_device_list": fn(*mut *mut verbs::Device);
    get_device_name = c"ibv_get_device_name": fn(*mut verbs::Device) -> *const c_char;
    open_device = c"ibv_open_device": fn(*mut verbs::Device) -> *mut verbs::Context;
    close_device = c"ibv_close_device": fn(*mut verbs::Context) -> c_int;
    get_async_event = c"ibv_get_async_event": fn(*mut verbs::Context, *mut verbs::AsyncEvent) -> c_int;
    ack_async_event = c"ibv_ack_async_event": fn(*mut verbs::AsyncEvent);
    query_device = c"ibv_query_device": fn(*mut verbs::Context, *mut verbs::DeviceAttr) -> c_int;
    query_port = c"ibv_query_port": fn(*mut verbs::Context, u8, *mut verbs::PortAttr) -> c_int;
    query_gid = c"ibv_query_gid": fn(*mut verbs::Context, u8, c_int, *mut verbs::Gid) -> c_int;
    alloc_pd = c"ibv_alloc_pd": fn(*mut verbs::Context) -> *mut verbs::Pd;
    dealloc_pd = c"ibv_dealloc_pd": fn(*mut verbs::Pd) -> c_int;
    reg_mr = c"ibv_reg_mr": fn(*mut verbs::Pd, *mut c_void, usize, c_int) -> *mut verbs::Mr;
    dereg_mr = c"ibv_dereg_mr": fn(*mut verbs::Mr) -> c_int;
    create_comp_channel = c"ibv_create_comp_channel": fn(*mut verbs::Context) -> *mut verbs::CompChannel;
    destroy_comp_channel = c"ibv_destroy_comp_channel": fn(*mut verbs::CompChannel) -> c_int;
    get_cq_event = c"ibv_get_cq_event": fn(*mut verbs::CompChannel, *mut *mut verbs::Cq, *mut *mut c_void) -> c_int;
    ack_cq_events = c"ibv_ack_cq_events": fn(*mut verbs::Cq, u32);
    create_cq = c"ibv_create_cq": fn(*mut verbs::Context, c_int, *mut c_void, *mut verbs::CompChannel, c_int) -> *mut verbs::Cq;
    destroy_cq = c"ibv_destroy_cq": fn(*mut verbs::Cq) -> c_int;
    create_qp = c"ibv_create_qp": fn(*mut verbs::Pd, *mut verbs::QpInitAttr) -> *mut verbs::Qp;
    modify_qp = c"ibv_modify_qp": fn(*mut verbs::Qp, *mut verbs::QpAttr, c_int) -> c_int;
    destroy_qp = c"ibv_destroy_qp": fn(*mut verbs::Qp) -> c_int;
    }
    optional {
    reg_mr_iova2 = c"ibv_reg_mr_iova2": fn(*mut verbs::Pd, *mut c_void, usize, u64, u32) -> *mut verbs::Mr;
    reg_dmabuf_mr = c"ibv_reg_dmabuf_mr": fn(*mut verbs::Pd, u64, usize, u64, c_int, c_int) -> *mut verbs::Mr;
    query_gid_ex = c"_ibv_query_gid_ex": fn(*mut verbs::Context, u32, u32, *mut verbs::GidEntry, u32, usize) -> c_int;
    }
}

/// A libibverbs that was loaded. It stays: its providers have threads and handlers of their own.
pub struct Library {
    path: PathBuf,
    why: String,
    /// Where the kernel's files of its devices are.
    pub(crate) kernel: PathBuf,
    pub(crate) api: VerbsApi,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Library({})", self.path.display())
    }
}

impl Library {
    /// The file that `NOBOUNCE_VERBS` names, or the first in one of the usual places.
    ///
    /// # Errors
    /// There is none, or it cannot be loaded.
    pub fn load() -> Result<Arc<Self>, LibraryError> {
        let named = std::env::var_os(VARIABLE).filter(|value| !value.is_empty());
        let (path, why) = choose(named.map(PathBuf::from), |path| path.exists())?;
        Self::load_from(path, why)
    }

    /// Whether `NOBOUNCE_VERBS` names another file: then all devices come from there.
    pub fn is_named() -> bool {
        std::env::var_os(VARIABLE).is_some_and(|value| !value.is_empty())
    }

    fn load_from(path: PathBuf, why: String) -> Result<Arc<Self>, LibraryError> {
        let shown = path.display().to_string();
        let failed = |told: String| LibraryError::Load { path: shown.clone(), told };
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| failed(error.to_string()))?;
        // SAFETY: a C string; the library's constructors run, as they would in any program that
        // links with it.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(failed(loader_error()));
        }
        let api = VerbsApi::find(handle)
            .map_err(|function| LibraryError::Lacks { path: shown.clone(), function })?;
        tracing::debug!("libibverbs is {shown} ({why})");
        Ok(Arc::new(Self { path, why, kernel: KERNEL.into(), api }))
    }

    /// A given function table: for stand-ins in tests.
    #[cfg(test)]
    pub(crate) fn of_table(api: VerbsApi, kernel: PathBuf) -> Arc<Self> {
        Arc::new(Self { path: "stand-in".into(), why: "a stand-in".to_owned(), kernel, api })
    }

    /// Which file it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Why this file.
    pub fn why(&self) -> &str {
        &self.why
    }
}

/// The rule: what is named, or the first place where there is one.
fn choose(named: Option<PathBuf>, exists: impl Fn(&Path) -> bool) -> Result<(PathBuf, String), LibraryError> {
    if let Some(path) = named {
        if !path.is_absolute() {
            return Err(LibraryError::Relative(path.display().to_string()));
        }
        return Ok((path, format!("{VARIABLE} names it")));
    }
    let found = PLACES.iter().map(Path::new).find(|path| exists(path)).ok_or(LibraryError::NotFound)?;
    Ok((found.to_owned(), format!("the first that is there; {VARIABLE} would name another")))
}

fn symbol(handle: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a handle that is never closed, and a C string.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Why this thread's last call of the dynamic loader failed.
pub fn loader_error() -> String {
    // SAFETY: dlerror returns null or a C string, valid until this thread's next call of the
    // loader.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            "the loader gives no reason".to_owned()
        } else {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_file_comes_first_and_must_be_absolute() {
        let (path, why) = choose(Some("/opt/libibverbs.so.1".into()), |_| true).unwrap();
        assert_eq!(path, Path::new("/opt/libibverbs.so.1"));
        assert!(why.contains(VARIABLE));
        let error = choose(Some("libibverbs.so.1".into()), |_| true).unwrap_err();
        assert_eq!(error, LibraryError::Relative("libibverbs.so.1".to_owned()));
    }

    #[test]
    fn the_first_place_with_a_file_is_taken() {
        let (path, _) =
            choose(None, |path| path.starts_with("/usr/lib64") || path.starts_with("/lib64")).unwrap();
        assert_eq!(path, Path::new("/usr/lib64/libibverbs.so.1"));
        let error = choose(None, |_| false).unwrap_err().to_string();
        assert!(error.contains("rdma-core") && error.contains("/usr/lib64"), "{error}");
    }

    #[test]
    fn a_file_that_is_no_libibverbs_says_what_it_lacks() {
        let error =
            Library::load_from("/nowhere/libibverbs.so.1".into(), String::new()).unwrap_err().to_string();
        assert!(error.contains("/nowhere/libibverbs.so.1 cannot be loaded"), "{error}");
        // The C library is a library, and has none of the functions.
        let libc =
            ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/libc.so.6", "/lib/aarch64-linux-gnu/libc.so.6"];
        if let Some(path) = libc.iter().find(|path| Path::new(path).exists()) {
            let error = Library::load_from(path.into(), String::new()).unwrap_err().to_string();
            assert!(error.contains("ibv_get_device_list"), "{error}");
        }
    }
}
