//! Packets to send: their headers, and where their payload comes from.

use crate::wire::Header;

/// Where the payload of a packet comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// There is none.
    None,
    /// The local list of send request `serial`.
    /// `rest` bytes of the message follow it.
    #[allow(missing_docs)]
    Request { serial: u64, offset: u64, len: u32, rest: u32 },
    /// A region the peer reads. `rest` bytes of the answer follow it; `again`: it was answered
    /// before.
    #[allow(missing_docs)]
    Region { rkey: u32, addr: u64, len: u32, rest: u32, again: bool },
}

impl Payload {
    /// Bytes of payload.
    pub const fn len(&self) -> u32 {
        match *self {
            Self::None => 0,
            Self::Request { len, .. } | Self::Region { len, .. } => len,
        }
    }

    /// Whether there is none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the message after it.
    pub const fn rest(&self) -> u32 {
        match *self {
            Self::None => 0,
            Self::Request { rest, .. } | Self::Region { rest, .. } => rest,
        }
    }

    /// Moves on to the next piece of the same length.
    fn advance(&mut self) {
        match self {
            Self::None => {}
            Self::Request { offset, len, rest, .. } => {
                *offset += u64::from(*len);
                *rest = rest.saturating_sub(*len);
            }
            Self::Region { addr, len, rest, .. } => {
                *addr = addr.wrapping_add(u64::from(*len));
                *rest = rest.saturating_sub(*len);
            }
        }
    }
}

/// A packet to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Its headers, complete.
    pub header: Header,
    /// Where its payload comes from.
    pub payload: Payload,
}

impl Transmit {
    /// Moves on to the next packet of the same message, like this one but for its sequence number
    /// and its piece of the payload.
    pub fn advance(&mut self) {
        self.header.psn = self.header.psn.next();
        self.payload.advance();
    }
}
