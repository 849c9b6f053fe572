//! GPU facts from NVML: names, BAR1, MIG, confidential computing, performance states.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;

use nobounce_topology::facts::{Facts, Gpu, Library as LibraryFact, Read};

use super::gpu_peers;
use super::library::{Library, function};

pub(super) type DeviceHandle = *mut c_void;
type Plain = unsafe extern "C" fn() -> c_int;
type Text = unsafe extern "C" fn(*mut c_char, c_uint) -> c_int;
type DeviceText = unsafe extern "C" fn(DeviceHandle, *mut c_char, c_uint) -> c_int;
type DeviceWord = unsafe extern "C" fn(DeviceHandle, *mut c_uint) -> c_int;
type DeviceTwoWords = unsafe extern "C" fn(DeviceHandle, *mut c_uint, *mut c_uint) -> c_int;

/// `nvmlPciInfo_t`.
#[repr(C)]
struct PciInfo {
    legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    ids: [c_uint; 2],
    address: [c_char; 32],
}

/// `nvmlBAR1Memory_t` and `nvmlMemory_t`: total, free, used; and for BAR1 total, free, used in the
/// same order.
#[repr(C)]
#[derive(Default)]
struct NvmlMemory {
    total: u64,
    free: u64,
    used: u64,
}

/// Adds NVML's facts, and those about the library itself.
pub(super) fn fill(facts: &mut Facts) {
    let library = match Library::open(&[c"libnvidia-ml.so.1"]) {
        Ok(library) => library,
        Err(error) => {
            let driven = facts.kernel.nvidia.known().is_some_and(Option::is_some);
            facts.libraries.nvml = if driven { Read::no(error) } else { Read::Yes(None) };
            return;
        }
    };
    let mut fact = LibraryFact::default();
    let Some(init) = function!(library, c"nvmlInit_v2", Plain) else {
        fact.error = Some("it has no nvmlInit_v2".to_owned());
        facts.libraries.nvml = Read::Yes(Some(fact));
        return;
    };
    // SAFETY: it may be called at any time.
    let status = unsafe { init() };
    if status != 0 {
        fact.error = Some(words(library, status));
        facts.libraries.nvml = Read::Yes(Some(fact));
        return;
    }
    if let Some(version) = function!(library, c"nvmlSystemGetDriverVersion", Text) {
        // SAFETY: the buffer has room for the number of characters that is passed.
        fact.version = text(|buffer, len| unsafe { version(buffer, len) });
    }
    facts.libraries.nvml = Read::Yes(Some(fact));
    let confidential = confidential(library);
    let devices = devices(library);
    facts.gpu_peers = gpu_peers::of(library, &devices);
    for (index, device) in devices.into_iter().enumerate() {
        let Some(address) = address(library, device) else { continue };
        if let Some(gpu) = facts.gpus.iter_mut().find(|gpu| gpu.address == address) {
            gpu.index = u32::try_from(index).ok();
            fill_gpu(library, device, gpu);
            if let Some(on) = confidential {
                gpu.confidential = Read::Yes(on);
            }
        }
    }
    if let Some(shutdown) = function!(library, c"nvmlShutdown", Plain) {
        // SAFETY: it was initialised above, and none of its handles is used any more.
        unsafe { shutdown() };
    }
}

fn devices(library: Library) -> Vec<DeviceHandle> {
    let Some(count_of) =
        function!(library, c"nvmlDeviceGetCount_v2", unsafe extern "C" fn(*mut c_uint) -> c_int)
    else {
        return Vec::new();
    };
    let Some(by_index) = function!(
        library,
        c"nvmlDeviceGetHandleByIndex_v2",
        unsafe extern "C" fn(c_uint, *mut DeviceHandle) -> c_int
    ) else {
        return Vec::new();
    };
    let mut count = 0;
    // SAFETY: the call writes one word.
    if unsafe { count_of(&raw mut count) } != 0 {
        return Vec::new();
    }
    (0..count.min(256))
        .filter_map(|index| {
            let mut device = ptr::null_mut();
            // SAFETY: the call writes one handle.
            (unsafe { by_index(index, &raw mut device) } == 0).then_some(device)
        })
        .collect()
}

/// Its PCI address as the kernel writes it.
pub(super) fn address(library: Library, device: DeviceHandle) -> Option<String> {
    let info_of = function!(
        library,
        c"nvmlDeviceGetPciInfo_v3",
        unsafe extern "C" fn(DeviceHandle, *mut PciInfo) -> c_int
    )?;
    // SAFETY: plain numbers and characters, for which zeroes are valid.
    let mut info: PciInfo = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is NVML's.
    if unsafe { info_of(device, &raw mut info) } != 0 {
        return None;
    }
    let _ = (info.legacy, info.ids, info.address);
    Some(format!("{:04x}:{:02x}:{:02x}.0", info.domain, info.bus, info.device))
}

fn fill_gpu(library: Library, device: DeviceHandle, gpu: &mut Gpu) {
    if let Some(name) = function!(library, c"nvmlDeviceGetName", DeviceText) {
        // SAFETY: the buffer has room for the number of characters that is passed.
        if let Some(name) = text(|buffer, len| unsafe { name(device, buffer, len) }) {
            gpu.name = Read::Yes(name);
        }
    }
    let memory = |name: &CStr| {
        let address = library.find(name)?;
        // SAFETY: both functions have this type.
        let memory_of = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(DeviceHandle, *mut NvmlMemory) -> c_int>(
                address,
            )
        };
        let mut memory = NvmlMemory::default();
        // SAFETY: the structure is NVML's: three numbers of 64 bits.
        (unsafe { memory_of(device, &raw mut memory) } == 0).then_some(memory)
    };
    if let Some(memory) = memory(c"nvmlDeviceGetMemoryInfo") {
        gpu.memory_bytes = Read::Yes(memory.total);
    }
    if let Some(bar) = memory(c"nvmlDeviceGetBAR1MemoryInfo") {
        gpu.bar1_bytes = Read::Yes(bar.total);
        gpu.bar1_used_bytes = Read::Yes(bar.total.saturating_sub(bar.free).min(bar.used.max(1)));
    }
    let word = |found: Option<DeviceWord>| {
        let mut value = 0;
        // SAFETY: the call writes one word.
        (unsafe { found?(device, &raw mut value) } == 0).then_some(value)
    };
    if let Some(state) =
        word(function!(library, c"nvmlDeviceGetPerformanceState", DeviceWord)).filter(|state| *state < 32)
    {
        gpu.performance_state = Read::Yes(state);
    }
    if let Some(on) = word(function!(library, c"nvmlDeviceGetC2cModeInfoV", DeviceWord)) {
        gpu.coherent_link = Read::Yes(on == 1);
    }
    if let Some(mig) = function!(library, c"nvmlDeviceGetMigMode", DeviceTwoWords) {
        let (mut now, mut pending) = (0, 0);
        // SAFETY: the call writes two words.
        match unsafe { mig(device, &raw mut now, &raw mut pending) } {
            0 => gpu.mig = Read::Yes(now == 1),
            // Not supported: such a GPU cannot be divided.
            3 => gpu.mig = Read::Yes(false),
            status => gpu.mig = Read::no(words(library, status)),
        }
    }
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    let capability = function!(
        library,
        c"nvmlDeviceGetCudaComputeCapability",
        unsafe extern "C" fn(DeviceHandle, *mut c_int, *mut c_int) -> c_int
    );
    if let Some(capability) = capability
        // SAFETY: the call writes two words.
        && unsafe { capability(device, &raw mut major, &raw mut minor) } == 0
        && let (Ok(major), Ok(minor)) = (u32::try_from(major), u32::try_from(minor))
    {
        gpu.compute_capability = Read::Yes(major * 10 + minor);
    }
    if let Some(state) = function!(
        library,
        c"nvmlDeviceGetNvLinkState",
        unsafe extern "C" fn(DeviceHandle, c_uint, *mut c_uint) -> c_int
    ) {
        let links = (0..18).filter(|link| {
            let mut up = 0;
            // SAFETY: the call writes one word.
            (unsafe { state(device, *link, &raw mut up) }) == 0 && up == 1
        });
        gpu.nvlinks = u32::try_from(links.count()).map_or_else(|_| Read::default(), Read::Yes);
    }
}

/// Whether confidential computing is on; `None` if the library does not know it.
fn confidential(library: Library) -> Option<bool> {
    let state_of = function!(
        library,
        c"nvmlSystemGetConfComputeState",
        unsafe extern "C" fn(*mut [c_uint; 8]) -> c_int
    )?;
    let mut state = [0; 8];
    // SAFETY: the structure has three words; there is room for more.
    (unsafe { state_of(&raw mut state) } == 0).then_some(state[1] == 1)
}

fn text(write: impl FnOnce(*mut c_char, c_uint) -> c_int) -> Option<String> {
    let mut buffer = [0_u8; 96];
    (write(buffer.as_mut_ptr().cast(), 95) == 0).then(|| {
        let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
        String::from_utf8_lossy(&buffer[..end]).into_owned()
    })
}

pub(super) fn words(library: Library, status: c_int) -> String {
    let Some(told) = function!(library, c"nvmlErrorString", unsafe extern "C" fn(c_int) -> *const c_char)
    else {
        return format!("NVML error {status}");
    };
    // SAFETY: any number may be asked about.
    let text = unsafe { told(status) };
    if text.is_null() {
        return format!("NVML error {status}");
    }
    // SAFETY: a string constant of the library's.
    format!("NVML error {status}: {}", unsafe { CStr::from_ptr(text) }.to_string_lossy())
}
