//! The engine thread.
//!
//! In `thread` mode it drives the engine: as long as there is work, then for the length of a spin.
//! Then it sleeps until a packet, a submission or a timer. In `caller` mode it does the same only
//! while the application does not poll.

use std::io;
use std::mem;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use nobounce_memory::signals::BlockedSignals;
use nobounce_protocol::timing::Nanos;

use crate::links::now_ns;
use crate::process::cpu::ask_for_short_slices;
use crate::process::fork;
use crate::soft::events::event::AsyncEvent;
use crate::soft::progress::attention::{Attention, Callers, WINDOW_NS};
use crate::soft::progress::exit_work::{self, RunningThread};
use crate::soft::progress::lock::{EngineLock, release};
use crate::soft::progress::mode::Mode;
use crate::soft::progress::wait::{self, Arrivals};
use crate::sync::spin::AdaptiveSpin;
use crate::sync::spin::{CALLER_SPIN_NS, THREAD_SPIN_NS};
use crate::sync::waker::{TIMER_SLACK_NS, Waker};

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
        callers: &Arc<Callers>,
    ) -> io::Result<Self> {
        let stop = Arc::<AtomicBool>::default();
        let driver = ThreadDriver {
            engine: engine.clone(),
            link,
            waker: waker.clone(),
            stop: stop.clone(),
            callers: callers.clone(),
        };
        let _blocked = BlockedSignals::new();
        let name = if number == 0 { "nobounce".into() } else { format!("nobounce-{number}") };
        let running = RunningThread::new();
        let run = move || {
            let _running = running;
            ask_for_short_slices();
            driver.engine.lock_to_drive().cpu.start();
            let driven = catch_unwind(AssertUnwindSafe(|| match mode {
                Mode::Thread => driver.run_alone(),
                Mode::Caller => driver.stand_in(),
            }));
            driver.engine.lock_to_drive().cpu.stop();
            if driven.is_err() {
                driver.report_panic();
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

struct ThreadDriver {
    engine: Arc<EngineLock>,
    link: Arrivals,
    waker: Arc<Waker>,
    stop: Arc<AtomicBool>,
    callers: Arc<Callers>,
}

/// The result of one round of driving.
struct Round {
    /// Packets arrived, or requests were submitted.
    is_busy: bool,
    deadline: Option<Nanos>,
}

impl ThreadDriver {
    /// A program that waits for completions must learn that none will come.
    fn report_panic(&self) {
        tracing::error!("an engine thread panicked: the device is dead (IBV_EVENT_DEVICE_FATAL)");
        self.engine.lock_to_drive().core.reports.events.push(AsyncEvent::DeviceFatal);
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// `thread` mode.
    fn run_alone(&self) {
        let mut spin = AdaptiveSpin::fixed(THREAD_SPIN_NS);
        while !self.is_stopped() {
            let deadline = self.drive(&mut spin, || true);
            self.sleep_on_link(deadline);
        }
    }

    /// `caller` mode.
    fn stand_in(&self) {
        let mut attention = Attention::new(now_ns(), &self.callers);
        let mut spin = AdaptiveSpin::adaptive(CALLER_SPIN_NS);
        while !self.is_stopped() {
            let now = now_ns();
            if self.waker.take_watch() {
                attention.end(now, &self.callers);
            }
            if attention.is_paid(now, &self.callers) {
                self.glance();
                let polls = self.callers.polls();
                let stands_by = self.waker.stand_by();
                let is_woken = stands_by && wait::for_wake(self.waker.fd(), Some(WINDOW_NS));
                if is_woken {
                    self.waker.clear();
                }
                self.waker.stand_up();
                if stands_by && !is_woken && self.callers.have_watched_since(polls) {
                    self.sleep(None, || self.callers.have_watched_since(polls), wait::for_wake);
                }
            } else {
                // Stops driving at the first poll.
                let polls = self.callers.polls();
                let deadline = self.drive(&mut spin, || self.callers.polls() == polls);
                self.sleep_on_link(deadline);
            }
        }
    }

    /// Drives until nothing has arrived for the length of a spin, or `goes_on` is false; returns
    /// the next deadline.
    fn drive(&self, spin: &mut AdaptiveSpin, goes_on: impl Fn() -> bool) -> Option<Nanos> {
        let mut is_first = true;
        loop {
            let Round { is_busy, deadline } = self.round(mem::take(&mut is_first));
            if self.is_stopped() || !goes_on() {
                return deadline;
            }
            if is_busy {
                spin.found();
                continue;
            }
            let now = now_ns();
            if deadline.is_some_and(|at| at <= now) {
                continue;
            }
            if spin.is_over(now) {
                spin.slept();
                return deadline;
            }
            std::hint::spin_loop();
        }
    }

    /// One round, unless another thread drives: timers, and peers that come and go.
    fn glance(&self) {
        exit_work::serve();
        if let Some(mut engine) = self.engine.try_lock() {
            engine.link.poll_control();
            engine.progress();
            release(engine);
        }
    }

    fn round(&self, is_first: bool) -> Round {
        exit_work::serve();
        let mut engine = self.engine.lock_to_drive();
        if is_first {
            engine.link.poll_control();
        }
        let submitted = engine.core.take_submissions(now_ns);
        let received = engine.progress();
        let round = Round { is_busy: submitted || received > 0, deadline: engine.deadline() };
        release(engine);
        round
    }

    /// Sleeps until a packet, a wake-up or the deadline.
    fn sleep_on_link(&self, deadline: Option<Nanos>) {
        let may_sleep = || self.engine.submissions.is_empty();
        self.sleep(deadline, may_sleep, |wake, timeout| wait::for_packets_or(wake, &self.link, timeout));
    }

    /// Sleeps with `wait`, which returns whether the waker is readable, until the deadline. `may`
    /// is asked after the sleep was announced.
    fn sleep(
        &self,
        deadline: Option<Nanos>,
        may: impl Fn() -> bool,
        wait: impl FnOnce(RawFd, Option<Nanos>) -> bool,
    ) {
        self.waker.fall_asleep(deadline);
        let may = may();
        // A thread that changed the deadline before this one fell asleep did not wake it. A thread
        // that holds the lock right now may not see it asleep: then the sleep is short.
        let known = self.engine.try_lock().map(|engine| engine.deadline());
        let known = known.unwrap_or_else(|| Some(now_ns().saturating_add(TIMER_SLACK_NS)));
        let deadline = [deadline, known].into_iter().flatten().min();
        let timeout = deadline.map(|at| at.saturating_sub(now_ns()));
        if may && timeout != Some(0) && wait(self.waker.fd(), timeout) {
            self.waker.clear();
        }
        self.waker.wake_up();
    }
}
