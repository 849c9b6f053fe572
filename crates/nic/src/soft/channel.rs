//! Descriptors that become readable when something happened.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use super::fork;

/// A counter in the kernel that can be polled.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    /// Reading it takes all that was raised, and never blocks.
    pub(crate) fn new() -> io::Result<Self> {
        Self::with_flags(libc::EFD_NONBLOCK)
    }

    /// Reading it takes one of what was raised, and blocks while there is none, unless somebody sets `O_NONBLOCK`.
    fn counting() -> io::Result<Self> {
        Self::with_flags(libc::EFD_SEMAPHORE)
    }

    fn with_flags(flags: i32) -> io::Result<Self> {
        // SAFETY: eventfd takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call succeeded, so `fd` is an open descriptor that nobody else owns.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn raise(&self) {
        let one = 1_u64.to_ne_bytes();
        // SAFETY: `one` is 8 readable bytes. The only failure is a full counter, which is readable all the same.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), 8) };
    }

    /// Takes what was raised (of a counting one, one); whether anything was. Never blocks, whatever the descriptor is set to.
    pub(crate) fn take(&self) -> bool {
        let mut count = [0_u8; 8];
        let io = libc::iovec { iov_base: count.as_mut_ptr().cast(), iov_len: count.len() };
        // SAFETY: one iovec of 8 writable bytes; offset -1 reads as read(2) does.
        let read = unsafe { libc::preadv2(self.0.as_raw_fd(), &raw const io, 1, -1, libc::RWF_NOWAIT) };
        if read >= 0 || io::Error::last_os_error().raw_os_error() != Some(libc::EOPNOTSUPP) {
            return read == 8;
        }
        // A kernel before 5.8 does not know the flag here.
        // SAFETY: `count` is 8 writable bytes.
        self.is_raised() && unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), 8) == 8 }
    }

    fn is_raised(&self) -> bool {
        self.wait(0)
    }

    /// Waits at most so many milliseconds; whether something was raised.
    fn wait(&self, ms: i32) -> bool {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd.
        unsafe { libc::poll(&raw mut poll, 1, ms) == 1 }
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// What happened, in order, and a descriptor that counts it: each reading stands for one notice.
///
/// A caller either takes a notice ([`next`](Self::next)), which never blocks; or it reads 8 bytes from the descriptor itself,
/// blocking or not as that is set, and then claims what it read for ([`claim`](Self::claim)). Nothing is there to claim if the
/// notice was forgotten meanwhile: then it reads again.
#[derive(Debug)]
pub(crate) struct Notices<T> {
    fd: EventFd,
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

/// Events kept in a channel that nobody reads; older ones are dropped first.
const MAX_COMPLETION_EVENTS: usize = 1 << 16;

/// A completion channel: readable when a completion queue that was armed on it has something. Several queues may share one.
///
/// Events come in two ways, not to be mixed on one channel: [`next`](Self::next), [`take`](Self::take) and [`wait`](Self::wait)
/// never block by reading; a program that reads the descriptor itself (8 bytes for each event, blocking unless it sets
/// `O_NONBLOCK`) then calls [`claim`](Self::claim).
#[derive(Clone, Debug)]
pub struct Channel {
    notices: Arc<Notices<u32>>,
}

impl Channel {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { notices: Arc::new(Notices::new()?) })
    }

    pub(crate) fn push(&self, cq: u32) {
        self.notices.push(cq, MAX_COMPLETION_EVENTS);
    }

    /// Forgets the events of a completion queue that goes.
    pub(crate) fn forget(&self, cq: u32) {
        self.notices.forget(|notice| *notice == cq);
    }

    /// Takes the next event: the number of the completion queue that it is of. Never blocks.
    pub fn next(&self) -> Option<u32> {
        self.notices.next()
    }

    /// As [`next`](Self::next), for a caller who has just read 8 bytes from the descriptor. Nothing if the completion queue
    /// went meanwhile: then read again.
    pub fn claim(&self) -> Option<u32> {
        self.notices.claim()
    }

    /// Takes all events there are; whether there were any. Never blocks: poll the descriptor to wait.
    pub fn take(&self) -> bool {
        self.notices.take_all()
    }

    /// Waits for an event, at most `timeout`; whether one came (all there are, are taken).
    pub fn wait(&self, timeout: std::time::Duration) -> bool {
        self.notices.fd.wait(i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX));
        self.take()
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.notices.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const KEPT: u32 = 1;
    const GOING: u32 = 2;
    const LAST: u32 = 3;

    fn read_blocking(notices: &Notices<u32>) {
        let mut count = [0_u8; 8];
        // SAFETY: 8 writable bytes.
        assert_eq!(unsafe { libc::read(notices.as_raw_fd(), count.as_mut_ptr().cast(), 8) }, 8);
    }

    #[test]
    fn readers_that_block_get_every_notice_that_is_not_forgotten() {
        const READERS: usize = 3;
        const ROUNDS: usize = 5000;
        let notices = Notices::new().unwrap();
        let kept = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..READERS {
                scope.spawn(|| {
                    loop {
                        read_blocking(&notices);
                        match notices.claim() {
                            Some(KEPT) => _ = kept.fetch_add(1, Ordering::Relaxed),
                            Some(LAST) => return,
                            // Of one that goes, or forgotten while we were reading.
                            _ => {}
                        }
                    }
                });
            }
            for round in 0..ROUNDS {
                notices.push(GOING, usize::MAX);
                notices.push(KEPT, usize::MAX);
                if round % 3 == 0 {
                    notices.forget(|notice| *notice == GOING);
                }
            }
            (0..READERS).for_each(|_| notices.push(LAST, usize::MAX));
        });
        assert_eq!(kept.into_inner(), ROUNDS);
        assert!(!notices.take_all() && !notices.fd.is_raised(), "nothing is left, and nothing is announced");
    }

    #[test]
    fn the_oldest_makes_room() {
        let notices = Notices::new().unwrap();
        (0..5).for_each(|notice| notices.push(notice, 3));
        let all: Vec<u32> = std::iter::from_fn(|| notices.next()).collect();
        assert_eq!(all, [2, 3, 4]);
        assert!(!notices.fd.is_raised());
    }
}
