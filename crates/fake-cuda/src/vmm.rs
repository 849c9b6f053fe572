//! Virtual memory management: handles of physical memory, reserved addresses, and mappings of the
//! one into the other.

use std::ffi::c_void;
use std::sync::Arc;

use crate::abi::{AccessDesc, AllocationProp, In, Location, Out, put_any, size};
use crate::backing::Backing;
use crate::call::{Rule, call};
use crate::export::give;
use crate::malloc::BLOCK;
use crate::memory::{Home, Kind};
use crate::status::{Answer, Status};
use crate::world::{Tag, World};

const POSIX_FD: u32 = 1;

/// Physical memory.
#[derive(Debug)]
pub(crate) struct Handle {
    prop: AllocationProp,
    backing: Arc<Backing>,
    /// References held by users: `cuMemCreate` and `cuMemRetainAllocationHandle`.
    held: u32,
    /// Mappings of it.
    mapped: u32,
}

impl Handle {
    pub(crate) fn is_held(&self) -> bool {
        self.held > 0
    }

    pub(crate) fn handle_types(&self) -> u32 {
        self.prop.handle_types
    }

    pub(crate) fn is_rdma_capable(&self) -> bool {
        self.prop.gpu_direct_rdma != 0
    }
}

impl World {
    pub(crate) fn unmap_handle(&mut self, id: u64) {
        if let Some(handle) = self.handles.get_mut(&id) {
            handle.mapped -= 1;
        }
        self.drop_if_unused(id);
    }

    fn drop_if_unused(&mut self, id: u64) {
        if self.handles.get(&id).is_some_and(|handle| handle.held == 0 && handle.mapped == 0) {
            self.handles.remove(&id);
        }
    }

    fn held(&mut self, id: u64) -> Answer<&mut Handle> {
        self.handles.get_mut(&id).filter(|handle| handle.held > 0).ok_or(Status::INVALID_VALUE)
    }

    /// The reservation that holds all of a range.
    pub(crate) fn reservation(&self, addr: usize, len: usize) -> Option<(usize, usize)> {
        let (&start, &reserved) = self.reservations.range(..=addr).next_back()?;
        (addr.checked_add(len)? <= start + reserved).then_some((start, reserved))
    }

    /// The starts of the VMM mappings that lie in a range; none may stick out.
    fn mappings(&self, addr: usize, len: usize) -> Answer<Vec<usize>> {
        let inside: Vec<_> = self
            .memory
            .values()
            .filter(|entry| entry.start < addr + len && entry.start + entry.len > addr)
            .collect();
        let whole = inside.iter().all(|entry| {
            matches!(entry.kind, Kind::Vmm(_)) && entry.start >= addr && entry.start + entry.len <= addr + len
        });
        if whole && inside.iter().map(|entry| entry.len).sum::<usize>() == len {
            Ok(inside.iter().map(|entry| entry.start).collect())
        } else {
            Err(Status::INVALID_VALUE)
        }
    }
}

fn in_blocks(len: usize) -> Answer {
    if len > 0 && len.is_multiple_of(BLOCK) { Ok(()) } else { Err(Status::INVALID_VALUE) }
}

fn check(prop: &AllocationProp, devices: i32) -> Answer {
    if prop.kind != 1 || prop.location.kind != Location::DEVICE || !(0..devices).contains(&prop.location.id) {
        return Err(Status::INVALID_VALUE);
    }
    if prop.handle_types & !POSIX_FD != 0 { Err(Status::NOT_SUPPORTED) } else { Ok(()) }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAllocationGranularity(
    out: Out<usize>,
    prop: In<AllocationProp>,
    _option: u32,
) -> Status {
    call("cuMemGetAllocationGranularity", Rule::Free, |call| {
        check(&prop.take()?, call.knobs.devices)?;
        out.put(BLOCK)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemCreate(handle: Out<u64>, len: usize, prop: In<AllocationProp>, flags: u64) -> Status {
    call("cuMemCreate", Rule::Uncaptured, |call| {
        let prop = prop.take()?;
        check(&prop, call.knobs.devices)?;
        in_blocks(len)?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let backing = Arc::new(Backing::new(len)?);
        let id = call.handle(Tag::Handle);
        call.handles.insert(id, Handle { prop, backing, held: 1, mapped: 0 });
        handle.put(id)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: u64) -> Status {
    call("cuMemRelease", Rule::Uncaptured, |call| {
        call.held(handle)?.held -= 1;
        call.drop_if_unused(handle);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressReserve(
    pointer: Out<u64>,
    len: usize,
    align: usize,
    _hint: u64,
    flags: u64,
) -> Status {
    call("cuMemAddressReserve", Rule::Uncaptured, |call| {
        in_blocks(len)?;
        if flags != 0 || (align != 0 && !align.is_power_of_two()) {
            return Err(Status::INVALID_VALUE);
        }
        let start = call.addresses.take(len, align.max(BLOCK)).ok_or(Status::OUT_OF_MEMORY)?;
        call.reservations.insert(start, len);
        pointer.put(start as u64)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(pointer: u64, len: usize) -> Status {
    call("cuMemAddressFree", Rule::Uncaptured, |call| {
        let start = size(pointer)?;
        if call.reservations.get(&start) != Some(&len) {
            return Err(Status::INVALID_VALUE);
        }
        if call.memory.range(start..start + len).next().is_some() {
            return Err(Status::INVALID_VALUE);
        }
        call.reservations.remove(&start);
        call.addresses.give_back(start, len);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(pointer: u64, len: usize, offset: usize, handle: u64, flags: u64) -> Status {
    call("cuMemMap", Rule::Uncaptured, |call| {
        let start = size(pointer)?;
        in_blocks(len)?;
        call.reservation(start, len).ok_or(Status::INVALID_VALUE)?;
        let taken =
            call.memory.values().any(|entry| entry.start < start + len && entry.start + entry.len > start);
        let physical = call.held(handle)?;
        if taken || offset != 0 || flags != 0 || len > physical.backing.len() || !start.is_multiple_of(BLOCK)
        {
            return Err(Status::INVALID_VALUE);
        }
        physical.mapped += 1;
        let (backing, device) = (Arc::clone(&physical.backing), physical.prop.location.id);
        call.add_memory(start, len, Kind::Vmm(handle), None, device, Some(backing), 0, Home::Reservation);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(pointer: u64, len: usize) -> Status {
    call("cuMemUnmap", Rule::Uncaptured, |call| {
        for start in call.mappings(size(pointer)?, len)? {
            call.take_out(start);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemSetAccess(pointer: u64, len: usize, access: In<AccessDesc>, count: usize) -> Status {
    call("cuMemSetAccess", Rule::Uncaptured, |call| {
        let starts = call.mappings(size(pointer)?, len)?;
        for wanted in access.many(count)? {
            // A driver of the 580 series does not let the host in either.
            if wanted.location.kind != Location::DEVICE {
                return Err(Status::NOT_SUPPORTED);
            }
            for start in &starts {
                if let Some(entry) = call.memory.get_mut(start) {
                    entry.open = wanted.flags != 0;
                }
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRetainAllocationHandle(out: Out<u64>, addr: u64) -> Status {
    call("cuMemRetainAllocationHandle", Rule::Free, |call| {
        let found = call.entry(size(addr)?).map(|entry| entry.kind);
        let Some(Kind::Vmm(id)) = found else { return Err(Status::INVALID_VALUE) };
        // A mapping keeps its handle alive, also where its creator has released it.
        call.handles.get_mut(&id).ok_or(Status::INVALID_VALUE)?.held += 1;
        out.put(id)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAllocationPropertiesFromHandle(prop: Out<AllocationProp>, handle: u64) -> Status {
    call("cuMemGetAllocationPropertiesFromHandle", Rule::Free, |call| prop.put(call.held(handle)?.prop))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemExportToShareableHandle(out: *mut c_void, handle: u64, kind: u32, flags: u64) -> Status {
    call("cuMemExportToShareableHandle", Rule::Free, |call| {
        let physical = call.held(handle)?;
        if kind != POSIX_FD || flags != 0 || physical.prop.handle_types & kind == 0 || out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let (backing, len) = (Arc::clone(&physical.backing), physical.backing.len());
        let file = backing.export(0, len, false)?;
        put_any(out, give(call, file))
    })
}
