//! Completion channels.

use std::cell::{Cell, UnsafeCell};
use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;

use nobounce_dropin::notice::NoticeFds;
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

/// The queue of a notice, if it still exists. `has_counted`: the caller has read the counter.
fn claim(channel: &ChannelObject, has_counted: bool) -> Option<&'static CqObject> {
    let id = if has_counted { channel.soft.claim() } else { channel.soft.next() }?;
    // Counted under the lock that also guards removal: a queue is either found here or not waited
    // for there.
    let objects = channel.context.objects();
    let cq = objects.cqs.get(&id)?;
    cq.comp_acks.delivered();
    Some(cq)
}

/// Waits for events until `take` accepts one: 0, or -1 and errno. The thread may be cancelled in
/// here: see [`NoticeFds::take`].
pub(crate) fn wait_for(
    fds: impl Fn() -> Result<NoticeFds, Errno>,
    take: impl Fn() -> Result<bool, Errno>,
) -> c_int {
    loop {
        let mut found = None;
        let failed = entry::minus_one(|| {
            found = Some(fds()?);
            Ok(0)
        });
        if failed != 0 || !found.is_some_and(NoticeFds::take) {
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
    let has_counted = Cell::new(true);
    let fds = || {
        let channel = ChannelObject::find(channel)?;
        channel.context.alive()?;
        has_counted.set(true);
        let fds = NoticeFds::new(channel.soft.as_raw_fd(), channel.soft.counter_fd());
        if !fds.do_wait() {
            channel.soft.note_polled();
            return Ok(fds);
        }
        let blocked = channel.soft.block();
        has_counted.set(!blocked.is_watching());
        Ok(NoticeFds::new(channel.soft.as_raw_fd(), blocked.fd()).hold(blocked))
    };
    wait_for(fds, || {
        let Some(found) = claim(ChannelObject::find(channel)?, has_counted.get()) else { return Ok(false) };
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
