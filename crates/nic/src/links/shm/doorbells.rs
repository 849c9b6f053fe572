//! Whom those who write to us must wake.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::ring::Memory;
use crate::process::eventfd::EventFd;

/// Those who write to us, to be told whether to wake us.
#[derive(Debug)]
pub struct Doorbells {
    state: Mutex<Asleep>,
    /// For packets that were there before their writer could be told.
    wake: EventFd,
}

#[derive(Debug, Default)]
struct Asleep {
    rings: Vec<Arc<Memory>>,
    /// How many threads sleep: the engine's own, and callers that poll.
    sleepers: usize,
}

impl Doorbells {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { state: Mutex::default(), wake: EventFd::new()? })
    }

    fn lock(&self) -> MutexGuard<'_, Asleep> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more thread sleeps, until it disarms: asks to be woken by packets; whether there are some already.
    pub(crate) fn arm(&self) -> bool {
        let mut asleep = self.lock();
        asleep.sleepers += 1;
        ask_all(&asleep.rings)
    }

    /// The thread is awake. The last one needs no wake-ups any more.
    pub(crate) fn disarm(&self) {
        let mut asleep = self.lock();
        asleep.sleepers -= 1;
        if asleep.sleepers == 0 {
            asleep.rings.iter().for_each(|ring| ring.need_not_be_woken());
        }
    }

    /// From now on these write to us. Whoever came while we sleep must wake us, too.
    pub(super) fn set(&self, rings: Vec<Arc<Memory>>) {
        self.lock().rings = rings;
        self.renew();
    }

    /// A bell was heard that somebody else may have been meant to hear, who sleeps on: those who write must ring again.
    pub(super) fn renew(&self) {
        let asleep = self.lock();
        if asleep.sleepers > 0 && ask_all(&asleep.rings) {
            self.wake.raise();
        }
    }

    /// Readable when there were packets already.
    pub(super) fn wake_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// That was heard.
    pub(super) fn heard(&self) {
        self.wake.take();
    }
}

/// Asks all of them, whatever the first ones say.
fn ask_all(rings: &[Arc<Memory>]) -> bool {
    rings.iter().fold(false, |found, ring| ring.ask_to_be_woken() | found)
}
