//! Memory operations of the protocol while it handles one packet.

use std::collections::VecDeque;
use std::net::IpAddr;

use nobounce_memory::Source;
use nobounce_protocol::qp::{Access, Host, LocalFault, Nak, Receive};
use nobounce_protocol::wire::Psn;

use crate::links::RxDatagram;
use crate::soft::engine::grh;
use crate::soft::engine::memory_windows::Accessor;
use crate::soft::engine::queue_pair::XrcTarget;
use crate::soft::engine::region::Regions;
use crate::soft::engine::scatter::RequestBytes;
use crate::soft::engine::srqs::{SrqIndex, Srqs};
use crate::soft::gpu::staging::CopyOwner;
use crate::soft::gpu::target::{AtomicChange, Placed};
use crate::soft::qp_index::QpIndex;
use crate::tally::PathTotals;

/// The bytes of a posted send request, by serial number.
#[derive(Debug)]
pub(crate) struct PostedSend {
    pub(crate) serial: u64,
    pub(crate) bytes: RequestBytes,
    /// Its bytes are sent, and may be read before its turn.
    pub(crate) early: bool,
}

/// A posted receive.
#[derive(Debug)]
pub(crate) struct PostedReceive {
    pub(crate) receive: Receive,
    pub(crate) bytes: RequestBytes,
}

/// Where a queue pair takes its receives from.
#[derive(Debug)]
pub(crate) enum ReceiveSource<'a> {
    /// Its own queue.
    Own(&'a mut VecDeque<PostedReceive>),
    /// A shared one.
    Shared(&'a mut Srqs, SrqIndex),
    /// The shared one that the message names.
    Named(&'a mut Srqs, &'a mut XrcTarget),
}

impl<'a> ReceiveSource<'a> {
    pub(crate) fn of(
        own: &'a mut VecDeque<PostedReceive>,
        shared: Option<SrqIndex>,
        xrc: Option<&'a mut XrcTarget>,
        srqs: &'a mut Srqs,
    ) -> Self {
        match (shared, xrc) {
            (Some(index), _) => Self::Shared(srqs, index),
            (None, Some(target)) => Self::Named(srqs, target),
            (None, None) => Self::Own(own),
        }
    }

    fn take(&mut self) -> Option<PostedReceive> {
        match self {
            Self::Own(receives) => receives.pop_front(),
            Self::Shared(srqs, index) => srqs.get(*index)?.receives.pop_front(),
            Self::Named(srqs, target) => {
                let srq = srqs.get(target.current?)?;
                let taken = srq.receives.pop_front()?;
                target.cqs.extend(srq.xrc.as_ref().map(|xrc| xrc.cq.clone()));
                Some(taken)
            }
        }
    }
}

/// The queues and regions of one queue pair, with the current packet.
#[derive(Debug)]
pub(crate) struct PacketHost<'a> {
    pub(crate) regions: &'a mut Regions,
    pub(crate) pd: &'a mut u32,
    /// The protection domain of its receives: a shared queue has its own.
    pub(crate) receive_pd: &'a mut u32,
    pub(crate) payload: Source<'a>,
    /// The packet as it arrived, and the address it came to.
    pub(crate) datagram: &'a RxDatagram<'a>,
    pub(crate) local: &'a IpAddr,
    pub(crate) sends: &'a VecDeque<PostedSend>,
    pub(crate) receives: ReceiveSource<'a>,
    pub(crate) current: &'a mut Option<PostedReceive>,
    /// The packet's PSN.
    pub(crate) psn: Psn,
    /// The index of the queue pair, and the step that its last placed byte waits for.
    pub(crate) qp: QpIndex,
    pub(crate) ticket: &'a mut u64,
    pub(crate) tally: &'a mut PathTotals,
}

impl PacketHost<'_> {
    fn owner(&self) -> (u32, CopyOwner) {
        (*self.pd, CopyOwner { qp: self.qp, after: *self.ticket })
    }

    fn change(&mut self, rkey: u32, addr: u64, change: AtomicChange) -> Result<u64, Nak> {
        let (before, placed) = self.regions.change(self.owner(), rkey, addr, (change, self.psn))?;
        self.count(placed, 8, true);
        Ok(before)
    }

    fn count(&mut self, placed: Placed, len: usize, last: bool) {
        self.tally.count(placed.route, len as u64, last);
        if let Some(ticket) = placed.ticket {
            *self.ticket = ticket;
        }
    }
}

/// Serial numbers in the queue are consecutive.
pub(crate) fn find_send(sends: &VecDeque<PostedSend>, serial: u64) -> Option<&PostedSend> {
    let first = sends.front()?.serial;
    sends.get(usize::try_from(serial.checked_sub(first)?).ok()?)
}

impl Host for PacketHost<'_> {
    fn check(&mut self, rkey: u32, addr: u64, len: u64, access: Access) -> Result<(), Nak> {
        self.regions.check_remote(Accessor { pd: *self.pd, qp: self.qp }, rkey, addr, len, access)
    }

    fn place_remote(&mut self, rkey: u32, addr: u64, len: usize, last: bool) -> Result<(), Nak> {
        debug_assert_eq!(len, self.payload.len());
        let placed = self.regions.place_remote(self.owner(), rkey, addr, self.payload, last)?;
        self.count(placed, len, last);
        Ok(())
    }

    fn copy_payload(&mut self, into: &mut [u8]) -> Result<(), LocalFault> {
        if into.len() != self.payload.len() {
            return Err(LocalFault);
        }
        self.payload.copy_to(into);
        Ok(())
    }

    fn select_receives(&mut self, number: u32) -> Result<(), Nak> {
        let ReceiveSource::Named(srqs, target) = &mut self.receives else { return Ok(()) };
        target.current = srqs.find_xrc(number, target.domain);
        let srq = target.current.and_then(|index| srqs.get(index)).ok_or(Nak::InvalidRequest)?;
        // Memory of the message is that of the queue's domain.
        (*self.pd, *self.receive_pd) = (srq.pd, srq.pd);
        Ok(())
    }

    fn take_receive(&mut self) -> Option<Receive> {
        let posted = self.receives.take()?;
        let receive = posted.receive;
        *self.current = Some(posted);
        Some(receive)
    }

    fn place_receive(&mut self, offset: u64, len: usize, last: bool) -> Result<(), LocalFault> {
        debug_assert_eq!(len, self.payload.len());
        let current = self.current.as_ref().ok_or(LocalFault)?;
        let place = (*self.receive_pd, self.owner().1);
        let placed = current.bytes.scatter(self.regions, place, offset, self.payload, last)?;
        self.count(placed, len, last);
        Ok(())
    }

    fn place_grh(&mut self) -> Result<(), LocalFault> {
        let grh = grh::of(self.datagram, *self.local);
        let current = self.current.as_ref().ok_or(LocalFault)?;
        let place = (*self.receive_pd, self.owner().1);
        let placed = current.bytes.scatter(self.regions, place, 0, (&grh).into(), self.payload.is_empty())?;
        if let Some(ticket) = placed.ticket {
            *self.ticket = ticket;
        }
        Ok(())
    }

    fn place_response(&mut self, serial: u64, offset: u64, len: usize, last: bool) -> Result<(), LocalFault> {
        debug_assert_eq!(len, self.payload.len());
        let send = find_send(self.sends, serial).ok_or(LocalFault)?;
        let place = self.owner();
        let placed = send.bytes.scatter(self.regions, place, offset, self.payload, last)?;
        self.count(placed, len, last);
        Ok(())
    }

    fn place_atomic(&mut self, serial: u64, original: u64) -> Result<(), LocalFault> {
        let bytes = original.to_ne_bytes();
        let send = find_send(self.sends, serial).ok_or(LocalFault)?;
        let placed = send.bytes.scatter(self.regions, self.owner(), 0, (&bytes).into(), true)?;
        self.count(placed, bytes.len(), true);
        Ok(())
    }

    fn compare_swap(&mut self, rkey: u32, addr: u64, compare: u64, swap: u64) -> Result<u64, Nak> {
        self.change(rkey, addr, AtomicChange::Swap { compare, swap })
    }

    fn fetch_add(&mut self, rkey: u32, addr: u64, add: u64) -> Result<u64, Nak> {
        self.change(rkey, addr, AtomicChange::Add(add))
    }

    fn flush(&mut self, rkey: u32, range: Option<(u64, u64)>) -> Result<(), Nak> {
        self.regions.flush(Accessor { pd: *self.pd, qp: self.qp }, rkey, range)
    }

    fn invalidate(&mut self, rkey: u32) -> Result<(), Nak> {
        // Memory windows only, as the standard requires: the owner of an ordinary region does not
        // expect a peer to invalidate it.
        self.regions.invalidate(Accessor { pd: *self.pd, qp: self.qp }, rkey)
    }
}
