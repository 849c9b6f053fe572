//! Thread domains and parent domains.
//!
//! A thread domain promises that one thread at a time uses the objects in it. All our calls are
//! safe from any thread, so the promise changes nothing. A parent domain is another name of its
//! protection domain. Its allocators are not called: our queues are not in memory that a program
//! could provide.

use std::cell::UnsafeCell;
use std::ffi::c_int;

use nobounce_verbs as verbs;

use crate::context::ContextObject;
use crate::entry::{self, Errno};
use crate::live::{Kind, Object, Use, Users};
use crate::pd::PdObject;

#[repr(C)]
pub(crate) struct TdObject {
    raw: UnsafeCell<verbs::Td>,
    users: Users,
    _context: Use,
}

impl Object for TdObject {
    type Raw = verbs::Td;
    const KIND: Kind = Kind::Td;
}

/// `ibv_alloc_td`, by the table.
pub(crate) unsafe extern "C" fn alloc_td(
    context: *mut verbs::Context,
    init: *mut verbs::TdInitAttr,
) -> *mut verbs::Td {
    entry::pointer(|| {
        let context = ContextObject::find(context)?;
        context.alive()?;
        // SAFETY: the caller passes a valid structure.
        if unsafe { init.as_ref() }.ok_or(Errno::EINVAL)?.comp_mask != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let raw = UnsafeCell::new(verbs::Td { context: context.raw() });
        Ok(TdObject { raw, users: Users::default(), _context: context.users.join() }.publish())
    })
}

/// `ibv_dealloc_td`, by the table: not while parent domains have it.
pub(crate) unsafe extern "C" fn dealloc_td(td: *mut verbs::Td) -> c_int {
    entry::code(|| {
        if TdObject::find(td)?.users.any() {
            return Err(Errno::EBUSY);
        }
        TdObject::retract(td).map(drop)
    })
}

/// `ibv_alloc_parent_domain`, by the table. `ibv_dealloc_pd` frees it.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context: *mut verbs::Context,
    init: *mut verbs::ParentDomainInitAttr,
) -> *mut verbs::Pd {
    entry::pointer(|| {
        let context = ContextObject::find(context)?;
        context.alive()?;
        // SAFETY: the caller passes a valid structure.
        let init = unsafe { init.as_ref() }.ok_or(Errno::EINVAL)?;
        let known =
            verbs::IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | verbs::IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
        if init.comp_mask & !known != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let with_allocators = init.comp_mask & verbs::IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS != 0;
        if with_allocators && (init.alloc.is_none() || init.free.is_none()) {
            return Err(Errno::EINVAL);
        }
        let pd = PdObject::find(init.pd)?;
        if !pd.context.soft.is_same(&context.soft) {
            return Err(Errno::EINVAL);
        }
        let td = if init.td.is_null() { None } else { Some(TdObject::find(init.td)?) };
        let uses = std::iter::once(pd.users.join()).chain(td.map(|td| td.users.join())).collect();
        Ok(PdObject::new(context, pd.soft.clone(), uses).publish())
    })
}
