//! Waiting for events as a program's flags of a descriptor say.

use std::ffi::{c_int, c_void};
use std::ptr;

use crate::entry;

/// `struct _pthread_cleanup_buffer`.
#[repr(C)]
struct Cleanup {
    routine: Option<unsafe extern "C" fn(*mut c_void)>,
    argument: *mut c_void,
    cancel_type: c_int,
    outer: *mut Self,
}

unsafe extern "C-unwind" {
    fn read(fd: c_int, to: *mut c_void, length: usize) -> isize;
    fn _pthread_cleanup_push(
        buffer: *mut Cleanup,
        routine: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    );
    fn _pthread_cleanup_pop(buffer: *mut Cleanup, execute: c_int);
}

/// The descriptors of an event channel.
#[derive(Clone, Copy, Debug)]
pub struct NoticeFds {
    /// The one that the program polls, and sets flags of.
    pub polled: c_int,
    /// The one that counts events.
    pub counter: c_int,
    /// What the thread holds while it waits.
    held: *mut c_void,
    release: unsafe extern "C" fn(*mut c_void),
}

/// Drops a box of `T`.
unsafe extern "C" fn release<T>(held: *mut c_void) {
    // SAFETY: errno of the calling thread; `held` is null, or was made by `hold` for this type and
    // is released once.
    unsafe {
        let errno = *libc::__errno_location();
        entry::silent(|| {
            if !held.is_null() {
                drop(Box::from_raw(held.cast::<T>()));
            }
            Ok(())
        });
        *libc::__errno_location() = errno;
    }
}

impl NoticeFds {
    /// Of a channel.
    #[must_use]
    pub fn new(polled: c_int, counter: c_int) -> Self {
        Self { polled, counter, held: ptr::null_mut(), release: release::<()> }
    }

    /// Drops `what` after the wait, or when the thread is cancelled in it.
    #[must_use]
    pub fn hold<T>(self, what: T) -> Self {
        Self { held: Box::into_raw(Box::new(what)).cast(), release: release::<T>, ..self }
    }

    /// Whether the program has left the descriptor blocking.
    #[must_use]
    pub fn do_wait(self) -> bool {
        // SAFETY: the call takes a descriptor and a command.
        let flags = unsafe { libc::fcntl(self.polled, libc::F_GETFL) };
        flags < 0 || flags & libc::O_NONBLOCK == 0
    }

    /// Takes one event from the counter. O_NONBLOCK of the polled descriptor and SA_RESTART, as the
    /// program has set them, decide whether it waits and resumes after a signal. False, and errno,
    /// when there was none. The thread may be cancelled in here, which unwinds it: neither this
    /// function nor its callers may own anything.
    pub fn take(self) -> bool {
        if self.held.is_null() && !self.do_wait() {
            return self.take_now();
        }
        let mut count = 0_u64;
        let mut cleanup =
            Cleanup { routine: None, argument: ptr::null_mut(), cancel_type: 0, outer: ptr::null_mut() };
        // SAFETY: eight bytes that can be written; the buffer lives until it is popped, which
        // releases what is held.
        unsafe {
            _pthread_cleanup_push(&raw mut cleanup, self.release, self.held);
            let got = read(self.counter, (&raw mut count).cast(), 8);
            _pthread_cleanup_pop(&raw mut cleanup, 1);
            got == 8
        }
    }

    /// Takes one event if there is one. Not a cancellation point, as a read that does not block
    /// need not be.
    fn take_now(self) -> bool {
        let mut count = 0_u64;
        let place = libc::iovec { iov_base: (&raw mut count).cast(), iov_len: 8 };
        // SAFETY: one iovec of eight bytes that can be written; offset -1 reads as read(2) does.
        let got = unsafe {
            libc::syscall(
                libc::SYS_preadv2,
                self.counter,
                &raw const place,
                1,
                -1_i64,
                -1_i64,
                libc::RWF_NOWAIT,
            )
        };
        got == 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An epoll set with an eventfd, as in the NIC.
    fn fds() -> NoticeFds {
        // SAFETY: the calls take numbers, and one event that lives.
        unsafe {
            let counter = libc::eventfd(0, libc::EFD_SEMAPHORE);
            let polled = libc::epoll_create1(0);
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
            assert_eq!(libc::epoll_ctl(polled, libc::EPOLL_CTL_ADD, counter, &raw mut event), 0);
            NoticeFds::new(polled, counter)
        }
    }

    fn ready(fd: c_int) -> i16 {
        let mut poll = libc::pollfd { fd, events: libc::POLLIN | libc::POLLOUT, revents: 0 };
        // SAFETY: one valid structure.
        unsafe { libc::poll(&raw mut poll, 1, 0) };
        poll.revents
    }

    #[test]
    fn the_polled_descriptor_is_never_writable_and_its_flags_count() {
        let fds = fds();
        assert_eq!(ready(fds.polled), 0);
        // SAFETY: open descriptors; eight bytes that can be read.
        unsafe {
            assert_eq!(libc::fcntl(fds.polled, libc::F_SETFL, libc::O_NONBLOCK), 0);
            assert!(!fds.take());
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EAGAIN));
            let two = 2_u64;
            assert_eq!(libc::write(fds.counter, (&raw const two).cast(), 8), 8);
            assert_eq!(ready(fds.polled), libc::POLLIN);
            assert!(fds.take());
            assert_eq!(libc::fcntl(fds.polled, libc::F_SETFL, 0), 0);
            assert!(fds.take());
            assert_eq!(ready(fds.polled), 0);
            libc::close(fds.polled);
            libc::close(fds.counter);
        }
    }
}
