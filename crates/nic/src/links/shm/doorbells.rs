//! Doorbells: which writers must wake us.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::links::Doorbells;
use crate::links::rings::ring::RingMemory;
use crate::process::eventfd::EventFd;

/// The rings of all writers, each with a wake-up request.
#[derive(Debug)]
pub(super) struct ShmDoorbells {
    state: Mutex<Asleep>,
    /// Signalled for packets that arrived before the wake-up request.
    wake: EventFd,
}

#[derive(Debug, Default)]
struct Asleep {
    rings: Vec<Arc<RingMemory>>,
    /// Number of sleeping threads: the engine thread, and callers that poll.
    sleepers: usize,
}

impl Doorbells for ShmDoorbells {
    /// One more thread goes to sleep, until it disarms: requests wake-ups.
    fn arm(&self) -> bool {
        let mut asleep = self.lock();
        asleep.sleepers += 1;
        ask_all(&asleep.rings)
    }

    /// The thread is awake. The last one to wake withdraws the requests.
    fn disarm(&self) {
        let mut asleep = self.lock();
        asleep.sleepers -= 1;
        if asleep.sleepers == 0 {
            asleep.rings.iter().for_each(|ring| ring.need_not_be_woken());
        }
    }
}

impl ShmDoorbells {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { state: Mutex::default(), wake: EventFd::new()? })
    }

    fn lock(&self) -> MutexGuard<'_, Asleep> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the set of rings. A ring that was added while a thread sleeps must wake it, too.
    pub(super) fn set(&self, rings: Vec<Arc<RingMemory>>) {
        self.lock().rings = rings;
        self.renew();
    }

    /// Renews the wake-up requests: a thread consumed a doorbell while another one that needs it
    /// may still sleep.
    pub(super) fn renew(&self) {
        let asleep = self.lock();
        if asleep.sleepers > 0 && ask_all(&asleep.rings) {
            self.wake.raise();
        }
    }

    /// Readable when packets had arrived before the request.
    pub(super) fn wake_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// Clears that signal.
    pub(super) fn heard(&self) {
        self.wake.take();
    }
}

/// Requests a wake-up on every ring, without short-circuiting.
fn ask_all(rings: &[Arc<RingMemory>]) -> bool {
    rings.iter().fold(false, |found, ring| ring.ask_to_be_woken() | found)
}
