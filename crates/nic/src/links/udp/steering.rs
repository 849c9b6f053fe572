//! Steering: which socket of the port receives the packets of a slot.
//!
//! The kernel numbers the sockets of the SO_REUSEPORT group, and the group's BPF program returns a
//! number. A socket's number is its slot until a device other than the last one closes: the last
//! socket then takes over the freed number. A device that sees another one go therefore probes for
//! its number, and so does one that has joined or receives many handovers. Each probe carries the
//! number to steer it to; the device that gets its own probe back knows its number. It publishes
//! the number by an abstract socket name, and replaces the program using the published numbers of
//! all slots.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use super::socket::{SockAddr, Socket};
use crate::links::handover::GroBurst;
use crate::links::now_ns;
use crate::links::slot::{self, PLACES, Slot, SlotPlace};
use crate::links::unix;

/// The first byte of a probe: neither a RoCE opcode nor one of our markers.
const PROBE: u8 = 0xf2;
/// Offset of the number in a probe.
pub(super) const NUMBER_AT: usize = 1;
/// Length of a probe. It is too short for a packet of any slot, which is how the program recognises
/// it.
pub(super) const PROBE_LEN: usize = 5;
/// Handed-in packets that start a probe.
const MANY: u64 = 256;
/// Maximum probes in flight: they take room in the sockets of other devices.
const LOT: usize = 16;
/// Minimum interval between attempts because of handovers, in nanoseconds.
const PAUSE_NS: u64 = 1_000_000_000;
/// Delays of the checks after a departure, in nanoseconds: each is four times the one before. A
/// dying process closes its sockets in any order, and it may be interrupted between two of them.
const CHECKS_NS: (u64, u64) = (1_000_000, 1_024_000_000);
/// After a change, handovers in flight take precedence for this time. Other devices drain their
/// sockets within it, mostly at once.
const SETTLES_NS: (u64, u64) = (200_000, 1_000_000);

/// A device's view of its place in the group.
#[derive(Debug, Default)]
pub(super) struct Steering {
    /// The kernel takes no program.
    is_impossible: bool,
    /// Packets handed in since the last attempt.
    handed: u64,
    not_before: u64,
    /// Time of the next check of our number, and the delay to the one after it.
    check: Option<(u64, u64)>,
    probing: Option<Probing>,
    /// Our published number.
    place: Option<SlotPlace>,
    /// Time of the last program change, while packets steered before it may still be in flight.
    changed: Option<u64>,
}

#[derive(Debug)]
struct Probing {
    /// Nonce of our probes.
    nonce: [u8; PROBE_LEN - 2],
    /// Our number as far as known, which is probed first, while that is not answered; then the
    /// number to probe next.
    known: Option<u8>,
    next: u16,
    /// The first number that answered. For numbers past the end of the group the kernel picks any
    /// socket.
    found: Option<u8>,
}

impl Steering {
    /// The program for a device that joins.
    pub(super) fn join(&mut self, socket: &Socket, slot: &Slot) -> io::Result<()> {
        let done = socket.steer(&others(slot.addr(), slot.number()), slot::count(slot.addr()));
        self.is_impossible = done.is_err();
        // The slot may have been freed by a device that was not the last one.
        self.check = Some((now_ns(), CHECKS_NS.1));
        done
    }

    /// A device of this address has gone: our number may change.
    pub(super) fn check_soon(&mut self) {
        self.check = Some((now_ns() + CHECKS_NS.0, CHECKS_NS.0));
    }

    /// Deadline of the next [`Steering::advance`].
    pub(super) fn next_deadline(&self) -> Option<u64> {
        match (&self.probing, self.check) {
            _ if self.is_impossible => None,
            (Some(_), _) => Some(0),
            (None, check) => check.map(|(at, _)| at),
        }
    }

    /// Our number as far as known.
    fn number(&self, slot: &Slot) -> u8 {
        self.place.as_ref().map_or(slot.number(), |place| place.number)
    }

    /// Counts packets handed in by other devices.
    pub(super) fn note_handed(&mut self, packets: u64) {
        self.handed += packets;
    }

    /// Handles packets without a slot. Returns whether they were probes, which need no further
    /// handling.
    pub(super) fn hear(&mut self, run: &GroBurst<'_>) -> bool {
        if run.segment != PROBE_LEN || run.bytes.len() < PROBE_LEN || run.bytes[0] != PROBE {
            return false;
        }
        for packet in run.bytes.chunks_exact(PROBE_LEN) {
            if let Some(probing) = &mut self.probing
                && packet[NUMBER_AT + 1..] == probing.nonce
            {
                probing.found.get_or_insert(packet[NUMBER_AT]);
            }
        }
        true
    }

    /// Advances the probe, if one is due. If the socket was not found empty, probes may still be
    /// queued in it.
    pub(super) fn advance(&mut self, socket: &Socket, slot: &Slot, to: &SockAddr, is_empty: bool) {
        if self.probing.is_none() {
            let Some(known) = self.is_due(slot) else { return };
            let [.., b, c, d] = (now_ns() / 1000).to_be_bytes();
            let nonce = [b, c, d ^ slot.number()];
            self.probing = Some(Probing { nonce, known, next: 0, found: None });
            if let Some(known) = known {
                return socket.send_to(&probe(known, nonce), to);
            }
        }
        let Some(probing) = &mut self.probing else { return };
        if probing.found.is_none() && !is_empty && (probing.known.is_some() || probing.next > 0) {
            return;
        }
        if let Some(known) = probing.known.take()
            && probing.found == Some(known)
        {
            // The kernel picks any socket for a number past the end of the group: that answer says
            // nothing, and every number is probed.
            if usize::from(known) < slot::count(slot.addr()) {
                self.probing = None;
                return;
            }
            probing.found = None;
        }
        if probing.found.is_none() && probing.next <= u16::from(u8::MAX) {
            for number in (probing.next..=u16::from(u8::MAX)).take(LOT) {
                probing.next = number + 1;
                if let Ok(number) = u8::try_from(number) {
                    socket.send_to(&probe(number, probing.nonce), to);
                }
            }
            return;
        }
        // No answer: the probe was lost, or an older program without probe support is installed and
        // is replaced.
        let number = probing.found.unwrap_or(slot.number());
        self.probing = None;
        self.take_place(socket, slot, number);
    }

    /// Whether a probe is due; inside, the number that a mere check tries first.
    fn is_due(&mut self, slot: &Slot) -> Option<Option<u8>> {
        let now = now_ns();
        if self.handed >= MANY && now >= self.not_before {
            (self.handed, self.not_before) = (0, now + PAUSE_NS);
            return Some(None);
        }
        let (at, delay) = self.check.filter(|(at, _)| now >= *at)?;
        let delay = delay * 4;
        self.check = (delay <= CHECKS_NS.1).then_some((at + delay, delay));
        Some(Some(self.number(slot)))
    }

    fn take_place(&mut self, socket: &Socket, slot: &Slot, number: u8) {
        let addr = slot.addr();
        // Release the old name first: two would contradict each other.
        self.place = None;
        if number != slot.number() {
            self.place = SlotPlace::publish(addr, slot.number(), number).ok();
        }
        // Another device may publish its number at the same time: the last program has them all.
        let mut known = None;
        for _ in 0..=u8::MAX {
            let moved = others(addr, slot.number());
            if known.as_ref() == Some(&moved) {
                break;
            }
            let mut program = moved.clone();
            program.insert(slot.number(), number);
            if socket.steer(&program, slot::count(addr)).is_err() {
                return;
            }
            known = Some(moved);
        }
        self.changed = Some(now_ns());
        tracing::debug!(slot = slot.number(), number, "the kernel steers packets of this slot anew");
    }

    /// Whether handovers take precedence over packets that the kernel steers here now;
    /// `nothing_came` by handover in the last poll.
    pub(super) fn is_settling(&mut self, nothing_came: bool) -> bool {
        let Some(changed) = self.changed else { return false };
        let since = now_ns().saturating_sub(changed);
        if since > SETTLES_NS.1 || (nothing_came && since > SETTLES_NS.0) {
            self.changed = None;
        }
        self.changed.is_some()
    }

    /// Whether there is nothing to do; cheap.
    pub(super) fn is_idle(&self) -> bool {
        self.is_impossible || (self.probing.is_none() && self.handed < MANY && self.check.is_none())
    }

    pub(super) fn has_changed(&self) -> bool {
        self.changed.is_some()
    }
}

fn probe(number: u8, [b, c, d]: [u8; PROBE_LEN - 2]) -> [u8; PROBE_LEN] {
    [PROBE, number, b, c, d]
}

/// The published numbers of the other slots of the address. A wrong number only makes packets take
/// a handover: a group holds sockets of one user only.
fn others(addr: IpAddr, own: u8) -> BTreeMap<u8, u8> {
    let number = |name: &str| {
        let (slot, number) = name.split_once('/')?;
        Some((slot.parse().ok()?, number.parse().ok()?))
    };
    let mut moved: BTreeMap<u8, u8> =
        unix::names_after(&format!("{PLACES}/{addr}/")).iter().filter_map(|name| number(name)).collect();
    moved.remove(&own);
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_from_published_names() {
        let addr = [127, 9, 1, 1].into();
        let _published: Vec<_> =
            [(2, 0), (255, 254), (9, 9)].map(|(slot, number)| SlotPlace::publish(addr, slot, number)).into();
        assert_eq!(others(addr, 9), BTreeMap::from([(2, 0), (255, 254)]));
    }

    #[test]
    fn only_ones_own_probe_tells_anything() {
        let mut steering = Steering {
            probing: Some(Probing { nonce: [1, 2, 3], known: None, next: 16, found: None }),
            ..Steering::default()
        };
        let mut hear = |bytes: &[u8], segment| {
            let run =
                GroBurst { src: [127, 0, 0, 1].into(), src_port: 1, ip_id: 0, segment, marked: false, bytes };
            (steering.hear(&run), steering.probing.as_ref().unwrap().found)
        };
        assert_eq!(hear(&[], PROBE_LEN), (false, None));
        assert_eq!(hear(&[PROBE; 4], 4), (false, None));
        assert_eq!(hear(&[0; 5], PROBE_LEN), (false, None));
        assert_eq!(hear(&probe(3, [1, 2, 4]), PROBE_LEN), (true, None), "another's");
        let several = [probe(2, [9, 9, 9]), probe(4, [1, 2, 3]), probe(9, [1, 2, 3])].concat();
        assert_eq!(hear(&several, PROBE_LEN), (true, Some(4)), "the first");
    }
}
