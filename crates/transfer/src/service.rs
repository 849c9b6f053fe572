//! The agent's thread: the only one that posts requests, polls completions and reads frames.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use nobounce_nic::ask_for_short_slices;

use crate::endings::Endings;
use crate::error::Gone;
use crate::frame::Frame;
use crate::link::Link;
use crate::shared::{Arrival, Command, Shared};

/// How long the thread polls for completions and frames before it sleeps. A sleep makes the engine
/// thread drive the device, and costs each end two wake-ups; 50 us are shorter than the answer to a
/// request for 64 KiB by UDP. Such requests by shared memory take 25 us on two quiet CPUs, and with
/// both ends on one CPU 160 us with backoff and 600 us without.
const SPIN: Duration = Duration::from_micros(200);
/// Waits without a spin after fruitless ones, at most.
const MOST_SKIPPED: u32 = 32;

#[derive(Debug)]
pub(crate) struct Service {
    shared: Arc<Shared>,
    links: Vec<Link>,
    polled: Vec<libc::pollfd>,
    is_stopped: bool,
    /// Time of the last keep-alive check.
    kept_alive: Instant,
    keep_alive_every: Duration,
    endings: Endings,
}

impl Service {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self {
            links: Vec::new(),
            polled: Vec::new(),
            is_stopped: false,
            kept_alive: Instant::now(),
            keep_alive_every: shared.silence,
            endings: Endings::default(),
            shared,
        }
    }

    /// Runs until the agent is dropped.
    pub(crate) fn run(mut self) {
        // Refuses commands when the thread has ended, also by a panic.
        let _stop = Stop(self.shared.clone());
        ask_for_short_slices();
        let (mut spin, mut idle) = (Spin::default(), None);
        while !self.is_stopped {
            if self.turn() {
                if idle.take().is_some_and(|(_, length)| length > Duration::ZERO) {
                    spin.found();
                }
                continue;
            }
            let is_waiting = self.links.iter().any(Link::is_waiting);
            let begin = || (Instant::now(), if is_waiting { spin.next() } else { Duration::ZERO });
            let (since, length) = *idle.get_or_insert_with(begin);
            if is_waiting && since.elapsed() < length {
                continue;
            }
            if length > Duration::ZERO {
                spin.missed();
            }
            if self.sleep() {
                idle = None;
            }
        }
        while let Some(link) = self.links.first() {
            self.end(link.peer.key, Gone::ClosedHere);
        }
        self.endings.wait();
    }

    /// Carries on with everything; returns whether anything happened.
    fn turn(&mut self) -> bool {
        let mut commands = Vec::new();
        self.shared.take_commands(&mut commands);
        let mut is_busy = !commands.is_empty();
        commands.into_iter().for_each(|command| self.carry_out(command));
        let now = Instant::now();
        let mut gone = Vec::new();
        for link in &mut self.links {
            match link.turn(now) {
                Ok(busy) => is_busy |= busy,
                Err(reason) => gone.push((link.peer.key, reason)),
            }
        }
        is_busy |= !gone.is_empty();
        gone.into_iter().for_each(|(key, reason)| self.end(key, reason));
        if now.saturating_duration_since(self.kept_alive) >= self.keep_alive_every {
            self.keep_alive(now);
        }
        is_busy
    }

    fn link(&mut self, key: u64) -> Option<&mut Link> {
        self.links.iter_mut().find(|link| link.peer.key == key)
    }

    fn end(&mut self, key: u64, reason: Gone) {
        if let Some(at) = self.links.iter().position(|link| link.peer.key == key) {
            let link = self.links.swap_remove(at);
            link.note_end(&reason);
            self.endings.push(link, reason);
        }
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Add(arrival) => self.add(*arrival),
            Command::Announce { peer, id, tag } => {
                if let Some(link) = self.link(peer) {
                    link.announce(id, tag);
                }
            }
            Command::Submit { peer, job } => match self.link(peer.key) {
                Some(link) => link.submit(*job),
                None => self.shared.refuse_job(&peer, *job, Gone::Ended),
            },
            Command::Finish { peer, id, abort } => {
                if let Some(link) = self.link(peer) {
                    link.finish(id, abort);
                }
            }
            Command::Send(frame) => self.links.iter_mut().for_each(|link| _ = link.send(&frame)),
            Command::SendTo { peer, frame } => {
                if let Some(link) = self.link(peer) {
                    link.send(&frame);
                }
            }
            Command::Close { peer } => self.end(peer, Gone::ClosedHere),
            Command::Cancel { transfer } => self.links.iter_mut().for_each(|link| link.cancel(transfer)),
            Command::Grant { peer } => {
                if let Some(link) = self.link(peer) {
                    link.grant();
                }
            }
            Command::Stop => self.is_stopped = true,
        }
    }

    fn add(&mut self, arrival: Arrival) {
        let is_old = |link: &&Link| arrival.peer.replaces(&link.peer);
        let old: Vec<_> = self.links.iter().filter(is_old).map(|link| link.peer.key).collect();
        old.into_iter().for_each(|key| self.end(key, Gone::Replaced));
        let mut link = Link::new(&self.shared, arrival);
        link.grant();
        let exports = self.shared.exports.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, version, region) in exports.all() {
            link.send(&Frame::Export { name: name.to_owned(), version, region });
        }
        link.send(&Frame::Version { version: exports.version() });
        drop(exports);
        self.links.push(link);
        let every = self.links.iter().map(|link| link.alive_every / 4).min();
        self.keep_alive_every = every.unwrap_or(self.shared.silence);
    }

    /// Sleeps until a command, a frame or a completion comes, or a keep-alive is due. Returns
    /// whether it slept.
    fn sleep(&mut self) -> bool {
        self.links.iter_mut().for_each(Link::prepare_sleep);
        // Completions before arming raise no event.
        if self.turn() || !self.shared.fall_asleep() {
            self.shared.awake();
            return false;
        }
        self.polled.clear();
        self.polled.push(interest(self.shared.wake_fd(), false));
        for link in &self.links {
            self.polled.push(interest(link.stream.as_raw_fd(), link.has_unsent()));
            self.polled.push(interest(link.connection.channel().as_raw_fd(), false));
        }
        let now = Instant::now();
        let deadline = self.links.iter().map(Link::deadline).min();
        wait(&mut self.polled, deadline.map(|at| at.saturating_duration_since(now)));
        self.shared.awake();
        for (link, fds) in self.links.iter_mut().zip(self.polled[1..].chunks(2)) {
            if fds[0].revents != 0 {
                link.poll_side_channel();
            }
            if fds[1].revents != 0 {
                link.take_event();
            }
        }
        self.keep_alive(Instant::now());
        true
    }

    fn keep_alive(&mut self, now: Instant) {
        self.kept_alive = now;
        let mut gone = Vec::new();
        for link in self.links.iter_mut().filter(|link| now >= link.deadline()) {
            if let Err(reason) = link.keep_alive(now) {
                gone.push((link.peer.key, reason));
            }
        }
        gone.into_iter().for_each(|(key, reason)| self.end(key, reason));
    }
}

/// Adaptive spin with exponential backoff: where the peer shares the CPU, a spin only keeps it from
/// running.
#[derive(Debug, Default)]
struct Spin {
    /// Waits left without a spin.
    skip: u32,
    /// Waits to skip after the next fruitless spin.
    backoff: u32,
}

impl Spin {
    /// How long the wait that begins spins.
    fn next(&mut self) -> Duration {
        let skips = self.skip > 0;
        self.skip = self.skip.saturating_sub(1);
        if skips { Duration::ZERO } else { SPIN }
    }

    fn found(&mut self) {
        self.backoff = 0;
    }

    fn missed(&mut self) {
        self.skip = self.backoff;
        self.backoff = (self.backoff * 2).clamp(1, MOST_SKIPPED);
    }
}

/// Takes no more commands when it is dropped.
struct Stop(Arc<Shared>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

fn interest(fd: RawFd, writable: bool) -> libc::pollfd {
    let events = if writable { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
    libc::pollfd { fd, events, revents: 0 }
}

/// Waits until one of them is ready; forever without a timeout. Signals end it early.
#[allow(unsafe_code)] // one system call
pub(crate) fn wait(fds: &mut [libc::pollfd], timeout: Option<Duration>) {
    let count = libc::nfds_t::try_from(fds.len()).unwrap_or(0);
    let time = timeout.map(|time| libc::timespec {
        tv_sec: libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: time.subsec_nanos().into(),
    });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the slice is valid for as many entries, and the time is there or null.
    let ready = unsafe { libc::ppoll(fds.as_mut_ptr(), count, time, std::ptr::null()) };
    if ready < 0 && io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
        tracing::error!("poll: {}", io::Error::last_os_error());
    }
    if ready <= 0 {
        fds.iter_mut().for_each(|fd| fd.revents = 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fruitless_spins_become_rare_and_one_that_pays_resets_them() {
        let mut spin = Spin::default();
        let mut wait = |is_fruitful: bool| {
            let length = spin.next();
            match (length.is_zero(), is_fruitful) {
                (true, _) => {}
                (false, true) => spin.found(),
                (false, false) => spin.missed(),
            }
            length == SPIN
        };
        let spins: Vec<_> = (0..200).map(|_| wait(false)).collect();
        assert_eq!(spins[..7], [true, true, false, true, false, false, true]);
        assert!(spins[100..].iter().filter(|spins| **spins).count() <= 4, "{spins:?}");
        assert!((0..40).any(|_| wait(true)) && (0..10).all(|_| wait(true)));
    }
}
