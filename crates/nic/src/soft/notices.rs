//! A queue of notices with a descriptor that counts them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use super::eventfd::EventFd;
use super::fork;
use super::sync::{Mutex, PoisonError};

/// What happened, in order, and a descriptor that counts it: each reading stands for one notice.
///
/// A caller either takes a notice ([`next`](Self::next)), which never blocks; or it reads 8 bytes from the descriptor itself,
/// blocking or not as that is set, and then claims what it read for ([`claim`](Self::claim)). Nothing is there to claim if the
/// notice was forgotten meanwhile: then it reads again.
#[derive(Debug)]
pub(crate) struct Notices<T> {
    pub(super) fd: EventFd,
    queue: Mutex<VecDeque<T>>,
    generation: u64,
}

impl<T: Copy> Notices<T> {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { fd: EventFd::counting()?, queue: Mutex::default(), generation: fork::generation() })
    }

    /// Runs `then` on the queue. A forked child gets nothing: the lock may be held by a thread that does not exist there, and
    /// the descriptor is the parent's too.
    fn with<R>(&self, then: impl FnOnce(&mut VecDeque<T>) -> R) -> Option<R> {
        (fork::current() == self.generation)
            .then(|| then(&mut self.queue.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Adds a notice; the oldest of `max` makes room for it.
    pub(crate) fn push(&self, notice: T, max: usize) {
        self.with(|queue| {
            if queue.len() >= max {
                queue.pop_front();
            } else {
                self.fd.raise();
            }
            queue.push_back(notice);
        });
    }

    /// Takes the oldest notice.
    pub(crate) fn next(&self) -> Option<T> {
        self.with(|queue| {
            let notice = queue.pop_front();
            if notice.is_some() {
                self.fd.take();
            }
            notice
        })?
    }

    /// Takes the oldest notice for a caller who has read the descriptor already.
    pub(crate) fn claim(&self) -> Option<T> {
        self.with(VecDeque::pop_front)?
    }

    /// Takes all there are; whether there were any.
    pub(crate) fn take_all(&self) -> bool {
        std::iter::from_fn(|| self.next()).count() > 0
    }

    /// Forgets the notices that `of` picks.
    pub(crate) fn forget(&self, of: impl Fn(&T) -> bool) {
        self.with(|queue| {
            let before = queue.len();
            queue.retain(|notice| !of(notice));
            // Whoever has read one of them already finds nothing to claim.
            (queue.len()..before).for_each(|_| _ = self.fd.take());
        });
    }
}

impl<T> AsRawFd for Notices<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
