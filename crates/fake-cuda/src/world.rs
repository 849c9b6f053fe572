//! All that the stand-in knows, under one lock.

use std::collections::{BTreeMap, BTreeSet};
use std::ptr;
use std::sync::Arc;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::capture::Capture;
use crate::context::Contexts;
use crate::event::Event;
use crate::knobs::Knobs;
use crate::malloc::Chunk;
use crate::memory::Entry;
use crate::space::Space;
use crate::status::{Answer, Status};
use crate::stream::Stream;
use crate::vmm::Handle;

/// Length of the device's address range. No byte of it is mapped: dereferencing a device address
/// faults.
const ADDRESSES: usize = 1 << 38;

/// Kind of a handle, kept in its high bits so that kinds cannot be confused.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tag {
    Context = 0x51,
    Stream = 0x52,
    Event = 0x53,
    Graph = 0x54,
    Handle = 0x55,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) initialised: bool,
    pub(crate) knobs: Knobs,
    pub(crate) contexts: Contexts,
    pub(crate) addresses: Space,
    /// Every range that is memory to CUDA, by its first address.
    pub(crate) memory: BTreeMap<usize, Entry>,
    /// Blocks that small allocations share, by their first address.
    pub(crate) chunks: BTreeMap<usize, Chunk>,
    /// Reserved address ranges: start and length.
    pub(crate) reservations: BTreeMap<usize, usize>,
    pub(crate) handles: BTreeMap<u64, Handle>,
    pub(crate) streams: BTreeMap<u64, Stream>,
    pub(crate) events: BTreeMap<u64, Arc<Event>>,
    pub(crate) captures: Vec<Capture>,
    /// Streams and events that died with their context.
    pub(crate) lost: BTreeSet<u64>,
    /// Exported descriptors, with their identity from /proc.
    pub(crate) given: BTreeMap<i32, String>,
    pub(crate) calls: BTreeMap<&'static str, u64>,
    next: u64,
}

static WORLD: Mutex<World> = Mutex::new(World {
    initialised: false,
    knobs: Knobs::new(),
    contexts: Contexts::new(),
    addresses: Space::empty(),
    memory: BTreeMap::new(),
    chunks: BTreeMap::new(),
    reservations: BTreeMap::new(),
    handles: BTreeMap::new(),
    streams: BTreeMap::new(),
    events: BTreeMap::new(),
    captures: Vec::new(),
    lost: BTreeSet::new(),
    given: BTreeMap::new(),
    calls: BTreeMap::new(),
    next: 1,
});

pub(crate) fn lock() -> MutexGuard<'static, World> {
    // A panic inside a call is caught there and answered as an unknown error; the world goes on.
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    /// Sets the address range aside.
    pub(crate) fn initialise(&mut self) -> Answer {
        if self.initialised {
            return Ok(());
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh mapping without any right, at an address of the kernel's choice.
        let start = unsafe { libc::mmap(ptr::null_mut(), ADDRESSES, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(Status::OUT_OF_MEMORY);
        }
        // Address 0 of the range stays unused, and CUDA's alignment of 2 MiB is found inside.
        self.addresses = Space::new(start.addr(), ADDRESSES);
        self.initialised = true;
        Ok(())
    }

    /// A number never used before.
    pub(crate) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// A handle never used before. It is no address: dereferencing it faults.
    pub(crate) fn handle(&mut self, tag: Tag) -> u64 {
        ((tag as u64) << 56) | (self.number() << 8)
    }

    /// The error for a stream or event that is not there.
    pub(crate) fn missing(&self, handle: u64) -> Status {
        if self.lost.contains(&handle) {
            self.knobs.use_of_dead("a stream or event");
            Status::CONTEXT_IS_DESTROYED
        } else {
            Status::INVALID_HANDLE
        }
    }

    /// The entry that holds an address.
    pub(crate) fn entry(&self, addr: usize) -> Option<&Entry> {
        self.memory.range(..=addr).next_back().map(|(_, entry)| entry).filter(|entry| entry.holds(addr, 1))
    }
}
