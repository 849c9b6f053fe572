//! Shared-memory link for same-host peers: the same packets through rings in shared memory. All
//! other traffic takes the inner link.
//!
//! A sender connects to its peer over a Unix socket ([`Link::local_route`]) and passes it a ring by
//! descriptor (`rings/rendezvous.rs`, `rings/ring.rs`). The sender writes that ring, the peer reads
//! it. Rings are unidirectional: two devices that send to each other have two. Packets take the
//! inner link where no peer accepts: another machine, user or network namespace. A same-host peer
//! that refuses is logged as a fallback. The kernel closes the connection when the peer exits: the
//! sender drops the ring, and later packets take the inner link again. An orderly shutdown sends a
//! goodbye message first. A close without one means that the peer was killed, and
//! [`Link::departed`] reports it.

mod doorbells;
mod fallbacks;
#[doc(hidden)]
pub mod fuzzing;
#[doc(hidden)]
pub mod hostile;
#[cfg(test)]
mod tests;

use doorbells::ShmDoorbells;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use nobounce_memory::{Source, shared_file};

use self::fallbacks::Fallbacks;
use super::batch::MAX_PACKET;
use super::rings::{PeerRing, rendezvous, ring};
use super::unix::{self, Accepted, Listener};
use super::wire_packets::SLOT_BYTE;
use super::{
    Arrival, Capabilities, Departed, Doorbells, Link, LocalRoute, OpenError, PeerName, RxDatagram, TxBatch,
};
use crate::links::rings::exports::ExportedFiles;
use crate::links::rings::rendezvous::{Came, RingHello};
use crate::links::rings::ring::{Label, RingError, RingMemory, RingPacket, RingReader};
use crate::process::epoll::{Epoll, Ready};
use crate::process::fork::NotInherited;

/// Bytes copied out of the ring before they are parsed: more than the longest headers.
const HEADERS: usize = 64;
/// Round-robin quantum, in packets and bytes: taken from one ring before the next ring is polled
/// and before replies are sent. A writer that waits for replies must not see its ring drained
/// first.
const MOST_FROM_ONE: usize = 32;
const MOST_BYTES_FROM_ONE: usize = 64 << 10;
/// Calls between two polls of the inner link: its system call costs as much as several polls of a
/// ring. The quiet interval applies after `QUIET_AFTER` polls of the inner link that found nothing.
const INSIDE_EVERY: u32 = 8;
const QUIET_INSIDE_EVERY: u32 = 64;
const QUIET_AFTER: u32 = 64;
/// Calls between two checks for new and closed connections, for an application that polls without
/// pause and leaves no other thread time to check.
const ATTEND_EVERY: u32 = 1024;
/// Maximum number of rings per direction. Each takes 2 MiB of address space; pages are allocated on
/// use.
const MOST_RINGS: usize = 256;

/// A same-host peer that we write to.
#[derive(Debug)]
struct OutgoingRing {
    to: PeerName,
    ring: Arc<PeerRing>,
    connection: Arc<NotInherited>,
    /// Packets were written since the last publish.
    written: bool,
    /// The reader sleeps and needs a wake-up.
    wakes: bool,
}

/// A same-host peer that writes to us; `ring` is set once it has passed one.
#[derive(Debug, Default)]
struct IncomingRing {
    /// `None`: the peer is gone. Packets that it wrote before are still read.
    connection: Option<NotInherited>,
    ring: Option<(RingHello, RingReader)>,
    /// Exported files that its packets may refer to.
    files: ExportedFiles,
}

impl IncomingRing {
    /// Drains the messages of the connection. Returns whether a ring arrived.
    fn hear(&mut self, counted: &mut Counted) -> bool {
        let mut rings = false;
        while let Some(connection) = &self.connection {
            let sound = match rendezvous::take(connection) {
                Came::Nothing => break,
                Came::Doorbell => true,
                Came::Ring(hello, file) if self.ring.is_none() => {
                    let sound = shared_file::is_sound(&file, ring::FILE_LEN);
                    let memory = sound.then(|| RingMemory::map(&file).ok()).flatten();
                    self.ring = memory.map(|memory| (hello, RingReader::new(Arc::new(memory))));
                    rings |= self.ring.is_some();
                    self.ring.is_some()
                }
                Came::File(len, file) if self.ring.is_some() => self.files.take(&file, len),
                Came::Ring(..) | Came::File(..) | Came::Invalid => false,
                Came::Goodbye | Came::Refused | Came::End => {
                    self.connection = None;
                    break;
                }
            };
            if !sound {
                counted.refused += 1;
                rendezvous::refuse(connection);
                self.connection = None;
            }
        }
        rings
    }

    /// The next packet in its ring.
    #[inline]
    fn next(&mut self, counted: &mut Counted, heard: &mut bool) -> Result<Lying, RingError> {
        let Some((_, reader)) = &mut self.ring else { return Err(RingError::Wait) };
        let RingPacket { at, len, label, elsewhere } = reader.pop()?;
        let Some(elsewhere) = elsewhere else {
            let stays = !label.has_icrc && len > HEADERS;
            let head = if stays { HEADERS } else { len };
            return Ok(Lying { at, head, whole: stays.then_some(at), len, label });
        };
        if !self.files.knows(elsewhere.file) {
            // The peer exported the file before it wrote the packet.
            self.hear(counted);
            *heard = true;
        }
        let total = len.saturating_add(usize::try_from(elsewhere.len).unwrap_or(usize::MAX));
        let sound = len <= HEADERS && total <= MAX_PACKET && !label.has_icrc;
        let whole = self.files.find(len, elsewhere).filter(|_| sound).ok_or(RingError::Broken)?;
        Ok(Lying { at, head: len, whole: Some(whole), len: total, label })
    }
}

/// A packet in a ring; its payload may be in an exported file.
struct Lying {
    at: *const u8,
    /// Bytes to copy before parsing.
    head: usize,
    /// Start of the whole packet in place. The headers must not be read there: the writer may
    /// change them, and an exported file holds only what follows them.
    whole: Option<*const u8>,
    len: usize,
    label: Label,
}

#[derive(Debug, Default)]
struct Counted {
    sent: u64,
    sent_bytes: u64,
    leased_bytes: u64,
    lost_full: u64,
    lost_departed: u64,
    received: u64,
    received_bytes: u64,
    wakeups: u64,
    broken: u64,
    refused: u64,
}

/// The inner link, and rings to same-host peers.
#[derive(Debug)]
pub struct ShmLink<L> {
    inner: L,
    listener: Option<Listener>,
    /// Readable on a new connection, a closed one or a doorbell.
    poll: Epoll,
    outgoing: Vec<OutgoingRing>,
    incoming: Vec<IncomingRing>,
    /// Index of the peer written to last, most often the next one too.
    last: usize,
    doorbells: Arc<ShmDoorbells>,
    departed: Vec<Departed>,
    fallbacks: Fallbacks,
    /// Packets of a mixed batch that take the inner link.
    rest: Option<TxBatch>,
    buffer: Box<[u8]>,
    calls: u32,
    /// Calls since the inner link was polled.
    since_inside: u32,
    /// Something was sent since the last call.
    sent: bool,
    /// Some reader needs a wake-up.
    wakes: bool,
    /// Consecutive polls of the inner link that found nothing.
    quiet_looks: u32,
    counted: Counted,
}

impl<L> ShmLink<L> {
    fn take_new(&mut self) {
        let Some(listener) = &mut self.listener else { return };
        while let Some(accepted) = listener.accept() {
            let (connection, is_short) = match accepted {
                Accepted::Connection(connection) => (connection, false),
                Accepted::ToRefuse(connection) => (connection, true),
            };
            let accepted = !is_short
                && unix::is_ours(&connection)
                && self.incoming.len() < MOST_RINGS
                && self.poll.add(connection.as_raw_fd()).is_ok();
            if accepted {
                self.incoming.push(IncomingRing { connection: Some(connection), ..IncomingRing::default() });
            } else {
                self.counted.refused += 1;
                rendezvous::refuse(&connection);
                drop(connection);
                listener.restore_spare();
            }
        }
    }

    /// Sends goodbye to all writers, including connections that were not accepted yet. Shuts the
    /// listener down first: a connection that the closing socket drops without a goodbye would look
    /// like a killed process.
    fn part(&mut self) {
        if let Some(listener) = &self.listener {
            listener.stop_accepting();
        }
        self.take_new();
        for connection in self.incoming.iter().filter_map(|incoming| incoming.connection.as_ref()) {
            rendezvous::shut_down(connection);
        }
    }
}

impl<L: Link> ShmLink<L> {
    /// Wraps the inner link; same-host peers are reached through shared memory where possible.
    ///
    /// # Errors
    /// The kernel refused a descriptor.
    pub fn new(inner: L) -> io::Result<Self> {
        let poll = Epoll::new()?;
        let doorbells = Arc::new(ShmDoorbells::new()?);
        poll.add(doorbells.wake_fd())?;
        Ok(Self {
            inner,
            listener: None,
            poll,
            outgoing: Vec::new(),
            incoming: Vec::new(),
            last: 0,
            doorbells,
            departed: Vec::new(),
            fallbacks: Fallbacks::default(),
            rest: None,
            buffer: vec![0; MAX_PACKET].into_boxed_slice(),
            calls: 0,
            since_inside: 0,
            sent: false,
            wakes: false,
            quiet_looks: 0,
            counted: Counted::default(),
        })
    }

    fn meet(&mut self, to: PeerName) -> io::Result<Arc<PeerRing>> {
        let connection = rendezvous::connect(to.0, to.1)?;
        if !unix::is_ours(&connection) {
            return Err(io::Error::other("it is of another user"));
        }
        let file = shared_file::create(ring::FILE_LEN)?;
        let connection = Arc::new(connection);
        let ring = Arc::new(PeerRing::new(RingMemory::map(&file)?, Arc::clone(&connection)));
        let Capabilities { local, source_ports, .. } = self.inner.capabilities();
        rendezvous::send_ring(
            &connection,
            RingHello { src: local, src_port: source_ports[0] },
            file.as_raw_fd(),
        )?;
        self.poll.add(connection.as_raw_fd())?;
        self.outgoing.push(OutgoingRing {
            to,
            ring: Arc::clone(&ring),
            connection,
            written: false,
            wakes: false,
        });
        Ok(ring)
    }

    /// Index of the ring to that peer.
    #[inline]
    fn find(&mut self, to: PeerName) -> Option<usize> {
        if self.outgoing.get(self.last).is_some_and(|outgoing| outgoing.to == to) {
            return Some(self.last);
        }
        let found = self.outgoing.iter().position(|outgoing| outgoing.to == to)?;
        self.last = found;
        Some(found)
    }

    /// Publishes packets built in rings and copies the others that have a ring. Returns how many
    /// packets are left for the inner link.
    fn write(&mut self, batch: &mut TxBatch) -> usize {
        for hold in batch.rings() {
            let Some(outgoing) = self.outgoing.iter_mut().find(|outgoing| hold.is_of(&outgoing.ring)) else {
                continue;
            };
            if hold.publish() {
                outgoing.wakes = true;
                self.wakes = true;
            }
        }
        let (packets, bytes, leased) = batch.in_rings();
        self.counted.sent += packets as u64;
        self.counted.leased_bytes += leased as u64;
        self.counted.sent_bytes += bytes as u64;
        if batch.packets().is_empty() {
            return 0;
        }
        batch.let_go();
        self.push(batch)
    }

    /// Copies the packets of the batch into their rings, behind those that were built in place.
    fn push(&mut self, batch: &TxBatch) -> usize {
        let mut left = 0;
        for packet in batch.packets() {
            let parts = batch.wire().parts(packet);
            let slot = parts[0].get(SLOT_BYTE).copied().unwrap_or(0);
            let Some(at) = self.find((packet.dst, slot)) else {
                left += usize::from(packet.has_icrc);
                self.counted.lost_departed += u64::from(!packet.has_icrc);
                continue;
            };
            let outgoing = &mut self.outgoing[at];
            // Without an ICRC the number is that of the packets.
            let number = if packet.has_icrc { packet.ip_id } else { 1 };
            let label = Label { number, has_icrc: packet.has_icrc };
            match outgoing.ring.hold().map_or(Err(RingError::Wait), |mut ring| ring.push(parts, label)) {
                Ok(()) => {
                    outgoing.written = true;
                    self.counted.sent += 1;
                    self.counted.sent_bytes += u64::from(packet.len);
                }
                // Dropped, as with a full socket buffer: the protocol retransmits.
                Err(RingError::Wait) => self.counted.lost_full += 1,
                Err(RingError::Broken) => self.part_with(at),
            }
        }
        for outgoing in self.outgoing.iter_mut().filter(|outgoing| outgoing.written) {
            outgoing.written = false;
            if outgoing.ring.hold().is_some_and(|mut ring| ring.publish()) {
                outgoing.wakes = true;
                self.wakes = true;
            }
        }
        left
    }

    /// Drops a ring that we write.
    fn part_with(&mut self, at: usize) {
        self.counted.broken += 1;
        let gone = self.outgoing.swap_remove(at);
        // Remaining references to the ring keep the connection open; it must not wake us any more.
        self.poll.remove(gone.connection.as_raw_fd());
        self.departed.push(Departed { peer: gone.to, died: false });
    }

    /// Drains the connections that are readable, and new ones.
    fn hear(&mut self, ready: &Ready) {
        let mut changed = false;
        for incoming in &mut self.incoming {
            let is_ready = |connection: &NotInherited| ready.has(connection.as_raw_fd());
            if incoming.ring.is_none() || incoming.connection.as_ref().is_some_and(is_ready) {
                changed |= incoming.hear(&mut self.counted);
            }
        }
        if changed {
            self.renew_doorbells();
        }
        self.forget_departed();
        // A reader sends nothing but a goodbye: an outgoing connection that is readable has ended.
        let (departed, poll, fallbacks) = (&mut self.departed, &self.poll, &mut self.fallbacks);
        self.outgoing.retain(|outgoing| {
            if !ready.has(outgoing.connection.as_raw_fd()) {
                return true;
            }
            let died = match rendezvous::take(&outgoing.connection) {
                Came::Nothing => return true,
                Came::End => true,
                Came::Refused => {
                    fallbacks.refused_by(outgoing.to);
                    false
                }
                Came::Goodbye | Came::Doorbell | Came::Ring(..) | Came::File(..) | Came::Invalid => false,
            };
            poll.remove(outgoing.connection.as_raw_fd());
            departed.push(Departed { peer: outgoing.to, died });
            false
        });
    }

    /// Removes peers that are gone once their rings are drained.
    fn forget_departed(&mut self) {
        let before = self.incoming.len();
        self.incoming.retain_mut(|incoming| {
            let unread = |(_, reader): &mut (RingHello, RingReader)| reader.has_more();
            incoming.connection.is_some() || incoming.ring.as_mut().is_some_and(unread)
        });
        if self.incoming.len() < before {
            self.renew_doorbells();
        }
    }

    fn renew_doorbells(&self) {
        let rings = self.incoming.iter().filter_map(|incoming| incoming.ring.as_ref());
        self.doorbells.set(rings.map(|(_, reader)| Arc::clone(reader.memory())).collect());
    }

    /// Reads the rings.
    #[inline]
    fn read(&mut self, sink: &mut dyn FnMut(&RxDatagram<'_>)) -> usize {
        let Self { incoming, buffer, counted, .. } = self;
        let (mut delivered, mut gone, mut broken, mut heard) = (0, false, false, false);
        for incoming in incoming.iter_mut() {
            let Some((hello, _)) = incoming.ring else { continue };
            let (mut taken, mut bytes) = (0, 0);
            while taken < MOST_FROM_ONE && bytes < MOST_BYTES_FROM_ONE {
                match incoming.next(counted, &mut heard) {
                    Ok(Lying { at, head, whole, len, label }) => {
                        taken += 1;
                        bytes += len;
                        counted.received_bytes += len as u64;
                        // SAFETY: `head` bytes lie inside the ring until they are released, below.
                        // The writer may change them meanwhile: the copy then holds other bytes.
                        unsafe { Source::new(at, head) }.copy_to(&mut buffer[..head]);
                        // SAFETY: it stays there until it is released, below. Its writer may change
                        // it until it has been copied.
                        let whole = whole.map(|whole| unsafe { Source::new(whole, len) });
                        sink(&RxDatagram {
                            arrival: Arrival::Local,
                            group: None,
                            src: hello.src,
                            src_port: hello.src_port,
                            bytes: &buffer[..len],
                            whole,
                            ip_id: if label.has_icrc { label.number } else { 0 },
                            packets: if label.has_icrc { 1 } else { label.number },
                            has_icrc: label.has_icrc,
                            marked: false,
                        });
                    }
                    Err(RingError::Wait) => break,
                    Err(RingError::Broken) => {
                        // Close the connection too, so that the writer learns that its ring has no
                        // reader.
                        incoming.connection.iter().for_each(|connection| rendezvous::shut_down(connection));
                        *incoming = IncomingRing::default();
                        broken = true;
                        break;
                    }
                }
            }
            if let Some((_, reader)) = incoming.ring.as_mut() {
                reader.release();
            }
            gone |= incoming.connection.is_none();
            delivered += taken;
        }
        if gone {
            self.counted.broken += u64::from(broken);
            self.forget_departed();
        }
        if heard {
            self.doorbells.renew();
        }
        self.counted.received += delivered as u64;
        delivered
    }
}

impl<L> Drop for ShmLink<L> {
    fn drop(&mut self) {
        self.part();
    }
}

impl<L: Link> Link for ShmLink<L> {
    forward!(self => self.inner; identity, services, waiting);

    fn listen(&mut self) -> Result<(), OpenError> {
        self.inner.listen()?;
        if self.listener.is_none() {
            match rendezvous::listen(self.inner.local(), self.inner.slot()) {
                Ok(listener) => {
                    self.poll.add(listener.fd()).map_err(|source| OpenError::Os {
                        addr: self.inner.local(),
                        call: "epoll_ctl",
                        source,
                    })?;
                    self.listener = Some(listener);
                }
                Err(error) => self.fallbacks.with_everybody(&error),
            }
        }
        Ok(())
    }

    fn local_route(&mut self, to: PeerName) -> Option<LocalRoute> {
        // The peer has most often connected to us already.
        self.poll_control();
        if let Some(at) = self.find(to) {
            return Some(LocalRoute::through(Arc::clone(&self.outgoing[at].ring)));
        }
        if self.listener.is_none() || self.outgoing.len() >= MOST_RINGS {
            return None;
        }
        match self.meet(to) {
            Ok(ring) => Some(LocalRoute::through(ring)),
            Err(error) => {
                self.fallbacks.with_one(self.inner.local(), to, &error);
                None
            }
        }
    }

    fn departed(&mut self) -> Option<Departed> {
        self.departed.pop()
    }

    fn fallbacks(&self) -> Vec<String> {
        self.fallbacks.reasons()
    }

    fn shut_down(&mut self) {
        self.part();
    }

    fn poll_control(&mut self) {
        // A packet on the inner link may have caused the wake-up.
        self.since_inside = QUIET_INSIDE_EVERY;
        self.outgoing
            .iter()
            .filter_map(|outgoing| outgoing.ring.hold())
            .for_each(|mut ring| ring.take_back());
        let ready = self.poll.ready();
        if ready.is_empty() {
            return;
        }
        if ready.has(self.doorbells.wake_fd()) {
            self.doorbells.heard();
        }
        if self.listener.as_ref().is_some_and(|listener| ready.has(listener.fd())) {
            self.take_new();
        }
        self.hear(&ready);
        self.doorbells.renew();
    }

    fn wake_peers(&mut self) {
        self.inner.wake_peers();
        if !std::mem::take(&mut self.wakes) {
            return;
        }
        for outgoing in &mut self.outgoing {
            if std::mem::take(&mut outgoing.wakes) {
                self.counted.wakeups += 1;
                rendezvous::ring_doorbell(&outgoing.connection);
            }
        }
    }

    fn control_fd(&self) -> Option<RawFd> {
        Some(self.poll.fd())
    }

    fn doorbells(&self) -> Option<Arc<dyn Doorbells>> {
        Some(self.doorbells.clone())
    }

    fn send(&mut self, batch: &mut TxBatch) {
        self.sent = true;
        if self.outgoing.is_empty() && batch.packets().iter().all(|packet| packet.has_icrc) {
            return self.inner.send(batch);
        }
        match self.write(batch) {
            0 => return batch.clear(),
            left if left == batch.count() => return self.inner.send(batch),
            _ => {}
        }
        let mut rest = self.rest.take().unwrap_or_else(|| TxBatch::new(batch.capabilities()));
        for packet in batch.packets().iter().filter(|packet| packet.has_icrc) {
            let bytes = batch.bytes(packet);
            let slot = bytes.get(SLOT_BYTE).copied().unwrap_or(0);
            if self.find((packet.dst, slot)).is_none() && !rest.push(packet, &bytes) {
                self.inner.send(&mut rest);
                rest.push(packet, &bytes);
            }
        }
        self.inner.send(&mut rest);
        self.rest = Some(rest);
        batch.clear();
    }

    fn receive(&mut self, sink: &mut dyn FnMut(&RxDatagram<'_>)) -> usize {
        self.calls = self.calls.wrapping_add(1);
        if self.calls.is_multiple_of(ATTEND_EVERY) {
            self.poll_control();
        }
        if self.incoming.is_empty() {
            return self.inner.receive(sink);
        }
        let delivered = self.read(sink);
        // Busy rings must not starve the inner link.
        let every = if self.quiet_looks < QUIET_AFTER { INSIDE_EVERY } else { QUIET_INSIDE_EVERY };
        self.since_inside += 1;
        // After a send, poll the inner link early: the reply takes longer than the system call, so
        // the call overlaps the round trip.
        let due = if std::mem::take(&mut self.sent) && delivered == 0 { every * 3 / 4 } else { every };
        if self.since_inside < due {
            return delivered;
        }
        self.since_inside = 0;
        let Self { inner, incoming, .. } = self;
        // Asked once per call for packets of one source.
        let mut asked: Option<(IpAddr, bool)> = None;
        let has_ring = |src: IpAddr| {
            incoming.iter().any(|one| {
                one.ring.as_ref().is_some_and(|(hello, _)| hello.src == src)
                    // A peer that has just closed its ring goes on by UDP.
                    && one.connection.as_ref().is_some_and(|connection| rendezvous::is_quiet(connection))
            })
        };
        let from_inside = inner.receive(&mut |datagram| {
            let known = asked.filter(|(src, _)| *src == datagram.src).map(|(_, known)| known);
            let beside = known.unwrap_or_else(|| has_ring(datagram.src));
            asked = Some((datagram.src, beside));
            if beside {
                sink(&RxDatagram { arrival: Arrival::BesideLocal, ..*datagram });
            } else {
                sink(datagram);
            }
        });
        self.quiet_looks = if from_inside > 0 { 0 } else { self.quiet_looks.saturating_add(1) };
        delivered + from_inside
    }

    fn next_deadline(&self) -> Option<u64> {
        self.inner.next_deadline()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let counted = &self.counted;
        let mut all = self.inner.counters();
        all.extend([
            ("shm_tx_packets", counted.sent),
            ("shm_tx_bytes", counted.sent_bytes),
            ("shm_leased_bytes", counted.leased_bytes),
            ("shm_tx_lost_full", counted.lost_full),
            ("shm_tx_lost_departed", counted.lost_departed),
            ("shm_wakeups", counted.wakeups),
            ("shm_rx_packets", counted.received),
            ("shm_rx_bytes", counted.received_bytes),
            ("shm_broken", counted.broken),
            ("shm_refused", counted.refused),
        ]);
        all
    }
}
