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

    /// Whether that is where it is. The first address stays: another library may wrap the function,
    /// and call what it finds here.
    fn is_at(&self, address: *mut c_void) -> bool {
        let null = std::ptr::null_mut();
        let known = self.address.compare_exchange(null, address, Ordering::Relaxed, Ordering::Relaxed);
        known.is_ok() || known == Err(address)
    }

    /// Where it is: for a program that links libcuda.
    fn get(&self) -> Option<*mut c_void> {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return Some(known);
        }
        let address = lookup::behind(self.name);
        if address.is_null() {
            return None;
        }
        self.is_at(address);
        Some(self.address.load(Ordering::Relaxed))
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
            b"cuMemCreate" => (&CREATE, create as *mut c_void),
            b"cuGetProcAddress" => (&GET_ADDRESS, get_address as *mut c_void),
            b"cuGetProcAddress_v2" => (&GET_ADDRESS_2, get_address_2 as *mut c_void),
            _ => return None,
        };
        Some(Self { original, ours })
    }

    /// What `dlsym` returns if it found the name at `address`. `next` looks behind this library:
    /// without libcuda the name must not be found here.
    pub(crate) fn looked_up(&self, address: *mut c_void, next: impl FnOnce() -> *mut c_void) -> *mut c_void {
        let address = if is_of_this_library(address) { next() } else { address };
        if address.is_null() || IS_OFF.load(Ordering::Relaxed) {
            return address;
        }
        if is_of_this_library(address) || self.original.is_at(address) { self.ours } else { address }
    }
}

/// Whether a function is ours. Exported names do not tell: those of this library may be another's,
/// which is in front of it.
fn is_of_this_library(address: *mut c_void) -> bool {
    let base = |address: *const c_void| {
        let mut found = mem::MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: any address; the structure is filled when the result is not 0.
        unsafe {
            let is_known = libc::dladdr(address, found.as_mut_ptr()) != 0;
            is_known.then(|| found.assume_init().dli_fbase)
        }
    };
    !address.is_null() && base(address) == base(is_of_this_library as *const c_void)
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
    // SAFETY: the caller's promise.
    unsafe { create(handle, size, prop, flags) }
}

unsafe extern "C" fn create(
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
    // SAFETY: the caller's promise.
    unsafe { get_address(name, place, version, flags) }
}

unsafe extern "C" fn get_address(
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
    // SAFETY: the caller's promise.
    unsafe { get_address_2(name, place, version, flags, status_place) }
}

unsafe extern "C" fn get_address_2(
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
