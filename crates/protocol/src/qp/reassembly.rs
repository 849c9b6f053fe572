//! Packets behind a gap, which selective retransmission keeps.
//!
//! Payload in the middle of the WRITE that is arriving is placed at once: programs must not look at
//! it before the message is complete. Everything else is held and delivered in order, so that
//! completions, receives, atomics and the last byte of a message stay in the standard's order.

use std::collections::BTreeMap;

use crate::wire::{Header, Psn, Qpn, SelectiveAck};

/// Bytes that one queue pair holds at most.
pub(crate) const MAX_HELD: usize = 1 << 20;
/// What a held packet counts besides its payload.
const PACKET_OVERHEAD: usize = 192;
/// Packets that arrive behind a gap before it is reported again.
const REPORT_EVERY: u64 = 4;

/// A packet that arrived behind a gap, whose turn has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldPacket {
    /// Its headers.
    pub header: Header,
    /// How many packets were merged.
    pub packets: u32,
    /// Its payload.
    pub payload: Vec<u8>,
}

#[derive(Debug)]
enum Early {
    /// Its payload is in its place.
    Placed {
        packets: u64,
    },
    Held(Box<HeldPacket>),
}

impl Early {
    fn packets(&self) -> u64 {
        match self {
            Self::Placed { packets } => *packets,
            Self::Held(held) => u64::from(held.packets),
        }
    }
}

/// What arrived behind a gap.
#[derive(Debug, Default)]
pub(super) struct Reassembly {
    /// By first PSN.
    early: BTreeMap<u64, Early>,
    held: usize,
    /// There was a gap, whose end is not reported yet.
    gap: bool,
    /// Packets since the last report; `due` to report now.
    unreported: u64,
    due: bool,
}

impl Reassembly {
    /// Whether a packet of this payload may be held.
    pub(super) const fn has_room(&self, payload_len: usize) -> bool {
        self.held + payload_len + PACKET_OVERHEAD <= MAX_HELD
    }

    /// Whether all of these are here.
    pub(super) fn has(&self, psn: u64, packets: u64) -> bool {
        self.early
            .range(..=psn)
            .next_back()
            .is_some_and(|(first, early)| psn + packets <= first + early.packets())
    }

    /// A packet arrived behind the gap at `missing`: a report is due when a gap opens, or closes in
    /// part, or the peer asks, and now and then.
    pub(super) fn note_arrival(&mut self, psn: u64, packets: u64, asked: bool) {
        let top = self.early.last_key_value().map_or(0, |(first, early)| first + early.packets());
        self.unreported += packets;
        self.gap = true;
        self.due |= asked || psn != top || self.unreported >= REPORT_EVERY;
    }

    /// The payload of these is in its place.
    pub(super) fn place(&mut self, psn: u64, packets: u64) {
        if let Some((first, Early::Placed { packets: before })) = self.early.range_mut(..psn).next_back()
            && first + *before == psn
        {
            *before += packets;
        } else {
            self.early.entry(psn).or_insert(Early::Placed { packets });
        }
    }

    /// Holds a packet.
    pub(super) fn hold(&mut self, psn: u64, held: HeldPacket) {
        let size = held.payload.len() + PACKET_OVERHEAD;
        if let std::collections::btree_map::Entry::Vacant(place) = self.early.entry(psn) {
            self.held += size;
            place.insert(Early::Held(Box::new(held)));
        }
    }

    /// How many packets are in their place from the expected one on.
    pub(super) fn take_placed(&mut self, expected: u64) -> Option<u64> {
        loop {
            let (&first, early) = self.early.first_key_value()?;
            if first > expected || (first + early.packets() > expected && matches!(early, Early::Held(_))) {
                return None;
            }
            let end = first + early.packets();
            self.remove(first);
            if end > expected {
                return Some(end - expected);
            }
        }
    }

    /// The packet that is expected, or the rest of several.
    pub(super) fn take_held(&mut self, expected: u64, mtu: usize) -> Option<HeldPacket> {
        loop {
            let (&first, early) = self.early.first_key_value()?;
            if first > expected || !matches!(early, Early::Held(_)) {
                return None;
            }
            let mut held = self.remove(first)?;
            let known = u32::try_from(expected - first).unwrap_or(u32::MAX);
            if known >= held.packets {
                continue;
            }
            if known > 0 {
                held.header.psn = Psn::of(expected);
                held.packets -= known;
                held.payload.drain(..(known as usize * mtu).min(held.payload.len()));
            }
            return Some(held);
        }
    }

    fn remove(&mut self, first: u64) -> Option<HeldPacket> {
        match self.early.remove(&first)? {
            Early::Placed { .. } => None,
            Early::Held(held) => {
                self.held -= held.payload.len() + PACKET_OVERHEAD;
                Some(*held)
            }
        }
    }

    /// A packet was accepted in order. Whether that closed the last gap.
    pub(super) fn note_accepted(&mut self) -> bool {
        self.due |= self.gap;
        if !self.early.is_empty() {
            return false;
        }
        (self.due, self.unreported) = (false, 0);
        std::mem::take(&mut self.gap)
    }

    /// Whether a report is to be sent now, or before the next pause.
    pub(super) const fn is_due(&self) -> bool {
        self.due
    }

    pub(super) const fn has_report(&self) -> bool {
        self.due || self.unreported > 0
    }

    pub(super) const fn holds_packets(&self) -> bool {
        self.held > 0
    }

    /// Whether packets are missing.
    pub(super) const fn has_gap(&self) -> bool {
        self.gap
    }

    /// A packet that is here came again, and asks.
    pub(super) fn ask(&mut self) {
        self.due = true;
    }

    pub(super) fn report(&mut self, to: Qpn, expected: u64) -> SelectiveAck {
        (self.due, self.unreported) = (false, 0);
        let mut ack = SelectiveAck::new(to, Psn::of(expected));
        for (first, early) in self.early.range(..=expected + SelectiveAck::SPAN) {
            let end = (first + early.packets()).min(expected + SelectiveAck::SPAN + 1);
            (*first..end).for_each(|psn| ack.note(psn.saturating_sub(expected)));
        }
        ack
    }
}
