//! Pointer attributes.

use std::ffi::c_void;

use crate::abi::{In, Out, put_any, size};
use crate::call::{Rule, call};
use crate::memory::{Entry, Kind};
use crate::status::{Answer, Status};
use crate::world::World;

/// A value of an attribute, in the width that CUDA writes.
enum Value {
    Word(u32),
    Long(u64),
}

impl Value {
    fn put(self, room: *mut c_void) -> Answer {
        match self {
            Self::Word(word) => put_any(room, word),
            Self::Long(long) => put_any(room, long),
        }
    }

    fn zeroed(self) -> Self {
        match self {
            Self::Word(_) => Self::Word(0),
            Self::Long(_) => Self::Long(0),
        }
    }
}

const HOST: u32 = 1;
const DEVICE: u32 = 2;

fn attribute(world: &World, entry: &Entry, addr: u64, number: u32) -> Answer<Value> {
    let handle = match entry.kind {
        Kind::Vmm(handle) => world.handles.get(&handle),
        _ => None,
    };
    let whole = world
        .reservation(entry.start, entry.len)
        .filter(|_| handle.is_some())
        .unwrap_or((entry.start, entry.len));
    Ok(match number {
        1 => Value::Long(entry.context.unwrap_or(0)),
        2 => Value::Word(if matches!(entry.kind, Kind::Pinned | Kind::Registered) { HOST } else { DEVICE }),
        3 => Value::Long(addr),
        4 if entry.is_host() => Value::Long(addr),
        4 => return Err(Status::INVALID_VALUE),
        // SYNC_MEMOPS.
        6 => Value::Word(0),
        7 => Value::Long(entry.id),
        8 => Value::Word(u32::from(entry.kind == Kind::Managed)),
        9 => Value::Word(u32::try_from(entry.device).unwrap_or(0)),
        // Legacy IPC.
        10 => Value::Word(u32::from(entry.kind == Kind::Malloc)),
        // The reservation of VMM memory, the allocation else.
        11 => Value::Long(whole.0 as u64),
        12 => Value::Long(whole.1 as u64),
        13 => Value::Word(1),
        14 => Value::Long(handle.map_or(0, |handle| u64::from(handle.handle_types()))),
        15 => Value::Word(match entry.kind {
            Kind::Vmm(_) => u32::from(handle.is_some_and(|handle| handle.is_rdma_capable())),
            _ => u32::from(!entry.is_host()),
        }),
        16 => Value::Word(if entry.open { 3 } else { 0 }),
        // The pool: any number that is not null.
        17 => Value::Long(if entry.kind == Kind::Pool { 0x5600_0000_0000_0100 } else { 0 }),
        18 => Value::Long(entry.len as u64),
        19 => Value::Long(entry.start as u64),
        20 => Value::Long(entry.id),
        _ => return Err(Status::INVALID_VALUE),
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuPointerGetAttribute(room: *mut c_void, number: u32, pointer: u64) -> Status {
    call("cuPointerGetAttribute", Rule::Free, |call| {
        let entry = call.entry(size(pointer)?).ok_or(Status::INVALID_VALUE)?;
        attribute(call, entry, pointer, number)?.put(room)
    })
}

/// As CUDA's: an unknown pointer, or an attribute that does not apply, is no error here; the values
/// are zero.
#[unsafe(no_mangle)]
extern "C" fn cuPointerGetAttributes(
    count: u32,
    numbers: In<u32>,
    rooms: In<*mut c_void>,
    pointer: u64,
) -> Status {
    call("cuPointerGetAttributes", Rule::Free, |call| {
        let count = usize::try_from(count).map_err(|_| Status::INVALID_VALUE)?;
        let found = call.entry(size(pointer)?);
        for (number, room) in numbers.many(count)?.into_iter().zip(rooms.many(count)?) {
            match found {
                Some(entry) => match attribute(call, entry, pointer, number) {
                    Ok(value) => value.put(room)?,
                    Err(_) => Value::Long(0).put(room)?,
                },
                None => width(number)?.zeroed().put(room)?,
            }
        }
        Ok(())
    })
}

/// Width of an attribute.
fn width(number: u32) -> Answer<Value> {
    match number {
        2 | 6 | 8 | 9 | 10 | 13 | 15 | 16 => Ok(Value::Word(0)),
        1 | 3 | 4 | 7 | 11 | 12 | 14 | 17..=20 => Ok(Value::Long(0)),
        _ => Err(Status::INVALID_VALUE),
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAddressRange_v2(base: Out<u64>, len: Out<usize>, pointer: u64) -> Status {
    call("cuMemGetAddressRange_v2", Rule::Context, |call| {
        let entry = call.entry(size(pointer)?).ok_or(Status::INVALID_VALUE)?;
        base.put_if_wanted(entry.start as u64);
        len.put_if_wanted(entry.len);
        Ok(())
    })
}
