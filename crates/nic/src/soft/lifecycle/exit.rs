//! Exit of a process that did not close its devices.
//!
//! Many programs exit with all objects open, right after the completion they waited for. A hardware
//! NIC has acknowledged the message by then. This device may hold a delayed ACK, and the peer would
//! retransmit in vain.
//!
//! The same list of devices serves a forked child, which closes its copies of their links.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Once, Weak};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use crate::links::now_ns;
use crate::process::fork;
use crate::soft::engine::Engine;
use crate::soft::engine::totals::Totals;
use crate::soft::lifecycle::report::Report;
use crate::soft::progress::exit_work;
use crate::soft::progress::lock::EngineLock;
use crate::soft::progress::set::EngineSet;

/// How long process exit is delayed at most.
const EXIT_TIMEOUT: Duration = Duration::from_millis(200);

/// Final work for a device when it closes, or when the process exits before.
#[derive(Debug)]
pub(crate) struct Ending {
    engines: Arc<EngineSet>,
    reports: Vec<Report>,
}

impl Ending {
    /// Registers the device for process exit.
    pub(crate) fn new(engines: Arc<EngineSet>, reports: Vec<Report>) -> Arc<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            exit_work::set(finish_all);
            // SAFETY: the function lives as long as this code is loaded, and never unwinds.
            unsafe { libc::atexit(at_exit) };
            fork::set_in_child(let_go_of_links);
        });
        let ending = Arc::new(Self { engines, reports });
        remember(&ending);
        ending
    }

    /// The device closes: writes its reports.
    pub(crate) fn report(&self, totals: &Totals) {
        self.reports.iter().for_each(|report| report.finish(totals));
    }
}

/// A device that is, or was, open. Nodes are never freed: a forked child, or an exit at any point,
/// must be able to walk the list without a lock.
struct OpenedDevice {
    ending: Weak<Ending>,
    next: AtomicPtr<Self>,
}

static OPENED: AtomicPtr<OpenedDevice> = AtomicPtr::new(std::ptr::null_mut());

fn remember(ending: &Arc<Ending>) {
    let node: &'static _ =
        Box::leak(Box::new(OpenedDevice { ending: Arc::downgrade(ending), next: AtomicPtr::default() }));
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
    // SAFETY: null, or a node: nodes are never freed, and only shared references to them exist.
    while let Some(opened) = unsafe { at.as_ref() } {
        at = opened.next.load(Ordering::Acquire);
        if let Some(ending) = opened.ending.upgrade() {
            each(&ending);
        }
    }
}

/// In a forked child, before anything else: closes its copies of the parent's sockets, which it
/// never reads. Open copies would keep the slots of devices that the parent closes. The kernel
/// would go on steering packets to them, including those of other devices.
pub(crate) fn let_go_of_links() {
    exit_work::forget_threads();
    each_open(|ending| ending.engines.iter().for_each(|handle| fork::let_go(handle.link_fds())));
}

/// The exiting thread may be in a signal handler that interrupted `malloc`: it does not allocate,
/// unless there is no engine thread to do the work.
extern "C" fn at_exit() {
    let mut is_ours = false;
    each_open(|ending| is_ours |= ending.engines.first().engine().generation() == fork::current());
    let wake = || each_open(|ending| ending.engines.iter().for_each(|handle| handle.waker.wake()));
    if is_ours && !exit_work::delegate(wake, Instant::now() + EXIT_TIMEOUT) {
        finish_all();
    }
}

fn finish_all() {
    let end = Instant::now() + EXIT_TIMEOUT;
    // A panic was already reported; the process ends anyway.
    each_open(|ending| _ = catch_unwind(AssertUnwindSafe(|| finish(ending, end))));
}

fn finish(ending: &Ending, end: Instant) {
    let (mut totals, mut all) = (Totals::default(), true);
    for handle in ending.engines.iter() {
        if handle.engine().generation() != fork::current() {
            return;
        }
        let Some(mut engine) = lock_until(handle.engine(), end) else {
            all = false;
            continue;
        };
        engine.hang_up();
        engine.send_answers();
        engine.link.shut_down();
        totals.add(&Totals::of(&engine));
    }
    // Do not write a partial report: the latest snapshot replaces it.
    if all {
        ending.report(&totals);
    }
}

/// Polls with a timeout: the exiting thread may hold the lock itself, or block its holder.
fn lock_until(engine: &EngineLock, end: Instant) -> Option<MutexGuard<'_, Engine>> {
    loop {
        if let Some(mut engine) = engine.try_lock() {
            engine.core.take_submissions(now_ns);
            return Some(engine);
        }
        if Instant::now() >= end {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
