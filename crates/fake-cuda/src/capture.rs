//! Stream captures, and the calls that are allowed during one.

use std::cell::Cell;
use std::thread::{self, ThreadId};

use crate::abi::{In, Out};
use crate::call::{Rule, call};
use crate::status::{Answer, Status};
use crate::world::{Tag, World};

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// An active capture on a stream.
#[derive(Debug)]
pub(crate) struct Capture {
    pub(crate) stream: u64,
    mode: u32,
    thread: ThreadId,
    /// The stream synchronises with the default stream.
    blocking: bool,
    broken: bool,
}

impl World {
    /// Refuses calls that are unsafe during a stream capture, and invalidates the captures they
    /// would disturb.
    ///
    /// A thread in GLOBAL mode, the default, respects its own captures and the GLOBAL captures of
    /// other threads. One in THREAD_LOCAL mode respects its own; one in RELAXED mode respects none.
    pub(crate) fn forbid_in_capture(&mut self) -> Answer {
        let mode = MODE.get();
        if mode == RELAXED {
            return Ok(());
        }
        let me = thread::current().id();
        let minded = |capture: &Capture| {
            capture.mode != RELAXED && (capture.thread == me || (mode == GLOBAL && capture.mode == GLOBAL))
        };
        self.break_captures(minded)
    }

    /// Refuses work on the default stream while a stream that waits for it is captured, whatever
    /// the thread's mode.
    pub(crate) fn forbid_default_stream(&mut self) -> Answer {
        self.break_captures(|capture| capture.blocking).map_err(|_| Status::CAPTURE_IMPLICIT)
    }

    fn break_captures(&mut self, minded: impl Fn(&Capture) -> bool) -> Answer {
        let mut answer = Ok(());
        for capture in self.captures.iter_mut().filter(|capture| minded(capture)) {
            answer =
                Err(if capture.broken { Status::CAPTURE_INVALIDATED } else { Status::CAPTURE_UNSUPPORTED });
            capture.broken = true;
        }
        answer
    }

    /// Whether work on this stream goes into a capture instead of being done.
    pub(crate) fn is_captured(&self, stream: u64) -> Answer<bool> {
        match self.captures.iter().find(|capture| capture.stream == stream) {
            None => Ok(false),
            Some(capture) if capture.broken => Err(Status::CAPTURE_INVALIDATED),
            Some(_) => Ok(true),
        }
    }

    /// Breaks the capture of one stream.
    pub(crate) fn break_capture_of(&mut self, stream: u64) -> Answer {
        self.break_captures(|capture| capture.stream == stream)
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuThreadExchangeStreamCaptureMode(mode: In<u32>) -> Status {
    call("cuThreadExchangeStreamCaptureMode", Rule::Free, |_| {
        let new = mode.take()?;
        if !matches!(new, GLOBAL | THREAD_LOCAL | RELAXED) {
            return Err(Status::INVALID_VALUE);
        }
        mode.put(MODE.replace(new))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(stream: u64, mode: u32) -> Status {
    call("cuStreamBeginCapture_v2", Rule::Context, |call| {
        if !matches!(mode, GLOBAL | THREAD_LOCAL | RELAXED) {
            return Err(Status::INVALID_VALUE);
        }
        if stream == 0 {
            return Err(Status::CAPTURE_UNSUPPORTED);
        }
        let blocking = call.stream(stream)?.lane.blocking;
        if call.captures.iter().any(|capture| capture.stream == stream) {
            return Err(Status::ILLEGAL_STATE);
        }
        call.captures.push(Capture { stream, mode, thread: thread::current().id(), blocking, broken: false });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamEndCapture(stream: u64, graph: Out<u64>) -> Status {
    call("cuStreamEndCapture", Rule::Context, |call| {
        graph.put(0)?;
        let at =
            call.captures.iter().position(|capture| capture.stream == stream).ok_or(Status::ILLEGAL_STATE)?;
        if call.captures[at].mode != RELAXED && call.captures[at].thread != thread::current().id() {
            return Err(Status::CAPTURE_WRONG_THREAD);
        }
        if call.captures.remove(at).broken {
            return Err(Status::CAPTURE_INVALIDATED);
        }
        let made = call.handle(Tag::Graph);
        graph.put(made)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphDestroy(_graph: u64) -> Status {
    call("cuGraphDestroy", Rule::Free, |_| Ok(()))
}
