//! Memory windows: keys for parts of a region. Send requests bind and invalidate them, and so does
//! a peer's SEND with invalidate, without registration.
//!
//! The upper 24 bits of a window's key are fixed for its lifetime. The program changes the lower 8
//! with each binding, so that an old key does not match.

use std::collections::HashMap;
use std::sync::Arc;

use nobounce_protocol::qp::{Access, LocalWork};

use crate::process::random::random_u32;
use crate::soft::engine::queue_pair::QueuePair;
use crate::soft::engine::region::{Region, Regions};
use crate::soft::limits::DeviceLimits;
use crate::soft::qp_index::QpIndex;

/// Access rights that a window may name. The right to local writes has no effect: only peers use a
/// window. Adapters accept it, and rdma_rxe does.
const NAMED: Access = Access::all().difference(Access::BIND_WINDOW);

/// The two types of windows, as the standard numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MwKind {
    /// Usable by every queue pair of its domain; only its owner may rebind or invalidate it.
    One,
    /// Usable by the queue pair that bound it; a peer may invalidate it. (2B in the standard.)
    Two,
}

/// The requester of memory, as its engine knows it: the domain and its queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Accessor {
    pub(crate) pd: u32,
    pub(crate) qp: QpIndex,
}

/// A queue pair of any engine of the device: the engine's number above the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceQp(u32);

/// The requester of memory, as the memory windows know it, which all engines share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceAccessor {
    pub(crate) pd: u32,
    qp: DeviceQp,
}

impl Accessor {
    /// Every domain: access was checked before, when the request came.
    pub(crate) const ANY_PD: u32 = u32::MAX;

    /// The same for all engines of the device; its own has that number.
    #[inline]
    pub(crate) fn of_engine(self, number: usize) -> DeviceAccessor {
        #[allow(clippy::cast_possible_truncation)] // there are a handful of engines
        let number = number as u32;
        DeviceAccessor { pd: self.pd, qp: DeviceQp(number << 16 | u32::from(self.qp.get())) }
    }
}

impl DeviceAccessor {
    /// Whether it may access memory of that domain.
    #[inline]
    fn is_of(self, pd: u32) -> bool {
        self.pd == pd || self.pd == Accessor::ANY_PD
    }
}

/// The current binding of a window's key.
#[derive(Debug)]
struct Bound {
    key: u32,
    region_key: u32,
    region: Arc<Region>,
    addr: u64,
    len: u64,
    access: Access,
    /// For type 2: the queue pair that bound it.
    qp: Option<DeviceQp>,
}

#[derive(Debug)]
pub(crate) struct MemoryWindow {
    pd: u32,
    kind: MwKind,
    bound: Option<Bound>,
}

/// The windows of a device, by the upper bits of their keys.
#[derive(Debug, Default)]
pub(crate) struct Windows(pub(crate) HashMap<u32, MemoryWindow>);

impl Windows {
    /// Whether a key belongs to a window, bound or not.
    pub(crate) fn owns(&self, key: u32) -> bool {
        self.0.contains_key(&(key >> 8))
    }

    /// A new window's first key; `is_free` tells whether a key is unused.
    pub(crate) fn insert(&mut self, pd: u32, kind: MwKind, is_free: impl Fn(u32) -> bool) -> Option<u32> {
        if self.0.len() >= DeviceLimits::OURS.max_mws {
            return None;
        }
        let index = loop {
            let index = random_u32() >> 8;
            let taken = self.0.contains_key(&index) || (0..256).any(|low| !is_free(index << 8 | low));
            if index != 0 && !taken {
                break index;
            }
        };
        self.0.insert(index, MemoryWindow { pd, kind, bound: None });
        Some(index << 8)
    }

    /// The first address that a key of a bound window names; 0 if there is none.
    pub(crate) fn base(&self, key: u32) -> u64 {
        let bound = self.0.get(&(key >> 8)).and_then(|window| window.bound.as_ref());
        bound.filter(|bound| bound.key == key).map_or(0, |bound| bound.addr)
    }

    /// The region, and the address in its own terms, that a peer may access through this key.
    pub(crate) fn allowed(
        &self,
        accessor: DeviceAccessor,
        key: u32,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Option<&Arc<Region>> {
        let window = self.0.get(&(key >> 8)).filter(|window| accessor.is_of(window.pd))?;
        let bound = window.bound.as_ref().filter(|bound| bound.key == key)?;
        let of_this = bound.qp.is_none_or(|qp| qp == accessor.qp);
        let inside = addr.checked_sub(bound.addr)?.checked_add(len)? <= bound.len;
        (of_this && inside && bound.access.contains(access)).then_some(&bound.region)
    }

    /// Executes a queue pair's request; false if that is not possible. `region` finds a region by
    /// its key.
    pub(crate) fn carry_out(
        &mut self,
        accessor: DeviceAccessor,
        work: &LocalWork,
        region: impl FnOnce(u32) -> Option<Arc<Region>>,
    ) -> bool {
        match *work {
            LocalWork::Invalidate(key) => self.invalidate(accessor, key),
            LocalWork::Bind { window, rkey, region: region_key, addr, len, access } => {
                let Some(window) = self.0.get_mut(&(window >> 8)).filter(|window| window.pd == accessor.pd)
                else {
                    return false;
                };
                if window.kind == MwKind::One && len == 0 {
                    window.bound = None;
                    return true;
                }
                // A type 2 window must be invalidated first, because a peer may still use it. Only
                // its owner rebinds type 1.
                let is_free = window.bound.is_none() || window.kind == MwKind::One;
                let found =
                    region(region_key).filter(|region| may_bind(region, accessor.pd, addr, len, access));
                let (Some(region), true) = (found, is_free) else { return false };
                let qp = (window.kind == MwKind::Two).then_some(accessor.qp);
                window.bound = Some(Bound { key: rkey, region_key, region, addr, len, access, qp });
                true
            }
        }
    }

    /// Invalidates a key, for its queue pair or for the peer. False if it is no key of a type 2
    /// window that this queue pair bound.
    pub(crate) fn invalidate(&mut self, accessor: DeviceAccessor, key: u32) -> bool {
        let window = self.0.get_mut(&(key >> 8)).filter(|window| window.pd == accessor.pd);
        let is_that = |bound: &mut Bound| bound.key == key && bound.qp == Some(accessor.qp);
        window.and_then(|window| window.bound.take_if(is_that)).is_some()
    }

    /// A region is deregistered or replaced: unbinds all windows from it.
    pub(crate) fn leave_region(&mut self, key: u32) {
        self.unbind(|bound| bound.region_key == key);
    }

    /// A queue pair is destroyed: unbinds its windows.
    pub(crate) fn leave_qp(&mut self, accessor: DeviceAccessor) {
        self.unbind(|bound| bound.qp == Some(accessor.qp));
    }

    fn unbind(&mut self, which: impl Fn(&Bound) -> bool) {
        for window in self.0.values_mut() {
            window.bound.take_if(|bound| which(bound));
        }
    }

    /// Whether a window is bound to the region.
    pub(crate) fn uses_region(&self, key: u32) -> bool {
        self.0.values().any(|window| window.bound.as_ref().is_some_and(|bound| bound.region_key == key))
    }
}

fn may_bind(region: &Region, pd: u32, addr: u64, len: u64, access: Access) -> bool {
    let writes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
    let rights = region.access.contains(Access::BIND_WINDOW)
        && NAMED.contains(access)
        && (!writes || region.access.contains(Access::LOCAL_WRITE));
    rights && region.pd == pd && len > 0 && region.offset(addr, len).is_some()
}

/// Binds or invalidates a memory window, if that is the queue pair's next request.
pub(crate) fn carry_out_local(entry: &mut QueuePair, regions: &mut Regions) -> bool {
    let Some((serial, work)) = entry.qp.poll_local() else { return false };
    let done = regions.carry_out(entry.accessor(), &work);
    entry.qp.handle_local(serial, &work, done);
    true
}
