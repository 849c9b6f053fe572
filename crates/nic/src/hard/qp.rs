//! Queue pairs of reliable connections on a hardware device.

use std::ffi::c_int;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::ptr::{self, NonNull};

use nobounce_protocol::qp::{AttrMask, Operation, QpAttr, QpState};
use nobounce_protocol::wire::Qpn;
use nobounce_verbs as verbs;

use super::cq::Cq;
use super::device::gid_of;
use super::error::{CreateError, ModifyError, PostError, last, returned};
use super::memory::Pd;
use crate::work::{QpLimits, RecvRequest, SendRequest, Sge};

/// Requests posted per call.
const LIST: usize = 16;
/// Hop limit of packets.
const HOP_LIMIT: u8 = 64;
/// Some drivers (rxe) treat a retry count of 7 as infinite, which would hang a waiting caller.
const MOST_RETRIES: u8 = 6;

type PostSend = unsafe extern "C" fn(*mut verbs::Qp, *mut verbs::SendWr, *mut *mut verbs::SendWr) -> c_int;
type PostRecv = unsafe extern "C" fn(*mut verbs::Qp, *mut verbs::RecvWr, *mut *mut verbs::RecvWr) -> c_int;

/// A queue pair. Dropping it destroys it.
pub struct Qp {
    raw: NonNull<verbs::Qp>,
    post_send: PostSend,
    post_recv: PostRecv,
    qpn: Qpn,
    limits: QpLimits,
    pd: Pd,
    _cqs: [Cq; 2],
}

// SAFETY: the functions of libibverbs may be called from any thread, on any object.
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

impl Drop for Qp {
    fn drop(&mut self) {
        if self.pd.device().is_forked() {
            return; // the parent's
        }
        // Before the QP number can be reused.
        self.pd.device().inner.staging.forget(self.qpn.get());
        // SAFETY: made by `create`, and not used again.
        unsafe { (self.pd.device().inner.context.library.api.destroy_qp)(self.raw.as_ptr()) };
    }
}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Qp({} on {})", self.qpn, self.pd.device().name())
    }
}

impl Qp {
    pub(crate) fn create(pd: &Pd, send_cq: &Cq, recv_cq: &Cq, limits: QpLimits) -> Result<Self, CreateError> {
        let device = pd.device();
        device.check_process()?;
        let attr = &device.inner.attr;
        for (what, asked, max) in [
            (
                "requests outstanding on a queue pair",
                limits.send_depth.max(limits.recv_depth),
                attr.max_qp_wr,
            ),
            ("elements of a scatter/gather list", limits.send_sges.max(limits.recv_sges), attr.max_sge),
        ] {
            let max = usize::try_from(max).unwrap_or(0);
            if asked > max {
                return Err(CreateError::Limit { what, asked, max, device: device.name().to_owned() });
            }
        }
        // Devices do not report their inline limit: request less until creation succeeds.
        let mut told = None;
        for inline in [limits.inline, 64, 0] {
            if inline > limits.inline {
                continue;
            }
            let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
            let mut init = verbs::QpInitAttr {
                qp_context: ptr::null_mut(),
                send_cq: send_cq.inner.raw.as_ptr(),
                recv_cq: recv_cq.inner.raw.as_ptr(),
                srq: ptr::null_mut(),
                cap: verbs::QpCap {
                    max_send_wr: number(limits.send_depth),
                    max_recv_wr: number(limits.recv_depth),
                    max_send_sge: number(limits.send_sges),
                    max_recv_sge: number(limits.recv_sges),
                    max_inline_data: number(inline),
                },
                qp_type: verbs::IBV_QPT_RC,
                sq_sig_all: limits.signal_all.into(),
            };
            // SAFETY: live objects of one device, and a valid structure.
            let raw =
                unsafe { (device.inner.context.library.api.create_qp)(pd.inner.raw.as_ptr(), &raw mut init) };
            match NonNull::new(raw) {
                Some(raw) => {
                    let limits = QpLimits { inline, ..limits };
                    return Self::with_table(pd, raw, limits, [send_cq.clone(), recv_cq.clone()]);
                }
                None => told = Some(last()),
            }
            if told.as_ref().is_none_or(|error: &io::Error| error.raw_os_error() != Some(libc::EINVAL)) {
                break;
            }
        }
        let os = told.unwrap_or_else(last);
        Err(CreateError::Refused { call: "ibv_create_qp", device: device.name().to_owned(), os })
    }

    fn with_table(
        pd: &Pd,
        raw: NonNull<verbs::Qp>,
        limits: QpLimits,
        cqs: [Cq; 2],
    ) -> Result<Self, CreateError> {
        // As the inline functions of verbs.h: through the ops table of the queue pair's own
        // context.
        // SAFETY: a live queue pair; its context lives as long.
        let (ops, qpn) = unsafe { (&(*raw.as_ref().context).ops, raw.as_ref().qp_num) };
        let (Some(post_send), Some(post_recv)) = (ops.post_send, ops.post_recv) else {
            // SAFETY: just made.
            unsafe { (pd.device().inner.context.library.api.destroy_qp)(raw.as_ptr()) };
            return Err(pd.device().refused("the table of the device: post_send"));
        };
        Ok(Self { raw, post_send, post_recv, qpn: Qpn::new(qpn), limits, pd: pd.clone(), _cqs: cqs })
    }

    /// Its number.
    pub fn qpn(&self) -> Qpn {
        self.qpn
    }

    pub(crate) fn pd(&self) -> &Pd {
        &self.pd
    }

    /// The libibverbs object, for calls not offered here: it lives as long as this one, and must
    /// not be destroyed.
    pub fn as_ptr(&self) -> *mut verbs::Qp {
        self.raw.as_ptr()
    }

    /// How deep its queues are, and what they take.
    pub fn limits(&self) -> &QpLimits {
        &self.limits
    }

    /// Modifies it. `lid` is where an InfiniBand peer is; elsewhere its address is all.
    ///
    /// # Errors
    /// The device refused; the message says what that means for this transition.
    pub fn modify(&self, attr: &QpAttr, lid: u16) -> Result<(), ModifyError> {
        let device = self.pd.device();
        if device.is_forked() {
            let (state, towards) = (state_name(attr.state), String::new());
            let os = io::Error::other("it was opened before a fork, and is the parent's");
            return Err(ModifyError { device: device.name().to_owned(), state, towards, os });
        }
        let mut raw = self.attributes(attr, lid);
        let mask = attr.mask.bits().cast_signed();
        // SAFETY: a live queue pair and a valid structure.
        let code =
            unsafe { (device.inner.context.library.api.modify_qp)(self.raw.as_ptr(), &raw mut raw, mask) };
        if code == 0 {
            return Ok(());
        }
        let towards = if attr.mask.contains(AttrMask::AV) {
            let doubt = device.doubt_gid(attr.remote).map_or(String::new(), |doubt| format!("; {doubt}"));
            format!("{} to {}{doubt}", place(device.local(), device.port().lid), place(attr.remote, lid))
        } else {
            String::new()
        };
        let os = returned(code);
        Err(ModifyError { device: device.name().to_owned(), state: state_name(attr.state), towards, os })
    }

    fn attributes(&self, attr: &QpAttr, lid: u16) -> verbs::QpAttr {
        let port = self.pd.device().port();
        // SAFETY: plain numbers, for which zeroes are valid.
        let mut raw: verbs::QpAttr = unsafe { std::mem::zeroed() };
        raw.qp_state = state_code(attr.state);
        raw.cur_qp_state = state_code(attr.cur_state);
        raw.path_mtu = attr.path_mtu.bytes().trailing_zeros() - 7; // 256 bytes are 1
        raw.rq_psn = attr.rq_psn.get();
        raw.sq_psn = attr.sq_psn.get();
        raw.dest_qp_num = attr.dest_qpn.get();
        raw.qp_access_flags = self.pd.flags(attr.access);
        raw.port_num = port.number;
        raw.max_rd_atomic = attr.max_rd_atomic;
        raw.max_dest_rd_atomic = attr.max_dest_rd_atomic;
        raw.min_rnr_timer = attr.min_rnr_timer;
        raw.timeout = attr.timeout;
        raw.retry_cnt = attr.retry_cnt.min(MOST_RETRIES);
        raw.rnr_retry = attr.rnr_retry;
        raw.ah_attr.port_num = port.number;
        raw.ah_attr.dlid = lid;
        if port.needs_grh {
            raw.ah_attr.is_global = 1;
            raw.ah_attr.grh.dgid = gid_of(attr.remote);
            raw.ah_attr.grh.sgid_index = u8::try_from(port.gid.index).unwrap_or(0);
            raw.ah_attr.grh.hop_limit = match attr.ip_options.hop_limit {
                0 => HOP_LIMIT,
                hops => hops,
            };
            raw.ah_attr.grh.traffic_class = attr.ip_options.traffic_class;
        }
        raw
    }

    /// Posts one request.
    ///
    /// # Errors
    /// The queue is full, a limit is passed, or the device refused.
    #[inline]
    pub fn post_send(&self, request: &SendRequest<'_>) -> Result<(), PostError> {
        if self.pd.device().inner.staging.concerns(request.wr_id) {
            return self.post_staged(request);
        }
        let mut one = Sge { addr: 0, len: 0, lkey: 0 };
        let mut wr = self.send_wr(request, &mut one)?;
        self.hand_over(&mut wr).map_err(|(_, error)| error)
    }

    /// Posts several, in order.
    ///
    /// # Errors
    /// How many were posted, and why the next was not.
    pub fn post_sends(&self, requests: &[SendRequest<'_>]) -> Result<(), (usize, PostError)> {
        for (at, list) in requests.chunks(LIST).enumerate() {
            let done = at * LIST;
            if list.len() == 1 || list.iter().any(|one| self.pd.device().inner.staging.concerns(one.wr_id)) {
                for (index, request) in list.iter().enumerate() {
                    self.post_send(request).map_err(|error| (done + index, error))?;
                }
                continue;
            }
            let mut inline = [Sge { addr: 0, len: 0, lkey: 0 }; LIST];
            let mut wrs: [verbs::SendWr; LIST] = std::array::from_fn(|_| empty());
            for ((request, wr), one) in list.iter().zip(&mut wrs).zip(&mut inline) {
                // What comes before it is not posted either: nothing of this list is.
                *wr = self.send_wr(request, one).map_err(|error| (done, error))?;
            }
            for index in 0..list.len() - 1 {
                wrs[index].next = &raw mut wrs[index + 1];
            }
            let first = &raw mut wrs[0];
            self.hand_over(&mut wrs[0]).map_err(|(bad, error)| {
                let posted = (bad.addr().wrapping_sub(first.addr())) / size_of::<verbs::SendWr>();
                (done + posted.min(list.len()), error)
            })?;
        }
        Ok(())
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// The queue is full, the list is too long, or the device refused.
    #[inline]
    pub fn post_recv(&self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        self.check_process()?;
        self.check_list(request.sges, self.limits.recv_sges)?;
        let staging = &self.pd.device().inner.staging;
        if staging.concerns(request.wr_id) {
            let staged = staging.prepare(self.qpn.get(), request.wr_id, None, true, request.sges)?;
            let posted = self.post_receive(staged.wr_id, &staged.sges);
            return posted.inspect_err(|_| staging.cancel(&staged));
        }
        self.post_receive(request.wr_id, request.sges)
    }

    fn post_receive(&self, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        let mut wr =
            verbs::RecvWr { wr_id, next: ptr::null_mut(), sg_list: list(sges), num_sge: count(sges) };
        let mut bad = ptr::null_mut();
        // SAFETY: a live queue pair; the request and its list live until the call returns.
        let code = unsafe { (self.post_recv)(self.raw.as_ptr(), &raw mut wr, &raw mut bad) };
        if code == 0 { Ok(()) } else { Err(refusal(code, self.limits.recv_depth)) }
    }

    fn post_staged(&self, request: &SendRequest<'_>) -> Result<(), PostError> {
        // Check before staging copies gigabytes in vain.
        self.check_process()?;
        self.check_length(request.sges)?;
        let staging = &self.pd.device().inner.staging;
        let staged = staging.prepare(
            self.qpn.get(),
            request.wr_id,
            Some(&request.op),
            request.signaled,
            request.sges,
        )?;
        let moved =
            SendRequest { wr_id: staged.wr_id, signaled: staged.signaled, sges: &staged.sges, ..*request };
        let mut one = Sge { addr: 0, len: 0, lkey: 0 };
        let posted = self
            .send_wr(&moved, &mut one)
            .and_then(|mut wr| self.hand_over(&mut wr).map_err(|(_, error)| error));
        posted.inspect_err(|_| staging.cancel(&staged))
    }

    /// The request as C wants it. `inline` is room for the one element of inline data.
    #[inline]
    fn send_wr(&self, request: &SendRequest<'_>, inline: &mut Sge) -> Result<verbs::SendWr, PostError> {
        self.check_process()?;
        let mut wr = empty();
        wr.wr_id = request.wr_id;
        match request.inline {
            Some(bytes) => {
                if bytes.len() > self.limits.inline {
                    return Err(limit("bytes to be sent inline", bytes.len(), self.limits.inline));
                }
                let len = u32::try_from(bytes.len()).unwrap_or(0);
                *inline = Sge { addr: bytes.as_ptr().expose_provenance() as u64, len, lkey: 0 };
                wr.sg_list = ptr::from_mut(inline).cast();
                wr.num_sge = 1;
                wr.send_flags = verbs::IBV_SEND_INLINE;
            }
            None => {
                self.check_list(request.sges, self.limits.send_sges)?;
                self.check_length(request.sges)?;
                wr.sg_list = list(request.sges);
                wr.num_sge = count(request.sges);
            }
        }
        for (wanted, flag) in [
            (request.signaled, verbs::IBV_SEND_SIGNALED),
            (request.solicited, verbs::IBV_SEND_SOLICITED),
            (request.fence, verbs::IBV_SEND_FENCE),
        ] {
            wr.send_flags |= if wanted { flag } else { 0 };
        }
        let rdma = |remote: &nobounce_protocol::qp::Remote| verbs::Wr {
            rdma: verbs::Rdma { remote_addr: remote.addr, rkey: remote.rkey },
        };
        match &request.op {
            Operation::Send => wr.opcode = verbs::IBV_WR_SEND,
            Operation::SendImmediate(value) => {
                (wr.opcode, wr.imm_data) = (verbs::IBV_WR_SEND_WITH_IMM, value.to_be());
            }
            Operation::Write(remote) => (wr.opcode, wr.wr) = (verbs::IBV_WR_RDMA_WRITE, rdma(remote)),
            Operation::WriteImmediate(remote, value) => {
                (wr.opcode, wr.wr) = (verbs::IBV_WR_RDMA_WRITE_WITH_IMM, rdma(remote));
                wr.imm_data = value.to_be();
            }
            Operation::Read(remote) => (wr.opcode, wr.wr) = (verbs::IBV_WR_RDMA_READ, rdma(remote)),
            Operation::FetchAdd { remote, add } => {
                wr.opcode = verbs::IBV_WR_ATOMIC_FETCH_AND_ADD;
                wr.wr.atomic =
                    verbs::Atomic { remote_addr: remote.addr, compare_add: *add, swap: 0, rkey: remote.rkey };
            }
            Operation::CompareSwap { remote, compare, swap } => {
                wr.opcode = verbs::IBV_WR_ATOMIC_CMP_AND_SWP;
                wr.wr.atomic = verbs::Atomic {
                    remote_addr: remote.addr,
                    compare_add: *compare,
                    swap: *swap,
                    rkey: remote.rkey,
                };
            }
            Operation::AtomicWrite(remote) => {
                (wr.opcode, wr.wr) = (verbs::IBV_WR_ATOMIC_WRITE, rdma(remote));
            }
            Operation::Flush { .. } => return Err(PostError::NotOffered("FLUSH")),
            Operation::SendInvalidate(_) | Operation::Local(_) => {
                return Err(PostError::NotOffered("invalidating and binding windows"));
            }
        }
        Ok(wr)
    }

    #[inline]
    fn check_process(&self) -> Result<(), PostError> {
        if self.pd.device().is_forked() {
            return Err(PostError::Forked(self.pd.device().name().to_owned()));
        }
        Ok(())
    }

    /// A message longer than the port's maximum would fail late and silently, or stop the queue
    /// pair.
    #[inline]
    fn check_length(&self, sges: &[Sge]) -> Result<(), PostError> {
        let len = sges.iter().map(|sge| u64::from(sge.len)).sum();
        let max = self.pd.device().port().max_message;
        if len > u64::from(max) {
            return Err(PostError::TooLong { len, max, device: self.pd.device().name().to_owned() });
        }
        Ok(())
    }

    #[inline]
    fn check_list(&self, sges: &[Sge], max: usize) -> Result<(), PostError> {
        if sges.len() > max { Err(limit("elements of the list", sges.len(), max)) } else { Ok(()) }
    }

    #[inline]
    fn hand_over(&self, first: &mut verbs::SendWr) -> Result<(), (*mut verbs::SendWr, PostError)> {
        let mut bad = ptr::from_mut(first);
        // SAFETY: a live queue pair; requests, lists and inline data live until the call returns.
        let code = unsafe { (self.post_send)(self.raw.as_ptr(), first, &raw mut bad) };
        if code == 0 { Ok(()) } else { Err((bad, refusal(code, self.limits.send_depth))) }
    }
}

fn empty() -> verbs::SendWr {
    // SAFETY: numbers, null pointers, and a union of them, for which zeroes are valid.
    unsafe { std::mem::zeroed() }
}

/// A list as C wants it. Devices only read it, and our elements are laid out as C's.
fn list(sges: &[Sge]) -> *mut verbs::Sge {
    sges.as_ptr().cast_mut().cast()
}

fn count(sges: &[Sge]) -> c_int {
    c_int::try_from(sges.len()).unwrap_or(c_int::MAX)
}

fn limit(what: &'static str, given: usize, max: usize) -> PostError {
    PostError::Limit { what, given, max }
}

#[cold]
fn refusal(code: c_int, depth: usize) -> PostError {
    let error = returned(code);
    match error.raw_os_error() {
        Some(libc::ENOMEM | libc::EAGAIN) => PostError::QueueFull(depth),
        _ => PostError::Refused(error),
    }
}

fn place(addr: IpAddr, lid: u16) -> String {
    if lid == 0 { addr.to_string() } else { format!("LID {lid:#x}") }
}

/// The number of a state in the verbs interface.
pub fn state_code(state: QpState) -> u32 {
    match state {
        QpState::Reset => verbs::IBV_QPS_RESET,
        QpState::Init => verbs::IBV_QPS_INIT,
        QpState::Rtr => verbs::IBV_QPS_RTR,
        QpState::Rts => verbs::IBV_QPS_RTS,
        QpState::Sqd => verbs::IBV_QPS_SQD,
        QpState::Sqe => verbs::IBV_QPS_SQE,
        QpState::Error => verbs::IBV_QPS_ERR,
    }
}

fn state_name(state: QpState) -> &'static str {
    match state {
        QpState::Reset => "RESET",
        QpState::Init => "INIT",
        QpState::Rtr => "RTR",
        QpState::Rts => "RTS",
        QpState::Sqd => "SQD",
        QpState::Sqe => "SQE",
        QpState::Error => "ERR",
    }
}
