//! Two namespaces, a TUN device in each, and a thread for each direction between them.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::config::PathConfig;
use crate::model::{PathCounts, PathModel};
use crate::namespace::{Namespace, owned};
use crate::tun::{self, Tun};

/// Packets read before those that are due are written again.
const BATCH: usize = 32;
/// The longest IP packet.
const MAX_PACKET: usize = 1 << 16;

/// An end of the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// 10.79.0.1 and fd79::1.
    Near,
    /// 10.79.0.2 and fd79::2.
    Far,
}

impl End {
    const fn number(self) -> u8 {
        match self {
            Self::Near => 1,
            Self::Far => 2,
        }
    }

    /// Its IPv4 address.
    pub const fn v4(self) -> Ipv4Addr {
        Ipv4Addr::new(10, 79, 0, self.number())
    }

    /// Its IPv6 address.
    pub const fn v6(self) -> Ipv6Addr {
        Ipv6Addr::new(0xfd79, 0, 0, 0, 0, 0, 0, self.number() as u16)
    }
}

/// Why there is no path.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot emulate a network path: {source}; it needs network namespaces (root, or user namespaces) and access to /dev/net/tun"
)]
pub struct EmulatorError {
    #[from]
    source: io::Error,
}

/// What one direction did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectionReport {
    /// What happened to packets.
    pub counts: PathCounts,
    /// Packets that left.
    pub delivered: u64,
    /// The sum of the times by which they left late.
    pub late: Duration,
    /// Packets that the device dropped because they were not read in time.
    pub overrun: u64,
    /// CPU time of the thread.
    pub cpu: Duration,
}

/// A running path. Dropping it ends it.
#[derive(Debug)]
pub struct Emulator {
    near: Namespace,
    far: Namespace,
    /// Readable once the threads have to end.
    stop: Arc<OwnedFd>,
    threads: Vec<JoinHandle<DirectionReport>>,
}

impl Emulator {
    /// Makes the namespaces and devices, and forwards from now on.
    ///
    /// A user other than root needs user namespaces: the process then enters one, and must have a
    /// single thread.
    ///
    /// # Errors
    /// Namespaces or the device are not allowed here.
    pub fn start(config: &PathConfig) -> Result<Self, EmulatorError> {
        let open = |end: End| Namespace::make(|| Tun::open(end.v4(), end.v6(), config.mtu));
        let (near, near_tun) = open(End::Near)?;
        let (far, far_tun) = open(End::Far)?;
        let (near_tun, far_tun) = (Arc::new(near_tun), Arc::new(far_tun));
        // SAFETY: eventfd takes numbers only.
        let stop = owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) })?;
        let stop = Arc::new(stop);
        let mut emulator = Self { near, far, stop, threads: Vec::new() };
        let directions = [("path out", &near_tun, &far_tun), ("path back", &far_tun, &near_tun)];
        for (number, (name, from, to)) in (0..).zip(directions) {
            let mut direction = Direction {
                from: Arc::clone(from),
                to: Arc::clone(to),
                model: PathModel::new(config, number),
                stop: Arc::clone(&emulator.stop),
                report: DirectionReport::default(),
            };
            let builder = std::thread::Builder::new().name(name.into());
            emulator.threads.push(builder.spawn(move || direction.forward())?);
        }
        Ok(emulator)
    }

    /// Makes the command run at an end of the path. It is killed when the thread that starts it
    /// ends.
    ///
    /// # Errors
    /// There are too many open files.
    pub fn enter(&self, end: End, command: &mut Command) -> io::Result<()> {
        self.namespace(end).enter(command)
    }

    /// Runs `work` at an end of the path, on a thread of its own.
    ///
    /// # Errors
    /// Those of `work`.
    pub fn run<T: Send>(&self, end: End, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        self.namespace(end).run(work)
    }

    fn namespace(&self, end: End) -> &Namespace {
        match end {
            End::Near => &self.near,
            End::Far => &self.far,
        }
    }

    /// Ends the path: what the direction out of the near end did, and the one back.
    pub fn stop(mut self) -> [DirectionReport; 2] {
        let mut reports = self.end();
        for (report, end) in reports.iter_mut().zip([End::Near, End::Far]) {
            report.overrun = self.namespace(end).run(tun::dropped).unwrap_or(0);
        }
        reports
    }

    fn end(&mut self) -> [DirectionReport; 2] {
        let one = 1_u64.to_ne_bytes();
        // SAFETY: the descriptor is open, and the eight bytes are read only.
        _ = unsafe { libc::write(self.stop.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        let mut reports = [DirectionReport::default(); 2];
        for (report, thread) in reports.iter_mut().zip(self.threads.drain(..)) {
            *report = thread.join().unwrap_or_default();
        }
        reports
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        self.end();
    }
}

struct Direction {
    from: Arc<Tun>,
    to: Arc<Tun>,
    model: PathModel,
    stop: Arc<OwnedFd>,
    report: DirectionReport,
}

impl Direction {
    fn forward(&mut self) -> DirectionReport {
        // Timers of the kernel are late by up to 50 us otherwise.
        // SAFETY: it takes numbers only.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
        let priority = libc::sched_param { sched_priority: 1 };
        // A network does not wait for the CPUs of its ends. Only root may ask for this.
        // SAFETY: the parameter is live, and the call only reads it.
        _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const priority) };
        let mut buffer = vec![0; MAX_PACKET];
        while self.turn(&mut buffer) {}
        self.report.counts = self.model.counts();
        self.report.cpu = Duration::from_nanos(clock(libc::CLOCK_THREAD_CPUTIME_ID));
        self.report
    }

    /// Reads what is there, writes what is due, and waits; false at the end.
    fn turn(&mut self, buffer: &mut [u8]) -> bool {
        let mut is_idle = false;
        for _ in 0..BATCH {
            let Ok(Some(len)) = self.from.read(buffer) else {
                is_idle = true;
                break;
            };
            let message = self.model.offer(clock(libc::CLOCK_MONOTONIC), &buffer[..len]);
            if let Some(message) = message {
                self.from.write(&message);
            }
        }
        let mut now = clock(libc::CLOCK_MONOTONIC);
        while let Some((at, packet)) = self.model.pop_due(now) {
            if self.to.write(&packet) {
                self.report.delivered += 1;
                self.report.late += Duration::from_nanos(now - at);
            }
            self.model.recycle(packet);
            now = clock(libc::CLOCK_MONOTONIC);
        }
        !is_idle || self.wait(now)
    }

    fn wait(&self, now: u64) -> bool {
        let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut wanted = [poll(self.from.fd().as_raw_fd()), poll(self.stop.as_raw_fd())];
        let limit = self.model.next_due().map(|due| {
            let left = Duration::from_nanos(due.saturating_sub(now));
            libc::timespec {
                tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX),
                tv_nsec: libc::c_long::from(i32::try_from(left.subsec_nanos()).unwrap_or(0)),
            }
        });
        let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: there are two descriptors, and the timeout is null or lives until the call ends.
        unsafe { libc::ppoll(wanted.as_mut_ptr(), 2, limit, std::ptr::null()) };
        wanted[1].revents == 0
    }
}

/// A clock of the kernel, in nanoseconds.
fn clock(id: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it writes the time into the structure.
    unsafe { libc::clock_gettime(id, &raw mut time) };
    let (seconds, rest) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000_000 + rest.unwrap_or(0)
}
