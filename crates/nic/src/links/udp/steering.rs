//! Steering: which socket of the port receives the packets of a slot.
//!
//! The kernel numbers the sockets of the SO_REUSEPORT group, and the group's BPF program returns a
//! number. A socket's number is its slot until a device other than the last one closes: the last
//! socket then takes over the freed number. A device that receives many handovers therefore probes
//! for its number. Each probe carries the number to steer it to; the device that gets its own probe
//! back knows its number. It publishes the number by an abstract socket name, and replaces the
//! program using the published numbers of all slots.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use super::socket::{SockAddr, Socket};
use crate::links::now_ns;
use crate::links::slot::{GroBurst, PLACES, Slot, SlotPlace};

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
/// Minimum interval between attempts, in nanoseconds.
const PAUSE_NS: u64 = 1_000_000_000;
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
    /// The number to probe next.
    next: u16,
    /// The first number that answered. For numbers past the end of the group the kernel picks any
    /// socket.
    found: Option<u8>,
}

impl Steering {
    /// The program for a device that joins.
    pub(super) fn join(&mut self, socket: &Socket, slot: &Slot) -> io::Result<()> {
        let done = socket.steer(&others(slot.addr(), slot.number()));
        self.is_impossible = done.is_err();
        done
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
            let now = now_ns();
            if self.handed < MANY || now < self.not_before {
                return;
            }
            (self.handed, self.not_before) = (0, now + PAUSE_NS);
            let [.., b, c, d] = (now / 1000).to_be_bytes();
            self.probing = Some(Probing { nonce: [b, c, d ^ slot.number()], next: 0, found: None });
        }
        let Some(probing) = &mut self.probing else { return };
        if probing.found.is_none() && probing.next > 0 && !is_empty {
            return;
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

    fn take_place(&mut self, socket: &Socket, slot: &Slot, number: u8) {
        let addr = slot.addr();
        // Release the old name first: two would contradict each other.
        self.place = None;
        if number != slot.number() {
            self.place = SlotPlace::publish(addr, slot.number(), number).ok();
        }
        let mut moved = others(addr, slot.number());
        moved.insert(slot.number(), number);
        if socket.steer(&moved).is_ok() {
            self.changed = Some(now_ns());
            tracing::debug!(slot = slot.number(), number, "the kernel steers packets of this slot anew");
        }
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
        self.is_impossible || (self.probing.is_none() && self.handed < MANY)
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
    let Ok(names) = std::fs::read_to_string("/proc/self/net/unix") else { return BTreeMap::new() };
    let mut moved = published(&names, addr);
    moved.remove(&own);
    moved
}

fn published(names: &str, addr: IpAddr) -> BTreeMap<u8, u8> {
    let prefix = format!("@{PLACES}/{addr}/");
    let name = |line: &str| {
        let (slot, number) = line.split_whitespace().last()?.strip_prefix(&prefix)?.split_once('/')?;
        Some((slot.parse().ok()?, number.parse().ok()?))
    };
    names.lines().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_from_the_names_of_one_address() {
        let names = "Num RefCount Protocol Flags Type St Inode Path\n\
            0: 2 0 0 0002 01 1 @nobounce/place/127.9.1.1/2/0\n\
            0: 2 0 0 0002 01 1 @nobounce/place/127.9.1.11/3/1\n\
            0: 2 0 0 0002 01 1 @nobounce/place/127.9.1.1/300/1\n\
            0: 2 0 0 0002 01 1 @nobounce/place/127.9.1.1/7\n\
            0: 2 0 0 0002 01 1 @nobounce/slot/127.9.1.1/5\n\
            0: 2 0 0 0002 01 1\n\
            0: 2 0 0 0002 01 1 @nobounce/place/127.9.1.1/255/254\n";
        let found = published(names, [127, 9, 1, 1].into());
        assert_eq!(found, BTreeMap::from([(2, 0), (255, 254)]));
    }

    #[test]
    fn only_ones_own_probe_tells_anything() {
        let mut steering = Steering {
            probing: Some(Probing { nonce: [1, 2, 3], next: 16, found: None }),
            ..Steering::default()
        };
        let mut hear = |bytes: &[u8], segment| {
            let run = GroBurst { src: [127, 0, 0, 1].into(), src_port: 1, ip_id: 0, segment, bytes };
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
