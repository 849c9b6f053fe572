//! What the protocol may do with memory while it handles one packet.

use std::collections::VecDeque;

use nobounce_protocol::qp::{Access, Host, LocalFault, Nak, Receive};

use super::region::Regions;
use super::scatter::Bytes;

/// A posted send request's bytes, by serial number.
#[derive(Debug)]
pub(crate) struct PostedSend {
    pub(crate) serial: u64,
    pub(crate) bytes: Bytes,
}

/// A posted receive.
#[derive(Debug)]
pub(crate) struct PostedReceive {
    pub(crate) receive: Receive,
    pub(crate) bytes: Bytes,
}

/// The queues and regions of one queue pair, with the packet at hand.
#[derive(Debug)]
pub(crate) struct PacketHost<'a> {
    pub(crate) regions: &'a mut Regions,
    pub(crate) pd: u32,
    pub(crate) payload: &'a [u8],
    pub(crate) sends: &'a VecDeque<PostedSend>,
    pub(crate) receives: &'a mut VecDeque<PostedReceive>,
    pub(crate) current: &'a mut Option<PostedReceive>,
    pub(crate) placed: u64,
}

/// Serial numbers in the queue are consecutive.
pub(crate) fn find_send(sends: &VecDeque<PostedSend>, serial: u64) -> Option<&PostedSend> {
    let first = sends.front()?.serial;
    sends.get(usize::try_from(serial.checked_sub(first)?).ok()?)
}

impl Host for PacketHost<'_> {
    fn check(&mut self, rkey: u32, addr: u64, len: u64, access: Access) -> Result<(), Nak> {
        self.regions.check_remote(self.pd, rkey, addr, len, access)
    }

    fn place_remote(&mut self, rkey: u32, addr: u64, len: usize, last: bool) -> Result<(), Nak> {
        debug_assert_eq!(len, self.payload.len());
        self.placed += len as u64;
        self.regions.store_remote(self.pd, rkey, addr, self.payload, last)
    }

    fn take_receive(&mut self) -> Option<Receive> {
        let posted = self.receives.pop_front()?;
        let receive = posted.receive;
        *self.current = Some(posted);
        Some(receive)
    }

    fn place_receive(&mut self, offset: u64, len: usize, last: bool) -> Result<(), LocalFault> {
        debug_assert_eq!(len, self.payload.len());
        self.placed += len as u64;
        let current = self.current.as_ref().ok_or(LocalFault)?;
        current.bytes.scatter(self.regions, self.pd, offset, self.payload, last)
    }

    fn place_response(&mut self, serial: u64, offset: u64, len: usize, last: bool) -> Result<(), LocalFault> {
        debug_assert_eq!(len, self.payload.len());
        self.placed += len as u64;
        let send = find_send(self.sends, serial).ok_or(LocalFault)?;
        send.bytes.scatter(self.regions, self.pd, offset, self.payload, last)
    }

    fn place_atomic(&mut self, serial: u64, original: u64) -> Result<(), LocalFault> {
        self.placed += 8;
        let bytes = original.to_ne_bytes();
        let send = find_send(self.sends, serial).ok_or(LocalFault)?;
        send.bytes.scatter(self.regions, self.pd, 0, &bytes, true)
    }

    fn compare_swap(&mut self, rkey: u32, addr: u64, compare: u64, swap: u64) -> Result<u64, Nak> {
        self.regions.compare_swap(self.pd, rkey, addr, compare, swap)
    }

    fn fetch_add(&mut self, rkey: u32, addr: u64, add: u64) -> Result<u64, Nak> {
        self.regions.fetch_add(self.pd, rkey, addr, add)
    }

    fn invalidate(&mut self, rkey: u32) -> Result<(), Nak> {
        // The standard lets a peer invalidate memory windows and fast-registered regions only; we have neither yet,
        // and an ordinary region that could be taken away by a peer would surprise its owner.
        self.regions.check_remote(self.pd, rkey, 0, 0, Access::empty()).and(Err(Nak::RemoteAccess))
    }
}
