//! A pipe: one direction of a simulated network with configurable faults.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::fmt;

use crate::rng::Rng;
use crate::timing::{MICROSECOND, Nanos, SECOND};
use crate::wire::Header;

/// What Ethernet, IP and UDP add to a packet on the wire: preamble, gap, header, check, IPv4, UDP.
pub const WIRE_OVERHEAD: usize = 66;

/// How a pipe behaves. May be changed while packets are under way; those keep their fate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conditions {
    /// Bits per second; 0: no limit.
    pub rate: u64,
    /// One-way delay.
    pub delay: Nanos,
    /// Packets lost, per million.
    pub loss: u32,
    /// Packets delivered twice, per million.
    pub duplicate: u32,
    /// Packets held back, per million, by up to [`Conditions::hold`]: others overtake them.
    pub reorder: u32,
    /// The longest a reordered packet is held back.
    pub hold: Nanos,
    /// Packets with one bit flipped, per million.
    pub corrupt: u32,
    /// Bytes that may wait for the wire; what does not fit is lost. 0: no limit.
    pub buffer: u64,
    /// Bytes that wait for the wire above which packets are marked (ECN). 0: none is.
    pub mark_above: u64,
}

impl Default for Conditions {
    fn default() -> Self {
        Self {
            rate: 0,
            delay: 5 * MICROSECOND,
            loss: 0,
            duplicate: 0,
            reorder: 0,
            hold: 20 * MICROSECOND,
            corrupt: 0,
            buffer: 0,
            mark_above: 0,
        }
    }
}

/// What a script decides about a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Whatever the conditions say.
    Pass,
    /// It is lost.
    Drop,
    /// It comes twice.
    Duplicate,
    /// It comes later by this much.
    Delay(Nanos),
    /// One bit of it is flipped.
    Corrupt,
}

/// What a pipe counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct PipeCounters {
    pub sent: u64,
    pub sent_bytes: u64,
    pub lost: u64,
    pub overflowed: u64,
    pub duplicated: u64,
    pub reordered: u64,
    pub corrupted: u64,
    pub marked: u64,
}

/// A packet under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Flying {
    pub(crate) at: Nanos,
    order: u64,
    pub(crate) from: usize,
    pub(crate) ip_id: u16,
    /// It carries a congestion mark.
    pub(crate) marked: bool,
    pub(crate) bytes: Vec<u8>,
}

impl Ord for Flying {
    fn cmp(&self, other: &Self) -> Ordering {
        // the heap gives the largest: the earliest
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

impl PartialOrd for Flying {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Decides about the `n`th packet of a pipe.
pub type Script = Box<dyn FnMut(u64, &Header) -> Fate>;

/// One direction of the network.
pub struct Pipe {
    /// How it behaves from now on.
    pub conditions: Conditions,
    script: Option<Script>,
    rng: Rng,
    flying: BinaryHeap<Flying>,
    order: u64,
    busy_until: Nanos,
    counters: PipeCounters,
}

impl fmt::Debug for Pipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pipe")
            .field("conditions", &self.conditions)
            .field("flying", &self.flying.len())
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

impl Pipe {
    /// An empty pipe.
    pub fn new(conditions: Conditions, seed: u64) -> Self {
        Self {
            conditions,
            script: None,
            rng: Rng::new(seed),
            flying: BinaryHeap::new(),
            order: 0,
            busy_until: 0,
            counters: PipeCounters::default(),
        }
    }

    /// Lets `script` decide about every packet from now on, counted from 0; it replaces an earlier
    /// one.
    pub fn script(&mut self, script: impl FnMut(u64, &Header) -> Fate + 'static) {
        let from = self.counters.sent;
        let mut script = script;
        self.script = Some(Box::new(move |n, header| script(n - from, header)));
    }

    /// What it counted.
    pub const fn counters(&self) -> &PipeCounters {
        &self.counters
    }

    /// Packets under way.
    pub fn in_flight(&self) -> usize {
        self.flying.len()
    }

    /// Puts a packet in; says what will become of it.
    pub(crate) fn send(
        &mut self,
        now: Nanos,
        from: usize,
        header: &Header,
        ip_id: u16,
        mut bytes: Vec<u8>,
    ) -> &'static str {
        let nth = self.counters.sent;
        let on_wire = (bytes.len() + WIRE_OVERHEAD) as u64;
        self.counters.sent += 1;
        self.counters.sent_bytes += on_wire;
        let fate = self.script.as_mut().map_or(Fate::Pass, |script| script(nth, header));
        let c = self.conditions;
        let start = self.busy_until.max(now);
        let waiting = u128::from(start - now) * u128::from(c.rate) / 8 / u128::from(SECOND);
        let marked = c.mark_above > 0 && waiting > u128::from(c.mark_above);
        self.counters.marked += u64::from(marked);
        if c.buffer > 0 && c.rate > 0 && waiting + u128::from(on_wire) > u128::from(c.buffer) {
            self.counters.overflowed += 1;
            return "overflow";
        }
        self.busy_until = start + (on_wire * 8 * SECOND).checked_div(c.rate).unwrap_or(0);
        let mut at = self.busy_until + c.delay;
        if fate == Fate::Drop || self.rng.chance(c.loss) {
            self.counters.lost += 1;
            return "lost";
        }
        let mut said = "";
        if fate == Fate::Corrupt || self.rng.chance(c.corrupt) {
            self.counters.corrupted += 1;
            flip_a_bit(&mut bytes, &mut self.rng);
            said = "corrupted";
        }
        if let Fate::Delay(by) = fate {
            at += by;
            said = "delayed";
        }
        if self.rng.chance(c.reorder) {
            self.counters.reordered += 1;
            at += self.rng.below(c.hold) + 1;
            said = "delayed";
        }
        if fate == Fate::Duplicate || self.rng.chance(c.duplicate) {
            self.counters.duplicated += 1;
            let twin_at = at + self.rng.below(c.hold);
            self.put(Flying { at: twin_at, order: 0, from, ip_id, marked, bytes: bytes.clone() });
            said = "duplicated";
        }
        self.put(Flying { at, order: 0, from, ip_id, marked, bytes });
        said
    }

    fn put(&mut self, mut flying: Flying) {
        flying.order = self.order;
        self.order += 1;
        self.flying.push(flying);
    }

    /// When the next packet arrives.
    pub(crate) fn next_arrival(&self) -> Option<Nanos> {
        self.flying.peek().map(|f| f.at)
    }

    /// The next packet that has arrived by `now`.
    pub(crate) fn receive(&mut self, now: Nanos) -> Option<Flying> {
        if self.next_arrival()? <= now { self.flying.pop() } else { None }
    }
}

/// The destination's number stays as it is: the damage must be found by the ICRC, not by the
/// routing.
fn flip_a_bit(bytes: &mut [u8], rng: &mut Rng) {
    let bit = rng.below(bytes.len() as u64 * 8);
    let index = usize::try_from(bit / 8).unwrap_or(0);
    let index = if (4..8).contains(&index) { 0 } else { index };
    bytes[index] ^= 1 << (bit % 8);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Opcode, Psn, Qpn};

    fn header() -> Header {
        Header::new(Opcode::SendOnly, Qpn::new(1), Psn::new(0))
    }

    fn arrivals(pipe: &mut Pipe) -> Vec<Nanos> {
        std::iter::from_fn(|| pipe.receive(u64::MAX)).map(|f| f.at).collect()
    }

    fn pour(conditions: Conditions, packets: usize) -> Pipe {
        let mut pipe = Pipe::new(conditions, 1);
        for _ in 0..packets {
            pipe.send(0, 0, &header(), 0, vec![0; 934]); // 1000 bytes on the wire
        }
        pipe
    }

    #[test]
    fn rate_and_delay_say_when_a_packet_arrives() {
        let mut pipe = pour(Conditions { rate: 8_000_000_000, delay: 100, ..Conditions::default() }, 3);
        assert_eq!(arrivals(&mut pipe), [1100, 2100, 3100]);
    }

    #[test]
    fn what_does_not_fit_the_buffer_is_lost() {
        let conditions = Conditions { rate: 8_000_000_000, buffer: 5000, ..Conditions::default() };
        let mut pipe = pour(conditions, 20);
        assert_eq!(arrivals(&mut pipe).len(), 5);
        assert_eq!(pipe.counters().overflowed, 15);
    }

    #[test]
    fn every_fault_happens_as_often_as_it_should() {
        let c = Conditions {
            loss: 100_000,
            duplicate: 100_000,
            reorder: 100_000,
            corrupt: 100_000,
            ..Conditions::default()
        };
        let mut pipe = pour(c, 10_000);
        let counted = *pipe.counters();
        for n in [counted.lost, counted.duplicated, counted.reordered, counted.corrupted] {
            assert!((800..1200).contains(&n), "{counted:?}");
        }
        let arrived = arrivals(&mut pipe).len() as u64;
        assert_eq!(arrived, 10_000 - counted.lost + counted.duplicated);
    }

    #[test]
    fn a_flipped_bit_is_a_flipped_bit() {
        let mut pipe = Pipe::new(Conditions::default(), 3);
        pipe.script(|n, _| if n == 1 { Fate::Corrupt } else { Fate::Pass });
        for _ in 0..3 {
            pipe.send(0, 0, &header(), 0, vec![0; 64]);
        }
        let ones: Vec<u32> = std::iter::from_fn(|| pipe.receive(u64::MAX))
            .map(|f| f.bytes.iter().map(|b| b.count_ones()).sum())
            .collect();
        assert_eq!(ones, [0, 1, 0]);
    }
}
