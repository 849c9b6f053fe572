//! Adapter facts from libibverbs, by experiment: open, dma-buf, packet size, and registration of
//! GPU memory.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use nobounce_topology::facts::{Facts, Library as LibraryFact, Probe, Read, Registration};

use super::library::{Library, function};

const LOCAL_WRITE: c_int = 1;
const REMOTE_WRITE: c_int = 2;
const REMOTE_READ: c_int = 4;

type Pointer = *mut c_void;
type OfPointer = unsafe extern "C" fn(Pointer) -> Pointer;
type Destroy = unsafe extern "C" fn(Pointer) -> c_int;
type RegMr = unsafe extern "C" fn(Pointer, Pointer, usize, c_int) -> Pointer;
type RegDmaBuf = unsafe extern "C" fn(Pointer, u64, usize, u64, c_int, c_int) -> Pointer;

/// The functions that are called.
struct Api {
    list: unsafe extern "C" fn(*mut c_int) -> *mut Pointer,
    free_list: unsafe extern "C" fn(*mut Pointer),
    name: unsafe extern "C" fn(Pointer) -> *const c_char,
    open: OfPointer,
    close: Destroy,
    alloc_pd: OfPointer,
    dealloc_pd: Destroy,
    reg_mr: RegMr,
    dereg_mr: Destroy,
    reg_dmabuf: Option<RegDmaBuf>,
    query_port: unsafe extern "C" fn(Pointer, u8, *mut [u8; 256]) -> c_int,
}

impl Api {
    fn load(library: Library) -> Option<Self> {
        Some(Self {
            list: function!(
                library,
                c"ibv_get_device_list",
                unsafe extern "C" fn(*mut c_int) -> *mut Pointer
            )?,
            free_list: function!(library, c"ibv_free_device_list", unsafe extern "C" fn(*mut Pointer))?,
            name: function!(library, c"ibv_get_device_name", unsafe extern "C" fn(Pointer) -> *const c_char)?,
            open: function!(library, c"ibv_open_device", OfPointer)?,
            close: function!(library, c"ibv_close_device", Destroy)?,
            alloc_pd: function!(library, c"ibv_alloc_pd", OfPointer)?,
            dealloc_pd: function!(library, c"ibv_dealloc_pd", Destroy)?,
            reg_mr: function!(library, c"ibv_reg_mr", RegMr)?,
            dereg_mr: function!(library, c"ibv_dereg_mr", Destroy)?,
            reg_dmabuf: function!(library, c"ibv_reg_dmabuf_mr", RegDmaBuf),
            query_port: function!(
                library,
                c"ibv_query_port",
                unsafe extern "C" fn(Pointer, u8, *mut [u8; 256]) -> c_int
            )?,
        })
    }
}

/// Memory of a GPU to be registered with every adapter.
pub(super) struct GpuAllocation<'a> {
    pub(super) gpu: &'a str,
    pub(super) address: u64,
    /// Bytes to register: a little, and all of it.
    pub(super) sizes: [usize; 2],
    /// The same as a dma-buf, and where in it the memory begins.
    pub(super) dma_buf: Option<(BorrowedFd<'a>, u64)>,
}

/// Opens every adapter, and registers the memory with each.
pub(super) fn fill(facts: &mut Facts, memory: &[GpuAllocation<'_>]) {
    let library = match Library::open(&[c"libibverbs.so.1"]) {
        Ok(library) => library,
        Err(error) => {
            let fact = LibraryFact { error: Some(error), ..LibraryFact::default() };
            facts.libraries.verbs = Read::Yes(if facts.nics.is_empty() { None } else { Some(fact) });
            return;
        }
    };
    let Some(api) = Api::load(library) else {
        facts.libraries.verbs = Read::no("libibverbs.so.1 lacks required functions");
        return;
    };
    let lacks = if api.reg_dmabuf.is_none() { vec!["ibv_reg_dmabuf_mr".to_owned()] } else { Vec::new() };
    facts.libraries.verbs = Read::Yes(Some(LibraryFact { lacks, ..LibraryFact::default() }));
    if facts.nics.is_empty() {
        return;
    }
    let mut count = 0;
    // SAFETY: the call writes one word and gives a list that ends in null.
    let list = unsafe { (api.list)(&raw mut count) };
    if list.is_null() {
        return;
    }
    for nic in &mut facts.nics {
        nic.listed = Read::Yes(false);
    }
    for index in 0..usize::try_from(count).unwrap_or(0).min(256) {
        // SAFETY: the list has `count` devices, and lives until it is freed below.
        let device = unsafe { *list.add(index) };
        // SAFETY: a device of the list.
        let name = unsafe { (api.name)(device) };
        if name.is_null() {
            continue;
        }
        // SAFETY: a string of the device's.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        try_device(&api, device, &name, memory, facts);
    }
    // SAFETY: what was given above; all devices of it are closed.
    unsafe { (api.free_list)(list) };
}

fn try_device(api: &Api, device: Pointer, name: &str, memory: &[GpuAllocation<'_>], facts: &mut Facts) {
    let Some(at) = facts.nics.iter().position(|nic| nic.name == name) else { return };
    facts.nics[at].listed = Read::Yes(true);
    // SAFETY: a device of the list.
    let context = unsafe { (api.open)(device) };
    if context.is_null() {
        facts.nics[at].open_probe = Read::Yes(failed("ibv_open_device"));
        return;
    }
    facts.nics[at].open_probe = Read::Yes(Probe::worked("ibv_open_device"));
    for port in &mut facts.nics[at].ports {
        if let Ok(number) = u8::try_from(port.number) {
            // The exported function writes 48 bytes; some versions more.
            let mut attributes = [0; 256];
            // SAFETY: an open device; there is room for more than any version writes.
            if unsafe { (api.query_port)(context, number, &raw mut attributes) } == 0 {
                // state, max_mtu, active_mtu: three words, codes 1 (256 bytes) to 5 (4096).
                let code = u32::from_ne_bytes([attributes[8], attributes[9], attributes[10], attributes[11]]);
                if (1..=5).contains(&code) {
                    port.active_mtu = Read::Yes(128 << code);
                }
            }
        }
    }
    // SAFETY: an open device.
    let pd = unsafe { (api.alloc_pd)(context) };
    if !pd.is_null() {
        try_memory(api, pd, at, name, memory, facts);
        // SAFETY: nothing is left in the domain.
        unsafe { (api.dealloc_pd)(pd) };
    }
    // SAFETY: nothing of the device is in use any more.
    unsafe { (api.close)(context) };
}

fn try_memory(
    api: &Api,
    pd: Pointer,
    at: usize,
    name: &str,
    memory: &[GpuAllocation<'_>],
    facts: &mut Facts,
) {
    let access = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ;
    facts.nics[at].dma_buf_probe = match api.reg_dmabuf {
        Some(register) => {
            // SAFETY: no descriptor: the call can only fail, and how it does is the answer.
            let region = unsafe { register(pd, 0, 4096, 0, -1, access) };
            let error = io::Error::last_os_error();
            let probe = if !region.is_null() {
                // SAFETY: what was just registered.
                unsafe { (api.dereg_mr)(region) };
                Probe::worked("ibv_reg_dmabuf_mr accepted an invalid descriptor")
            } else if error.raw_os_error() == Some(libc::EBADF) {
                Probe::worked("ibv_reg_dmabuf_mr checks the descriptor (EBADF)")
            } else {
                Probe::failed(error.raw_os_error(), format!("ibv_reg_dmabuf_mr: {error}"))
            };
            Read::Yes(probe)
        }
        None => Read::Yes(Probe::failed(None, "libibverbs has no ibv_reg_dmabuf_mr")),
    };
    if facts.nics[at].is_software() {
        return;
    }
    let small_and_large = memory.iter().flat_map(|memory| {
        let [small, large] = memory.sizes;
        [(memory, small)].into_iter().chain((large > small).then_some((memory, large)))
    });
    for (memory, len) in small_and_large {
        let bytes = len as u64;
        let mut note = |way: &str, region: Pointer, function: &str| {
            let probe = if region.is_null() {
                failed(function)
            } else {
                // SAFETY: what was just registered.
                unsafe { (api.dereg_mr)(region) };
                Probe::worked("")
            };
            let (gpu, nic, way) = (memory.gpu.to_owned(), name.to_owned(), way.to_owned());
            facts.registrations.push(Registration { gpu, nic, way, bytes, probe });
        };
        if let (Some(register), Some((fd, offset))) = (api.reg_dmabuf, &memory.dma_buf) {
            // SAFETY: a live dma-buf of at least this length.
            let region = unsafe { register(pd, *offset, len, memory.address, fd.as_raw_fd(), access) };
            note("dma-buf", region, "ibv_reg_dmabuf_mr");
        }
        let pointer = ptr::with_exposed_provenance_mut(usize::try_from(memory.address).unwrap_or(0));
        // SAFETY: live memory of this length. Nothing writes to it through the region, which is
        // released at once.
        let region = unsafe { (api.reg_mr)(pd, pointer, len, access) };
        note("peermem", region, "ibv_reg_mr");
    }
}

fn failed(function: &str) -> Probe {
    let error = io::Error::last_os_error();
    Probe::failed(error.raw_os_error(), format!("{function}: {error}"))
}
