//! Total use of GPU memory and BAR1, by all processes.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use nobounce_memory::gpu::{CudaError, Gpu};

/// Bytes that are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Occupancy {
    /// Of the GPU's memory, as CUDA says.
    pub(crate) memory: u64,
    /// Of BAR1, as NVML says; `None` where it cannot be asked.
    pub(crate) bar1: Option<u64>,
}

impl Occupancy {
    /// What is taken now; `None` where the driver does not say (the stand-in).
    pub(crate) fn now(gpu: &Gpu) -> Option<Self> {
        let (mut free, mut total) = (0, 0);
        let context = gpu.primary().ok()?;
        let asked: Result<(), CudaError> = gpu.driver().in_context(context, |api| {
            // SAFETY: the call writes two words.
            unsafe { api.mem_info(&raw mut free, &raw mut total) }
        });
        asked.ok()?;
        Some(Self { memory: (total - free) as u64, bar1: bar1_used(gpu.pci_address()) })
    }
}

/// `nvmlBAR1Memory_t`.
#[repr(C)]
#[derive(Default)]
struct Bar1 {
    total: u64,
    free: u64,
    used: u64,
}

fn bar1_used(pci_address: &str) -> Option<u64> {
    let address = CString::new(pci_address).ok()?;
    // SAFETY: the library's functions have these signatures; it is never closed, and the handle is
    // used while it is open.
    unsafe {
        let library = libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW);
        if library.is_null() {
            return None;
        }
        let find = |name: &CStr| Some(libc::dlsym(library, name.as_ptr())).filter(|found| !found.is_null());
        let init: unsafe extern "C" fn() -> c_int = std::mem::transmute(find(c"nvmlInit_v2")?);
        let by_address: unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int =
            std::mem::transmute(find(c"nvmlDeviceGetHandleByPciBusId_v2")?);
        let ask: unsafe extern "C" fn(*mut c_void, *mut Bar1) -> c_int =
            std::mem::transmute(find(c"nvmlDeviceGetBAR1MemoryInfo")?);
        let (mut device, mut bar1) = (std::ptr::null_mut(), Bar1::default());
        let asked = init() == 0
            && by_address(address.as_ptr(), &raw mut device) == 0
            && ask(device, &raw mut bar1) == 0;
        asked.then_some(bar1.used)
    }
}
