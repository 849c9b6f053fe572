//! The engine thread.
//!
//! In `thread` mode it drives the engine: as long as there is work, then for the length of a spin, then it sleeps until a packet, a
//! submission or a timer. In `caller` mode it does the same only while the application does not poll.

use std::io;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use nobounce_memory::signals::BlockedSignals;
use nobounce_protocol::timing::Nanos;

use super::attention::{Attention, WINDOW_NS};
use super::cpu::ask_for_short_slices;
use super::lock::{EngineLock, release};
use super::mode::Mode;
use super::wait::{self, Arrivals};
use super::waker::{TIMER_SLACK_NS, Waker};
use super::{CALLER_SPIN_NS, THREAD_SPIN_NS};
use crate::links::now_ns;
use crate::soft::fork;

/// How long the thread spins for the GPU's copy engine, which is asked by another thread, before it sleeps until that one wakes it.
const COPY_SPIN_NS: Nanos = 200_000;

/// A running engine thread. Dropping it stops the thread.
#[derive(Debug)]
pub(crate) struct EngineThread {
    stop: Arc<AtomicBool>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
    generation: u64,
}

impl EngineThread {
    pub(crate) fn start(
        number: usize,
        mode: Mode,
        engine: &Arc<EngineLock>,
        link: Arrivals,
        waker: &Arc<Waker>,
        polls: &Arc<AtomicU64>,
    ) -> io::Result<Self> {
        let stop = Arc::<AtomicBool>::default();
        let driver = Driver {
            engine: engine.clone(),
            link,
            waker: waker.clone(),
            stop: stop.clone(),
            polls: polls.clone(),
            spin: match mode {
                Mode::Thread => THREAD_SPIN_NS,
                Mode::Caller => CALLER_SPIN_NS,
            },
        };
        let _blocked = BlockedSignals::new();
        let name = if number == 0 { "nobounce".into() } else { format!("nobounce-{number}") };
        let run = move || {
            ask_for_short_slices();
            match mode {
                Mode::Thread => driver.run_alone(),
                Mode::Caller => driver.stand_in(),
            }
        };
        let thread = Some(std::thread::Builder::new().name(name).spawn(run)?);
        Ok(Self { stop, waker: waker.clone(), thread, generation: fork::generation() })
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        if fork::current() != self.generation {
            mem::forget(self.thread.take()); // it does not exist in a forked child
            return;
        }
        self.stop.store(true, Ordering::SeqCst);
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there was already reported
        }
    }
}

struct Driver {
    engine: Arc<EngineLock>,
    link: Arrivals,
    waker: Arc<Waker>,
    stop: Arc<AtomicBool>,
    /// Polls of the application that drove the engine.
    polls: Arc<AtomicU64>,
    /// How long it spins before it sleeps.
    spin: Nanos,
}

/// What one round of driving left.
struct Round {
    /// Packets came, or requests were submitted, or more is to be sent at once.
    is_busy: bool,
    /// Copies of the GPU's copy engine are under way.
    awaits_copies: bool,
    deadline: Option<Nanos>,
}

impl Driver {
    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn polls(&self) -> u64 {
        self.polls.load(Ordering::Relaxed)
    }

    /// `thread` mode.
    fn run_alone(&self) {
        while !self.is_stopped() {
            let deadline = self.drive(|| true);
            self.sleep(deadline);
        }
    }

    /// `caller` mode.
    fn stand_in(&self) {
        let mut attention = Attention::new(now_ns(), self.polls());
        while !self.is_stopped() {
            let (now, polls) = (now_ns(), self.polls());
            if self.waker.take_watch() {
                attention.end(now, polls);
            }
            if attention.is_paid(now, polls) {
                self.round(true);
                if self.waker.stand_by() && wait::for_peers_or(self.waker.fd(), &self.link, WINDOW_NS) {
                    self.waker.clear();
                }
                self.waker.stand_up();
            } else {
                // Goes on as long as the application leaves it to us.
                let deadline = self.drive(|| self.polls() == polls);
                self.sleep(deadline);
            }
        }
    }

    /// Drives until nothing has come for the length of a spin, or `goes_on` says no; when to come back.
    fn drive(&self, goes_on: impl Fn() -> bool) -> Option<Nanos> {
        let mut idle_since = None;
        let mut is_first = true;
        loop {
            let Round { is_busy, awaits_copies, deadline } = self.round(mem::take(&mut is_first));
            if self.is_stopped() || !goes_on() {
                return deadline;
            }
            if is_busy {
                idle_since = None;
                continue;
            }
            let now = now_ns();
            if deadline.is_some_and(|at| at <= now) {
                continue;
            }
            let spin = if awaits_copies { COPY_SPIN_NS } else { self.spin };
            if now.saturating_sub(*idle_since.get_or_insert(now)) >= spin {
                return deadline;
            }
            std::hint::spin_loop();
        }
    }

    fn round(&self, is_first: bool) -> Round {
        let mut engine = self.engine.lock_to_drive();
        if is_first {
            engine.link.attend();
        }
        let submitted = engine.core.take_submissions(now_ns);
        let received = engine.progress();
        let round = Round {
            is_busy: submitted || received > 0,
            awaits_copies: engine.awaits_copies(),
            deadline: engine.deadline(),
        };
        release(engine);
        round
    }

    /// Sleeps until something arrives, somebody wakes us, or the deadline.
    fn sleep(&self, deadline: Option<Nanos>) {
        self.waker.fall_asleep(deadline);
        let has_work = !self.engine.submissions.is_empty();
        // A thread that changed the engine's deadline before we fell asleep did not wake us. One that has the lock right now may not see
        // us asleep either: then sleep for a moment only.
        let known = self.engine.try_lock().map(|engine| engine.deadline());
        let known = known.unwrap_or_else(|| Some(now_ns().saturating_add(TIMER_SLACK_NS)));
        let deadline = [deadline, known].into_iter().flatten().min();
        let timeout = deadline.map(|at| at.saturating_sub(now_ns()));
        let may_sleep = !has_work && timeout != Some(0);
        if may_sleep && wait::for_packets_or(self.waker.fd(), &self.link, timeout) {
            self.waker.clear();
        }
        self.waker.wake_up();
    }
}
