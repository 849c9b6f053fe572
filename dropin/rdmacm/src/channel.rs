//! Event channels.

use std::collections::{HashMap, HashSet};
use std::ffi::{c_int, c_ulong};
use std::sync::{Mutex, PoisonError};

use nobounce_dropin::notice::NoticeFds;
use nobounce_nic::soft::CmChannel;

use crate::entry::{self, Errno};
use crate::layout::EventChannel;

#[repr(C)]
struct ChannelObject {
    raw: EventChannel,
    channel: CmChannel,
}

/// How long a thread that requests events of a destroyed channel is blocked, in milliseconds.
const GONE: c_int = 5000;

#[derive(Default)]
struct Channels {
    /// Every channel there is, by its address, and the process that made it.
    alive: HashMap<usize, (u32, CmChannel)>,
    /// Where there were some, and are none now.
    ended: HashSet<usize>,
}

static CHANNELS: Mutex<Option<Channels>> = Mutex::new(None);

fn with<T>(what: impl FnOnce(&mut Channels) -> T) -> T {
    what(CHANNELS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// Makes a channel.
pub(crate) fn create() -> Result<*mut EventChannel, Errno> {
    let channel = CmChannel::new()?;
    let raw = EventChannel { fd: channel.fd() };
    let object = Box::into_raw(Box::new(ChannelObject { raw, channel: channel.clone() }));
    let at = object.expose_provenance();
    with(|channels| {
        channels.ended.remove(&at);
        channels.alive.insert(at, (std::process::id(), channel));
    });
    Ok(object.cast())
}

/// The channel behind a pointer of C's.
pub(crate) fn find(raw: *mut EventChannel) -> Result<CmChannel, Errno> {
    let (process, channel) =
        with(|channels| channels.alive.get(&raw.addr()).cloned()).ok_or(Errno::EINVAL)?;
    // Events there belong to the parent: a child that read its descriptor would consume them.
    if process == std::process::id() { Ok(channel) } else { Err(Errno::EIO) }
}

/// Ends a channel.
pub(crate) fn destroy(raw: *mut EventChannel) {
    let known = with(|channels| {
        let known = channels.alive.remove(&raw.addr());
        known.inspect(|_| _ = channels.ended.insert(raw.addr()))
    });
    if known.is_some() {
        // SAFETY: it was in the table, so `create` made it, and no other thread has taken it out.
        drop(unsafe { Box::from_raw(raw.cast::<ChannelObject>()) });
    }
}

/// `rdma_create_event_channel`.
pub(crate) unsafe extern "C" fn rdma_create_event_channel() -> *mut EventChannel {
    entry::pointer(|| {
        // A channel exists for connections: report a missing device here.
        crate::device::devices(|_| true)?.first().ok_or(Errno(libc::ENODEV))?;
        create()
    })
}

/// `rdma_destroy_event_channel`.
pub(crate) unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut EventChannel) {
    entry::silent(|| {
        destroy(channel);
        Ok(())
    });
}

unsafe extern "C-unwind" {
    fn poll(fds: *mut libc::pollfd, count: c_ulong, timeout: c_int) -> c_int;
}

/// The descriptors of a channel.
pub(crate) fn fds(channel: &CmChannel) -> NoticeFds {
    NoticeFds::new(channel.fd(), channel.counter_fd())
}

/// Blocks a thread that requests events of a destroyed channel. Programs destroy a channel under
/// the thread that waits for its events (rping does, just before it leaves `main`). The kernel
/// keeps such a thread waiting. A thread that returns a moment too late would get an error, and
/// rping exits by that. So both wait. The thread may be cancelled in here, as in
/// [`NoticeFds::take`]. Errno stays as it was.
pub(crate) fn linger_if_ended(raw: *mut EventChannel) {
    // SAFETY: the thread's own errno, and no descriptors.
    unsafe {
        let errno = *libc::__errno_location();
        if with(|channels| channels.ended.contains(&raw.addr())) {
            poll(std::ptr::null_mut(), 0, GONE);
        }
        *libc::__errno_location() = errno;
    }
}
