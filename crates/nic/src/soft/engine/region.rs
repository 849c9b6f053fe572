//! Memory regions: what a peer or the application named by a key, and with which rights.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use nobounce_memory::AccessError;
use nobounce_memory::gpu::Gone;
use nobounce_memory::path::{Path, Paths};
use nobounce_memory::{Sink, Source};
use nobounce_protocol::qp::{Access, LocalFault, LocalWork, Nak};
use nobounce_protocol::wire::Psn;

use crate::soft::engine::memory_windows::{Asker, Windows};
use crate::soft::error::RegisterError;
use crate::soft::gpu::staging::{Owner, Stage};
use crate::soft::gpu::target::{Change, GpuTarget, LoadError, Message, PlaceError, Placed, Target};
use crate::soft::limits::MAX_REGIONS;
use crate::soft::tally::Route;

/// Keys that were given back and are not given out again for this many registrations.
const RETIRED_KEYS: usize = 4096;
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) target: Target,
    pub(crate) addr: u64,
    pub(crate) access: Access,
    pub(crate) pd: u32,
    /// That its memory is gone was said.
    told: AtomicBool,
}

impl Region {
    pub(crate) fn new(target: Target, addr: u64, access: Access, pd: u32) -> Self {
        Self { target, addr, access, pd, told: AtomicBool::new(false) }
    }

    /// Where the bytes lie, if all of them lie in it.
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
        // Once: a peer may go on asking.
        if !self.told.swap(true, Ordering::Relaxed) {
            tracing::warn!("a request for registered GPU memory was refused: {gone}");
        }
    }
}

trait Allows {
    /// The region, and where in it the bytes lie, if they may be used so.
    fn allows(&self, pd: u32, addr: u64, len: u64, access: Access) -> Option<(&Self, usize)>;
}

impl Allows for Arc<Region> {
    #[inline]
    fn allows(&self, pd: u32, addr: u64, len: u64, access: Access) -> Option<(&Self, usize)> {
        if self.pd != pd || !self.access.contains(access) {
            return None;
        }
        Some((self, self.living(addr, len)?))
    }
}

#[derive(Debug, Default)]
pub(crate) struct Table {
    regions: HashMap<u32, Arc<Region>>,
    retired: VecDeque<u32>,
    /// The region used last: bulk traffic asks for the same one again and again.
    recent: Option<(u32, Arc<Region>)>,
}

impl Table {
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

    /// The region, and where in it the bytes lie, if they may be used so.
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

    /// Calls `then` with the region that a peer may use so, and where in it the bytes lie. Its key may be that of a memory window: then
    /// nobody takes that back meanwhile.
    #[inline]
    fn with_allowed_remote<T>(
        &mut self,
        windows: &RwLock<Windows>,
        asker: Asker,
        (key, addr, len): (u32, u64, u64),
        access: Access,
        then: impl FnOnce(&Arc<Region>, usize) -> T,
    ) -> Option<T> {
        if self.find(key).is_some() {
            let (region, offset) = self.recent.as_ref()?.1.allows(asker.pd, addr, len, access)?;
            return Some(then(region, offset));
        }
        let windows = windows.read().unwrap_or_else(PoisonError::into_inner);
        let region = windows.allowed(asker, key, addr, len, access)?;
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

/// What one engine knows of the regions of its device: all engines know the same, each in a table of its own.
#[derive(Debug)]
pub(crate) struct Regions {
    /// The number of the engine.
    number: usize,
    pub(crate) table: Table,
    /// The device's memory windows. Only packets with such a key, and those who bind them, take this lock.
    windows: Arc<RwLock<Windows>>,
    pub(crate) stage: Stage,
    pub(crate) faults: u64,
    pub(crate) refused: u64,
    /// Why paths of regions so far were not direct.
    pub(crate) staged: BTreeSet<String>,
}

/// Reasons remembered for reports.
const MAX_REASONS: usize = 16;

impl Regions {
    /// None yet, for the engine with that number.
    pub(crate) fn new(number: usize, windows: Arc<RwLock<Windows>>) -> Self {
        Self {
            number,
            table: Table::default(),
            windows,
            stage: Stage::default(),
            faults: 0,
            refused: 0,
            staged: BTreeSet::new(),
        }
    }

    /// Knows the regions that another engine of the device knows.
    pub(crate) fn know_as(&mut self, other: &Self) {
        self.table.regions.clone_from(&other.table.regions);
    }

    /// Remembers why a path is not direct.
    pub(crate) fn note_paths(&mut self, paths: &Paths) {
        for path in [&paths.inbound, &paths.outbound] {
            if let Path::Staged(reason) = path
                && self.staged.len() < MAX_REASONS
            {
                self.staged.insert(reason.as_str().to_owned());
            }
        }
    }

    /// Finds a key for a new region, and knows it from now on. For the first engine alone; the others are [told](Self::put).
    pub(crate) fn insert(&mut self, region: Arc<Region>) -> Result<u32, RegisterError> {
        let Self { table: Table { regions, retired, .. }, windows, .. } = self;
        if regions.len() >= MAX_REGIONS {
            return Err(RegisterError::TooMany);
        }
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

    /// Puts a region behind the key; the one that was there.
    pub(crate) fn put(&mut self, key: u32, region: Arc<Region>) -> Option<Arc<Region>> {
        self.table.recent = None;
        self.table.regions.insert(key, region)
    }

    /// Forgets the region behind the key. Memory windows onto it are the caller's to [take back](Windows::leave_region), when all engines
    /// have forgotten it.
    pub(crate) fn remove(&mut self, key: u32) -> Option<Arc<Region>> {
        let Table { regions, retired, recent } = &mut self.table;
        *recent = None;
        let region = regions.remove(&key)?;
        if retired.len() == RETIRED_KEYS {
            retired.pop_front();
        }
        retired.push_back(key);
        Some(region)
    }

    /// Carries out a request that binds or takes back a memory window; false where it cannot be done.
    pub(crate) fn carry_out(&mut self, asker: Asker, work: &LocalWork) -> bool {
        let asker = asker.of_engine(self.number);
        let Self { table, windows, .. } = self;
        let mut windows = windows.write().unwrap_or_else(PoisonError::into_inner);
        windows.carry_out(asker, work, |key| table.regions.get(&key).cloned())
    }

    /// The peer takes back a memory window.
    pub(crate) fn invalidate(&mut self, asker: Asker, key: u32) -> Result<(), Nak> {
        let mut windows = self.windows.write().unwrap_or_else(PoisonError::into_inner);
        let done = windows.invalidate(asker.of_engine(self.number), key);
        self.refused += u64::from(!done);
        if done { Ok(()) } else { Err(Nak::RemoteAccess) }
    }

    /// A queue pair goes, and with it the memory windows that it bound.
    pub(crate) fn unbind_qp(&self, qp: u32) {
        let mut windows = self.windows.write().unwrap_or_else(PoisonError::into_inner);
        windows.leave_qp(Asker { pd: 0, qp }.of_engine(self.number));
    }

    pub(crate) fn check_remote(
        &mut self,
        asker: Asker,
        key: u32,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<(), Nak> {
        let asker = asker.of_engine(self.number);
        let place = (key, addr, len);
        let allowed =
            self.table.with_allowed_remote(&self.windows, asker, place, access, |_, _| ()).is_some();
        self.refused += u64::from(!allowed);
        if allowed { Ok(()) } else { Err(Nak::RemoteAccess) }
    }

    /// Places what a peer writes.
    pub(crate) fn place_remote(
        &mut self,
        (pd, owner): (u32, Owner),
        key: u32,
        addr: u64,
        bytes: Source<'_>,
        last: bool,
    ) -> Result<Placed, Nak> {
        let Self { table, windows, stage, faults, refused, .. } = self;
        let asker = Asker { pd, qp: owner.qp }.of_engine(self.number);
        let place = (key, addr, bytes.len() as u64);
        let placed =
            table.with_allowed_remote(windows, asker, place, Access::REMOTE_WRITE, |region, offset| {
                region.target.place(stage, owner, offset, bytes, last)
            });
        let Some(placed) = placed else {
            *refused += 1;
            return Err(Nak::RemoteAccess);
        };
        placed.map_err(|error| judge_place(faults, error))
    }

    /// Loads what a peer reads, and carries `crc` on over it.
    pub(crate) fn load_remote(
        &mut self,
        asker: Asker,
        (key, addr): (u32, u64),
        out: Sink<'_>,
        message: Message,
        crc: Option<u32>,
    ) -> Result<(Option<u32>, Route), GatherError> {
        let Self { table, windows, faults, refused, .. } = self;
        let asker = asker.of_engine(self.number);
        let place = (key, addr, out.len() as u64);
        let loaded =
            table.with_allowed_remote(windows, asker, place, Access::REMOTE_READ, |region, offset| {
                region.target.load(offset, out, message, crc)
            });
        let Some(loaded) = loaded else {
            *refused += 1;
            return Err(GatherError::Fault(Nak::RemoteAccess));
        };
        loaded.map_err(|error| judge_load(faults, error))
    }

    /// Calls `then` with the GPU memory that holds these bytes, where in it they lie, and the copy engines; `None` where they
    /// are not a GPU's. No rights are needed for what is our own.
    pub(crate) fn with_gpu<T>(
        &mut self,
        asker: Asker,
        (key, addr): (u32, u64),
        len: usize,
        access: Access,
        then: impl FnOnce(&GpuTarget, usize, &mut Stage) -> T,
    ) -> Result<Option<T>, Nak> {
        let asker = asker.of_engine(self.number);
        let Self { table, windows, stage, .. } = self;
        let look = |region: &Arc<Region>, offset| match &region.target {
            Target::Host(_) => None,
            Target::Gpu(gpu) => Some(then(gpu, offset, stage)),
        };
        let found = if access.is_empty() {
            table
                .allowed(asker.pd, key, addr, len as u64, access)
                .map(|(region, offset)| look(region, offset))
        } else {
            table.with_allowed_remote(windows, asker, (key, addr, len as u64), access, look)
        };
        found.ok_or(Nak::RemoteAccess)
    }

    pub(crate) fn change(
        &mut self,
        (pd, owner): (u32, Owner),
        key: u32,
        addr: u64,
        change: (Change, Psn),
    ) -> Result<(u64, Placed), Nak> {
        let asker = Asker { pd, qp: owner.qp }.of_engine(self.number);
        let Self { table, windows, stage, faults, refused, .. } = self;
        let place = (key, addr, 8);
        let changed =
            table.with_allowed_remote(windows, asker, place, Access::REMOTE_ATOMIC, |region, offset| {
                region.target.change(stage, owner, offset, change)
            });
        let Some(changed) = changed else {
            *refused += 1;
            return Err(Nak::RemoteAccess);
        };
        changed.map_err(|error| judge_place(faults, error))
    }

    /// Loads what we send, and carries `crc` on over it.
    pub(crate) fn load_local(
        &mut self,
        pd: u32,
        (key, addr): (u32, u64),
        out: Sink<'_>,
        message: Message,
        crc: Option<u32>,
    ) -> Result<(Option<u32>, Route), GatherError> {
        let Self { table, faults, .. } = self;
        let (region, offset) = table
            .allowed(pd, key, addr, out.len() as u64, Access::empty())
            .ok_or(GatherError::Fault(Nak::RemoteOperational))?;
        region.target.load(offset, out, message, crc).map_err(|error| judge_load(faults, error))
    }

    /// Places what arrived for us.
    pub(crate) fn place_local(
        &mut self,
        (pd, owner): (u32, Owner),
        key: u32,
        addr: u64,
        bytes: Source<'_>,
        last: bool,
    ) -> Result<Placed, LocalFault> {
        let Self { table, stage, faults, .. } = self;
        let (region, offset) =
            table.allowed(pd, key, addr, bytes.len() as u64, Access::LOCAL_WRITE).ok_or(LocalFault)?;
        region.target.place(stage, owner, offset, bytes, last).map_err(|error| {
            judge_place(faults, error);
            LocalFault
        })
    }
}

impl Regions {
    /// A message ended in other memory, but began in this one.
    pub(crate) fn announce(&mut self, pd: u32, key: u32) -> Result<(), LocalFault> {
        let region = self.table.find(key).filter(|region| region.pd == pd).ok_or(LocalFault)?;
        region.target.announce().map_err(|_| LocalFault)
    }
}

fn judge_place(faults: &mut u64, error: PlaceError) -> Nak {
    match error {
        PlaceError::Access(error) => judge(faults, &error),
        PlaceError::Ended => Nak::RemoteAccess,
        PlaceError::Stage(_) => {
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

/// Unpredictable: a key is all that stands between a peer and the memory behind it.
pub(crate) fn random_u32() -> u32 {
    let mut bytes = [0_u8; 4];
    // SAFETY: four writable bytes. For so few the call neither blocks (after boot) nor returns short.
    unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    u32::from_ne_bytes(bytes)
}
