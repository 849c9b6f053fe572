//! Shared receive queues.

use std::cell::UnsafeCell;
use std::ffi::c_int;

use nobounce_nic::soft;
use nobounce_nic::soft::SrqLimits;
use nobounce_verbs as verbs;

use crate::context::{Acks, ContextObject};
use crate::entry::{self, Errno};
use crate::live::{Kind, Object, Use, Users};
use crate::log;
use crate::pd::PdObject;

#[repr(C)]
pub(crate) struct SrqObject {
    raw: UnsafeCell<verbs::Srq>,
    pub(crate) soft: soft::Srq,
    context: &'static ContextObject,
    pub(crate) users: Users,
    pub(crate) acks: Acks,
    _pd: Use,
}

impl Object for SrqObject {
    type Raw = verbs::Srq;
    const KIND: Kind = Kind::Srq;
}

impl SrqObject {
    pub(crate) fn raw(&self) -> *mut verbs::Srq {
        self.raw.get()
    }
}

/// `ibv_create_srq`.
pub(crate) unsafe extern "C" fn create_srq(
    pd: *mut verbs::Pd,
    init: *mut verbs::SrqInitAttr,
) -> *mut verbs::Srq {
    entry::pointer(|| {
        let ours = PdObject::find(pd)?;
        let context = ours.context;
        context.alive()?;
        // SAFETY: the caller passes a valid structure.
        let init = unsafe { init.as_ref() }.ok_or(Errno::EINVAL)?;
        let size = |n: u32| usize::try_from(n).map_err(|_| Errno::EINVAL);
        // Requested limits are granted exactly, so it stays as it is.
        let limits = SrqLimits { depth: size(init.attr.max_wr)?, sges: size(init.attr.max_sge)? };
        let soft = ours.soft.create_srq(limits)?;
        let id = soft.id();
        // SAFETY: numbers, pointers, and a mutex and a condition, for all of which zeroes are
        // valid.
        let mut raw: verbs::Srq = unsafe { std::mem::zeroed() };
        raw.context = context.raw();
        raw.srq_context = init.srq_context;
        raw.pd = pd;
        raw.handle = id;
        let (users, acks) = (Users::default(), Acks::default());
        let srq = SrqObject { raw: UnsafeCell::new(raw), soft, context, users, acks, _pd: ours.users.join() };
        let srq = srq.publish();
        // SAFETY: just made.
        context.objects().srqs.insert(id, unsafe { SrqObject::trust(srq) });
        Ok(srq)
    })
}

/// `ibv_create_srq_ex`, by the table: only extended kinds of queue arrive here, and none is
/// supported.
pub(crate) unsafe extern "C" fn create_srq_ex(
    _context: *mut verbs::Context,
    _init: *mut verbs::SrqInitAttrEx,
) -> *mut verbs::Srq {
    entry::pointer(|| Err(Errno::EOPNOTSUPP))
}

/// `ibv_get_srq_num`, by the table: it is for remote peers of XRC, which there is not.
pub(crate) unsafe extern "C" fn get_srq_num(srq: *mut verbs::Srq, number: *mut u32) -> c_int {
    entry::code(|| {
        let srq = SrqObject::find(srq)?;
        // SAFETY: the caller passes a valid place.
        unsafe { *number = srq.soft.id() };
        Ok(())
    })
}

/// `ibv_modify_srq`: arms the limit, or resizes the queue.
pub(crate) unsafe extern "C" fn modify_srq(
    srq: *mut verbs::Srq,
    attr: *mut verbs::SrqAttr,
    mask: c_int,
) -> c_int {
    entry::code(|| {
        let srq = SrqObject::find(srq)?;
        // SAFETY: the caller passes a valid structure.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::EINVAL)?;
        if mask & verbs::IBV_SRQ_MAX_WR != 0 {
            let depth = usize::try_from(attr.max_wr).map_err(|_| Errno::EINVAL)?;
            srq.soft.resize(depth).map_err(|error| {
                log::warn(|| format!("ibv_modify_srq: {error}"));
                Errno::EINVAL
            })?;
        }
        if mask & verbs::IBV_SRQ_LIMIT != 0 {
            srq.soft.set_limit(attr.srq_limit).map_err(|_| Errno::EINVAL)?;
        }
        Ok(())
    })
}

/// `ibv_query_srq`.
pub(crate) unsafe extern "C" fn query_srq(srq: *mut verbs::Srq, attr: *mut verbs::SrqAttr) -> c_int {
    entry::code(|| {
        let srq = SrqObject::find(srq)?;
        let limits = srq.soft.limits();
        let size = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let now = verbs::SrqAttr {
            max_wr: size(limits.depth),
            max_sge: size(limits.sges),
            srq_limit: srq.soft.limit(),
        };
        // SAFETY: the caller passes a valid place.
        unsafe { *attr = now };
        Ok(())
    })
}

/// `ibv_destroy_srq`: waits until the program acknowledged all events it was handed.
pub(crate) unsafe extern "C" fn destroy_srq(srq: *mut verbs::Srq) -> c_int {
    entry::code(|| {
        let ours = SrqObject::find(srq)?;
        if ours.context.soft.is_forked() {
            return Ok(());
        }
        if ours.users.any() {
            return Err(Errno::EBUSY);
        }
        // Another thread that destroys it too finds it gone here.
        ours.context.objects().srqs.remove(&ours.soft.id()).ok_or(Errno::EINVAL)?;
        ours.acks.wait();
        SrqObject::retract(srq).map(drop)
    })
}
