//! Contexts: one primary per device, others on request, and a stack of them on each thread.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use crate::abi::Out;
use crate::call::{Rule, call};
use crate::memory::{Entry, Home, Kind};
use crate::status::{Answer, Status};
use crate::world::{Tag, World};

thread_local! {
    static STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

#[derive(Debug)]
pub(crate) struct Contexts {
    live: BTreeMap<u64, Live>,
    /// The handle of each device's primary context, which stays the same for the life of the
    /// process.
    primary: BTreeMap<i32, u64>,
    dead: BTreeSet<u64>,
}

#[derive(Debug)]
struct Live {
    device: i32,
    retained: u32,
    /// Differs from that of every other context, also of an earlier one with the same handle.
    identity: u64,
}

impl Contexts {
    pub(crate) const fn new() -> Self {
        Self { live: BTreeMap::new(), primary: BTreeMap::new(), dead: BTreeSet::new() }
    }

    pub(crate) fn device_of(&self, context: u64) -> Option<i32> {
        self.live.get(&context).map(|live| live.device)
    }

    pub(crate) fn count(&self) -> usize {
        self.live.len()
    }

    fn is_dead(&self, context: u64) -> bool {
        self.dead.contains(&context)
    }

    /// `Ok` where the context is alive, else the error that names its state.
    fn check(&self, context: u64) -> Answer {
        if self.live.contains_key(&context) {
            Ok(())
        } else if self.dead.contains(&context) {
            Err(Status::CONTEXT_IS_DESTROYED)
        } else {
            Err(Status::INVALID_CONTEXT)
        }
    }
}

/// The context on top of this thread's stack, if it is alive.
pub(crate) fn current(world: &World) -> Answer<u64> {
    let top = STACK.with_borrow(|stack| stack.last().copied()).filter(|&context| context != 0);
    let context = top.ok_or(Status::INVALID_CONTEXT)?;
    world.contexts.check(context).map(|()| context)
}

impl World {
    fn retain_primary(&mut self, device: i32) -> u64 {
        let context = match self.contexts.primary.get(&device) {
            Some(&context) => context,
            None => {
                let context = self.handle(Tag::Context);
                self.contexts.primary.insert(device, context);
                context
            }
        };
        self.contexts.dead.remove(&context);
        let identity = self.number();
        let live = self.contexts.live.entry(context).or_insert(Live { device, retained: 0, identity });
        live.retained += 1;
        context
    }

    fn release_primary(&mut self, device: i32) -> Answer {
        let context = *self.contexts.primary.get(&device).ok_or(Status::INVALID_CONTEXT)?;
        let live = self.contexts.live.get_mut(&context).ok_or(Status::INVALID_CONTEXT)?;
        live.retained -= 1;
        if live.retained == 0 {
            self.destroy_context(context);
        }
        Ok(())
    }

    /// Ends a context and what was made in it: streams, events, memory, pinned host memory too.
    fn destroy_context(&mut self, context: u64) {
        if self.contexts.live.remove(&context).is_none() {
            return;
        }
        self.contexts.dead.insert(context);
        let streams: Vec<u64> =
            self.streams.iter().filter(|(_, stream)| stream.context == context).map(|(&id, _)| id).collect();
        for id in streams {
            if let Some(stream) = self.streams.remove(&id) {
                stream.lane.abandon();
            }
            self.lost.insert(id);
            self.captures.retain(|capture| capture.stream != id);
        }
        let events: Vec<u64> =
            self.events.iter().filter(|(_, event)| event.context == context).map(|(&id, _)| id).collect();
        for id in events {
            self.events.remove(&id);
            self.lost.insert(id);
        }
        let memory: Vec<usize> = self
            .memory
            .values()
            .filter(|entry| entry.context == Some(context))
            .map(|entry| entry.start)
            .collect();
        for start in memory {
            self.lose(start);
        }
    }

    /// Ends everything on a device, as `cudaDeviceReset` does.
    pub(crate) fn reset(&mut self, device: i32) {
        let contexts: Vec<u64> = self
            .contexts
            .live
            .iter()
            .filter(|(_, live)| live.device == device)
            .map(|(&context, _)| context)
            .collect();
        for context in contexts {
            self.destroy_context(context);
        }
        let survives = |entry: &Entry| self.knobs.vmm_survives && matches!(entry.kind, Kind::Vmm(_));
        let memory: Vec<usize> = self
            .memory
            .values()
            .filter(|entry| entry.device == device && !survives(entry))
            .map(|entry| entry.start)
            .collect();
        for start in memory {
            self.lose(start);
        }
    }

    /// Frees memory whose context was destroyed. Host memory becomes inaccessible, but its address
    /// is not reused.
    fn lose(&mut self, start: usize) {
        let Some(entry) = self.take_out(start) else { return };
        if matches!(entry.kind, Kind::Pinned | Kind::Managed)
            && let Home::Host = entry.home
            && let Some(backing) = entry.backing
        {
            backing.vanish();
            std::mem::forget(backing);
        }
    }

    fn device_exists(&self, device: i32) -> Answer {
        if (0..self.knobs.devices).contains(&device) { Ok(()) } else { Err(Status::INVALID_DEVICE) }
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRetain(context: Out<u64>, device: i32) -> Status {
    call("cuDevicePrimaryCtxRetain", Rule::Free, |call| {
        call.device_exists(device)?;
        let primary = call.retain_primary(device);
        context.put(primary)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: i32) -> Status {
    call("cuDevicePrimaryCtxRelease_v2", Rule::Free, |call| call.release_primary(device))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxReset_v2(device: i32) -> Status {
    call("cuDevicePrimaryCtxReset_v2", Rule::Free, |call| {
        call.device_exists(device)?;
        call.reset(device);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) -> Status {
    call("cuDevicePrimaryCtxGetState", Rule::Free, |call| {
        call.device_exists(device)?;
        let contexts = &call.contexts;
        let live = contexts.primary.get(&device).is_some_and(|context| contexts.live.contains_key(context));
        flags.put(0)?;
        active.put(i32::from(live))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxCreate_v2(context: Out<u64>, _flags: u32, device: i32) -> Status {
    call("cuCtxCreate_v2", Rule::Free, |call| {
        call.device_exists(device)?;
        let (made, identity) = (call.handle(Tag::Context), call.number());
        call.contexts.live.insert(made, Live { device, retained: 1, identity });
        STACK.with_borrow_mut(|stack| stack.push(made));
        context.put(made)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxDestroy_v2(context: u64) -> Status {
    call("cuCtxDestroy_v2", Rule::Free, |call| {
        call.contexts.check(context)?;
        call.destroy_context(context);
        STACK.with_borrow_mut(|stack| {
            if stack.last() == Some(&context) {
                stack.pop();
            }
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetCurrent(context: Out<u64>) -> Status {
    let top = STACK.with_borrow(|stack| stack.last().copied());
    call("cuCtxGetCurrent", Rule::Free, |_| context.put(top.unwrap_or(0)))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: u64) -> Status {
    call("cuCtxSetCurrent", Rule::Free, |call| {
        if context != 0 {
            call.contexts.check(context)?;
        }
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: u64) -> Status {
    call("cuCtxPushCurrent_v2", Rule::Free, |call| {
        if call.contexts.is_dead(context) {
            call.knobs.use_of_dead("the handle");
        }
        call.contexts.check(context)?;
        STACK.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPopCurrent_v2(context: Out<u64>) -> Status {
    call("cuCtxPopCurrent_v2", Rule::Free, |_| {
        let popped = STACK.with_borrow_mut(Vec::pop).ok_or(Status::INVALID_CONTEXT)?;
        context.put_if_wanted(popped);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetDevice(device: Out<i32>) -> Status {
    call("cuCtxGetDevice", Rule::Context, |call| device.put(call.device()))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetId(context: u64, identity: Out<u64>) -> Status {
    call("cuCtxGetId", Rule::Free, |call| {
        let context = if context == 0 { current(call)? } else { context };
        // The driver knows its primary contexts, alive or not.
        let is_primary = call.contexts.primary.values().any(|&primary| primary == context);
        if call.contexts.is_dead(context) && !is_primary {
            call.knobs.use_of_dead("the handle");
        }
        call.contexts.check(context)?;
        let found = call.contexts.live.get(&context).map(|live| live.identity);
        identity.put(found.ok_or(Status::INVALID_CONTEXT)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> Status {
    call("cuCtxSynchronize", Rule::ContextUncaptured, |call| {
        call.synchronise();
        Ok(())
    })
}
