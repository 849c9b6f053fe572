//! Streams.

use std::sync::Arc;

use crate::abi::{Out, size};
use crate::call::{Call, Rule, call};
use crate::lane::{Lane, Work, has_few_queues, is_spinning};
use crate::status::{Answer, Status};
use crate::world::{Tag, World};

const NON_BLOCKING: u32 = 1;

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) context: u64,
    pub(crate) lane: Arc<Lane>,
}

impl World {
    /// A stream that the program created.
    pub(crate) fn stream(&self, handle: u64) -> Answer<&Stream> {
        self.streams.get(&handle).ok_or_else(|| self.missing(handle))
    }

    /// Streams that the program created, without the default ones.
    pub(crate) fn streams_made(&self) -> usize {
        self.streams.keys().filter(|&&handle| !is_default(handle)).count()
    }
}

/// The default stream of a context is kept under the context's own handle.
fn is_default(handle: u64) -> bool {
    handle >> 56 == Tag::Context as u64
}

impl Call {
    /// The handle under which a stream is kept: 0, 1 and 2 are names of the default stream.
    fn stream_key(&mut self, stream: u64) -> u64 {
        if stream > 2 {
            return stream;
        }
        let context = self.context();
        self.streams.entry(context).or_insert_with(|| Stream { context, lane: Lane::start(true) });
        context
    }

    /// Where work on a stream goes.
    pub(crate) fn lane(&mut self, stream: u64) -> Answer<Arc<Lane>> {
        let key = self.stream_key(stream);
        if is_default(key) {
            self.forbid_default_stream()?;
        }
        let lane = Arc::clone(&self.stream(key)?.lane);
        Ok(lane)
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamCreate(stream: Out<u64>, flags: u32) -> Status {
    call("cuStreamCreate", Rule::ContextUncaptured, |call| {
        if flags & !NON_BLOCKING != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let context = call.context();
        let made = call.handle(Tag::Stream);
        // Where there is one queue, whatever waits for the default stream stands in front of it.
        let blocking = flags & NON_BLOCKING == 0 || has_few_queues();
        call.streams.insert(made, Stream { context, lane: Lane::start(blocking) });
        stream.put(made)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: u64) -> Status {
    call("cuStreamDestroy_v2", Rule::ContextUncaptured, |call| {
        call.stream(stream)?;
        // It returns at once; submitted work still completes.
        if let Some(gone) = call.streams.remove(&stream) {
            gone.lane.close();
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(stream: u64) -> Status {
    call("cuStreamQuery", Rule::ContextUncaptured, |call| {
        call.break_capture_of(stream)?;
        let lane = call.lane(stream)?;
        let idle = lane.is_idle() && !(stream <= 2 && is_spinning());
        if idle { Ok(()) } else { Err(Status::NOT_READY) }
    })
}

/// Into pinned host memory; no caller uses another destination.
#[unsafe(no_mangle)]
extern "C" fn cuStreamWriteValue32_v2(stream: u64, pointer: u64, value: u32, _flags: u32) -> Status {
    call("cuStreamWriteValue32_v2", Rule::Context, |call| {
        let to = call.pinned(size(pointer)?, size_of::<u32>()).ok_or(Status::INVALID_VALUE)?;
        if call.is_captured(stream)? {
            return Ok(());
        }
        call.lane(stream)?.push(Work::Word { to, value });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: u64) -> Status {
    call("cuStreamSynchronize", Rule::ContextUncaptured, |call| {
        call.break_capture_of(stream)?;
        let lane = call.lane(stream)?;
        call.block_until(|_| lane.is_idle() && !(stream <= 2 && is_spinning()));
        Ok(())
    })
}
