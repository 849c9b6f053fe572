//! Registered memory, shared by the views of it.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use nobounce::{Access, Device, GpuOptions, Region, RegisterError};

/// Keeps memory alive while it is registered.
pub type Owner = Box<dyn Any + Send + Sync>;

/// Memory that a caller owns.
#[derive(Debug)]
pub struct Foreign {
    /// Its address: in this process, or on a GPU.
    pub addr: u64,
    /// Its length in bytes.
    pub len: usize,
    /// Whether it is memory of a GPU.
    pub is_gpu: bool,
    /// Whether nothing may write to it. Peers can read it, and transfers can be written from it.
    pub is_read_only: bool,
    /// Whether its pages are taken at each access: a mapped file, which registering would read.
    pub is_on_demand: bool,
}

/// A registration and what keeps its memory alive.
struct Registration {
    // Fields drop in this order: memory is deregistered before its owner lets it go.
    region: Region,
    /// The generation of the agent that registered it, if one did.
    agent: Option<u64>,
    is_read_only: bool,
    is_on_demand: bool,
    _owner: Option<Owner>,
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.region.fmt(f)
    }
}

/// A range of registered memory. Clones share the registration; the last one ends it.
#[derive(Clone)]
pub struct View {
    // Fields drop in this order, as above.
    registration: Arc<Registration>,
    /// What keeps the memory of this view alive, where an earlier view had it registered.
    _owner: Option<Arc<Owner>>,
    offset: u64,
    len: u64,
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "View({} bytes at {:#x} of {:?})", self.len, self.addr(), self.registration)
    }
}

impl View {
    fn whole(registration: Arc<Registration>) -> Self {
        let len = registration.region.len() as u64;
        Self { registration, _owner: None, offset: 0, len }
    }

    /// Memory that is registered already.
    pub fn of(region: Region) -> Self {
        let (is_read_only, is_on_demand) = (false, false);
        Self::whole(Arc::new(Registration { region, agent: None, is_read_only, is_on_demand, _owner: None }))
    }

    /// A part of it; `None` if it is not inside.
    #[must_use]
    pub fn part(&self, offset: u64, len: u64) -> Option<Self> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        inside.then(|| Self { offset: self.offset + offset, len, ..self.clone() })
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of its first byte: in this process, or on the GPU.
    pub fn addr(&self) -> u64 {
        self.registration.region.addr() + self.offset
    }

    /// The region that it is a part of.
    pub fn region(&self) -> &Region {
        &self.registration.region
    }

    /// Whether another agent registered it, with another device.
    pub(crate) fn is_of_another(&self, agent: u64) -> bool {
        self.registration.agent.is_some_and(|mine| mine != agent)
    }

    /// Whether nothing may write to it.
    pub fn is_read_only(&self) -> bool {
        self.registration.is_read_only
    }

    /// Registers the same bytes once more, for peers. The caller keeps the view as long.
    pub(crate) fn register_again(&self, device: &Device) -> Result<Region, RegisterError> {
        let access = if self.is_read_only() { Access::REMOTE_READ } else { Region::ALL };
        let memory = Foreign {
            addr: self.addr(),
            len: usize::try_from(self.len).unwrap_or(usize::MAX),
            is_gpu: self.region().is_gpu(),
            is_read_only: self.is_read_only(),
            is_on_demand: self.registration.is_on_demand,
        };
        // SAFETY: the bytes are inside of memory that this view keeps alive.
        unsafe { register(device, &memory, access) }
    }

    /// Offset of its first byte in the region.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

/// Where memory is and whether it is read-only, then its address.
type Key = (bool, bool, u64);

/// Registrations below an address that are tried for a view. Beyond, its memory is registered
/// again.
const MAX_TRIED: usize = 64;

/// The registrations of an agent that are alive, by address. Memory inside of one is not registered
/// again, unless the memory is known to have been freed since.
///
/// A registration ends with its last view. It could be kept for a caching allocator that hands out
/// the same memory again, but kept registrations would keep freed GPU memory from the driver: a
/// mapping of it (DMA-BUF, VMM handle) holds the pages.
#[derive(Debug, Default)]
pub(crate) struct Registrations {
    alive: Mutex<BTreeMap<Key, Weak<Registration>>>,
}

impl Registrations {
    /// # Safety
    /// As for [`Device::register_raw`] and [`Device::register_gpu_raw`]: the memory stays valid
    /// while `owner` lives, or without one while a view of it does.
    pub(crate) unsafe fn view(
        &self,
        (device, agent): (&Device, u64),
        memory: &Foreign,
        owner: Option<Owner>,
    ) -> Result<View, RegisterError> {
        let &Foreign { addr, len, is_gpu, is_read_only, is_on_demand } = memory;
        let key = (is_gpu, is_read_only, addr);
        let mut alive = self.alive.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(view) = find(&alive, key, len as u64) {
            return Ok(View { _owner: owner.map(Arc::new), ..view });
        }
        // Peers get keys of exports only.
        let access = if is_read_only { Access::empty() } else { Access::LOCAL_WRITE };
        // SAFETY: the caller's promise.
        let region = unsafe { register(device, memory, access)? };
        let registration =
            Arc::new(Registration { region, agent: Some(agent), is_read_only, is_on_demand, _owner: owner });
        if alive.len() > 64 && alive.len().is_power_of_two() {
            alive.retain(|_, registration| registration.strong_count() > 0);
        }
        alive.insert(key, Arc::downgrade(&registration));
        Ok(View::whole(registration))
    }
}

/// # Safety
/// As for [`Device::register_raw`] and [`Device::register_gpu_raw`].
unsafe fn register(device: &Device, memory: &Foreign, access: Access) -> Result<Region, RegisterError> {
    let &Foreign { addr, len, is_gpu, is_on_demand, .. } = memory;
    if is_gpu {
        // SAFETY: the caller's promise.
        return unsafe { device.register_gpu_raw(addr, len, access, &GpuOptions::default()) };
    }
    let base = std::ptr::with_exposed_provenance_mut(usize::try_from(addr).unwrap_or(0));
    // SAFETY: the caller's promise.
    unsafe {
        if is_on_demand {
            device.register_raw_on_demand(base, len, access)
        } else {
            device.register_raw(base, len, access)
        }
    }
}

/// A view of a registration that has all of these bytes.
fn find(alive: &BTreeMap<Key, Weak<Registration>>, key: Key, len: u64) -> Option<View> {
    let (is_gpu, is_read_only, addr) = key;
    let below = alive.range((is_gpu, is_read_only, 0)..=key).rev().take(MAX_TRIED);
    // A smaller one may lie between it and the address.
    let views = below.filter_map(|(&(_, _, base), registration)| {
        View::whole(registration.upgrade()?).part(addr - base, len)
    });
    views.into_iter().find(|view| {
        let (offset, len) = (usize::try_from(view.offset), usize::try_from(view.len));
        offset.is_ok_and(|offset| len.is_ok_and(|len| !view.region().mr().is_gone_at(offset, len)))
    })
}
