//! Memory regions: the memory and rights behind each key.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use nobounce_memory::AccessError;
use nobounce_memory::gpu::Gone;
use nobounce_memory::path::{Path, Paths};
use nobounce_memory::{Sink, Source};
use nobounce_protocol::qp::{Access, LocalFault, LocalWork, Nak};
use nobounce_protocol::wire::Psn;

use crate::process::random::random_u32;
use crate::soft::engine::memory_windows::{Accessor, DeviceAccessor, Windows};
use crate::soft::error::RegisterError;
use crate::soft::gpu::staging::{CopyOwner, Staging};
use crate::soft::gpu::target::{
    AtomicChange, GatheredMessage, GpuTarget, LoadError, PlaceError, Placed, Target,
};
use crate::soft::limits::MAX_REGIONS;
use crate::soft::qp_index::QpIndex;
use crate::tally::BytePath;

/// Released keys are not reused for this many registrations.
const RETIRED_KEYS: usize = 4096;
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) target: Target,
    pub(crate) addr: u64,
    pub(crate) access: Access,
    pub(crate) pd: u32,
    /// The loss of its memory was logged.
    told: AtomicBool,
}

impl Region {
    pub(crate) fn new(target: Target, addr: u64, access: Access, pd: u32) -> Self {
        Self { target, addr, access, pd, told: AtomicBool::new(false) }
    }

    /// The offset of the bytes, if all of them lie in the region.
    pub(crate) fn offset(&self, addr: u64, len: u64) -> Option<usize> {
        let offset = addr.checked_sub(self.addr)?;
        let end = offset.checked_add(len)?;
        (end <= self.target.len()).then(|| usize::try_from(offset).ok()).flatten()
    }

    /// The same, unless their owner has freed them.
    #[inline]
    fn living(&self, addr: u64, len: u64) -> Option<usize> {
        let offset = self.offset(addr, len)?;
        match self.target.ended_at(offset, len) {
            None => Some(offset),
            Some(gone) => {
                self.refuse(&gone);
                None
            }
        }
    }

    #[cold]
    fn refuse(&self, gone: &Gone) {
        // Once: a peer may repeat its request.
        if !self.told.swap(true, Ordering::Relaxed) {
            tracing::warn!("a request for registered GPU memory was refused: {gone}");
        }
    }
}

trait Allows {
    /// The region and the offset of the bytes in it, if this access is allowed.
    fn allows(&self, pd: u32, addr: u64, len: u64, access: Access) -> Option<(&Self, usize)>;
}

impl Allows for Arc<Region> {
    #[inline]
    fn allows(&self, pd: u32, addr: u64, len: u64, access: Access) -> Option<(&Self, usize)> {
        let is_of = self.pd == pd || pd == Accessor::ANY_PD;
        if !is_of || !self.access.contains(access) {
            return None;
        }
        Some((self, self.living(addr, len)?))
    }
}

#[derive(Debug, Default)]
pub(crate) struct RegionTable {
    regions: HashMap<u32, Arc<Region>>,
    retired: VecDeque<u32>,
    /// The region used last: bulk traffic uses the same one repeatedly.
    recent: Option<(u32, Arc<Region>)>,
}

impl RegionTable {
    fn find(&mut self, key: u32) -> Option<&Arc<Region>> {
        if self.recent.as_ref().is_none_or(|(recent, _)| *recent != key) {
            self.recent = Some((key, self.regions.get(&key)?.clone()));
        }
        self.recent.as_ref().map(|(_, region)| region)
    }

    /// Whether a key is, or was lately, a region's.
    pub(crate) fn knows(&self, key: u32) -> bool {
        self.regions.contains_key(&key) || self.retired.contains(&key)
    }

    /// The region and the offset of the bytes in it, if this access is allowed.
    fn allowed(
        &mut self,
        pd: u32,
        key: u32,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Option<(&Arc<Region>, usize)> {
        self.find(key).and_then(|region| region.allows(pd, addr, len, access))
    }

    /// Calls `then` with the region that a peer may access this way, and the offset of the bytes in
    /// it. The key may be that of a memory window, which cannot be invalidated meanwhile.
    #[inline]
    fn with_allowed_remote<T>(
        &mut self,
        windows: &RwLock<Windows>,
        accessor: DeviceAccessor,
        (key, addr, len): (u32, u64, u64),
        access: Access,
        then: impl FnOnce(&Arc<Region>, usize) -> T,
    ) -> Option<T> {
        if self.find(key).is_some() {
            let (region, offset) = self.recent.as_ref()?.1.allows(accessor.pd, addr, len, access)?;
            return Some(then(region, offset));
        }
        let windows = windows.read().unwrap_or_else(PoisonError::into_inner);
        let region = windows.allowed(accessor, key, addr, len, access)?;
        let offset = region.living(addr, len)?;
        Some(then(region, offset))
    }
}

/// Why bytes could not be gathered right now.
#[derive(Clone, Debug)]
pub(crate) enum GatherError {
    /// A key, a range or a right is wrong, or the memory is gone.
    Fault(Nak),
    /// The copy engine must fetch them.
    Fetch,
}

/// One engine's table of its device's regions: all engines hold the same ones, each in its own
/// table.
#[derive(Debug)]
pub(crate) struct Regions {
    /// The number of the engine.
    number: usize,
    pub(crate) table: RegionTable,
    /// The device's memory windows. Only packets with a window's key, and bind requests, take this
    /// lock.
    windows: Arc<RwLock<Windows>>,
    pub(crate) staging: Staging,
    pub(crate) faults: u64,
    pub(crate) refused: u64,
    /// Reasons why paths of regions so far were not direct.
    pub(crate) staged: BTreeSet<String>,
}

/// Reasons remembered for reports.
const MAX_REASONS: usize = 16;

impl Regions {
    /// An empty table, for the engine with that number.
    pub(crate) fn new(number: usize, windows: Arc<RwLock<Windows>>) -> Self {
        Self {
            number,
            table: RegionTable::default(),
            windows,
            staging: Staging::default(),
            faults: 0,
            refused: 0,
            staged: BTreeSet::new(),
        }
    }

    /// Copies the regions of another engine of the device.
    pub(crate) fn know_as(&mut self, other: &Self) {
        self.table.regions.clone_from(&other.table.regions);
    }

    /// Records why a path is not direct.
    pub(crate) fn note_paths(&mut self, paths: &Paths) {
        for path in [&paths.inbound, &paths.outbound] {
            if let Path::Staged(reason) = path
                && self.staged.len() < MAX_REASONS
            {
                self.staged.insert(reason.as_str().to_owned());
            }
        }
    }

    /// Allocates a key for a new region and inserts it. For the first engine alone; the others get
    /// it by [`put`](Self::put).
    pub(crate) fn insert(&mut self, region: Arc<Region>) -> Result<u32, RegisterError> {
        let Self { table: RegionTable { regions, retired, .. }, windows, .. } = self;
        if regions.len() >= MAX_REGIONS {
            return Err(RegisterError::TooMany);
        }
        regions.try_reserve(1).map_err(|_| RegisterError::TooMany)?;
        let windows = windows.read().unwrap_or_else(PoisonError::into_inner);
        let key = loop {
            let key = random_u32();
            if key != 0 && !regions.contains_key(&key) && !retired.contains(&key) && !windows.owns(key) {
                break key;
            }
        };
        regions.insert(key, region);
        Ok(key)
    }

    pub(crate) fn get(&self, key: u32) -> Option<Arc<Region>> {
        self.table.regions.get(&key).cloned()
    }

    /// Puts a region behind the key; returns the previous one.
    pub(crate) fn put(&mut self, key: u32, region: Arc<Region>) -> Option<Arc<Region>> {
        self.table.recent = None;
        self.table.regions.insert(key, region)
    }

    /// Removes the region behind the key. The caller [unbinds](Windows::leave_region) its memory
    /// windows when all engines have removed it.
    pub(crate) fn remove(&mut self, key: u32) -> Option<Arc<Region>> {
        let RegionTable { regions, retired, recent } = &mut self.table;
        *recent = None;
        let region = regions.remove(&key)?;
        if retired.len() == RETIRED_KEYS {
            retired.pop_front();
        }
        retired.push_back(key);
        Some(region)
    }

    /// Executes a request that binds or invalidates a memory window; false if that is not possible.
    pub(crate) fn carry_out(&mut self, accessor: Accessor, work: &LocalWork) -> bool {
        let accessor = accessor.of_engine(self.number);
        let Self { table, windows, .. } = self;
        let mut windows = windows.write().unwrap_or_else(PoisonError::into_inner);
        windows.carry_out(accessor, work, |key| table.regions.get(&key).cloned())
    }

    /// The peer invalidates a memory window.
    pub(crate) fn invalidate(&mut self, accessor: Accessor, key: u32) -> Result<(), Nak> {
        let mut windows = self.windows.write().unwrap_or_else(PoisonError::into_inner);
        let done = windows.invalidate(accessor.of_engine(self.number), key);
        self.refused += u64::from(!done);
        if done { Ok(()) } else { Err(Nak::RemoteAccess) }
    }

    /// Makes what was placed in a range of the region, or in all of it, visible to all. (Bytes that
    /// a copy engine places hold the response back by themselves.)
    pub(crate) fn flush(
        &mut self,
        accessor: Accessor,
        key: u32,
        range: Option<(u64, u64)>,
    ) -> Result<(), Nak> {
        let accessor = accessor.of_engine(self.number);
        let (addr, len) = match range {
            Some(range) => range,
            None => match self.table.find(key) {
                Some(region) => (region.addr, 0),
                None => (self.windows.read().unwrap_or_else(PoisonError::into_inner).base(key), 0),
            },
        };
        let announce = |region: &Arc<Region>, _| region.target.announce();
        let place = (key, addr, len);
        let access = Access::FLUSH_GLOBAL;
        let flushed = self.table.with_allowed_remote(&self.windows, accessor, place, access, announce);
        match flushed {
            Some(Ok(())) => Ok(()),
            Some(Err(_)) => Err(Nak::RemoteOperational),
            None => {
                self.refused += 1;
                Err(Nak::RemoteAccess)
            }
        }
    }

    /// A queue pair is destroyed: unbinds its memory windows.
    pub(crate) fn unbind_qp(&self, qp: QpIndex) {
        let mut windows = self.windows.write().unwrap_or_else(PoisonError::into_inner);
        windows.leave_qp(Accessor { pd: 0, qp }.of_engine(self.number));
    }

    pub(crate) fn check_remote(
        &mut self,
        accessor: Accessor,
        key: u32,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<(), Nak> {
        let accessor = accessor.of_engine(self.number);
        let place = (key, addr, len);
        let allowed =
            self.table.with_allowed_remote(&self.windows, accessor, place, access, |_, _| ()).is_some();
        self.refused += u64::from(!allowed);
        if allowed { Ok(()) } else { Err(Nak::RemoteAccess) }
    }

    /// Places a peer's WRITE.
    pub(crate) fn place_remote(
        &mut self,
        (pd, owner): (u32, CopyOwner),
        key: u32,
        addr: u64,
        bytes: Source<'_>,
        last: bool,
    ) -> Result<Placed, Nak> {
        let Self { table, windows, staging, faults, refused, .. } = self;
        let accessor = Accessor { pd, qp: owner.qp }.of_engine(self.number);
        let place = (key, addr, bytes.len() as u64);
        let placed =
            table.with_allowed_remote(windows, accessor, place, Access::REMOTE_WRITE, |region, offset| {
                region.target.place(staging, owner, offset, bytes, last)
            });
        let Some(placed) = placed else {
            *refused += 1;
            return Err(Nak::RemoteAccess);
        };
        placed.map_err(|error| judge_place(faults, error))
    }

    /// Loads bytes for a peer's READ, and extends `crc` over them.
    pub(crate) fn load_remote(
        &mut self,
        accessor: Accessor,
        (key, addr): (u32, u64),
        out: Sink<'_>,
        message: GatheredMessage,
        crc: Option<u32>,
    ) -> Result<(Option<u32>, BytePath), GatherError> {
        let Self { table, windows, faults, refused, .. } = self;
        let accessor = accessor.of_engine(self.number);
        let place = (key, addr, out.len() as u64);
        let loaded =
            table.with_allowed_remote(windows, accessor, place, Access::REMOTE_READ, |region, offset| {
                region.target.load(offset, out, message, crc)
            });
        let Some(loaded) = loaded else {
            *refused += 1;
            return Err(GatherError::Fault(Nak::RemoteAccess));
        };
        loaded.map_err(|error| judge_load(faults, error))
    }

    /// Calls `then` with the GPU memory that holds these bytes, their offset in it, and the copy
    /// engines. `None` if they are not in GPU memory. Local access needs no rights.
    pub(crate) fn with_gpu<T>(
        &mut self,
        accessor: Accessor,
        (key, addr): (u32, u64),
        len: usize,
        access: Access,
        then: impl FnOnce(&GpuTarget, usize, &mut Staging) -> T,
    ) -> Result<Option<T>, Nak> {
        let accessor = accessor.of_engine(self.number);
        let Self { table, windows, staging, .. } = self;
        let look = |region: &Arc<Region>, offset| match &region.target {
            Target::Host(_) | Target::Null => None,
            Target::Gpu(gpu) => Some(then(gpu, offset, staging)),
        };
        let found = if access.is_empty() {
            table
                .allowed(accessor.pd, key, addr, len as u64, access)
                .map(|(region, offset)| look(region, offset))
        } else {
            table.with_allowed_remote(windows, accessor, (key, addr, len as u64), access, look)
        };
        found.ok_or(Nak::RemoteAccess)
    }

    pub(crate) fn change(
        &mut self,
        (pd, owner): (u32, CopyOwner),
        key: u32,
        addr: u64,
        change: (AtomicChange, Psn),
    ) -> Result<(u64, Placed), Nak> {
        let accessor = Accessor { pd, qp: owner.qp }.of_engine(self.number);
        let Self { table, windows, staging, faults, refused, .. } = self;
        let place = (key, addr, 8);
        let changed =
            table.with_allowed_remote(windows, accessor, place, Access::REMOTE_ATOMIC, |region, offset| {
                region.target.change(staging, owner, offset, change)
            });
        let Some(changed) = changed else {
            *refused += 1;
            return Err(Nak::RemoteAccess);
        };
        changed.map_err(|error| judge_place(faults, error))
    }

    /// Loads bytes to send, and extends `crc` over them.
    pub(crate) fn load_local(
        &mut self,
        pd: u32,
        (key, addr): (u32, u64),
        out: Sink<'_>,
        message: GatheredMessage,
        crc: Option<u32>,
    ) -> Result<(Option<u32>, BytePath), GatherError> {
        let Self { table, faults, .. } = self;
        let (region, offset) = table
            .allowed(pd, key, addr, out.len() as u64, Access::empty())
            .ok_or(GatherError::Fault(Nak::RemoteOperational))?;
        region.target.load(offset, out, message, crc).map_err(|error| judge_load(faults, error))
    }

    /// Places received bytes.
    pub(crate) fn place_local(
        &mut self,
        (pd, owner): (u32, CopyOwner),
        key: u32,
        addr: u64,
        bytes: Source<'_>,
        last: bool,
    ) -> Result<Placed, LocalFault> {
        let Self { table, staging, faults, .. } = self;
        let (region, offset) =
            table.allowed(pd, key, addr, bytes.len() as u64, Access::LOCAL_WRITE).ok_or(LocalFault)?;
        region.target.place(staging, owner, offset, bytes, last).map_err(|error| {
            judge_place(faults, error);
            LocalFault
        })
    }
}

impl Regions {
    /// A message began in this memory, but ended in another one.
    pub(crate) fn announce(&mut self, pd: u32, key: u32) -> Result<(), LocalFault> {
        let region = self.table.find(key).filter(|region| region.pd == pd).ok_or(LocalFault)?;
        region.target.announce().map_err(|_| LocalFault)
    }
}

fn judge_place(faults: &mut u64, error: PlaceError) -> Nak {
    match error {
        PlaceError::Access(error) => judge(faults, &error),
        PlaceError::Ended => Nak::RemoteAccess,
        PlaceError::Staging(_) => {
            *faults += 1;
            Nak::RemoteOperational
        }
    }
}

fn judge_load(faults: &mut u64, error: LoadError) -> GatherError {
    match error {
        LoadError::Access(error) => GatherError::Fault(judge(faults, &error)),
        LoadError::Ended => GatherError::Fault(Nak::RemoteAccess),
        LoadError::Fetch => GatherError::Fetch,
    }
}

fn judge(faults: &mut u64, error: &AccessError) -> Nak {
    *faults += u64::from(error.is_fault());
    if error.is_fault() { Nak::RemoteOperational } else { Nak::RemoteAccess }
}
