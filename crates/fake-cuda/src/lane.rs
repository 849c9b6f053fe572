//! The work queue behind a stream: a thread that runs its items in order, asynchronously.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::event::Event;
use crate::memory::{Piece, Place};
use crate::spoil::{self, Fate};
use crate::world;

/// A kernel spins on the default stream.
static SPINNING: AtomicBool = AtomicBool::new(false);

/// Delay of each copy.
static DELAY_US: AtomicU64 = AtomicU64::new(5);

pub(crate) fn set_spinning(on: bool) {
    SPINNING.store(on, Ordering::SeqCst);
}

pub(crate) fn is_spinning() -> bool {
    SPINNING.load(Ordering::SeqCst)
}

/// All streams share a queue.
static FEW_QUEUES: AtomicBool = AtomicBool::new(false);

pub(crate) fn set_few_queues(on: bool) {
    FEW_QUEUES.store(on, Ordering::SeqCst);
}

pub(crate) fn has_few_queues() -> bool {
    FEW_QUEUES.load(Ordering::SeqCst)
}

/// Calls that start copies wait.
static HELD: AtomicBool = AtomicBool::new(false);

pub(crate) fn set_held(on: bool) {
    HELD.store(on, Ordering::SeqCst);
}

pub(crate) fn is_held() -> bool {
    HELD.load(Ordering::SeqCst)
}

/// All calls wait.
static CALLS_HELD: AtomicBool = AtomicBool::new(false);

pub(crate) fn set_calls_held(on: bool) {
    CALLS_HELD.store(on, Ordering::SeqCst);
}

pub(crate) fn are_calls_held() -> bool {
    CALLS_HELD.load(Ordering::SeqCst)
}

pub(crate) fn set_delay_us(delay: u64) {
    DELAY_US.store(delay, Ordering::SeqCst);
}

/// One work item.
#[derive(Debug)]
pub(crate) enum Work {
    /// Device memory to pinned host memory.
    Read {
        from: Vec<Piece>,
        to: Place,
    },
    /// Device memory to rows of pinned host memory.
    ReadRows(Vec<(Vec<Piece>, Place)>),
    /// Pinned host memory to device memory.
    Write {
        from: Place,
        to: Vec<Piece>,
    },
    /// Bytes taken from pageable memory when the copy was submitted.
    WriteBytes {
        from: Vec<u8>,
        to: Vec<Piece>,
    },
    Fill {
        value: u8,
        to: Vec<Piece>,
    },
    /// A word of pinned host memory.
    Word {
        to: Place,
        value: u32,
    },
    /// The event is over when all before it is.
    Record(Arc<Event>, u64),
    /// Later items wait for the event.
    Wait(Arc<Event>, u64),
    /// Pool memory.
    Free(usize),
}

/// A stream's queue and its thread.
#[derive(Debug)]
pub(crate) struct Lane {
    /// Waits for the default stream, as streams made without NON_BLOCKING do.
    pub(crate) blocking: bool,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    work: VecDeque<Work>,
    busy: bool,
    closed: bool,
}

impl Lane {
    pub(crate) fn start(blocking: bool) -> Arc<Self> {
        let lane = Arc::new(Self { blocking, queue: Mutex::default(), changed: Condvar::new() });
        let mine = Arc::clone(&lane);
        // Without the thread no work would ever run: a test that cannot start one must fail.
        thread::Builder::new().name("stand-in-gpu".to_owned()).spawn(move || mine.run()).expect("a thread");
        lane
    }

    pub(crate) fn push(&self, work: Work) {
        self.lock().work.push_back(work);
        self.changed.notify_all();
    }

    /// True where all submitted work is done.
    pub(crate) fn is_idle(&self) -> bool {
        let queue = self.lock();
        queue.work.is_empty() && !queue.busy
    }

    /// Ends when the queue is empty.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Ends now: what is left is never done.
    pub(crate) fn abandon(&self) {
        self.lock().work.clear();
        self.close();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        while let Some(work) = self.next() {
            while self.blocking && is_spinning() && !self.lock().closed {
                thread::sleep(Duration::from_micros(100));
            }
            do_now(work);
            self.lock().busy = false;
        }
    }

    fn next(&self) -> Option<Work> {
        let mut queue = self.lock();
        loop {
            if let Some(work) = queue.work.pop_front() {
                queue.busy = true;
                return Some(work);
            }
            if queue.closed {
                return None;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn read(from: &[Piece], to: &Place) {
    let mut done = 0;
    for piece in from {
        copy(&piece.place, &to.later(done), piece.len);
        done += piece.len;
    }
}

fn write(from: &Place, to: &[Piece]) {
    let len = to.iter().map(|piece| piece.len).sum();
    let fate = spoil::fate(from, len);
    if fate == Fate::Lost {
        return;
    }
    let (mut done, middle) = (0, len / 2);
    for piece in to {
        copy(&from.later(done), &piece.place, piece.len);
        if fate == Fate::Flipped && (done..done + piece.len).contains(&middle) {
            let (mut byte, there) = (0, piece.place.later(middle - done));
            there.read(&raw mut byte, 1);
            byte = !byte;
            there.write(&raw const byte, 1);
        }
        done += piece.len;
    }
}

fn do_now(work: Work) {
    match work {
        Work::Read { from, to } => {
            delay();
            read(&from, &to);
        }
        Work::ReadRows(rows) => {
            delay();
            rows.iter().for_each(|(from, to)| read(from, to));
        }
        Work::Write { from, to } => {
            delay();
            write(&from, &to);
        }
        Work::WriteBytes { from, to } => {
            delay();
            let mut rest = &from[..];
            for piece in &to {
                let (here, later) = rest.split_at(piece.len);
                piece.place.write(here.as_ptr(), here.len());
                rest = later;
            }
        }
        Work::Fill { value, to } => {
            delay();
            for piece in &to {
                fill(&piece.place, value, piece.len);
            }
        }
        Work::Word { to, value } => to.write((&raw const value).cast(), size_of::<u32>()),
        Work::Record(event, turn) => event.finish(turn),
        Work::Wait(event, turn) => {
            while !event.is_past(turn) {
                thread::sleep(Duration::from_micros(20));
            }
        }
        Work::Free(start) => world::lock().free_pool(start),
    }
}

/// Copies through a small buffer of our own, so that two locks are never held at once.
fn copy(from: &Place, to: &Place, len: usize) {
    let mut buffer = vec![0; len.min(1 << 20)];
    let mut done = 0;
    while done < len {
        let here = buffer.len().min(len - done);
        from.later(done).read(buffer.as_mut_ptr(), here);
        to.later(done).write(buffer.as_ptr(), here);
        done += here;
    }
}

fn fill(place: &Place, value: u8, len: usize) {
    let buffer = vec![value; len];
    place.write(buffer.as_ptr(), len);
}

fn delay() {
    let delay = Duration::from_micros(DELAY_US.load(Ordering::SeqCst));
    // A sleep takes some 60 us longer than requested, which would hide a short delay.
    if delay >= Duration::from_micros(100) {
        thread::sleep(delay);
        return;
    }
    let start = Instant::now();
    while start.elapsed() < delay {
        thread::yield_now();
    }
}
