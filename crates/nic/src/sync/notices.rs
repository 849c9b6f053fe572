//! A queue of notices with a descriptor that counts them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use crate::process::eventfd::EventFd;
use crate::process::fork;
use crate::sync::{Mutex, PoisonError};

/// A FIFO of notices with a semaphore eventfd that counts them: each read stands for one notice.
///
/// A caller either takes a notice ([`next`](Self::next)), which never blocks. Or it reads 8 bytes
/// from the descriptor itself, which blocks unless `O_NONBLOCK` is set, and then claims its notice
/// ([`claim`](Self::claim)). The claim finds nothing if the notice was forgotten meanwhile: the
/// caller then reads again.
#[derive(Debug)]
pub(crate) struct Notices<T> {
    pub(crate) fd: EventFd,
    queue: Mutex<Queue<T>>,
    generation: u64,
}

#[derive(Debug)]
struct Queue<T> {
    notices: VecDeque<T>,
    /// Notices that were taken by `next` or forgotten after a reader had consumed their count: as
    /// many claims return nothing, or the descriptor would count one too many.
    overtaken: usize,
}

impl<T> Queue<T> {
    /// A notice was removed without a claim.
    fn take_back(&mut self, fd: &EventFd) {
        self.overtaken += usize::from(!fd.take());
    }
}

impl<T> Notices<T> {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            fd: EventFd::counting()?,
            queue: Mutex::new(Queue { notices: VecDeque::new(), overtaken: 0 }),
            generation: fork::generation(),
        })
    }

    /// Runs `then` on the queue. A forked child gets nothing: the lock may be held by a thread that
    /// does not exist there, and the descriptor is the parent's too.
    fn with<R>(&self, then: impl FnOnce(&mut Queue<T>) -> R) -> Option<R> {
        (fork::current() == self.generation)
            .then(|| then(&mut self.queue.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Adds a notice; drops the oldest beyond `max`.
    pub(crate) fn push(&self, notice: T, max: usize) {
        self.with(|queue| {
            if queue.notices.len() >= max {
                queue.notices.pop_front();
            } else {
                self.fd.raise();
            }
            queue.notices.push_back(notice);
        });
    }

    /// Takes the oldest notice.
    pub(crate) fn next(&self) -> Option<T> {
        self.with(|queue| {
            let notice = queue.notices.pop_front();
            if notice.is_some() {
                queue.take_back(&self.fd);
            }
            notice
        })?
    }

    /// Takes the oldest notice for a caller that has read the descriptor already.
    pub(crate) fn claim(&self) -> Option<T> {
        self.with(|queue| match queue.overtaken.checked_sub(1) {
            Some(left) => {
                queue.overtaken = left;
                None
            }
            None => queue.notices.pop_front(),
        })?
    }

    /// Takes all notices. Returns whether there were any.
    pub(crate) fn take_all(&self) -> bool {
        std::iter::from_fn(|| self.next()).count() > 0
    }

    /// Forgets the notices that `of` picks.
    pub(crate) fn forget(&self, of: impl Fn(&T) -> bool) {
        self.with(|queue| {
            let before = queue.notices.len();
            queue.notices.retain(|notice| !of(notice));
            (queue.notices.len()..before).for_each(|_| queue.take_back(&self.fd));
        });
    }
}

impl<T> AsRawFd for Notices<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
