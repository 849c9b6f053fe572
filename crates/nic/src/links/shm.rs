//! A shorter way to peers on this machine: the same packets through rings in shared memory, everything else by the link inside.
//!
//! Whoever is going to send to a peer tries to meet it ([`Link::introduce`]): a connection by a Unix socket over which it hands a
//! ring that it will write and the peer will read (`shm/meeting.rs`, `shm/ring.rs`). Each direction is its sender's business, so that
//! two devices that send to each other have two rings. Where nobody can be met (another machine, user or network namespace) packets
//! take the link inside; where a peer of this machine refuses, that is said. When the other end goes, the kernel ends the connection: the
//! ring is given up, and what follows takes the link inside again. Whoever goes on purpose says goodbye first; who does not was killed, and that is
//! told with its departure ([`Link::departed`]).

mod doorbells;
mod fallbacks;
#[doc(hidden)]
pub mod fuzzing;
#[doc(hidden)]
pub mod hostile;
mod lent;
mod mapping;
mod meeting;
mod near;
mod ring;
mod shown;
#[cfg(test)]
mod tests;

pub use doorbells::Doorbells;
pub(in crate::links) use near::Hold;
pub use near::NearRing;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use nobounce_memory::{Source, shared_file};

use self::fallbacks::Fallbacks;
use self::meeting::{Came, Hello};
use self::ring::{Label, Memory, Packet, Reader, Trouble};
use self::shown::ShownFiles;
use super::batch::{MAX_PACKET, SLOT_BYTE};
use super::epoll::Epoll;
use super::udp::OpenError;
use super::{Capabilities, Departed, Link, RxDatagram, TxBatch};
use crate::process::fork::NotInherited;

/// Bytes that are copied out of the ring before they are looked at: more than headers ever have.
const HEADERS: usize = 64;
/// Packets, and bytes, taken from one ring before the next one has its turn, and before answers are sent: a writer that waits for them
/// must not find the ring empty first.
const MOST_FROM_ONE: usize = 32;
const MOST_BYTES_FROM_ONE: usize = 64 << 10;
/// Calls between two looks at the link inside, which costs a system call as long as several polls of a ring; and where nothing has come from
/// there for as many looks as `QUIET_AFTER`.
const INSIDE_EVERY: u32 = 8;
const QUIET_INSIDE_EVERY: u32 = 64;
const QUIET_AFTER: u32 = 64;
/// Calls between two looks for those who come and go, for an application that polls and leaves nobody else time to look.
const ATTEND_EVERY: u32 = 1024;
/// Rings at most in each direction. Each is 2 MiB of addresses, and memory as far as it is used.
const MOST_RINGS: usize = 256;

/// A peer to whom we write.
#[derive(Debug)]
struct Outgoing {
    to: (IpAddr, u8),
    ring: Arc<NearRing>,
    connection: Arc<NotInherited>,
    /// Something was written since the reader was last told.
    written: bool,
    /// The reader sleeps, and is to be woken.
    wakes: bool,
}

/// A peer who writes to us, once it has said which ring.
#[derive(Debug, Default)]
struct Incoming {
    /// `None`: it is gone. What it wrote before is still read.
    connection: Option<NotInherited>,
    ring: Option<(Hello, Reader)>,
    /// What its packets may refer to.
    files: ShownFiles,
}

impl Incoming {
    /// Hears what the other end has to say; whether that was its ring.
    fn hear(&mut self, counted: &mut Counted) -> bool {
        let mut rings = false;
        while let Some(connection) = &self.connection {
            let sound = match meeting::take(connection) {
                Came::Nothing => break,
                Came::Bell => true,
                Came::Ring(hello, file) if self.ring.is_none() => {
                    let sound = shared_file::is_sound(&file, ring::FILE_LEN);
                    let memory = sound.then(|| Memory::map(&file).ok()).flatten();
                    self.ring = memory.map(|memory| (hello, Reader::new(Arc::new(memory))));
                    rings |= self.ring.is_some();
                    self.ring.is_some()
                }
                Came::File(len, file) if self.ring.is_some() => self.files.take(&file, len),
                Came::Ring(..) | Came::File(..) => false,
                Came::Goodbye | Came::End => {
                    self.connection = None;
                    break;
                }
            };
            if !sound {
                counted.refused += 1;
                meeting::say_goodbye(connection);
                self.connection = None;
            }
        }
        rings
    }

    /// The next packet in its ring.
    #[inline]
    fn next(&mut self, counted: &mut Counted, heard: &mut bool) -> Result<Lying, Trouble> {
        let Some((_, reader)) = &mut self.ring else { return Err(Trouble::Wait) };
        let Packet { at, len, label, elsewhere } = reader.pop()?;
        let Some(elsewhere) = elsewhere else {
            let stays = !label.sealed && len > HEADERS;
            let head = if stays { HEADERS } else { len };
            return Ok(Lying { at, head, whole: stays.then_some(at), len, label });
        };
        if !self.files.knows(elsewhere.file) {
            // It was shown before the packet was written.
            self.hear(counted);
            *heard = true;
        }
        let total = len.saturating_add(usize::try_from(elsewhere.len).unwrap_or(usize::MAX));
        let sound = len <= HEADERS && total <= MAX_PACKET && !label.sealed;
        let whole = self.files.find(len, elsewhere).filter(|_| sound).ok_or(Trouble::Broken)?;
        Ok(Lying { at, head: len, whole: Some(whole), len: total, label })
    }
}

/// A packet that lies in a ring, or its payload elsewhere.
struct Lying {
    at: *const u8,
    /// So many bytes of it are to be copied before anything is looked at.
    head: usize,
    /// Where all of it lies, but for headers, which are not to be read there.
    whole: Option<*const u8>,
    len: usize,
    label: Label,
}

#[derive(Debug, Default)]
struct Counted {
    sent: u64,
    sent_bytes: u64,
    lent_bytes: u64,
    lost_full: u64,
    lost_departed: u64,
    received: u64,
    received_bytes: u64,
    bells: u64,
    broken: u64,
    refused: u64,
}

/// The link inside, and rings to those who are near.
#[derive(Debug)]
pub struct ShmLink<L> {
    inner: L,
    listener: Option<NotInherited>,
    /// Readable when somebody comes, goes or rings.
    poll: Epoll,
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    /// The peer written to last: most often the next one, too.
    last: usize,
    doorbells: Arc<Doorbells>,
    departed: Vec<Departed>,
    fallbacks: Fallbacks,
    /// Packets of a mixed batch that take the link inside.
    rest: Option<TxBatch>,
    buffer: Box<[u8]>,
    calls: u32,
    /// Calls since the link inside was looked at.
    since_inside: u32,
    /// Something was sent since the last call.
    sent: bool,
    /// A reader is to be woken.
    wakes: bool,
    /// Looks in a row at which nothing had come from the link inside.
    quiet_looks: u32,
    counted: Counted,
}

impl<L> ShmLink<L> {
    fn take_new(&mut self) {
        let Some(listener) = &self.listener else { return };
        let mut new = Vec::new();
        while let Some(connection) = meeting::accept(listener) {
            if meeting::is_ours(&connection) && self.incoming.len() + new.len() < MOST_RINGS {
                new.push(connection);
            } else {
                self.counted.refused += 1;
                meeting::say_goodbye(&connection);
            }
        }
        for connection in new {
            if self.poll.add(connection.as_raw_fd()).is_ok() {
                self.incoming.push(Incoming { connection: Some(connection), ..Incoming::default() });
            } else {
                meeting::say_goodbye(&connection);
            }
        }
    }

    /// Says goodbye to those who write to us, those among them who have come and were not heard yet. Nobody comes afterwards: who found the listener still
    /// there, and nobody to greet it, would take us for killed.
    fn part(&mut self) {
        if let Some(listener) = &self.listener {
            meeting::close_doors(listener);
        }
        self.take_new();
        for connection in self.incoming.iter().filter_map(|incoming| incoming.connection.as_ref()) {
            meeting::say_goodbye(connection);
        }
    }
}

impl<L: Link> ShmLink<L> {
    /// The link inside, with the shorter way where there is one.
    ///
    /// # Errors
    /// The kernel refused a descriptor.
    pub fn new(inner: L) -> io::Result<Self> {
        let poll = Epoll::new()?;
        let doorbells = Arc::new(Doorbells::new()?);
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

    fn meet(&mut self, remote: IpAddr, slot: u8) -> io::Result<Arc<NearRing>> {
        let connection = meeting::connect(remote, slot)?;
        if !meeting::is_ours(&connection) {
            return Err(io::Error::other("it is of another user"));
        }
        let file = shared_file::create(ring::FILE_LEN)?;
        let connection = Arc::new(connection);
        let ring = Arc::new(NearRing::new(Memory::map(&file)?, Arc::clone(&connection)));
        let Capabilities { local, source_ports, .. } = self.inner.capabilities();
        meeting::send_ring(&connection, Hello { src: local, src_port: source_ports[0] }, file.as_raw_fd())?;
        self.poll.add(connection.as_raw_fd())?;
        self.outgoing.push(Outgoing {
            to: (remote, slot),
            ring: Arc::clone(&ring),
            connection,
            written: false,
            wakes: false,
        });
        Ok(ring)
    }

    /// Which ring leads there.
    #[inline]
    fn find(&mut self, to: (IpAddr, u8)) -> Option<usize> {
        if self.outgoing.get(self.last).is_some_and(|outgoing| outgoing.to == to) {
            return Some(self.last);
        }
        let found = self.outgoing.iter().position(|outgoing| outgoing.to == to)?;
        self.last = found;
        Some(found)
    }

    /// Writes what has a ring and lies elsewhere; how many packets are left for the link inside.
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
        let (packets, bytes, lent) = batch.in_rings();
        self.counted.sent += packets as u64;
        self.counted.lent_bytes += lent as u64;
        self.counted.sent_bytes += bytes as u64;
        if batch.packets().is_empty() {
            return 0;
        }
        batch.let_go();
        self.push(batch)
    }

    /// Writes what lies in the batch, behind what was built in the rings.
    fn push(&mut self, batch: &TxBatch) -> usize {
        let mut left = 0;
        for packet in batch.packets() {
            let parts = batch.parts(packet);
            let slot = parts[0].get(SLOT_BYTE).copied().unwrap_or(0);
            let Some(at) = self.find((packet.dst, slot)) else {
                left += usize::from(packet.sealed);
                self.counted.lost_departed += u64::from(!packet.sealed);
                continue;
            };
            let outgoing = &mut self.outgoing[at];
            let label = Label { number: packet.ip_id, sealed: packet.sealed };
            match outgoing.ring.hold().map_or(Err(Trouble::Wait), |mut ring| ring.push(parts, label)) {
                Ok(()) => {
                    outgoing.written = true;
                    self.counted.sent += 1;
                    self.counted.sent_bytes += u64::from(packet.len);
                }
                // As a full socket buffer would: the protocol repeats it.
                Err(Trouble::Wait) => self.counted.lost_full += 1,
                Err(Trouble::Broken) => self.part_with(at),
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

    /// Gives up a ring that we write.
    fn part_with(&mut self, at: usize) {
        self.counted.broken += 1;
        let gone = self.outgoing.swap_remove(at);
        // Those who still have the ring keep the connection, which must not wake us any more.
        self.poll.remove(gone.connection.as_raw_fd());
        self.departed.push(Departed { peer: gone.to, died: false });
    }

    /// Hears what those who write to us have to say.
    fn hear(&mut self) {
        let mut changed = false;
        for incoming in &mut self.incoming {
            changed |= incoming.hear(&mut self.counted);
        }
        if changed {
            self.renew_doorbells();
        }
        self.forget_departed();
        // Nothing but a goodbye is ever said to the writer: a connection of ours that can be read has ended.
        let (departed, poll) = (&mut self.departed, &self.poll);
        self.outgoing.retain(|outgoing| {
            let died = match meeting::take(&outgoing.connection) {
                Came::Nothing => return true,
                Came::End => true,
                Came::Goodbye | Came::Bell | Came::Ring(..) | Came::File(..) => false,
            };
            poll.remove(outgoing.connection.as_raw_fd());
            departed.push(Departed { peer: outgoing.to, died });
            false
        });
    }

    /// Forgets those who write to us and are gone, once all that they wrote has been read.
    fn forget_departed(&mut self) {
        let before = self.incoming.len();
        self.incoming.retain_mut(|incoming| {
            let unread = |(_, reader): &mut (Hello, Reader)| reader.has_more();
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
                        // SAFETY: so many bytes lie inside the ring, until they are released, below. The writer may change them
                        // meanwhile: then we have other bytes.
                        unsafe { Source::new(at, head) }.copy_to(&mut buffer[..head]);
                        // SAFETY: it stays there until it is released, below. Its writer may change it until it has been copied.
                        let whole = whole.map(|whole| unsafe { Source::new(whole, len) });
                        sink(&RxDatagram {
                            src: hello.src,
                            src_port: hello.src_port,
                            bytes: &buffer[..len],
                            whole,
                            ip_id: if label.sealed { label.number } else { 0 },
                            packets: if label.sealed { 1 } else { label.number },
                            sealed: label.sealed,
                        });
                    }
                    Err(Trouble::Wait) => break,
                    Err(Trouble::Broken) => {
                        // The connection goes too: the writer learns that nobody reads.
                        incoming.connection.iter().for_each(|connection| meeting::say_goodbye(connection));
                        *incoming = Incoming::default();
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
            match meeting::listen(self.inner.local(), self.inner.slot()) {
                Ok(listener) => {
                    self.poll.add(listener.as_raw_fd()).map_err(|source| OpenError::Os {
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

    fn introduce(&mut self, remote: IpAddr, slot: u8) -> Option<Arc<NearRing>> {
        // Those whom we are going to send to have most often come already.
        self.attend();
        if let Some(at) = self.find((remote, slot)) {
            return Some(Arc::clone(&self.outgoing[at].ring));
        }
        if self.listener.is_none() || self.outgoing.len() >= MOST_RINGS {
            return None;
        }
        match self.meet(remote, slot) {
            Ok(ring) => Some(ring),
            Err(error) => {
                self.fallbacks.with_one(self.inner.local(), (remote, slot), &error);
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

    fn say_goodbye(&mut self) {
        self.part();
    }

    fn attend(&mut self) {
        // Whoever was woken may have been woken by a packet there.
        self.since_inside = QUIET_INSIDE_EVERY;
        self.outgoing
            .iter()
            .filter_map(|outgoing| outgoing.ring.hold())
            .for_each(|mut ring| ring.take_back());
        if !self.poll.is_ready() {
            return;
        }
        self.doorbells.heard();
        self.take_new();
        self.hear();
        self.doorbells.renew();
    }

    fn wake_peers(&mut self) {
        self.inner.wake_peers();
        if !std::mem::take(&mut self.wakes) {
            return;
        }
        for outgoing in &mut self.outgoing {
            if std::mem::take(&mut outgoing.wakes) {
                self.counted.bells += 1;
                meeting::ring_bell(&outgoing.connection);
            }
        }
    }

    fn rare_fd(&self) -> Option<RawFd> {
        Some(self.poll.fd())
    }

    fn doorbells(&self) -> Option<Arc<Doorbells>> {
        Some(Arc::clone(&self.doorbells))
    }

    fn send(&mut self, batch: &mut TxBatch) {
        self.sent = true;
        if self.outgoing.is_empty() && batch.packets().iter().all(|packet| packet.sealed) {
            return self.inner.send(batch);
        }
        match self.write(batch) {
            0 => return batch.clear(),
            left if left == batch.count() => return self.inner.send(batch),
            _ => {}
        }
        let mut rest = self.rest.take().unwrap_or_else(|| TxBatch::new(batch.capabilities()));
        for packet in batch.packets().iter().filter(|packet| packet.sealed) {
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
            self.attend();
        }
        if self.incoming.is_empty() {
            return self.inner.receive(sink);
        }
        let delivered = self.read(sink);
        // Rings that are busy must not keep the others from being heard.
        let every = if self.quiet_looks < QUIET_AFTER { INSIDE_EVERY } else { QUIET_INSIDE_EVERY };
        self.since_inside += 1;
        // Whoever has just sent something waits for the answer, which takes longer than the system call: rather now than when the answer is due.
        let due = if std::mem::take(&mut self.sent) && delivered == 0 { every * 3 / 4 } else { every };
        if self.since_inside < due {
            return delivered;
        }
        self.since_inside = 0;
        let from_inside = self.inner.receive(sink);
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
            ("shm_tx_lent_bytes", counted.lent_bytes),
            ("shm_tx_lost_full", counted.lost_full),
            ("shm_tx_lost_departed", counted.lost_departed),
            ("shm_tx_bells", counted.bells),
            ("shm_rx_packets", counted.received),
            ("shm_rx_bytes", counted.received_bytes),
            ("shm_broken", counted.broken),
            ("shm_refused", counted.refused),
        ]);
        all
    }
}
