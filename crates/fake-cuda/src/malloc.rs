//! `cuMemAlloc` and the pools: memory of a size, not of a mapping.

use std::sync::Arc;

use crate::abi::{Out, size};
use crate::backing::{Backing, PAGE};
use crate::call::{Call, Rule, call};
use crate::device::TOTAL_MEMORY;
use crate::lane::Work;
use crate::memory::{Home, Kind};
use crate::space::Space;
use crate::status::{Answer, Status};
use crate::world::World;

/// Smaller allocations share blocks of this size, at multiples of [`GRAIN`]; larger ones get whole
/// blocks.
pub(crate) const BLOCK: usize = 2 << 20;
const SHARED_BELOW: usize = 1 << 20;
const GRAIN: usize = 512;

/// A block that small allocations share.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) backing: Arc<Backing>,
    /// Addresses of it that are free.
    free: Space,
    /// Pool memory and `cuMemAlloc` memory do not share blocks.
    pool: bool,
}

/// The space that a small allocation takes in its block: tiny ones share a page, longer ones begin
/// inside a page of their own. So exported pages belong to one allocation, or are one page.
struct Room {
    len: usize,
    align: usize,
    /// Bytes before the allocation.
    lead: usize,
}

impl Room {
    fn of(len: usize) -> Self {
        let grains = len.next_multiple_of(GRAIN);
        if grains <= PAGE {
            Self { len: grains, align: grains.next_power_of_two(), lead: 0 }
        } else {
            Self { len: (GRAIN + len).next_multiple_of(PAGE), align: PAGE, lead: GRAIN }
        }
    }
}

impl World {
    fn allocate(&mut self, len: usize, kind: Kind, context: Option<u64>, device: i32) -> Answer<u64> {
        if len == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let used: usize = self.memory.values().map(|entry| entry.len).sum();
        if len > TOTAL_MEMORY.saturating_sub(used) {
            return Err(Status::OUT_OF_MEMORY);
        }
        if len < SHARED_BELOW {
            return self.allocate_small(len, kind, context, device);
        }
        let whole = len.next_multiple_of(BLOCK);
        let backing = Arc::new(Backing::new(whole)?);
        let start = self.addresses.take(whole, BLOCK).ok_or(Status::OUT_OF_MEMORY)?;
        self.add_memory(start, len, kind, context, device, Some(backing), 0, Home::Block(start, whole));
        Ok(start as u64)
    }

    fn allocate_small(&mut self, len: usize, kind: Kind, context: Option<u64>, device: i32) -> Answer<u64> {
        let (room, pool) = (Room::of(len), kind == Kind::Pool);
        let found = self
            .chunks
            .iter_mut()
            .filter(|(_, chunk)| chunk.pool == pool)
            .find_map(|(&base, chunk)| chunk.free.take(room.len, room.align).map(|start| (base, start)));
        let (base, start) = match found {
            Some(found) => found,
            None => {
                let backing = Arc::new(Backing::new(BLOCK)?);
                let base = self.addresses.take(BLOCK, BLOCK).ok_or(Status::OUT_OF_MEMORY)?;
                let mut free = Space::new(base, BLOCK);
                let start = free.take(room.len, room.align).ok_or(Status::OUT_OF_MEMORY)?;
                self.chunks.insert(base, Chunk { backing, free, pool });
                (base, start)
            }
        };
        let start = start + room.lead;
        let backing = Arc::clone(&self.chunks[&base].backing);
        // CUDA does not zero new memory. A nonzero fill exposes programs that rely on zeros.
        backing.fill(start - base, 0xA5, len);
        self.add_memory(start, len, kind, context, device, Some(backing), start - base, Home::Chunk(base));
        Ok(start as u64)
    }

    pub(crate) fn give_back_to_chunk(&mut self, base: usize, start: usize, len: usize) {
        let Some(chunk) = self.chunks.get_mut(&base) else { return };
        let room = Room::of(len);
        chunk.free.give_back(start - room.lead, room.len);
        if chunk.free.is_whole(BLOCK) {
            self.chunks.remove(&base);
            self.addresses.give_back(base, BLOCK);
        }
    }

    /// Frees pool memory when its stream gets there.
    pub(crate) fn free_pool(&mut self, start: usize) {
        if self.memory.get(&start).is_some_and(|entry| entry.kind == Kind::Pool) {
            self.take_out(start);
        }
    }
}

/// The start of an allocation of one of these kinds, as required for freeing it.
pub(crate) fn start_of(call: &Call, pointer: u64, kinds: &[Kind]) -> Answer<usize> {
    let start = size(pointer)?;
    match call.memory.get(&start) {
        Some(entry) if kinds.contains(&entry.kind) => Ok(start),
        _ => Err(Status::INVALID_VALUE),
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAlloc_v2(pointer: Out<u64>, len: usize) -> Status {
    call("cuMemAlloc_v2", Rule::ContextUncaptured, |call| {
        let (context, device) = (call.context(), call.device());
        let start = call.allocate(len, Kind::Malloc, Some(context), device)?;
        pointer.put(start)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(pointer: u64) -> Status {
    call("cuMemFree_v2", Rule::ContextUncaptured, |call| {
        if pointer == 0 {
            return Ok(());
        }
        let kinds = [Kind::Malloc, Kind::Pool, Kind::Managed];
        start_of(call, pointer, &kinds)?;
        // Synchronise the device first, since it may still use the memory: this blocks while a
        // kernel spins.
        call.synchronise();
        let start = start_of(call, pointer, &kinds)?;
        call.take_out(start);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocAsync(pointer: Out<u64>, len: usize, stream: u64) -> Status {
    call("cuMemAllocAsync", Rule::Context, |call| {
        call.lane(stream)?;
        let device = call.device();
        let start = call.allocate(len, Kind::Pool, None, device)?;
        pointer.put(start)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(pointer: u64, stream: u64) -> Status {
    call("cuMemFreeAsync", Rule::Context, |call| {
        let start = start_of(call, pointer, &[Kind::Pool])?;
        call.lane(stream)?.push(Work::Free(start));
        Ok(())
    })
}
