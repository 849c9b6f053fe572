//! Threads of ours leave signals to the application.

use std::mem;

/// Signals belong to the application: a thread started under this guard blocks all of them but
/// SIGSEGV and SIGBUS. Those report unmapped memory, and the kernel always directs them to the
/// faulting thread.
#[derive(Debug)]
pub struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    /// Blocks them for this thread, and those it starts, until the guard is dropped.
    #[must_use]
    #[allow(clippy::new_without_default)] // it does something, which a default value would hide
    pub fn new() -> Self {
        // SAFETY: sigset_t is plain data, filled by the calls below before it is used.
        let (mut all, mut old): (libc::sigset_t, libc::sigset_t) = unsafe { (mem::zeroed(), mem::zeroed()) };
        // SAFETY: both sets are valid for the calls, and the signal numbers exist.
        unsafe {
            libc::sigfillset(&raw mut all);
            libc::sigdelset(&raw mut all, libc::SIGSEGV);
            libc::sigdelset(&raw mut all, libc::SIGBUS);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        }
        Self(old)
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set was filled by pthread_sigmask.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}
