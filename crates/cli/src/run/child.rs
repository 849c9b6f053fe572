//! Starts the command, forwards our signals to it, and exits as it does.

use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;

use super::mounts::{Mounts, MountsError};

/// Signals that are not forwarded: those that report what this process did itself (faults, SIGABRT,
/// SIGPIPE, SIGCHLD), job control, which a terminal sends to the whole process group, and signals
/// that cannot be caught. All others are forwarded to the command.
const OURS: [libc::c_int; 14] = [
    libc::SIGKILL,
    libc::SIGSTOP,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
    libc::SIGCHLD,
    libc::SIGPIPE,
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGABRT,
    libc::SIGSYS,
];

fn forwarded() -> impl Iterator<Item = libc::c_int> {
    (1..=libc::SIGRTMAX()).filter(|signal| !OURS.contains(signal))
}

/// Signals that [`ChildSignals::wait`] handles from now on, instead of killing us with our folder
/// left behind.
pub(crate) struct ChildSignals {
    set: libc::sigset_t,
    /// What was blocked before, which the command starts with.
    before: libc::sigset_t,
}

impl ChildSignals {
    /// Blocks them in this thread: call it before another thread starts.
    pub(crate) fn block() -> Self {
        // SAFETY: a sigset_t is plain data, and sigemptyset makes it a valid one.
        let (mut set, mut before): (libc::sigset_t, libc::sigset_t) = unsafe { std::mem::zeroed() };
        // SAFETY: the sets are ours and valid; a number that the C library keeps for itself is
        // refused by sigaddset.
        unsafe {
            libc::sigemptyset(&raw mut set);
            for signal in forwarded() {
                libc::sigaddset(&raw mut set, signal);
            }
            libc::sigaddset(&raw mut set, libc::SIGCHLD);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, &raw mut before);
        }
        Self { set, before }
    }

    /// Waits until the child has ended, forwarding signals meanwhile.
    pub(crate) fn wait(&self, child: &mut Child) -> io::Result<ExitStatus> {
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            // SAFETY: a siginfo_t is plain data that sigwaitinfo fills.
            let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
            // SAFETY: the set is valid, and `info` is a place for the answer.
            let signal = unsafe { libc::sigwaitinfo(&raw const self.set, &raw mut info) };
            // Terminal signals (Ctrl-C) go to the whole process group: the command has it already.
            let from_terminal = info.si_code == libc::SI_KERNEL;
            if signal > 0 && signal != libc::SIGCHLD && !from_terminal {
                let pid = libc::pid_t::try_from(child.id()).expect("a process ID");
                // SAFETY: the child was not waited for yet, so the number is still its own.
                unsafe { libc::kill(pid, signal) };
            }
        }
    }
}

/// The command could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum StartError {
    #[error("cannot start {name:?}: {source}{}", hint(.source))]
    Command { name: String, source: io::Error },
    #[error(transparent)]
    Mounts(MountsError),
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => ". Check that it is in PATH, and that a script's interpreter exists",
        io::ErrorKind::PermissionDenied => ". Check that it is an executable file (chmod +x)",
        _ if error.raw_os_error() == Some(libc::ENOEXEC) => {
            ". Not an executable format; a script must start with #!"
        }
        _ => "",
    }
}

impl StartError {
    /// As shells have it; 2 where it is not for the command.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Command { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            Self::Command { .. } => 126,
            Self::Mounts(_) => 2,
        }
    }
}

/// Starts it with the signal mask that we inherited, because a blocked signal is inherited again.
/// With `mounts`, in a mount namespace of its own.
pub(crate) fn start(
    command: &mut Command,
    signals: &ChildSignals,
    mounts: Option<Mounts>,
) -> Result<Child, StartError> {
    let before = signals.before;
    let mounts = mounts.map(Arc::new);
    let todo = mounts.clone();
    let prepare = move || {
        if let Some(mounts) = &todo {
            mounts.perform()?;
        }
        // SAFETY: the set was filled by pthread_sigmask; sigprocmask may be called between fork and
        // exec.
        match unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: between fork and exec only the calls above are made, which allocate nothing and take
    // no lock.
    unsafe { command.pre_exec(prepare) };
    command.spawn().map_err(|source| {
        let failed = match &mounts {
            Some(mounts) => mounts.failure(source),
            None => Err(source),
        };
        let name = || command.get_program().to_string_lossy().into_owned();
        failed.map_or_else(|source| StartError::Command { name: name(), source }, StartError::Mounts)
    })
}

/// The exit code that says how the command ended.
pub(crate) fn code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code & 0xff).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_numbers_as_in_a_shell() {
        assert_eq!(code(ExitStatus::from_raw(3 << 8)), 3);
        assert_eq!(code(ExitStatus::from_raw(libc::SIGKILL)), 137);
        let signals = ChildSignals::block();
        assert_eq!(start(&mut Command::new("/no/such/program"), &signals, None).unwrap_err().code(), 127);
        let refused = start(&mut Command::new("/"), &signals, None).unwrap_err();
        assert_eq!(refused.code(), 126, "{refused}");
    }
}
