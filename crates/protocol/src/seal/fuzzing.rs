//! Two ends that share a secret, and someone between them who sees, keeps, changes and invents
//! packets: for the fuzz target `sealed`, its corpus in the tests, and the test of hostile peers.

use std::collections::HashSet;
use std::net::IpAddr;

use super::{
    Dropped, HEADER_LEN, KeyRing, Kind, OVERHEAD, Opened, Seal, SealConfig, SealDecision, SealMode,
    SealedHeader,
};
use crate::timing::{MILLISECOND, Nanos};
use crate::wire::Qpn;

/// Slots of the ends.
const SLOTS: [u8; 2] = [2, 5];
const UNIX: u64 = 1_800_000_000;
/// Packets that the attacker keeps.
const KEPT: usize = 256;

fn addr(end: usize) -> IpAddr {
    IpAddr::from([10, 0, 0, [1, 2][end & 1]])
}

/// Two ends, a clock, and what was seen on the wire.
#[derive(Debug)]
pub struct Pair {
    /// The ends.
    pub ends: [Seal; 2],
    now: Nanos,
    /// Packets seen, with their receiver.
    kept: Vec<(usize, Vec<u8>)>,
    /// Numbers of the packets sent and not yet opened.
    expected: HashSet<u64>,
    sent: u64,
    /// Packets opened.
    pub opened: u64,
    room: Vec<u8>,
}

impl Pair {
    /// Ends that share a secret and have not met.
    ///
    /// # Panics
    /// Never: the secret is valid.
    pub fn new(modes: [SealMode; 2]) -> Self {
        let keys = KeyRing::parse(&"7a".repeat(32)).expect("64 digits");
        let ends = [0, 1].map(|end: usize| {
            let seed = [SLOTS[end]; 32];
            let config = SealConfig { keys: keys.clone(), mode: modes[end], local: addr(end), seed };
            let mut seal = Seal::new(&config).expect("it has a secret");
            seal.set_slot(SLOTS[end]);
            seal
        });
        let (kept, expected) = (Vec::new(), HashSet::new());
        Self { ends, now: 0, kept, expected, sent: 0, opened: 0, room: vec![0; 2048] }
    }

    /// Time passes.
    pub fn advance(&mut self, by: Nanos) {
        self.now += by;
        (0..2).for_each(|end| self.ends[end].handle_timeout(self.now));
        self.exchange();
    }

    /// Sends a packet from one end and delivers it; returns whether it was opened.
    ///
    /// # Panics
    /// A packet was opened twice, or one that was not sent.
    pub fn send(&mut self, from: usize, to: Qpn, len: usize) -> bool {
        let before = self.opened;
        let there = 1 - from;
        let mut route = self.ends[from].route(self.now, addr(there), to);
        if route == SealDecision::Wait {
            self.exchange();
            route = self.ends[from].route(self.now, addr(there), to);
        }
        let SealDecision::Ready(flow) = route else { return false };
        let mut packet = vec![0; len.max(8) + OVERHEAD];
        packet[HEADER_LEN..HEADER_LEN + 8].copy_from_slice(&self.sent.to_be_bytes());
        if !self.ends[from].seal(UNIX, flow, to, 0, &mut packet) {
            return false;
        }
        self.expected.insert(self.sent);
        self.sent += 1;
        self.take(there, &packet);
        self.keep(there, packet);
        self.opened > before
    }

    /// Sends to a queue pair of the other end.
    pub fn send_valid(&mut self, from: usize) -> bool {
        self.send(from, Qpn::new(u32::from(SLOTS[1 - from]) << 16 | 9), 64)
    }

    fn keep(&mut self, to: usize, packet: Vec<u8>) {
        if self.kept.len() < KEPT {
            self.kept.push((to, packet));
        } else {
            self.kept[usize::try_from(self.sent).unwrap_or(0) % KEPT] = (to, packet);
        }
    }

    /// Delivers the messages of both ends.
    fn exchange(&mut self) {
        for _ in 0..8 {
            for from in 0..2 {
                while let Some(message) = self.ends[from].poll_message() {
                    let to = usize::from(message.to != addr(0));
                    self.take(to, &message.packet);
                    self.keep(to, message.packet);
                }
                while self.ends[from].poll_outcome().is_some() {}
            }
        }
    }

    /// Gives an end any packet as if the other one had sent it.
    ///
    /// # Panics
    /// It was opened though it was not sent, or had been opened before.
    pub fn take(&mut self, end: usize, packet: &[u8]) -> Option<Dropped> {
        let Self { ends, room, expected, .. } = self;
        let from = (addr(1 - end), None);
        match ends[end].handle_packet((self.now, UNIX), from, packet, room) {
            Ok(Some(Opened { packet: inside, ip_id: _ })) => {
                let number = inside.first_chunk().map(|first| u64::from_be_bytes(*first));
                let is_expected = number.is_some_and(|number| expected.remove(&number));
                assert!(is_expected, "forged or opened twice: {packet:02x?}");
                self.opened += 1;
                None
            }
            Ok(None) => None,
            Err(reason) => Some(reason),
        }
    }

    /// The attacker replays a packet, changed by `change`.
    pub fn replay(&mut self, which: u64, change: impl FnOnce(&mut Vec<u8>)) -> Option<Dropped> {
        let count = u64::try_from(self.kept.len()).unwrap_or(0);
        let (to, mut packet) = self.kept.get(usize::try_from(which % count.max(1)).unwrap_or(0))?.clone();
        change(&mut packet);
        let dropped = self.take(to, &packet);
        // Answers are seen, too, and notices let no session fall that is in use.
        self.exchange();
        dropped
    }
}

/// Whatever someone between two ends does, no packet is opened that was not sent, none twice; the
/// ends keep no more than they may; and afterwards their packets pass.
///
/// # Panics
/// One of these is not so.
pub fn sealed(data: &[u8]) {
    let mode = |bit: u8| if bit == 0 { SealMode::Encrypt } else { SealMode::Authenticate };
    let mut rest = data.iter().copied();
    let first = rest.next().unwrap_or(0);
    let mut pair = Pair::new([mode(first & 1), mode(first >> 1 & 1)]);
    while let Some(op) = rest.next() {
        let mut byte = || rest.next().unwrap_or(0);
        let end = usize::from(op >> 7);
        match op % 8 {
            0 => {
                _ = pair.send(end, Qpn::new(u32::from(byte()) << 16 | u32::from(byte())), usize::from(byte()))
            }
            1 => _ = pair.send_valid(end),
            2 => pair.advance(u64::from(byte()) * MILLISECOND),
            3 => _ = pair.replay(byte().into(), |_| {}),
            4 => {
                let (which, at, bit) = (byte(), usize::from(byte()), byte());
                _ = pair.replay(which.into(), |packet| {
                    let at = at % packet.len().max(1);
                    packet.get_mut(at).into_iter().for_each(|changed| *changed ^= 1 << (bit % 8));
                });
            }
            5 => {
                let (which, len) = (byte(), usize::from(byte()));
                _ = pair.replay(which.into(), |packet| packet.truncate(len));
            }
            6 => {
                let len = usize::from(byte());
                let packet: Vec<u8> = (0..len).map(|_| byte()).collect();
                _ = pair.take(end, &packet);
            }
            _ => {
                // A header that parses, with chosen fields.
                let kinds =
                    [Kind::Session, Kind::Datagram, Kind::Hello, Kind::Reply, Kind::Stale, Kind::Acknowledge];
                let which = byte();
                let header = SealedHeader {
                    kind: kinds[usize::from(byte()) % kinds.len()],
                    encrypted: byte() & 1 == 0,
                    ip_id: byte(),
                    slot: SLOTS[1 - end],
                    key_id: byte(),
                    to: Qpn::new(u32::from(byte()) << 16),
                    flow: byte().into(),
                    counter: u64::from(byte()) << (byte() % 57),
                };
                _ = pair.replay(which.into(), |packet| {
                    packet.iter_mut().zip(header.emit()).for_each(|(to, from)| *to = from);
                });
            }
        }
        assert!(pair.ends.iter().all(|end| end.peer_keys() <= 2 * 4096));
    }
    pair.advance(1000 * MILLISECOND);
    // A session may have ended at one end only: the first packet finds out.
    for from in 0..2 {
        let passed = (0..3).any(|_| {
            let passed = pair.send_valid(from);
            pair.advance(10 * MILLISECOND);
            passed
        });
        assert!(passed, "packets of end {from} do not pass any more");
    }
}
