//! The helper thread: serves those who neither post nor poll.
//!
//! While the application polls without pause, packets must not wake anybody: on a small machine a wake-up costs more
//! than the packet. So the helper sleeps on a timer as long as it sees polls go by densely, and waits on the sockets
//! when they thin out (a program that spins on memory polls its queue now and then, too), or when the application
//! said that it is going to sleep (armed a completion queue).

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::{io, mem};

use super::channel::EventFd;
use super::device::Shared;
use crate::links::now_ns;

/// How often it looks whether the application still polls.
const LOOK_EVERY_NS: u64 = 1_000_000;
/// Polls at less than this distance are a loop that does nothing else. An empty poll takes about 0.4 us; a program
/// that spins on memory for each message and then polls once, as ib_write_lat does, polls every 5 us or so.
const DENSE_NS: u64 = 2_000;
/// A shorter time says nothing about how densely the application polls.
const SHORTEST_LOOK_NS: u64 = 200_000;
/// How long it goes on polling after traffic, where there are CPUs to spare.
const SPIN_NS: u64 = 50_000;
/// Rounds of work before it looks up again.
const MAX_ROUNDS: u32 = 256;
/// CPUs from which on spinning takes nothing away from the application.
const CPUS_TO_SPIN: usize = 4;

#[derive(Debug)]
pub(crate) struct Helper {
    wake: Arc<EventFd>,
    stop: Arc<AtomicBool>,
    /// Calls of the application that drove the engine.
    pub(crate) polls: Arc<AtomicU64>,
    /// It waits on the sockets, so that nothing needs to wake it.
    watching: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Helper {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            wake: Arc::new(EventFd::new()?),
            stop: Arc::default(),
            polls: Arc::default(),
            watching: Arc::new(AtomicBool::new(true)),
            thread: None,
        })
    }

    /// Starts the thread, once.
    pub(crate) fn start(&mut self, shared: &Arc<Shared>, fds: Vec<RawFd>) -> io::Result<()> {
        if self.thread.is_some() {
            return Ok(());
        }
        let worker = Worker {
            shared: Arc::downgrade(shared),
            fds,
            wake: self.wake.clone(),
            stop: self.stop.clone(),
            polls: self.polls.clone(),
            watching: self.watching.clone(),
            spins: allowed_cpus() >= CPUS_TO_SPIN,
        };
        let _blocked = BlockedSignals::new();
        self.thread = Some(std::thread::Builder::new().name("nobounce".into()).spawn(move || worker.run())?);
        Ok(())
    }

    /// The application is about to sleep: from now on the helper must watch.
    pub(crate) fn watch(&self) {
        if !self.watching.swap(true, Ordering::SeqCst) {
            self.wake.raise();
        }
    }

    /// Stops the thread and waits for it, unless it is the caller.
    pub(crate) fn stop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake.raise();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join(); // a panic there was already reported
        }
    }

    /// The thread does not exist in a forked child.
    pub(crate) fn forget(&mut self) {
        mem::forget(self.thread.take());
    }
}

/// What was seen of the application's polls, and when.
struct Look {
    polls: u64,
    at: u64,
}

struct Worker {
    shared: Weak<Shared>,
    fds: Vec<RawFd>,
    wake: Arc<EventFd>,
    stop: Arc<AtomicBool>,
    polls: Arc<AtomicU64>,
    watching: Arc<AtomicBool>,
    spins: bool,
}

impl Worker {
    fn run(&self) {
        let mut look = Look { polls: self.polls.load(Ordering::Relaxed), at: now_ns() };
        let mut deadline = None;
        while !self.stop.load(Ordering::SeqCst) {
            let watching = self.watching.load(Ordering::SeqCst);
            self.wait(watching, deadline);
            let called = self.wake.take();
            let now = now_ns();
            let polls = self.polls.load(Ordering::Relaxed);
            let elapsed = now - look.at;
            if called {
                // The application goes to sleep: how it polled until now does not matter.
                look = Look { polls, at: now };
            } else if elapsed >= SHORTEST_LOOK_NS {
                let dense = (polls - look.polls) * DENSE_NS > elapsed;
                look = Look { polls, at: now };
                self.watching.store(!dense, Ordering::SeqCst);
                if dense {
                    deadline = None;
                    continue;
                }
            } else if !watching {
                continue;
            }
            let Some(shared) = self.shared.upgrade() else { return };
            deadline = self.serve(&shared);
        }
    }

    /// Drives until there is nothing to do; returns when to come back.
    fn serve(&self, shared: &Arc<Shared>) -> Option<u64> {
        let mut idle_since = None;
        for _ in 0..MAX_ROUNDS {
            let (received, deadline) = {
                let mut engine = shared.lock()?;
                (engine.progress(), engine.deadline())
            };
            if self.stop.load(Ordering::Relaxed) {
                return deadline;
            }
            if received > 0 || deadline.is_some_and(|at| at <= now_ns()) {
                idle_since = None;
                continue;
            }
            if !self.spins {
                return deadline;
            }
            let now = now_ns();
            if now - *idle_since.get_or_insert(now) > SPIN_NS {
                return deadline;
            }
            std::hint::spin_loop();
        }
        Some(0)
    }

    /// Sleeps until a packet comes (when watching), somebody wakes us, or the deadline.
    fn wait(&self, watching: bool, deadline: Option<u64>) {
        let mut fds = vec![libc::pollfd { fd: self.wake.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
        let timeout = if watching {
            fds.extend(self.fds.iter().map(|&fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }));
            deadline.map(|at| at.saturating_sub(now_ns()))
        } else {
            Some(LOOK_EVERY_NS)
        };
        let spec = timeout.map(|ns| libc::timespec {
            tv_sec: i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(ns % 1_000_000_000).unwrap_or(0),
        });
        let spec = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: `fds` is an array of that many pollfds, `spec` null or a valid timespec, no signal mask.
        unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, spec, std::ptr::null()) };
    }
}

/// CPUs this process may run on.
pub(crate) fn allowed_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Signals are the application's business: a thread started under this guard gets none of them, but for the two by
/// which vanished memory announces itself (they are always meant for the thread that touched it).
struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    fn new() -> Self {
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
