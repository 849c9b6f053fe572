//! The responder of a reliable connection: accepts requests in order, sends NAKs for invalid ones,
//! responds.

mod early;

use std::collections::VecDeque;

use super::attr::Access;
use super::completion::{Completion, Nak, QpEvent, Status};
use super::reassembly::Reassembly;
use super::requester::Out;
use super::wqe::pad_of;
use super::{Host, Params, Payload, Receive, Transmit};
use crate::wire::{Aeth, Feth, Header, Opcode, OpcodeKind, PacketPosition, Psn, Reth, Syndrome};

/// AETH credit code for "credits not used".
const NO_CREDITS: u8 = 31;
/// Packets after which a delayed ACK is sent at once. Before that, the caller may piggyback it.
const ACK_URGENT: u32 = 8;

/// The message that is arriving.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Incoming {
    None,
    Send { receive: Receive, received: u64 },
    Write { rkey: u32, addr: u64, remaining: u64, total: u32 },
}

/// A queued response.
#[derive(Clone, Copy, Debug)]
enum Reply {
    Ack { psn: u64 },
    Read { psn: u64, rkey: u32, addr: u64, len: u32, sent: u32, msn: u32, replay: bool },
    Atomic { psn: u64, original: u64, msn: u32, replay: bool },
}

impl Reply {
    /// First PSN and one past the last that it still answers.
    fn span(&self, mtu: u32) -> (u64, u64) {
        match *self {
            Self::Ack { psn } | Self::Atomic { psn, .. } => (psn, psn + 1),
            Self::Read { psn, len, sent, .. } => {
                (psn + u64::from(sent) / u64::from(mtu), psn + packets_of(len, mtu))
            }
        }
    }

    /// Skips what comes before this PSN; returns whether anything is left.
    fn skip_to(&mut self, to: u64, mtu: u32) -> bool {
        match self {
            Self::Read { psn, len, sent, .. } => {
                let skipped = to.saturating_sub(*psn).saturating_mul(u64::from(mtu));
                let skipped = u32::try_from(skipped).unwrap_or(u32::MAX);
                *sent = skipped.max(*sent);
                *sent < *len
            }
            Self::Ack { .. } | Self::Atomic { .. } => false,
        }
    }

    /// For a READ or atomic response: whether it answers a duplicate request.
    const fn replay(&self) -> Option<bool> {
        match *self {
            Self::Ack { .. } => None,
            Self::Read { replay, .. } | Self::Atomic { replay, .. } => Some(replay),
        }
    }
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestOutcome {
    /// It was executed, replayed or refused; the queue pair lives on.
    Alive,
    /// It got a fatal NAK, and the queue pair must go to the error state.
    Fatal(QpEvent),
}

#[derive(Debug)]
pub(crate) struct Responder {
    expected: u64,
    msn: u32,
    incoming: Incoming,
    /// In PSN order, which is the order the peer needs.
    replies: VecDeque<Reply>,
    /// The pending NAK, sent after all `replies`. It moves on once the packet that it refuses was
    /// accepted after all.
    refusal: Option<(u64, Syndrome)>,
    /// Results of the last atomics, so that a duplicate request is answered and not executed again.
    atomics: VecDeque<(u64, u64)>,
    /// A gap was reported: the highest PSN since then in this pass of the peer.
    gap_reported: Option<u64>,
    /// One past the highest PSN that was dropped behind a gap.
    dropped: u64,
    /// The NAK that ended this queue pair.
    fatal: Option<(u64, Syndrome)>,
    /// Packets accepted since the last ACK left.
    unacknowledged: u32,
    /// A receive was completed since then.
    receipt_owed: bool,
    /// Packets behind a gap, with a peer that retransmits selectively.
    early: Option<Box<Reassembly>>,
}

impl Responder {
    pub(crate) fn new() -> Self {
        Self {
            expected: Psn::SPACE,
            msn: 0,
            incoming: Incoming::None,
            replies: VecDeque::new(),
            refusal: None,
            atomics: VecDeque::new(),
            gap_reported: None,
            dropped: 0,
            fatal: None,
            unacknowledged: 0,
            receipt_owed: false,
            early: None,
        }
    }

    /// The peer retransmits selectively: packets behind a gap are kept from now on.
    pub(crate) fn keep_early(&mut self) {
        self.early.get_or_insert_default();
    }

    pub(crate) fn connect(&mut self, rq_psn: Psn) {
        *self = Self { expected: Psn::SPACE + u64::from(rq_psn.get()), ..Self::new() };
    }

    /// Whether a response should leave now instead of waiting for a piggyback.
    pub(crate) fn is_urgent(&self) -> bool {
        self.refusal.is_some()
            || match self.replies.front() {
                None => false,
                Some(Reply::Ack { .. }) => self.replies.len() > 1 || self.unacknowledged >= ACK_URGENT,
                Some(_) => true,
            }
    }

    /// Whether the application knows of a message that is not acknowledged yet.
    pub(crate) fn owes_receipt(&self) -> bool {
        self.receipt_owed && self.has_replies()
    }

    pub(crate) fn has_replies(&self) -> bool {
        !self.replies.is_empty() || self.refusal.is_some()
    }

    /// Queued READ and atomic responses, first ones or replays.
    fn fetches(&self, replay: bool) -> usize {
        self.replies.iter().filter(|reply| reply.replay() == Some(replay)).count()
    }

    pub(crate) const fn has_open_receive(&self) -> bool {
        matches!(self.incoming, Incoming::Send { .. })
    }

    /// The receive in use for a message that is still arriving; the rest of it will not come.
    pub(crate) fn take_open_receive(&mut self) -> Option<Receive> {
        match std::mem::replace(&mut self.incoming, Incoming::None) {
            Incoming::Send { receive, .. } => Some(receive),
            _ => None,
        }
    }

    /// How many of so many packets from this one on are duplicates, if others are new.
    pub(crate) fn taken_of(&self, psn: Psn, packets: u32) -> u32 {
        let taken = self.expected.saturating_sub(psn.extend(self.expected));
        u32::try_from(taken).ok().filter(|taken| *taken < packets).unwrap_or(0)
    }

    /// Handles a request from the peer.
    pub(crate) fn handle_request(
        &mut self,
        (header, packets): (&Header, u64),
        payload_len: usize,
        params: &Params,
        host: &mut dyn Host,
        out: &mut Out<'_>,
    ) -> RequestOutcome {
        let psn = header.psn.extend(self.expected);
        if psn < self.expected {
            out.counters.duplicate_request += 1;
            return self.handle_duplicate(psn, header, params, host, out);
        }
        if psn > self.expected {
            out.counters.out_of_seq_request += 1;
            if self.early.is_some() {
                self.handle_early(psn, (header, packets), payload_len, params, host);
                return RequestOutcome::Alive;
            }
            self.dropped = self.dropped.max(psn + packets);
            self.report_gap(psn);
            return RequestOutcome::Alive;
        }
        self.gap_reported = None;
        match self.carry_out(psn, (header, packets), payload_len, params, host, out) {
            Ok(()) => {
                self.move_refusal();
                self.unacknowledged =
                    self.unacknowledged.saturating_add(u32::try_from(packets).unwrap_or(u32::MAX));
                self.note_accepted(params);
                RequestOutcome::Alive
            }
            Err(NakCause::NotReady) => {
                out.counters.send_rnr_err += 1;
                self.refusal = Some((psn, Syndrome::RnrNak(params.min_rnr_timer)));
                // Everything behind it arrives out of order. The peer knows, so report no gap for
                // it.
                self.gap_reported = Some(psn);
                RequestOutcome::Alive
            }
            Err(NakCause::Nak(nak)) => self.refuse(psn, nak),
        }
    }

    fn refuse(&mut self, psn: u64, nak: Nak) -> RequestOutcome {
        let syndrome = Syndrome::Nak(nak as u8);
        self.early = None;
        self.refusal = Some((psn, syndrome));
        self.fatal = self.refusal;
        RequestOutcome::Fatal(match nak {
            Nak::RemoteAccess => QpEvent::AccessError,
            Nak::InvalidRequest | Nak::InvalidRdRequest => QpEvent::RequestError,
            Nak::RemoteOperational | Nak::PsnSequence => QpEvent::Fatal,
        })
    }

    /// The queue pair is in the error state; the peer may have missed the NAK.
    pub(crate) fn repeat_refusal(&mut self, header: &Header) {
        // Repeat the NAK only for the refused request and later ones. An earlier READ whose
        // response was lost is not at fault.
        if let Some((psn, syndrome)) = self.fatal
            && header.psn.extend(psn) >= psn
        {
            self.refusal = Some((psn, syndrome));
        }
    }

    /// One PSN sequence error NAK per gap, and one more whenever the peer starts over and the gap
    /// is still there.
    fn report_gap(&mut self, psn: u64) {
        let again = self.gap_reported.is_none_or(|highest| psn <= highest);
        self.gap_reported = Some(psn);
        if again {
            self.refusal = Some((self.expected, Syndrome::Nak(Nak::PsnSequence as u8)));
        }
    }

    /// The refused packet was accepted before its NAK could leave. Packets between the two are lost
    /// all the same. Move the NAK to them, or the peer would learn of the loss only by its timeout.
    fn move_refusal(&mut self) {
        if self.refusal.take().is_some() && self.dropped > self.expected {
            self.gap_reported = Some(self.dropped - 1);
            self.refusal = Some((self.expected, Syndrome::Nak(Nak::PsnSequence as u8)));
        }
    }

    fn handle_duplicate(
        &mut self,
        psn: u64,
        header: &Header,
        params: &Params,
        host: &mut dyn Host,
        out: &mut Out<'_>,
    ) -> RequestOutcome {
        match header.opcode {
            Opcode::ReadRequest => {
                let packets = packets_of(header.reth.len, params.mtu);
                if psn + packets > self.expected || self.check_read(header, params, host).is_err() {
                    // Not a repetition of anything we answered: silence, as the standard says.
                    return RequestOutcome::Alive;
                }
                self.answer_again(read_reply(psn, header, self.msn, true), params);
            }
            Opcode::CompareSwap | Opcode::FetchAdd => {
                let original = self.atomics.iter().find(|(at, _)| *at == psn).map(|(_, value)| *value);
                if let Some(original) = original {
                    self.answer_again(Reply::Atomic { psn, original, msn: self.msn, replay: true }, params);
                } else {
                    out.counters.lost_atomic_replay += 1;
                }
            }
            // Done once: only the response is repeated.
            Opcode::AtomicWrite | Opcode::Flush => {
                self.answer_again(empty_reply(psn, self.msn, true), params);
            }
            // A retransmitted message includes its last packet, which requests the ACK. An ACK for
            // each of its packets would add nothing. Worse, the kernel's RoCE stops forever if an
            // ACK in the middle of a retransmission completes the request
            // (docs/reference/interop.md).
            _ if header.ack_req || header.opcode.place().ends() => match &mut self.early {
                Some(early) if early.has_gap() => early.ask(),
                _ => self.push_ack(self.expected - 1),
            },
            _ => {}
        }
        RequestOutcome::Alive
    }

    /// Queues a replayed response in PSN order, in place of the original if that has not left yet.
    ///
    /// A peer may repeat a READ in pieces: the rest behind the piece is still answered, before
    /// anything later. Replays and first responses have separate limits. A network that duplicates
    /// old requests must not make us refuse new ones. It cannot make the queue longer than twice
    /// the agreed depth either.
    fn answer_again(&mut self, mut again: Reply, params: &Params) {
        let (start, end) = again.span(params.mtu);
        // A piece in the middle of a response that has not left overtook the request for the part
        // before it: all of it is queued.
        let reaches = |(s, e)| s < start && start < e;
        if self.replies.iter().any(|reply| reply.replay().is_some() && reaches(reply.span(params.mtu))) {
            return;
        }
        let overlaps = |reply: &Reply| {
            let (s, e) = reply.span(params.mtu);
            reply.replay().is_some() && s < end && start < e
        };
        let replaced = |reply: &&Reply| overlaps(reply) && reply.span(params.mtu).1 <= end;
        let first_time = self.replies.iter().filter(replaced).any(|reply| reply.replay() == Some(false));
        if first_time {
            if let Reply::Read { replay, .. } | Reply::Atomic { replay, .. } = &mut again {
                *replay = false;
            }
        } else {
            let replaced = self.replies.iter().filter(replaced).count();
            if self.fetches(true) - replaced >= usize::from(params.max_dest_rd_atomic) {
                return;
            }
        }
        self.replies.retain_mut(|reply| !overlaps(reply) || reply.skip_to(end, params.mtu));
        // An ACK covers its PSN and all before it: no response that it covers may follow it.
        let later = |reply: &Reply| reply.span(params.mtu).0 >= start + u64::from(reply.replay().is_some());
        let at = self.replies.iter().position(later);
        self.replies.insert(at.unwrap_or(self.replies.len()), again);
    }

    fn carry_out(
        &mut self,
        psn: u64,
        (header, packets): (&Header, u64),
        payload_len: usize,
        params: &Params,
        host: &mut dyn Host,
        out: &mut Out<'_>,
    ) -> Result<(), NakCause> {
        let opcode = header.opcode;
        let mut span = packets;
        let piece = payload_len / usize::try_from(packets).unwrap_or(1);
        let kind = opcode.kind();
        if header.has_xrceth() {
            host.select_receives(header.xrc_srq())?;
        }
        match kind {
            OpcodeKind::Send => {
                check_payload(opcode, piece, params)?;
                self.take_send(header, payload_len, host, out)?;
            }
            OpcodeKind::Write => {
                check_payload(opcode, piece, params)?;
                self.take_write(header, payload_len, params, host, out)?;
            }
            OpcodeKind::Read => {
                self.check_fetch(params)?;
                self.check_read(header, params, host)?;
                span = packets_of(header.reth.len, params.mtu);
                self.msn = self.msn.wrapping_add(1);
                self.replies.push_back(read_reply(psn, header, self.msn, false));
            }
            OpcodeKind::Atomic => {
                self.check_fetch(params)?;
                let original = take_atomic(header, params, host)?;
                self.msn = self.msn.wrapping_add(1);
                while self.atomics.len() >= usize::from(params.max_dest_rd_atomic) {
                    self.atomics.pop_front();
                }
                self.atomics.push_back((psn, original));
                self.replies.push_back(Reply::Atomic { psn, original, msn: self.msn, replay: false });
            }
            OpcodeKind::AtomicWrite | OpcodeKind::Flush => {
                self.check_fetch(params)?;
                if kind == OpcodeKind::Flush {
                    take_flush(header, params, host)?;
                } else {
                    take_atomic_write(header, payload_len, params, host)?;
                }
                self.msn = self.msn.wrapping_add(1);
                self.replies.push_back(empty_reply(psn, self.msn, false));
            }
            OpcodeKind::Response => return Err(Nak::InvalidRequest.into()),
        }
        self.expected = psn + span;
        if header.ack_req && matches!(kind, OpcodeKind::Send | OpcodeKind::Write) {
            self.push_ack(psn);
        }
        Ok(())
    }

    /// Whether a READ or an atomic is allowed now.
    fn check_fetch(&self, params: &Params) -> Result<(), NakCause> {
        let is_first = matches!(self.incoming, Incoming::None);
        let has_room = self.fetches(false) < usize::from(params.max_dest_rd_atomic);
        if is_first && has_room { Ok(()) } else { Err(Nak::InvalidRequest.into()) }
    }

    fn take_send(
        &mut self,
        header: &Header,
        payload_len: usize,
        host: &mut dyn Host,
        out: &mut Out<'_>,
    ) -> Result<(), NakCause> {
        let place = header.opcode.place();
        let (receive, received) = match (place.starts(), self.incoming) {
            (true, Incoming::None) => (host.take_receive().ok_or(NakCause::NotReady)?, 0),
            (false, Incoming::Send { receive, received }) => (receive, received),
            _ => return Err(Nak::InvalidRequest.into()),
        };
        // From here on the receive is consumed: any failure must complete it.
        self.incoming = Incoming::Send { receive, received };
        let total = received + payload_len as u64;
        if total > receive.capacity {
            self.end_receive(receive, Status::LocalLength, header, 0, out);
            return Err(Nak::InvalidRequest.into());
        }
        if payload_len > 0 && host.place_receive(received, payload_len, place.ends()).is_err() {
            self.end_receive(receive, Status::LocalProtection, header, 0, out);
            return Err(Nak::RemoteOperational.into());
        }
        if !place.ends() {
            self.incoming = Incoming::Send { receive, received: total };
            return Ok(());
        }
        if header.opcode.has_invalidate()
            && let Err(nak) = host.invalidate(header.invalidate)
        {
            self.end_receive(receive, Status::LocalAccess, header, 0, out);
            return Err(nak.into());
        }
        self.msn = self.msn.wrapping_add(1);
        let len = u32::try_from(total).unwrap_or(u32::MAX);
        self.end_receive(receive, Status::Success, header, len, out);
        Ok(())
    }

    fn end_receive(
        &mut self,
        receive: Receive,
        status: Status,
        header: &Header,
        byte_len: u32,
        out: &mut Out<'_>,
    ) {
        self.incoming = Incoming::None;
        self.receipt_owed = true;
        out.completions.push_back(Completion::received(receive.wr_id, status, header, byte_len));
    }

    fn take_write(
        &mut self,
        header: &Header,
        payload_len: usize,
        params: &Params,
        host: &mut dyn Host,
        out: &mut Out<'_>,
    ) -> Result<(), NakCause> {
        let opcode = header.opcode;
        let place = opcode.place();
        if !params.access.contains(Access::REMOTE_WRITE) {
            return Err(Nak::InvalidRequest.into());
        }
        let (rkey, addr, remaining, total) = match (place.starts(), self.incoming) {
            (true, Incoming::None) => {
                let reth = header.reth;
                if reth.len > super::MAX_MESSAGE {
                    return Err(Nak::InvalidRequest.into());
                }
                if reth.len > 0 {
                    host.check(reth.rkey, reth.addr, u64::from(reth.len), Access::REMOTE_WRITE)?;
                }
                (reth.rkey, reth.addr, u64::from(reth.len), reth.len)
            }
            (false, Incoming::Write { rkey, addr, remaining, total }) => (rkey, addr, remaining, total),
            _ => return Err(Nak::InvalidRequest.into()),
        };
        let len = payload_len as u64;
        if !is_piece_of(remaining, len, place) {
            return Err(Nak::InvalidRequest.into());
        }
        // The receive must exist before the last byte moves. Without one, an RNR NAK makes the
        // packet come again.
        let receive =
            if opcode.has_immediate() { Some(host.take_receive().ok_or(NakCause::NotReady)?) } else { None };
        if payload_len > 0
            && let Err(nak) = host.place_remote(rkey, addr, payload_len, place.ends() && !header.is_split())
        {
            if let Some(receive) = receive {
                self.end_receive(receive, Status::Flushed, header, 0, out);
            }
            return Err(nak.into());
        }
        if !place.ends() {
            let (addr, remaining) = (addr.wrapping_add(len), remaining - len);
            self.incoming = Incoming::Write { rkey, addr, remaining, total };
            return Ok(());
        }
        self.incoming = Incoming::None;
        self.msn = self.msn.wrapping_add(1);
        if let Some(receive) = receive {
            self.end_receive(receive, Status::Success, header, total, out);
        }
        Ok(())
    }

    fn check_read(&self, header: &Header, params: &Params, host: &mut dyn Host) -> Result<(), NakCause> {
        let reth = header.reth;
        if !params.access.contains(Access::REMOTE_READ) || reth.len > super::MAX_MESSAGE {
            return Err(Nak::InvalidRequest.into());
        }
        if reth.len > 0 {
            host.check(reth.rkey, reth.addr, u64::from(reth.len), Access::REMOTE_READ)?;
        }
        Ok(())
    }

    /// ACKs are cumulative: at most one is queued, however often a peer retransmits.
    fn push_ack(&mut self, psn: u64) {
        if let Some(Reply::Ack { psn: last }) = self.replies.back_mut() {
            *last = (*last).max(psn);
        } else {
            self.replies.retain(|reply| !matches!(reply, Reply::Ack { .. }));
            self.replies.push_back(Reply::Ack { psn });
        }
    }

    /// How many more packets of a READ response may leave after the one with this PSN, from its
    /// middle: at most `most`, and not the last one.
    pub(crate) fn poll_repeat(&mut self, last: Psn, params: &Params, most: u64) -> u64 {
        let Some(Reply::Read { psn, len, sent, .. }) = self.replies.front_mut() else { return 0 };
        let next = *psn + u64::from(*sent / params.mtu);
        if *sent == 0 || Psn::of(next) != last.next() {
            return 0;
        }
        let whole = u64::from((*len - *sent).saturating_sub(1) / params.mtu).min(most);
        *sent += u32::try_from(whole).unwrap_or(0) * params.mtu;
        whole
    }

    /// The next response. Without `flush`, a delayed ACK stays queued.
    pub(crate) fn poll_transmit(&mut self, params: &Params, flush: bool) -> Option<Transmit> {
        if !flush && !self.is_urgent() {
            return None;
        }
        let aeth = |syndrome, msn| Aeth { syndrome, msn: msn & 0xff_ffff };
        let Some(reply) = self.replies.front_mut() else {
            let (psn, syndrome) = self.refusal.take()?;
            let mut header = Header::new(Opcode::Ack, params.dest_qpn, Psn::of(psn));
            header.xrc = params.xrc;
            header.aeth = aeth(syndrome, self.msn);
            return Some(Transmit { header, payload: Payload::None });
        };
        match reply {
            Reply::Ack { psn } => {
                let mut header = Header::new(Opcode::Ack, params.dest_qpn, Psn::of(*psn));
                header.xrc = params.xrc;
                header.aeth = aeth(Syndrome::Ack(NO_CREDITS), self.msn);
                (self.unacknowledged, self.receipt_owed) = (0, false);
                self.replies.pop_front();
                Some(Transmit { header, payload: Payload::None })
            }
            Reply::Atomic { psn, original, msn, .. } => {
                let mut header = Header::new(Opcode::AtomicAck, params.dest_qpn, Psn::of(*psn));
                header.xrc = params.xrc;
                header.aeth = aeth(Syndrome::Ack(NO_CREDITS), *msn);
                header.original = *original;
                (self.unacknowledged, self.receipt_owed) = (0, false);
                self.replies.pop_front();
                Some(Transmit { header, payload: Payload::None })
            }
            Reply::Read { psn, rkey, addr, len, sent, msn, replay } => {
                let piece = (*len - *sent).min(params.mtu);
                let (first, last) = (*sent == 0, *sent + piece == *len);
                let opcode = match (first, last) {
                    (true, true) => Opcode::ReadResponseOnly,
                    (true, false) => Opcode::ReadResponseFirst,
                    (false, false) => Opcode::ReadResponseMiddle,
                    (false, true) => Opcode::ReadResponseLast,
                };
                let at = *psn + u64::from(*sent / params.mtu);
                let mut header = Header::new(opcode, params.dest_qpn, Psn::of(at));
                header.xrc = params.xrc;
                header.aeth = aeth(Syndrome::Ack(NO_CREDITS), *msn);
                header.pad = pad_of(piece);
                let from = addr.wrapping_add(u64::from(*sent));
                let payload = if piece == 0 {
                    Payload::None
                } else {
                    let (rest, again) = (*len - *sent - piece, *replay);
                    Payload::Region { rkey: *rkey, addr: from, len: piece, rest, again }
                };
                *sent += piece;
                if last {
                    (self.unacknowledged, self.receipt_owed) = (0, false);
                    self.replies.pop_front();
                }
                Some(Transmit { header, payload })
            }
        }
    }

    /// READs without any response yet, in order.
    pub(crate) fn waiting_reads(&self) -> impl Iterator<Item = (Psn, Reth)> {
        self.replies.iter().filter_map(|reply| match *reply {
            Reply::Read { psn, rkey, addr, len, sent: 0, .. } => {
                Some((Psn::of(psn), Reth { rkey, addr, len }))
            }
            _ => None,
        })
    }

    /// The atomic with this PSN is done: its response and its replays carry the value before.
    pub(crate) fn handle_changed(&mut self, psn: Psn, before: u64) {
        for (_, original) in self.atomics.iter_mut().filter(|(at, _)| Psn::of(*at) == psn) {
            *original = before;
        }
        for reply in &mut self.replies {
            if let Reply::Atomic { psn: at, original, .. } = reply
                && Psn::of(*at) == psn
            {
                *original = before;
            }
        }
    }

    /// The memory of a READ that was answered before is no longer readable. The peer may have had
    /// its response when the duplicate request arrived, and the program on this side may have
    /// released the memory since. Stay silent, as where the memory is gone before the request
    /// arrives.
    pub(crate) fn drop_replay(&mut self, psn: Psn, params: &Params) {
        let at = psn.extend(self.expected);
        // (Not its `span`: the packet that failed counts as sent.)
        self.replies.retain(|reply| match *reply {
            Reply::Read { psn, len, replay: true, .. } => {
                !(psn..psn + packets_of(len, params.mtu)).contains(&at)
            }
            _ => true,
        });
    }

    /// The memory of a READ response could not be read after all.
    pub(crate) fn fail_read(&mut self, psn: Psn, nak: Nak, params: &Params) -> RequestOutcome {
        let psn = psn.extend(self.expected);
        // Drop the failed response and all behind it; earlier ones still leave.
        self.replies.retain(|reply| reply.span(params.mtu).1 <= psn);
        self.refuse(psn, nak)
    }
}

enum NakCause {
    NotReady,
    Nak(Nak),
}

impl From<Nak> for NakCause {
    fn from(nak: Nak) -> Self {
        Self::Nak(nak)
    }
}

fn read_reply(psn: u64, header: &Header, msn: u32, replay: bool) -> Reply {
    let Reth { rkey, addr, len } = header.reth;
    Reply::Read { psn, rkey, addr, len, sent: 0, msn, replay }
}

/// The response of a request that returns nothing: that of a READ of no bytes.
fn empty_reply(psn: u64, msn: u32, replay: bool) -> Reply {
    Reply::Read { psn, rkey: 0, addr: 0, len: 0, sent: 0, msn, replay }
}

fn packets_of(len: u32, mtu: u32) -> u64 {
    u64::from(len.div_ceil(mtu).max(1))
}

fn check_payload(opcode: Opcode, len: usize, params: &Params) -> Result<(), NakCause> {
    if fits_place(opcode.place(), len, params) { Ok(()) } else { Err(Nak::InvalidRequest.into()) }
}

/// All packets but the last are full; the last of several is not empty.
pub(crate) fn fits_place(place: PacketPosition, len: usize, params: &Params) -> bool {
    let mtu = params.mtu as usize;
    if place.ends() { len <= mtu && (place.starts() || len > 0) } else { len == mtu }
}

/// Whether so many bytes may come next in a WRITE with so many left: all of them at its end, and
/// not before.
pub(crate) const fn is_piece_of(remaining: u64, len: u64, place: PacketPosition) -> bool {
    if place.ends() { len == remaining } else { len < remaining }
}

fn take_atomic_write(
    header: &Header,
    payload_len: usize,
    params: &Params,
    host: &mut dyn Host,
) -> Result<(), NakCause> {
    let Reth { rkey, addr, len } = header.reth;
    let is_word = payload_len == 8 && len == 8 && addr.is_multiple_of(8);
    if !params.access.contains(Access::REMOTE_WRITE) || !is_word {
        return Err(Nak::InvalidRequest.into());
    }
    host.check(rkey, addr, 8, Access::REMOTE_WRITE)?;
    Ok(host.place_remote(rkey, addr, 8, true)?)
}

fn take_flush(header: &Header, params: &Params, host: &mut dyn Host) -> Result<(), NakCause> {
    let (feth, reth) = (header.feth, header.reth);
    let is_known = matches!(feth.placement(), 1..=Feth::ALL) && feth.selectivity() <= Feth::REGION;
    if !params.access.contains(Access::FLUSH_GLOBAL) || !is_known {
        return Err(Nak::InvalidRequest.into());
    }
    // Memory here is not persistent: no region has that right.
    if feth.placement() & Feth::PERSISTENT != 0 {
        return Err(Nak::RemoteAccess.into());
    }
    let range = (feth.selectivity() == Feth::RANGE).then_some((reth.addr, u64::from(reth.len)));
    Ok(host.flush(reth.rkey, range)?)
}

fn take_atomic(header: &Header, params: &Params, host: &mut dyn Host) -> Result<u64, NakCause> {
    let atomic = header.atomic;
    if !params.access.contains(Access::REMOTE_ATOMIC) || !atomic.addr.is_multiple_of(8) {
        return Err(Nak::InvalidRequest.into());
    }
    host.check(atomic.rkey, atomic.addr, 8, Access::REMOTE_ATOMIC)?;
    let original = if header.opcode == Opcode::CompareSwap {
        host.compare_swap(atomic.rkey, atomic.addr, atomic.compare, atomic.swap_or_add)?
    } else {
        host.fetch_add(atomic.rkey, atomic.addr, atomic.swap_or_add)?
    };
    Ok(original)
}
