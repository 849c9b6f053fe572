//! One direction of a path: when each packet leaves it, if it does.
//!
//! Packets pass a queue in front of a limited rate, then the wire, which delays, loses, reorders
//! and duplicates them. The model has no clock: callers give the time in nanoseconds.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use nobounce_protocol::rng::Rng;

use crate::config::PathConfig;
use crate::packet::{mark_congestion, too_long};

/// Most packets inside the path; one more is dropped.
const MAX_HELD: usize = 1 << 16;
/// Most packets that overtake a reordered one, and how long it waits for them.
const MAX_OVERTAKEN: u64 = 8;
const REORDER_NS: u64 = 1_000_000;
const NS_PER_SECOND: u128 = 1_000_000_000;

/// What happened to the packets of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathCounts {
    /// Packets that entered.
    pub packets: u64,
    /// Their bytes, IP headers included.
    pub bytes: u64,
    /// Dropped because the queue was full.
    pub queue_full: u64,
    /// Lost on the wire.
    pub lost: u64,
    /// Delivered twice.
    pub duplicated: u64,
    /// Held until other packets had overtaken them.
    pub reordered: u64,
    /// Delivered with a flipped bit.
    pub corrupted: u64,
    /// Marked by ECN.
    pub marked: u64,
    /// Dropped because they were longer than the path MTU.
    pub too_long: u64,
}

/// One direction of a path.
#[derive(Debug)]
pub struct PathModel {
    config: PathConfig,
    random: Rng,
    /// When the queue in front of the rate is empty.
    free_at: u64,
    /// Packets on the wire, the next to leave on top.
    held: BinaryHeap<Reverse<Held>>,
    overtaken: Vec<Overtaken>,
    serial: u64,
    counts: PathCounts,
    /// Spare buffers.
    spare: Vec<Vec<u8>>,
}

#[derive(Debug)]
struct Held {
    at: u64,
    /// Keeps packets with equal times in order.
    serial: u64,
    bytes: Vec<u8>,
}

impl Ord for Held {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.serial).cmp(&(other.at, other.serial))
    }
}

impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Held {}

/// A packet that waits until `by` others have passed.
#[derive(Debug)]
struct Overtaken {
    by: u64,
    /// When it leaves in any case.
    at: u64,
    bytes: Vec<u8>,
}

impl PathModel {
    /// A direction whose random numbers begin at the seed of `config` plus `direction`.
    pub fn new(config: &PathConfig, direction: u64) -> Self {
        Self {
            config: *config,
            random: Rng::new(config.faults.seed.wrapping_add(direction)),
            free_at: 0,
            held: BinaryHeap::new(),
            overtaken: Vec::new(),
            serial: 0,
            counts: PathCounts::default(),
            spare: Vec::new(),
        }
    }

    /// What has happened until now.
    pub fn counts(&self) -> PathCounts {
        self.counts
    }

    /// A packet enters. Returns the ICMP message that goes back to its sender, if there is one.
    pub fn offer(&mut self, now: u64, packet: &[u8]) -> Option<Vec<u8>> {
        let len = packet.len() as u64;
        self.counts.packets += 1;
        self.counts.bytes += len;
        if let Some(mtu) = self.config.path_mtu.filter(|mtu| len > u64::from(*mtu)) {
            self.counts.too_long += 1;
            return if self.config.icmp { too_long(packet, mtu) } else { None };
        }
        let backlog = self.backlog(now);
        let is_full = self.config.rate.is_some() && backlog > 0 && backlog + len > self.config.queue;
        // One more for the duplicate.
        if is_full || self.held.len() + self.overtaken.len() + 1 >= MAX_HELD {
            self.counts.queue_full += 1;
            return None;
        }
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.clear();
        bytes.extend_from_slice(packet);
        if self.config.ecn.is_some_and(|ecn| backlog + len > ecn) && mark_congestion(&mut bytes) {
            self.counts.marked += 1;
        }
        let sent = self.pass_queue(now, len);
        self.pass_wire(sent, bytes);
        None
    }

    /// Bytes that wait for the rate.
    fn backlog(&self, now: u64) -> u64 {
        let left = u128::from(self.free_at.saturating_sub(now));
        let bytes = left * u128::from(self.config.rate.unwrap_or(0)) / (8 * NS_PER_SECOND);
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    /// When the last bit of a packet has left the queue.
    fn pass_queue(&mut self, now: u64, len: u64) -> u64 {
        let Some(rate) = self.config.rate else { return now };
        let time = u128::from(len) * 8 * NS_PER_SECOND / u128::from(rate);
        self.free_at = self.free_at.max(now) + u64::try_from(time).unwrap_or(u64::MAX / 4);
        self.free_at
    }

    fn pass_wire(&mut self, sent: u64, mut bytes: Vec<u8>) {
        let faults = self.config.faults;
        // Every packet takes as many random numbers, so that one fault does not shift the others.
        let shares = [faults.loss, faults.dup, faults.reorder, faults.corrupt, faults.mark];
        let [lost, twice, late, flipped, marked] = shares.map(|share| chance(&mut self.random, share));
        let (bit, by) = (self.random.next(), 1 + self.random.below(MAX_OVERTAKEN));
        let jitter = self.random.below(faults.jitter_ns.saturating_add(1));
        if lost {
            self.counts.lost += 1;
            return self.recycle(bytes);
        }
        if marked && mark_congestion(&mut bytes) {
            self.counts.marked += 1;
        }
        if flipped {
            self.counts.corrupted += 1;
            flip(&mut bytes, bit);
        }
        let at = sent.saturating_add(faults.delay_ns).saturating_add(jitter);
        let copy = twice.then(|| bytes.clone());
        if late {
            self.counts.reordered += 1;
            self.overtaken.push(Overtaken { by, at: at.saturating_add(REORDER_NS), bytes });
        } else {
            self.pass(at, bytes);
        }
        if let Some(copy) = copy {
            self.counts.duplicated += 1;
            self.pass(at, copy);
        }
    }

    /// A packet passes those that wait to be overtaken.
    fn pass(&mut self, at: u64, bytes: Vec<u8>) {
        self.hold(at, bytes);
        if self.overtaken.is_empty() {
            return;
        }
        self.overtaken.iter_mut().for_each(|one| one.by -= 1);
        let done: Vec<_> = self.overtaken.extract_if(.., |one| one.by == 0).collect();
        for one in done {
            self.hold(at, one.bytes);
        }
    }

    fn hold(&mut self, at: u64, bytes: Vec<u8>) {
        self.serial += 1;
        self.held.push(Reverse(Held { at, serial: self.serial, bytes }));
    }

    /// When the next packet leaves, if none enters before.
    pub fn next_due(&self) -> Option<u64> {
        let overtaken = self.overtaken.iter().map(|one| one.at).min();
        [self.held.peek().map(|Reverse(held)| held.at), overtaken].into_iter().flatten().min()
    }

    /// The next packet that has to leave by now, and when it was to leave. Give it back to
    /// [`recycle`](Self::recycle).
    pub fn pop_due(&mut self, now: u64) -> Option<(u64, Vec<u8>)> {
        if !self.overtaken.is_empty() {
            let late: Vec<_> = self.overtaken.extract_if(.., |one| one.at <= now).collect();
            for one in late {
                self.hold(one.at, one.bytes);
            }
        }
        if self.held.peek().is_none_or(|Reverse(held)| held.at > now) {
            return None;
        }
        self.held.pop().map(|Reverse(held)| (held.at, held.bytes))
    }

    /// Keeps the buffer of a packet that has left for another one.
    pub fn recycle(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < 256 {
            self.spare.push(buffer);
        }
    }
}

/// True with that probability.
fn chance(random: &mut Rng, share: f64) -> bool {
    let bits = u32::try_from(random.next() >> 32).unwrap_or(0);
    f64::from(bits) < share * 4_294_967_296.0
}

/// Flips one bit behind the IP header, or of it in a packet that has nothing else.
fn flip(packet: &mut [u8], random: u64) {
    let headers = if packet.first().is_some_and(|byte| byte >> 4 == 6) { 40 } else { 20 };
    let start = if packet.len() > headers { headers } else { 0 };
    let len = (packet.len() - start) as u64;
    if len > 0
        && let Some(byte) =
            usize::try_from((random >> 3) % len).ok().and_then(|at| packet.get_mut(start + at))
    {
        *byte ^= 1 << (random & 7);
    }
}

#[cfg(test)]
mod tests;
