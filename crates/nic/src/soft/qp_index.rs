//! The index in a queue pair number, below the slot of the device.

use nobounce_protocol::wire::Qpn;

/// The index of a queue pair in its engine's table: the lower 16 bits of its number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QpIndex(u16);

impl QpIndex {
    pub(crate) const fn new(index: u16) -> Self {
        Self(index)
    }

    /// The index in a number.
    #[inline]
    pub(crate) const fn of(qpn: Qpn) -> Self {
        let [.., high, low] = qpn.get().to_be_bytes();
        Self(u16::from_be_bytes([high, low]))
    }

    #[inline]
    pub(crate) const fn get(self) -> u16 {
        self.0
    }

    /// The number that it makes with the slot of the device.
    pub(crate) const fn qpn(self, slot: u8) -> Qpn {
        let [high, low] = self.0.to_be_bytes();
        Qpn::new(u32::from_be_bytes([0, slot, high, low]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::links::slot_of;

    #[test]
    fn a_number_is_a_slot_and_an_index() {
        let qpn = Qpn::new(0x12_3456);
        assert_eq!((slot_of(qpn), QpIndex::of(qpn)), (0x12, QpIndex::new(0x3456)));
        assert_eq!(QpIndex::of(qpn).qpn(slot_of(qpn)), qpn);
    }
}
