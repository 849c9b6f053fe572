//! Registered memory, shared by the views of it.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use nobounce::{Device, GpuOptions, Region, RegisterError};

/// Keeps memory alive while it is registered.
pub type Owner = Box<dyn Any + Send + Sync>;

/// A registration and what keeps its memory alive.
struct Registration {
    // Fields drop in this order: memory is deregistered before its owner lets it go.
    region: Region,
    _owner: Option<Owner>,
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.region.fmt(f)
    }
}

/// A range of registered memory. Clones share the registration; the last one ends it.
#[derive(Clone, Debug)]
pub struct View {
    registration: Arc<Registration>,
    offset: u64,
    len: u64,
}

impl View {
    fn whole(registration: Arc<Registration>) -> Self {
        let len = registration.region.len() as u64;
        Self { registration, offset: 0, len }
    }

    /// Memory that is registered already.
    pub fn of(region: Region) -> Self {
        Self::whole(Arc::new(Registration { region, _owner: None }))
    }

    /// A part of it; `None` if it is not inside.
    #[must_use]
    pub fn part(&self, offset: u64, len: u64) -> Option<Self> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        inside.then(|| Self { registration: self.registration.clone(), offset: self.offset + offset, len })
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

    /// Offset of its first byte in the region.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Host,
    Gpu,
}

/// The registrations of an agent that are alive, by address. Memory inside of one is not registered
/// again: its owner keeps the memory from being freed, so the addresses mean the same memory.
#[derive(Debug, Default)]
pub(crate) struct Registrations {
    alive: Mutex<BTreeMap<(Place, u64), Weak<Registration>>>,
}

impl Registrations {
    /// # Safety
    /// As for [`Device::register_raw`]: the memory stays valid while `owner` lives, or while a view of
    /// it does.
    pub(crate) unsafe fn host(
        &self,
        device: &Device,
        base: *mut u8,
        len: usize,
        owner: Option<Owner>,
    ) -> Result<View, RegisterError> {
        // SAFETY: the caller's promise.
        let register = || unsafe { device.register_raw(base, len, Region::ALL) };
        self.view((Place::Host, base as u64), len as u64, owner, register)
    }

    /// # Safety
    /// As for [`Device::register_gpu_raw`], while `owner` or a view lives.
    pub(crate) unsafe fn gpu(
        &self,
        device: &Device,
        addr: u64,
        len: usize,
        owner: Option<Owner>,
    ) -> Result<View, RegisterError> {
        // SAFETY: the caller's promise.
        let register = || unsafe { device.register_gpu_raw(addr, len, Region::ALL, &GpuOptions::default()) };
        self.view((Place::Gpu, addr), len as u64, owner, register)
    }

    fn view(
        &self,
        at: (Place, u64),
        len: u64,
        owner: Option<Owner>,
        register: impl FnOnce() -> Result<Region, RegisterError>,
    ) -> Result<View, RegisterError> {
        let mut alive = self.alive.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(view) = find(&alive, at, len) {
            return Ok(view);
        }
        let registration = Arc::new(Registration { region: register()?, _owner: owner });
        if alive.len() > 64 && alive.len().is_power_of_two() {
            alive.retain(|_, registration| registration.strong_count() > 0);
        }
        alive.insert(at, Arc::downgrade(&registration));
        Ok(View::whole(registration))
    }
}

fn find(alive: &BTreeMap<(Place, u64), Weak<Registration>>, at: (Place, u64), len: u64) -> Option<View> {
    let (&(place, base), registration) = alive.range(..=at).next_back()?;
    let registration = registration.upgrade().filter(|_| place == at.0)?;
    View::whole(registration).part(at.1 - base, len)
}
