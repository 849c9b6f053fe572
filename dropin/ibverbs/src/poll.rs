//! The data path, inwards: completions.

use std::ffi::c_int;

use nobounce_nic::work::{WorkCompletion, WorkKind};
use nobounce_verbs as verbs;

use crate::cq::CqObject;
use crate::entry::{self, Errno};
use crate::live::Object;
use crate::log;

/// The service level of a received datagram. RoCE has none, and adapters report the kind of header
/// there: UDP (8) over IPv6 (1) or IPv4 (2). UCX before 1.14 drops datagrams without it.
fn header_kind(cq: &CqObject) -> u8 {
    if cq.context.device.addr.is_ipv4() { 8 | 2 } else { 8 | 1 }
}

/// A completion of this queue as C sees it.
#[inline]
pub(crate) fn wc_of(cq: &CqObject, completion: &WorkCompletion) -> verbs::Wc {
    let opcode = match completion.kind {
        WorkKind::Send => verbs::IBV_WC_SEND,
        WorkKind::Write => verbs::IBV_WC_RDMA_WRITE,
        WorkKind::Read => verbs::IBV_WC_RDMA_READ,
        WorkKind::CompareSwap => verbs::IBV_WC_COMP_SWAP,
        WorkKind::FetchAdd => verbs::IBV_WC_FETCH_ADD,
        WorkKind::AtomicWrite => verbs::IBV_WC_ATOMIC_WRITE,
        WorkKind::Flush => verbs::IBV_WC_FLUSH,
        WorkKind::BindWindow => verbs::IBV_WC_BIND_MW,
        WorkKind::LocalInvalidate => verbs::IBV_WC_LOCAL_INV,
        WorkKind::Receive => verbs::IBV_WC_RECV,
        WorkKind::ReceiveWriteImmediate => verbs::IBV_WC_RECV_RDMA_WITH_IMM,
    };
    let (imm_data, extra) = match (completion.immediate, completion.invalidated) {
        (Some(immediate), _) => (immediate.to_be(), verbs::IBV_WC_WITH_IMM),
        (None, Some(key)) => (key, verbs::IBV_WC_WITH_INV),
        (None, None) => (0, 0),
    };
    // A received datagram has the GRH in front, for which space is always reserved.
    let (src_qp, wc_flags, sl) = match completion.source {
        Some(source) => (source.qpn.get(), extra | verbs::IBV_WC_GRH, header_kind(cq)),
        None => (0, extra, 0),
    };
    verbs::Wc {
        wr_id: completion.wr_id,
        status: completion.status as u32,
        opcode,
        vendor_err: 0,
        byte_len: completion.byte_len,
        imm_data,
        qp_num: completion.qpn.get(),
        src_qp,
        wc_flags,
        pkey_index: 0,
        slid: 0,
        sl,
        dlid_path_bits: 0,
    }
}

/// `ibv_poll_cq`, by the table.
pub(crate) unsafe extern "C" fn poll_cq(cq: *mut verbs::Cq, entries: c_int, wc: *mut verbs::Wc) -> c_int {
    // SAFETY: the table this function is in belongs to our contexts, so the queue is ours.
    let cq = unsafe { CqObject::trust(cq) };
    let polled = entry::guarded(|| {
        let max = usize::try_from(entries).map_err(|_| Errno::EINVAL)?;
        let mut at = wc;
        let taken = cq.soft.poll_each(max, |completion| {
            // SAFETY: the caller has space for `entries` completions, and no more are written.
            unsafe {
                *at = wc_of(cq, &completion);
                at = at.add(1);
            }
        });
        let taken = taken.map_err(|error| {
            log::debug(|| format!("ibv_poll_cq: {error}"));
            Errno::EIO
        })?;
        c_int::try_from(taken).map_err(|_| Errno::EINVAL)
    });
    polled.unwrap_or_else(|errno| {
        errno.set();
        -1
    })
}
