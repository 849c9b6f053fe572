//! Memory that peers and the device may touch.

use std::io;
use std::ops::Range;

use nobounce_memory::{AccessError, HostBuffer, Window};
use nobounce_nic::soft::{self, Access, Mr, Pd};
use serde::{Deserialize, Serialize};

/// Bytes that [`Region::fill`] stores at once.
const FILL: usize = 4096;

/// Why memory could not be registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The kernel gave no memory.
    #[error(
        "cannot map {len} bytes of host memory: {source}; ask for less, or see ulimit -v and the memory cgroup"
    )]
    Allocate {
        /// Bytes asked for.
        len: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] soft::RegisterError),
}

/// The way bytes take between a region and the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Path {
    /// The only resting place in host memory is the buffer handed to, or filled by, the link.
    Direct {
        /// What moves the bytes.
        mechanism: &'static str,
    },
    /// There is one more copy on the way.
    Staged {
        /// Why.
        reason: &'static str,
    },
}

impl std::fmt::Display for Path {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Direct { mechanism } => write!(f, "direct ({mechanism})"),
            Self::Staged { reason } => write!(f, "staged ({reason})"),
        }
    }
}

/// A registered range of memory.
///
/// The device and peers may change it at any time, so its bytes are copied in and out, never borrowed. Dropping a region
/// that an unfinished operation uses is safe: the operation then fails.
#[derive(Debug)]
pub struct Region {
    // Fields drop in this order: the device forgets the memory before the memory goes.
    mr: Mr,
    window: Window,
    memory: Option<HostBuffer>,
    path: Path,
}

impl Region {
    /// What a peer may do with a region that was registered without saying: everything.
    pub const ALL: Access = Access::all();

    pub(crate) fn allocate(pd: &Pd, len: usize, access: Access) -> Result<Self, RegisterError> {
        let memory = HostBuffer::new(len).map_err(|source| RegisterError::Allocate { len, source })?;
        // SAFETY: the buffer lives as long as the region, is reached through windows only, and outlives `mr` and `window`.
        let mut region = unsafe { Self::of_raw(pd, memory.as_mut_ptr(), len, access)? };
        region.memory = Some(memory);
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
        // SAFETY: as above; the window is used through this region only.
        let window = unsafe { Window::new(base, len) };
        Ok(Self { mr, window, memory: None, path: Path::Direct { mechanism: "host memory, CPU copies" } })
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.window.len()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.window.is_empty()
    }

    /// The address of its first byte in this process.
    pub fn addr(&self) -> u64 {
        self.mr.addr()
    }

    /// What a peer needs to reach it. Whoever holds this may use the region as its rights allow, for as long as it lives.
    pub fn remote(&self) -> RemoteRegion {
        RemoteRegion { addr: self.mr.addr(), len: self.mr.len(), rkey: self.mr.rkey() }
    }

    /// The way its bytes take.
    pub fn path(&self) -> Path {
        self.path
    }

    /// Whether the memory belongs to the region (as opposed to memory of the caller's).
    pub fn owns_memory(&self) -> bool {
        self.memory.is_some()
    }

    /// The device's own object, for work requests made by hand.
    pub fn mr(&self) -> &Mr {
        &self.mr
    }

    /// Copies `bytes.len()` bytes at `offset` out of it.
    ///
    /// # Errors
    /// They are not inside the region, or the memory has vanished.
    pub fn read_at(&self, offset: usize, bytes: &mut [u8]) -> Result<(), AccessError> {
        self.window.load(offset, bytes)
    }

    /// Copies `bytes` into it at `offset`.
    ///
    /// # Errors
    /// They are not inside the region, or the memory has vanished.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        self.window.store(offset, bytes)
    }

    /// Reads the 8-byte word at `offset` (a multiple of 8) at once, as atomics see it.
    ///
    /// # Errors
    /// It is not inside the region, not aligned, or the memory has vanished.
    pub fn read_u64(&self, offset: usize) -> Result<u64, AccessError> {
        self.window.load_u64(offset)
    }

    /// Writes the 8-byte word at `offset` (a multiple of 8) at once, as atomics see it.
    ///
    /// # Errors
    /// It is not inside the region, not aligned, or the memory has vanished.
    pub fn write_u64(&self, offset: usize, value: u64) -> Result<(), AccessError> {
        self.window.store_u64(offset, value)
    }

    /// Sets every byte of `range`.
    ///
    /// # Errors
    /// The range is not inside the region (then nothing is written), or the memory has vanished.
    pub fn fill(&self, range: Range<usize>, byte: u8) -> Result<(), AccessError> {
        if range.start > range.end || range.end > self.len() {
            let len = range.end.saturating_sub(range.start);
            return Err(AccessError::OutOfBounds { offset: range.start, len, window: self.len() });
        }
        let block = [byte; FILL];
        let mut at = range.start;
        while at < range.end {
            let len = FILL.min(range.end - at);
            self.window.store(at, &block[..len])?;
            at += len;
        }
        Ok(())
    }
}

/// A peer's region: where it is and the key to it. Plain data, to be sent as the application likes.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteRegion {
    /// The address of its first byte in the peer's process.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The key.
    pub rkey: u32,
}

impl std::fmt::Debug for RemoteRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key is all that guards the memory: it does not belong into logs.
        write!(f, "RemoteRegion({} bytes at {:#x})", self.len, self.addr)
    }
}
