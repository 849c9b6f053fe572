//! The memory of one endpoint: plain bytes, regions with keys and rights, a receive queue.

use std::collections::{HashMap, VecDeque};

use crate::qp::{Access, GRH_LEN, Host, LocalFault, Nak, Payload, Receive};

/// Memory a peer may reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its key, for the peer.
    pub rkey: u32,
    /// Its first address.
    pub addr: u64,
    /// Its bytes.
    pub len: u64,
    /// What the peer may do with it.
    pub access: Access,
}

#[derive(Clone, Copy, Debug)]
struct PostedReceive {
    wr_id: u64,
    addr: u64,
    len: u64,
}

/// The memory and the receive queue of one endpoint.
///
/// Addresses begin at [`Memory::BASE`], so that 0 is never valid.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    bytes: Vec<u8>,
    regions: Vec<Region>,
    receives: VecDeque<PostedReceive>,
    current: Option<PostedReceive>,
    /// Where the local bytes of each send request are, by serial number.
    locals: HashMap<u64, u64>,
    /// Atomic operations carried out.
    atomics: u64,
    /// Memory that cannot be accessed any more, as if it had been unmapped.
    hole: Option<(u64, u64)>,
}

impl Memory {
    /// What stands where the IP header of a datagram would.
    pub const GRH_BYTE: u8 = 0x6b;
    /// The first address.
    pub const BASE: u64 = 0x10_0000;

    /// Zeroed memory without regions.
    pub fn new(len: usize) -> Self {
        Self { bytes: vec![0; len], ..Self::default() }
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The `len` bytes at `addr`, if they are there.
    pub fn read(&self, addr: u64, len: u64) -> Option<&[u8]> {
        let range = self.range(addr, len)?;
        self.bytes.get(range)
    }

    /// The `len` bytes at `addr`, to be changed.
    pub fn at(&mut self, addr: u64, len: u64) -> Option<&mut [u8]> {
        let range = self.range(addr, len)?;
        self.bytes.get_mut(range)
    }

    /// Fills everything with bytes that tell their place.
    pub fn fill(&mut self, seed: u8) {
        for (i, byte) in self.bytes.iter_mut().enumerate() {
            *byte = u8::try_from((i * 7 + i / 251) & 0xff).unwrap_or(0) ^ seed;
        }
    }

    /// Lets the peer reach memory.
    pub fn register(&mut self, region: Region) {
        self.regions.push(region);
    }

    /// Takes a region back.
    pub fn deregister(&mut self, rkey: u32) {
        self.regions.retain(|r| r.rkey != rkey);
    }

    /// The regions, in the order they were registered.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Makes memory inaccessible, as if it had been unmapped.
    pub fn unmap(&mut self, addr: u64, len: u64) {
        self.hole = Some((addr, len));
    }

    /// Posts a receive.
    pub fn post_receive(&mut self, wr_id: u64, addr: u64, len: u64) {
        self.receives.push_back(PostedReceive { wr_id, addr, len });
    }

    /// Receives that wait.
    pub fn receives(&self) -> usize {
        self.receives.len()
    }

    /// Atomic operations that were carried out here.
    pub const fn atomics(&self) -> u64 {
        self.atomics
    }

    /// The local bytes of send request `serial` are at `addr`.
    pub(crate) fn set_local(&mut self, serial: u64, addr: u64) {
        self.locals.insert(serial, addr);
    }

    /// Takes the receives that are left, as an error flushes them.
    pub(crate) fn flush_receives(&mut self) -> impl Iterator<Item = u64> + '_ {
        self.receives.drain(..).map(|r| r.wr_id)
    }

    /// The bytes of a packet's payload.
    ///
    /// # Errors
    /// They cannot be read.
    pub(crate) fn gather(&self, payload: &Payload) -> Result<&[u8], LocalFault> {
        match *payload {
            Payload::None => Ok(&[]),
            Payload::Request { serial, offset, len, .. } => {
                let addr = self.locals.get(&serial).ok_or(LocalFault)?.wrapping_add(offset);
                self.read(addr, u64::from(len)).ok_or(LocalFault)
            }
            Payload::Region { rkey, addr, len, .. } => {
                self.check_region(rkey, addr, u64::from(len), Access::REMOTE_READ).map_err(|_| LocalFault)?;
                self.read(addr, u64::from(len)).ok_or(LocalFault)
            }
        }
    }

    fn range(&self, addr: u64, len: u64) -> Option<std::ops::Range<usize>> {
        if let Some((hole, hole_len)) = self.hole
            && addr < hole.saturating_add(hole_len)
            && hole < addr.saturating_add(len)
        {
            return None;
        }
        let start = usize::try_from(addr.checked_sub(Self::BASE)?).ok()?;
        let end = start.checked_add(usize::try_from(len).ok()?)?;
        (end <= self.bytes.len()).then_some(start..end)
    }

    fn check_region(&self, rkey: u32, addr: u64, len: u64, access: Access) -> Result<(), Nak> {
        let region = self.regions.iter().find(|r| r.rkey == rkey).ok_or(Nak::RemoteAccess)?;
        let end = addr.checked_add(len).ok_or(Nak::RemoteAccess)?;
        let inside = addr >= region.addr && end <= region.addr + region.len;
        if inside && region.access.contains(access) { Ok(()) } else { Err(Nak::RemoteAccess) }
    }

    fn put(&mut self, addr: u64, data: &[u8]) -> Result<(), LocalFault> {
        self.at(addr, data.len() as u64).ok_or(LocalFault)?.copy_from_slice(data);
        Ok(())
    }

    fn word(&mut self, rkey: u32, addr: u64) -> Result<u64, Nak> {
        self.check_region(rkey, addr, 8, Access::REMOTE_ATOMIC)?;
        let bytes = self.read(addr, 8).and_then(|b| b.try_into().ok()).ok_or(Nak::RemoteOperational)?;
        self.atomics += 1;
        Ok(u64::from_le_bytes(bytes))
    }
}

/// [`Memory`] while a packet is handled: the packet's payload belongs to it.
#[derive(Debug)]
pub struct Handling<'a> {
    /// The memory.
    pub memory: &'a mut Memory,
    /// The payload of the packet.
    pub payload: &'a [u8],
}

impl Handling<'_> {
    fn piece(&self, len: usize) -> Result<&[u8], LocalFault> {
        self.payload.get(..len).ok_or(LocalFault)
    }
}

impl Host for Handling<'_> {
    fn check(&mut self, rkey: u32, addr: u64, len: u64, access: Access) -> Result<(), Nak> {
        self.memory.check_region(rkey, addr, len, access)
    }

    fn place_remote(&mut self, rkey: u32, addr: u64, len: usize, _last: bool) -> Result<(), Nak> {
        self.memory.check_region(rkey, addr, len as u64, Access::REMOTE_WRITE)?;
        let piece = self.payload.get(..len).ok_or(Nak::RemoteOperational)?;
        self.memory.put(addr, piece).map_err(|_| Nak::RemoteAccess)
    }

    fn copy_payload(&mut self, into: &mut [u8]) -> Result<(), LocalFault> {
        into.copy_from_slice(self.piece(into.len())?);
        Ok(())
    }

    fn take_receive(&mut self) -> Option<Receive> {
        let receive = self.memory.receives.pop_front()?;
        self.memory.current = Some(receive);
        Some(Receive { wr_id: receive.wr_id, capacity: receive.len })
    }

    fn place_receive(&mut self, offset: u64, len: usize, _last: bool) -> Result<(), LocalFault> {
        let receive = self.memory.current.ok_or(LocalFault)?;
        if offset + len as u64 > receive.len {
            return Err(LocalFault);
        }
        let piece = self.payload.get(..len).ok_or(LocalFault)?;
        self.memory.put(receive.addr + offset, piece)
    }

    fn place_grh(&mut self) -> Result<(), LocalFault> {
        let receive = self.memory.current.filter(|receive| receive.len >= GRH_LEN).ok_or(LocalFault)?;
        self.memory.at(receive.addr, GRH_LEN).ok_or(LocalFault)?.fill(Memory::GRH_BYTE);
        Ok(())
    }

    fn place_response(
        &mut self,
        serial: u64,
        offset: u64,
        len: usize,
        _last: bool,
    ) -> Result<(), LocalFault> {
        let addr = *self.memory.locals.get(&serial).ok_or(LocalFault)?;
        let piece = self.piece(len)?.to_vec();
        self.memory.put(addr.wrapping_add(offset), &piece)
    }

    fn place_atomic(&mut self, serial: u64, original: u64) -> Result<(), LocalFault> {
        let addr = *self.memory.locals.get(&serial).ok_or(LocalFault)?;
        self.memory.put(addr, &original.to_le_bytes())
    }

    fn compare_swap(&mut self, rkey: u32, addr: u64, compare: u64, swap: u64) -> Result<u64, Nak> {
        let original = self.memory.word(rkey, addr)?;
        if original == compare {
            self.memory.put(addr, &swap.to_le_bytes()).map_err(|_| Nak::RemoteOperational)?;
        }
        Ok(original)
    }

    fn fetch_add(&mut self, rkey: u32, addr: u64, add: u64) -> Result<u64, Nak> {
        let original = self.memory.word(rkey, addr)?;
        self.memory
            .put(addr, &original.wrapping_add(add).to_le_bytes())
            .map_err(|_| Nak::RemoteOperational)?;
        Ok(original)
    }

    fn flush(&mut self, rkey: u32, range: Option<(u64, u64)>) -> Result<(), Nak> {
        let (addr, len) = match range {
            Some(range) => range,
            None => self.memory.regions.iter().find(|r| r.rkey == rkey).map_or((0, 0), |r| (r.addr, 0)),
        };
        self.memory.check_region(rkey, addr, len, Access::FLUSH_GLOBAL)
    }

    fn invalidate(&mut self, rkey: u32) -> Result<(), Nak> {
        if self.memory.regions.iter().all(|r| r.rkey != rkey) {
            return Err(Nak::RemoteAccess);
        }
        self.memory.deregister(rkey);
        Ok(())
    }
}
