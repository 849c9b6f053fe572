//! Memory windows as objects.

use std::sync::Arc;

use crate::soft::engine::memory_windows::MwKind;
use crate::soft::limits::{CreateError, DeviceLimits};
use crate::soft::objects::device::{Pd, PdUse, Shared};
use crate::soft::objects::mr::Mr;

/// A memory window. Dropping it unbinds it.
#[derive(Debug)]
pub struct Mw {
    shared: Arc<Shared>,
    key: u32,
    kind: MwKind,
    _pd: Arc<PdUse>,
}

impl Pd {
    /// Creates an unbound memory window. [`LocalWork::Bind`](crate::work::LocalWork::Bind) binds
    /// it, on a reliable queue pair of the same domain.
    ///
    /// # Errors
    /// There are too many.
    pub fn create_window(&self, kind: MwKind) -> Result<Mw, CreateError> {
        let shared = self.device.shared.clone();
        // The registry lock excludes concurrent registrations, and the first engine knows every
        // key.
        let registry = shared.engines.registry().ok_or(CreateError::Forked)?;
        let engine = shared.engines.first().lock().ok_or(CreateError::Forked)?;
        let table = &engine.core.regions.table;
        let key = shared.windows().insert(self.id, kind, |key| !table.knows(key));
        drop((engine, registry));
        let max = DeviceLimits::OURS.max_mws;
        let key = key.ok_or(CreateError::TooMany { name: "memory windows", max })?;
        Ok(Mw { shared, key, kind, _pd: self.in_use() })
    }
}

impl Mw {
    /// Its first key. Keys of later bindings differ in the lower 8 bits at most.
    pub fn rkey(&self) -> u32 {
        self.key
    }

    /// Its kind.
    pub fn kind(&self) -> MwKind {
        self.kind
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        if !self.shared.is_forked() {
            self.shared.windows().0.remove(&(self.key >> 8));
        }
    }
}

impl Mr {
    /// Whether memory windows are bound to it. Deregistering it now is a program error, and unbinds
    /// them.
    pub fn has_windows(&self) -> bool {
        !self.shared.is_forked() && self.shared.windows().uses_region(self.key)
    }
}
