//! Functions of libcuda, and what takes their place.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crate::lookup;

/// `CUresult`.
type Status = c_int;
const SUCCESS: Status = 0;
const NOT_INITIALIZED: Status = 3;

/// `CU_MEM_LOCATION_TYPE_DEVICE` and `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DEVICE: c_int = 1;
const POSIX_FD: c_int = 1;

/// From this version of CUDA on, `cuGetProcAddress` has five arguments.
const FIVE_ARGUMENTS: c_int = 12000;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AllocationProp {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
    windows_data: *mut c_void,
    flags: [u8; 8],
}

type Create = unsafe extern "C" fn(*mut u64, usize, *const AllocationProp, u64) -> Status;
type GetAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> Status;
type GetAddress2 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_void) -> Status;

/// A function of libcuda.
struct Original {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Original {
    const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Remembers where it is.
    fn is_at(&self, address: *mut c_void) {
        self.address.store(address, Ordering::Relaxed);
    }

    /// Where it is: for a program that links libcuda, after this library.
    fn get(&self) -> Option<*mut c_void> {
        let known = self.address.load(Ordering::Relaxed);
        let address = if known.is_null() { lookup::find(libc::RTLD_NEXT, self.name) } else { known };
        self.is_at(address);
        (!address.is_null()).then_some(address)
    }
}

static CREATE: Original = Original::new(c"cuMemCreate");
static GET_ADDRESS: Original = Original::new(c"cuGetProcAddress");
static GET_ADDRESS_2: Original = Original::new(c"cuGetProcAddress_v2");

static IS_OFF: AtomicBool = AtomicBool::new(false);

pub(crate) fn read_setting() {
    // SAFETY: a C string; the result is one, too, if it is not null.
    let is_off = unsafe {
        let value = libc::getenv(c"NOBOUNCE_VMM_EXPORT".as_ptr());
        !value.is_null() && CStr::from_ptr(value) == c"off"
    };
    IS_OFF.store(is_off, Ordering::Relaxed);
}

/// A function that ours takes the place of.
pub(crate) struct Replaced {
    original: &'static Original,
    ours: *mut c_void,
}

impl Replaced {
    /// By its name in libcuda.
    pub(crate) fn named(name: &CStr) -> Option<Self> {
        let (original, ours) = match name.to_bytes() {
            b"cuMemCreate" => (&CREATE, cuMemCreate as *mut c_void),
            b"cuGetProcAddress" => (&GET_ADDRESS, cuGetProcAddress as *mut c_void),
            b"cuGetProcAddress_v2" => (&GET_ADDRESS_2, cuGetProcAddress_v2 as *mut c_void),
            _ => return None,
        };
        Some(Self { original, ours })
    }

    /// What `dlsym` returns if it found the name at `address`. `next` looks behind this library:
    /// without libcuda the name must not be found here.
    pub(crate) fn looked_up(&self, address: *mut c_void, next: impl FnOnce() -> *mut c_void) -> *mut c_void {
        let address = if address == self.ours { next() } else { address };
        if address.is_null() || IS_OFF.load(Ordering::Relaxed) {
            return address;
        }
        if address != self.ours {
            self.original.is_at(address);
        }
        self.ours
    }
}

/// The same for an address that `cuGetProcAddress` has returned.
unsafe fn replace_found(name: *const c_char, version: c_int, place: *mut *mut c_void) {
    if name.is_null() || place.is_null() {
        return;
    }
    // SAFETY: not null; the driver has taken both.
    let (name, found) = unsafe { (CStr::from_ptr(name), *place) };
    // There the newer one has the same name.
    let is_newer = name == c"cuGetProcAddress" && version >= FIVE_ARGUMENTS;
    if let Some(replaced) = Replaced::named(if is_newer { c"cuGetProcAddress_v2" } else { name }) {
        // SAFETY: as above.
        unsafe { *place = replaced.looked_up(found, || found) };
    }
}

/// `cuMemCreate`.
///
/// # Safety
/// As for the driver's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemCreate(
    handle: *mut u64,
    size: usize,
    prop: *const AllocationProp,
    flags: u64,
) -> Status {
    let Some(create) = CREATE.get() else { return NOT_INITIALIZED };
    // SAFETY: the address of the driver's function. The caller passes a valid structure or null.
    unsafe {
        let create = mem::transmute::<*mut c_void, Create>(create);
        let asked = if prop.is_null() || IS_OFF.load(Ordering::Relaxed) { None } else { Some(*prop) };
        let is_ours =
            |prop: &AllocationProp| prop.location_kind == DEVICE && prop.handle_types & POSIX_FD == 0;
        if let Some(asked) = asked.filter(is_ours) {
            let exportable = AllocationProp { handle_types: asked.handle_types | POSIX_FD, ..asked };
            if create(handle, size, &raw const exportable, flags) == SUCCESS {
                return SUCCESS;
            }
        }
        create(handle, size, prop, flags)
    }
}

/// `cuGetProcAddress` before CUDA 12.
///
/// # Safety
/// As for the driver's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetProcAddress(
    name: *const c_char,
    place: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> Status {
    let Some(get) = GET_ADDRESS.get() else { return NOT_INITIALIZED };
    // SAFETY: the address of the driver's function, and its arguments.
    unsafe {
        let status = mem::transmute::<*mut c_void, GetAddress>(get)(name, place, version, flags);
        if status == SUCCESS {
            replace_found(name, version, place);
        }
        status
    }
}

/// `cuGetProcAddress` since CUDA 12.
///
/// # Safety
/// As for the driver's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    place: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status_place: *mut c_void,
) -> Status {
    let Some(get) = GET_ADDRESS_2.get() else { return NOT_INITIALIZED };
    // SAFETY: the address of the driver's function, and its arguments.
    unsafe {
        let status =
            mem::transmute::<*mut c_void, GetAddress2>(get)(name, place, version, flags, status_place);
        if status == SUCCESS {
            replace_found(name, version, place);
        }
        status
    }
}
