//! The function of the same name behind ours, and the one of libibverbs that makes a view.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicPtr, Ordering};

use nobounce_dropin::log;

/// A function of the C library, resolved once.
pub(crate) struct Original {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Original {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// The function, or null where this C library has none of that name.
    pub(crate) fn get(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Relaxed);
        if !found.is_null() {
            return found;
        }
        // SAFETY: the name is a C string, and RTLD_NEXT means the libraries after this one.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// What the search for a view gave.
pub(crate) enum View {
    /// The folder that the drop-in libibverbs made.
    Made(&'static CStr),
    /// No libibverbs is loaded, nor is one beside this library: the program may load it later.
    Absent,
    /// There will be none, and the reason is logged.
    Refused,
}

/// The view that the drop-in libibverbs makes.
pub(crate) fn view() -> View {
    let make = match maker() {
        Ok(make) => make,
        Err(why) => return why,
    };
    let path = make();
    if path.is_null() {
        return View::Refused;
    }
    // SAFETY: a C string that is never freed.
    View::Made(unsafe { CStr::from_ptr(path) })
}

type Maker = extern "C" fn() -> *const c_char;

/// `nobounce_view` of the libibverbs that is loaded, else of the one beside this library: where
/// only this one is preloaded, a program may have loaded none yet.
fn maker() -> Result<Maker, View> {
    if let Some(found) = maker_of(libc::RTLD_DEFAULT) {
        return Ok(found);
    }
    let beside = beside(c"libibverbs.so.1").filter(|path| {
        // SAFETY: a C string.
        unsafe { libc::access(path.as_ptr(), libc::F_OK) == 0 }
    });
    // SAFETY: the name is a C string.
    let mut other = !unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"ibv_get_device_list".as_ptr()) }.is_null();
    // RTLD_DEFAULT lacks what dlopen loaded with RTLD_LOCAL, as NCCL loads libibverbs.
    for name in loaded() {
        let library = open(&name, libc::RTLD_NOLOAD);
        if let Some(found) = maker_of(library) {
            return Ok(found);
        }
        other |= !library.is_null();
    }
    if other {
        let ours = beside.unwrap_or_else(|| c"the libibverbs.so.1 of nobounce".to_owned());
        log::error(|| {
            format!(
                "the program has loaded another libibverbs, which cannot drive nb0: add {} to LD_PRELOAD",
                ours.to_string_lossy()
            )
        });
        return Err(View::Refused);
    }
    let Some(beside) = beside else { return Err(View::Absent) };
    maker_of(open(&beside, 0)).ok_or_else(|| {
        log::error(|| format!("{} does not load, so there is no nb0", beside.to_string_lossy()));
        View::Refused
    })
}

/// The function of an open library.
fn maker_of(library: *mut c_void) -> Option<Maker> {
    if library.is_null() && library != libc::RTLD_DEFAULT {
        return None;
    }
    // SAFETY: an open library, or all of them, and a C string.
    let found = unsafe { libc::dlsym(library, c"nobounce_view".as_ptr()) };
    // SAFETY: no other library has a function of this name, and it has this type.
    (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Maker>(found) })
}

/// Opens a library, which then stays loaded: a view belongs to the process.
fn open(path: &CStr, mode: c_int) -> *mut c_void {
    // SAFETY: a C string.
    unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NODELETE | mode) }
}

/// The paths of loaded files that are a libibverbs by their names.
fn loaded() -> Vec<CString> {
    unsafe extern "C" fn each(info: *mut libc::dl_phdr_info, _: usize, names: *mut c_void) -> c_int {
        // SAFETY: dl_iterate_phdr passes a valid structure, and what `loaded` gave it.
        let (name, names) = unsafe { ((*info).dlpi_name, &mut *names.cast::<Vec<CString>>()) };
        if !name.is_null() {
            // SAFETY: the name of a loaded file is a C string.
            let name = unsafe { CStr::from_ptr(name) };
            let file = name.to_bytes().rsplit(|byte| *byte == b'/').next();
            if file.is_some_and(|file| file.starts_with(b"libibverbs.so")) {
                names.push(name.to_owned());
            }
        }
        0
    }
    let mut names = Vec::new();
    // SAFETY: the callback takes a pointer to this list, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut names).cast()) };
    names
}

/// The path of a file in the folder of this library.
fn beside(name: &CStr) -> Option<CString> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any address is allowed, and `info` has room for the answer.
    if unsafe { libc::dladdr(view as *const c_void, info.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: dladdr filled it in; the name belongs to the loader and stays.
    let own = unsafe { CStr::from_ptr(info.assume_init().dli_fname) }.to_bytes();
    let folder = &own[..=own.iter().rposition(|byte| *byte == b'/')?];
    CString::new([folder, name.to_bytes()].concat()).ok()
}
