//! The ways to those whom no queue pair is connected to: each datagram names its receiver, and some of those have a ring on this machine.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use nobounce_protocol::wire::Qpn;

use crate::links::Link;
use crate::links::shm::NearRing;
use crate::soft::local::near::Near;

/// A process that datagrams go to: its address, and the slot that the high byte of its queue pairs' numbers is.
pub(crate) type Addressee = (IpAddr, u8);

/// Receivers remembered. Beyond that all are forgotten, and asked for again: the link still knows those that it has met.
const MOST: usize = 1024;

/// Whom datagrams go to, and the ring that leads there, where there is one.
#[derive(Debug, Default)]
pub(crate) struct Ways {
    known: HashMap<Addressee, Option<Arc<NearRing>>>,
    /// The receiver of the packet that was built last.
    last: Option<Addressee>,
    /// Receivers that somebody must try to meet before the first packet to them is built.
    strangers: Vec<Addressee>,
}

impl Ways {
    /// A packet is going to be sent there.
    pub(crate) fn expect(&mut self, to: Addressee) {
        if self.last != Some(to) && !self.known.contains_key(&to) && !self.strangers.contains(&to) {
            self.strangers.push(to);
        }
    }

    pub(crate) fn has_strangers(&self) -> bool {
        !self.strangers.is_empty()
    }

    /// Tries to meet them all, as far as they are on this machine.
    #[cold]
    pub(crate) fn meet_strangers(&mut self, link: &mut dyn Link, near: &mut Near) {
        while let Some((addr, slot)) = self.strangers.pop() {
            let ring = if near.contains(addr) { link.introduce(addr, slot) } else { None };
            self.learn((addr, slot), ring);
        }
    }

    /// That is the way there: a ring, or, without one, whatever the link does with packets.
    fn learn(&mut self, to: Addressee, ring: Option<Arc<NearRing>>) {
        if self.known.len() >= MOST {
            self.known.clear();
            self.last = None;
        }
        self.known.insert(to, ring);
    }

    /// The next packet goes there: its way, unless it is that of the packet before.
    pub(crate) fn turn_to(&mut self, to: Addressee) -> Option<Option<Arc<NearRing>>> {
        if self.last == Some(to) {
            return None;
        }
        self.last = Some(to);
        Some(self.known.get(&to).cloned().flatten())
    }

    /// Its ring is given up; whether that was one of ours. The next datagram asks again who is there.
    pub(crate) fn forget(&mut self, gone: Addressee) -> bool {
        if self.last == Some(gone) {
            self.last = None;
        }
        self.known.remove(&gone).is_some()
    }
}

/// Who has the queue pair of that number at that address.
pub(crate) fn addressee(addr: IpAddr, qpn: Qpn) -> Addressee {
    let [_, slot, ..] = qpn.get().to_be_bytes();
    (addr, slot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_receiver_is_asked_for_once_and_again_when_it_went() {
        let mut ways = Ways::default();
        let [one, other] =
            [0x01_0001, 0x02_0001].map(|qpn| addressee(IpAddr::from([127, 0, 0, 1]), Qpn::new(qpn)));
        assert_eq!((one.1, other.1), (1, 2));
        for to in [one, other, one] {
            ways.expect(to);
        }
        let mut strangers = Vec::new();
        while let Some(to) = ways.strangers.pop() {
            strangers.push(to);
            ways.learn(to, None);
        }
        assert_eq!(strangers, [other, one]);
        assert!(ways.turn_to(one).is_some() && ways.turn_to(one).is_none() && ways.turn_to(other).is_some());
        ways.expect(one);
        ways.expect(other);
        assert!(!ways.has_strangers());
        assert!(ways.forget(other) && !ways.forget(other));
        ways.expect(other);
        assert!(ways.has_strangers() && ways.turn_to(other).is_some(), "whatever it was is not kept");
    }

    #[test]
    fn somebody_who_speaks_with_everybody_is_not_remembered_for_ever() {
        let mut ways = Ways::default();
        for number in 0..3 * u32::try_from(MOST).unwrap() {
            ways.learn((IpAddr::from(number.to_be_bytes()), 0), None);
            assert!(ways.known.len() <= MOST);
        }
    }
}
