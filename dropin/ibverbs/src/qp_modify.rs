//! Queue pairs: modify and query.

use std::ffi::c_int;
use std::sync::PoisonError;

use nobounce_nic::hard::state_code;
use nobounce_nic::soft::ModifyError;
use nobounce_nic::work::{Access, AttrMask, Psn, QpAttr, Qpn};
use nobounce_verbs as verbs;

use crate::convert::{addr_of, gid_of, ip_options_of, mtu_code, mtu_of, state_of};
use crate::entry::{self, Errno};
use crate::live::Object;
use crate::log;
use crate::port::{PORT, is_gid};
use crate::qp::QpObject;

/// Bits that say nothing here: there is only one path, and it never migrates.
const IGNORED: u32 = verbs::IBV_QP_PATH_MIG_STATE;

/// The checks that only we can make: the protocol knows no ports, partitions and GIDs.
fn check(qp: &QpObject, attr: &verbs::QpAttr, mask: u32) -> Result<(), Errno> {
    if mask & verbs::IBV_QP_PORT != 0 && attr.port_num != PORT {
        return refuse("invalid port: the device has only port 1");
    }
    if mask & verbs::IBV_QP_PKEY_INDEX != 0 && attr.pkey_index != 0 {
        return refuse("invalid P_Key index: the device has only index 0");
    }
    if mask & verbs::IBV_QP_AV != 0 {
        let route = &attr.ah_attr;
        if route.is_global == 0 {
            return refuse("RoCE requires a GID, but is_global is 0; many tools accept -g 0 or -x 0");
        }
        if !is_gid(route.grh.sgid_index) {
            return refuse("invalid GID index: the device has GIDs 0 to 3, all of one address");
        }
        if route.port_num != PORT {
            return refuse("invalid port in the address vector: the device has only port 1");
        }
        if addr_of(&route.grh.dgid).is_ipv4() != qp.context.soft.local().is_ipv4() {
            return refuse("IP version mismatch: the peer's GID and the device's are IPv4 and IPv6");
        }
    }
    Ok(())
}

fn refuse<T>(why: &str) -> Result<T, Errno> {
    log::warn(|| format!("ibv_modify_qp: {why}"));
    Err(Errno::EINVAL)
}

fn attributes(attr: &verbs::QpAttr, mask: u32) -> Result<QpAttr, Errno> {
    let has = |bit: u32| mask & bit != 0;
    let Some(bits) = AttrMask::from_bits(mask & !IGNORED) else {
        return refuse("unsupported attribute in the mask");
    };
    let mut ours = QpAttr { mask: bits, ..QpAttr::default() };
    if has(verbs::IBV_QP_STATE) {
        ours.state = state_of(attr.qp_state)?;
    }
    if has(verbs::IBV_QP_CUR_STATE) {
        ours.cur_state = state_of(attr.cur_qp_state)?;
    }
    if has(verbs::IBV_QP_ACCESS_FLAGS) {
        ours.access = Access::from_bits_truncate(attr.qp_access_flags);
    }
    if has(verbs::IBV_QP_PATH_MTU) {
        ours.path_mtu = mtu_of(attr.path_mtu)?;
    }
    if has(verbs::IBV_QP_AV) {
        ours.remote = addr_of(&attr.ah_attr.grh.dgid);
        ours.ip_options = ip_options_of(&attr.ah_attr.grh);
    }
    ours.qkey = attr.qkey;
    ours.en_sqd_async_notify = attr.en_sqd_async_notify != 0;
    ours.dest_qpn = Qpn::new(attr.dest_qp_num);
    ours.rq_psn = Psn::new(attr.rq_psn);
    ours.sq_psn = Psn::new(attr.sq_psn);
    ours.max_rd_atomic = attr.max_rd_atomic;
    ours.max_dest_rd_atomic = attr.max_dest_rd_atomic;
    ours.min_rnr_timer = attr.min_rnr_timer;
    ours.timeout = attr.timeout;
    ours.retry_cnt = attr.retry_cnt;
    ours.rnr_retry = attr.rnr_retry;
    Ok(ours)
}

/// `ibv_modify_qp`.
pub(crate) unsafe extern "C" fn modify_qp(
    qp: *mut verbs::Qp,
    attr: *mut verbs::QpAttr,
    mask: c_int,
) -> c_int {
    entry::code(|| {
        let ours = QpObject::find(qp)?;
        // SAFETY: the caller passes a valid structure.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::EINVAL)?;
        let mask = mask.cast_unsigned();
        check(ours, attr, mask)?;
        ours.soft.modify(&attributes(attr, mask)?).map_err(|error| {
            log::warn(|| format!("ibv_modify_qp: {error}"));
            match error {
                ModifyError::Forked => Errno::EIO,
                _ => Errno::EINVAL,
            }
        })?;
        if mask & verbs::IBV_QP_AV != 0 {
            *ours.route.lock().unwrap_or_else(PoisonError::into_inner) = Some(attr.ah_attr);
        }
        if mask & verbs::IBV_QP_STATE != 0 {
            // SAFETY: our own structure, which C may read at any time, as with any library.
            unsafe { (&raw mut (*qp).state).write_volatile(attr.qp_state) };
        }
        Ok(())
    })
}

/// `ibv_query_qp`.
pub(crate) unsafe extern "C" fn query_qp(
    qp: *mut verbs::Qp,
    attr: *mut verbs::QpAttr,
    _mask: c_int,
    init: *mut verbs::QpInitAttr,
) -> c_int {
    entry::code(|| {
        let ours = QpObject::find(qp)?;
        let now = ours.soft.attr();
        // SAFETY: plain numbers, for which zeroes are valid.
        let mut out: verbs::QpAttr = unsafe { std::mem::zeroed() };
        out.qp_state = state_code(now.state);
        out.cur_qp_state = out.qp_state;
        out.path_mtu = mtu_code(now.path_mtu);
        out.qkey = now.qkey;
        out.rq_psn = now.rq_psn.get();
        out.sq_psn = now.sq_psn.get();
        out.dest_qp_num = now.dest_qpn.get();
        out.qp_access_flags = now.access.bits();
        out.cap = ours.init.cap;
        match *ours.route.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(route) => out.ah_attr = route,
            None => out.ah_attr.grh.dgid = gid_of(now.remote),
        }
        out.en_sqd_async_notify = now.en_sqd_async_notify.into();
        out.sq_draining = ours.soft.is_draining().into();
        out.max_rd_atomic = now.max_rd_atomic;
        out.max_dest_rd_atomic = now.max_dest_rd_atomic;
        out.min_rnr_timer = now.min_rnr_timer;
        out.port_num = PORT;
        out.timeout = now.timeout;
        out.retry_cnt = now.retry_cnt;
        out.rnr_retry = now.rnr_retry;
        // SAFETY: the caller passes valid places; the state is our own structure's.
        unsafe {
            (&raw mut (*qp).state).write_volatile(out.qp_state);
            *attr = out;
            if !init.is_null() {
                *init = ours.init;
            }
        }
        Ok(())
    })
}

/// `ibv_query_qp_data_in_order`: bytes of one message may be placed in any order.
pub(crate) unsafe extern "C" fn query_qp_data_in_order(
    _qp: *mut verbs::Qp,
    _opcode: u32,
    _flags: u32,
) -> c_int {
    0
}
