//! Completion queues and channels of a hardware device.

use std::ffi::c_int;
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use nobounce_protocol::qp::{DatagramSource, Status, WorkKind};
use nobounce_protocol::wire::Qpn;
use nobounce_verbs as verbs;

use super::device::{Device, set_nonblocking};
use super::error::{CqError, CreateError};
use crate::work::WorkCompletion;

/// Completions per first call, and per further call after a full one. Most polls find none or one;
/// zeroing a larger array would be wasted.
const FEW: usize = 4;
const BATCH: usize = 32;

struct ChannelInner {
    device: Device,
    raw: NonNull<verbs::CompChannel>,
}

// SAFETY: the functions of libibverbs may be called from any thread, on any object.
unsafe impl Send for ChannelInner {}
// SAFETY: as above.
unsafe impl Sync for ChannelInner {}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        if self.device.is_forked() {
            return; // the parent's
        }
        // SAFETY: made by `create`; queues on it held us and are gone.
        unsafe { (self.device.inner.context.library.api.destroy_comp_channel)(self.raw.as_ptr()) };
    }
}

/// A completion channel: readable when a completion queue that was armed on it has something.
#[derive(Clone)]
pub struct Channel {
    inner: Arc<ChannelInner>,
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Channel({:?})", self.inner.device)
    }
}

impl Channel {
    pub(crate) fn create(device: &Device) -> Result<Self, CreateError> {
        device.check_process()?;
        // SAFETY: an open device.
        let raw =
            unsafe { (device.inner.context.library.api.create_comp_channel)(device.inner.context.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| device.refused("ibv_create_comp_channel"))?;
        // SAFETY: a live channel; its descriptor has no other reader.
        unsafe { set_nonblocking(raw.as_ref().fd) };
        Ok(Self { inner: Arc::new(ChannelInner { device: device.clone(), raw }) })
    }

    /// Takes all pending events. Returns whether there were any. Never blocks.
    pub fn take(&self) -> bool {
        let api = &self.inner.device.inner.context.library.api;
        let mut any = false;
        if self.inner.device.is_forked() {
            return any; // the parent's events
        }
        loop {
            let (mut cq, mut of) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: a live channel whose descriptor does not block, and valid places.
            if unsafe { (api.get_cq_event)(self.inner.raw.as_ptr(), &raw mut cq, &raw mut of) } != 0 {
                return any;
            }
            any = true;
            // SAFETY: the queue that the event is of; it cannot be destroyed before this.
            unsafe { (api.ack_cq_events)(cq, 1) };
        }
    }

    /// Waits at most `timeout` for an event. Returns whether one came; takes all pending events.
    pub fn wait(&self, timeout: Duration) -> bool {
        let mut poll = libc::pollfd { fd: self.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let timeout = c_int::try_from(timeout.as_millis()).unwrap_or(c_int::MAX);
        // SAFETY: one valid structure.
        unsafe { libc::poll(&raw mut poll, 1, timeout) };
        self.take()
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        // SAFETY: a live channel.
        unsafe { self.inner.raw.as_ref().fd }
    }
}

pub(crate) struct CqInner {
    device: Device,
    pub(crate) raw: NonNull<verbs::Cq>,
    poll: unsafe extern "C" fn(*mut verbs::Cq, c_int, *mut verbs::Wc) -> c_int,
    notify: unsafe extern "C" fn(*mut verbs::Cq, c_int) -> c_int,
    /// Outlives the queue.
    _channel: Option<Channel>,
}

// SAFETY: the functions of libibverbs may be called from any thread, on any object.
unsafe impl Send for CqInner {}
// SAFETY: as above.
unsafe impl Sync for CqInner {}

impl Drop for CqInner {
    fn drop(&mut self) {
        if self.device.is_forked() {
            return; // the parent's
        }
        // [`Channel::take`] acknowledges events at once, and destroying the CQ discards those not
        // taken: nothing to wait for. Events of other CQs stay on the channel for its waiters.
        // SAFETY: made by `create`; queue pairs on it held us and are gone.
        unsafe { (self.device.inner.context.library.api.destroy_cq)(self.raw.as_ptr()) };
        // A new CQ may reuse this address.
        let mut failed = self.device.inner.failed_queues.lock().unwrap_or_else(PoisonError::into_inner);
        failed.retain(|at| *at != self.raw.as_ptr().addr());
    }
}

/// A completion queue. Clones share it.
#[derive(Clone)]
pub struct Cq {
    pub(crate) inner: Arc<CqInner>,
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cq({:?}, {} entries)", self.inner.device, self.depth())
    }
}

impl Cq {
    pub(crate) fn create(
        device: &Device,
        depth: usize,
        channel: Option<&Channel>,
    ) -> Result<Self, CreateError> {
        device.check_process()?;
        let max = usize::try_from(device.inner.attr.max_cqe).unwrap_or(0);
        let asked = c_int::try_from(depth).ok().filter(|_| depth <= max);
        let asked = asked.ok_or_else(|| CreateError::Limit {
            what: "entries of a completion queue",
            asked: depth,
            max,
            device: device.name().to_owned(),
        })?;
        let on = channel.map_or(ptr::null_mut(), |channel| channel.inner.raw.as_ptr());
        let context = device.inner.context.as_ptr();
        // SAFETY: an open device, and a channel of it or none.
        let raw =
            unsafe { (device.inner.context.library.api.create_cq)(context, asked, ptr::null_mut(), on, 0) };
        let raw = NonNull::new(raw).ok_or_else(|| device.refused("ibv_create_cq"))?;
        // As the inline functions of verbs.h: through the ops table of the CQ's own context.
        // SAFETY: a live queue; its context lives as long.
        let ops = unsafe { &(*raw.as_ref().context).ops };
        let (Some(poll), Some(notify)) = (ops.poll_cq, ops.req_notify_cq) else {
            // SAFETY: just made.
            unsafe { (device.inner.context.library.api.destroy_cq)(raw.as_ptr()) };
            return Err(device.refused("the table of the device: poll_cq"));
        };
        let inner = CqInner { device: device.clone(), raw, poll, notify, _channel: channel.cloned() };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The libibverbs object, for calls not offered here: it lives as long as this one, and must
    /// not be destroyed.
    pub fn as_ptr(&self) -> *mut verbs::Cq {
        self.inner.raw.as_ptr()
    }

    /// How many completions it holds.
    pub fn depth(&self) -> usize {
        // SAFETY: a live queue.
        usize::try_from(unsafe { self.inner.raw.as_ref().cqe }).unwrap_or(0)
    }

    /// Whether an asynchronous event seen by [`Device::health`] reported lost completions of this
    /// CQ.
    pub fn has_failed(&self) -> bool {
        if self.inner.device.is_forked() {
            return false;
        }
        let failed = self.inner.device.inner.failed_queues.lock().unwrap_or_else(PoisonError::into_inner);
        failed.contains(&self.inner.raw.as_ptr().addr())
    }

    /// Takes at most `max` completions, and returns how many.
    ///
    /// # Errors
    /// The device is gone, or the queue overflowed.
    pub fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> Result<usize, CqError> {
        if self.inner.device.is_forked() {
            return Err(CqError::Forked(self.inner.device.name().to_owned()));
        }
        let mut wcs = [const { MaybeUninit::<verbs::Wc>::uninit() }; BATCH];
        let (mut taken, mut most) = (0, FEW);
        while taken < max {
            let want = most.min(max - taken);
            most = BATCH;
            // Zeroed: for a failed request a device need not fill every field.
            wcs[..want].fill_with(MaybeUninit::zeroed);
            let wanted = c_int::try_from(want).unwrap_or(1);
            // SAFETY: a live queue, and room for as many as are wanted.
            let got = unsafe { (self.inner.poll)(self.inner.raw.as_ptr(), wanted, wcs.as_mut_ptr().cast()) };
            let got = usize::try_from(got)
                .map_err(|_| CqError::Failed { device: self.inner.device.name().to_owned(), code: got })?;
            for wc in &wcs[..got.min(want)] {
                // SAFETY: plain numbers, for which zeroes are valid; the device filled as many as
                // it said.
                let wc = unsafe { wc.assume_init_ref() };
                let staging = &self.inner.device.inner.staging;
                let mut completion = completion_of(wc);
                if staging.has_marked(completion.wr_id) {
                    let (original, wanted) = staging.finish(&completion);
                    if !wanted {
                        continue;
                    }
                    completion = original;
                }
                out.push(completion);
                taken += 1;
            }
            if got < want {
                break;
            }
        }
        Ok(taken)
    }

    /// The next completion is announced on the channel, once.
    pub fn request_notify(&self, solicited_only: bool) {
        if self.inner.device.is_forked() {
            return;
        }
        // SAFETY: a live queue.
        unsafe { (self.inner.notify)(self.inner.raw.as_ptr(), solicited_only.into()) };
    }
}

/// Converts a device completion to ours.
fn completion_of(wc: &verbs::Wc) -> WorkCompletion {
    let status = status_of(wc.status);
    let kind = match wc.opcode {
        verbs::IBV_WC_SEND => WorkKind::Send,
        verbs::IBV_WC_RDMA_WRITE => WorkKind::Write,
        verbs::IBV_WC_RDMA_READ => WorkKind::Read,
        verbs::IBV_WC_COMP_SWAP => WorkKind::CompareSwap,
        verbs::IBV_WC_FETCH_ADD => WorkKind::FetchAdd,
        verbs::IBV_WC_ATOMIC_WRITE => WorkKind::AtomicWrite,
        verbs::IBV_WC_BIND_MW => WorkKind::BindWindow,
        verbs::IBV_WC_LOCAL_INV => WorkKind::LocalInvalidate,
        verbs::IBV_WC_RECV_RDMA_WITH_IMM => WorkKind::ReceiveWriteImmediate,
        _ if wc.opcode & verbs::IBV_WC_RECV != 0 => WorkKind::Receive,
        _ => WorkKind::Send,
    };
    let has = |flag: u32| status == Status::Success && wc.wc_flags & flag != 0;
    // The length is defined only where bytes were received, read or fetched; elsewhere it may be
    // anything.
    let moved =
        !matches!(kind, WorkKind::Send | WorkKind::Write | WorkKind::BindWindow | WorkKind::LocalInvalidate);
    WorkCompletion {
        wr_id: wc.wr_id,
        status,
        kind,
        byte_len: if status == Status::Success && moved { wc.byte_len } else { 0 },
        immediate: has(verbs::IBV_WC_WITH_IMM).then(|| u32::from_be(wc.imm_data)),
        invalidated: has(verbs::IBV_WC_WITH_INV).then_some(wc.imm_data),
        qpn: Qpn::new(wc.qp_num),
        source: None::<DatagramSource>,
        timestamp: 0,
    }
}

fn status_of(code: u32) -> Status {
    match code {
        verbs::IBV_WC_REM_INV_RD_REQ_ERR => Status::RemoteInvalidRequest,
        verbs::IBV_WC_REM_ABORT_ERR => Status::RemoteOperation,
        verbs::IBV_WC_RESP_TIMEOUT_ERR => Status::RetryExceeded,
        _ => Status::ALL
            .into_iter()
            .find(|status| *status as u32 == code)
            // An unknown status is a failure, never success.
            .unwrap_or(Status::General),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_unknown_status_is_success() {
        for code in 0..=64 {
            assert_eq!(status_of(code) == Status::Success, code == verbs::IBV_WC_SUCCESS, "{code}");
        }
        assert_eq!(status_of(verbs::IBV_WC_RETRY_EXC_ERR), Status::RetryExceeded);
        assert_eq!(status_of(verbs::IBV_WC_FATAL_ERR), Status::Fatal);
        assert_eq!(status_of(verbs::IBV_WC_LOC_EEC_OP_ERR), Status::General);
    }
}
