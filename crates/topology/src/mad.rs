//! Management datagrams (MADs) that read both ends of an InfiniBand link: directed-route requests
//! of the subnet management class, and their answers.
//!
//! Requests only get attributes. An answer comes from a switch or an adapter of others: whatever it
//! holds ends in a fact or in an error.

use crate::facts::LinkEnd;

/// Bytes of a MAD.
pub const SIZE: usize = 256;

const VERSION: u8 = 1;
/// The class of directed routes.
const DIRECTED: u8 = 0x81;
const GET: u8 = 0x01;
const GET_RESPONSE: u8 = 0x81;
/// LIDs of a route that is directed from end to end.
const PERMISSIVE: [u8; 2] = [0xff, 0xff];
/// Where the attribute begins.
const DATA: usize = 64;
const INITIAL_PATH: usize = 128;
const SWITCH: u8 = 2;

/// The attribute that a request reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attribute {
    /// The kind of device, and the port that the request entered.
    NodeInfo,
    /// State of the port with this number.
    PortInfo(u8),
}

impl Attribute {
    const fn id(self) -> u16 {
        match self {
            Self::NodeInfo => 0x11,
            Self::PortInfo(_) => 0x15,
        }
    }
}

/// How far a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MadRoute {
    /// To the adapter itself.
    Own,
    /// To the other end of the link of this port.
    Peer(u8),
}

/// Why an answer tells nothing.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum MadError {
    /// It is too short, or no answer to the request.
    #[error("the answer belongs to another request")]
    Foreign,
    /// The device refused.
    #[error("the device answered with status {0:#06x}")]
    Status(u16),
}

/// The kind of device at an end, and the number of its port there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Whether it is a switch.
    pub switch: bool,
    /// The port that the request entered.
    pub port: u8,
}

/// A request. The kernel overwrites the upper half of the transaction.
#[must_use]
pub fn request(attribute: Attribute, route: MadRoute, transaction: u32) -> [u8; SIZE] {
    let mut mad = [0; SIZE];
    mad[..4].copy_from_slice(&[VERSION, DIRECTED, VERSION, GET]);
    mad[12..16].copy_from_slice(&transaction.to_be_bytes());
    mad[16..18].copy_from_slice(&attribute.id().to_be_bytes());
    if let Attribute::PortInfo(port) = attribute {
        mad[23] = port;
    }
    mad[32..34].copy_from_slice(&PERMISSIVE);
    mad[34..36].copy_from_slice(&PERMISSIVE);
    if let MadRoute::Peer(port) = route {
        // The hop count; the path begins at its second byte.
        mad[7] = 1;
        mad[INITIAL_PATH + 1] = port;
    }
    mad
}

/// The attribute in the answer to a request.
fn data(answer: &[u8], attribute: Attribute, transaction: u32) -> Result<&[u8], MadError> {
    let part = |range: std::ops::Range<usize>| answer.get(range).ok_or(MadError::Foreign);
    let fits = part(1..2)? == [DIRECTED]
        && part(3..4)? == [GET_RESPONSE]
        && part(12..16)? == transaction.to_be_bytes()
        && part(16..18)? == attribute.id().to_be_bytes();
    if !fits {
        return Err(MadError::Foreign);
    }
    // The highest bit is the direction.
    let status = part(4..6)?;
    let status = u16::from_be_bytes([status[0] & 0x7f, status[1]]);
    if status != 0 {
        return Err(MadError::Status(status));
    }
    part(DATA..DATA + 64)
}

/// The device at the end of the route.
///
/// # Errors
/// The answer is to another request, or reports an error.
pub fn node(answer: &[u8], transaction: u32) -> Result<Node, MadError> {
    let data = data(answer, Attribute::NodeInfo, transaction)?;
    Ok(Node { switch: data[2] == SWITCH, port: data[36] })
}

/// Widths of a node's port.
///
/// # Errors
/// The answer is to another request, or reports an error.
pub fn link_end(answer: &[u8], node: Node, transaction: u32) -> Result<LinkEnd, MadError> {
    let data = data(answer, Attribute::PortInfo(node.port), transaction)?;
    Ok(LinkEnd {
        port: node.port.into(),
        switch: node.switch,
        enabled: LinkEnd::lanes(data[29]),
        supported: LinkEnd::lanes(data[30]),
        active: LinkEnd::lanes(data[31]).first().copied(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(to: [u8; SIZE], fill: impl Fn(&mut [u8])) -> [u8; SIZE] {
        let mut answer = to;
        answer[3] = GET_RESPONSE;
        answer[4] = 0x80;
        // The kernel's half.
        answer[8..12].copy_from_slice(&[0, 0, 0, 9]);
        fill(&mut answer[DATA..DATA + 64]);
        answer
    }

    #[test]
    fn requests_are_directed_and_only_read() {
        let own = request(Attribute::PortInfo(2), MadRoute::Own, 7);
        assert_eq!(own[..8], [1, 0x81, 1, 1, 0, 0, 0, 0]);
        assert_eq!((&own[12..18], &own[20..24]), (&[0, 0, 0, 7, 0, 0x15][..], &[0, 0, 0, 2][..]));
        assert_eq!(own[32..36], [0xff; 4]);
        let peer = request(Attribute::NodeInfo, MadRoute::Peer(1), 8);
        assert_eq!((peer[6], peer[7], peer[17]), (0, 1, 0x11));
        assert_eq!(peer[128..131], [0, 1, 0]);
    }

    #[test]
    fn both_ends_are_read_from_answers() {
        let node = node(
            &answer(request(Attribute::NodeInfo, MadRoute::Peer(1), 3), |data| {
                data[2] = SWITCH;
                data[36] = 17;
            }),
            3,
        )
        .unwrap();
        assert_eq!(node, Node { switch: true, port: 17 });
        let answer = answer(request(Attribute::PortInfo(17), MadRoute::Peer(1), 4), |data| {
            data[29..32].copy_from_slice(&[0b1_0001, 0b1_0011, 16]);
        });
        let end = link_end(&answer, node, 4).unwrap();
        let wanted = LinkEnd {
            port: 17,
            switch: true,
            supported: vec![1, 2, 4],
            enabled: vec![1, 2],
            active: Some(2),
        };
        assert_eq!(end, wanted);
    }

    #[test]
    fn other_answers_are_errors() {
        let asked = request(Attribute::NodeInfo, MadRoute::Own, 5);
        let good = answer(asked, |_| {});
        assert_eq!(node(&good, 6), Err(MadError::Foreign));
        assert_eq!(node(&asked, 5), Err(MadError::Foreign));
        let mut refused = good;
        refused[5] = 0x0c;
        assert_eq!(node(&refused, 5), Err(MadError::Status(0x0c)));
        for length in 0..DATA + 64 {
            assert!(node(&good[..length], 5).is_err(), "{length}");
        }
        assert!(node(&good[..DATA + 64], 5).is_ok());
    }
}
