//! Memory registration: checks and preparations before a region gets its key or new memory.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use nobounce_memory::gpu::calibration::{Calibration, USUAL_CROSSOVER};
use nobounce_memory::gpu::{GpuMemory, GpuOptions};
use nobounce_memory::path::{Mechanism, Path, Paths};
use nobounce_memory::unmap_watch::{self, WatchedRange};
use nobounce_memory::{Window, guard, page_size, probe};
use nobounce_protocol::qp::Access;

use crate::soft::engine::Core;
use crate::soft::engine::region::{Region, Regions};
use crate::soft::error::RegisterError;
use crate::soft::gpu::copier::{Copier, Copies};
use crate::soft::gpu::copiers::{ContextCopier, ContextKey, CopierIndex};
use crate::soft::gpu::target::{GpuTarget, HostTarget, Target};
use crate::soft::limits::DeviceLimits;
use crate::soft::objects::device::{Pd, Shared};
use crate::soft::objects::mr::Mr;

/// Changes to a region; `None` leaves a property unchanged.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rereg<'a> {
    /// The domain it belongs to.
    pub pd: Option<&'a Pd>,
    /// The memory behind it.
    pub memory: Option<NewMemory<'a>>,
    /// Its access rights.
    pub access: Option<Access>,
}

/// New memory for a region. Requests then use the memory's own address.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum NewMemory<'a> {
    /// As for [`Pd::register`].
    Host { addr: *mut u8, len: usize },
    /// As for [`Pd::register_gpu`].
    Gpu { addr: u64, len: usize, options: &'a GpuOptions },
}

impl Pd {
    /// Registers `len` bytes at `addr`. A region of 0 bytes is valid, too.
    ///
    /// # Safety
    /// Until the region is dropped, the device and peers read the memory and, as `access` allows,
    /// write it. No Rust reference to it may be live when that matters. (It may be unmapped
    /// meanwhile; then requests fail.)
    ///
    /// # Errors
    /// The range is not mapped with these rights (EFAULT), or the rights contradict each other
    /// (EINVAL).
    pub unsafe fn register(&self, addr: *mut u8, len: usize, access: Access) -> Result<Mr, RegisterError> {
        check_rights(access)?;
        // SAFETY: the caller guarantees the requirements of `register`.
        self.insert(unsafe { PreparedMemory::host(addr, len, access) }?, addr.addr() as u64, access)
    }

    /// As [`register`](Self::register), but requests address the first byte as `iova`, and the
    /// others accordingly.
    ///
    /// # Safety
    /// As for [`register`](Self::register).
    ///
    /// # Errors
    /// As for [`register`](Self::register); or the page offsets of `iova` and `addr` differ, or the
    /// range wraps at `iova` (EINVAL).
    pub unsafe fn register_at(
        &self,
        addr: *mut u8,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<Mr, RegisterError> {
        let host = addr.addr() as u64;
        let same_place = (host ^ iova) & (page_size() as u64 - 1) == 0;
        if !same_place || iova.checked_add(len as u64).is_none() {
            return Err(RegisterError::Iova { addr: host, len: len as u64, iova });
        }
        check_rights(access)?;
        // SAFETY: the caller guarantees the requirements of `register_at`.
        self.insert(unsafe { PreparedMemory::host(addr, len, access) }?, iova, access)
    }

    /// As [`register_at`](Self::register_at), for memory that need not be mapped yet: every access
    /// takes the pages that are there then, and fails where there are none.
    ///
    /// # Safety
    /// As for [`register`](Self::register).
    ///
    /// # Errors
    /// The range is too long, or the rights contradict each other.
    pub unsafe fn register_on_demand(
        &self,
        addr: *mut u8,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<Mr, RegisterError> {
        check_rights(access)?;
        check_len(len)?;
        guard::ensure_installed()?;
        // SAFETY: the caller guarantees the requirements of `Window::new`.
        self.insert(PreparedMemory::of(unsafe { Window::new(addr, len) }, None), iova, access)
    }

    /// A region without memory: reads of any address give zeroes, and what is written is discarded.
    ///
    /// # Errors
    /// There are too many regions.
    pub fn register_null(&self) -> Result<Mr, RegisterError> {
        let paths = Paths::both(Path::Direct(Mechanism::Cpu));
        let memory = PreparedMemory { target: Target::Null, paths, gpu: None };
        self.insert(memory, 0, Access::LOCAL_WRITE)
    }

    /// Registers `len` bytes of memory that CUDA knows, at its CUDA address.
    ///
    /// [`Mr::paths`] returns the path of the region's bytes. Without a direct one, registration
    /// fails only if `options` (or `NOBOUNCE_REQUIRE=direct`) require it.
    ///
    /// # Safety
    /// As for [`register`](Self::register): until the region is dropped, the device and peers read
    /// the memory and, as `access` allows, write it. It may be freed meanwhile; then requests fail.
    ///
    /// # Errors
    /// The address is not CUDA's, the range crosses its allocation, there is no driver, a direct
    /// path was required, ...: the message gives the remedy.
    pub unsafe fn register_gpu(
        &self,
        addr: u64,
        len: usize,
        access: Access,
        options: &GpuOptions,
    ) -> Result<Mr, RegisterError> {
        check_rights(access)?;
        self.insert(PreparedMemory::gpu(&self.device.shared, addr, len, options)?, addr, access)
    }

    fn insert(&self, memory: PreparedMemory, addr: u64, access: Access) -> Result<Mr, RegisterError> {
        let PreparedMemory { target, paths, gpu } = memory;
        let (len, watch) = (target.len(), target.watch().cloned());
        let region = Arc::new(Region::new(target, addr, access, self.id));
        let shared = self.device.shared.clone();
        let registry = shared.engines.registry().ok_or(RegisterError::Forked)?;
        let mut engine = shared.engines.first().lock().ok_or(RegisterError::Forked)?;
        engine.core.regions.note_paths(&paths);
        let key = engine.core.regions.insert(region.clone())?;
        drop(engine);
        for handle in shared.engines.iter().skip(1) {
            let mut engine = handle.lock().ok_or(RegisterError::Forked)?;
            engine.core.regions.put(key, region.clone());
        }
        drop(registry);
        Ok(Mr { shared, key, addr, len, paths, gpu, watch, pd: self.in_use() })
    }
}

impl Mr {
    /// Changes the region atomically and under the same keys: every packet finds either the old or
    /// the new one.
    ///
    /// # Safety
    /// As for [`Pd::register`], of the new memory and rights.
    ///
    /// # Errors
    /// As for registering. The region is unchanged.
    pub unsafe fn rereg(&mut self, change: &Rereg<'_>) -> Result<(), RegisterError> {
        if let Some(pd) = change.pd
            && !Arc::ptr_eq(&pd.device.shared, &self.shared)
        {
            return Err(RegisterError::OtherDevice);
        }
        let first = self.shared.engines.first();
        let old = first.lock().ok_or(RegisterError::Forked)?.core.regions.get(self.key);
        let old = old.ok_or(RegisterError::Forked)?;
        let access = change.access.unwrap_or(old.access);
        check_rights(access)?;
        let (memory, addr) = match change.memory {
            None => {
                if let (Target::Host(HostTarget { window, .. }), None) = (&old.target, &self.gpu) {
                    let writes = access.contains(Access::LOCAL_WRITE);
                    probe::check_range(window.base_addr(), window.len() as u64, writes)?;
                }
                let (target, paths) = (old.target.clone(), self.paths.clone());
                (PreparedMemory { target, paths, gpu: self.gpu.clone() }, self.addr)
            }
            Some(NewMemory::Host { addr, len }) => {
                // SAFETY: the caller guarantees the requirements of `rereg`.
                (unsafe { PreparedMemory::host(addr, len, access) }?, addr.addr() as u64)
            }
            Some(NewMemory::Gpu { addr, len, options }) => {
                (PreparedMemory::gpu(&self.shared, addr, len, options)?, addr)
            }
        };
        let PreparedMemory { target, paths, gpu } = memory;
        (self.addr, self.len, self.paths, self.gpu) = (addr, target.len(), paths, gpu);
        self.watch = target.watch().cloned();
        let region = Region::new(target, addr, access, change.pd.map_or(old.pd, |pd| pd.id));
        drop(old);
        let region = Arc::new(region);
        let paths = &self.paths;
        self.shared
            .change_region(self.key, change.memory.is_some(), |regions| {
                regions.note_paths(paths);
                regions.put(self.key, region.clone())
            })
            .ok_or(RegisterError::Forked)?;
        if let Some(pd) = change.pd {
            self.pd = pd.in_use();
        }
        Ok(())
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        let _ = self.shared.change_region(self.key, true, |regions| regions.remove(self.key));
    }
}

impl Shared {
    /// Applies `change`, which returns the previous region, to the region behind a key in every
    /// engine. `moves`: the device must no longer use the previous memory when this returns. `None`
    /// in a forked child.
    fn change_region(
        &self,
        key: u32,
        moves: bool,
        mut change: impl FnMut(&mut Regions) -> Option<Arc<Region>>,
    ) -> Option<()> {
        let registry = self.engines.registry()?;
        let (mut before, mut copies) = (Vec::new(), Vec::new());
        for handle in self.engines.iter() {
            let mut engine = handle.lock()?;
            let old = change(&mut engine.core.regions);
            if moves {
                copies.extend(settle_copies(&mut engine.core, old.as_deref()));
            }
            before.push(old);
        }
        // No engine can bind a window to it any more.
        self.windows().leave_region(key);
        // Release the lock before the waits for copies and the unmapping.
        drop(registry);
        copies.iter().for_each(Copies::wait);
        drop(before);
        Some(())
    }
}

/// The region is removed: cancels pending placements into its memory. The result awaits the GPU's
/// copies into and out of it.
fn settle_copies(core: &mut Core, region: Option<&Region>) -> Option<Copies> {
    let target = &region?.target;
    core.regions.staging.forget(target);
    match target {
        Target::Host(_) | Target::Null => None,
        Target::Gpu(gpu) => {
            core.regions.staging.copiers.get(gpu.copier).map(|copier| copier.copies_of(&gpu.memory))
        }
    }
}

/// Memory that was checked and prepared for a region.
struct PreparedMemory {
    target: Target,
    paths: Paths,
    gpu: Option<Arc<GpuMemory>>,
}

impl PreparedMemory {
    /// # Safety
    /// As for [`Pd::register`].
    unsafe fn host(addr: *mut u8, len: usize, access: Access) -> Result<Self, RegisterError> {
        check_len(len)?;
        guard::ensure_installed()?;
        probe::check_range(addr.addr() as u64, len as u64, access.contains(Access::LOCAL_WRITE))?;
        // SAFETY: the caller guarantees the requirements of `Window::new`.
        Ok(Self::of(unsafe { Window::new(addr, len) }, watch(addr.addr() as u64, len)))
    }

    fn of(window: Window, watch: Option<Arc<WatchedRange>>) -> Self {
        let paths = Paths::both(Path::Direct(Mechanism::Cpu));
        Self { target: Target::Host(HostTarget { window, watch }), paths, gpu: None }
    }

    fn gpu(shared: &Shared, addr: u64, len: usize, options: &GpuOptions) -> Result<Self, RegisterError> {
        check_len(len)?;
        let memory = Arc::new(GpuMemory::register(addr, len, options)?);
        if let Err(error) = memory.end_when_freed() {
            tracing::warn!(%error, "cannot start the GPU-memory watcher; freeing registered memory will go undetected");
        }
        let paths = memory.paths().clone();
        if let Some(window) = memory.host() {
            let target = Target::Host(HostTarget { window, watch: None });
            return Ok(Self { target, paths, gpu: Some(memory) });
        }
        // Prepared ahead and without the lock: data must not wait for either.
        let crossover = match memory.window() {
            Some(_) if paths.outbound.is_direct() => crossover(&memory),
            _ => 0,
        };
        let copier = copier_of(shared, &memory)?;
        let target = Target::Gpu(GpuTarget::new(memory.clone(), copier, crossover));
        Ok(Self { target, paths, gpu: Some(memory) })
    }
}

/// The copier for memory of this context. Each engine of the device has its own; all of them have
/// the same contexts, in the same order. Copiers of destroyed contexts are dropped.
fn copier_of(shared: &Shared, memory: &GpuMemory) -> Result<CopierIndex, RegisterError> {
    let context = ContextKey::of(memory)?;
    let _registry = shared.engines.registry().ok_or(RegisterError::Forked)?;
    let first = shared.engines.first().lock().ok_or(RegisterError::Forked)?;
    let copiers = &first.core.regions.staging.copiers;
    if let Some(known) = copiers.find(context) {
        return Ok(known);
    }
    let all = copiers.all();
    drop(first);
    // CUDA calls are made without an engine's lock.
    let is_gone = |known: &Option<ContextCopier>| known.as_ref().is_some_and(|known| known.copier.is_gone());
    let gone: Vec<_> = all.into_iter().filter(|(_, known)| is_gone(known)).map(|(index, _)| index).collect();
    let mut made = Vec::new();
    for handle in shared.engines.iter() {
        let copier = Copier::new(memory.gpu(), context, &handle.waker)?;
        made.push((handle, ContextCopier { gpu: memory.gpu().clone(), context, copier }));
    }
    let mut index = None;
    for (handle, known) in made {
        let mut engine = handle.lock().ok_or(RegisterError::Forked)?;
        let copiers = &mut engine.core.regions.staging.copiers;
        gone.iter().for_each(|gone| copiers.forget(*gone));
        let at = copiers.adopt(Some(known));
        index.get_or_insert(at);
    }
    index.ok_or(RegisterError::Forked)
}

/// Watches host memory for being unmapped. Where that is not possible, the log has the reason,
/// once.
fn watch(addr: u64, len: usize) -> Option<Arc<WatchedRange>> {
    if len == 0 {
        return None;
    }
    match unmap_watch::watch(addr, len) {
        Ok(watched) => Some(Arc::new(watched)),
        Err(reason) => {
            static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
            let reason = reason.to_string();
            if TOLD.lock().unwrap_or_else(PoisonError::into_inner).insert(reason.clone()) {
                tracing::info!(
                    "memory that is unmapped while it is registered goes undetected: {reason}. Whatever is mapped there \
                     later can be written through the old key"
                );
            }
            None
        }
    }
}

/// Up to which length loads are faster than the copy engine. A usual value if that cannot be
/// measured (a GPU without free memory).
fn crossover(memory: &GpuMemory) -> usize {
    match Calibration::of(memory.gpu()) {
        Ok(found) => found.load_crossover,
        Err(error) => {
            tracing::warn!(%error, "cannot measure the cost of loads and copies of GPU memory; using the usual crossover");
            USUAL_CROSSOVER
        }
    }
}

fn check_len(len: usize) -> Result<(), RegisterError> {
    let max = DeviceLimits::OURS.max_mr_size;
    if len as u64 <= max { Ok(()) } else { Err(RegisterError::TooLong { len: len as u64, max }) }
}

fn check_rights(access: Access) -> Result<(), RegisterError> {
    let remote_writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    if access.intersects(remote_writes) && !access.contains(Access::LOCAL_WRITE) {
        return Err(RegisterError::Rights);
    }
    Ok(())
}
