//! Congestion notification packets (CNP) of RoCEv2: the receiver of marked packets asks their
//! sender to slow down.
//!
//! A CNP is a BTH with its own opcode and the BECN bit, 16 reserved bytes and the ICRC.

use super::{BTH_LEN, DEFAULT_PKEY, ICRC_LEN, Qpn};

const OPCODE: u8 = 0x81;
/// The backward congestion bit, in the byte before the destination.
const BECN: u8 = 0x40;
const RESERVED: usize = 16;

/// A congestion notification packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CongestionNotification {
    /// The queue pair that is to slow down.
    pub to: Qpn,
}

impl CongestionNotification {
    /// Bytes of the packet.
    pub const LEN: usize = BTH_LEN + RESERVED + ICRC_LEN;

    /// Writes all but the ICRC.
    pub fn emit(&self, packet: &mut [u8]) {
        let Some((body, _)) = packet.split_first_chunk_mut::<{ Self::LEN - ICRC_LEN }>() else { return };
        body.fill(0);
        body[0] = OPCODE;
        body[2..4].copy_from_slice(&DEFAULT_PKEY.to_be_bytes());
        body[4..8].copy_from_slice(&self.to.get().to_be_bytes());
        body[4] = BECN;
    }

    /// Reads a packet; any bytes may come, and the ICRC is not looked at.
    pub fn parse(packet: &[u8]) -> Option<Self> {
        let bth = packet.first_chunk::<BTH_LEN>()?;
        let is_one = bth[0] == OPCODE && bth[4] & BECN != 0 && packet.len() == Self::LEN;
        is_one.then(|| Self { to: Qpn::new(u32::from_be_bytes([0, bth[5], bth[6], bth[7]])) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Header, Malformed, SelectiveAck};
    use super::*;

    #[test]
    fn it_is_read_as_it_was_written_and_is_nothing_else() {
        let notification = CongestionNotification { to: Qpn::new(0x12_3456) };
        let mut packet = [0xee; CongestionNotification::LEN];
        notification.emit(&mut packet);
        assert_eq!(packet[..12], [0x81, 0, 0xff, 0xff, 0x40, 0x12, 0x34, 0x56, 0, 0, 0, 0]);
        assert_eq!(packet[12..28], [0; 16]);
        assert_eq!(CongestionNotification::parse(&packet), Some(notification));
        assert_eq!(Header::parse(&packet).map(|p| p.header), Err(Malformed::UnknownOpcode));
        assert_eq!(SelectiveAck::parse(&packet), None);
        for len in 0..packet.len() {
            assert_eq!(CongestionNotification::parse(&packet[..len]), None);
        }
        packet[4] = 0;
        assert_eq!(CongestionNotification::parse(&packet), None, "without the BECN bit");
    }
}
