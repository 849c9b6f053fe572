//! XRC domains. A domain is one of this process: programs that open the same file in one process
//! share it, and other processes have their own.

use std::cell::UnsafeCell;
use std::ffi::c_int;

use nobounce_nic::soft::XrcDomain;
use nobounce_verbs as verbs;

use crate::context::ContextObject;
use crate::convert::file_of;
use crate::entry::{self, Errno};
use crate::live::{self, Kind, Object, Use, Users};
use crate::qp::{self, QpObject};

/// The file that names a domain.
type FileName = (libc::dev_t, libc::ino_t);

#[repr(C)]
pub(crate) struct XrcdObject {
    raw: UnsafeCell<verbs::Xrcd>,
    pub(crate) soft: XrcDomain,
    pub(crate) context: &'static ContextObject,
    file: Option<FileName>,
    pub(crate) users: Users,
    _context: Use,
}

impl Object for XrcdObject {
    type Raw = verbs::Xrcd;
    const KIND: Kind = Kind::Xrcd;
}

/// `ibv_open_xrcd`, by the table.
pub(crate) unsafe extern "C" fn open_xrcd(
    context: *mut verbs::Context,
    init: *mut verbs::XrcdInitAttr,
) -> *mut verbs::Xrcd {
    entry::pointer(|| {
        let context = ContextObject::find(context)?;
        context.alive()?;
        // SAFETY: the caller passes a valid structure.
        let init = unsafe { init.as_ref() }.ok_or(Errno::EINVAL)?;
        if init.comp_mask != verbs::IBV_XRCD_INIT_ATTR_FD | verbs::IBV_XRCD_INIT_ATTR_OFLAGS {
            return Err(Errno::EINVAL);
        }
        let file = if init.fd < 0 { None } else { Some(file_of(init.fd).ok_or(Errno(libc::EBADF))?) };
        let same = |xrcd: &XrcdObject| {
            let is_it = file.is_some() && xrcd.file == file && xrcd.context.soft.is_same(&context.soft);
            is_it.then(|| xrcd.soft.clone())
        };
        let known = live::each::<XrcdObject, _>(same).into_iter().flatten().next();
        let soft = match known {
            Some(_) if init.oflags & libc::O_EXCL != 0 => return Err(Errno::EINVAL),
            Some(known) => known,
            None if file.is_some() && init.oflags & libc::O_CREAT == 0 => return Err(Errno::EAGAIN),
            None => XrcDomain::create(&context.soft)?,
        };
        let raw = UnsafeCell::new(verbs::Xrcd { context: context.raw() });
        let (users, of_context) = (Users::default(), context.users.join());
        Ok(XrcdObject { raw, soft, context, file, users, _context: of_context }.publish())
    })
}

/// `ibv_open_qp`, by the table: a further object for the receiving end of a connection. Events go
/// to the oldest one.
pub(crate) unsafe extern "C" fn open_qp(
    context: *mut verbs::Context,
    attr: *mut verbs::QpOpenAttr,
) -> *mut verbs::Qp {
    entry::pointer(|| {
        let context = ContextObject::find(context)?;
        context.alive()?;
        // SAFETY: the caller passes a valid structure.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::EINVAL)?;
        let needed =
            verbs::IBV_QP_OPEN_ATTR_NUM | verbs::IBV_QP_OPEN_ATTR_XRCD | verbs::IBV_QP_OPEN_ATTR_TYPE;
        if attr.comp_mask & !(needed | verbs::IBV_QP_OPEN_ATTR_CONTEXT) != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if attr.comp_mask & needed != needed || attr.qp_type != verbs::IBV_QPT_XRC_RECV {
            return Err(Errno::EINVAL);
        }
        let xrcd = XrcdObject::find(attr.xrcd)?;
        if !xrcd.context.soft.is_same(&context.soft) {
            return Err(Errno::EINVAL);
        }
        let same = |qp: &QpObject| {
            let is_it = qp.soft.qpn().get() == attr.qp_num && qp.soft.is_target_of(&xrcd.soft);
            is_it.then(|| (qp.soft.clone(), qp.init))
        };
        let (soft, init) = live::each(same).into_iter().flatten().next().ok_or(Errno::EINVAL)?;
        let has_context = attr.comp_mask & verbs::IBV_QP_OPEN_ATTR_CONTEXT != 0;
        let qp_context = if has_context { attr.qp_context } else { std::ptr::null_mut() };
        let init = verbs::QpInitAttr { qp_context, ..init };
        Ok(qp::publish_target(xrcd, &init, soft).raw())
    })
}

/// `ibv_close_xrcd`, by the table: not while queue pairs or shared receive queues have it.
pub(crate) unsafe extern "C" fn close_xrcd(xrcd: *mut verbs::Xrcd) -> c_int {
    entry::code(|| {
        if XrcdObject::find(xrcd)?.users.any() {
            return Err(Errno::EBUSY);
        }
        XrcdObject::retract(xrcd).map(drop)
    })
}
