//! Host memory that CUDA knows: pinned, registered, managed.

use std::sync::Arc;

use crate::abi::{Out, size};
use crate::backing::{Backing, PAGE};
use crate::call::{Call, Rule, call};
use crate::malloc::start_of;
use crate::memory::{Home, Kind};
use crate::status::{Answer, Status};

fn allocate(call: &mut Call, len: usize, kind: Kind) -> Answer<usize> {
    if len == 0 {
        return Err(Status::INVALID_VALUE);
    }
    let backing = Arc::new(Backing::new(len)?);
    let start = backing.addr();
    let (context, device) = (call.context(), call.device());
    call.add_memory(start, len, kind, Some(context), device, Some(backing), 0, Home::Host);
    Ok(start)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostAlloc(pointer: Out<usize>, len: usize, _flags: u32) -> Status {
    call("cuMemHostAlloc", Rule::ContextUncaptured, |call| {
        let start = allocate(call, len, Kind::Pinned)?;
        pointer.put(start)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(pointer: u64) -> Status {
    call("cuMemFreeHost", Rule::ContextUncaptured, |call| {
        start_of(call, pointer, &[Kind::Pinned])?;
        call.synchronise();
        let start = start_of(call, pointer, &[Kind::Pinned])?;
        call.take_out(start);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocManaged(pointer: Out<u64>, len: usize, flags: u32) -> Status {
    call("cuMemAllocManaged", Rule::ContextUncaptured, |call| {
        if !matches!(flags, 1 | 2) {
            return Err(Status::INVALID_VALUE);
        }
        let start = allocate(call, len, Kind::Managed)?;
        pointer.put(start as u64)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(pointer: u64, len: usize, _flags: u32) -> Status {
    call("cuMemHostRegister_v2", Rule::ContextUncaptured, |call| {
        let start = size(pointer)?;
        if len == 0 || start == 0 {
            return Err(Status::INVALID_VALUE);
        }
        // Pages are registered, not bytes.
        let (first, end) = (start / PAGE * PAGE, (start + len).next_multiple_of(PAGE));
        if call.memory.values().any(|entry| entry.start < end && entry.start + entry.len > first) {
            return Err(Status::ALREADY_REGISTERED);
        }
        let (context, device) = (call.context(), call.device());
        call.add_memory(start, len, Kind::Registered, Some(context), device, None, 0, Home::Host);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(pointer: u64) -> Status {
    call("cuMemHostUnregister", Rule::ContextUncaptured, |call| {
        start_of(call, pointer, &[Kind::Registered]).map_err(|_| Status::NOT_REGISTERED)?;
        call.synchronise();
        let start = start_of(call, pointer, &[Kind::Registered]).map_err(|_| Status::NOT_REGISTERED)?;
        call.take_out(start);
        Ok(())
    })
}
