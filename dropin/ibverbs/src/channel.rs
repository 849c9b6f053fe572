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
        let ours = ChannelObject::find(channel)?;
        if ours.context.soft.is_forked() {
            return Ok(());
        }
        if ours.users.any() {
            return Err(Errno::EBUSY);
        }
        ChannelObject::retract(channel).map(drop)
    })
}

/// The queue of a notice, if it still exists.
fn claim(channel: &ChannelObject) -> Option<&'static CqObject> {
    let id = channel.soft.claim()?;
    // Counted under the lock that also guards removal: a queue is either found here or not waited
    // for there.
    let objects = channel.context.objects();
    let cq = objects.cqs.get(&id)?;
    cq.comp_acks.delivered();
    Some(cq)
}

unsafe extern "C-unwind" {
    fn read(fd: c_int, to: *mut c_void, length: usize) -> isize;
}

/// Reads one notice from a descriptor. O_NONBLOCK and SA_RESTART, as the program has set them,
/// decide whether it waits and resumes after a signal. False, and errno, when there was none. The
/// thread may be cancelled in here, which unwinds it: neither this function nor its callers may own
/// anything.
pub(crate) fn read_notice(fd: c_int) -> bool {
    let mut notice = 0_u64;
    // SAFETY: eight bytes that can be written.
    unsafe { read(fd, (&raw mut notice).cast(), 8) == 8 }
}

/// Waits for events until `take` accepts one: 0, or -1 and errno. `fd` is the descriptor to wait
/// on.
pub(crate) fn wait_for(
    fd: impl Fn() -> Result<c_int, Errno>,
    take: impl Fn() -> Result<bool, Errno>,
) -> c_int {
    loop {
        let fd = entry::minus_one(&fd);
        if fd < 0 || !read_notice(fd) {
            return -1;
        }
        match entry::minus_one(|| Ok(take()?.into())) {
            0 => {}
            1 => return 0,
            _ => return -1,
        }
    }
}

/// `ibv_get_cq_event`.
pub(crate) unsafe extern "C-unwind" fn get_cq_event(
    channel: *mut verbs::CompChannel,
    cq: *mut *mut verbs::Cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    let fd = || {
        let channel = ChannelObject::find(channel)?;
        channel.context.alive()?;
        Ok(channel.soft.as_raw_fd())
    };
    wait_for(fd, || {
        let Some(found) = claim(ChannelObject::find(channel)?) else { return Ok(false) };
        // SAFETY: the caller passes valid places.
        unsafe {
            *cq = found.raw();
            *cq_context = (*found.raw()).cq_context;
        }
        Ok(true)
    })
}

/// `ibv_ack_cq_events`.
pub(crate) unsafe extern "C" fn ack_cq_events(cq: *mut verbs::Cq, events: u32) {
    entry::silent(|| {
        CqObject::find(cq)?.comp_acks.acknowledge(events);
        Ok(())
    });
}
