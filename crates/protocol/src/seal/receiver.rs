//! The receiving half: sessions that we gave to senders, and flows of datagrams.

use std::collections::HashMap;
use std::sync::Arc;

use super::header::SealedHeader;
use super::keys::{Ends, FlowKey, FlowOf, Master};
use super::message::SessionNonce;
use super::random::Random;
use super::sender::PeerName;
use super::window::ReplayWindow;
use crate::timing::{Nanos, SECOND};

/// Sessions at a time; about 2 KiB each.
const MAX_SESSIONS: usize = 4096;
/// Sessions of one peer without a packet yet: recorded requests take no more.
const MAX_UNUSED: usize = 4;
/// A session that was silent for so long may make room.
const IDLE: Nanos = 60 * SECOND;
/// Flows of datagrams at a time.
const MAX_DATAGRAM_FLOWS: usize = 4096;
/// Seconds by which the clocks of two devices may differ, and for which a recorded datagram is
/// good.
const CLOCK_TOLERANCE: u64 = 300;

/// A packet that was sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened<'a> {
    /// The RoCE packet.
    pub packet: &'a [u8],
    /// The IPv4 identification that its ICRC covers.
    pub ip_id: u16,
}

/// Why a packet was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dropped {
    /// It is not sealed.
    NotSealed,
    /// Too short, of another version, or for another device.
    Malformed,
    /// Its secret is none of ours.
    UnknownKey,
    /// Its session is unknown; a stale message answers it.
    UnknownSession,
    /// Its tag is wrong: damaged, forged, or for another address.
    Forged,
    /// It came before, or is too old to tell.
    Replayed,
    /// A datagram from another time: it was recorded, or the clocks differ.
    OtherTime,
    /// A request for a session that finds no room.
    NoRoom,
}

impl Dropped {
    /// All reasons.
    pub const ALL: [Self; 8] = [
        Self::NotSealed,
        Self::Malformed,
        Self::UnknownKey,
        Self::UnknownSession,
        Self::Forged,
        Self::Replayed,
        Self::OtherTime,
        Self::NoRoom,
    ];
}

#[derive(Debug)]
struct RxSession {
    number: u64,
    from: PeerName,
    ask: SessionNonce,
    /// When the sender asked for it, by its clock, in microseconds.
    asked_at: u64,
    answer: SessionNonce,
    master: Arc<Master>,
    key: FlowKey,
    window: ReplayWindow,
    /// Whether a packet came: the request was not a recorded one.
    in_use: bool,
    used: Nanos,
}

#[derive(Debug)]
struct RxDatagrams {
    master: Arc<Master>,
    key: FlowKey,
    window: ReplayWindow,
    used: Nanos,
}

#[derive(Debug, Default)]
pub(super) struct Receiver {
    /// The low bits of a session's number are its place here.
    sessions: Vec<Option<Box<RxSession>>>,
    datagrams: HashMap<(Ends, u64, u8), RxDatagrams>,
}

impl Receiver {
    fn place(number: u64) -> usize {
        usize::try_from(number % MAX_SESSIONS as u64).unwrap_or(0)
    }

    /// Opens a packet of a session.
    #[inline]
    pub(super) fn open_session<'a>(
        &mut self,
        now: Nanos,
        from: std::net::IpAddr,
        header: &SealedHeader,
        packet: &'a [u8],
        room: &'a mut [u8],
    ) -> Result<Opened<'a>, Dropped> {
        let session = self.sessions.get_mut(Self::place(header.flow)).and_then(Option::as_mut);
        let session = session
            .filter(|session| session.number == header.flow && session.from.0 == from)
            .ok_or(Dropped::UnknownSession)?;
        if !session.window.is_new(header.counter) {
            return Err(Dropped::Replayed);
        }
        let opened = session.key.open(header.counter, header.encrypted, packet, room);
        let packet = opened.ok_or(Dropped::Forged)?;
        session.window.mark(header.counter);
        (session.in_use, session.used) = (true, now);
        Ok(Opened { packet, ip_id: header.ip_id.into() })
    }

    /// Opens a datagram.
    pub(super) fn open_datagram<'a>(
        &mut self,
        (now, unix): (Nanos, u64),
        ends: Ends,
        header: &SealedHeader,
        (packet, room): (&'a [u8], &'a mut [u8]),
        master: &Arc<Master>,
    ) -> Result<Opened<'a>, Dropped> {
        let (sent, number) = (header.counter >> 32, header.counter & u64::from(u32::MAX));
        if sent.abs_diff(unix) > CLOCK_TOLERANCE {
            return Err(Dropped::OtherTime);
        }
        let name = (ends, header.flow, master.id);
        if let Some(flow) = self.datagrams.get_mut(&name).filter(|flow| flow.master.is_same(master)) {
            if !flow.window.is_new(number) {
                return Err(Dropped::Replayed);
            }
            let opened = flow.key.open(header.counter, header.encrypted, packet, room);
            let packet = opened.ok_or(Dropped::Forged)?;
            flow.window.mark(number);
            flow.used = now;
            return Ok(Opened { packet, ip_id: header.ip_id.into() });
        }
        let mut key = master.flow_key(FlowOf::Datagrams, &ends, &[&header.flow.to_be_bytes()]);
        let packet = key.open(header.counter, header.encrypted, packet, room).ok_or(Dropped::Forged)?;
        if self.datagrams.len() >= MAX_DATAGRAM_FLOWS {
            let oldest = self.datagrams.iter().min_by_key(|(_, flow)| flow.used).map(|(name, _)| *name);
            oldest.map(|name| self.datagrams.remove(&name));
        }
        let mut window = ReplayWindow::default();
        window.mark(number);
        self.datagrams.insert(name, RxDatagrams { master: master.clone(), key, window, used: now });
        Ok(Opened { packet, ip_id: header.ip_id.into() })
    }

    /// Gives a sender a session: the same again if it repeats its request.
    pub(super) fn handle_hello(
        &mut self,
        now: Nanos,
        from: PeerName,
        ends: &Ends,
        (ask, asked_at): (SessionNonce, u64),
        (master, random): (&Arc<Master>, &mut Random),
    ) -> Result<(SessionNonce, u64), Dropped> {
        let all = || self.sessions.iter().flatten();
        if let Some(known) = all().find(|session| session.from == from && session.ask == ask) {
            return Ok((known.answer, known.number));
        }
        let place = self.free_place(now, from, asked_at).ok_or(Dropped::NoRoom)?;
        let answer = random.nonce();
        let key = master.flow_key(FlowOf::Session, ends, &[&ask, &answer]);
        let number = random.number() / MAX_SESSIONS as u64 * MAX_SESSIONS as u64 + place as u64;
        let session = RxSession {
            number,
            from,
            ask,
            asked_at,
            answer,
            master: master.clone(),
            key,
            window: ReplayWindow::default(),
            in_use: false,
            used: now,
        };
        if place == self.sessions.len() {
            self.sessions.push(None);
        }
        self.sessions[place] = Some(Box::new(session));
        Ok((answer, number))
    }

    /// Where a session of a request of that time goes. A recorded request does not displace a later
    /// one: the session of a sender that is about to use it stays.
    fn free_place(&self, now: Nanos, from: PeerName, asked_at: u64) -> Option<usize> {
        let taken =
            || self.sessions.iter().enumerate().filter_map(|(at, one)| one.as_ref().map(|one| (at, one)));
        let unused = || taken().filter(|(_, session)| !session.in_use);
        let oldest = |at: Option<(usize, &Box<RxSession>)>| at.map(|(at, _)| at);
        let ours = || unused().filter(|(_, session)| session.from == from);
        if ours().count() >= MAX_UNUSED {
            let first = ours().min_by_key(|(_, session)| session.asked_at);
            return oldest(first.filter(|(_, session)| session.asked_at < asked_at));
        }
        if let Some(free) = self.sessions.iter().position(Option::is_none) {
            return Some(free);
        }
        if self.sessions.len() < MAX_SESSIONS {
            return Some(self.sessions.len());
        }
        let idle = || taken().filter(|(_, session)| now.saturating_sub(session.used) > IDLE);
        let first = unused().min_by_key(|(_, session)| session.asked_at);
        oldest(first.filter(|(_, session)| session.asked_at < asked_at))
            .or_else(|| oldest(idle().min_by_key(|(_, session)| session.used)))
    }

    /// Forgets what belongs to secrets that are no longer used.
    pub(super) fn keep(&mut self, is_used: impl Fn(&Master) -> bool) {
        for session in &mut self.sessions {
            session.take_if(|session| !is_used(&session.master));
        }
        self.datagrams.retain(|_, flow| is_used(&flow.master));
    }

    /// Sessions and flows of datagrams.
    pub(super) fn count(&self) -> usize {
        self.sessions.iter().flatten().count() + self.datagrams.len()
    }
}
