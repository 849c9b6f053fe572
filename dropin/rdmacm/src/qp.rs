//! Queue pairs of identifiers, and the states they go through.

use std::ffi::{c_int, c_void};
use std::net::IpAddr;
use std::ptr;

use nobounce_verbs as verbs;

use crate::address;
use crate::calls::{Calls, calls, done, made};
use crate::entry::{self, Errno};
use crate::id::{Id, State};
use crate::layout::{CmId, UDP_QKEY};

/// RNR timer: how long a requester waits that found no receive. 0 is 655 ms, as the kernel sets it:
/// programs choose their RNR retry count for that.
const MIN_RNR_TIMER: u8 = 0;
const HOP_LIMIT: u8 = 64;

/// Route to the remote side.
pub(crate) fn route(state: &State) -> Result<verbs::AhAttr, Errno> {
    let remote = state.link.remote.ok_or(Errno::EINVAL)?;
    Ok(route_to(remote, HOP_LIMIT, state.link.traffic_class))
}

/// Route to an address.
pub(crate) fn route_to(to: IpAddr, hop_limit: u8, traffic_class: u8) -> verbs::AhAttr {
    let dgid = address::gid(to);
    verbs::AhAttr {
        grh: verbs::GlobalRoute { dgid, flow_label: 0, sgid_index: 0, hop_limit, traffic_class },
        dlid: 0,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        is_global: 1,
        port_num: 1,
    }
}

/// The attributes that bring the identifier's queue pair into a state, and which they are.
fn attributes(id: &Id, qp_state: u32) -> Result<(verbs::QpAttr, u32), Errno> {
    let state = id.state();
    let link = &state.link;
    // SAFETY: numbers, for which zeroes are valid.
    let mut attr: verbs::QpAttr = unsafe { std::mem::zeroed() };
    attr.qp_state = qp_state;
    let mut mask = verbs::IBV_QP_STATE;
    match (qp_state, id.is_ud()) {
        (verbs::IBV_QPS_INIT, ud) => {
            mask |= verbs::IBV_QP_PKEY_INDEX | verbs::IBV_QP_PORT;
            attr.port_num = 1;
            if ud {
                mask |= verbs::IBV_QP_QKEY;
                attr.qkey = UDP_QKEY;
            } else {
                mask |= verbs::IBV_QP_ACCESS_FLAGS;
                attr.qp_access_flags = verbs::IBV_ACCESS_REMOTE_WRITE;
                if link.responder_resources > 0 {
                    attr.qp_access_flags |= verbs::IBV_ACCESS_REMOTE_READ | verbs::IBV_ACCESS_REMOTE_ATOMIC;
                }
            }
        }
        (verbs::IBV_QPS_RTR, true) => {}
        (verbs::IBV_QPS_RTR, false) => {
            mask |= verbs::IBV_QP_AV
                | verbs::IBV_QP_PATH_MTU
                | verbs::IBV_QP_DEST_QPN
                | verbs::IBV_QP_RQ_PSN
                | verbs::IBV_QP_MAX_DEST_RD_ATOMIC
                | verbs::IBV_QP_MIN_RNR_TIMER;
            attr.ah_attr = route(&state)?;
            attr.path_mtu = link.mtu.into();
            attr.dest_qp_num = link.remote_qpn.get();
            // Each side announces the *other* side's starting PSN.
            attr.rq_psn = link.local_psn.get();
            attr.max_dest_rd_atomic = link.responder_resources;
            attr.min_rnr_timer = MIN_RNR_TIMER;
        }
        (verbs::IBV_QPS_RTS, ud) => {
            mask |= verbs::IBV_QP_SQ_PSN;
            attr.sq_psn = link.remote_psn.get();
            if !ud {
                mask |= verbs::IBV_QP_TIMEOUT
                    | verbs::IBV_QP_RETRY_CNT
                    | verbs::IBV_QP_RNR_RETRY
                    | verbs::IBV_QP_MAX_QP_RD_ATOMIC;
                attr.timeout = link.ack_timeout;
                attr.retry_cnt = link.retry_count;
                attr.rnr_retry = link.rnr_retry_count;
                attr.max_rd_atomic = link.initiator_depth;
            }
        }
        _ => return Err(Errno::EINVAL),
    }
    Ok((attr, mask))
}

/// Brings the queue pair into a state.
fn modify(id: &Id, qp_state: u32) -> Result<(), Errno> {
    let (mut attr, mask) = attributes(id, qp_state)?;
    // SAFETY: the identifier's own queue pair, and a valid structure.
    done(unsafe { (calls()?.modify_qp)(id.qp(), &raw mut attr, mask.cast_signed()) })
}

/// The other side is known: it can receive and send.
pub(crate) fn connect(id: &Id) -> Result<(), Errno> {
    if id.qp().is_null() || id.is_ud() {
        return Ok(());
    }
    // Rights depend on what was agreed on, too.
    modify(id, verbs::IBV_QPS_INIT)?;
    modify(id, verbs::IBV_QPS_RTR)?;
    modify(id, verbs::IBV_QPS_RTS)
}

/// It is over.
pub(crate) fn stop(id: &Id) -> Result<(), Errno> {
    if id.qp().is_null() {
        return Ok(());
    }
    // SAFETY: numbers, for which zeroes are valid.
    let mut attr: verbs::QpAttr = unsafe { std::mem::zeroed() };
    attr.qp_state = verbs::IBV_QPS_ERR;
    // SAFETY: the identifier's own queue pair, and a valid structure.
    done(unsafe { (calls()?.modify_qp)(id.qp(), &raw mut attr, verbs::IBV_QP_STATE.cast_signed()) })
}

/// Makes the completion queues that the program did not bring.
///
/// # Safety
/// Structures of C's, valid.
unsafe fn create_cqs(id: &Id, attr: &mut verbs::QpInitAttr, calls: &Calls) -> Result<(), Errno> {
    // SAFETY: our own structure, in a call about it.
    let raw = unsafe { &mut *id.raw() };
    let make = |depth: u32| -> Result<(*mut verbs::CompChannel, *mut verbs::Cq), Errno> {
        // SAFETY: an open context; the queue's context is the identifier, as programs expect.
        unsafe {
            let channel = made((calls.create_comp_channel)(raw.verbs))?;
            let depth = c_int::try_from(depth.max(1)).unwrap_or(c_int::MAX);
            let context = id.raw().cast::<c_void>();
            let cq = made((calls.create_cq)(raw.verbs, depth, context, channel, 0)).inspect_err(|_| {
                (calls.destroy_comp_channel)(channel);
            })?;
            Ok((channel, cq))
        }
    };
    if attr.send_cq.is_null() && raw.send_cq.is_null() {
        (raw.send_cq_channel, raw.send_cq) = make(attr.cap.max_send_wr)?;
    }
    if attr.recv_cq.is_null() && raw.recv_cq.is_null() {
        (raw.recv_cq_channel, raw.recv_cq) = make(attr.cap.max_recv_wr)?;
    }
    if attr.send_cq.is_null() {
        attr.send_cq = raw.send_cq;
    }
    if attr.recv_cq.is_null() {
        attr.recv_cq = raw.recv_cq;
    }
    Ok(())
}

fn destroy_cqs(id: &Id, calls: &Calls) {
    // SAFETY: our own structure and the objects that `create_cqs` made for it.
    unsafe {
        let raw = &mut *id.raw();
        for (channel, cq) in
            [(&mut raw.send_cq_channel, &mut raw.send_cq), (&mut raw.recv_cq_channel, &mut raw.recv_cq)]
        {
            if !cq.is_null() {
                (calls.destroy_cq)(std::mem::replace(cq, ptr::null_mut()));
            }
            if !channel.is_null() {
                (calls.destroy_comp_channel)(std::mem::replace(channel, ptr::null_mut()));
            }
        }
    }
}

/// Makes a queue pair for an identifier, by `make`, and brings it as far as it can go alone.
///
/// # Safety
/// A structure of C's, valid.
pub(crate) unsafe fn create(
    id: &Id,
    pd: *mut verbs::Pd,
    attr: &mut verbs::QpInitAttr,
    make: impl FnOnce(*mut verbs::Pd, &mut verbs::QpInitAttr) -> *mut verbs::Qp,
) -> Result<(), Errno> {
    let calls = calls()?;
    // SAFETY: our own structure, in a call about it.
    let raw = unsafe { &mut *id.raw() };
    if raw.verbs.is_null() || !raw.qp.is_null() {
        return Err(Errno::EINVAL);
    }
    let pd = if pd.is_null() { raw.pd } else { pd };
    // SAFETY: the program passes a domain, or we have our own.
    if pd.is_null() || unsafe { (*pd).context } != raw.verbs {
        return Err(Errno::EINVAL);
    }
    if attr.srq.is_null() {
        attr.srq = raw.srq;
    }
    // SAFETY: as the caller says.
    unsafe { create_cqs(id, attr, calls)? };
    let qp = made(make(pd, attr)).inspect_err(|_| destroy_cqs(id, calls))?;
    raw.qp = qp;
    raw.pd = pd;
    let ready = modify(id, verbs::IBV_QPS_INIT).and_then(|()| {
        if id.is_ud() {
            modify(id, verbs::IBV_QPS_RTR)?;
            modify(id, verbs::IBV_QPS_RTS)?;
        }
        Ok(())
    });
    ready.inspect_err(|_| destroy(id, calls))
}

/// Destroys an identifier's queue pair, and the queues that were made for it.
pub(crate) fn destroy(id: &Id, calls: &Calls) {
    crate::multicast::detach_all(id);
    // SAFETY: our own structure; its queue pair, if it has one.
    unsafe {
        let raw = &mut *id.raw();
        if !raw.qp.is_null() {
            (calls.destroy_qp)(std::mem::replace(&mut raw.qp, ptr::null_mut()));
        }
    }
    destroy_cqs(id, calls);
}

/// `rdma_create_qp`.
pub(crate) unsafe extern "C" fn rdma_create_qp(
    id: *mut CmId,
    pd: *mut verbs::Pd,
    attr: *mut verbs::QpInitAttr,
) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        // SAFETY: the caller passes a valid structure.
        let attr = unsafe { attr.as_mut() }.ok_or(Errno::EINVAL)?;
        let create_qp = calls()?.create_qp;
        // SAFETY: as above; a domain and a structure for libibverbs.
        unsafe { create(&id, pd, attr, |pd, attr| create_qp(pd, attr))? };
        Ok(0)
    })
}

/// `rdma_create_qp_ex`.
pub(crate) unsafe extern "C" fn rdma_create_qp_ex(id: *mut CmId, ex: *mut verbs::QpInitAttrEx) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        // SAFETY: the caller passes a valid structure.
        let ex = unsafe { ex.as_mut() }.ok_or(Errno::EINVAL)?;
        let pd = if ex.comp_mask & verbs::IBV_QP_INIT_ATTR_PD == 0 { ptr::null_mut() } else { ex.pd };
        let mut plain = verbs::QpInitAttr {
            qp_context: ex.qp_context,
            send_cq: ex.send_cq,
            recv_cq: ex.recv_cq,
            srq: ex.srq,
            cap: ex.cap,
            qp_type: ex.qp_type,
            sq_sig_all: ex.sq_sig_all,
        };
        // SAFETY: the program's structures, and the context of its identifier, whose table
        // libibverbs has filled.
        unsafe {
            let context = (*id.raw()).verbs;
            let table = context
                .wrapping_byte_sub(std::mem::offset_of!(verbs::VerbsContext, context))
                .cast::<verbs::VerbsContext>();
            create(&id, pd, &mut plain, |pd, plain| {
                let Some(make) = (*table).create_qp_ex else { return ptr::null_mut() };
                ex.comp_mask |= verbs::IBV_QP_INIT_ATTR_PD;
                ex.pd = pd;
                (ex.send_cq, ex.recv_cq, ex.srq) = (plain.send_cq, plain.recv_cq, plain.srq);
                make(context, ex)
            })?;
        }
        Ok(0)
    })
}

/// `rdma_create_srq`.
pub(crate) unsafe extern "C" fn rdma_create_srq(
    id: *mut CmId,
    pd: *mut verbs::Pd,
    attr: *mut verbs::SrqInitAttr,
) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        // SAFETY: our own structure, in a call about it; a structure of the caller's.
        unsafe {
            let raw = &mut *id.raw();
            let pd = if pd.is_null() { raw.pd } else { pd };
            if raw.verbs.is_null() || pd.is_null() || !raw.srq.is_null() {
                return Err(Errno::EINVAL);
            }
            raw.srq = made((calls()?.create_srq)(pd, attr))?;
            raw.pd = pd;
        }
        Ok(0)
    })
}

/// `rdma_create_srq_ex`: as far as it is a plain one.
pub(crate) unsafe extern "C" fn rdma_create_srq_ex(id: *mut CmId, ex: *mut verbs::SrqInitAttrEx) -> c_int {
    entry::minus_one(|| {
        // SAFETY: the caller passes a valid structure.
        let ex = unsafe { ex.as_mut() }.ok_or(Errno::EINVAL)?;
        if ex.comp_mask & verbs::IBV_SRQ_INIT_ATTR_TYPE != 0 && ex.srq_type != verbs::IBV_SRQT_BASIC {
            return Err(Errno::EOPNOTSUPP);
        }
        let pd = if ex.comp_mask & verbs::IBV_SRQ_INIT_ATTR_PD == 0 { ptr::null_mut() } else { ex.pd };
        let mut plain = verbs::SrqInitAttr { srq_context: ex.srq_context, attr: ex.attr };
        // SAFETY: as above.
        let code = unsafe { rdma_create_srq(id, pd, &raw mut plain) };
        ex.attr = plain.attr;
        if code == 0 { Ok(0) } else { Err(std::io::Error::last_os_error().into()) }
    })
}

/// `rdma_destroy_srq`.
pub(crate) unsafe extern "C" fn rdma_destroy_srq(id: *mut CmId) {
    entry::silent(|| {
        let id = Id::find(id)?;
        // SAFETY: our own structure, in a call about it.
        unsafe {
            let srq = std::mem::replace(&mut (*id.raw()).srq, ptr::null_mut());
            if !srq.is_null() {
                (calls()?.destroy_srq)(srq);
            }
        }
        Ok(())
    });
}

/// `rdma_init_qp_attr`: what brings a queue pair into the state that the structure names.
pub(crate) unsafe extern "C" fn rdma_init_qp_attr(
    id: *mut CmId,
    attr: *mut verbs::QpAttr,
    mask: *mut c_int,
) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        // SAFETY: the caller passes valid places.
        unsafe {
            let (filled, which) = attributes(&id, (*attr).qp_state)?;
            *attr = filled;
            *mask = which.cast_signed();
        }
        Ok(0)
    })
}
