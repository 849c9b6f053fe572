//! Protection domains.

use std::cell::UnsafeCell;
use std::ffi::c_int;

use nobounce_nic::soft;
use nobounce_verbs as verbs;

use crate::context::ContextObject;
use crate::entry::{self, Errno};
use crate::live::{Kind, Object, Use, Users};

#[repr(C)]
pub(crate) struct PdObject {
    raw: UnsafeCell<verbs::Pd>,
    pub(crate) soft: soft::Pd,
    pub(crate) context: &'static ContextObject,
    pub(crate) users: Users,
    /// Another object allocated it.
    pub(crate) is_imported: bool,
    /// The context, and the domains that a parent domain joins.
    _uses: Vec<Use>,
}

impl PdObject {
    /// `uses`: of other objects that it keeps.
    pub(crate) fn new(context: &'static ContextObject, soft: soft::Pd, mut uses: Vec<Use>) -> Self {
        uses.push(context.users.join());
        Self {
            raw: UnsafeCell::new(verbs::Pd { context: context.raw(), handle: soft.id() }),
            soft,
            context,
            users: Users::default(),
            is_imported: false,
            _uses: uses,
        }
    }
}

impl Object for PdObject {
    type Raw = verbs::Pd;
    const KIND: Kind = Kind::Pd;
}

/// `ibv_alloc_pd`.
pub(crate) unsafe extern "C" fn alloc_pd(context: *mut verbs::Context) -> *mut verbs::Pd {
    entry::pointer(|| {
        let context = ContextObject::find(context)?;
        context.alive()?;
        Ok(PdObject::new(context, context.soft.alloc_pd()?, Vec::new()).publish())
    })
}

/// `ibv_dealloc_pd`.
pub(crate) unsafe extern "C" fn dealloc_pd(pd: *mut verbs::Pd) -> c_int {
    entry::code(|| {
        let ours = PdObject::find(pd)?;
        if ours.context.soft.is_forked() {
            return Ok(());
        }
        if ours.users.any() {
            return Err(Errno::EBUSY);
        }
        PdObject::retract(pd)?;
        Ok(())
    })
}
