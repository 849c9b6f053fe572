//! Keys: all derived from the secret by HKDF-SHA256.

use std::fmt;
use std::net::IpAddr;

use ring::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::{hkdf, hmac};

use super::header::{HEADER_LEN, OVERHEAD, TAG_LEN};

/// Packets under one key: 2^28. QUIC permits as many of 2 KiB for AES-GCM (RFC 9001, appendix B).
pub(super) const ERA_BITS: u32 = 28;

/// What a secret gives.
pub(super) struct Master {
    /// Tells secrets apart.
    pub(super) id: u8,
    /// The same, with as many bits as the secret.
    fingerprint: [u8; 32],
    root: hkdf::Prk,
    /// Authenticates the messages that open a session.
    handshake: hmac::Key,
}

impl Master {
    pub(super) fn new(secret: &[u8; 32]) -> Option<Self> {
        let root = hkdf::Salt::new(hkdf::HKDF_SHA256, b"nobounce sealed packets 1").extract(secret);
        let [id, ..] = expand(&root, &[b"identifier"])?;
        let fingerprint = expand(&root, &[b"fingerprint"])?;
        let handshake = hmac::Key::new(hmac::HMAC_SHA256, &expand(&root, &[b"handshake"])?);
        Some(Self { id, fingerprint, root, handshake })
    }

    /// Whether both are of one secret. (Different secrets may have the same identifier.)
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.fingerprint == other.fingerprint
    }

    /// The keys of a flow: of a session by both nonces, of datagrams by the sender's salt.
    pub(super) fn flow_key(&self, of: FlowOf, ends: &Ends, nonces: &[&[u8]]) -> FlowKey {
        let both: Vec<u8> = nonces.concat();
        FlowKey::new(of, expand(&self.root, &[of.label(), &ends.0, &both]))
    }

    /// The tag of a message that opens a session.
    pub(super) fn sign(&self, ends: &Ends, message: &[u8]) -> [u8; TAG_LEN] {
        let tag = hmac::sign(&self.handshake, &[&ends.0, message].concat());
        std::array::from_fn(|i| tag.as_ref().get(i).copied().unwrap_or(0))
    }

    /// Whether the tag is right, in a time that does not depend on it.
    pub(super) fn verify(&self, ends: &Ends, message: &[u8], tag: &[u8; TAG_LEN]) -> bool {
        let right = self.sign(ends, message);
        right.iter().zip(tag).fold(0, |differences, (a, b)| differences | (a ^ b)) == 0
    }
}

impl fmt::Debug for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Master({:#04x})", self.id)
    }
}

/// What a flow consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlowOf {
    /// Packets of a session, counted from 0.
    Session,
    /// Datagrams: seconds and a count, which makes at most 2^28 before a new salt.
    Datagrams,
}

impl FlowOf {
    fn label(self) -> &'static [u8] {
        match self {
            Self::Session => b"session",
            Self::Datagrams => b"datagrams",
        }
    }

    fn era(self, counter: u64) -> u64 {
        match self {
            Self::Session => counter >> ERA_BITS,
            Self::Datagrams => 0,
        }
    }
}

/// The addresses of sender and receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ends([u8; 32]);

impl Ends {
    pub(super) fn new(from: IpAddr, to: IpAddr) -> Self {
        let octets = |addr: IpAddr| match addr {
            IpAddr::V4(addr) => addr.to_ipv6_mapped().octets(),
            IpAddr::V6(addr) => addr.octets(),
        };
        let (from, to) = (octets(from), octets(to));
        Self(std::array::from_fn(|i| if i < 16 { from[i] } else { to[i - 16] }))
    }
}

struct Bytes32;

impl hkdf::KeyType for Bytes32 {
    fn len(&self) -> usize {
        32
    }
}

/// 32 bytes are one block of the hash, so this does not fail. If it did, there would be no key.
fn expand(from: &hkdf::Prk, info: &[&[u8]]) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    from.expand(info, Bytes32).and_then(|okm| okm.fill(&mut bytes)).ok()?;
    Some(bytes)
}

/// The keys of one flow: one for each 2^28 packets. The counter is the nonce.
pub(super) struct FlowKey {
    of: FlowOf,
    root: Option<hkdf::Prk>,
    era: u64,
    key: Option<LessSafeKey>,
    /// Of the era before, for packets that are late.
    before: Option<LessSafeKey>,
}

impl FlowKey {
    fn new(of: FlowOf, root: Option<[u8; 32]>) -> Self {
        let root = root.map(|root| hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, &root));
        let key = key_of(root.as_ref(), 0);
        Self { of, root, era: 0, key, before: None }
    }

    /// Goes on to the era of that packet.
    fn turn_to(&mut self, era: u64, key: Option<LessSafeKey>) {
        let last = std::mem::replace(&mut self.key, key);
        self.before = if era == self.era + 1 { last } else { None };
        self.era = era;
    }

    /// Closes a packet that is written but for its tag: header, packet, room for the tag.
    #[inline]
    pub(super) fn seal(&mut self, counter: u64, encrypted: bool, packet: &mut [u8]) {
        let era = self.of.era(counter);
        if era != self.era {
            let key = key_of(self.root.as_ref(), era);
            self.turn_to(era, key);
        }
        let (Some(key), Some(end)) = (&self.key, packet.len().checked_sub(TAG_LEN)) else {
            // What is not sealed must not leave.
            return packet.fill(0);
        };
        let (packet, room) = packet.split_at_mut(end);
        let tag = if encrypted {
            let (header, body) = packet.split_at_mut(HEADER_LEN.min(end));
            key.seal_in_place_separate_tag(nonce(counter), Aad::from(header), body)
        } else {
            key.seal_in_place_separate_tag(nonce(counter), Aad::from(&*packet), &mut [])
        };
        match tag {
            Ok(tag) => room.copy_from_slice(tag.as_ref()),
            // A packet longer than 64 GiB. What is not sealed must not leave.
            Err(ring::error::Unspecified) => packet.fill(0),
        }
    }

    /// Opens a packet; what is encrypted is decrypted to `room`.
    #[inline]
    pub(super) fn open<'a>(
        &mut self,
        counter: u64,
        encrypted: bool,
        packet: &'a [u8],
        room: &'a mut [u8],
    ) -> Option<&'a [u8]> {
        let era = self.of.era(counter);
        if era == self.era {
            return open_by(self.key.as_ref()?, counter, encrypted, packet, room);
        }
        if era + 1 == self.era {
            return open_by(self.before.as_ref()?, counter, encrypted, packet, room);
        }
        if era != self.era + 1 {
            return None; // no genuine packet is so far ahead
        }
        let next = key_of(self.root.as_ref(), era)?;
        let opened = open_by(&next, counter, encrypted, packet, room)?;
        self.turn_to(era, Some(next));
        Some(opened)
    }
}

impl fmt::Debug for FlowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FlowKey(era {})", self.era)
    }
}

fn key_of(root: Option<&hkdf::Prk>, era: u64) -> Option<LessSafeKey> {
    let bytes = expand(root?, &[b"era", &era.to_be_bytes()])?;
    UnboundKey::new(&aead::AES_256_GCM, &bytes).ok().map(LessSafeKey::new)
}

fn nonce(counter: u64) -> Nonce {
    let counter = counter.to_be_bytes();
    Nonce::assume_unique_for_key(std::array::from_fn(|i| if i < 4 { 0 } else { counter[i - 4] }))
}

#[inline]
fn open_by<'a>(
    key: &LessSafeKey,
    counter: u64,
    encrypted: bool,
    packet: &'a [u8],
    room: &'a mut [u8],
) -> Option<&'a [u8]> {
    let end = packet.len().checked_sub(TAG_LEN).filter(|_| packet.len() >= OVERHEAD)?;
    let header = packet.get(..HEADER_LEN)?;
    if encrypted {
        let sealed = packet.get(HEADER_LEN..)?;
        let room = room.get_mut(..sealed.len())?;
        room.copy_from_slice(sealed);
        return key.open_in_place(nonce(counter), Aad::from(header), room).ok().map(|opened| &*opened);
    }
    let (read, tag) = packet.split_at(end);
    let mut tag: [u8; TAG_LEN] = tag.try_into().ok()?;
    key.open_in_place(nonce(counter), Aad::from(read), &mut tag).ok()?;
    read.get(HEADER_LEN..)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow_key() -> FlowKey {
        let ends = Ends::new([127, 0, 0, 1].into(), [127, 0, 0, 2].into());
        Master::new(&[7; 32]).unwrap().flow_key(FlowOf::Session, &ends, &[&[1; 16], &[2; 16]])
    }

    fn sealed(key: &mut FlowKey, counter: u64, encrypted: bool) -> Vec<u8> {
        let mut packet = vec![0x55; HEADER_LEN + 100 + TAG_LEN];
        key.seal(counter, encrypted, &mut packet);
        packet
    }

    #[test]
    fn keys_change_after_2_28_packets_and_late_ones_are_read() {
        let (mut from, mut to, mut room) = (flow_key(), flow_key(), [0; 200]);
        let turn = 1 << ERA_BITS;
        for encrypted in [true, false] {
            let late = sealed(&mut from, turn - 1, encrypted);
            let first = sealed(&mut from, turn, encrypted);
            assert!(to.open(turn, encrypted, &first, &mut room).is_some());
            assert!(to.open(turn - 1, encrypted, &late, &mut room).is_some());
            assert!(to.open(turn - 1, encrypted, &first, &mut room).is_none());
            assert_eq!((to.era, from.era), (1, 1));
            (from, to) = (flow_key(), flow_key());
        }
    }

    #[test]
    fn a_packet_without_a_key_is_erased() {
        let mut key = FlowKey::new(FlowOf::Session, None);
        assert_eq!(sealed(&mut key, 0, true), [0; HEADER_LEN + 100 + TAG_LEN]);
        assert!(key.open(0, true, &[0; 200], &mut [0; 200]).is_none());
    }

    #[test]
    fn a_forged_era_changes_nothing() {
        let (mut from, mut to, mut room) = (flow_key(), flow_key(), [0; 200]);
        let packet = sealed(&mut from, 5, true);
        for counter in [1 << ERA_BITS, 2 << ERA_BITS, u64::MAX - 1] {
            assert!(to.open(counter, true, &packet, &mut room).is_none());
        }
        assert!(to.open(5, true, &packet, &mut room).is_some());
    }

    /// Whatever differs in the derivation gives another key.
    #[test]
    fn each_input_of_the_derivation_counts() {
        let (a, b) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let there = Ends::new(a, b);
        let master = Master::new(&[7; 32]).unwrap();
        let mut keys = [
            master.flow_key(FlowOf::Session, &there, &[&[1; 16], &[2; 16]]),
            master.flow_key(FlowOf::Session, &Ends::new(b, a), &[&[1; 16], &[2; 16]]),
            master.flow_key(FlowOf::Session, &there, &[&[2; 16], &[1; 16]]),
            master.flow_key(FlowOf::Datagrams, &there, &[&[1; 16], &[2; 16]]),
            Master::new(&[8; 32]).unwrap().flow_key(FlowOf::Session, &there, &[&[1; 16], &[2; 16]]),
        ];
        let packets = std::array::from_fn::<_, 5, _>(|i| sealed(&mut keys[i], 0, true));
        for (i, key) in keys.iter_mut().enumerate() {
            for (j, packet) in packets.iter().enumerate() {
                assert_eq!(key.open(0, true, packet, &mut [0; 200]).is_some(), i == j, "{i} {j}");
            }
        }
    }
}
