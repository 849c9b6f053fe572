//! The end of a process that did not close its devices.
//!
//! Many programs leave with everything open, right after the completion they were waiting for. A NIC made of hardware has
//! acknowledged the message by then; ours may have put that off, and the peer would try in vain to learn what became of it.
//!
//! The same list of devices serves a forked child, which lets go of their links.

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
use crate::soft::progress::lock::EngineLock;
use crate::soft::progress::set::EngineSet;

/// How long the end of a process is put off at most.
const PATIENCE: Duration = Duration::from_millis(200);

/// What is left to do for a device when it goes, or when the process exits before.
#[derive(Debug)]
pub(crate) struct Ending {
    engines: Arc<EngineSet>,
    report: Option<Report>,
}

impl Ending {
    /// From now on it is seen to when the process exits.
    pub(crate) fn new(engines: Arc<EngineSet>, report: Option<Report>) -> Arc<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            // SAFETY: the function lives as long as this code is loaded, and never unwinds.
            unsafe { libc::atexit(at_exit) };
            fork::set_in_child(let_go_of_links);
        });
        let ending = Arc::new(Self { engines, report });
        remember(&ending);
        ending
    }

    /// The device goes: leaves its report.
    pub(crate) fn report(&self, totals: &Totals) {
        if let Some(report) = &self.report {
            report.finish(totals);
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
pub(crate) fn let_go_of_links() {
    each_open(|ending| ending.engines.iter().for_each(|handle| fork::let_go(handle.link_fds())));
}

extern "C" fn at_exit() {
    let end = Instant::now() + PATIENCE;
    // A panic has said what it has to say; the process ends anyway.
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
        engine.link.say_goodbye();
        totals.add(&Totals::of(&engine));
    }
    // A report that leaves something out is none: what was kept now and then is found instead.
    if all {
        ending.report(&totals);
    }
}

/// Whoever holds the lock may be the very thread that exits, or wait for it.
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
