//! Shared receive queues.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};

use nobounce_nic::soft;
use nobounce_nic::soft::SrqLimits;
use nobounce_verbs as verbs;

use crate::context::{Acks, ContextObject};
use crate::cq::CqObject;
use crate::entry::{self, Errno};
use crate::live::{Kind, Object, Use, Users};
use crate::log;
use crate::pd::PdObject;
use crate::xrc::XrcdObject;

#[repr(C)]
pub(crate) struct SrqObject {
    raw: UnsafeCell<verbs::Srq>,
    pub(crate) soft: soft::Srq,
    context: &'static ContextObject,
    pub(crate) users: Users,
    pub(crate) acks: Acks,
    /// Its domains and, on XRC, the completion queue.
    _uses: Vec<Use>,
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
        // SAFETY: the caller passes a valid structure.
        let init = unsafe { init.as_ref() }.ok_or(Errno::EINVAL)?;
        create(pd, init.srq_context, &init.attr, None)
    })
}

/// Creates a queue, of an XRC domain that reports to a completion queue, or not, and registers it
/// for events.
fn create(
    pd: *mut verbs::Pd,
    srq_context: *mut c_void,
    attr: &verbs::SrqAttr,
    xrc: Option<(&'static XrcdObject, &'static CqObject)>,
) -> Result<*mut verbs::Srq, Errno> {
    let ours = PdObject::find(pd)?;
    let context = ours.context;
    context.alive()?;
    let size = |n: u32| usize::try_from(n).map_err(|_| Errno::EINVAL);
    // Requested limits are granted exactly, so the structure stays as it is.
    let limits = SrqLimits { depth: size(attr.max_wr)?, sges: size(attr.max_sge)? };
    let soft = match xrc {
        Some((xrcd, cq)) => xrcd.soft.create_srq(&ours.soft, &cq.soft, limits)?,
        None => ours.soft.create_srq(limits)?,
    };
    let id = soft.id();
    // SAFETY: numbers, pointers, and a mutex and a condition, for all of which zeroes are
    // valid.
    let mut raw: verbs::Srq = unsafe { std::mem::zeroed() };
    raw.context = context.raw();
    raw.srq_context = srq_context;
    raw.pd = pd;
    raw.handle = id;
    let (users, acks) = (Users::default(), Acks::default());
    let mut uses = vec![ours.users.join()];
    if let Some((xrcd, cq)) = xrc {
        uses.extend([xrcd.users.join(), cq.users.join()]);
    }
    let srq = SrqObject { raw: UnsafeCell::new(raw), soft, context, users, acks, _uses: uses };
    let srq = srq.publish();
    // SAFETY: just made.
    context.objects().srqs.insert(id, unsafe { SrqObject::trust(srq) });
    Ok(srq)
}

/// `ibv_create_srq_ex`, by the table: ordinary queues, and those of XRC domains.
pub(crate) unsafe extern "C" fn create_srq_ex(
    _context: *mut verbs::Context,
    init: *mut verbs::SrqInitAttrEx,
) -> *mut verbs::Srq {
    entry::pointer(|| {
        // SAFETY: the caller passes a valid structure.
        let init = unsafe { init.as_ref() }.ok_or(Errno::EINVAL)?;
        let has = |bits: u32| init.comp_mask & bits == bits;
        let of_xrc = verbs::IBV_SRQ_INIT_ATTR_XRCD | verbs::IBV_SRQ_INIT_ATTR_CQ;
        let known = verbs::IBV_SRQ_INIT_ATTR_TYPE | verbs::IBV_SRQ_INIT_ATTR_PD | of_xrc;
        let kind = if has(verbs::IBV_SRQ_INIT_ATTR_TYPE) { init.srq_type } else { verbs::IBV_SRQT_BASIC };
        if init.comp_mask & !known != 0 || kind > verbs::IBV_SRQT_XRC {
            return Err(Errno::EOPNOTSUPP);
        }
        if !has(verbs::IBV_SRQ_INIT_ATTR_PD) {
            return Err(Errno::EINVAL);
        }
        let xrc = match kind {
            verbs::IBV_SRQT_BASIC => None,
            _ if has(of_xrc) => Some((XrcdObject::find(init.xrcd)?, CqObject::find(init.cq)?)),
            _ => return Err(Errno::EINVAL),
        };
        create(init.pd, init.srq_context, &init.attr, xrc)
    })
}

/// `ibv_get_srq_num`, by the table: the number by which XRC peers name it.
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
