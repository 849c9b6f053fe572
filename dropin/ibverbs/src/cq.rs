//! Completion queues.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};

use nobounce_nic::soft;
use nobounce_verbs as verbs;

use crate::channel::ChannelObject;
use crate::context::{Acks, ContextObject};
use crate::cq_ex::Polling;
use crate::entry::{self, Errno};
use crate::live::{Kind, Object, Use, Users};
use crate::log;

#[repr(C)]
pub(crate) struct CqObject {
    /// Every queue has room for the extended interface: programs cast one into the other.
    raw: UnsafeCell<verbs::CqEx>,
    pub(crate) soft: soft::Cq,
    pub(crate) context: &'static ContextObject,
    pub(crate) users: Users,
    pub(crate) comp_acks: Acks,
    pub(crate) async_acks: Acks,
    /// Of the extended interface: what is being polled.
    pub(crate) polling: Polling,
    _context: Use,
    _channel: Option<Use>,
}

impl Object for CqObject {
    type Raw = verbs::Cq;
    const KIND: Kind = Kind::Cq;
}

impl CqObject {
    pub(crate) fn raw(&self) -> *mut verbs::Cq {
        self.raw.get().cast()
    }

    pub(crate) fn raw_ex(&self) -> *mut verbs::CqEx {
        self.raw.get()
    }
}

/// Creation parameters of a queue.
pub(crate) struct CqRequest {
    pub(crate) depth: u32,
    pub(crate) cq_context: *mut c_void,
    pub(crate) channel: *mut verbs::CompChannel,
    pub(crate) vector: u32,
}

/// Minimum number of entries of a queue. Adapters round up too, and programs rely on it:
/// `ib_send_lat -e` requests one entry and leaves a completion there while the next one arrives.
const SMALLEST: usize = 64;

/// Creates a queue, and registers it for events.
pub(crate) fn create(
    context: &'static ContextObject,
    request: &CqRequest,
) -> Result<&'static CqObject, Errno> {
    context.alive()?;
    let depth = usize::try_from(request.depth).map_err(|_| Errno::EINVAL)?;
    if request.vector != 0 || depth == 0 {
        return Err(Errno::EINVAL);
    }
    let depth = depth.max(SMALLEST);
    let channel = if request.channel.is_null() { None } else { Some(ChannelObject::find(request.channel)?) };
    if channel.is_some_and(|channel| !std::ptr::eq(channel.context, context)) {
        return Err(Errno::EINVAL);
    }
    let soft = context.soft.create_cq(depth, channel.map(|channel| &channel.soft))?;
    // SAFETY: numbers, pointers, optional function pointers, and a mutex and a condition, for all
    // of which zeroes are valid.
    let mut raw: verbs::CqEx = unsafe { std::mem::zeroed() };
    raw.base.context = context.raw();
    raw.base.channel = request.channel;
    raw.base.cq_context = request.cq_context;
    raw.base.handle = soft.id();
    raw.base.cqe = c_int::try_from(depth).unwrap_or(c_int::MAX);
    let id = soft.id();
    let cq = CqObject {
        raw: UnsafeCell::new(raw),
        soft,
        context,
        users: Users::default(),
        comp_acks: Acks::default(),
        async_acks: Acks::default(),
        polling: Polling::default(),
        _context: context.users.join(),
        _channel: channel.map(|channel| channel.users.join()),
    }
    .publish();
    // SAFETY: just made.
    let cq = unsafe { CqObject::trust(cq) };
    context.objects().cqs.insert(id, cq);
    Ok(cq)
}

/// `ibv_create_cq`.
pub(crate) unsafe extern "C" fn create_cq(
    context: *mut verbs::Context,
    depth: c_int,
    cq_context: *mut c_void,
    channel: *mut verbs::CompChannel,
    vector: c_int,
) -> *mut verbs::Cq {
    entry::pointer(|| {
        let context = ContextObject::find(context)?;
        let depth = u32::try_from(depth).map_err(|_| Errno::EINVAL)?;
        let vector = u32::try_from(vector).map_err(|_| Errno::EINVAL)?;
        Ok(create(context, &CqRequest { depth, cq_context, channel, vector })?.raw())
    })
}

/// `ibv_destroy_cq`: waits until the program acknowledged all events it was handed.
pub(crate) unsafe extern "C" fn destroy_cq(cq: *mut verbs::Cq) -> c_int {
    entry::code(|| {
        let ours = CqObject::find(cq)?;
        if ours.context.soft.is_forked() {
            return Ok(());
        }
        if ours.users.any() {
            return Err(Errno::EBUSY);
        }
        // Another thread that destroys it too finds it gone here.
        ours.context.objects().cqs.remove(&ours.soft.id()).ok_or(Errno::EINVAL)?;
        ours.comp_acks.wait();
        ours.async_acks.wait();
        CqObject::retract(cq).map(drop)
    })
}

/// `ibv_resize_cq`.
pub(crate) unsafe extern "C" fn resize_cq(cq: *mut verbs::Cq, depth: c_int) -> c_int {
    entry::code(|| {
        let ours = CqObject::find(cq)?;
        let asked = usize::try_from(depth).map_err(|_| Errno::EINVAL)?;
        ours.soft.resize(asked).map_err(|error| {
            log::warn(|| format!("ibv_resize_cq: {error}"));
            Errno(error.errno())
        })?;
        // SAFETY: our own structure, which C may read at any time, as with any library.
        unsafe { (&raw mut (*cq).cqe).write_volatile(depth) };
        Ok(())
    })
}

/// `ibv_req_notify_cq`, by the table.
pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut verbs::Cq, solicited_only: c_int) -> c_int {
    // SAFETY: the table this function is in belongs to our contexts, so the queue is ours.
    let cq = unsafe { CqObject::trust(cq) };
    entry::code(|| {
        cq.soft.request_notify(solicited_only != 0);
        Ok(())
    })
}
