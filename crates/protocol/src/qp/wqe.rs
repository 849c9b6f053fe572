//! One request of the send queue, and the packets it is cut into.

use super::completion::{Completion, Status};
use super::request::{Operation, WorkRequest};
use super::{Params, Payload, Transmit};
use crate::wire::{AtomicEth, Header, Psn, Qpn, Reth};

/// What a packet costs a socket buffer besides its payload.
const PACKET_OVERHEAD: u64 = 512;
/// Most packets of a WRITE that is sent as WRITEs of one packet each. With 4096-byte packets on 16
/// CPUs, 8 KiB go from 0.9 to 2.8 GB/s, 32 KiB from 1.9 to 2.9 and 64 KiB from 2.8 to 3.1; with
/// every CPU busy, from 0.5 to 1.0, from 0.5 to 1.2 and from 0.9 to 1.4. Longer ones gain nothing.
const SHORT_WRITE: u64 = 16;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Wqe {
    pub(crate) serial: u64,
    pub(crate) request: WorkRequest,
    /// Its first sequence number, once it is started.
    pub(crate) psn: u64,
    /// How many it takes.
    pub(crate) packets: u64,
    /// Whether it is sent as WRITEs of one packet each: decided once, for retransmissions, too.
    pub(crate) split: bool,
}

impl Wqe {
    /// Gives it PSNs from this one on, for packets of that MTU.
    pub(crate) fn start(&mut self, psn: u64, mtu: u32, splits_writes: bool) {
        self.psn = psn;
        self.packets = if self.request.op.fetches() && !matches!(self.request.op, Operation::Read(_)) {
            1
        } else {
            u64::from(self.request.len).div_ceil(u64::from(mtu)).max(1)
        };
        self.split = splits_writes && self.is_short_write();
    }

    pub(crate) const fn end(&self) -> u64 {
        self.psn + self.packets
    }

    /// The same for every packet of a request, so that what was added can be taken away exactly.
    ///
    /// A packet that travels alone lies in a buffer of its own, whose size the kernel rounds up to
    /// a power of two; packets that travel together share pages.
    pub(crate) fn packet_cost(&self) -> u64 {
        let len = u64::from(self.request.len);
        match self.packets {
            0 | 1 => (len + PACKET_OVERHEAD / 2).next_power_of_two() + PACKET_OVERHEAD,
            packets => len / packets + PACKET_OVERHEAD,
        }
    }

    /// What its end is reported as.
    pub(crate) fn completion(&self, status: Status) -> Completion {
        let byte_len = if self.request.op.returns_data() { self.request.len } else { 0 };
        Completion { status, byte_len, ..Completion::flushed(self.request.wr_id, self.request.op.kind()) }
    }

    /// Whether it is short enough to be sent as WRITEs of one packet each, where packets of one
    /// length are cheaper to send together. (The completion of an immediate tells the length of its
    /// WRITE.)
    pub(crate) fn is_short_write(&self) -> bool {
        matches!(self.request.op, Operation::Write(_)) && (2..=SHORT_WRITE).contains(&self.packets)
    }

    /// A packet of a SEND or WRITE.
    pub(crate) fn data_packet(&self, psn: u64, ack_req: bool, params: &Params) -> Transmit {
        let index = psn - self.psn;
        let offset = index * u64::from(params.mtu);
        let last = psn + 1 == self.end();
        let len =
            u32::try_from((u64::from(self.request.len) - offset).min(u64::from(params.mtu))).unwrap_or(0);
        let opcode = self.request.op.opcode(self.split || index == 0, self.split || last);
        let mut header = Header::new(opcode, params.dest_qpn, Psn::of(psn));
        header.xrc = params.xrc;
        header.deth.source = Qpn::new(self.request.xrc_srq & 0xff_ffff);
        header.ack_req = ack_req;
        header.pad = pad_of(len);
        header.solicited = if self.split { !last } else { last && self.request.solicited };
        match self.request.op {
            Operation::SendImmediate(immediate) => header.immediate = immediate,
            Operation::SendInvalidate(key) => header.invalidate = key,
            Operation::Write(remote) | Operation::WriteImmediate(remote, _) => {
                header.reth = match self.split {
                    true => Reth { addr: remote.addr.wrapping_add(offset), rkey: remote.rkey, len },
                    false => Reth { addr: remote.addr, rkey: remote.rkey, len: self.request.len },
                };
                if let Operation::WriteImmediate(_, immediate) = self.request.op {
                    header.immediate = immediate;
                }
            }
            _ => {}
        }
        let rest = u32::try_from(u64::from(self.request.len) - offset - u64::from(len)).unwrap_or(0);
        let payload = if len == 0 {
            Payload::None
        } else {
            Payload::Request { serial: self.serial, offset, len, rest }
        };
        Transmit { header, payload }
    }

    /// A READ request for `packets` packets from `psn` on, or another request with a response of
    /// its own.
    pub(crate) fn fetch_packet(&self, psn: u64, packets: u64, params: &Params) -> Transmit {
        let mut header = Header::new(self.request.op.opcode(true, true), params.dest_qpn, Psn::of(psn));
        header.xrc = params.xrc;
        header.deth.source = Qpn::new(self.request.xrc_srq & 0xff_ffff);
        header.ack_req = true;
        match self.request.op {
            Operation::Read(remote) => {
                let offset = (psn - self.psn) * u64::from(params.mtu);
                let len = (u64::from(self.request.len) - offset).min(packets * u64::from(params.mtu));
                header.reth = Reth {
                    addr: remote.addr.wrapping_add(offset),
                    rkey: remote.rkey,
                    len: u32::try_from(len).unwrap_or(0),
                };
            }
            Operation::CompareSwap { remote, compare, swap } => {
                header.atomic =
                    AtomicEth { addr: remote.addr, rkey: remote.rkey, swap_or_add: swap, compare };
            }
            Operation::FetchAdd { remote, add } => {
                header.atomic =
                    AtomicEth { addr: remote.addr, rkey: remote.rkey, swap_or_add: add, compare: 0 };
            }
            Operation::AtomicWrite(remote) => {
                header.reth = Reth { addr: remote.addr, rkey: remote.rkey, len: self.request.len };
                let (serial, len) = (self.serial, self.request.len);
                return Transmit { header, payload: Payload::Request { serial, offset: 0, len, rest: 0 } };
            }
            Operation::Flush { remote, len, feth } => {
                header.feth = feth;
                header.reth = Reth { addr: remote.addr, rkey: remote.rkey, len };
            }
            _ => {}
        }
        Transmit { header, payload: Payload::None }
    }
}

/// Bytes that bring `len` to a multiple of four.
pub(crate) fn pad_of(len: u32) -> u8 {
    u8::try_from(len.wrapping_neg() & 3).unwrap_or(0)
}
