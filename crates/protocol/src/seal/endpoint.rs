//! One end of sealed traffic.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use super::SealMode;
use super::header::{HEADER_LEN, Kind, OVERHEAD, SealedHeader};
use super::keys::{Ends, Master};
use super::message::{self, Content, SealMessage};
use super::random::Random;
use super::receiver::{Dropped, Opened, Receiver};
use super::secret::KeyRing;
use super::sender::{Asking, FlowName, PeerName, SealDecision, SealFlow, SealSender, header_of};
use crate::cm::GSI_QPN;
use crate::timing::{MICROSECOND, MILLISECOND, Nanos};
use crate::wire::{Opcode, Qpn};

/// Messages that wait to be sent. Further ones are dropped: their senders repeat them.
const MAX_MESSAGES: usize = 256;
/// Notices of unknown sessions per interval to one address, and addresses that get any, so that
/// forged packets do not make us send more, and those of one sender do not silence us for others.
const MAX_NOTICES: u32 = 8;
const MAX_NOTIFIED: usize = 64;
const NOTICE_INTERVAL: Nanos = 10 * MILLISECOND;

/// What a [`Seal`] needs to begin.
pub struct SealConfig {
    /// The secrets.
    pub keys: KeyRing,
    /// How packets are sent.
    pub mode: SealMode,
    /// Our address.
    pub local: IpAddr,
    /// 32 bytes that no one can guess and that never come again.
    pub seed: [u8; 32],
}

impl fmt::Debug for SealConfig {
    /// Without the seed, which the nonces follow from.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { keys, mode, local, seed: _ } = self;
        f.debug_struct("SealConfig")
            .field("keys", keys)
            .field("mode", mode)
            .field("local", local)
            .finish_non_exhaustive()
    }
}

/// What became of a request for a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Packets to that address and slot can be sealed.
    Ready(IpAddr, u8),
    /// The peer did not answer.
    Unanswered(IpAddr, u8),
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SealCounters {
    /// Packets sealed.
    pub sealed: u64,
    /// Packets opened.
    pub opened: u64,
    /// Sessions that peers gave us.
    pub sessions: u64,
    /// Requests that no peer answered.
    pub unanswered: u64,
    dropped: [u64; Dropped::ALL.len()],
}

impl SealCounters {
    /// Packets dropped for that reason.
    pub fn dropped(&self, reason: Dropped) -> u64 {
        self.dropped.get(reason as usize).copied().unwrap_or(0)
    }
}

/// One end.
#[derive(Debug)]
pub struct Seal {
    keys: KeyRing,
    first: Arc<Master>,
    mode: SealMode,
    local: IpAddr,
    slot: u8,
    random: Random,
    sender: SealSender,
    receiver: Receiver,
    messages: VecDeque<SealMessage>,
    outcomes: VecDeque<Outcome>,
    next_timeout: Option<Nanos>,
    /// Microseconds since 1970 when the clock was at 0.
    epoch: u64,
    /// Notices by address in the interval that ends then.
    notices: HashMap<IpAddr, u32>,
    notices_end: Nanos,
    counters: SealCounters,
}

impl Seal {
    /// An end without sessions; `None` without a secret.
    pub fn new(config: &SealConfig) -> Option<Self> {
        Some(Self {
            first: config.keys.first()?.clone(),
            keys: config.keys.clone(),
            mode: config.mode,
            local: config.local,
            slot: 0,
            random: Random::new(&config.seed),
            sender: SealSender::default(),
            receiver: Receiver::default(),
            messages: VecDeque::new(),
            outcomes: VecDeque::new(),
            next_timeout: None,
            epoch: 0,
            notices: HashMap::new(),
            notices_end: 0,
            counters: SealCounters::default(),
        })
    }

    /// The slot that answers go to.
    pub fn set_slot(&mut self, slot: u8) {
        self.slot = slot;
    }

    /// Tells the time of day, in microseconds since 1970: receivers prefer the latest request for a
    /// session. Only the first call counts, so that the times of requests do not go back.
    pub fn set_time(&mut self, now: Nanos, unix: u64) {
        if self.epoch == 0 {
            self.epoch = unix.saturating_sub(now / MICROSECOND);
        }
    }

    /// The time of a request.
    fn time(&self, now: Nanos) -> (Nanos, u64) {
        (now, self.epoch.saturating_add(now / MICROSECOND))
    }

    /// Uses other secrets from now on. Sessions of secrets that are still there go on until their
    /// peers answer under the first one.
    pub fn set_keys(&mut self, keys: KeyRing) {
        let Some(first) = keys.first() else { return };
        self.first = first.clone();
        self.sender.keep(|master| keys.has(master));
        self.receiver.keep(|master| keys.has(master));
        self.keys = keys;
    }

    /// What to do with a packet to that queue pair.
    #[inline]
    pub fn route(&mut self, now: Nanos, addr: IpAddr, to: Qpn) -> SealDecision {
        if is_datagram(addr, to) {
            return SealDecision::Ready(SealFlow(FlowName::Datagram(Ends::new(self.local, addr))));
        }
        let [_, slot, ..] = to.get().to_be_bytes();
        let (route, asking) = self.sender.route(self.time(now), (addr, slot), &self.first, &mut self.random);
        if let Some(asking) = asking {
            self.ask(asking);
        }
        route
    }

    /// Seals a packet that stands in `packet` behind room for the header, before room for the tag.
    /// `ip_id` is the IPv4 identification that its ICRC covers; `unix` are seconds since 1970.
    #[inline]
    pub fn seal(&mut self, unix: u64, flow: SealFlow, to: Qpn, ip_id: u16, packet: &mut [u8]) -> bool {
        if packet.len() < OVERHEAD {
            return false;
        }
        let encrypted = self.mode == SealMode::Encrypt;
        let sealed = match flow.0 {
            FlowName::Session(place) => {
                let is_ack = packet.get(HEADER_LEN) == Some(&(Opcode::Ack as u8));
                let kind = if is_ack { Kind::Acknowledge } else { Kind::Session };
                let header = header_of(kind, encrypted, self.slot, ip_id, to);
                self.sender.seal_session(place, header, packet)
            }
            FlowName::Datagram(ends) => {
                let header = header_of(Kind::Datagram, encrypted, self.slot, ip_id, to);
                let by = (&self.first, &mut self.random);
                self.sender.seal_datagram(unix, ends, header, packet, by);
                true
            }
        };
        self.counters.sealed += u64::from(sealed);
        sealed
    }

    /// A management datagram that was opened here, sealed again for another device of our address,
    /// as if it came from its sender.
    pub fn forwarded(&mut self, unix: u64, from: IpAddr, ip_id: u16, datagram: &[u8]) -> Vec<u8> {
        let mut packet = vec![0; datagram.len() + OVERHEAD];
        packet[HEADER_LEN..HEADER_LEN + datagram.len()].copy_from_slice(datagram);
        let flow = SealFlow(FlowName::Datagram(Ends::new(from, self.local)));
        self.seal(unix, flow, Qpn::new(GSI_QPN), ip_id, &mut packet);
        packet
    }

    /// Takes a packet from that address, sent to us or to a group. Returns the packet inside, or
    /// nothing if it was a message between ends. `room` takes what is decrypted.
    ///
    /// # Errors
    /// The packet is dropped, and counted by that reason.
    #[inline]
    pub fn handle_packet<'a>(
        &mut self,
        (now, unix): (Nanos, u64),
        (from, group): (IpAddr, Option<IpAddr>),
        packet: &'a [u8],
        room: &'a mut [u8],
    ) -> Result<Option<Opened<'a>>, Dropped> {
        let handled = self.take((now, unix), (from, group), packet, room);
        match &handled {
            Ok(opened) => self.counters.opened += u64::from(opened.is_some()),
            Err(reason) => {
                if let Some(count) = self.counters.dropped.get_mut(*reason as usize) {
                    *count += 1;
                }
            }
        }
        handled
    }

    fn take<'a>(
        &mut self,
        (now, unix): (Nanos, u64),
        (from, group): (IpAddr, Option<IpAddr>),
        packet: &'a [u8],
        room: &'a mut [u8],
    ) -> Result<Option<Opened<'a>>, Dropped> {
        if !SealedHeader::is_sealed(packet) {
            return Err(Dropped::NotSealed);
        }
        let header =
            SealedHeader::parse(packet).filter(|_| packet.len() >= OVERHEAD).ok_or(Dropped::Malformed)?;
        if matches!(header.kind, Kind::Session | Kind::Acknowledge) && group.is_none() {
            let opened = self.receiver.open_session(now, from, &header, packet, room);
            if opened == Err(Dropped::UnknownSession) {
                self.tell_stale(now, from, &header);
            }
            return opened.map(Some);
        }
        let master = self.keys.find(header.key_id).ok_or(Dropped::UnknownKey)?.clone();
        if header.kind == Kind::Datagram {
            let to = group.unwrap_or(self.local);
            if !is_datagram(to, header.to) {
                return Err(Dropped::Malformed);
            }
            let ends = Ends::new(from, to);
            let opened = self.receiver.open_datagram((now, unix), ends, &header, (packet, room), &master);
            return opened.map(Some);
        }
        let [_, slot, ..] = header.to.get().to_be_bytes();
        if group.is_some() || slot != self.slot {
            return Err(Dropped::Malformed);
        }
        let content = message::parse(&master, &Ends::new(from, self.local), &header, packet);
        self.handle_message(now, (from, header.slot), content.ok_or(Dropped::Forged)?, &master)?;
        Ok(None)
    }

    fn handle_message(
        &mut self,
        now: Nanos,
        peer: PeerName,
        content: Content,
        master: &Arc<Master>,
    ) -> Result<(), Dropped> {
        let (here, there) = (Ends::new(peer.0, self.local), Ends::new(self.local, peer.0));
        match content {
            Content::Hello { ask, time } => {
                let by = (master, &mut self.random);
                let (answer, session) = self.receiver.handle_hello(now, peer, &here, (ask, time), by)?;
                self.say(master, peer, &Content::Reply { ask, answer, session });
            }
            Content::Reply { ask, answer, session } => {
                if !self.sender.handle_reply(peer, &there, (&ask, &answer), session) {
                    return Ok(()); // of a request that was answered before, or is long forgotten
                }
                self.counters.sessions += 1;
                self.next_timeout = self.sender.poll_timeout();
                self.outcomes.push_back(Outcome::Ready(peer.0, peer.1));
            }
            Content::Stale { session } => {
                let first = self.first.clone();
                let now = self.time(now);
                let asking = self.sender.handle_stale(now, peer, session, &first, &mut self.random);
                if let Some(asking) = asking {
                    self.ask(asking);
                }
            }
        }
        Ok(())
    }

    /// Tells a sender that we do not have its session.
    #[cold]
    fn tell_stale(&mut self, now: Nanos, from: IpAddr, header: &SealedHeader) {
        let Some(master) = self.keys.find(header.key_id).cloned() else { return };
        if now >= self.notices_end {
            self.notices.clear();
            self.notices_end = now + NOTICE_INTERVAL;
        }
        if self.notices.len() >= MAX_NOTIFIED && !self.notices.contains_key(&from) {
            return;
        }
        let said = self.notices.entry(from).or_default();
        *said += 1;
        if *said <= MAX_NOTICES {
            self.say(&master, (from, header.slot), &Content::Stale { session: header.flow });
        }
    }

    fn ask(&mut self, (master, peer, (ask, time)): Asking) {
        self.say(&master, peer, &Content::Hello { ask, time });
        self.next_timeout = self.sender.poll_timeout();
    }

    fn say(&mut self, master: &Arc<Master>, (to, slot): PeerName, content: &Content) {
        if self.messages.len() < MAX_MESSAGES {
            let packet = message::emit(master, &Ends::new(self.local, to), (self.slot, slot), content);
            self.messages.push_back(SealMessage { to, packet });
        }
    }

    /// The time has come that [`poll_timeout`](Self::poll_timeout) gave.
    pub fn handle_timeout(&mut self, now: Nanos) {
        if self.next_timeout.is_none_or(|at| now < at) {
            return;
        }
        let (again, silent) = self.sender.handle_timeout(now);
        again.into_iter().for_each(|asking| self.ask(asking));
        for (addr, slot) in silent {
            self.counters.unanswered += 1;
            self.outcomes.push_back(Outcome::Unanswered(addr, slot));
        }
        self.next_timeout = self.sender.poll_timeout();
    }

    /// When [`handle_timeout`](Self::handle_timeout) is due.
    pub fn poll_timeout(&self) -> Option<Nanos> {
        self.next_timeout
    }

    /// The next message to send.
    pub fn poll_message(&mut self) -> Option<SealMessage> {
        self.messages.pop_front()
    }

    /// What became of a request.
    pub fn poll_outcome(&mut self) -> Option<Outcome> {
        self.outcomes.pop_front()
    }

    /// Counts since the start.
    pub fn counters(&self) -> SealCounters {
        self.counters
    }

    /// Keys that peers made us keep.
    pub fn peer_keys(&self) -> usize {
        self.receiver.count()
    }
}

/// Whether any device of the address may take the packet: a session needs one.
#[inline]
fn is_datagram(addr: IpAddr, to: Qpn) -> bool {
    to.get() == GSI_QPN || addr.is_multicast()
}
