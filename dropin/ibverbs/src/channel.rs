//! Completion channels.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;

use nobounce_nic::soft;
use nobounce_verbs as verbs;

use crate::context::ContextObject;
use crate::cq::CqObject;
use crate::entry::{self, Errno};
use crate::live::{Kind, Object, Use, Users};

#[repr(C)]
pub(crate) struct ChannelObject {
    raw: UnsafeCell<verbs::CompChannel>,
    pub(crate) soft: soft::Channel,
    pub(crate) context: &'static ContextObject,
    pub(crate) users: Users,
    _context: Use,
}

impl Object for ChannelObject {
    type Raw = verbs::CompChannel;
    const KIND: Kind = Kind::Channel;
}

/// `ibv_create_comp_channel`.
pub(crate) unsafe extern "C" fn create_comp_channel(context: *mut verbs::Context) -> *mut verbs::CompChannel {
    entry::pointer(|| {
        let context = ContextObject::find(context)?;
        context.alive()?;
        let soft = context.soft.create_channel()?;
        let raw = verbs::CompChannel { context: context.raw(), fd: soft.as_raw_fd(), refcnt: 0 };
        let (users, _context) = (Users::default(), context.users.join());
        Ok(ChannelObject { raw: UnsafeCell::new(raw), soft, context, users, _context }.publish())
    })
}

/// `ibv_destroy_comp_channel`.
pub(crate) unsafe extern "C" fn destroy_comp_channel(channel: *mut verbs::CompChannel) -> c_int {
    entry::code(|| {
        if ChannelObject::find(channel)?.users.any() {
            return Err(Errno::EBUSY);
        }
        ChannelObject::retract(channel).map(drop)
    })
}

/// The next event of a queue that still exists.
fn next_event(channel: &ChannelObject) -> Option<&'static CqObject> {
    while let Some(id) = channel.soft.next() {
        // Counted under the lock under which a queue is removed: it is either found here or not waited for there.
        let objects = channel.context.objects();
        if let Some(cq) = objects.cqs.get(&id) {
            cq.comp_acks.delivered();
            return Some(cq);
        }
    }
    None
}

/// What a caller that waits for events does next.
pub(crate) enum Step {
    /// There was one, or an error: return this.
    Return(c_int),
    /// Wait until this descriptor is readable.
    Wait(c_int),
}

/// The step after nothing was found: as the descriptor's `O_NONBLOCK` says.
pub(crate) fn wait_or_again(fd: c_int) -> Result<Step, Errno> {
    // SAFETY: the call takes numbers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 {
        return Err(Errno::last());
    }
    if flags & libc::O_NONBLOCK != 0 { Err(Errno(libc::EAGAIN)) } else { Ok(Step::Wait(fd)) }
}

/// Turns a failed step into what the caller returns.
pub(crate) fn settle(step: Result<Step, Errno>) -> Step {
    step.unwrap_or_else(|errno| {
        errno.set();
        Step::Return(-1)
    })
}

unsafe extern "C-unwind" {
    fn poll(fds: *mut libc::pollfd, count: libc::nfds_t, timeout: c_int) -> c_int;
}

/// Waits until the descriptor is readable; false, and errno, when a signal came. The thread may be cancelled in here, which
/// unwinds it from here on: neither this function nor its callers may own anything.
pub(crate) fn wait_readable(fd: c_int) -> bool {
    let mut entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid entry.
    unsafe { poll(&raw mut entry, 1, -1) >= 0 }
}

/// `ibv_get_cq_event`.
pub(crate) unsafe extern "C-unwind" fn get_cq_event(
    channel: *mut verbs::CompChannel,
    cq: *mut *mut verbs::Cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    let step = || {
        settle(entry::guarded(|| {
            let channel = ChannelObject::find(channel)?;
            channel.context.alive()?;
            let Some(found) = next_event(channel) else { return wait_or_again(channel.soft.as_raw_fd()) };
            // SAFETY: the caller hands in valid places.
            unsafe {
                *cq = found.raw();
                *cq_context = (*found.raw()).cq_context;
            }
            Ok(Step::Return(0))
        }))
    };
    loop {
        match step() {
            Step::Return(code) => return code,
            Step::Wait(fd) => {
                if !wait_readable(fd) {
                    return -1;
                }
            }
        }
    }
}

/// `ibv_ack_cq_events`.
pub(crate) unsafe extern "C" fn ack_cq_events(cq: *mut verbs::Cq, events: u32) {
    entry::silent(|| {
        CqObject::find(cq)?.comp_acks.acknowledge(events);
        Ok(())
    });
}
