//! A link that injects network faults, reproducibly.
//!
//! Faults act on sent packets, after the ICRC was written; congestion marks are of packets that
//! arrive. A packet that changes its place in a GSO
//! group gets the ICRC of the new place, so that only the requested fault occurs.

mod config;

pub use config::{FaultConfig, ParseFaultError};

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Link, LocalRoute, PeerName, RxDatagram, TxBatch, TxPacket, now_ns};

/// Maximum number of packets held, for delay and reordering each; beyond it the oldest leaves
/// early.
const MAX_HELD: usize = 4096;
/// Maximum number of packets that overtake a reordered one.
const MAX_OVERTAKEN: u64 = 8;
/// A reordered packet that no other packet overtakes leaves after this many nanoseconds.
const REORDER_NS: u64 = 1_000_000;
/// The BTH byte that the ICRC does not cover: a bit flip there would go undetected.
const UNCOVERED_BYTE: u64 = 4;

/// Wraps a link and injects faults into sent packets.
#[derive(Debug)]
pub struct FaultLink<L> {
    inner: L,
    config: FaultConfig,
    random: Random,
    /// For packets that arrive: the others do not depend on their number.
    arrivals: Random,
    clock: fn() -> u64,
    /// The batch that leaves next.
    out: TxBatch,
    /// Delayed packets, the earliest on top.
    delayed: BinaryHeap<Reverse<Delayed>>,
    /// Packets waiting to be overtaken, in the order they came.
    overtaken: Vec<Overtaken>,
    /// Sequence number: keeps packets with equal times in order.
    serial: u64,
    counts: FaultCounts,
}

#[derive(Clone, Copy, Debug, Default)]
struct FaultCounts {
    lost: u64,
    duplicated: u64,
    reordered: u64,
    corrupted: u64,
    delayed: u64,
    marked: u64,
}

/// A packet kept outside its batch.
#[derive(Debug, PartialEq, Eq)]
struct DelayedPacket {
    packet: TxPacket,
    bytes: Vec<u8>,
}

#[derive(Debug, PartialEq, Eq)]
struct Delayed {
    at: u64,
    serial: u64,
    held: DelayedPacket,
}

impl Ord for Delayed {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.serial).cmp(&(other.at, other.serial))
    }
}

impl PartialOrd for Delayed {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

#[derive(Debug)]
struct Overtaken {
    /// Packets that must pass first.
    by: u64,
    /// Deadline at which it leaves in any case.
    at: u64,
    held: DelayedPacket,
}

impl<L: Link> FaultLink<L> {
    /// Wraps `inner`.
    pub fn new(inner: L, config: FaultConfig) -> Self {
        Self::with_clock(inner, config, now_ns)
    }

    fn with_clock(inner: L, config: FaultConfig, clock: fn() -> u64) -> Self {
        Self {
            out: TxBatch::new(inner.capabilities()),
            inner,
            config,
            random: Random(config.seed),
            arrivals: Random(!config.seed),
            clock,
            delayed: BinaryHeap::new(),
            overtaken: Vec::new(),
            serial: 0,
            counts: FaultCounts::default(),
        }
    }

    /// Decides the fate of one packet.
    fn mistreat(&mut self, packet: &TxPacket, bytes: &[u8], now: u64) {
        let FaultConfig { loss, dup, reorder, corrupt, .. } = self.config;
        // Every packet consumes the same number of random values, so that one fault does not shift
        // the others.
        let (lost, twice, late, flipped) = (
            self.random.chance(loss),
            self.random.chance(dup),
            self.random.chance(reorder),
            self.random.chance(corrupt),
        );
        let (bit, by) = (self.random.next(), 1 + self.random.below(MAX_OVERTAKEN));
        if lost {
            self.counts.lost += 1;
            return;
        }
        let mut flipped_copy = Vec::new();
        let bytes = if flipped {
            self.counts.corrupted += 1;
            flipped_copy.extend_from_slice(bytes);
            flip(&mut flipped_copy, bit);
            &flipped_copy
        } else {
            bytes
        };
        if late {
            self.counts.reordered += 1;
            if self.overtaken.len() == MAX_HELD {
                let first = self.overtaken.remove(0);
                self.delay(&first.held.packet, &first.held.bytes, now);
            }
            let held = DelayedPacket { packet: *packet, bytes: bytes.to_vec() };
            self.overtaken.push(Overtaken { by, at: now.saturating_add(REORDER_NS), held });
        } else {
            self.pass(packet, bytes, now);
        }
        if twice {
            self.counts.duplicated += 1;
            self.pass(packet, bytes, now);
        }
    }

    /// Counts a packet as overtaking, and releases held packets that have been overtaken.
    fn pass(&mut self, packet: &TxPacket, bytes: &[u8], now: u64) {
        self.delay(packet, bytes, now);
        if self.overtaken.is_empty() {
            return;
        }
        self.overtaken.iter_mut().for_each(|o| o.by -= 1);
        let done: Vec<_> = self.overtaken.extract_if(.., |o| o.by == 0).collect();
        for o in done {
            self.delay(&o.held.packet, &o.held.bytes, now);
        }
    }

    /// Applies the configured delay to a packet.
    fn delay(&mut self, packet: &TxPacket, bytes: &[u8], now: u64) {
        if self.config.delay_ns == 0 && self.config.jitter_ns == 0 {
            return self.emit(packet, bytes);
        }
        self.counts.delayed += 1;
        if self.delayed.len() == MAX_HELD
            && let Some(Reverse(first)) = self.delayed.pop()
        {
            self.emit(&first.held.packet, &first.held.bytes);
        }
        let jitter = self.random.below(self.config.jitter_ns.saturating_add(1));
        let at = now.saturating_add(self.config.delay_ns).saturating_add(jitter);
        self.serial += 1;
        let held = DelayedPacket { packet: *packet, bytes: bytes.to_vec() };
        self.delayed.push(Reverse(Delayed { at, serial: self.serial, held }));
    }

    fn emit(&mut self, packet: &TxPacket, bytes: &[u8]) {
        if !self.out.push(packet, bytes) {
            self.inner.send(&mut self.out);
            self.out.push(packet, bytes);
        }
    }

    /// Sends what is due.
    fn release(&mut self, now: u64) {
        let late: Vec<_> = self.overtaken.extract_if(.., |o| o.at <= now).collect();
        for o in late {
            self.delay(&o.held.packet, &o.held.bytes, now);
        }
        while self.delayed.peek().is_some_and(|Reverse(d)| d.at <= now) {
            if let Some(Reverse(due)) = self.delayed.pop() {
                self.emit(&due.held.packet, &due.held.bytes);
            }
        }
        if !self.out.is_empty() {
            self.inner.send(&mut self.out);
        }
    }

    fn holds_any(&self) -> bool {
        !self.overtaken.is_empty() || !self.delayed.is_empty()
    }
}

impl<L: Link> Link for FaultLink<L> {
    forward!(self => self.inner; identity, opening, same_host, services, waiting);

    /// Returns none, so that packets have an ICRC: corruption must be detectable.
    fn local_route(&mut self, to: PeerName) -> Option<LocalRoute> {
        self.inner.local_route(to);
        None
    }

    fn send(&mut self, batch: &mut TxBatch) {
        let now = (self.clock)();
        if batch.is_empty() {
            self.inner.send(batch);
        }
        for packet in batch.packets() {
            self.mistreat(packet, &batch.bytes(packet), now);
        }
        batch.clear();
        self.release(now);
    }

    fn receive(&mut self, sink: &mut dyn FnMut(&RxDatagram<'_>)) -> usize {
        if self.holds_any() {
            self.release((self.clock)());
            self.inner.wake_peers();
        }
        let Self { inner, config, arrivals, counts, .. } = self;
        if config.mark == 0.0 {
            return inner.receive(sink);
        }
        inner.receive(&mut |datagram| {
            let marked = datagram.marked || arrivals.chance(config.mark);
            counts.marked += u64::from(marked);
            sink(&RxDatagram { marked, ..*datagram });
        })
    }

    fn next_deadline(&self) -> Option<u64> {
        let delayed = self.delayed.peek().map(|Reverse(d)| d.at);
        let overtaken = self.overtaken.iter().map(|o| o.at).min();
        [self.inner.next_deadline(), delayed, overtaken].into_iter().flatten().min()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut all = self.inner.counters();
        all.extend([
            ("fault_lost", self.counts.lost),
            ("fault_duplicated", self.counts.duplicated),
            ("fault_reordered", self.counts.reordered),
            ("fault_corrupted", self.counts.corrupted),
            ("fault_delayed", self.counts.delayed),
            ("fault_marked", self.counts.marked),
        ]);
        all
    }
}

/// Flips one bit of the packet, anywhere the ICRC covers.
fn flip(packet: &mut [u8], random: u64) {
    let len = u64::try_from(packet.len()).unwrap_or(0);
    if len <= UNCOVERED_BYTE + 1 {
        return;
    }
    let at = (random >> 3) % (len - 1);
    let at = if at >= UNCOVERED_BYTE { at + 1 } else { at };
    if let Some(byte) = usize::try_from(at).ok().and_then(|at| packet.get_mut(at)) {
        *byte ^= 1 << (random & 7);
    }
}

/// Random numbers from a seed (splitmix64): reproducible, not secret.
#[derive(Clone, Copy, Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// True with probability `p`.
    fn chance(&mut self, p: f64) -> bool {
        let bits = u32::try_from(self.next() >> 32).unwrap_or(0);
        f64::from(bits) < p * 4_294_967_296.0
    }
}

#[cfg(test)]
mod tests;
