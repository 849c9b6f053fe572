//! Network namespaces without a name: they end with their last process or descriptor, so that none
//! is left behind.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

/// A thread that was joined may count for the kernel for a moment more.
const SINGLE_TRIES: u32 = 200;
const SINGLE_EVERY: Duration = Duration::from_millis(1);

/// A network namespace.
#[derive(Debug)]
pub(crate) struct Namespace {
    file: File,
}

impl Namespace {
    /// Makes one, and runs `set_up` in it. Where the user may not, the whole process enters a user
    /// namespace first, in which it may; it must have a single thread then.
    pub(crate) fn make<T: Send>(set_up: impl Fn() -> io::Result<T> + Sync) -> io::Result<(Self, T)> {
        let make = || {
            on_thread(|| {
                unshare(libc::CLONE_NEWNET)?;
                let file = File::open("/proc/thread-self/ns/net")?;
                Ok((Self { file }, set_up()?))
            })
        };
        match make() {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                enter_user_namespace()?;
                make()
            }
            made => made,
        }
    }

    /// Runs `work` in the namespace, on a thread of its own.
    pub(crate) fn run<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        on_thread(|| {
            set_namespace(self.file.as_raw_fd())?;
            work()
        })
    }

    /// Makes the command run in the namespace, and end with the thread that starts it.
    pub(crate) fn enter(&self, command: &mut Command) -> io::Result<()> {
        let file = self.file.try_clone()?;
        let before = move || {
            set_namespace(file.as_raw_fd())?;
            // SAFETY: it takes a signal number, and touches no memory.
            if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } == 0 {
                Ok(())
            } else {
                Err(io::Error::last_os_error())
            }
        };
        // SAFETY: between fork and exec it makes two system calls and allocates nothing.
        unsafe { command.pre_exec(before) };
        Ok(())
    }
}

/// Namespaces belong to threads: work that changes them gets a thread that ends.
fn on_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("namespace".into()).spawn_scoped(scope, work)?;
        thread.join().map_err(|_| io::Error::other("the thread of the namespace panicked"))?
    })
}

fn set_namespace(fd: i32) -> io::Result<()> {
    // SAFETY: setns takes numbers only.
    if unsafe { libc::setns(fd, libc::CLONE_NEWNET) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn unshare(flags: i32) -> io::Result<()> {
    // SAFETY: unshare takes flags only.
    if unsafe { libc::unshare(flags) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Becomes root of a new user namespace, as which it may make network namespaces.
fn enter_user_namespace() -> io::Result<()> {
    // SAFETY: both calls always succeed and touch no memory.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    let mut tries = 0;
    while let Err(error) = unshare(libc::CLONE_NEWUSER) {
        tries += 1;
        if error.raw_os_error() != Some(libc::EINVAL) || tries == SINGLE_TRIES {
            return Err(error);
        }
        std::thread::sleep(SINGLE_EVERY);
    }
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("0 {user} 1"))?;
    fs::write("/proc/self/gid_map", format!("0 {group} 1"))
}

/// The descriptor that a system call returned, or its error.
pub(crate) fn owned(fd: i32) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the system call has just returned it, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
