//! The system's own libibverbs, so that real devices of the machine stay visible beside ours.
//!
//! It is loaded only where there are real devices, and into a linker namespace of its own
//! (`dlmopen`). In ours it would not work: its drivers need a `libibverbs.so.1`, and would find
//! ours, which has that soname and was loaded first. They would register with us instead. The
//! namespace has its own C library, and so its own errno, which is copied after each call.
//!
//! A program's call on an object that is not ours is forwarded unchanged. (Calls through an
//! object's own ops table never arrive here.)

use std::ffi::{CStr, CString, OsStr, c_int, c_void};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use nobounce_nic::hard::loader_error;
use nobounce_verbs as verbs;

use crate::entry::Errno;
use crate::live;
use crate::log;

/// Where distributions keep it.
const PLACES: [&str; 7] = [
    "/usr/lib/x86_64-linux-gnu/libibverbs.so.1",
    "/usr/lib/aarch64-linux-gnu/libibverbs.so.1",
    "/lib/x86_64-linux-gnu/libibverbs.so.1",
    "/lib/aarch64-linux-gnu/libibverbs.so.1",
    "/usr/lib64/libibverbs.so.1",
    "/lib64/libibverbs.so.1",
    "/usr/lib/libibverbs.so.1",
];

/// Every function of the interface takes at most six arguments, all of them integers or pointers,
/// and returns one or nothing. So all can be called as this one: a function ignores surplus
/// argument registers.
pub(crate) type Any = unsafe extern "C-unwind" fn(usize, usize, usize, usize, usize, usize) -> usize;

struct Library {
    handle: *mut c_void,
    errno: Option<unsafe extern "C" fn() -> *mut c_int>,
}

// SAFETY: a handle of the dynamic linker, which any thread may use.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
/// Whether there is one: all that a call about our own objects pays for.
static LOADED: AtomicBool = AtomicBool::new(false);
/// Whether the program announced a fork, which the library must know before any other call.
static FORKS: AtomicBool = AtomicBool::new(false);

impl Library {
    fn open(path: &Path) -> Option<Self> {
        let name = CString::new(path.as_os_str().as_bytes()).ok()?;
        // SAFETY: a C string; the library's constructors run, as they would in any program that
        // links with it.
        let handle =
            unsafe { libc::dlmopen(libc::LM_ID_NEWLM, name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            log::warn(|| {
                format!("hardware devices are hidden: cannot load {}: {}", path.display(), loader_error())
            });
            return None;
        }
        let mut library = Self { handle, errno: None };
        // SAFETY: that is the type of this function of every C library.
        library.errno = library.find(c"__errno_location").map(|found| unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *mut c_int>(found)
        });
        if FORKS.load(Ordering::Acquire)
            && let Some(function) = library.function(c"ibv_fork_init")
        {
            call(&library, function, [0; 6]);
        }
        log::info(|| format!("hardware devices come from {}", path.display()));
        Some(library)
    }

    fn find(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: a handle that is never closed, and a C string.
        let found = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    }

    fn function(&self, name: &CStr) -> Option<Any> {
        // SAFETY: every function may be called so (see `Any`).
        self.find(name).map(|found| unsafe { std::mem::transmute::<*mut c_void, Any>(found) })
    }
}

/// The library, loaded now if that was not tried yet and there is anything to load it for.
fn library() -> Option<&'static Library> {
    let library = LIBRARY.get_or_init(|| {
        // Tests name a stand-in.
        let path = match std::env::var_os("NOBOUNCE_SYSTEM_VERBS") {
            Some(path) => PathBuf::from(path),
            None if has_real_devices() => installed()?,
            None => return None,
        };
        Library::open(&path)
    });
    LOADED.store(library.is_some(), Ordering::Release);
    library.as_ref()
}

/// The first libibverbs of the system that is not this very file.
fn installed() -> Option<PathBuf> {
    let identity = |path: &Path| path.metadata().ok().map(|data| (data.dev(), data.ino()));
    let ours = own_path().and_then(|path| identity(&path));
    PLACES.iter().map(PathBuf::from).find(|path| {
        let found = identity(path);
        found.is_some() && found != ours
    })
}

fn own_path() -> Option<PathBuf> {
    // SAFETY: plain pointers, for which zeroes are valid.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: dladdr accepts any address; `info` is a valid place.
    if unsafe { libc::dladdr((&raw const LOADED).cast(), &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the linker's own name for a library that is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

/// Whether the kernel has devices of its own. Reads the folder by raw system calls: the C library's
/// functions may be redirected to the view that clients get. (Where the view is mounted, it shows
/// our own devices: they do not count.)
fn has_real_devices() -> bool {
    let path = c"/sys/class/infiniband";
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: a C string and flags.
    let fd = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags) };
    let Ok(fd) = c_int::try_from(fd) else { return false };
    if fd < 0 {
        return false;
    }
    // SAFETY: just opened, without another owner.
    let folder = unsafe { File::from_raw_fd(fd) };
    let mut buffer = [0_u8; 4096];
    // SAFETY: the buffer is as long as we say.
    let filled =
        unsafe { libc::syscall(libc::SYS_getdents64, folder.as_raw_fd(), buffer.as_mut_ptr(), buffer.len()) };
    let mut rest = buffer.get(..usize::try_from(filled).unwrap_or(0)).unwrap_or_default();
    // Each entry: inode and offset of 8 bytes each, its length of 2, a type of 1, and a
    // NUL-terminated name.
    while let Some((head, tail)) = rest.split_at_checked(19) {
        let length = usize::from(u16::from_ne_bytes([head[16], head[17]]));
        let name = tail.split(|byte| *byte == 0).next().unwrap_or_default();
        if !name.starts_with(b".") && !is_our_name(name) {
            return true;
        }
        let Some(next) = rest.get(length..).filter(|_| length > 0) else { break };
        rest = next;
    }
    false
}

fn is_our_name(name: &[u8]) -> bool {
    name.strip_prefix(b"nb").is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit))
}

/// Calls a function of the system's library, and takes its errno over.
fn call(library: &Library, function: Any, [a, b, c, d, e, f]: [usize; 6]) -> usize {
    // SAFETY: the program's own arguments for this function.
    let result = unsafe { function(a, b, c, d, e, f) };
    if let Some(errno) = library.errno {
        // SAFETY: both places are this thread's own.
        unsafe { *libc::__errno_location() = *errno() };
    }
    result
}

/// Its devices: the list as it made it, to be freed by [`free_devices`], and the devices in it.
pub(crate) fn devices() -> (usize, Vec<*mut verbs::Device>) {
    let Some(library) = library() else { return (0, Vec::new()) };
    let Some(function) = library.function(c"ibv_get_device_list") else { return (0, Vec::new()) };
    let mut count: c_int = 0;
    let list = call(library, function, [(&raw mut count).expose_provenance(), 0, 0, 0, 0, 0]);
    let count = if list == 0 { 0 } else { usize::try_from(count).unwrap_or(0) };
    let first = std::ptr::with_exposed_provenance::<*mut verbs::Device>(list);
    // SAFETY: the list has as many devices as it says.
    (list, (0..count).map(|i| unsafe { *first.add(i) }).collect())
}

/// Frees a list of its devices.
pub(crate) fn free_devices(list: usize) {
    if let (Some(library), true) = (library(), list != 0)
        && let Some(function) = library.function(c"ibv_free_device_list")
    {
        call(library, function, [list, 0, 0, 0, 0, 0]);
    }
}

/// `ibv_fork_init`: our own memory may be shared with a child as it is; real devices may need the
/// call.
pub(crate) unsafe extern "C" fn fork_init() -> c_int {
    FORKS.store(true, Ordering::Release);
    let library = LIBRARY.get().and_then(Option::as_ref);
    let function = library.and_then(|library| Some((library, library.function(c"ibv_fork_init")?)));
    function.map_or(0, |(library, function)| int(call(library, function, [0; 6])))
}

/// Calls the system's function of this name, if its library is loaded, or there is a device to load
/// it for.
fn ask(name: &CStr, arguments: [usize; 6]) -> Option<usize> {
    let library = library()?;
    Some(call(library, library.function(name)?, arguments))
}

/// An `int` returned in a whole register.
fn int(register: usize) -> c_int {
    u32::try_from(register & 0xffff_ffff).unwrap_or(0).cast_signed()
}

/// `ibv_is_fork_initialized`: the system's answer, where there are real devices; ours need nothing
/// (IBV_FORK_UNNEEDED).
pub(crate) unsafe extern "C" fn is_fork_initialized() -> c_int {
    ask(c"ibv_is_fork_initialized", [0; 6]).map_or(2, int)
}

/// `ibv_dontfork_range`: our memory may be shared with a child; the system's library handles that
/// of real devices.
pub(crate) unsafe extern "C" fn dontfork_range(base: usize, size: usize) -> c_int {
    ask(c"ibv_dontfork_range", [base, size, 0, 0, 0, 0]).map_or(0, int)
}

/// `ibv_dofork_range`: the same.
pub(crate) unsafe extern "C" fn dofork_range(base: usize, size: usize) -> c_int {
    ask(c"ibv_dofork_range", [base, size, 0, 0, 0, 0]).map_or(0, int)
}

/// `ibv_import_device` of a descriptor that is not ours: it belongs to the kernel's driver.
pub(crate) fn import_device(fd: c_int) -> *mut c_void {
    let register = usize::try_from(fd.cast_unsigned()).unwrap_or(usize::MAX);
    match ask(c"ibv_import_device", [register, 0, 0, 0, 0, 0]) {
        Some(context) => std::ptr::with_exposed_provenance_mut(context),
        None => {
            Errno::EOPNOTSUPP.set();
            std::ptr::null_mut()
        }
    }
}

/// Calls the system's function of this name if its first argument is an object that is not ours.
#[inline]
pub(crate) fn forward(name: &CStr, arguments: [usize; 6]) -> Option<usize> {
    if !LOADED.load(Ordering::Acquire) {
        return None;
    }
    forward_unless_ours(name, arguments[0], arguments)
}

/// The same for an event, whose object is what it points to.
pub(crate) fn forward_event(name: &CStr, event: *const verbs::AsyncEvent) -> bool {
    if !LOADED.load(Ordering::Acquire) || event.is_null() {
        return false;
    }
    // SAFETY: the program passes an event that it got.
    let object = unsafe { (*event).element }.addr();
    forward_unless_ours(name, object, [event.expose_provenance(), 0, 0, 0, 0, 0]).is_some()
}

fn forward_unless_ours(name: &CStr, object: usize, arguments: [usize; 6]) -> Option<usize> {
    if live::is_ours(object) {
        return None;
    }
    let library = LIBRARY.get()?.as_ref()?;
    Some(call(library, library.function(name)?, arguments))
}
