//! Extended queue pairs: requests built call by call (`ibv_wr_*`), and posted together.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::ops::Range;

use nobounce_nic::work::{Datagram, LocalWork, Operation, QpLimits, Remote, SendRequest, Sge};
use nobounce_protocol::wire::Feth;
use nobounce_verbs as verbs;

use crate::convert::post_errno;
use crate::cq_ex::CallLock;
use crate::entry::{self, Errno};
use crate::live::Object;
use crate::log;
use crate::mw;
use crate::post::{check_flags, datagram};
use crate::qp::{self, QpObject};
use crate::xrc::XrcdObject;

/// Operations of connected queue pairs.
const CONNECTED: u64 = verbs::IBV_QP_EX_WITH_RDMA_WRITE
    | verbs::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | verbs::IBV_QP_EX_WITH_SEND
    | verbs::IBV_QP_EX_WITH_SEND_WITH_IMM;
/// Operations of reliable queue pairs only.
const RELIABLE: u64 = verbs::IBV_QP_EX_WITH_RDMA_READ
    | verbs::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | verbs::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    | verbs::IBV_QP_EX_WITH_SEND_WITH_INV
    | verbs::IBV_QP_EX_WITH_BIND_MW
    | verbs::IBV_QP_EX_WITH_LOCAL_INV
    | verbs::IBV_QP_EX_WITH_ATOMIC_WRITE
    | verbs::IBV_QP_EX_WITH_FLUSH;
/// Operations of datagram queue pairs.
const DATAGRAM: u64 = verbs::IBV_QP_EX_WITH_SEND | verbs::IBV_QP_EX_WITH_SEND_WITH_IMM;

/// The requests between `ibv_wr_start` and `ibv_wr_complete`.
#[derive(Default)]
pub(crate) struct Building {
    lock: CallLock,
    batch: UnsafeCell<Batch>,
}

/// Its memory is kept for the next ones.
#[derive(Default)]
struct Batch {
    requests: Vec<Request>,
    sges: Vec<Sge>,
    inline: Vec<u8>,
    /// The first mistake: then nothing is posted.
    mistake: Option<Errno>,
}

struct Request {
    wr_id: u64,
    flags: u32,
    op: Operation,
    sges: Range<usize>,
    inline: Option<Range<usize>>,
    to: Option<Datagram>,
    xrc_srq: u32,
}

impl Batch {
    fn clear(&mut self) {
        self.requests.clear();
        self.sges.clear();
        self.inline.clear();
        self.mistake = None;
    }

    fn mistaken(&mut self, errno: Errno) {
        self.mistake = self.mistake.or(Some(errno));
    }

    /// Changes the request that was begun last.
    fn last(&mut self, change: impl FnOnce(&mut Request)) {
        match self.requests.last_mut() {
            Some(request) => change(request),
            None => self.mistaken(Errno::EINVAL),
        }
    }

    fn request(&self, request: &Request) -> SendRequest<'_> {
        SendRequest {
            wr_id: request.wr_id,
            op: request.op,
            sges: &self.sges[request.sges.clone()],
            signaled: request.flags & verbs::IBV_SEND_SIGNALED != 0,
            solicited: request.flags & verbs::IBV_SEND_SOLICITED != 0,
            fence: request.flags & verbs::IBV_SEND_FENCE != 0,
            inline: request.inline.clone().map(|bytes| &self.inline[bytes]),
            to: request.to,
            xrc_srq: request.xrc_srq,
        }
    }
}

/// `ibv_create_qp_ex`, by the table.
pub(crate) unsafe extern "C" fn create_qp_ex(
    _context: *mut verbs::Context,
    attr: *mut verbs::QpInitAttrEx,
) -> *mut verbs::Qp {
    entry::pointer(|| {
        // SAFETY: the caller passes a valid structure. Requested capabilities are granted exactly,
        // so it stays as it is.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::EINVAL)?;
        let has = |bit: u32| attr.comp_mask & bit != 0;
        let known = verbs::IBV_QP_INIT_ATTR_PD
            | verbs::IBV_QP_INIT_ATTR_XRCD
            | verbs::IBV_QP_INIT_ATTR_CREATE_FLAGS
            | verbs::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        let flags = has(verbs::IBV_QP_INIT_ATTR_CREATE_FLAGS) && attr.create_flags != 0;
        if attr.comp_mask & !known != 0 || flags {
            return Err(Errno::EOPNOTSUPP);
        }
        let is_target = attr.qp_type == verbs::IBV_QPT_XRC_RECV;
        let domain = if is_target { verbs::IBV_QP_INIT_ATTR_XRCD } else { verbs::IBV_QP_INIT_ATTR_PD };
        if !has(domain) {
            return Err(Errno::EINVAL);
        }
        let offered = match attr.qp_type {
            verbs::IBV_QPT_RC | verbs::IBV_QPT_XRC_SEND => CONNECTED | RELIABLE,
            verbs::IBV_QPT_XRC_RECV => 0,
            verbs::IBV_QPT_UC => CONNECTED,
            verbs::IBV_QPT_UD => DATAGRAM,
            _ => return Err(Errno::EOPNOTSUPP),
        };
        let builds = has(verbs::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS);
        if builds && attr.send_ops_flags & !offered != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let init = verbs::QpInitAttr {
            qp_context: attr.qp_context,
            send_cq: attr.send_cq,
            recv_cq: attr.recv_cq,
            srq: attr.srq,
            cap: attr.cap,
            qp_type: attr.qp_type,
            sq_sig_all: attr.sq_sig_all,
        };
        let qp = match is_target {
            true => qp::create_target(XrcdObject::find(attr.xrcd)?, &init)?,
            false => qp::create(attr.pd, &init)?,
        };
        if builds {
            // SAFETY: just made, and not yet shared.
            fill(unsafe { &mut *qp.raw_ex() });
        }
        Ok(qp.raw())
    })
}

fn fill(ex: &mut verbs::QpEx) {
    ex.wr_start = Some(wr_start);
    ex.wr_complete = Some(wr_complete);
    ex.wr_abort = Some(wr_abort);
    ex.wr_send = Some(wr_send);
    ex.wr_send_imm = Some(wr_send_imm);
    ex.wr_send_inv = Some(wr_send_inv);
    ex.wr_rdma_write = Some(wr_rdma_write);
    ex.wr_rdma_write_imm = Some(wr_rdma_write_imm);
    ex.wr_rdma_read = Some(wr_rdma_read);
    ex.wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
    ex.wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
    ex.wr_atomic_write = Some(wr_atomic_write);
    ex.wr_flush = Some(wr_flush);
    ex.wr_bind_mw = Some(wr_bind_mw);
    ex.wr_local_inv = Some(wr_local_inv);
    ex.wr_set_ud_addr = Some(wr_set_ud_addr);
    ex.wr_set_xrc_srqn = Some(wr_set_xrc_srqn);
    ex.wr_set_sge = Some(wr_set_sge);
    ex.wr_set_sge_list = Some(wr_set_sge_list);
    ex.wr_set_inline_data = Some(wr_set_inline_data);
    ex.wr_set_inline_data_list = Some(wr_set_inline_data_list);
}

/// `ibv_qp_to_qp_ex`: null unless the queue pair was made for it.
pub(crate) unsafe extern "C" fn qp_to_qp_ex(qp: *mut verbs::Qp) -> *mut verbs::QpEx {
    entry::pointer(|| {
        let ex = QpObject::find(qp)?.raw_ex();
        // SAFETY: a queue pair of ours, whose table does not change any more.
        if unsafe { (*ex).wr_start }.is_none() { Err(Errno::EINVAL) } else { Ok(ex) }
    })
}

/// Runs `change` on the requests that are being built.
///
/// # Safety
/// `qp` is a queue pair of ours, and the caller is between `wr_start` and `wr_complete`.
unsafe fn with(qp: *mut verbs::QpEx, change: impl FnOnce(&mut Batch)) {
    // SAFETY: as promised: the lock is held.
    let batch = unsafe { &mut *QpObject::trust(qp.cast()).building.batch.get() };
    let changed = entry::guarded(|| {
        change(&mut *batch);
        Ok(())
    });
    if let Err(errno) = changed {
        batch.mistaken(errno);
    }
}

/// Begins a request.
///
/// # Safety
/// As for [`with`].
unsafe fn begin(qp: *mut verbs::QpEx, op: Operation) {
    // SAFETY: the program set these before the call.
    let (wr_id, flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
    let request = Request { wr_id, flags, op, sges: 0..0, inline: None, to: None, xrc_srq: 0 };
    let push = |batch: &mut Batch| {
        if let Err(errno) = check_flags(flags) {
            batch.mistaken(errno);
        }
        batch.requests.push(request);
    };
    // SAFETY: as promised.
    unsafe { with(qp, push) };
}

unsafe extern "C" fn wr_start(qp: *mut verbs::QpEx) {
    // SAFETY: this function is only in queue pairs of ours.
    unsafe { QpObject::trust(qp.cast()) }.building.lock.acquire();
    // SAFETY: as above, and we hold the lock.
    unsafe { with(qp, Batch::clear) };
}

unsafe extern "C" fn wr_abort(qp: *mut verbs::QpEx) {
    // SAFETY: this function is only in queue pairs of ours.
    unsafe { QpObject::trust(qp.cast()) }.building.lock.release();
}

/// Posts all of the requests, or none where one is invalid or the queue is too full.
unsafe extern "C" fn wr_complete(qp: *mut verbs::QpEx) -> c_int {
    // SAFETY: this function is only in queue pairs of ours.
    let qp = unsafe { QpObject::trust(qp.cast()) };
    // SAFETY: `wr_start` took the lock.
    let batch = unsafe { &*qp.building.batch.get() };
    let code = entry::code(|| {
        if let Some(mistake) = batch.mistake {
            return Err(mistake);
        }
        let requests = batch.requests.iter().map(|request| batch.request(request));
        qp.soft.post_all(requests).map_err(|(nth, error)| {
            log::debug(|| format!("ibv_wr_complete: request {nth}: {error}"));
            post_errno(error)
        })
    });
    qp.building.lock.release();
    code
}

unsafe extern "C" fn wr_send(qp: *mut verbs::QpEx) {
    // SAFETY: only in queue pairs of ours, after `wr_start`; so all that follow.
    unsafe { begin(qp, Operation::Send) };
}

unsafe extern "C" fn wr_send_imm(qp: *mut verbs::QpEx, immediate: u32) {
    // SAFETY: as above.
    unsafe { begin(qp, Operation::SendImmediate(u32::from_be(immediate))) };
}

unsafe extern "C" fn wr_send_inv(qp: *mut verbs::QpEx, key: u32) {
    // SAFETY: as above.
    unsafe { begin(qp, Operation::SendInvalidate(key)) };
}

unsafe extern "C" fn wr_rdma_write(qp: *mut verbs::QpEx, rkey: u32, addr: u64) {
    // SAFETY: as above.
    unsafe { begin(qp, Operation::Write(Remote { addr, rkey })) };
}

unsafe extern "C" fn wr_rdma_write_imm(qp: *mut verbs::QpEx, rkey: u32, addr: u64, immediate: u32) {
    // SAFETY: as above.
    unsafe { begin(qp, Operation::WriteImmediate(Remote { addr, rkey }, u32::from_be(immediate))) };
}

unsafe extern "C" fn wr_rdma_read(qp: *mut verbs::QpEx, rkey: u32, addr: u64) {
    // SAFETY: as above.
    unsafe { begin(qp, Operation::Read(Remote { addr, rkey })) };
}

unsafe extern "C" fn wr_atomic_cmp_swp(qp: *mut verbs::QpEx, rkey: u32, addr: u64, compare: u64, swap: u64) {
    // SAFETY: as above.
    unsafe { begin(qp, Operation::CompareSwap { remote: Remote { addr, rkey }, compare, swap }) };
}

unsafe extern "C" fn wr_atomic_fetch_add(qp: *mut verbs::QpEx, rkey: u32, addr: u64, add: u64) {
    // SAFETY: as above.
    unsafe { begin(qp, Operation::FetchAdd { remote: Remote { addr, rkey }, add }) };
}

unsafe extern "C" fn wr_atomic_write(qp: *mut verbs::QpEx, rkey: u32, addr: u64, word: *const c_void) {
    // SAFETY: as above; the program passes eight bytes to write.
    unsafe {
        begin(qp, Operation::AtomicWrite(Remote { addr, rkey }));
        wr_set_inline_data(qp, word.cast_mut(), 8);
    }
}

unsafe extern "C" fn wr_flush(qp: *mut verbs::QpEx, rkey: u32, addr: u64, len: usize, kind: u8, level: u8) {
    let known = matches!(kind, 1..=Feth::ALL) && level <= verbs::IBV_FLUSH_MR;
    // SAFETY: as above.
    unsafe {
        match u32::try_from(len).ok().filter(|_| known) {
            Some(len) => {
                begin(
                    qp,
                    Operation::Flush { remote: Remote { addr, rkey }, len, feth: Feth::new(kind, level) },
                );
            }
            None => with(qp, |batch| batch.mistaken(Errno::EINVAL)),
        }
    }
}

unsafe extern "C" fn wr_bind_mw(
    qp: *mut verbs::QpEx,
    window: *mut verbs::Mw,
    rkey: u32,
    info: *const verbs::MwBindInfo,
) {
    // SAFETY: the program passes a window of this device's, and what to put behind it.
    let work = unsafe { mw::bind_ex(window, rkey, info) };
    // SAFETY: as above.
    unsafe {
        match work {
            Ok(work) => begin(qp, work),
            Err(errno) => with(qp, |batch| batch.mistaken(errno)),
        }
    }
}

unsafe extern "C" fn wr_local_inv(qp: *mut verbs::QpEx, key: u32) {
    // SAFETY: as above.
    unsafe { begin(qp, Operation::Local(LocalWork::Invalidate(key))) };
}

unsafe extern "C" fn wr_set_ud_addr(qp: *mut verbs::QpEx, ah: *mut verbs::Ah, qpn: u32, qkey: u32) {
    // SAFETY: the program passes an address handle.
    let to = unsafe { datagram(ah, qpn, qkey) };
    // SAFETY: as above.
    unsafe {
        with(qp, |batch| match to {
            Ok(to) => batch.last(|request| request.to = Some(to)),
            Err(errno) => batch.mistaken(errno),
        });
    }
}

unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut verbs::QpEx, number: u32) {
    // SAFETY: as above.
    unsafe { with(qp, |batch| batch.last(|request| request.xrc_srq = number)) };
}

unsafe extern "C" fn wr_set_sge(qp: *mut verbs::QpEx, lkey: u32, addr: u64, length: u32) {
    let sge = verbs::Sge { addr, length, lkey };
    // SAFETY: as above; a list of one.
    unsafe { wr_set_sge_list(qp, 1, &raw const sge) };
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut verbs::QpEx, count: usize, list: *const verbs::Sge) {
    // SAFETY: as above; the list has `count` elements, laid out as ours (see `post.rs`).
    unsafe {
        with(qp, |batch| {
            let start = batch.sges.len();
            if count > 0 {
                batch.sges.extend_from_slice(std::slice::from_raw_parts(list.cast(), count));
            }
            let sges = start..batch.sges.len();
            batch.last(|request| request.sges = sges);
        });
    }
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut verbs::QpEx, addr: *mut c_void, length: usize) {
    let buffer = verbs::DataBuf { addr, length };
    // SAFETY: as above; a list of one.
    unsafe { wr_set_inline_data_list(qp, 1, &raw const buffer) };
}

unsafe extern "C" fn wr_set_inline_data_list(
    qp: *mut verbs::QpEx,
    count: usize,
    list: *const verbs::DataBuf,
) {
    // SAFETY: as above; the list has `count` elements, whose memory the program can read.
    unsafe {
        with(qp, |batch| {
            let start = batch.inline.len();
            for i in 0..count {
                let buffer = &*list.add(i);
                let room = QpLimits::MAX.inline.saturating_sub(batch.inline.len() - start);
                if buffer.length > room {
                    return batch.mistaken(Errno::EINVAL);
                }
                if buffer.length > 0 {
                    let bytes = std::slice::from_raw_parts(buffer.addr.cast(), buffer.length);
                    batch.inline.extend_from_slice(bytes);
                }
            }
            let inline = start..batch.inline.len();
            batch.last(|request| request.inline = Some(inline));
        });
    }
}
