//! The helper thread: serves those who neither post nor poll.
//!
//! While the application drives the device itself, packets must not wake anybody: on a small machine a wake-up costs
//! more than the packet. So the helper watches the sockets only as long as it is the one who finds the packets. When
//! it was woken and somebody else was faster, twice in a row, it sleeps on a timer, and looks again a millisecond later whether it is
//! needed. Most such wake-ups it does not even see: the kernel finds the packet gone, and sleeps on. On a CPU that both share each costs whoever
//! drives 4 us, so they are counted by the naps that the thread has taken.
//! (A program that spins on memory polls its queue now and then, too; what counts is who gets the packets. In a stream of
//! long messages whoever looks finds some: there it counts who moves by far the most.)
//! An application that arms a completion queue says that it is going to sleep: the helper watches at once.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::{io, mem};

use nobounce_memory::signals::BlockedSignals;

use super::bell::{Bell, LOOK_EVERY_NS};
use super::eventfd::EventFd;
use super::fork;
use super::judgement::{Judgement, Round, Verdict};
use super::lock::EngineLock;
use super::slices::ask_for_short_slices;
use super::spin::Spin;
use crate::links::shm::Doorbells;
use crate::links::{Link, now_ns};

/// A packet that is there while nobody has looked for so long is nobody's but the helper's.
const UNATTENDED_NS: u64 = 30_000;
/// The same for one that moves long messages, and is at work for as long as a whole one takes.
const ABANDONED_NS: u64 = 300_000;
/// How long it goes on polling after traffic at first, where there are CPUs to spare: longer than an application takes between two messages of one
/// conversation. Much longer is worse where nothing comes: a thread that spins takes from the one that shares its core, and what NCCL's application needs to start a
/// kernel was 23 us instead of 31 when this was 50 us instead of 300 (docs/measurements/nccl.md).
const SPIN_NS: u64 = 50_000;
/// How long the helper keeps away when somebody else is driving.
const REST_NS: libc::c_long = 10_000;
/// Rounds of work before it looks up again.
const MAX_ROUNDS: u32 = 256;
/// Pauses of the processor between two tries while somebody else drives.
const PAUSES: u32 = 20;
/// CPUs from which on spinning takes nothing away from the application.
pub(crate) const CPUS_TO_SPIN: usize = 4;

#[derive(Debug)]
pub(crate) struct Helper {
    stop: Arc<AtomicBool>,
    /// Calls of the application that drove the engine.
    pub(crate) polls: Arc<AtomicU64>,
    /// Packets that they took and sent.
    pub(crate) moved: Arc<AtomicU64>,
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
            polls: Arc::default(),
            moved: Arc::default(),
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
            polls: self.polls.clone(),
            moved: self.moved.clone(),
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

/// How the helper slept.
struct Slept {
    /// Until the deadline.
    due: bool,
    /// How often a packet disturbed it that somebody else took: the kernel looks at the sockets again, and sleeps on.
    missed: u32,
}

/// What the helper did when it was awake.
struct Served {
    /// Packets it found.
    found: usize,
    /// Packets that it took and sent.
    moved: u64,
    /// When to come back.
    deadline: Option<u64>,
    /// Where it found some: for how long nobody had looked.
    alone_ns: u64,
    /// The GPU's copies have to be looked after.
    copies: bool,
    /// Somebody else was driving.
    busy: bool,
}

impl Served {
    /// Whoever left something to us a moment ago took us for being on duty.
    fn look_once_more(&mut self, lock: &EngineLock) {
        let Some(mut engine) = lock.lock() else { return };
        if engine.is_idle() {
            return;
        }
        let before = engine.moved();
        self.found += engine.progress();
        self.moved += engine.moved().wrapping_sub(before);
        self.deadline = engine.deadline();
        self.busy = false;
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
    polls: Arc<AtomicU64>,
    moved: Arc<AtomicU64>,
    on_duty: Arc<AtomicBool>,
    several: Arc<AtomicBool>,
    spins: bool,
}

impl Worker {
    fn run(&self) {
        ask_for_short_slices();
        let (mut seen, mut seen_moved) =
            (self.polls.load(Ordering::Relaxed), self.moved.load(Ordering::Relaxed));
        let (mut judgement, mut deadline, mut looks, mut polled) =
            (Judgement::new(!self.spins), None, false, false);
        let mut spin = self.spins.then(|| Spin::new(SPIN_NS));
        while !self.stop.load(Ordering::SeqCst) {
            let watching = self.bell.begin_round();
            // Who has just called will do so again: until then look now and then instead of being woken each time.
            let soon = looks.then(|| now_ns() + LOOK_EVERY_NS);
            let asleep = now_ns();
            let Slept { due, missed } =
                self.wait(watching, polled, [deadline, soon].into_iter().flatten().min());
            let awake = now_ns();
            let called = self.bell.wake_up();
            let doubts = watching && polled && !due && judgement.is_in_doubt();
            let gave_way = doubts.then(|| {
                let before = self.moved.load(Ordering::Relaxed);
                self.rest();
                self.moved.load(Ordering::Relaxed) != before
            });
            let Some(engine) = self.engine.upgrade() else { return };
            // Where it would not spin, it is asleep or about to be: nobody leaves it anything.
            self.on_duty.store(self.spins, Ordering::SeqCst);
            let mut served = self.serve(&engine, spin.as_mut());
            self.on_duty.store(false, Ordering::SeqCst);
            // Where there is one engine, nobody leaves it anything.
            if self.spins && self.several.load(Ordering::SeqCst) {
                served.look_once_more(&engine);
            }
            let Served { found, moved: served, deadline: next, alone_ns, copies, busy } = served;
            drop(engine);
            deadline = next;
            match &mut spin {
                Some(spin) if served == 0 => spin.note_in_vain(),
                Some(spin) if watching && !due => spin.note_woken(awake.saturating_sub(asleep)),
                _ => {}
            }
            if busy {
                // Whoever drives may have been interrupted by us, on the only CPU there is for both: the packet that woke us lies there
                // until we let go, and would wake us again at once.
                self.rest();
            }
            let polls = self.polls.load(Ordering::Relaxed);
            let driven = polls.wrapping_sub(mem::replace(&mut seen, polls));
            polled = driven > 0;
            let moved = self.moved.load(Ordering::Relaxed);
            let moved = moved.wrapping_sub(mem::replace(&mut seen_moved, moved));
            // Who looks after copies is welcome however much the application moves: what they hold back makes others wait.
            let moved = if copies { 0 } else { moved };
            // An application that arms its queues calls us to watch; a timer of the protocol's is nobody's packet: neither says
            // anything about who is faster.
            let asked = called && self.bell.is_sleepy();
            looks = called;
            let (unattended, abandoned) = (alone_ns > UNATTENDED_NS, alone_ns > ABANDONED_NS);
            let missed = missed.saturating_add(u32::from(found == 0 && !due));
            let round =
                Round { watching, gave_way, found, missed, served, unattended, abandoned, driven, moved };
            if asked || (due && missed == 0 && !round.is_led()) {
                continue;
            }
            match judgement.judge(round) {
                Verdict::Stay => {}
                Verdict::StepBack => self.bell.step_back(),
                Verdict::StepUp => self.bell.step_up(),
            }
        }
    }

    /// Drives until there is nothing to do. Finds nothing when somebody else is driving.
    fn serve(&self, lock: &EngineLock, mut spin: Option<&mut Spin>) -> Served {
        let mut idle_since = None;
        let mut served =
            Served { found: 0, moved: 0, deadline: None, alone_ns: 0, copies: false, busy: false };
        let polls = self.polls.load(Ordering::Relaxed);
        // Where there are several engines, those who poll leave this one to us.
        let gives_way =
            || !self.several.load(Ordering::Relaxed) && self.polls.load(Ordering::Relaxed) != polls;
        for round in 0..u32::MAX {
            if round >= MAX_ROUNDS && (!self.spins || gives_way()) {
                break;
            }
            let Some(mut engine) = lock.try_lock() else {
                // Whoever drives has a CPU of its own: it will be our turn, if there is anything left to do then.
                let goes_on = !self.stop.load(Ordering::Relaxed) && !gives_way();
                if spin
                    .as_deref_mut()
                    .is_some_and(|spin| goes_on && !spin.is_over(*idle_since.get_or_insert_with(now_ns)))
                {
                    (0..PAUSES).for_each(|_| std::hint::spin_loop());
                    continue;
                }
                served.deadline = Some(now_ns() + LOOK_EVERY_NS);
                served.busy = true;
                return served;
            };
            let alone = if round == 0 { now_ns().saturating_sub(engine.driven_at()) } else { 0 };
            if round == 0 {
                engine.link.attend();
            }
            let before = engine.moved();
            let received = engine.progress();
            served.moved += engine.moved().wrapping_sub(before);
            served.copies |= engine.awaits_copies();
            served.deadline = engine.deadline();
            drop(engine);
            // Whoever waits for the lock (to post, or to register memory) must not wait for the end of the traffic.
            if self.spins {
                lock.make_way();
            }
            served.found += received;
            served.alone_ns = served.alone_ns.max(if received > 0 { alone } else { 0 });
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            if received > 0 || served.deadline.is_some_and(|at| at <= now_ns()) {
                idle_since = None;
                continue;
            }
            if spin.as_deref_mut().is_none_or(|spin| spin.is_over(*idle_since.get_or_insert_with(now_ns))) {
                break;
            }
            std::hint::spin_loop();
        }
        served
    }

    /// Lets others have the CPU for a moment.
    fn rest(&self) {
        let spec = libc::timespec { tv_sec: 0, tv_nsec: REST_NS };
        // SAFETY: no descriptors, a valid timespec, no signal mask.
        unsafe { libc::ppoll(std::ptr::null_mut(), 0, &raw const spec, std::ptr::null()) };
    }

    /// Sleeps until a packet comes (when watching), somebody wakes us, or the deadline. Where the application has `polled`, it may take packets
    /// away: those are counted, for half a microsecond, unless there are CPUs to spare, where being woken takes nothing from anybody.
    fn wait(&self, watching: bool, polled: bool, mut deadline: Option<u64>) -> Slept {
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
                return Slept { due: false, missed: 0 };
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
        let counts = watching && polled && !self.spins;
        let before = if counts { naps() } else { 0 };
        // SAFETY: `fds` is an array of that many pollfds, `spec` null or a valid timespec, no signal mask.
        let ready =
            unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, spec, std::ptr::null()) };
        if !watching {
            return Slept { due: false, missed: 0 };
        }
        self.disarm();
        // One nap is the call itself. Each further one began when a packet had woken us, and was gone by the time we had the CPU.
        let missed = if counts { naps().saturating_sub(before).saturating_sub(1) } else { 0 };
        Slept { due: ready == 0, missed: u32::try_from(missed).unwrap_or(u32::MAX) }
    }

    fn disarm(&self) {
        if let Some(doorbells) = &self.doorbells {
            doorbells.disarm();
        }
    }
}

/// How often this thread has gone to sleep so far.
fn naps() -> u64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: room for the structure, which is plain numbers.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init()
    };
    u64::try_from(usage.ru_nvcsw).unwrap_or(0)
}

/// CPUs this process may run on.
pub(crate) fn allowed_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Waits on `fd` alone.
    fn worker(fd: &EventFd) -> Worker {
        Worker {
            engine: Weak::new(),
            fds: vec![fd.as_raw_fd()],
            rare: None,
            doorbells: None,
            bell: Bell::new(EventFd::new().unwrap()),
            stop: Arc::default(),
            polls: Arc::default(),
            moved: Arc::default(),
            on_duty: Arc::default(),
            several: Arc::default(),
            spins: false,
        }
    }

    #[test]
    fn packets_that_somebody_else_took_are_counted() {
        let packet = EventFd::new().unwrap();
        let worker = worker(&packet);
        let missed = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !worker.stop.load(Ordering::SeqCst) {
                    packet.raise();
                    packet.take();
                    std::thread::sleep(Duration::from_micros(100));
                }
            });
            // A thread of this kind does not take the CPU from the one that wakes it, between its two calls.
            let no_priority = libc::sched_param { sched_priority: 0 };
            // SAFETY: a valid structure; 0 names this thread.
            unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const no_priority) };
            // Each wait takes a millisecond: there is no engine to say how long it may sleep.
            let missed = (0..5000).map(|_| worker.wait(true, true, None).missed).find(|missed| *missed > 0);
            worker.stop.store(true, Ordering::SeqCst);
            missed
        });
        assert!(missed.is_some(), "what woke it was never gone in time");
    }

    #[test]
    fn a_quiet_wait_has_missed_nothing() {
        let packet = EventFd::new().unwrap();
        let Slept { due, missed } = worker(&packet).wait(true, true, None);
        assert!(due && missed == 0);
        packet.raise();
        let Slept { due, missed } = worker(&packet).wait(true, true, None);
        assert!(!due && missed == 0);
    }
}
