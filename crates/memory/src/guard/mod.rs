//! The fault guard: a copy that touches unmapped, protected or truncated memory returns an error
//! instead of killing the process.
//!
//! *Mechanism (x86_64).* A handler for SIGSEGV and SIGBUS checks the faulting instruction. Inside
//! the copy routines of this crate it resumes the thread at a fix-up label that reports how far the
//! copy got. Anywhere else it chains to the previous handler, as if it were not installed. It
//! allocates nothing and takes no lock.
//!
//! *Cost.* Nothing on the data path: no instruction is added to a copy. A copy that does fault
//! costs a signal, about 4 us on a virtual machine. [`ensure_installed`] costs two system calls,
//! under 1 us.
//!
//! *Limits.*
//! * A program that installs a SIGSEGV or SIGBUS handler after us and does not chain gets our
//!   faults, until the next [`ensure_installed`].
//! * A thread that blocks these signals is killed by the kernel when it faults, whatever the
//!   handler: threads that copy must unblock them, see [`admit_faults`].
//! * A handler we chain to runs on the alternate signal stack where the thread has one, even if it
//!   did not ask for that.
//! * The library that contains this code must not be unloaded once the guard is installed (link it
//!   with `-z nodelete`).
//!
//! *Other processors.* The kernel makes the copies (`process_vm_readv`) and no signal is taken.

#[cfg(target_arch = "x86_64")]
mod handler;
#[cfg(target_arch = "x86_64")]
mod history;
#[cfg(target_arch = "x86_64")]
mod nesting;

use std::io;

use thiserror::Error;

/// Why the guard could not be put in place.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum InstallError {
    /// The kernel refused the call.
    #[error("cannot install the fault guard: {call} failed ({source})")]
    Refused {
        /// The call.
        call: &'static str,
        /// Its error.
        source: io::Error,
    },
    /// Too many different handlers were put above ours.
    #[error(
        "cannot install the fault guard: {limit} different handlers have already replaced it for {signal}; they must chain to the previous handler"
    )]
    TooManyHandlers {
        /// `SIGSEGV` or `SIGBUS`.
        signal: &'static str,
        /// Number of remembered handlers.
        limit: usize,
    },
}

/// Installs the guard, or puts it back on top if another handler has replaced it. Call it whenever
/// memory is registered.
///
/// Handlers found in place are remembered and chained to, also where they chain to us in turn.
pub fn ensure_installed() -> Result<(), InstallError> {
    #[cfg(target_arch = "x86_64")]
    return handler::ensure_installed();
    #[cfg(not(target_arch = "x86_64"))]
    return probe_kernel_copies();
}

/// Unblocks SIGSEGV and SIGBUS on this thread. Call it in our own threads that block all other
/// signals: a fault on a thread that blocks them kills the process.
pub fn admit_faults() -> io::Result<()> {
    // SAFETY: sigset_t is plain data; it is filled by sigemptyset before it is used.
    let mut faults: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set lives through the calls and both signals exist.
    let answer = unsafe {
        libc::sigemptyset(&raw mut faults);
        libc::sigaddset(&raw mut faults, libc::SIGSEGV);
        libc::sigaddset(&raw mut faults, libc::SIGBUS);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const faults, std::ptr::null_mut())
    };
    if answer == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(answer)) }
}

/// A sandbox may forbid the system call that all copies use; detect that at registration.
#[cfg(not(target_arch = "x86_64"))]
fn probe_kernel_copies() -> Result<(), InstallError> {
    let (from, mut to) = ([1u8; 8], [0u8; 8]);
    // SAFETY: both sides are arrays of ours.
    match unsafe { crate::copy::load(to.as_mut_ptr(), from.as_ptr(), from.len()) } {
        0 => Ok(()),
        _ => Err(InstallError::Refused { call: "process_vm_readv", source: io::Error::last_os_error() }),
    }
}
