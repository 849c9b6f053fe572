//! Queue pairs: made and destroyed.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::ptr;
use std::sync::{Arc, Mutex};

use nobounce_nic::soft;
use nobounce_nic::soft::{CreateQpError, QpInit};
use nobounce_nic::work::QpLimits;
use nobounce_protocol::qp::Service;
use nobounce_verbs as verbs;

use crate::context::{Acks, ContextObject};
use crate::cq::CqObject;
use crate::entry::{self, Errno};
use crate::live::{Kind, Object, Use};
use crate::log;
use crate::pd::PdObject;
use crate::qp_ex::Building;
use crate::srq::SrqObject;
use crate::xrc::XrcdObject;

#[repr(C)]
pub(crate) struct QpObject {
    /// Every queue pair has room for the extended interface: programs cast one into the other.
    raw: UnsafeCell<verbs::QpEx>,
    pub(crate) soft: Arc<soft::Qp>,
    pub(crate) context: &'static ContextObject,
    /// As requested.
    pub(crate) init: verbs::QpInitAttr,
    /// The route of the last modify call, which the program may query.
    pub(crate) route: Mutex<Option<verbs::AhAttr>>,
    pub(crate) acks: Acks,
    /// Of the extended interface: what is being built.
    pub(crate) building: Building,
    /// Its domain, its completion queues, its shared receive queue.
    _uses: Vec<Use>,
}

impl Object for QpObject {
    type Raw = verbs::Qp;
    const KIND: Kind = Kind::Qp;
}

impl QpObject {
    pub(crate) fn raw(&self) -> *mut verbs::Qp {
        self.raw.get().cast()
    }

    pub(crate) fn raw_ex(&self) -> *mut verbs::QpEx {
        self.raw.get()
    }
}

fn limits(init: &verbs::QpInitAttr) -> Result<QpLimits, Errno> {
    let size = |n: u32| usize::try_from(n).map_err(|_| Errno::EINVAL);
    Ok(QpLimits {
        send_depth: size(init.cap.max_send_wr)?,
        recv_depth: size(init.cap.max_recv_wr)?,
        send_sges: size(init.cap.max_send_sge)?,
        recv_sges: size(init.cap.max_recv_sge)?,
        inline: size(init.cap.max_inline_data)?,
        signal_all: init.sq_sig_all != 0,
    })
}

/// Creates a queue pair, and registers it for events.
pub(crate) fn create(pd: *mut verbs::Pd, init: &verbs::QpInitAttr) -> Result<&'static QpObject, Errno> {
    let ours = PdObject::find(pd)?;
    let context = ours.context;
    context.alive()?;
    let service = match init.qp_type {
        verbs::IBV_QPT_RC => Service::Rc,
        verbs::IBV_QPT_UC => Service::Uc,
        verbs::IBV_QPT_UD => Service::Ud,
        verbs::IBV_QPT_XRC_SEND => Service::XrcInitiator,
        _ => return Err(Errno::EOPNOTSUPP),
    };
    let send_cq = CqObject::find(init.send_cq)?;
    let receives_nothing = service == Service::XrcInitiator && init.recv_cq.is_null();
    let recv_cq = if receives_nothing { send_cq } else { CqObject::find(init.recv_cq)? };
    let srq = if init.srq.is_null() { None } else { Some(SrqObject::find(init.srq)?) };
    let init_soft = QpInit {
        service,
        send_cq: &send_cq.soft,
        recv_cq: &recv_cq.soft,
        srq: srq.map(|srq| &srq.soft),
        limits: limits(init)?,
    };
    let soft = ours.soft.create_qp_with(&init_soft).map_err(|error| refused(&error))?;
    let mut uses = vec![ours.users.join(), send_cq.users.join(), recv_cq.users.join()];
    uses.extend(srq.map(|srq| srq.users.join()));
    Ok(publish(context, pd, init, Arc::new(soft), uses))
}

/// Creates the receiving end of an XRC connection, and registers it for events.
pub(crate) fn create_target(
    xrcd: &'static XrcdObject,
    init: &verbs::QpInitAttr,
) -> Result<&'static QpObject, Errno> {
    xrcd.context.alive()?;
    let soft = xrcd.soft.create_target().map_err(|error| refused(&error))?;
    Ok(publish_target(xrcd, init, Arc::new(soft)))
}

/// Makes the receiving end of an XRC connection known to the program.
pub(crate) fn publish_target(
    xrcd: &'static XrcdObject,
    init: &verbs::QpInitAttr,
    soft: Arc<soft::Qp>,
) -> &'static QpObject {
    publish(xrcd.context, ptr::null_mut(), init, soft, vec![xrcd.users.join()])
}

fn refused(error: &CreateQpError) -> Errno {
    match error {
        CreateQpError::Listen(_) => log::error(|| format!("ibv_create_qp: {error}")),
        _ => log::warn(|| format!("ibv_create_qp: {error}")),
    }
    match error {
        CreateQpError::Listen(_) => Errno::EADDRINUSE,
        CreateQpError::Limit { .. } | CreateQpError::OtherDevice => Errno::EINVAL,
        CreateQpError::Forked => Errno::EIO,
        _ => Errno::ENOMEM,
    }
}

fn publish(
    context: &'static ContextObject,
    pd: *mut verbs::Pd,
    init: &verbs::QpInitAttr,
    soft: Arc<soft::Qp>,
    uses: Vec<Use>,
) -> &'static QpObject {
    // SAFETY: numbers, pointers, optional function pointers, and a mutex and a condition, for all
    // of which zeroes are valid.
    let mut raw: verbs::QpEx = unsafe { std::mem::zeroed() };
    let qpn = soft.qpn().get();
    let base = &mut raw.qp_base;
    base.context = context.raw();
    base.qp_context = init.qp_context;
    base.pd = pd;
    base.send_cq = init.send_cq;
    base.recv_cq = init.recv_cq;
    base.srq = init.srq;
    base.handle = qpn;
    base.qp_num = qpn;
    base.qp_type = init.qp_type;
    let qp = QpObject {
        raw: UnsafeCell::new(raw),
        soft,
        context,
        init: *init,
        route: Mutex::default(),
        acks: Acks::default(),
        building: Building::default(),
        _uses: uses,
    }
    .publish();
    // SAFETY: just made.
    let qp = unsafe { QpObject::trust(qp) };
    context.objects().qps.entry(qpn).or_default().push(qp);
    qp
}

/// `ibv_create_qp`.
pub(crate) unsafe extern "C" fn create_qp(
    pd: *mut verbs::Pd,
    init: *mut verbs::QpInitAttr,
) -> *mut verbs::Qp {
    entry::pointer(|| {
        // SAFETY: the caller passes a valid structure. Requested capabilities are granted exactly,
        // so it stays as it is.
        let init = unsafe { init.as_ref() }.ok_or(Errno::EINVAL)?;
        Ok(create(pd, init)?.raw())
    })
}

/// `ibv_destroy_qp`: waits until the program acknowledged all events it was handed.
pub(crate) unsafe extern "C" fn destroy_qp(qp: *mut verbs::Qp) -> c_int {
    entry::code(|| {
        let ours = QpObject::find(qp)?;
        if ours.context.soft.is_forked() {
            return Ok(());
        }
        if ours.soft.is_attached() {
            return Err(Errno::EBUSY);
        }
        // Another thread that destroys it too finds it gone here.
        ours.context.objects().remove_qp(ours).ok_or(Errno::EINVAL)?;
        ours.acks.wait();
        QpObject::retract(qp).map(drop)
    })
}
