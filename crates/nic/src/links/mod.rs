//! Links carry packets: `udp` is the wire, `pcap` and `fault` wrap any link and are links themselves.

#[macro_use]
mod forward;

mod batch;
mod epoll;
pub mod fault;
mod outbox;
pub mod pcap;
mod sealers;
mod services;
pub mod shm;
mod slot;
#[cfg(test)]
mod stub;
pub mod udp;

pub use batch::{MAX_PACKET, TxBatch, TxPacket};
pub(crate) use sealers::Sealers;

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::sync::Arc;

use nobounce_memory::Source;

/// Source ports of one link: enough for ECMP to spread over the usual 2 to 8 parallel paths.
pub const SOURCE_PORTS: usize = 8;

/// What a link can do, probed once when it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The address packets leave from; the ICRC covers it.
    pub local: IpAddr,
    /// The UDP ports packets leave from, which the ICRC covers too: a hint picks one of them. All are the same where
    /// there is nothing to spread over (loopback).
    pub source_ports: [u16; SOURCE_PORTS],
    /// Packets of one size that leave in one system call (1: the kernel lacks segmentation offload).
    pub max_segments: usize,
    /// Whether several packets may arrive in one buffer.
    pub receive_offload: bool,
    /// The largest path MTU (256..4096) whose packets fit the interface.
    pub max_path_mtu: u32,
    /// The hop limit of packets that ask for none; 0 where that is not known.
    pub usual_hops: u8,
}

/// One packet as it arrived.
#[derive(Debug)]
pub struct RxDatagram<'a> {
    /// Who sent it.
    pub src: IpAddr,
    /// From which UDP port.
    pub src_port: u16,
    /// The UDP payload: BTH to ICRC.
    pub bytes: &'a [u8],
    /// Where the packet really lies, if `bytes` holds no more than its headers (and otherwise what was there before). Its sender may
    /// change it at any time: it is good for one copy of the payload.
    pub whole: Option<Source<'a>>,
    /// The likeliest IPv4 identification (its place in the batch it came in).
    pub ip_id: u16,
    /// Whether it has an ICRC. Only what never left this machine may come without.
    pub sealed: bool,
    /// How many packets have become this one: only where it is not sealed can it be another number than 1, and then any.
    pub packets: u16,
}

/// Which device on this address a management datagram is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MadOwner {
    /// The one with this slot.
    Slot(u8),
    /// The one that offers this service.
    Service(u64),
}

/// Somebody on this machine to whom the shorter way has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departed {
    /// Its address and slot.
    pub peer: (IpAddr, u8),
    /// Its process ended without a word.
    pub died: bool,
}

/// A way for packets to leave and arrive. Everything is non-blocking.
pub trait Link: Send + fmt::Debug {
    /// The address packets are sent from and received at.
    fn local(&self) -> IpAddr;

    /// Receives from now on; before, nobody can reach it, and its slot is not known. Whoever listens must call
    /// [`Link::receive`] when a descriptor becomes readable: packets of others may come there, too.
    ///
    /// # Errors
    /// All slots are taken, or somebody else holds the port.
    fn listen(&mut self) -> Result<(), udp::OpenError> {
        Ok(())
    }

    /// The high byte of every queue pair number of this device.
    fn slot(&self) -> u8;

    /// What was probed.
    fn capabilities(&self) -> Capabilities;

    /// Bytes that the kernel keeps for us until they are received, its own overhead included. Others on this machine have as many: the limit is the
    /// machine's. 0: not known.
    fn receive_room(&self) -> u64 {
        0
    }

    /// Somebody will send to that slot of that address: a link that has a shorter way there finds it now. The ring in which packets
    /// may be built then, without an ICRC, until [`Link::departed`] names that peer.
    fn introduce(&mut self, _remote: IpAddr, _slot: u8) -> Option<Arc<shm::NearRing>> {
        None
    }

    /// Somebody to whom the shorter way has ended.
    fn departed(&mut self) -> Option<Departed> {
        None
    }

    /// Why peers on this machine are reached by a longer way than there could be, a sentence for each reason.
    fn fallbacks(&self) -> Vec<String> {
        Vec::new()
    }

    /// Tells those who are near that we go: whoever goes without a word was killed.
    fn say_goodbye(&mut self) {}

    /// Looks after what is rare: who comes and goes. To be called when [`Link::rare_fd`] is readable.
    fn attend(&mut self) {}

    /// A descriptor that becomes readable when [`Link::attend`] has something to do; whoever sleeps must always watch it.
    fn rare_fd(&self) -> Option<RawFd> {
        None
    }

    /// How to be woken by packets that make no descriptor readable.
    fn doorbells(&self) -> Option<Arc<shm::Doorbells>> {
        None
    }

    /// Sends the batch and empties it. Packets the kernel refuses are counted and lost: the protocol repeats them.
    ///
    /// Where the kernel's send buffer is full the link keeps one batch and [`Link::send_blocked`] is true until it has
    /// left; every [`Link::receive`], and a `send` of an empty batch, tries again.
    fn send(&mut self, batch: &mut TxBatch);

    /// Everything was sent for now: wakes peers that sleep. Each batch would wake them otherwise, and on a CPU that both share they would
    /// run before the next one is written.
    fn wake_peers(&mut self) {}

    /// Receives what is there, up to a bounded number of packets, and returns how many were handed to `sink`.
    fn receive(&mut self, sink: &mut dyn FnMut(&RxDatagram<'_>)) -> usize;

    /// Descriptors that become readable when [`Link::receive`] has something to do.
    fn wake_fds(&self) -> Vec<RawFd>;

    /// When [`Link::receive`] or [`Link::send`] must be called again even if no descriptor becomes readable
    /// (nanoseconds of [`now_ns`]): while packets are delayed on purpose, or wait for room in the send buffer.
    fn next_deadline(&self) -> Option<u64> {
        None
    }

    /// Counters by name, in a fixed order.
    fn counters(&self) -> Vec<(&'static str, u64)>;

    /// Whether packets of an earlier batch still wait for room; the engine then waits instead of building packets
    /// (a further batch would be counted and lost).
    fn send_blocked(&self) -> bool {
        false
    }

    /// Management datagrams that begin something with this service are for this device from now on; false where another
    /// has it.
    ///
    /// # Errors
    /// The system refuses.
    fn bind_service(&mut self, _service: u64) -> io::Result<bool> {
        Ok(true)
    }

    /// They are not any more.
    fn unbind_service(&mut self, _service: u64) {}

    /// Whether this device has bound the service.
    fn has_service(&self, _service: u64) -> bool {
        false
    }

    /// Gives a management datagram to the device that it is for; false where there is none.
    fn hand_over_mad(&mut self, _owner: MadOwner, _datagram: &RxDatagram<'_>) -> bool {
        false
    }
}

impl<L: Link + ?Sized> Link for Box<L> {
    forward!(self => **self; identity, opening, nearness, services, waiting);

    fn introduce(&mut self, remote: IpAddr, slot: u8) -> Option<Arc<shm::NearRing>> {
        (**self).introduce(remote, slot)
    }

    fn send(&mut self, batch: &mut TxBatch) {
        (**self).send(batch);
    }

    fn receive(&mut self, sink: &mut dyn FnMut(&RxDatagram<'_>)) -> usize {
        (**self).receive(sink)
    }

    fn next_deadline(&self) -> Option<u64> {
        (**self).next_deadline()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        (**self).counters()
    }
}

/// Nanoseconds of the monotonic clock.
pub fn now_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid timespec for the call to fill; CLOCK_MONOTONIC cannot fail on Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut t) };
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0)
}
