//! Memory windows.

use std::cell::UnsafeCell;
use std::ffi::c_int;

use nobounce_nic::soft::{Mw, MwKind};
use nobounce_nic::work::{Access, LocalWork, Operation};
use nobounce_verbs as verbs;

use crate::entry::{self, Errno};
use crate::live::{Kind, Object, Use};
use crate::log;
use crate::mr::MrObject;
use crate::pd::PdObject;
use crate::post;

#[repr(C)]
pub(crate) struct MwObject {
    raw: UnsafeCell<verbs::Mw>,
    soft: Mw,
    _pd: Use,
}

impl Object for MwObject {
    type Raw = verbs::Mw;
    const KIND: Kind = Kind::Mw;
}

/// `ibv_alloc_mw`, by the table.
pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut verbs::Pd, kind: u32) -> *mut verbs::Mw {
    entry::pointer(|| {
        let ours = PdObject::find(pd)?;
        ours.context.alive()?;
        let soft_kind = match kind {
            verbs::IBV_MW_TYPE_1 => MwKind::One,
            verbs::IBV_MW_TYPE_2 => MwKind::Two,
            _ => return Err(Errno::EINVAL),
        };
        let soft = ours.soft.create_window(soft_kind).map_err(|error| {
            log::warn(|| format!("ibv_alloc_mw: {error}"));
            Errno(error.errno())
        })?;
        let rkey = soft.rkey();
        let raw = verbs::Mw { context: ours.context.raw(), pd, rkey, handle: rkey, kind };
        Ok(MwObject { raw: UnsafeCell::new(raw), soft, _pd: ours.users.join() }.publish())
    })
}

/// `ibv_dealloc_mw`, by the table. What is behind it is taken back.
pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut verbs::Mw) -> c_int {
    entry::code(|| MwObject::retract(mw).map(drop))
}

/// The work of a request that binds `mw` by the key `rkey`.
///
/// # Safety
/// `mw` is a window of ours, and `info` names a region of ours or none.
pub(crate) unsafe fn bind(
    mw: *mut verbs::Mw,
    rkey: u32,
    info: &verbs::MwBindInfo,
    kind: MwKind,
) -> Result<Operation, Errno> {
    if mw.is_null() || (info.mr.is_null() && info.length > 0) {
        return Err(Errno::EINVAL);
    }
    // SAFETY: as promised.
    let window = &unsafe { MwObject::trust(mw) }.soft;
    // The upper bits are the window's own.
    if window.kind() != kind || (window.rkey() ^ rkey) >> 8 != 0 {
        return Err(Errno::EINVAL);
    }
    let access = Access::from_bits(info.mw_access_flags).ok_or(Errno::EINVAL)?;
    // SAFETY: as promised.
    let region = if info.mr.is_null() { 0 } else { unsafe { MrObject::trust(info.mr) }.lkey() };
    let (addr, len) = (info.addr, info.length);
    Ok(Operation::Local(LocalWork::Bind { window: window.rkey(), rkey, region, addr, len, access }))
}

/// `ibv_bind_mw`, by the table, for windows of the first kind: each binding has a key of its own.
pub(crate) unsafe extern "C" fn bind_mw(
    qp: *mut verbs::Qp,
    mw: *mut verbs::Mw,
    request: *mut verbs::MwBind,
) -> c_int {
    entry::code(|| {
        // SAFETY: the caller passes valid structures, of ours, or null.
        let (Some(request), true) = (unsafe { request.as_ref() }, !mw.is_null()) else {
            return Err(Errno::EINVAL);
        };
        // SAFETY: as above; one thread binds a window at a time.
        let rkey = unsafe { &mut (*mw).rkey };
        let next = *rkey & !0xff | (rkey.wrapping_add(1) & 0xff);
        // SAFETY: all fields are numbers and pointers, for which zeroes are valid.
        let mut wr: verbs::SendWr = unsafe { std::mem::zeroed() };
        wr.wr_id = request.wr_id;
        wr.opcode = verbs::IBV_WR_BIND_MW;
        wr.send_flags = request.send_flags;
        wr.bind_mw = verbs::BindMw { mw, rkey: next, bind_info: request.bind_info };
        // SAFETY: a request of one, with everything it points to.
        unsafe { post::post_bind(qp, &wr, MwKind::One) }?;
        *rkey = next;
        Ok(())
    })
}

/// Converts the parameters of `ibv_wr_bind_mw`.
///
/// # Safety
/// As for [`bind`].
pub(crate) unsafe fn bind_ex(
    mw: *mut verbs::Mw,
    rkey: u32,
    info: *const verbs::MwBindInfo,
) -> Result<Operation, Errno> {
    // SAFETY: as promised.
    let info = unsafe { info.as_ref() }.ok_or(Errno::EINVAL)?;
    // SAFETY: as promised.
    unsafe { bind(mw, rkey, info, MwKind::Two) }
}
