//! Open devices.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::c_int;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use nobounce_nic::soft::{Config, Device};
use nobounce_verbs as verbs;

use crate::cq::CqObject;
use crate::device_list::DeviceObject;
use crate::entry::{self, Errno};
use crate::live::{Kind, Object, Users};
use crate::qp::QpObject;
use crate::srq::SrqObject;
use crate::{attributes, cq, cq_ex, device_log, dm, domain, log, mr, mw, poll, port, post, qp_ex, srq, xrc};

/// An open device. C sees the end of its first field.
#[repr(C)]
pub(crate) struct ContextObject {
    verbs: UnsafeCell<verbs::VerbsContext>,
    pub(crate) soft: Device,
    pub(crate) device: &'static DeviceObject,
    pub(crate) users: Users,
    /// Its address handles.
    pub(crate) ahs: Users,
    objects: Arc<Mutex<Objects>>,
    /// Programs pass copies of it on, to import the context.
    command: OwnedFd,
}

/// Objects that events refer to, by the events' numbers.
#[derive(Default)]
pub(crate) struct Objects {
    /// A queue pair that was opened again has several objects, the oldest first.
    pub(crate) qps: HashMap<u32, Vec<&'static QpObject>>,
    pub(crate) cqs: HashMap<u32, &'static CqObject>,
    pub(crate) srqs: HashMap<u32, &'static SrqObject>,
}

impl Objects {
    /// Removes a queue pair object; `None` if it is not there.
    pub(crate) fn remove_qp(&mut self, qp: &QpObject) -> Option<()> {
        let qpn = qp.soft.qpn().get();
        let all = self.qps.get_mut(&qpn)?;
        let at = all.iter().position(|other| ptr::eq(*other, qp))?;
        all.remove(at);
        if all.is_empty() {
            self.qps.remove(&qpn);
        }
        Some(())
    }
}

impl Object for ContextObject {
    type Raw = verbs::Context;
    const KIND: Kind = Kind::Context;
    const RAW_AT: usize = offset_of!(verbs::VerbsContext, context);
}

impl ContextObject {
    /// The pointer that C knows it by.
    pub(crate) fn raw(&self) -> *mut verbs::Context {
        // SAFETY: only an address inside our own field is taken.
        unsafe { &raw mut (*self.verbs.get()).context }
    }

    pub(crate) fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The descriptor by which the program may import the context.
    pub(crate) fn cmd_fd(&self) -> RawFd {
        self.command.as_raw_fd()
    }

    fn new(
        soft: Device,
        device: &'static DeviceObject,
        objects: Arc<Mutex<Objects>>,
        command: OwnedFd,
    ) -> Self {
        let raw = ptr::from_ref(device).cast_mut().cast();
        let verbs = UnsafeCell::new(table(raw, &soft, command.as_raw_fd()));
        Self { verbs, soft, device, users: Users::default(), ahs: Users::default(), objects, command }
    }

    /// Another context of the same device.
    pub(crate) fn share(&self, command: OwnedFd) -> *mut verbs::Context {
        Self::new(self.soft.clone(), self.device, self.objects.clone(), command).publish()
    }

    /// EIO in a forked child, where the device is dead and locks may be held by threads that do not
    /// exist.
    pub(crate) fn alive(&self) -> Result<(), Errno> {
        if self.soft.is_forked() { Err(Errno::EIO) } else { Ok(()) }
    }
}

/// Events of one kind delivered to the program, and those it acknowledged: an object is only
/// destroyed when the two agree.
#[derive(Debug, Default)]
pub(crate) struct Acks {
    unacknowledged: Mutex<u32>,
    changed: Condvar,
}

impl Acks {
    fn count(&self) -> MutexGuard<'_, u32> {
        self.unacknowledged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn delivered(&self) {
        *self.count() += 1;
    }

    pub(crate) fn acknowledge(&self, events: u32) {
        let mut count = self.count();
        *count = count.saturating_sub(events);
        self.changed.notify_all();
    }

    pub(crate) fn wait(&self) {
        let mut count = self.count();
        while *count > 0 {
            count = self.changed.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Driver-private data behind `priv` that rdma-core's drivers may read: zeroes.
static NO_PRIVATE: [u64; 512] = [0; 512];

fn table(device: *mut verbs::Device, soft: &Device, command: RawFd) -> verbs::VerbsContext {
    // SAFETY: all fields are numbers, pointers, optional function pointers and a mutex, for all of
    // which zeroes are valid.
    let mut table: verbs::VerbsContext = unsafe { std::mem::zeroed() };
    table.sz = size_of::<verbs::VerbsContext>();
    table.priv_ = NO_PRIVATE.as_ptr().cast_mut().cast();
    table.query_port = Some(port::query_port_sized);
    table.create_cq_ex = Some(cq_ex::create_cq_ex);
    table.create_qp_ex = Some(qp_ex::create_qp_ex);
    table.reg_mr_ex = Some(mr::reg_mr_ex);
    table.advise_mr = Some(mr::advise_mr);
    table.alloc_null_mr = Some(mr::alloc_null_mr);
    table.alloc_dm = Some(dm::alloc_dm);
    table.free_dm = Some(dm::free_dm);
    table.reg_dm_mr = Some(dm::reg_dm_mr);
    table.alloc_td = Some(domain::alloc_td);
    table.dealloc_td = Some(domain::dealloc_td);
    table.alloc_parent_domain = Some(domain::alloc_parent_domain);
    table.open_xrcd = Some(xrc::open_xrcd);
    table.open_qp = Some(xrc::open_qp);
    table.close_xrcd = Some(xrc::close_xrcd);
    table.query_rt_values = Some(attributes::query_rt_values);
    table.create_srq_ex = Some(srq::create_srq_ex);
    table.get_srq_num = Some(srq::get_srq_num);
    table.query_device_ex = Some(attributes::query_device_ex);
    let context = &mut table.context;
    context.device = device;
    context.cmd_fd = command;
    context.async_fd = soft.event_fd();
    context.num_comp_vectors = 1;
    context.abi_compat = verbs::ABI_IS_EXTENDED;
    context.ops._compat_query_device = Some(attributes::query_device);
    context.ops._compat_query_port = Some(port::query_port);
    context.ops.alloc_mw = Some(mw::alloc_mw);
    context.ops.bind_mw = Some(mw::bind_mw);
    context.ops.dealloc_mw = Some(mw::dealloc_mw);
    context.ops.poll_cq = Some(poll::poll_cq);
    context.ops.req_notify_cq = Some(cq::req_notify_cq);
    context.ops.post_send = Some(post::post_send);
    context.ops.post_recv = Some(post::post_recv);
    context.ops.post_srq_recv = Some(post::post_srq_recv);
    table
}

/// `ibv_open_device`.
pub(crate) unsafe extern "C" fn open_device(device: *mut verbs::Device) -> *mut verbs::Context {
    entry::pointer(|| {
        let ours = DeviceObject::find(device)?;
        device_log::listen();
        let opened = Config::from_env()
            .map_err(Into::into)
            .and_then(|config| Device::open(&Config { addr: ours.addr, ..config }));
        let soft = opened.map_err(|error| {
            log::error(|| format!("cannot open {}: {error}", ours.name()));
            Errno(error_number(&error))
        })?;
        log::info(|| format!("{} is open at {}", ours.name(), soft.local()));
        Ok(ContextObject::new(soft, ours, Arc::default(), command_file()?).publish())
    })
}

/// An empty file, which no other context has.
fn command_file() -> Result<OwnedFd, Errno> {
    // SAFETY: a C string and a number.
    let fd = unsafe { libc::memfd_create(c"nobounce".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: just opened, with no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The number behind an error of the link, if it came from the system.
fn error_number(error: &(dyn std::error::Error + 'static)) -> c_int {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(number) = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error) {
            return number;
        }
        cause = error.source();
    }
    libc::EINVAL
}

/// `ibv_close_device`. Objects that the program did not destroy stay as they are, as the manual
/// page says.
pub(crate) unsafe extern "C" fn close_device(context: *mut verbs::Context) -> c_int {
    entry::code(|| {
        let closed = ContextObject::retract(context)?;
        if closed.users.any() || closed.soft.is_forked() {
            std::mem::forget(closed);
        }
        Ok(())
    })
}
