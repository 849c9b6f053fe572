//! Memory regions: what a peer or the application named by a key, and with which rights.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use nobounce_memory::probe::RangeError;
use nobounce_memory::{AccessError, Window};
use nobounce_protocol::qp::{Access, LocalFault, Nak};

use super::device::Shared;

/// Keys that were given back and are not given out again for this many registrations.
const RETIRED_KEYS: usize = 4096;
/// Regions of one device.
pub(crate) const MAX_REGIONS: usize = 1 << 20;

/// Why memory could not be registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The range is not mapped, or not with the rights asked for.
    #[error("cannot register memory: {0}")]
    Range(#[from] RangeError),
    /// Remote write and atomics need local write.
    #[error("remote write and remote atomic access need local write access too")]
    Rights,
    /// There are too many regions.
    #[error("the device has {MAX_REGIONS} memory regions already: deregister some")]
    TooMany,
    /// The fault guard could not be installed.
    #[error("cannot guard registered memory against vanishing: {0}")]
    Guard(#[from] nobounce_memory::guard::InstallError),
    /// The device is gone.
    #[error("the device was opened before a fork: the child must open its own")]
    Forked,
}

impl RegisterError {
    /// The error number a verbs program expects.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Range(range) => range.errno(),
            Self::Rights => libc::EINVAL,
            Self::TooMany | Self::Guard(_) => libc::ENOMEM,
            Self::Forked => libc::EIO,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub(crate) window: Window,
    pub(crate) addr: u64,
    pub(crate) access: Access,
    pub(crate) pd: u32,
}

impl Region {
    fn offset(&self, addr: u64, len: u64) -> Option<usize> {
        let offset = addr.checked_sub(self.addr)?;
        let end = offset.checked_add(len)?;
        (end <= self.window.len() as u64).then(|| usize::try_from(offset).ok()).flatten()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Regions {
    table: HashMap<u32, Region>,
    retired: VecDeque<u32>,
    /// The region used last: bulk traffic asks for the same one again and again.
    recent: Option<(u32, Region)>,
    pub(crate) faults: u64,
    pub(crate) refused: u64,
}

impl Regions {
    pub(crate) fn insert(&mut self, region: Region) -> Result<u32, RegisterError> {
        if self.table.len() >= MAX_REGIONS {
            return Err(RegisterError::TooMany);
        }
        let key = loop {
            let key = random_u32();
            if key != 0 && !self.table.contains_key(&key) && !self.retired.contains(&key) {
                break key;
            }
        };
        self.table.insert(key, region);
        Ok(key)
    }

    pub(crate) fn remove(&mut self, key: u32) -> Option<Region> {
        self.recent = None;
        let region = self.table.remove(&key)?;
        if self.retired.len() == RETIRED_KEYS {
            self.retired.pop_front();
        }
        self.retired.push_back(key);
        Some(region)
    }

    fn find(&mut self, key: u32) -> Option<Region> {
        if let Some((recent, region)) = self.recent
            && recent == key
        {
            return Some(region);
        }
        let region = *self.table.get(&key)?;
        self.recent = Some((key, region));
        Some(region)
    }

    fn remote(
        &mut self,
        pd: u32,
        key: u32,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<(Region, usize), Nak> {
        let found = self
            .find(key)
            .filter(|region| region.pd == pd && region.access.contains(access))
            .and_then(|region| Some((region, region.offset(addr, len)?)));
        self.refused += u64::from(found.is_none());
        found.ok_or(Nak::RemoteAccess)
    }

    pub(crate) fn check_remote(
        &mut self,
        pd: u32,
        key: u32,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<(), Nak> {
        self.remote(pd, key, addr, len, access).map(|_| ())
    }

    pub(crate) fn store_remote(
        &mut self,
        pd: u32,
        key: u32,
        addr: u64,
        bytes: &[u8],
        last: bool,
    ) -> Result<(), Nak> {
        let (region, offset) = self.remote(pd, key, addr, bytes.len() as u64, Access::REMOTE_WRITE)?;
        let stored = store(&region, offset, bytes, last);
        self.judge(stored)
    }

    /// Loads what a peer reads, and carries `crc` on over it.
    pub(crate) fn load_remote(
        &mut self,
        pd: u32,
        key: u32,
        addr: u64,
        out: &mut [u8],
        crc: u32,
    ) -> Result<u32, Nak> {
        let (region, offset) = self.remote(pd, key, addr, out.len() as u64, Access::REMOTE_READ)?;
        let loaded = region.window.load_crc(offset, out, crc);
        self.judge(loaded)
    }

    pub(crate) fn compare_swap(
        &mut self,
        pd: u32,
        key: u32,
        addr: u64,
        old: u64,
        new: u64,
    ) -> Result<u64, Nak> {
        let (region, offset) = self.remote(pd, key, addr, 8, Access::REMOTE_ATOMIC)?;
        let done = region.window.compare_swap(offset, old, new);
        self.judge(done)
    }

    pub(crate) fn fetch_add(&mut self, pd: u32, key: u32, addr: u64, add: u64) -> Result<u64, Nak> {
        let (region, offset) = self.remote(pd, key, addr, 8, Access::REMOTE_ATOMIC)?;
        let done = region.window.fetch_add(offset, add);
        self.judge(done)
    }

    fn judge<T>(&mut self, done: Result<T, AccessError>) -> Result<T, Nak> {
        done.map_err(|error| {
            self.faults += u64::from(error.is_fault());
            if error.is_fault() { Nak::RemoteOperational } else { Nak::RemoteAccess }
        })
    }

    fn local(
        &mut self,
        pd: u32,
        key: u32,
        addr: u64,
        len: usize,
        access: Access,
    ) -> Result<(Region, usize), LocalFault> {
        self.find(key)
            .filter(|region| region.pd == pd && region.access.contains(access))
            .and_then(|region| Some((region, region.offset(addr, len as u64)?)))
            .ok_or(LocalFault)
    }

    /// Loads what we send, and carries `crc` on over it.
    pub(crate) fn load_local(
        &mut self,
        pd: u32,
        key: u32,
        addr: u64,
        out: &mut [u8],
        crc: u32,
    ) -> Result<u32, LocalFault> {
        let (region, offset) = self.local(pd, key, addr, out.len(), Access::empty())?;
        let loaded = region.window.load_crc(offset, out, crc);
        self.judge(loaded).map_err(|_| LocalFault)
    }

    pub(crate) fn store_local(
        &mut self,
        pd: u32,
        key: u32,
        addr: u64,
        bytes: &[u8],
        last: bool,
    ) -> Result<(), LocalFault> {
        let (region, offset) = self.local(pd, key, addr, bytes.len(), Access::LOCAL_WRITE)?;
        let stored = store(&region, offset, bytes, last);
        self.judge(stored).map_err(|_| LocalFault)
    }
}

fn store(region: &Region, offset: usize, bytes: &[u8], last: bool) -> Result<(), AccessError> {
    if last { region.window.store_last(offset, bytes) } else { region.window.store(offset, bytes) }
}

/// Unpredictable: a key is all that stands between a peer and the memory behind it.
pub(crate) fn random_u32() -> u32 {
    let mut bytes = [0_u8; 4];
    // SAFETY: four writable bytes. For so few the call neither blocks (after boot) nor returns short.
    unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    u32::from_ne_bytes(bytes)
}

/// A registered memory region. Dropping it deregisters: from then on no packet touches the memory.
#[derive(Debug)]
pub struct Mr {
    pub(crate) shared: Arc<Shared>,
    pub(crate) key: u32,
    pub(crate) addr: u64,
    pub(crate) len: u64,
}

impl Mr {
    /// The key for local scatter/gather lists.
    pub fn lkey(&self) -> u32 {
        self.key
    }

    /// The key for the peer.
    pub fn rkey(&self) -> u32 {
        self.key
    }

    /// The address of its first byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Its bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if let Some(mut engine) = self.shared.lock() {
            engine.core.regions.remove(self.key);
        }
    }
}
