//! A link whose packets are sealed: what leaves is authenticated by a shared secret, and what
//! arrives without is dropped.
//!
//! It wraps the wire, inside shared memory and faults: rings are between processes of one user,
//! whose credentials the kernel checks, and captures show packets as they were before.

mod key_file;

pub use key_file::{FileVersion, KeyFileError, KeySource};

use std::collections::VecDeque;
use std::fmt;
use std::net::IpAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use nobounce_protocol::seal::{
    Dropped, HEADER_LEN, KeyRing, OVERHEAD, Outcome, Seal, SealConfig, SealDecision, SealFlow, SealMode,
};
use nobounce_protocol::timing::{Nanos, SECOND};
use nobounce_protocol::wire::Qpn;

use super::slot::{PeerName, slot_of};
use super::wire_packets::{LEAD, SLAB, SLOT_BYTE};
use super::{Capabilities, Link, MAX_PACKET, MadOwner, OpenError, RxDatagram, TxBatch, TxPacket, now_ns};

/// Packets that wait for a session, of all peers and of one; and their bytes.
const MAX_WAITING: usize = 1024;
const MAX_WAITING_OF_PEER: usize = 256;
const MAX_WAITING_BYTES: usize = 2 << 20;
/// Bytes of the slab: all packets of a batch and what sealing adds, so that one send takes them.
const SEALED_SLAB: usize = SLAB + 1024 * OVERHEAD;
/// Peers that are warned about.
const MAX_WARNED: usize = 64;

/// The secrets of a device, and how it uses them.
#[derive(Clone, Debug)]
pub struct SealKeys {
    /// Where they are.
    pub source: KeySource,
    /// What is there.
    pub ring: KeyRing,
    /// How packets are sent.
    pub mode: SealMode,
    /// The version of the file that was read.
    pub version: Option<FileVersion>,
}

impl SealKeys {
    /// Reads secrets.
    ///
    /// # Errors
    /// They cannot be used.
    pub fn read(source: KeySource, mode: SealMode) -> Result<Self, KeyFileError> {
        // Asked first: what changes meanwhile is read again.
        let version = source.version();
        Ok(Self { ring: source.read()?, source, mode, version })
    }
}

/// A packet that waits for the session of its peer.
#[derive(Debug)]
struct WaitingPacket {
    peer: PeerName,
    to: Qpn,
    packet: TxPacket,
    bytes: Vec<u8>,
}

/// Wraps a link.
pub struct SealedLink<L> {
    inner: L,
    seal: Seal,
    source: KeySource,
    version: Option<FileVersion>,
    /// A version that could not be read, which was told.
    refused: Option<FileVersion>,
    /// When the file and the time of day are looked at again.
    look_at: Nanos,
    /// Seconds since 1970.
    unix: u64,
    out: TxBatch,
    waiting: VecDeque<WaitingPacket>,
    waiting_bytes: usize,
    /// Packets that no session was found for.
    unsent: u64,
    /// What the packets of a batch are sealed for.
    flows: Vec<(Qpn, SealFlow)>,
    warned: Vec<IpAddr>,
    /// Where packets are decrypted.
    room: Box<[u8]>,
}

impl<L: Link> SealedLink<L> {
    /// Wraps `inner`.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub fn new(inner: L, keys: &SealKeys) -> Result<Self, OpenError> {
        let (caps, addr) = (inner.capabilities(), inner.local());
        let failed = |source| OpenError::Os { addr, call: "getrandom", source };
        let seed = crate::process::random::seed().map_err(failed)?;
        let config = SealConfig { keys: keys.ring.clone(), mode: keys.mode, local: addr, seed };
        let seal = Seal::new(&config).ok_or_else(|| failed(std::io::ErrorKind::InvalidInput.into()))?;
        Ok(Self {
            inner,
            seal,
            source: keys.source.clone(),
            version: keys.version,
            refused: None,
            look_at: 0,
            unix: 0,
            out: TxBatch::with_slab(caps, SEALED_SLAB),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            unsent: 0,
            flows: Vec::new(),
            warned: Vec::new(),
            room: vec![0; MAX_PACKET + LEAD].into_boxed_slice(),
        })
    }

    /// Seals a packet into the batch that leaves next.
    #[inline]
    fn put(&mut self, unix: u64, flow: SealFlow, to: Qpn, packet: &TxPacket, parts: [&[u8]; 3]) {
        let Self { seal, out, inner, unsent, .. } = self;
        let len = packet.len as usize + OVERHEAD;
        if !out.has_room_for(len) {
            inner.send(out);
        }
        let added = out.put_closed(packet, len, |room| {
            let mut at = HEADER_LEN;
            for part in parts {
                room[at..at + part.len()].copy_from_slice(part);
                at += part.len();
            }
            seal.seal(unix, flow, to, packet.ip_id, room)
        });
        *unsent += u64::from(!added);
    }

    /// Finds what all packets are sealed for; false if one has to wait.
    fn route_all(&mut self, now: Nanos, batch: &TxBatch) -> bool {
        let Self { seal, flows, .. } = self;
        flows.clear();
        flows.extend(batch.packets().iter().map_while(|packet| {
            let to = destination(batch.wire().parts(packet)[0]);
            match seal.route(now, packet.dst, to) {
                SealDecision::Ready(flow) => Some((to, flow)),
                SealDecision::Wait | SealDecision::Refused => None,
            }
        }));
        flows.len() == batch.packets().len()
    }

    fn hold(&mut self, to: Qpn, packet: &TxPacket, parts: [&[u8]; 3]) {
        let peer = (packet.dst, slot_of(to));
        let len = packet.len as usize;
        let of_peer = self.waiting.iter().filter(|waiting| waiting.peer == peer).count();
        if self.waiting.len() >= MAX_WAITING
            || of_peer >= MAX_WAITING_OF_PEER
            || self.waiting_bytes + len > MAX_WAITING_BYTES
        {
            self.unsent += 1;
            return;
        }
        self.waiting_bytes += len;
        self.waiting.push_back(WaitingPacket { peer, to, packet: *packet, bytes: parts.concat() });
    }

    /// Sends what sessions were found for, and messages that open sessions.
    fn pump(&mut self, now: Nanos) {
        self.seal.handle_timeout(now);
        while let Some(outcome) = self.seal.poll_outcome() {
            let (Outcome::Ready(addr, slot) | Outcome::Unanswered(addr, slot)) = outcome;
            let (of_peer, others): (VecDeque<_>, _) =
                std::mem::take(&mut self.waiting).into_iter().partition(|one| one.peer == (addr, slot));
            self.waiting = others;
            self.waiting_bytes -= of_peer.iter().map(|one| one.bytes.len()).sum::<usize>();
            if matches!(outcome, Outcome::Unanswered(..)) {
                self.warn(addr);
            }
            for WaitingPacket { to, packet, bytes, .. } in of_peer {
                match self.seal.route(now, addr, to) {
                    SealDecision::Ready(flow) => self.put(self.unix, flow, to, &packet, [&bytes, &[], &[]]),
                    SealDecision::Wait | SealDecision::Refused => self.unsent += 1,
                }
            }
        }
        while let Some(message) = self.seal.poll_message() {
            if !self.out.has_room_for(message.packet.len()) {
                self.inner.send(&mut self.out);
            }
            self.out.put_message(message.to, &message.packet);
        }
        if !self.out.is_empty() {
            self.inner.send(&mut self.out);
        }
    }

    fn warn(&mut self, addr: IpAddr) {
        if self.warned.len() < MAX_WARNED && !self.warned.contains(&addr) {
            self.warned.push(addr);
            tracing::warn!(
                "{addr} does not answer under our key: no packets are sent to it. It needs the same NOBOUNCE_KEY"
            );
        }
    }

    /// Each second: reads the time of day, and the secrets if their file has changed.
    #[inline]
    fn tick(&mut self, now: Nanos) {
        if now >= self.look_at {
            self.look_at = now + SECOND;
            let micros = unix_micros();
            self.unix = micros / 1_000_000;
            self.seal.set_time(now, micros);
            self.look_at_keys();
        }
    }

    #[cold]
    fn look_at_keys(&mut self) {
        let version = self.source.version();
        if version == self.version || version.is_none() {
            return;
        }
        match self.source.read() {
            Ok(keys) => {
                tracing::info!("the key {} has changed: it has {} secrets", self.source, keys.ids().len());
                (self.version, self.refused) = (version, None);
                self.seal.set_keys(keys);
            }
            // Looked at again each second, and told once.
            Err(error) if self.refused != version => {
                self.refused = version;
                tracing::warn!("the last key is still used: {error}");
            }
            Err(_) => {}
        }
    }
}

/// The queue pair that a packet goes to.
#[inline]
fn destination(head: &[u8]) -> Qpn {
    let number = head.get(SLOT_BYTE..SLOT_BYTE + 3).unwrap_or(&[0; 3]);
    Qpn::new(number.iter().fold(0, |number, byte| number << 8 | u32::from(*byte)))
}

fn unix_micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
}

impl<L: Link> Link for SealedLink<L> {
    forward!(self => self.inner; same_host, waiting);

    fn local(&self) -> IpAddr {
        self.inner.local()
    }

    fn slot(&self) -> u8 {
        self.inner.slot()
    }

    fn receive_room(&self) -> u64 {
        self.inner.receive_room()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { sealed: true, ..self.inner.capabilities() }
    }

    fn listen(&mut self) -> Result<(), OpenError> {
        self.inner.listen()?;
        self.seal.set_slot(self.inner.slot());
        Ok(())
    }

    fn send(&mut self, batch: &mut TxBatch) {
        if batch.is_empty() {
            self.inner.send(batch);
        }
        let now = now_ns();
        self.tick(now);
        let unix = self.unix;
        if batch.wire().is_sealable() && self.route_all(now, batch) {
            for (index, (to, flow)) in self.flows.iter().enumerate() {
                let ip_id = batch.packets()[index].ip_id;
                let sealed =
                    batch.wire_mut().seal(index, |room| self.seal.seal(unix, *flow, *to, ip_id, room));
                self.unsent += u64::from(!sealed);
            }
            self.inner.send(batch);
            return self.pump(now);
        }
        for packet in batch.packets() {
            let parts = batch.wire().parts(packet);
            let to = destination(parts[0]);
            match self.seal.route(now, packet.dst, to) {
                SealDecision::Ready(flow) => self.put(unix, flow, to, packet, parts),
                SealDecision::Wait => self.hold(to, packet, parts),
                SealDecision::Refused => self.unsent += 1,
            }
        }
        batch.clear();
        self.pump(now);
    }

    fn receive(&mut self, sink: &mut dyn FnMut(&RxDatagram<'_>)) -> usize {
        let now = now_ns();
        self.tick(now);
        let Self { inner, seal, room, unix, .. } = self;
        let mut delivered = 0;
        inner.receive(&mut |datagram| {
            let RxDatagram { src, src_port, arrival, group, bytes, marked, .. } = *datagram;
            let from = (src, group.copied());
            // Behind the lead, the payload is aligned as where it was received.
            let opened = seal.handle_packet((now, *unix), from, bytes, &mut room[LEAD..]);
            let Ok(Some(opened)) = opened else { return };
            delivered += 1;
            sink(&RxDatagram {
                src,
                src_port,
                arrival,
                group,
                bytes: opened.packet,
                whole: None,
                ip_id: opened.ip_id,
                has_icrc: true,
                packets: 1,
                marked,
            });
        });
        self.pump(now);
        delivered
    }

    fn next_deadline(&self) -> Option<u64> {
        [self.inner.next_deadline(), self.seal.poll_timeout()].into_iter().flatten().min()
    }

    fn bind_service(&mut self, service: u64) -> std::io::Result<bool> {
        self.inner.bind_service(service)
    }

    fn unbind_service(&mut self, service: u64) {
        self.inner.unbind_service(service);
    }

    fn has_service(&self, service: u64) -> bool {
        self.inner.has_service(service)
    }

    fn join_group(&mut self, group: IpAddr) -> std::io::Result<()> {
        self.inner.join_group(group)
    }

    fn leave_group(&mut self, group: IpAddr) {
        self.inner.leave_group(group);
    }

    /// Seals the datagram again: its owner takes no other.
    fn hand_over_mad(&mut self, owner: MadOwner, datagram: &RxDatagram<'_>) -> bool {
        self.tick(now_ns());
        let sealed = self.seal.forwarded(self.unix, datagram.src, datagram.ip_id, datagram.bytes);
        self.inner.hand_over_mad(owner, &RxDatagram { bytes: &sealed, ..*datagram })
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let counted = self.seal.counters();
        let mut all = self.inner.counters();
        all.extend([
            ("sealed_sent", counted.sealed),
            ("sealed_received", counted.opened),
            ("sealed_sessions", counted.sessions),
            ("sealed_unanswered", counted.unanswered),
            ("sealed_unsent", self.unsent),
        ]);
        all.extend(Dropped::ALL.map(|reason| (name(reason), counted.dropped(reason))));
        all
    }
}

/// The counter of packets dropped for that reason.
fn name(reason: Dropped) -> &'static str {
    match reason {
        Dropped::NotSealed => "sealed_drop_plain",
        Dropped::Malformed => "sealed_drop_malformed",
        Dropped::UnknownKey => "sealed_drop_unknown_key",
        Dropped::UnknownSession => "sealed_drop_unknown_session",
        Dropped::Forged => "sealed_drop_forged",
        Dropped::Replayed => "sealed_drop_replayed",
        Dropped::OtherTime => "sealed_drop_other_time",
        Dropped::NoRoom => "sealed_drop_no_room",
    }
}

impl<L: fmt::Debug> fmt::Debug for SealedLink<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealedLink")
            .field("inner", &self.inner)
            .field("source", &self.source)
            .field("waiting", &self.waiting.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
