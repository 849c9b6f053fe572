//! A queue of notices with a descriptor to poll.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use crate::process::epoll::Epoll;
use crate::process::eventfd::EventFd;
use crate::process::fork;
use crate::sync::{Mutex, PoisonError};
use std::sync::Arc;

/// A FIFO of notices with a semaphore eventfd that counts them: each read stands for one notice.
///
/// A caller either takes a notice ([`next`](Self::next)), which never blocks. Or it reads 8 bytes
/// from the counter itself, which blocks, and then claims its notice ([`claim`](Self::claim)). The
/// claim finds nothing if the notice was forgotten meanwhile: the caller then reads again.
///
/// Programs poll another descriptor, an epoll set with the counter: an eventfd is always writable,
/// and event loops that ask for errors or room would spin on it.
#[derive(Debug)]
pub(crate) struct Notices<T> {
    pub(crate) counter: EventFd,
    polled: Epoll,
    queue: Mutex<Queue<T>>,
    generation: u64,
}

#[derive(Debug)]
struct Queue<T> {
    notices: VecDeque<T>,
    /// Notices that were taken by `next` or forgotten after a reader had consumed their count: as
    /// many claims return nothing, or the descriptor would count one too many.
    overtaken: usize,
    /// Of the thread that waits for notices and packets at once.
    watcher: Option<Arc<EventFd>>,
}

impl<T> Queue<T> {
    /// A notice was removed without a claim.
    fn take_back(&mut self, counter: &EventFd) {
        self.overtaken += usize::from(!counter.take());
    }
}

impl<T> Notices<T> {
    pub(crate) fn new() -> io::Result<Self> {
        let (counter, polled) = (EventFd::counting()?, Epoll::new()?);
        polled.add(counter.as_raw_fd())?;
        Ok(Self {
            counter,
            polled,
            queue: Mutex::new(Queue { notices: VecDeque::new(), overtaken: 0, watcher: None }),
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
                self.counter.raise();
            }
            queue.notices.push_back(notice);
            if let Some(watcher) = &queue.watcher {
                watcher.raise();
            }
        });
    }

    /// Takes the oldest notice.
    pub(crate) fn next(&self) -> Option<T> {
        self.with(|queue| {
            let notice = queue.notices.pop_front();
            if notice.is_some() {
                queue.take_back(&self.counter);
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

    pub(crate) fn has_any(&self) -> bool {
        self.with(|queue| !queue.notices.is_empty()).unwrap_or(false)
    }

    /// From now on each notice raises `watcher`, too. False, and it does not, if there is one
    /// already.
    pub(crate) fn watch(&self, watcher: &Arc<EventFd>) -> bool {
        let begins = |queue: &mut Queue<T>| {
            let is_empty = queue.notices.is_empty();
            queue.watcher = is_empty.then(|| watcher.clone());
            is_empty
        };
        self.with(begins).unwrap_or(false)
    }

    /// Notices do not raise the watcher any more.
    pub(crate) fn end_watch(&self) {
        self.with(|queue| queue.watcher = None);
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
            (queue.notices.len()..before).for_each(|_| queue.take_back(&self.counter));
        });
    }
}

impl<T> Notices<T> {
    /// The descriptor that callers read before they claim.
    pub(crate) fn counter_fd(&self) -> RawFd {
        self.counter.as_raw_fd()
    }
}

impl<T> AsRawFd for Notices<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.polled.fd()
    }
}
