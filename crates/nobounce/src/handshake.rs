//! The handshake: what the two ends exchange before there is a connection.
//!
//! ```text
//! connecting side                     listening side
//! preamble, Hello(queue pairs)   ->
//!                                <-   preamble, HandshakeReply::{Accepted(Hello), Refused(why)}
//! Ready (an empty frame, or an
//! MTU that the path carries)     ->
//!                                <-   if there is an MTU: an empty frame
//! ```
//! The preamble is 8 bytes of magic and a 4-byte version, little-endian. Frames are postcard with a
//! 4-byte length prefix. The listening side answers a wrong version with its own preamble, so that
//! both ends can report the mismatch.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::IpAddr;
use std::time::Instant;

use nobounce_nic::any::{self, Qp};
use nobounce_nic::work::{Mtu, Psn, QpAttr, Qpn};
use serde::{Deserialize, Serialize};

use crate::control::{ControlChannel, ControlError};

/// The version of this handshake and of the frames after it.
pub const HANDSHAKE_VERSION: u32 = 3;
/// Most queue pairs of one connection.
pub const MAX_QPS: usize = 4096;

/// READs and atomics that a queue pair has outstanding, in each direction.
const MAX_RD_ATOMIC: u8 = 16;
const MAGIC: [u8; 8] = *b"nobounce";
/// The longest handshake frame: bounds the memory for an unauthenticated client. 4096 queue pairs
/// need half of it.
const MAX_HELLO: usize = 64 << 10;
/// The longest reason in a refusal.
const MAX_REASON: usize = 1024;

/// Why the handshake failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The other end speaks another protocol.
    #[error("the peer does not speak the nobounce protocol: it sent {began:?}; check the port")]
    NotNobounce {
        /// Its first bytes.
        began: String,
    },
    /// The other end has another version.
    #[error("handshake version mismatch: the peer uses {theirs}, this end {ours}; update the older one")]
    Version {
        /// Our version.
        ours: u32,
        /// The version of the other end.
        theirs: u32,
    },
    /// The other end timed out.
    #[error("handshake timed out while {step}")]
    Timeout {
        /// The pending step.
        step: &'static str,
    },
    /// The other end closed the connection.
    #[error("the peer closed the connection while {step}")]
    Closed {
        /// The pending step.
        step: &'static str,
    },
    /// The other end sent an invalid handshake.
    #[error("malformed handshake from the peer: {what}")]
    Malformed {
        /// What is invalid.
        what: &'static str,
    },
    /// The other end refused.
    #[error("the peer refused: {reason}")]
    Refused {
        /// Its reason.
        reason: String,
    },
    /// One device uses IPv4 and the other IPv6.
    #[error(
        "the local device is at {ours}, the peer's at {theirs}: open both on IPv4 or both on IPv6 (NOBOUNCE_ADDR)"
    )]
    Family {
        /// The address of our device.
        ours: IpAddr,
        /// The address of the other end's device.
        theirs: IpAddr,
    },
    /// One device is on InfiniBand and the other on Ethernet.
    #[error("the local device is on {ours}, the peer's on {theirs}: the two networks are not connected")]
    LinkLayer {
        /// The link layer of our device.
        ours: &'static str,
        /// The link layer of the other end's.
        theirs: &'static str,
    },
    /// A device on loopback cannot be reached from another machine.
    #[error(
        "the peer is on another machine, but the local device is at {ours} and the peer's at {theirs}: loopback is not reachable \
         from outside; set NOBOUNCE_ADDR to an address or interface on both machines"
    )]
    Loopback {
        /// The address of our device.
        ours: IpAddr,
        /// The address of the other end's device.
        theirs: IpAddr,
    },
    /// The path carries not even the shortest packets with a payload.
    #[error(
        "packets of {bytes} bytes of payload do not reach {peer}: {sent} sent, none answered, while {answered} short ones were; \
         a router or tunnel between drops them without an ICMP message: raise its MTU"
    )]
    PathMtu {
        /// The address of the other end's device.
        peer: IpAddr,
        /// The payload of the shortest packets that were tried.
        bytes: u32,
        /// Packets of these lengths that were sent.
        sent: u32,
        /// Short packets that were answered.
        answered: u32,
    },
    /// Our device could not create the queue pairs.
    #[error("cannot create the queue pairs: {0}")]
    QueuePair(String),
    /// The side channel failed.
    #[error("the TCP side channel failed while {step}: {source}")]
    Io {
        /// The current step.
        step: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl HandshakeError {
    fn at(step: &'static str, error: ControlError) -> Self {
        match error {
            ControlError::Closed => Self::Closed { step },
            ControlError::Timeout => Self::Timeout { step },
            ControlError::TooLong { .. } => Self::Malformed { what: "message too long" },
            ControlError::Io(source) => Self::Io { step, source },
        }
    }
}

/// One end's half of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpHalf {
    /// Its number.
    pub qpn: u32,
    /// The first sequence number that it sends.
    pub psn: u32,
}

impl QpHalf {
    /// Of a queue pair, with a random sequence number: a packet of an earlier connection or a
    /// forged one does not match. The standard library's hash keys come from the kernel.
    pub fn of(qp: &Qp) -> Self {
        Self { qpn: qp.qpn().get(), psn: Psn::of(RandomState::new().hash_one(0_u8)).get() }
    }
}

/// The offer of one end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The address of the device.
    pub addr: IpAddr,
    /// Its local identifier on an InfiniBand subnet; 0 on Ethernet.
    pub lid: u16,
    /// The largest path MTU, in bytes.
    pub mtu: u32,
    /// READs and atomics that it answers concurrently, per queue pair.
    pub max_rd_atomic: u8,
    /// Its queue pairs.
    pub qps: Vec<QpHalf>,
}

impl Hello {
    /// What a device offers for these queue pairs.
    pub fn of(device: &any::Device, mtu: Option<Mtu>, qps: Vec<QpHalf>) -> Self {
        let most = device.max_mtu();
        Self {
            addr: device.local(),
            lid: device.lid(),
            mtu: mtu.map_or(most, |mtu| mtu.min(most)).bytes(),
            max_rd_atomic: MAX_RD_ATOMIC.min(device.max_rd_atomic()),
            qps,
        }
    }

    /// Rules for every offer. An invalid one is refused before any resource is allocated for it.
    ///
    /// # Errors
    /// It is malformed.
    pub fn check(&self) -> Result<(), HandshakeError> {
        let malformed = |what| Err(HandshakeError::Malformed { what });
        if self.qps.is_empty() || self.qps.len() > MAX_QPS {
            return malformed("number of queue pairs not in 1..=4096");
        }
        if Mtu::from_bytes(self.mtu).is_none() {
            return malformed("MTU not one of 256, 512, 1024, 2048, 4096");
        }
        if self.max_rd_atomic == 0 || self.max_rd_atomic > QpAttr::MAX_RD_ATOMIC {
            return malformed("number of outstanding READs and atomics not in 1..=128");
        }
        // 0 and 1 are the management queue pairs.
        if self
            .qps
            .iter()
            .any(|half| half.qpn < 2 || half.qpn > Qpn::MAX || half.psn != Psn::new(half.psn).get())
        {
            return malformed("queue pair or sequence number with more than 24 bits, or reserved");
        }
        let broadcast = matches!(self.addr, IpAddr::V4(v4) if v4.is_broadcast());
        if self.addr.is_unspecified() || self.addr.is_multicast() || broadcast {
            return malformed("device without a unicast address");
        }
        Ok(())
    }

    /// Whether the two devices can reach each other, judging by their addresses.
    pub(crate) fn check_reachable(
        &self,
        device: &any::Device,
        control: &ControlChannel,
    ) -> Result<(), HandshakeError> {
        let (ours, theirs) = (device.local(), self.addr);
        if (device.lid() == 0) != (self.lid == 0) {
            return Err(HandshakeError::LinkLayer { ours: link(device.lid()), theirs: link(self.lid) });
        }
        if self.lid != 0 {
            return Ok(());
        }
        if ours.is_ipv4() != theirs.is_ipv4() {
            return Err(HandshakeError::Family { ours, theirs });
        }
        let stream = control.stream();
        let (Ok(here), Ok(there)) = (stream.local_addr(), stream.peer_addr()) else { return Ok(()) };
        let one_machine = there.ip().to_canonical().is_loopback() || here.ip() == there.ip();
        if !one_machine && (ours.is_loopback() || theirs.is_loopback()) {
            return Err(HandshakeError::Loopback { ours, theirs });
        }
        Ok(())
    }
}

fn link(lid: u16) -> &'static str {
    if lid == 0 { "Ethernet (RoCE)" } else { "InfiniBand" }
}

#[derive(Debug, Serialize, Deserialize)]
enum HandshakeReply {
    Accepted(Hello),
    Refused(String),
}

const SAY_HELLO: &str = "sending the hello";
const WAIT_PREAMBLE: &str = "waiting for the first bytes";
const WAIT_HELLO: &str = "waiting for the hello";
const SAY_ANSWER: &str = "sending the answer";
const WAIT_ANSWER: &str = "waiting for the answer";
const WAIT_READY: &str = "waiting for the confirmation";
const WAIT_LOWERED: &str = "waiting for the smaller MTU";
const SAY_READY: &str = "sending the confirmation";

/// Connecting side, first step.
pub(crate) fn send_hello(
    control: &ControlChannel,
    hello: &Hello,
    deadline: Instant,
) -> Result<(), HandshakeError> {
    let at = |error| HandshakeError::at(SAY_HELLO, error);
    control.write_raw(&preamble(), deadline).map_err(at)?;
    control.send(&[], &encode(hello)?, deadline).map_err(at)
}

/// Listening side, first step.
pub(crate) fn receive_hello(control: &ControlChannel, deadline: Instant) -> Result<Hello, HandshakeError> {
    let checked = receive_preamble(control, deadline);
    if matches!(checked, Ok(()) | Err(HandshakeError::Version { .. })) {
        control.write_raw(&preamble(), deadline).map_err(|error| HandshakeError::at(SAY_ANSWER, error))?;
    }
    checked?;
    let frame =
        control.receive(MAX_HELLO, deadline).map_err(|error| HandshakeError::at(WAIT_HELLO, error))?;
    let hello: Hello = decode(&frame)?;
    hello.check()?;
    Ok(hello)
}

/// Listening side, second step: returns when the other end has confirmed; with a smaller MTU, if
/// the path does not carry the agreed one.
pub(crate) fn accept(
    control: &ControlChannel,
    hello: Hello,
    deadline: Instant,
) -> Result<Option<Mtu>, HandshakeError> {
    let agreed = hello.mtu;
    let answer = encode(&HandshakeReply::Accepted(hello))?;
    control.send(&[], &answer, deadline).map_err(|error| HandshakeError::at(SAY_ANSWER, error))?;
    let ready =
        control.receive(MAX_HELLO, deadline).map_err(|error| HandshakeError::at(WAIT_READY, error))?;
    if ready.is_empty() {
        return Ok(None);
    }
    let lower = ready.as_slice().try_into().ok().and_then(|bytes| Mtu::from_bytes(u32::from_le_bytes(bytes)));
    match lower {
        Some(mtu) if mtu.bytes() < agreed => Ok(Some(mtu)),
        _ => Err(HandshakeError::Malformed { what: "confirmation without a smaller MTU" }),
    }
}

/// Listening side, last step after a smaller MTU: its queue pairs have it.
pub(crate) fn send_lowered(control: &ControlChannel, deadline: Instant) -> Result<(), HandshakeError> {
    control.send(&[], &[], deadline).map_err(|error| HandshakeError::at(SAY_ANSWER, error))
}

/// Listening side, instead: sends the reason for a refusal. The other end may be gone already, so
/// errors are ignored.
pub(crate) fn refuse(control: &ControlChannel, why: &HandshakeError, deadline: Instant) {
    let reason = why.to_string().chars().take(MAX_REASON / 4).collect();
    if let Ok(answer) = encode(&HandshakeReply::Refused(reason)) {
        let _ = control.send(&[], &answer, deadline);
    }
}

/// Connecting side, second step.
pub(crate) fn receive_answer(control: &ControlChannel, deadline: Instant) -> Result<Hello, HandshakeError> {
    receive_preamble(control, deadline)?;
    let frame =
        control.receive(MAX_HELLO, deadline).map_err(|error| HandshakeError::at(WAIT_ANSWER, error))?;
    match decode(&frame)? {
        HandshakeReply::Accepted(hello) => {
            hello.check()?;
            Ok(hello)
        }
        // For people to read: drop control characters that the other end could send to the
        // terminal.
        HandshakeReply::Refused(reason) => Err(HandshakeError::Refused {
            reason: reason.chars().filter(|c| !c.is_control()).take(MAX_REASON).collect(),
        }),
    }
}

/// Connecting side, last step.
pub(crate) fn send_ready(control: &ControlChannel, deadline: Instant) -> Result<(), HandshakeError> {
    control.send(&[], &[], deadline).map_err(|error| HandshakeError::at(SAY_READY, error))
}

/// Connecting side, last step if the path does not carry the agreed MTU: returns when the other
/// end's queue pairs have the smaller one.
pub(crate) fn send_smaller_mtu(
    control: &ControlChannel,
    mtu: Mtu,
    deadline: Instant,
) -> Result<(), HandshakeError> {
    let sent = control.send(&[], &mtu.bytes().to_le_bytes(), deadline);
    sent.map_err(|error| HandshakeError::at(SAY_READY, error))?;
    let answer =
        control.receive(MAX_HELLO, deadline).map_err(|error| HandshakeError::at(WAIT_LOWERED, error))?;
    let lowered = answer.is_empty();
    if lowered { Ok(()) } else { Err(HandshakeError::Malformed { what: "answer to an MTU not empty" }) }
}

fn preamble() -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..].copy_from_slice(&HANDSHAKE_VERSION.to_le_bytes());
    bytes
}

fn receive_preamble(control: &ControlChannel, deadline: Instant) -> Result<(), HandshakeError> {
    let at = |error| HandshakeError::at(WAIT_PREAMBLE, error);
    // In two steps: another protocol may send fewer than 12 bytes and then wait for us.
    let (mut magic, mut version) = ([0; 8], [0; 4]);
    control.read_raw(&mut magic, deadline).map_err(at)?;
    if magic != MAGIC {
        return Err(HandshakeError::NotNobounce { began: magic.escape_ascii().to_string() });
    }
    control.read_raw(&mut version, deadline).map_err(at)?;
    match u32::from_le_bytes(version) {
        HANDSHAKE_VERSION => Ok(()),
        theirs => Err(HandshakeError::Version { ours: HANDSHAKE_VERSION, theirs }),
    }
}

/// Reads a frame as an offer and as an answer, for the fuzz target.
pub(crate) fn fuzz_frame(frame: &[u8]) {
    let offer = decode::<Hello>(frame).ok();
    let answer = match decode(frame) {
        Ok(HandshakeReply::Accepted(hello)) => Some(hello),
        Ok(HandshakeReply::Refused(reason)) => {
            assert!(reason.len() <= frame.len());
            None
        }
        Err(_) => None,
    };
    for hello in offer.into_iter().chain(answer).filter(|hello| hello.check().is_ok()) {
        assert!((1..=MAX_QPS).contains(&hello.qps.len()) && !hello.addr.is_unspecified());
        let again = encode(&hello).and_then(|bytes| decode::<Hello>(&bytes).map(|again| again == hello));
        assert!(matches!(again, Ok(true)), "{hello:?}");
    }
}

/// One frame of each kind, for the corpus of the fuzz target.
#[cfg(test)]
pub(crate) fn fuzz_examples() -> Vec<(&'static str, Vec<u8>)> {
    let qps = (2..10).map(|qpn| QpHalf { qpn, psn: qpn * 7 }).collect();
    let hello = Hello { addr: [10, 0, 0, 1].into(), lid: 0, mtu: 4096, max_rd_atomic: 16, qps };
    let region = crate::region::RemoteRegion { addr: 1 << 40, len: 4096, rkey: 77, closed: false };
    vec![
        ("hello", encode(&hello).unwrap()),
        ("accepted", encode(&HandshakeReply::Accepted(hello)).unwrap()),
        ("refused", encode(&HandshakeReply::Refused("no\x1b[2J".to_owned())).unwrap()),
        ("region", encode(&region).unwrap()),
        ("empty", Vec::new()),
    ]
}

fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, HandshakeError> {
    postcard::to_stdvec(value).map_err(|_| HandshakeError::Malformed { what: "cannot encode the hello" })
}

fn decode<'a, T: Deserialize<'a>>(frame: &'a [u8]) -> Result<T, HandshakeError> {
    postcard::from_bytes(frame).map_err(|_| HandshakeError::Malformed { what: "message cannot be decoded" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        let addr = "127.0.0.1".parse().unwrap();
        Hello {
            addr,
            lid: 0,
            mtu: 4096,
            max_rd_atomic: 16,
            qps: vec![QpHalf { qpn: 0x01_0002, psn: 0xff_ffff }],
        }
    }

    #[test]
    fn a_hello_is_checked() {
        assert!(hello().check().is_ok());
        let half = hello().qps[0];
        let wrong = [
            Hello { qps: Vec::new(), ..hello() },
            Hello { qps: vec![half; MAX_QPS + 1], ..hello() },
            Hello { qps: vec![QpHalf { qpn: 1 << 24, ..half }], ..hello() },
            Hello { qps: vec![QpHalf { qpn: 1, ..half }], ..hello() },
            Hello { qps: vec![QpHalf { psn: 1 << 24, ..half }], ..hello() },
            Hello { mtu: 1500, ..hello() },
            Hello { max_rd_atomic: 0, ..hello() },
            Hello { max_rd_atomic: 129, ..hello() },
            Hello { addr: "0.0.0.0".parse().unwrap(), ..hello() },
            Hello { addr: "ff02::1".parse().unwrap(), ..hello() },
            Hello { addr: "255.255.255.255".parse().unwrap(), ..hello() },
        ];
        for hello in wrong {
            assert!(matches!(hello.check(), Err(HandshakeError::Malformed { .. })), "{hello:?}");
        }
    }

    #[test]
    fn the_largest_hello_fits_a_frame() {
        let half = QpHalf { qpn: Qpn::MAX, psn: 0xff_ffff };
        let hello = Hello { addr: "ff::1".parse().unwrap(), qps: vec![half; MAX_QPS], ..hello() };
        let bytes = encode(&HandshakeReply::Accepted(hello)).unwrap();
        assert!(bytes.len() <= MAX_HELLO, "{}", bytes.len());
    }

    #[test]
    fn arbitrary_bytes_do_not_panic() {
        let good = encode(&hello()).unwrap();
        for at in 0..good.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bytes = good.clone();
                bytes[at] = value;
                let _ = decode::<Hello>(&bytes).map(|hello| hello.check());
                let _ = decode::<HandshakeReply>(&bytes);
            }
            assert!(decode::<Hello>(&good[..at]).is_err());
        }
    }
}
