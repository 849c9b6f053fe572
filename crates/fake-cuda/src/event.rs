//! Events: the progress of a stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::abi::Out;
use crate::call::{Call, Rule, call};
use crate::lane::Work;
use crate::status::{Answer, Status};
use crate::world::Tag;

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) context: u64,
    /// How often it was recorded, and which record its stream has passed.
    recorded: AtomicU64,
    passed: AtomicU64,
    /// It was last recorded into a capture: it cannot be queried.
    captured: AtomicBool,
}

impl Event {
    pub(crate) fn finish(&self, turn: u64) {
        self.passed.fetch_max(turn, Ordering::SeqCst);
    }

    pub(crate) fn is_past(&self, turn: u64) -> bool {
        self.passed.load(Ordering::SeqCst) >= turn
    }
}

fn find(call: &Call, event: u64) -> Answer<Arc<Event>> {
    call.events.get(&event).cloned().ok_or_else(|| call.missing(event))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventCreate(event: Out<u64>, _flags: u32) -> Status {
    call("cuEventCreate", Rule::ContextUncaptured, |call| {
        let context = call.context();
        let made = call.handle(Tag::Event);
        let fresh = Event {
            context,
            recorded: AtomicU64::new(0),
            passed: AtomicU64::new(0),
            captured: AtomicBool::new(false),
        };
        call.events.insert(made, Arc::new(fresh));
        event.put(made)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: u64) -> Status {
    call("cuEventDestroy_v2", Rule::ContextUncaptured, |call| {
        find(call, event)?;
        call.events.remove(&event);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: u64, stream: u64) -> Status {
    call("cuEventRecord", Rule::Context, |call| {
        let event = find(call, event)?;
        if call.is_captured(stream)? {
            event.captured.store(true, Ordering::SeqCst);
            return Ok(());
        }
        let lane = call.lane(stream)?;
        event.captured.store(false, Ordering::SeqCst);
        let turn = event.recorded.fetch_add(1, Ordering::SeqCst) + 1;
        lane.push(Work::Record(event, turn));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: u64) -> Status {
    call("cuEventQuery", Rule::ContextUncaptured, |call| {
        let event = find(call, event)?;
        if event.captured.load(Ordering::SeqCst) {
            return Err(Status::CAPTURED_EVENT);
        }
        if event.is_past(event.recorded.load(Ordering::SeqCst)) { Ok(()) } else { Err(Status::NOT_READY) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, _flags: u32) -> Status {
    call("cuStreamWaitEvent", Rule::Context, |call| {
        let event = find(call, event)?;
        if call.is_captured(stream)? {
            return Ok(());
        }
        let turn = event.recorded.load(Ordering::SeqCst);
        call.lane(stream)?.push(Work::Wait(event, turn));
        Ok(())
    })
}
