//! The end of a process that did not close its devices.
//!
//! Many programs leave with everything open, right after the completion they were waiting for. A NIC made of hardware has
//! acknowledged the message by then; ours may have put that off, and the peer would try in vain to learn what became of it.
//!
//! The same list of devices serves a forked child, which lets go of their links.

use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, MutexGuard, Once, Weak};
use std::time::{Duration, Instant};

use super::device::EngineLock;
use super::engine::Engine;
use super::fork;
use super::report::Report;

/// How long the end of a process is put off at most.
const PATIENCE: Duration = Duration::from_millis(200);

/// What is left to do for a device when it goes, or when the process exits before.
#[derive(Debug)]
pub(crate) struct Ending {
    engine: Arc<EngineLock>,
    report: Option<Report>,
    /// The descriptors by which others reach the device.
    link: Vec<RawFd>,
}

impl Ending {
    /// From now on it is seen to when the process exits.
    pub(crate) fn new(engine: Arc<EngineLock>, report: Option<Report>, link: Vec<RawFd>) -> Arc<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            // SAFETY: the function lives as long as this code is loaded, and never unwinds.
            unsafe { libc::atexit(at_exit) };
        });
        let ending = Arc::new(Self { engine, report, link });
        remember(&ending);
        ending
    }

    /// The device goes: leaves its report.
    pub(crate) fn report(&self, engine: &Engine) {
        if let Some(report) = &self.report {
            report.finish(engine);
        }
    }
}

/// A device that is, or was, open. They are never freed: a forked child, or an exit in the midst of anything, must be able to
/// walk the list without a lock.
struct Opened {
    ending: Weak<Ending>,
    next: AtomicPtr<Self>,
}

static OPENED: AtomicPtr<Opened> = AtomicPtr::new(std::ptr::null_mut());

fn remember(ending: &Arc<Ending>) {
    let node: &'static _ =
        Box::leak(Box::new(Opened { ending: Arc::downgrade(ending), next: AtomicPtr::default() }));
    let mut head = OPENED.load(Ordering::Acquire);
    loop {
        node.next.store(head, Ordering::Relaxed);
        let new = std::ptr::from_ref(node).cast_mut();
        match OPENED.compare_exchange(head, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return,
            Err(now) => head = now,
        }
    }
}

/// Every device that is open.
fn each_open(mut each: impl FnMut(&Ending)) {
    let mut at = OPENED.load(Ordering::Acquire);
    // SAFETY: null, or a node: those are never freed, and nobody has more than a shared reference to one.
    while let Some(opened) = unsafe { at.as_ref() } {
        at = opened.next.load(Ordering::Acquire);
        if let Some(ending) = opened.ending.upgrade() {
            each(&ending);
        }
    }
}

/// In a forked child, before anything else happens there: nobody reads its copies of its parent's sockets. Left open they would keep
/// the slots of devices that the parent closes, and the kernel would go on steering packets to them, those of others among them.
pub(super) fn let_go_of_links() {
    each_open(|ending| fork::let_go(&ending.link));
}

extern "C" fn at_exit() {
    let end = Instant::now() + PATIENCE;
    // A panic has said what it has to say; the process ends anyway.
    each_open(|ending| _ = catch_unwind(AssertUnwindSafe(|| finish(ending, end))));
}

fn finish(ending: &Ending, end: Instant) {
    if ending.engine.generation() == fork::current()
        && let Some(mut engine) = lock_until(&ending.engine, end)
    {
        engine.hang_up();
        engine.send_answers();
        ending.report(&engine);
    }
}

/// Whoever holds the lock may be the very thread that exits, or wait for it.
fn lock_until(engine: &EngineLock, end: Instant) -> Option<MutexGuard<'_, Engine>> {
    loop {
        if let Some(engine) = engine.try_lock() {
            return Some(engine);
        }
        if Instant::now() >= end {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
