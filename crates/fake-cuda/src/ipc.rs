//! IPC handles: `cuMemAlloc` memory of another process.

use std::fs::OpenOptions;
use std::process;
use std::sync::Arc;

use crate::abi::{IpcHandle, Out, size};
use crate::backing::Backing;
use crate::call::{Rule, call};
use crate::malloc::{BLOCK, start_of};
use crate::memory::{Home, Kind};
use crate::status::Status;

/// Marks a handle as ours.
const MARK: u32 = 0x57A4_D114;

/// The words of an IPC handle, laid out as those of driver 580 where it matters: size, pages of the
/// block, offset in the block, and two numbers that identify the owner. There these are a resource
/// manager client and object, here a process and its file.
#[unsafe(no_mangle)]
extern "C" fn cuIpcGetMemHandle(handle: Out<IpcHandle>, pointer: u64) -> Status {
    call("cuIpcGetMemHandle", Rule::Context, |call| {
        let entry = call.entry(size(pointer)?).ok_or(Status::INVALID_VALUE)?;
        // Pool, VMM, managed, imported and host memory: a real driver refuses them all.
        if entry.kind != Kind::Malloc {
            return Err(Status::INVALID_VALUE);
        }
        let backing = entry.backing.as_ref().ok_or(Status::INVALID_VALUE)?;
        let word = |value: usize| u32::try_from(value).map_err(|_| Status::INVALID_VALUE);
        let mut words = [0; 16];
        words[0] = MARK;
        words[4] = word(entry.len & 0xFFFF_FFFF)?;
        words[5] = word(entry.len >> 32)?;
        words[6] = word(backing.len() / 4096)?;
        words[7] = word(entry.offset)?;
        words[12] = process::id();
        words[13] = u32::try_from(backing.share_whole()?).map_err(|_| Status::INVALID_VALUE)?;
        handle.put(IpcHandle(words))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcOpenMemHandle_v2(pointer: Out<u64>, handle: IpcHandle, _flags: u32) -> Status {
    call("cuIpcOpenMemHandle_v2", Rule::ContextUncaptured, |call| {
        let words = handle.0;
        if words[0] != MARK {
            return Err(Status::INVALID_VALUE);
        }
        // A process cannot import its own memory, unless a test enables it.
        if words[12] == process::id() && !call.knobs.self_import {
            return Err(Status::INVALID_CONTEXT);
        }
        let path = format!("/proc/{}/fd/{}", words[12], words[13]);
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|_| Status::INVALID_VALUE)?;
        let len = size(u64::from(words[4]) | u64::from(words[5]) << 32)?;
        let offset = size(u64::from(words[7]))?;
        let whole = size(u64::from(words[6]) * 4096)?;
        let room = whole.next_multiple_of(BLOCK);
        let backing = Arc::new(Backing::imported(file, whole)?);
        let base = call.addresses.take(room, BLOCK).ok_or(Status::OUT_OF_MEMORY)?;
        let (context, device) = (call.context(), call.device());
        let home = Home::Block(base, room);
        call.add_memory(base + offset, len, Kind::Ipc, Some(context), device, Some(backing), offset, home);
        pointer.put((base + offset) as u64)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcCloseMemHandle(pointer: u64) -> Status {
    call("cuIpcCloseMemHandle", Rule::ContextUncaptured, |call| {
        let start = start_of(call, pointer, &[Kind::Ipc])?;
        call.synchronise();
        call.take_out(start);
        Ok(())
    })
}
