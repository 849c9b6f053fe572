//! Registered memory.

use std::fmt;
use std::io;
use std::ops::Range;

use nobounce_memory::gpu::{CudaError, DriverError, Gpu, GpuBuffer, GpuMemory, GpuOptions};
use nobounce_memory::path::Paths;
use nobounce_memory::{HostBuffer, Window};
use nobounce_nic::any::{self, Mr, Pd};
use nobounce_nic::hard;
use nobounce_nic::work::Access;
use serde::{Deserialize, Serialize};

use crate::access::AccessError;
use crate::gpu_access;

/// Bytes that [`Region::fill`] stores at a time, in host memory and on a GPU.
const FILL: usize = 4096;
const FILL_GPU: usize = 512 << 10;

/// Why memory could not be registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// Out of host memory.
    #[error(
        "cannot map {len} bytes of host memory: {source}; use less, or check ulimit -v and the memory cgroup"
    )]
    Allocate {
        /// Requested bytes.
        len: usize,
        /// The kernel's error.
        source: io::Error,
    },
    /// There is no CUDA driver, or it does not work.
    #[error("no GPU memory to register: {0}")]
    Driver(#[from] DriverError),
    /// There is no such GPU.
    #[error(
        "no GPU {ordinal}: CUDA shows {count} GPUs to this process, counted from 0 (see CUDA_VISIBLE_DEVICES)"
    )]
    NoGpu {
        /// The requested ordinal.
        ordinal: i32,
        /// The number of GPUs.
        count: usize,
    },
    /// Out of GPU memory.
    #[error(
        "cannot allocate {len} bytes on {gpu}: {source}; use less, or check with nvidia-smi which process holds its memory"
    )]
    AllocateGpu {
        /// Requested bytes.
        len: usize,
        /// The GPU.
        gpu: String,
        /// The CUDA error.
        source: CudaError,
    },
    /// The NIC refused.
    #[error(transparent)]
    Nic(#[from] any::RegisterError),
}

impl RegisterError {
    /// Whether a direct path was required, and there is none.
    #[must_use]
    pub fn is_not_direct(&self) -> bool {
        matches!(self, Self::Nic(error) if error.is_not_direct())
    }
}

/// A registered range of host or GPU memory.
///
/// The device and peers may change it at any time, so its bytes are copied in and out, never
/// borrowed. Dropping a region that an operation in flight uses is safe: the operation then fails.
pub struct Region {
    // Fields drop in this order: memory is deregistered before it is freed.
    mr: Mr,
    memory: RegionMemory,
}

enum RegionMemory {
    Host {
        window: Window,
        buffer: Option<HostBuffer>,
    },
    /// Accessed through the region's `mr`, as by the device.
    Gpu {
        buffer: Option<GpuBuffer>,
    },
}

impl Region {
    /// Default access rights of peers: everything.
    pub const ALL: Access = Access::all();

    pub(crate) fn allocate(pd: &Pd, len: usize, access: Access) -> Result<Self, RegisterError> {
        let memory = HostBuffer::new(len).map_err(|source| RegisterError::Allocate { len, source })?;
        // SAFETY: the buffer lives as long as the region, is reached through windows only, and
        // outlives `mr` and `window`.
        let mut region = unsafe { Self::of_raw(pd, memory.as_mut_ptr(), len, access)? };
        if let RegionMemory::Host { buffer, .. } = &mut region.memory {
            *buffer = Some(memory);
        }
        Ok(region)
    }

    /// # Safety
    /// As for [`Device::register_raw`](crate::Device::register_raw).
    pub(crate) unsafe fn of_raw(
        pd: &Pd,
        base: *mut u8,
        len: usize,
        access: Access,
    ) -> Result<Self, RegisterError> {
        // SAFETY: the caller promises what `register` asks for.
        let mr = unsafe { pd.register(base, len, access)? };
        // SAFETY: as above.
        Ok(unsafe { Self::of_host(mr, base, len) })
    }

    pub(crate) unsafe fn of_raw_on_demand(
        pd: &Pd,
        base: *mut u8,
        len: usize,
        access: Access,
    ) -> Result<Self, RegisterError> {
        // SAFETY: the caller promises what `register_on_demand` asks for.
        let mr = unsafe { pd.register_on_demand(base, len, access)? };
        // SAFETY: as above.
        Ok(unsafe { Self::of_host(mr, base, len) })
    }

    unsafe fn of_host(mr: Mr, base: *mut u8, len: usize) -> Self {
        // SAFETY: the caller's promise; the window is used through this region only.
        let window = unsafe { Window::new(base, len) };
        Self { mr, memory: RegionMemory::Host { window, buffer: None } }
    }

    pub(crate) fn allocate_gpu(
        pd: &Pd,
        ordinal: i32,
        len: usize,
        options: &GpuOptions,
    ) -> Result<Self, RegisterError> {
        let gpus = Gpu::list()?;
        let gpu = gpus.iter().find(|gpu| gpu.ordinal() == ordinal);
        let gpu = gpu.ok_or(RegisterError::NoGpu { ordinal, count: gpus.len() })?;
        let buffer = GpuBuffer::new(gpu, len).map_err(|source| RegisterError::AllocateGpu {
            len,
            gpu: gpu.to_string(),
            source,
        })?;
        // SAFETY: the buffer lives as long as the region, and outlives `mr`; no Rust reference to
        // GPU memory can exist.
        let region = unsafe { Self::of_gpu_raw(pd, buffer.addr(), len, Self::ALL, options)? };
        Ok(Self { memory: RegionMemory::Gpu { buffer: Some(buffer) }, ..region })
    }

    /// # Safety
    /// As for [`Device::register_gpu_raw`](crate::Device::register_gpu_raw).
    pub(crate) unsafe fn of_gpu_raw(
        pd: &Pd,
        addr: u64,
        len: usize,
        access: Access,
        options: &GpuOptions,
    ) -> Result<Self, RegisterError> {
        // SAFETY: the caller promises what `register_gpu` asks for.
        let mr = unsafe { pd.register_gpu(addr, len, access, options)? };
        Ok(Self { mr, memory: RegionMemory::Gpu { buffer: None } })
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        // It was created from a `usize`.
        usize::try_from(self.mr.len()).unwrap_or(usize::MAX)
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The address of its first byte: in this process, or on the GPU.
    pub fn addr(&self) -> u64 {
        self.mr.addr()
    }

    /// What a peer needs to reach it. Every holder may use the region within its access rights for
    /// as long as it lives, unless it [is closed](Self::is_closed).
    pub fn remote(&self) -> RemoteRegion {
        let closed = self.is_closed();
        RemoteRegion { addr: self.mr.addr(), len: self.mr.len(), rkey: self.mr.rkey(), closed }
    }

    /// Whether peers may not use it, whatever its access rights. GPU memory that a hardware NIC
    /// cannot reach is staged for our own requests only ([`paths`](Self::paths) says why). SENDs
    /// and receives work, and so do our own WRITEs and READs on a peer's memory.
    pub fn is_closed(&self) -> bool {
        self.mr.is_closed()
    }

    /// The path of its bytes, per direction.
    pub fn paths(&self) -> &Paths {
        self.mr.paths()
    }

    /// Why a hardware NIC did not use the preferred methods for GPU memory, or any direct one.
    /// Example: `dma-buf` refused, where the path is `direct (peermem)`.
    pub fn refusals(&self) -> &[hard::Refusal] {
        self.mr.refusals()
    }

    /// Whether the region owns its memory (as opposed to the caller).
    pub fn owns_memory(&self) -> bool {
        match &self.memory {
            RegionMemory::Host { buffer, .. } => buffer.is_some(),
            RegionMemory::Gpu { buffer } => buffer.is_some(),
        }
    }

    /// The underlying memory region, for raw work requests.
    pub fn mr(&self) -> &Mr {
        &self.mr
    }

    /// Whether it is CUDA memory.
    pub fn is_gpu(&self) -> bool {
        matches!(self.memory, RegionMemory::Gpu { .. })
    }

    /// The allocation of a region that owns its GPU memory, to launch kernels on.
    pub fn gpu_buffer(&self) -> Option<&GpuBuffer> {
        match &self.memory {
            RegionMemory::Gpu { buffer } => buffer.as_ref(),
            RegionMemory::Host { .. } => None,
        }
    }

    /// The allocation of a region that owns its host memory.
    pub fn host_buffer(&self) -> Option<&HostBuffer> {
        match &self.memory {
            RegionMemory::Host { buffer, .. } => buffer.as_ref(),
            RegionMemory::Gpu { .. } => None,
        }
    }

    /// Copies `bytes.len()` bytes at `offset` out of it. From a GPU: short reads by loads through
    /// the BAR1 window, others by the copy engine.
    ///
    /// # Errors
    /// The range is not inside the region, or the memory is gone. For a GPU also: its copy engine
    /// failed or timed out.
    pub fn read_at(&self, offset: usize, bytes: &mut [u8]) -> Result<(), AccessError> {
        match self.place() {
            RegionPlace::Cpu(window) => Ok(window.load(offset, bytes)?),
            RegionPlace::Gpu(memory) => gpu_access::read(memory, offset, bytes),
        }
    }

    /// Copies `bytes` into it at `offset`. Into a GPU: by stores through the BAR1 window, else by
    /// the copy engine. On return, kernels see them.
    ///
    /// # Errors
    /// As for [`read_at`](Self::read_at).
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        match self.place() {
            RegionPlace::Cpu(window) => Ok(window.store(offset, bytes)?),
            RegionPlace::Gpu(memory) => gpu_access::write(memory, offset, bytes),
        }
    }

    /// Reads the 8-byte word at `offset` (a multiple of 8) with a single access, as atomics do.
    ///
    /// # Errors
    /// As for [`read_at`](Self::read_at); or it is not aligned.
    pub fn read_u64(&self, offset: usize) -> Result<u64, AccessError> {
        match self.place() {
            RegionPlace::Cpu(window) => Ok(window.load_u64(offset)?),
            RegionPlace::Gpu(memory) => gpu_access::read_u64(memory, offset),
        }
    }

    /// Writes the 8-byte word at `offset` (a multiple of 8) with a single access, as atomics do.
    ///
    /// # Errors
    /// As for [`read_at`](Self::read_at); or it is not aligned.
    pub fn write_u64(&self, offset: usize, value: u64) -> Result<(), AccessError> {
        match self.place() {
            RegionPlace::Cpu(window) => Ok(window.store_u64(offset, value)?),
            RegionPlace::Gpu(memory) => gpu_access::write_u64(memory, offset, value),
        }
    }

    /// Sets every byte of `range`.
    ///
    /// # Errors
    /// As for [`read_at`](Self::read_at); a range that is not inside the region leaves it
    /// unchanged.
    pub fn fill(&self, range: Range<usize>, byte: u8) -> Result<(), AccessError> {
        self.check_range(&range)?;
        let at_once = if self.is_gpu() { FILL_GPU } else { FILL };
        let block = vec![byte; at_once.min(range.end - range.start)];
        let mut at = range.start;
        while at < range.end {
            let len = block.len().min(range.end - at);
            self.write_at(at, &block[..len])?;
            at += len;
        }
        Ok(())
    }

    /// Whether a range is inside of it.
    pub(crate) fn check_range(&self, range: &Range<usize>) -> Result<(), AccessError> {
        if range.start <= range.end && range.end <= self.len() {
            return Ok(());
        }
        let len = range.end.saturating_sub(range.start);
        Err(AccessError::OutOfBounds { offset: range.start, len, region: self.len() })
    }

    /// How the application accesses the bytes. Pinned host memory belongs to the CPU, though CUDA
    /// allocated it.
    pub(crate) fn place(&self) -> RegionPlace<'_> {
        match (&self.memory, self.mr.gpu_memory()) {
            (RegionMemory::Host { window, .. }, _) => RegionPlace::Cpu(*window),
            (RegionMemory::Gpu { .. }, Some(memory)) => {
                memory.host().map_or(RegionPlace::Gpu(memory), RegionPlace::Cpu)
            }
            (RegionMemory::Gpu { .. }, None) => unreachable!("`register_gpu` gives regions that have it"),
        }
    }
}

pub(crate) enum RegionPlace<'a> {
    Cpu(Window),
    Gpu(&'a GpuMemory),
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes at {:#x}, ", self.len(), self.addr())?;
        match &self.memory {
            RegionMemory::Host { .. } => f.write_str("host memory")?,
            RegionMemory::Gpu { buffer: Some(buffer) } => write!(f, "on {}", buffer.gpu())?,
            RegionMemory::Gpu { buffer: None } => f.write_str("GPU memory owned elsewhere")?,
        }
        write!(f, ": {}", self.paths())?;
        // The path of staged memory has them.
        if self.paths().are_direct() {
            self.refusals().iter().try_for_each(|refusal| write!(f, "; not used: {refusal}"))?;
        }
        f.write_str(")")
    }
}

/// A peer's region: its address and key. Plain data, to be sent by any channel.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteRegion {
    /// The address of its first byte in the peer's process, or on its GPU.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The key.
    pub rkey: u32,
    /// The peer's hardware NIC cannot reach it, so only the peer may use it
    /// ([`Region::is_closed`]).
    pub closed: bool,
}

impl fmt::Debug for RemoteRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key is the only protection of the memory: keep it out of logs.
        write!(f, "RemoteRegion({} bytes at {:#x})", self.len, self.addr)
    }
}
