//! `ibv_copy_*_kern`: between the kernel's structures and the program's. Only a librdmacm that uses
//! the kernel calls them.

use nobounce_verbs as verbs;

fn address(from: &verbs::KernelAhAttr) -> verbs::AhAttr {
    verbs::AhAttr {
        grh: verbs::GlobalRoute {
            dgid: verbs::Gid { raw: from.dgid },
            flow_label: from.flow_label,
            sgid_index: from.sgid_index,
            hop_limit: from.hop_limit,
            traffic_class: from.traffic_class,
        },
        dlid: from.dlid,
        sl: from.sl,
        src_path_bits: from.src_path_bits,
        static_rate: from.static_rate,
        is_global: from.is_global,
        port_num: from.port_num,
    }
}

/// `ibv_copy_ah_attr_from_kern`.
pub(crate) unsafe extern "C" fn copy_ah_attr(to: *mut verbs::AhAttr, from: *const verbs::KernelAhAttr) {
    // SAFETY: the caller passes valid structures.
    unsafe { *to = address(&*from) };
}

/// `ibv_copy_qp_attr_from_kern`.
pub(crate) unsafe extern "C" fn copy_qp_attr(to: *mut verbs::QpAttr, from: *const verbs::KernelQpAttr) {
    // SAFETY: the caller passes valid structures.
    let (to, from) = unsafe { (&mut *to, &*from) };
    to.qp_state = from.qp_state;
    to.cur_qp_state = from.cur_qp_state;
    to.path_mtu = from.path_mtu;
    to.path_mig_state = from.path_mig_state;
    to.qkey = from.qkey;
    to.rq_psn = from.rq_psn;
    to.sq_psn = from.sq_psn;
    to.dest_qp_num = from.dest_qp_num;
    to.qp_access_flags = from.qp_access_flags;
    to.cap = verbs::QpCap {
        max_send_wr: from.max_send_wr,
        max_recv_wr: from.max_recv_wr,
        max_send_sge: from.max_send_sge,
        max_recv_sge: from.max_recv_sge,
        max_inline_data: from.max_inline_data,
    };
    to.ah_attr = address(&from.ah_attr);
    to.alt_ah_attr = address(&from.alt_ah_attr);
    to.pkey_index = from.pkey_index;
    to.alt_pkey_index = from.alt_pkey_index;
    to.en_sqd_async_notify = from.en_sqd_async_notify;
    to.sq_draining = from.sq_draining;
    to.max_rd_atomic = from.max_rd_atomic;
    to.max_dest_rd_atomic = from.max_dest_rd_atomic;
    to.min_rnr_timer = from.min_rnr_timer;
    to.port_num = from.port_num;
    to.timeout = from.timeout;
    to.retry_cnt = from.retry_cnt;
    to.rnr_retry = from.rnr_retry;
    to.alt_port_num = from.alt_port_num;
    to.alt_timeout = from.alt_timeout;
}

/// `ibv_copy_path_rec_from_kern`.
pub(crate) unsafe extern "C" fn copy_path_from(to: *mut verbs::PathRec, from: *const verbs::KernelPathRec) {
    // SAFETY: the caller passes valid structures.
    let from = unsafe { &*from };
    let path = verbs::PathRec {
        dgid: verbs::Gid { raw: from.dgid },
        sgid: verbs::Gid { raw: from.sgid },
        dlid: from.dlid,
        slid: from.slid,
        raw_traffic: from.raw_traffic.cast_signed(),
        flow_label: from.flow_label,
        hop_limit: from.hop_limit,
        traffic_class: from.traffic_class,
        reversible: from.reversible.cast_signed(),
        numb_path: from.numb_path,
        pkey: from.pkey,
        sl: from.sl,
        mtu_selector: from.mtu_selector,
        mtu: u8::try_from(from.mtu).unwrap_or(0),
        rate_selector: from.rate_selector,
        rate: from.rate,
        packet_life_time_selector: from.packet_life_time_selector,
        packet_life_time: from.packet_life_time,
        preference: from.preference,
    };
    // SAFETY: as above.
    unsafe { *to = path };
}

/// `ibv_copy_path_rec_to_kern`.
pub(crate) unsafe extern "C" fn copy_path_to(to: *mut verbs::KernelPathRec, from: *const verbs::PathRec) {
    // SAFETY: the caller passes valid structures.
    let from = unsafe { &*from };
    // SAFETY: any sixteen bytes are a GID.
    let (dgid, sgid) = unsafe { (from.dgid.raw, from.sgid.raw) };
    let path = verbs::KernelPathRec {
        dgid,
        sgid,
        dlid: from.dlid,
        slid: from.slid,
        raw_traffic: from.raw_traffic.cast_unsigned(),
        flow_label: from.flow_label,
        reversible: from.reversible.cast_unsigned(),
        mtu: from.mtu.into(),
        pkey: from.pkey,
        hop_limit: from.hop_limit,
        traffic_class: from.traffic_class,
        numb_path: from.numb_path,
        sl: from.sl,
        mtu_selector: from.mtu_selector,
        rate_selector: from.rate_selector,
        rate: from.rate,
        packet_life_time_selector: from.packet_life_time_selector,
        packet_life_time: from.packet_life_time,
        preference: from.preference,
    };
    // SAFETY: as above.
    unsafe { *to = path };
}
