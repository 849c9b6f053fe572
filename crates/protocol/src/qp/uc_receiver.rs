//! The receiver of an unreliable connection: complete messages in order, or nothing.
//!
//! It sends no responses. If a packet is missing, or a message cannot be accepted, the rest of that
//! message is dropped. The next first packet is accepted whatever its PSN. The receive of a dropped
//! message serves the next one.

use super::attr::Access;
use super::completion::{Completion, Status, WorkKind};
use super::requester::Out;
use super::responder::{Incoming, fits_place, is_piece_of};
use super::{Host, MAX_MESSAGE, Params, Receive};
use crate::wire::{Header, Psn};

/// Packets this far behind the expected PSN are late or duplicates, and dropped: messages arrive
/// once and in order. Further behind means that the peer has started over, which the service
/// allows.
const LATE: u64 = 4096;

/// Local memory of a receive failed, or it was too short for a datagram; its completion is written.
/// The queue pair must go to the error state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken;

/// Why a packet was not taken.
enum DropCause {
    /// Its message is dropped.
    Dropped,
    Broken,
}

#[derive(Debug)]
pub(crate) struct UcReceiver {
    expected: u64,
    /// The first PSN received: none before it can be late.
    since: u64,
    incoming: Incoming,
    /// Taken for a message that was dropped; the next one gets it.
    spare: Option<Receive>,
}

impl UcReceiver {
    pub(crate) fn new() -> Self {
        Self { expected: Psn::SPACE, since: Psn::SPACE, incoming: Incoming::None, spare: None }
    }

    pub(crate) fn connect(&mut self, rq_psn: Psn) {
        let first = Psn::SPACE + u64::from(rq_psn.get());
        *self = Self { expected: first, since: first, ..Self::new() };
    }

    /// Whether a partial or dropped message holds a receive.
    pub(crate) const fn has_open_receive(&self) -> bool {
        self.spare.is_some() || matches!(self.incoming, Incoming::Send { .. })
    }

    /// The receive that a partial or dropped message holds; no more packets will come.
    pub(crate) fn take_open_receive(&mut self) -> Option<Receive> {
        self.keep_receive();
        self.spare.take()
    }

    pub(crate) fn handle_packet(
        &mut self,
        header: &Header,
        payload_len: usize,
        params: &Params,
        host: &mut dyn Host,
        out: &mut Out<'_>,
    ) -> Result<(), Broken> {
        let mut psn = header.psn.extend(self.expected);
        if psn < self.expected {
            if psn >= self.since.max(self.expected - LATE) {
                out.counters.duplicate_request += 1;
                return Ok(());
            }
            psn = Psn::SPACE + u64::from(header.psn.get());
            self.since = psn;
            self.expected = psn + 1;
            out.counters.out_of_seq_request += 1;
            self.drop_incoming(out);
        } else {
            if psn > self.expected {
                out.counters.out_of_seq_request += 1;
                self.drop_incoming(out);
            }
            self.expected = psn + 1;
        }
        let place = header.opcode.place();
        if place.starts() {
            // One that never ended was not whole.
            self.drop_incoming(out);
        } else if matches!(self.incoming, Incoming::None) {
            return Ok(()); // the rest of a message that was dropped
        }
        let taken = if !fits_place(place, payload_len, params) {
            Err(DropCause::Dropped)
        } else if header.opcode.is_send() {
            self.take_send(header, payload_len, host, out)
        } else {
            self.take_write(header, payload_len, params, host, out)
        };
        match taken {
            Ok(()) => Ok(()),
            Err(DropCause::Dropped) => {
                out.counters.dropped_messages += 1;
                self.keep_receive();
                Ok(())
            }
            Err(DropCause::Broken) => Err(Broken),
        }
    }

    fn drop_incoming(&mut self, out: &mut Out<'_>) {
        if !matches!(self.incoming, Incoming::None) {
            out.counters.dropped_messages += 1;
            self.keep_receive();
        }
    }

    /// No more of the message coming in is taken.
    fn keep_receive(&mut self) {
        if let Incoming::Send { receive, .. } = std::mem::replace(&mut self.incoming, Incoming::None) {
            self.spare = Some(receive);
        }
    }

    fn next_receive(&mut self, host: &mut dyn Host, out: &mut Out<'_>) -> Result<Receive, DropCause> {
        self.spare.take().or_else(|| host.take_receive()).ok_or_else(|| {
            out.counters.out_of_buffer += 1;
            DropCause::Dropped
        })
    }

    fn take_send(
        &mut self,
        header: &Header,
        payload_len: usize,
        host: &mut dyn Host,
        out: &mut Out<'_>,
    ) -> Result<(), DropCause> {
        let place = header.opcode.place();
        let (receive, received) = match (place.starts(), self.incoming) {
            (true, _) => (self.next_receive(host, out)?, 0),
            (false, Incoming::Send { receive, received }) => (receive, received),
            _ => return Err(DropCause::Dropped),
        };
        let total = received + payload_len as u64;
        self.incoming = Incoming::Send { receive, received: total };
        if total > receive.capacity {
            return Err(DropCause::Dropped);
        }
        if payload_len > 0 && host.place_receive(received, payload_len, place.ends()).is_err() {
            self.incoming = Incoming::None;
            let failed = Completion::flushed(receive.wr_id, WorkKind::Receive);
            out.completions.push_back(Completion { status: Status::LocalProtection, ..failed });
            return Err(DropCause::Broken);
        }
        if place.ends() {
            self.incoming = Incoming::None;
            let len = u32::try_from(total).unwrap_or(u32::MAX);
            out.completions.push_back(Completion::received(receive.wr_id, Status::Success, header, len));
        }
        Ok(())
    }

    fn take_write(
        &mut self,
        header: &Header,
        payload_len: usize,
        params: &Params,
        host: &mut dyn Host,
        out: &mut Out<'_>,
    ) -> Result<(), DropCause> {
        let place = header.opcode.place();
        if !params.access.contains(Access::REMOTE_WRITE) {
            return Err(DropCause::Dropped);
        }
        let (rkey, addr, remaining, total) = match (place.starts(), self.incoming) {
            (true, _) => {
                let reth = header.reth;
                let len = u64::from(reth.len);
                if reth.len > MAX_MESSAGE
                    || (len > 0 && host.check(reth.rkey, reth.addr, len, Access::REMOTE_WRITE).is_err())
                {
                    return Err(DropCause::Dropped);
                }
                (reth.rkey, reth.addr, len, reth.len)
            }
            (false, Incoming::Write { rkey, addr, remaining, total }) => (rkey, addr, remaining, total),
            _ => return Err(DropCause::Dropped),
        };
        let len = payload_len as u64;
        if !is_piece_of(remaining, len, place) {
            self.incoming = Incoming::None;
            return Err(DropCause::Dropped);
        }
        self.incoming = Incoming::None;
        // Without a posted receive the last packet is not placed: no completion then reports a
        // whole message.
        let receive = if header.opcode.has_immediate() { Some(self.next_receive(host, out)?) } else { None };
        if payload_len > 0 && host.place_remote(rkey, addr, payload_len, place.ends()).is_err() {
            self.spare = receive.or(self.spare);
            return Err(DropCause::Dropped);
        }
        if !place.ends() {
            let (addr, remaining) = (addr.wrapping_add(len), remaining - len);
            self.incoming = Incoming::Write { rkey, addr, remaining, total };
        } else if let Some(receive) = receive {
            out.completions.push_back(Completion::received(receive.wr_id, Status::Success, header, total));
        }
        Ok(())
    }
}
