//! Sleeping on the descriptors of a link.

use std::os::fd::RawFd;
use std::sync::Arc;

use nobounce_protocol::timing::Nanos;

use crate::soft::config::MAX_ENGINES;

use crate::links::Link;
use crate::links::{Doorbells, MAX_DESCRIPTORS};

/// Descriptors that signal arrivals on a link.
#[derive(Clone, Debug)]
pub(crate) struct Arrivals {
    /// Readable when there are packets.
    packets: Vec<RawFd>,
    /// Readable when peers come, go or wake this one.
    peers: Option<RawFd>,
    /// Wake-up requests for packets that make no descriptor readable.
    doorbells: Option<Arc<dyn Doorbells>>,
}

impl Arrivals {
    pub(crate) fn of(link: &dyn Link) -> Self {
        Self { packets: link.wake_fds(), peers: link.control_fd(), doorbells: link.doorbells() }
    }

    /// The descriptors of the link.
    pub(crate) fn packets(&self) -> &[RawFd] {
        &self.packets
    }

    /// Requests wake-ups from peers; false, without a request, if packets are there already.
    pub(crate) fn arm(&self) -> bool {
        let Some(doorbells) = &self.doorbells else { return true };
        let are_there = doorbells.arm();
        if are_there {
            doorbells.disarm();
        }
        !are_there
    }

    pub(crate) fn disarm(&self) {
        if let Some(doorbells) = &self.doorbells {
            doorbells.disarm();
        }
    }

    /// All of them.
    pub(crate) fn fds(&self) -> impl Iterator<Item = RawFd> {
        self.peers.iter().chain(&self.packets).copied()
    }

    fn add_to(&self, fds: &mut PollSet) {
        self.fds().for_each(|fd| fds.add(fd));
    }
}

/// Descriptors of at most 8 engines, and one more.
struct PollSet {
    list: [libc::pollfd; Self::MOST],
    count: usize,
}

impl PollSet {
    /// Those of each engine's link, and a waker.
    const MOST: usize = MAX_DESCRIPTORS * MAX_ENGINES + 1;

    fn new() -> Self {
        Self { list: [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; Self::MOST], count: 0 }
    }

    fn add(&mut self, fd: RawFd) {
        debug_assert!(self.count < Self::MOST, "a link has more than MAX_DESCRIPTORS descriptors");
        if let Some(place) = self.list.get_mut(self.count) {
            place.fd = fd;
            self.count += 1;
        }
    }

    fn is_first_ready(&self) -> bool {
        self.list[0].revents != 0
    }

    /// Sleeps until one of them is readable, at most `timeout`.
    fn wait(&mut self, timeout: Option<Nanos>) {
        let spec = timeout.map(|ns| libc::timespec {
            tv_sec: i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(ns % 1_000_000_000).unwrap_or(0),
        });
        let spec = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: `list` has at least `count` pollfds, `spec` is null or a valid timespec, no
        // signal mask.
        unsafe {
            libc::ppoll(self.list.as_mut_ptr(), self.count as libc::nfds_t, spec, std::ptr::null());
        }
    }
}

/// Sleeps until a packet arrives on one of the links, at most `timeout`. Returns at once if one is
/// there already.
pub(crate) fn for_packets<'a>(links: impl Iterator<Item = &'a Arrivals> + Clone, timeout: Nanos) {
    let mut fds = PollSet::new();
    for (armed, link) in links.clone().enumerate() {
        if !link.arm() {
            links.take(armed).for_each(Arrivals::disarm);
            return;
        }
        link.add_to(&mut fds);
    }
    fds.wait(Some(timeout));
    links.for_each(Arrivals::disarm);
}

/// Sleeps until a packet arrives on the link, `wake` is readable, or the timeout ends; returns
/// whether `wake` is readable.
pub(crate) fn for_packets_or(wake: RawFd, link: &Arrivals, timeout: Option<Nanos>) -> bool {
    let mut fds = PollSet::new();
    fds.add(wake);
    if !link.arm() {
        return false;
    }
    link.add_to(&mut fds);
    fds.wait(timeout);
    link.disarm();
    fds.is_first_ready()
}

/// Sleeps until `wake` is readable or the timeout ends; returns whether it is readable.
pub(crate) fn for_wake(wake: RawFd, timeout: Option<Nanos>) -> bool {
    let mut fds = PollSet::new();
    fds.add(wake);
    fds.wait(timeout);
    fds.is_first_ready()
}
