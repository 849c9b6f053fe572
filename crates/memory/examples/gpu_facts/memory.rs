//! Memory of every kind, allocated as CUDA programs do.

use std::sync::Arc;
use std::time::Duration;

use nobounce_memory::gpu::api::{AccessDesc, AllocationProp, Api, Context, IpcHandle, Stream, consts};
use nobounce_memory::gpu::{CudaError, Gpu, GpuMemory};

const MIB: usize = 1 << 20;

pub(crate) type Make = fn(&Arc<Gpu>, Context) -> Result<Memory, CudaError>;
pub(crate) type MakeSized = fn(&Arc<Gpu>, Context, usize) -> Result<Memory, CudaError>;

/// The kinds, those that can be freed and allocated again first.
pub(crate) const KINDS: [(&str, Make); 12] = [
    ("cudaMalloc, 4 MiB", |gpu, context| cuda_malloc(gpu, context, 4 * MIB)),
    ("cudaMalloc, 70000 bytes", |gpu, context| cuda_malloc(gpu, context, 70_000)),
    ("VMM, exportable, 4 MiB", |gpu, context| vmm(gpu, context, 4 * MIB)),
    ("cudaMalloc, 100 bytes", |gpu, context| cuda_malloc(gpu, context, 100)),
    ("cudaMalloc, 256 MiB, its last 3 MiB", |gpu, context| {
        let mut memory = cuda_malloc(gpu, context, 256 * MIB)?;
        memory.addr += 253 * MIB as u64 + 24;
        memory.len = 3 * MIB - 24;
        Ok(memory)
    }),
    ("VMM, not exportable", |gpu, context| mapped(gpu, context, &[4 * MIB], false, 4 * MIB)),
    ("VMM, three handles", |gpu, context| mapped(gpu, context, &[2 * MIB, 4 * MIB, 2 * MIB], true, 8 * MIB)),
    ("VMM, two of the first handle's four MiB, and another", |gpu, context| {
        mapped(gpu, context, &[4 * MIB, 2 * MIB], true, 4 * MIB)
    }),
    ("cudaMallocAsync pool", pool),
    ("managed", managed),
    ("pinned host", pinned),
    ("not CUDA's: the stack", |gpu, context| {
        let here = 0u64;
        Ok(Memory::new(gpu, context, (&raw const here).addr() as u64, 8, |_, _| Ok(())))
    }),
];

type Release = Box<dyn Fn(&Api, u64) -> Result<(), CudaError>>;

/// An allocation, freed when dropped.
pub(crate) struct Memory {
    pub(crate) addr: u64,
    pub(crate) len: usize,
    gpu: Arc<Gpu>,
    context: Context,
    allocated: u64,
    release: Release,
}

impl Memory {
    fn new(
        gpu: &Arc<Gpu>,
        context: Context,
        addr: u64,
        len: usize,
        release: impl Fn(&Api, u64) -> Result<(), CudaError> + 'static,
    ) -> Self {
        Self { addr, len, gpu: Arc::clone(gpu), context, allocated: addr, release: Box::new(release) }
    }

    /// CUDA's number for it; an error once it is gone. Needs no context.
    pub(crate) fn buffer_id(&self) -> Result<u64, CudaError> {
        buffer_id(&self.gpu, self.allocated)
    }

    fn calls<T>(&self, calls: impl FnOnce(&Api) -> Result<T, CudaError>) -> Result<T, CudaError> {
        self.gpu.driver().in_context(self.context, calls)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Its context may have been destroyed meanwhile, and the memory with it: then there is
        // nothing to free, and no context to do it in. Never pass a context to the driver that may
        // be gone.
        if self.buffer_id().is_err() {
            return;
        }
        if let Err(error) = self.calls(|api| (self.release)(api, self.allocated)) {
            println!("  (freeing: {error})");
        }
    }
}

/// CUDA's number for the memory at an address.
pub(crate) fn buffer_id(gpu: &Gpu, addr: u64) -> Result<u64, CudaError> {
    let mut id = 0u64;
    // SAFETY: the attribute is 8 bytes.
    gpu.driver().relaxed(|api| unsafe {
        api.pointer_attribute((&raw mut id).cast(), consts::POINTER_BUFFER_ID, addr)
    })?;
    Ok(id)
}

pub(crate) fn cuda_malloc(gpu: &Arc<Gpu>, context: Context, len: usize) -> Result<Memory, CudaError> {
    let mut addr = 0;
    // SAFETY: the call writes one address.
    gpu.driver().in_context(context, |api| unsafe { api.mem_alloc(&raw mut addr, len) })?;
    // SAFETY: the address is the allocation's, and is freed once.
    Ok(Memory::new(gpu, context, addr, len, |api, addr| unsafe { api.mem_free(addr) }))
}

pub(crate) fn vmm(gpu: &Arc<Gpu>, context: Context, len: usize) -> Result<Memory, CudaError> {
    mapped(gpu, context, &[len], true, len)
}

/// Handles of the given sizes, mapped contiguously until `len` bytes are reached; the first is cut
/// to fit.
fn mapped(
    gpu: &Arc<Gpu>,
    context: Context,
    sizes: &[usize],
    exportable: bool,
    len: usize,
) -> Result<Memory, CudaError> {
    let prop = AllocationProp::device(gpu.ordinal(), exportable, true);
    let access = AccessDesc { location: prop.location, flags: 3 };
    let surplus = sizes.iter().sum::<usize>() - len;
    let pieces: Vec<usize> = sizes
        .iter()
        .enumerate()
        .map(|(index, size)| if index == 0 { size - surplus } else { *size })
        .collect();
    let mut addr = 0;
    gpu.driver().in_context(context, |api| {
        // SAFETY: a reservation of our own; each handle is mapped once inside it, and its mapping
        // keeps it.
        unsafe {
            api.mem_reserve(&raw mut addr, len, 0, 0, 0)?;
            let mut at = addr;
            for (&size, &piece) in sizes.iter().zip(&pieces) {
                let mut handle = 0;
                api.mem_create(&raw mut handle, size, &raw const prop, 0)?;
                let mapped = api.mem_map(at, piece, 0, handle, 0);
                api.mem_release(handle)?;
                mapped?;
                at += piece as u64;
            }
            api.mem_set_access(addr, len, &raw const access, 1)
        }
    })?;
    Ok(Memory::new(gpu, context, addr, len, move |api, addr| {
        let mut at = addr;
        // SAFETY: what was mapped above, piece by piece.
        unsafe {
            for &piece in &pieces {
                api.mem_unmap(at, piece)?;
                at += piece as u64;
            }
            api.mem_address_free(addr, len)
        }
    }))
}

fn pool(gpu: &Arc<Gpu>, context: Context) -> Result<Memory, CudaError> {
    let mut addr = 0;
    // SAFETY: the calls write one address; the stream is done before it is used.
    gpu.driver().in_context(context, |api| unsafe {
        api.mem_alloc_async(&raw mut addr, 4 * MIB, Stream::NULL)?;
        api.ctx_synchronize()
    })?;
    // SAFETY: freed once.
    Ok(Memory::new(gpu, context, addr, 4 * MIB, |api, addr| unsafe {
        api.mem_free_async(addr, Stream::NULL)
    }))
}

fn managed(gpu: &Arc<Gpu>, context: Context) -> Result<Memory, CudaError> {
    let mut addr = 0;
    // SAFETY: the call writes one address.
    gpu.driver().in_context(context, |api| unsafe {
        api.mem_alloc_managed(&raw mut addr, 4 * MIB, consts::MEM_ATTACH_GLOBAL)
    })?;
    // SAFETY: freed once.
    Ok(Memory::new(gpu, context, addr, 4 * MIB, |api, addr| unsafe { api.mem_free(addr) }))
}

pub(crate) fn pinned(gpu: &Arc<Gpu>, context: Context) -> Result<Memory, CudaError> {
    let mut host = std::ptr::null_mut();
    // SAFETY: the call writes one address.
    gpu.driver().in_context(context, |api| unsafe { api.mem_host_alloc(&raw mut host, 4 * MIB, 0) })?;
    let addr = host.expose_provenance() as u64;
    Ok(Memory::new(gpu, context, addr, 4 * MIB, |api, addr| {
        let host = usize::try_from(addr).map_or(std::ptr::null_mut(), std::ptr::with_exposed_provenance_mut);
        // SAFETY: freed once.
        unsafe { api.mem_host_free(host) }
    }))
}

/// Memory of another process, by the words of its IPC handle in hexadecimal.
pub(crate) fn imported(gpu: &Arc<Gpu>, context: Context, handle: &str) -> Result<Memory, CudaError> {
    let mut words = [0; 16];
    for (index, word) in words.iter_mut().enumerate() {
        *word = handle
            .get(index * 8..index * 8 + 8)
            .and_then(|digits| u32::from_str_radix(digits, 16).ok())
            .unwrap_or(0);
    }
    let mut addr = 0;
    // SAFETY: the call writes one address.
    gpu.driver().in_context(context, |api| unsafe {
        api.ipc_open(&raw mut addr, IpcHandle(words), consts::IPC_LAZY_ENABLE_PEER_ACCESS)
    })?;
    // SAFETY: closed once.
    Ok(Memory::new(gpu, context, addr, 4 * MIB, |api, addr| unsafe { api.ipc_close(addr) }))
}

/// The words of its IPC handle, if the driver provides one.
pub(crate) fn ipc_words(memory: &Memory) -> Option<[u32; 16]> {
    let mut handle = IpcHandle([0; 16]);
    // SAFETY: the call writes one handle.
    memory.calls(|api| unsafe { api.ipc_get(&raw mut handle, memory.addr) }).ok().map(|()| handle.0)
}

/// Copies bytes through the window and by the copy engine, at both ends and in the middle, in both
/// directions.
pub(crate) fn check_both_ways(memory: &Memory, registered: &GpuMemory) -> String {
    let part = memory.len.min(1000);
    let answer = [0, (memory.len - part) / 2, memory.len - part]
        .into_iter()
        .try_for_each(|offset| check_part(memory, registered, offset, part));
    answer.err().unwrap_or_else(|| "right".to_owned())
}

fn check_part(memory: &Memory, registered: &GpuMemory, offset: usize, part: usize) -> Result<(), String> {
    let window = registered.window().ok_or("no window")?;
    let at = memory.addr + offset as u64;
    let out: Vec<u8> = (0..part).map(|index| u8::try_from((index * 7 + offset) % 251).unwrap_or(0)).collect();
    let mut back = vec![0; part];
    window
        .store_last(offset, &out)
        .and_then(|()| window.read_back())
        .map_err(|error| format!("store: {error}"))?;
    // SAFETY: the host side is a vector of that length, and is not touched before the copy is over;
    // the memory is ours.
    on_a_stream(memory, |api, stream| unsafe {
        api.copy_from_device_async(back.as_mut_ptr().cast(), at, part, stream)
    })
    .map_err(|error| error.to_string())?;
    if let Some(wrong) = differences(&back, &out) {
        return Err(format!("WRONG: the GPU does not see what was stored at offset {offset}: {wrong}"));
    }
    let other: Vec<u8> = out.iter().map(|byte| !byte).collect();
    // SAFETY: as above.
    on_a_stream(memory, |api, stream| unsafe {
        api.copy_to_device_async(at, other.as_ptr().cast(), part, stream)
    })
    .map_err(|error| error.to_string())?;
    window.load(offset, &mut back).map_err(|error| format!("load: {error}"))?;
    match differences(&back, &other) {
        None => Ok(()),
        Some(wrong) => {
            std::thread::sleep(Duration::from_millis(20));
            let later = match window.load(offset, &mut back) {
                Ok(()) => differences(&back, &other).unwrap_or_else(|| "all are right".to_owned()),
                Err(error) => error.to_string(),
            };
            Err(format!(
                "WRONG: the window does not show what the GPU wrote at offset {offset}: {wrong}; 20 ms later {later}"
            ))
        }
    }
}

/// Copies on a stream of their own, and waits for completion. A synchronous copy from pageable
/// memory does not suffice: it returns while the bytes are still in flight from the driver's
/// staging buffer. Stream order does not cover a load through the window.
fn on_a_stream(
    memory: &Memory,
    copy: impl FnOnce(&Api, Stream) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    memory.calls(|api| {
        let mut stream = Stream::NULL;
        // SAFETY: the call writes one handle.
        unsafe { api.stream_create(&raw mut stream, consts::STREAM_NON_BLOCKING) }?;
        // SAFETY: the stream is ours, and live until it is destroyed here.
        let copied = copy(api, stream).and_then(|()| unsafe { api.stream_synchronize(stream) });
        // SAFETY: as above.
        copied.and(unsafe { api.stream_destroy(stream) })
    })
}

/// Where two pieces of memory differ, in words.
fn differences(found: &[u8], wanted: &[u8]) -> Option<String> {
    let wrong: Vec<usize> = (0..wanted.len()).filter(|&at| found[at] != wanted[at]).collect();
    let (first, last) = (wrong.first()?, wrong.last()?);
    Some(format!("{} of {} bytes are wrong, from {first} to {last}", wrong.len(), wanted.len()))
}
