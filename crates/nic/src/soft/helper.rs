//! The helper thread: serves those who neither post nor poll.
//!
//! While the application drives the device itself, packets must not wake anybody: on a small machine a wake-up costs
//! more than the packet. So the helper watches the sockets only as long as it is the one who finds the packets. When
//! it was woken and somebody else was faster, it sleeps on a timer, and looks again a millisecond later whether it is
//! needed. (A program that spins on memory polls its queue now and then, too; what counts is who gets the packets.)
//! An application that arms a completion queue says that it is going to sleep: the helper watches at once.
//!
//! Where there are CPUs to spare it stays awake for a while after traffic, whoever had that. As long as others poll it stands by: the engine is theirs,
//! and so is what they post. Where it has much to move it is on duty instead: it alone drives, and the others leave it what they have (`pace.rs`).

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, Weak};
use std::thread::JoinHandle;
use std::{io, mem};

use nobounce_memory::signals::BlockedSignals;

use super::bell::{Bell, LOOK_EVERY_NS};
use super::engine::Engine;
use super::eventfd::EventFd;
use super::fork;
use super::judgement::{Judgement, Round, Verdict};
use super::lock::EngineLock;
use super::others::{Driven, Others};
use super::pace::Pace;
use super::slices::ask_for_short_slices;
use crate::links::shm::Doorbells;
use crate::links::{Link, now_ns};

/// A packet that is there while nobody has looked for so long is nobody's but the helper's.
const UNATTENDED_NS: u64 = 30_000;
/// How long it goes on polling after traffic, where there are CPUs to spare: longer than an application takes between two messages of one
/// conversation. Much longer is worse: a thread that spins takes from the one that shares its core, and what NCCL's application needs to start a
/// kernel was 23 us instead of 31 when this was 50 us instead of 300 (docs/measurements/nccl.md).
const SPIN_NS: u64 = 50_000;
/// How long the helper keeps away when somebody else is driving.
const REST_NS: libc::c_long = 10_000;
/// Rounds of work before it looks up again.
const MAX_ROUNDS: u32 = 256;
/// Pauses of the processor between two looks while somebody else drives, a microsecond or so. While it stands by they grow: each look takes from the one
/// who drives what he counts by, and the next count costs him a tenth of a microsecond more.
const PAUSES: u32 = 20;
const MOST_PAUSES: u32 = 160;
/// How long it stands by without having been needed once: others are faster.
const STAND_BY_NS: u64 = 1_000_000;
/// CPUs from which on spinning takes nothing away from the application.
pub(crate) const CPUS_TO_SPIN: usize = 4;

#[derive(Debug)]
pub(crate) struct Helper {
    stop: Arc<AtomicBool>,
    /// What the application drove by itself.
    pub(crate) driven: Driven,
    pub(crate) bell: Bell,
    /// It is driving the engine without pause.
    pub(crate) on_duty: Arc<AtomicBool>,
    /// Its engine's place among those of the device.
    number: usize,
    thread: Option<JoinHandle<()>>,
    generation: u64,
}

impl Helper {
    pub(crate) fn new(number: usize) -> io::Result<Self> {
        Ok(Self {
            stop: Arc::default(),
            driven: Driven::default(),
            bell: Bell::new(EventFd::new()?),
            on_duty: Arc::default(),
            number,
            thread: None,
            generation: fork::generation(),
        })
    }

    pub(crate) fn is_running(&self) -> bool {
        self.thread.is_some()
    }

    /// Starts the thread. `several` tells whether the device has other engines, too.
    pub(crate) fn start(
        &mut self,
        engine: &Arc<EngineLock>,
        link: &dyn Link,
        several: &Arc<AtomicBool>,
    ) -> io::Result<()> {
        let worker = Worker {
            engine: Arc::downgrade(engine),
            fds: link.wake_fds(),
            rare: link.rare_fd(),
            doorbells: link.doorbells(),
            bell: self.bell.clone(),
            stop: self.stop.clone(),
            driven: self.driven.clone(),
            on_duty: self.on_duty.clone(),
            several: several.clone(),
            spins: allowed_cpus() >= CPUS_TO_SPIN,
        };
        let _blocked = BlockedSignals::new();
        let name = if self.number == 0 { "nobounce".into() } else { format!("nobounce-{}", self.number) };
        self.thread = Some(std::thread::Builder::new().name(name).spawn(move || worker.run())?);
        Ok(())
    }

    /// Stops the thread and waits for it.
    pub(crate) fn stop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.bell.wake.raise();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there was already reported
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if fork::current() == self.generation {
            self.stop();
        } else {
            mem::forget(self.thread.take()); // it does not exist in a forked child
        }
    }
}

/// What the helper did when it was awake.
#[derive(Default)]
struct Served {
    /// Packets it found.
    found: usize,
    /// When to come back.
    deadline: Option<u64>,
    /// They lay there, and nobody was looking.
    unattended: bool,
    /// Somebody else was driving.
    busy: bool,
}

impl Served {
    /// Drives the engine once; how many packets came.
    fn drive(&mut self, mut engine: MutexGuard<'_, Engine>, first: bool) -> usize {
        let alone = first && now_ns().saturating_sub(engine.driven_at()) > UNATTENDED_NS;
        if first {
            engine.link.attend();
        }
        let received = engine.progress();
        self.deadline = engine.deadline();
        self.found += received;
        self.unattended |= alone && received > 0;
        received
    }
}

struct Worker {
    engine: Weak<EngineLock>,
    fds: Vec<RawFd>,
    /// Readable when somebody comes or goes: always watched.
    rare: Option<RawFd>,
    /// How to be woken by packets that make no descriptor readable.
    doorbells: Option<Arc<Doorbells>>,
    bell: Bell,
    stop: Arc<AtomicBool>,
    driven: Driven,
    on_duty: Arc<AtomicBool>,
    several: Arc<AtomicBool>,
    spins: bool,
}

impl Worker {
    fn run(&self) {
        ask_for_short_slices();
        let mut seen = self.driven.polls();
        let (mut judgement, mut pace, mut deadline, mut looks) =
            (Judgement::new(), Pace::default(), None, false);
        while !self.stop.load(Ordering::SeqCst) {
            let watching = self.bell.begin_round();
            // Who has just called will do so again: until then look now and then instead of being woken each time.
            let soon = looks.then(|| now_ns() + LOOK_EVERY_NS);
            let due = self.wait(watching, [deadline, soon].into_iter().flatten().min());
            let called = self.bell.wake_up();
            let Some(engine) = self.engine.upgrade() else { return };
            let served =
                if self.spins { self.attend(&engine, &mut pace, watching) } else { self.serve(&engine) };
            let Served { found, deadline: next, unattended, busy } = served;
            drop(engine);
            deadline = next;
            if busy {
                // Whoever drives may have been interrupted by us, on the only CPU there is for both: the packet that woke us lies there
                // until we let go, and would wake us again at once.
                self.rest();
            }
            let polls = self.driven.polls();
            let driven = polls.wrapping_sub(mem::replace(&mut seen, polls));
            // An application that arms its queues calls us to watch; a timer of the protocol's is nobody's packet: neither says
            // anything about who is faster.
            let asked = called && self.bell.is_sleepy();
            looks = called;
            if asked || due {
                continue;
            }
            match judgement.judge(Round { watching, found, unattended, driven }) {
                Verdict::Stay => {}
                Verdict::StepBack => self.bell.step_back(),
                Verdict::StepUp => self.bell.step_up(),
            }
        }
    }

    /// Drives until there is nothing to do. Finds nothing when somebody else is driving.
    fn serve(&self, lock: &EngineLock) -> Served {
        let mut served = Served::default();
        for round in 0..MAX_ROUNDS {
            let Some(engine) = lock.try_lock() else {
                served.deadline = Some(now_ns() + LOOK_EVERY_NS);
                served.busy = true;
                return served;
            };
            let received = served.drive(engine, round == 0);
            let is_due = served.deadline.is_some_and(|at| at <= now_ns());
            if self.stop.load(Ordering::Relaxed) || (received == 0 && !is_due) {
                break;
            }
        }
        served
    }

    /// The same where there are CPUs to spare: until there has been nothing to do for a while. One that does not watch only looks whether it is needed.
    fn attend(&self, lock: &EngineLock, pace: &mut Pace, watching: bool) -> Served {
        let mut served = Served::default();
        let mut others = Others::new(&self.driven);
        let (mut idle_since, mut needless_since) = (None, None);
        let (mut first, mut pauses) = (true, PAUSES);
        while !self.stop.load(Ordering::Relaxed) {
            let now = now_ns();
            if others.have_moved() {
                idle_since = None;
            }
            // What is left to whoever is on duty is seen by it, or by the round after it has said that it no longer is.
            if !self.on_duty.load(Ordering::Relaxed) && !first && others.are_polling(now) {
                let is_needless = is_over(&mut needless_since, now, STAND_BY_NS);
                if is_needless || !watching || is_over(&mut idle_since, now, SPIN_NS) {
                    if is_needless {
                        served.found = 0; // what it found when it came the others would have found, too
                    }
                    served.deadline = Some(now + LOOK_EVERY_NS);
                    return served;
                }
                (0..pauses).for_each(|_| std::hint::spin_loop());
                pauses = (pauses * 2).min(MOST_PAUSES);
                continue;
            }
            pauses = PAUSES;
            let Some(engine) = lock.try_lock() else {
                // Whoever drives has a CPU of its own: it will be our turn, if there is anything left to do then.
                if is_over(&mut idle_since, now, SPIN_NS) {
                    served.deadline = Some(now + LOOK_EVERY_NS);
                    served.busy = true;
                    break;
                }
                (0..PAUSES).for_each(|_| std::hint::spin_loop());
                continue;
            };
            let is_near = engine.link.is_near();
            let is_bulky = pace.judge(now, engine.hauled());
            let received = served.drive(engine, mem::take(&mut first));
            // Whoever waits for the lock (to post, or to register memory) must not wait for the end of the traffic.
            lock.make_way();
            if received > 0 || served.deadline.is_some_and(|at| at <= now) {
                (idle_since, needless_since) = (None, None);
            } else if is_over(&mut idle_since, now, SPIN_NS) {
                break;
            } else {
                std::hint::spin_loop();
            }
            // Where every packet is a system call, several engines are faster with threads of their own than with the application's.
            let keeps = is_bulky || (!is_near && self.several.load(Ordering::Relaxed));
            if keeps != self.on_duty.load(Ordering::Relaxed) {
                self.on_duty.store(keeps, Ordering::SeqCst);
                first = !keeps; // a last look
            }
        }
        if self.on_duty.swap(false, Ordering::SeqCst)
            && let Some(engine) = lock.try_lock()
        {
            served.drive(engine, false);
        }
        served
    }

    /// Lets others have the CPU for a moment.
    fn rest(&self) {
        let spec = libc::timespec { tv_sec: 0, tv_nsec: REST_NS };
        // SAFETY: no descriptors, a valid timespec, no signal mask.
        unsafe { libc::ppoll(std::ptr::null_mut(), 0, &raw const spec, std::ptr::null()) };
    }

    /// Sleeps until a packet comes (when watching), somebody wakes us, or the deadline; whether it was the deadline.
    fn wait(&self, watching: bool, mut deadline: Option<u64>) -> bool {
        if watching {
            deadline = self.bell.fall_asleep(deadline, now_ns(), || {
                let engine = self.engine.upgrade()?;
                engine.try_lock().map(|engine| engine.deadline())
            });
        }
        let readable = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut fds = vec![readable(self.bell.wake.as_raw_fd())];
        fds.extend(self.rare.map(readable));
        let timeout = if watching {
            fds.extend(self.fds.iter().copied().map(readable));
            if self.doorbells.as_ref().is_some_and(|doorbells| doorbells.arm()) {
                self.disarm();
                return false;
            }
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
        let ready =
            unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, spec, std::ptr::null()) };
        if watching {
            self.disarm();
        }
        watching && ready == 0
    }

    fn disarm(&self) {
        if let Some(doorbells) = &self.doorbells {
            doorbells.disarm();
        }
    }
}

/// Whether nothing has come for so long that it is not worth while to go on spinning.
fn is_over(since: &mut Option<u64>, now: u64, limit: u64) -> bool {
    now - *since.get_or_insert(now) > limit
}

/// CPUs this process may run on.
pub(crate) fn allowed_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}
