//! Pointer lookup: the GPU, the kind of memory, and the bounds of its allocation.

use std::ffi::{c_uint, c_void};
use std::fmt;
use std::sync::Arc;

use super::api::{AllocationProp, Api, Context, consts};
use super::device::Gpu;
use super::driver::Driver;
use super::error::CudaError;
pub use super::range_error::GpuRangeError;
use super::range_error::{failed, unknown};

/// Page size in which kernel modules pin GPU memory.
pub const GPU_PAGE: u64 = 64 << 10;
/// `cudaMalloc` memory begins at multiples of this.
const ALLOCATION_ALIGNMENT: u64 = 512;
/// Alignment that CUDA guarantees for every allocation: the bytes from an allocation's end to the
/// next multiple are unused.
const PROMISED_ALIGNMENT: u64 = 256;

/// Origin of memory that CUDA knows, as far as it matters for access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// `cudaMalloc`, `cuMemAlloc`.
    CudaMalloc,
    /// VMM (`cuMemCreate`) with a handle that can be exported as a file descriptor.
    VmmExportable,
    /// VMM without such a handle.
    VmmPrivate,
    /// A VMM range of several handles side by side, such as PyTorch's expandable segments.
    VmmSeveral,
    /// A stream-ordered pool: `cudaMallocAsync`, `cuMemAllocAsync`.
    Pool,
    /// Memory of another process, opened by `cuIpcOpenMemHandle`.
    IpcImported,
    /// Managed memory, which moves between host and GPU.
    Managed,
    /// Page-locked host memory that CUDA allocated or registered.
    PinnedHost,
    /// GPU memory that CUDA does not say more about.
    Unknown,
}

impl MemoryKind {
    /// Its name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::CudaMalloc => "cudaMalloc",
            Self::VmmExportable => "VMM, exportable",
            Self::VmmPrivate => "VMM, not exportable",
            Self::VmmSeveral => "VMM, several handles",
            Self::Pool => "cudaMallocAsync pool",
            Self::IpcImported => "imported by IPC",
            Self::Managed => "managed",
            Self::PinnedHost => "pinned host",
            Self::Unknown => "GPU memory of unknown kind",
        }
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One allocation, or one mapped handle of a VMM range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its first address.
    pub base: u64,
    /// Its length in bytes.
    pub size: u64,
    /// CUDA's buffer ID, never reused in this process. 0 where CUDA has none.
    pub buffer_id: u64,
}

impl Segment {
    /// The first address after it.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.base.saturating_add(self.size)
    }
}

/// A range of memory that CUDA knows, and what it is.
#[derive(Clone, Debug)]
pub struct GpuRange {
    addr: u64,
    len: usize,
    kind: MemoryKind,
    gpu: Arc<Gpu>,
    context: Context,
    /// Where the CPU sees pinned host memory.
    host: Option<u64>,
    segments: Vec<Segment>,
}

/// Pointer attributes from CUDA; all zero for memory that it does not know.
#[derive(Debug)]
struct Attributes {
    context: Context,
    memory_type: c_uint,
    host_pointer: u64,
    buffer_id: u64,
    managed: bool,
    ordinal: i32,
    legacy_ipc: bool,
    pool: u64,
    start: u64,
    size: usize,
}

impl GpuRange {
    /// Identifies the `len` bytes at `addr`.
    ///
    /// Pointer queries need no context. Kinds of memory that do need one use the memory's own
    /// context, else this thread's on the same GPU, else the primary context.
    pub fn of(addr: u64, len: usize) -> Result<Self, GpuRangeError> {
        let end = u64::try_from(len)
            .ok()
            .filter(|&len| len > 0)
            .and_then(|len| addr.checked_add(len))
            .ok_or(GpuRangeError::Empty { addr, len })?;
        let driver = Driver::get()?;
        let attributes = driver.relaxed(|api| query(api, addr)).map_err(|error| failed(addr, error))?;
        if attributes.memory_type == 0 {
            return Err(unknown(addr));
        }
        let is_host = attributes.memory_type == consts::MEMORY_TYPE_HOST;
        let gpu = match Gpu::by_ordinal(attributes.ordinal)? {
            // Host memory may belong to no GPU; any will do for it.
            None if is_host => Gpu::list()?.into_iter().next(),
            found => found,
        }
        .ok_or(GpuRangeError::NoSuchGpu { addr, ordinal: attributes.ordinal })?;
        let mut range = Self {
            addr,
            len,
            kind: MemoryKind::Unknown,
            context: attributes.context,
            host: None,
            segments: Vec::new(),
            gpu,
        };
        if attributes.managed || is_host {
            range.kind = if attributes.managed { MemoryKind::Managed } else { MemoryKind::PinnedHost };
            range.host = (!attributes.managed).then_some(if attributes.host_pointer == 0 {
                addr
            } else {
                attributes.host_pointer
            });
            let segment = segment_of_attributes(addr, end, &attributes);
            range.segments.push(segment);
            return if end <= segment.end() { Ok(range) } else { Err(range.crossing()) };
        }
        range.context = range.find_context(attributes.context).map_err(|error| failed(addr, error))?;
        driver
            .in_context(range.context, |api| range.classify(api, &attributes, end))
            .map_err(|error| failed(addr, error))?;
        if range.room_end() < end {
            return Err(range.crossing());
        }
        Ok(range)
    }

    /// The whole GPU pages of 64 KiB that the `len` bytes at `addr` lie in, as kernel modules pin
    /// them for RDMA.
    ///
    /// Small allocations share pages, and a program that rounds its range to pages may pass an
    /// unallocated or a neighbouring address. The range then stands for the allocation that holds
    /// `addr`, or the first one after it in the same page. It reaches beyond that allocation on
    /// either side; the driver's memory object decides whether it can be mapped.
    pub fn of_gpu_pages(addr: u64, len: usize) -> Result<Self, GpuRangeError> {
        let no_range = GpuRangeError::Empty { addr, len };
        let end = u64::try_from(len)
            .ok()
            .filter(|&len| len > 0)
            .and_then(|len| addr.checked_add(len)?.checked_next_multiple_of(GPU_PAGE))
            .ok_or(no_range.clone())?;
        let start = addr / GPU_PAGE * GPU_PAGE;
        let pages = usize::try_from(end - start).map_err(|_| no_range)?;
        if let Ok(range) = Self::of(start, pages) {
            return Ok(range);
        }
        let mut range = Self::of(first_known(addr, end)?.unwrap_or(addr), 1)?;
        match range.kind {
            MemoryKind::CudaMalloc | MemoryKind::Pool | MemoryKind::IpcImported | MemoryKind::Unknown => {
                (range.addr, range.len) = (start, pages);
                Ok(range)
            }
            // Whole handles begin and end with pages, and other memory has no such pages.
            _ => Self::of(addr, len),
        }
    }

    /// Its first address.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: a range has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Kind of memory.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// The GPU that it lies on, or that it was pinned for.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// A context in which it could be used at lookup time: null for pinned host memory that no
    /// context owns. It may have been destroyed since then; [`context_now`](Self::context_now)
    /// checks.
    #[must_use]
    pub fn context(&self) -> Context {
        self.context
    }

    /// A context in which it can be used now, found without using the earlier handle. Fails where
    /// the memory is gone.
    pub fn context_now(&self) -> Result<Context, CudaError> {
        let driver = self.gpu.driver();
        let (found, id) =
            driver.relaxed(|api| Ok::<_, CudaError>((query(api, self.addr)?, buffer_id(api, self.addr)?)))?;
        if found.memory_type == 0 || (self.buffer_id() != 0 && id != self.buffer_id()) {
            return Err(CudaError {
                call: "cuPointerGetAttributes",
                code: CudaError::INVALID_VALUE,
                name: "CUDA_ERROR_INVALID_VALUE: the memory was freed",
            });
        }
        if self.host.is_some() { Ok(found.context) } else { self.find_context(found.context) }
    }

    /// Where its allocation begins.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.segments.first().map_or(self.addr, |first| first.base)
    }

    /// The length of its allocation, or of the run of VMM mappings that it touches.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.segments.last().map_or(self.len as u64, |last| last.end() - self.base())
    }

    /// CUDA's number for the (first) allocation.
    #[must_use]
    pub fn buffer_id(&self) -> u64 {
        self.segments.first().map_or(0, |first| first.buffer_id)
    }

    /// CUDA's number of the GPU.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.gpu.ordinal()
    }

    /// Where the CPU sees it, if it is pinned host memory.
    #[must_use]
    pub fn host_addr(&self) -> Option<u64> {
        self.host
    }

    /// The allocations or mapped handles that it touches, in order.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Its kind, and the allocations it touches up to `end`.
    fn classify(&mut self, api: &Api, attributes: &Attributes, end: u64) -> Result<(), CudaError> {
        self.segments.push(segment_at(api, self.addr)?);
        let Some(prop) = vmm_properties(api, self.addr) else {
            // A pool identifies its memory; memory that is neither that nor eligible for IPC was
            // imported by IPC, as far as is known.
            self.kind = if attributes.pool != 0 {
                MemoryKind::Pool
            } else if attributes.legacy_ipc {
                MemoryKind::CudaMalloc
            } else {
                MemoryKind::IpcImported
            };
            return Ok(());
        };
        // A pool may be built on VMM; its memory belongs to the pool all the same.
        self.kind = if attributes.pool != 0 {
            MemoryKind::Pool
        } else if prop.handle_types & consts::HANDLE_TYPE_POSIX_FD != 0 {
            MemoryKind::VmmExportable
        } else {
            MemoryKind::VmmPrivate
        };
        let mut next = self.segments[0].end();
        while next < end {
            // The run ends at a gap, or at anything but VMM memory of this GPU.
            let Some(prop) = vmm_properties(api, next) else { break };
            let segment = segment_at(api, next)?;
            if prop.location != self.location() || segment.base != next || segment.size == 0 {
                break;
            }
            self.kind = MemoryKind::VmmSeveral;
            next = segment.end();
            self.segments.push(segment);
        }
        Ok(())
    }

    fn location(&self) -> super::api::MemLocation {
        AllocationProp::device(self.gpu.ordinal(), false, false).location
    }

    /// VMM and pool memory belongs to no context: take the caller's, if it is on this GPU, before
    /// making one.
    fn find_context(&self, own: Context) -> Result<Context, CudaError> {
        if !own.is_null() {
            return Ok(own);
        }
        let current = self.gpu.driver().relaxed(|api| {
            let (mut context, mut device) = (Context::NULL, -1);
            // SAFETY: the call writes one handle.
            unsafe { api.ctx_current(&raw mut context) }?;
            if !context.is_null() {
                // SAFETY: the call writes one int.
                match unsafe { api.ctx_device(&raw mut device) } {
                    // The context was destroyed but left current on this thread.
                    Err(error) if error.context_is_gone() => {}
                    answer => answer?,
                }
            }
            Ok::<_, CudaError>((device == self.gpu.ordinal()).then_some(context))
        })?;
        current.map_or_else(|| self.gpu.primary(), Ok)
    }

    /// How far a range may reach: programs round registrations up (UCX to 16 bytes), and
    /// page-granular adapters accept that.
    fn room_end(&self) -> u64 {
        let end = self.segments.last().map_or(0, Segment::end);
        end.checked_next_multiple_of(PROMISED_ALIGNMENT).unwrap_or(end)
    }

    fn crossing(&self) -> GpuRangeError {
        GpuRangeError::Crosses { addr: self.addr, len: self.len, base: self.base(), size: self.size() }
    }
}

/// The first address of allocated memory from `addr` on, before `end` and in the same GPU page.
fn first_known(addr: u64, end: u64) -> Result<Option<u64>, GpuRangeError> {
    let driver = Driver::get()?;
    let end = end.min(addr / GPU_PAGE * GPU_PAGE + GPU_PAGE);
    let mut next = addr;
    while next < end {
        let found = driver.relaxed(|api| query(api, next)).map_err(|error| failed(next, error))?;
        if found.memory_type != 0 {
            return Ok(Some(next));
        }
        next = (next + 1).next_multiple_of(ALLOCATION_ALIGNMENT);
    }
    Ok(None)
}

/// All attributes at once; the call succeeds for any address.
fn query(api: &Api, addr: u64) -> Result<Attributes, CudaError> {
    let mut context = Context::NULL;
    let (mut memory_type, mut managed, mut legacy_ipc) = (0 as c_uint, 0 as c_uint, 0 as c_uint);
    let (mut host_pointer, mut buffer_id, mut start, mut pool) = (0u64, 0u64, 0u64, 0u64);
    let (mut ordinal, mut size) = (-1i32, 0usize);
    let wanted: [(c_uint, *mut c_void); 10] = [
        (consts::POINTER_CONTEXT, (&raw mut context).cast()),
        (consts::POINTER_MEMORY_TYPE, (&raw mut memory_type).cast()),
        (consts::POINTER_HOST_POINTER, (&raw mut host_pointer).cast()),
        (consts::POINTER_BUFFER_ID, (&raw mut buffer_id).cast()),
        (consts::POINTER_IS_MANAGED, (&raw mut managed).cast()),
        (consts::POINTER_DEVICE_ORDINAL, (&raw mut ordinal).cast()),
        (consts::POINTER_IS_LEGACY_IPC_CAPABLE, (&raw mut legacy_ipc).cast()),
        (consts::POINTER_RANGE_START, (&raw mut start).cast()),
        (consts::POINTER_RANGE_SIZE, (&raw mut size).cast()),
        (consts::POINTER_MEMPOOL, (&raw mut pool).cast()),
    ];
    let attributes = wanted.map(|(attribute, _)| attribute);
    let values = wanted.map(|(_, value)| value);
    let ask = |count: c_uint| {
        // SAFETY: the arrays have at least `count` entries, each value with room for what its
        // attribute gives (at most 8 bytes).
        unsafe { api.pointer_attributes(count, attributes.as_ptr(), values.as_ptr(), addr) }
    };
    // Pools are the last attribute: drivers before CUDA 11.3 do not know it.
    ask(10).or_else(|_| ask(9))?;
    // The driver writes a boolean as an int or a byte; in both cases the lowest byte holds it.
    Ok(Attributes {
        context,
        memory_type,
        host_pointer,
        buffer_id,
        managed: managed & 0xFF != 0,
        ordinal,
        legacy_ipc: legacy_ipc & 0xFF != 0,
        pool,
        start,
        size,
    })
}

/// CUDA's buffer ID for the allocation at `addr`: needs no context, and fails once the memory is
/// freed. Where buffers have no ID, as VMM mappings may not, that of the physical memory, where the
/// driver knows it.
pub(super) fn buffer_id(api: &Api, addr: u64) -> Result<u64, CudaError> {
    let ask = |attribute: c_uint| {
        let mut id = 0u64;
        // SAFETY: both attributes are 8 bytes.
        unsafe { api.pointer_attribute((&raw mut id).cast(), attribute, addr) }?;
        Ok(id)
    };
    match ask(consts::POINTER_BUFFER_ID)? {
        0 => Ok(ask(consts::POINTER_MEMORY_BLOCK_ID).unwrap_or(0)),
        id => Ok(id),
    }
}

fn segment_at(api: &Api, addr: u64) -> Result<Segment, CudaError> {
    let (mut base, mut size) = (0, 0);
    // SAFETY: the call writes an address and a size.
    unsafe { api.address_range(&raw mut base, &raw mut size, addr) }?;
    Ok(Segment { base, size: size as u64, buffer_id: buffer_id(api, addr)? })
}

/// Host memory that was registered piecemeal may have no range in CUDA's records; then the
/// requested range is used as is.
fn segment_of_attributes(addr: u64, end: u64, attributes: &Attributes) -> Segment {
    let (base, size) =
        if attributes.size == 0 { (addr, end - addr) } else { (attributes.start, attributes.size as u64) };
    Segment { base, size, buffer_id: attributes.buffer_id }
}

/// The properties of the VMM allocation mapped at `addr`, if it is one.
fn vmm_properties(api: &Api, addr: u64) -> Option<AllocationProp> {
    let mut handle = 0;
    // SAFETY: the call writes one handle, which is released below.
    unsafe { api.mem_retain_handle(&raw mut handle, addr) }.ok()?;
    let mut prop = AllocationProp::device(0, false, false);
    // SAFETY: the handle is live; the call writes the properties.
    let answer = unsafe { api.mem_handle_prop(&raw mut prop, handle) };
    // SAFETY: releases the reference taken above; it never waits, since the mapping holds the
    // memory.
    let _ = unsafe { api.mem_release(handle) };
    answer.ok().map(|()| prop)
}
