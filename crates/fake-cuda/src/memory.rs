//! CUDA's memory ranges: each with its kind, its identity and its backing bytes.

use std::sync::Arc;

use crate::abi::size;
use crate::backing::Backing;
use crate::status::{Answer, Status};
use crate::world::World;

/// The call that created the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `cuMemAlloc`.
    Malloc,
    /// `cuMemAllocAsync`.
    Pool,
    /// `cuMemMap`, of this handle.
    Vmm(u64),
    /// `cuIpcOpenMemHandle`.
    Ipc,
    /// `cuMemAllocManaged`.
    Managed,
    /// `cuMemHostAlloc`.
    Pinned,
    /// `cuMemHostRegister`: the pages stay their owner's.
    Registered,
}

/// The allocator that the addresses came from and return to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    /// The block of small allocations that starts at this address.
    Chunk(usize),
    /// A block of its own: first address and length. The memory may begin inside it.
    Block(usize, usize),
    /// A reservation, which stays.
    Reservation,
    /// The host's: the address is that of the bytes themselves.
    Host,
}

/// One range.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) kind: Kind,
    /// `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub(crate) id: u64,
    /// The context it dies with. VMM and pool memory has none.
    pub(crate) context: Option<u64>,
    pub(crate) device: i32,
    /// Absent for registered host memory.
    pub(crate) backing: Option<Arc<Backing>>,
    /// Offset of the first byte in the backing.
    pub(crate) offset: usize,
    /// The device may touch it.
    pub(crate) open: bool,
    pub(crate) home: Home,
}

impl Entry {
    pub(crate) fn holds(&self, addr: usize, len: usize) -> bool {
        addr >= self.start && addr.checked_add(len).is_some_and(|end| end <= self.start + self.len)
    }

    /// True for memory whose address is a host pointer.
    pub(crate) fn is_host(&self) -> bool {
        matches!(self.kind, Kind::Managed | Kind::Pinned | Kind::Registered)
    }

    fn place(&self, addr: usize) -> Place {
        match &self.backing {
            Some(backing) => Place::Backing(Arc::clone(backing), self.offset + (addr - self.start)),
            None => Place::Host(addr),
        }
    }
}

/// Where the bytes of an address are. Keeps them alive.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Backing(Arc<Backing>, usize),
    /// Plain host memory, whose owner keeps it while a copy is in flight.
    Host(usize),
}

impl Place {
    /// Copies bytes out to host memory that the caller owns.
    pub(crate) fn read(&self, to: *mut u8, len: usize) {
        match self {
            Self::Backing(backing, offset) => backing.read(*offset, to, len),
            // SAFETY: the caller of the copy owns both ranges, as with CUDA.
            Self::Host(addr) => unsafe { to.copy_from(std::ptr::with_exposed_provenance(*addr), len) },
        }
    }

    /// Copies bytes in from host memory that the caller owns.
    pub(crate) fn write(&self, from: *const u8, len: usize) {
        match self {
            Self::Backing(backing, offset) => backing.write(*offset, from, len),
            // SAFETY: as in `read`.
            Self::Host(addr) => unsafe { from.copy_to(std::ptr::with_exposed_provenance_mut(*addr), len) },
        }
    }

    /// The same place, advanced.
    pub(crate) fn later(&self, by: usize) -> Self {
        match self {
            Self::Backing(backing, offset) => Self::Backing(Arc::clone(backing), offset + by),
            Self::Host(addr) => Self::Host(addr + by),
        }
    }
}

/// A piece of a range that lies in one place.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) place: Place,
    pub(crate) len: usize,
}

impl World {
    /// Adds a range; its identity differs from all others, earlier ones included.
    #[allow(clippy::too_many_arguments, reason = "the fields of an entry, once")]
    pub(crate) fn add_memory(
        &mut self,
        start: usize,
        len: usize,
        kind: Kind,
        context: Option<u64>,
        device: i32,
        backing: Option<Arc<Backing>>,
        offset: usize,
        home: Home,
    ) {
        let id = self.number();
        let open = !matches!(kind, Kind::Vmm(_));
        self.memory
            .insert(start, Entry { start, len, kind, id, context, device, backing, offset, open, home });
    }

    /// Removes a range and frees its addresses.
    pub(crate) fn take_out(&mut self, start: usize) -> Option<Entry> {
        let entry = self.memory.remove(&start)?;
        match entry.home {
            Home::Block(base, len) => self.addresses.give_back(base, len),
            Home::Chunk(chunk) => self.give_back_to_chunk(chunk, start, entry.len),
            Home::Reservation | Home::Host => {}
        }
        if let Kind::Vmm(handle) = entry.kind {
            self.unmap_handle(handle);
        }
        Some(entry)
    }

    /// The pieces of a range that the device may access. It may continue from one VMM mapping into
    /// the next, but not into a gap.
    pub(crate) fn pieces(&self, addr: u64, len: usize) -> Answer<Vec<Piece>> {
        let mut at = size(addr)?;
        let mut left = len;
        let mut pieces = Vec::new();
        let first = self.entry(at).ok_or(Status::INVALID_VALUE)?;
        loop {
            let entry = self.entry(at).filter(|entry| entry.open).ok_or(Status::INVALID_VALUE)?;
            if entry.start != first.start
                && !(matches!(entry.kind, Kind::Vmm(_)) && matches!(first.kind, Kind::Vmm(_)))
            {
                return Err(Status::INVALID_VALUE);
            }
            let here = left.min(entry.start + entry.len - at);
            pieces.push(Piece { place: entry.place(at), len: here });
            at += here;
            left -= here;
            if left == 0 {
                return Ok(pieces);
            }
        }
    }

    /// The place of a host range that lies wholly in pinned, registered or managed memory.
    pub(crate) fn pinned(&self, addr: usize, len: usize) -> Option<Place> {
        self.entry(addr)
            .filter(|entry| entry.is_host() && entry.holds(addr, len))
            .map(|entry| entry.place(addr))
    }
}
