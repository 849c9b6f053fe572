//! Device capabilities.

use std::ffi::c_int;

use nobounce_verbs as verbs;

use crate::context::ContextObject;
use crate::convert::write_sized;
use crate::device_list::text;
use crate::dm;
use crate::entry::{self, Errno};
use crate::live::Object;

/// No vendor that programs have special knowledge of.
const VENDOR_ID: u32 = 0x6e62;
const PART_ID: u32 = 1;

fn attributes(context: &ContextObject) -> verbs::DeviceAttr {
    let limits = context.soft.limits();
    let int = |n: usize| c_int::try_from(n).unwrap_or(c_int::MAX);
    let guid = context.device.guid();
    let reads = c_int::from(limits.max_rd_atomic);
    verbs::DeviceAttr {
        fw_ver: text(env!("CARGO_PKG_VERSION")),
        node_guid: guid,
        sys_image_guid: guid,
        max_mr_size: limits.max_mr_size,
        page_size_cap: !0xfff,
        vendor_id: VENDOR_ID,
        vendor_part_id: PART_ID,
        hw_ver: 1,
        max_qp: int(limits.max_qps),
        max_qp_wr: int(limits.max_qp_depth),
        device_cap_flags: verbs::IBV_DEVICE_CURR_QP_STATE_MOD
            | verbs::IBV_DEVICE_RC_RNR_NAK_GEN
            | verbs::IBV_DEVICE_SYS_IMAGE_GUID
            | verbs::IBV_DEVICE_MEM_WINDOW
            | verbs::IBV_DEVICE_XRC
            | verbs::IBV_DEVICE_SRQ_RESIZE
            | verbs::IBV_DEVICE_MEM_WINDOW_TYPE_2B,
        max_sge: int(limits.max_sges),
        max_sge_rd: int(limits.max_sges),
        max_cq: int(limits.max_cqs),
        max_cqe: int(limits.max_cq_depth),
        max_mr: int(limits.max_mrs),
        max_pd: int(limits.max_pds),
        max_qp_rd_atom: reads,
        max_ee_rd_atom: 0,
        max_res_rd_atom: reads.saturating_mul(int(limits.max_qps)),
        max_qp_init_rd_atom: reads,
        max_ee_init_rd_atom: 0,
        // Among the peers of one device: another process's device may work on the same memory.
        atomic_cap: verbs::IBV_ATOMIC_HCA,
        max_ee: 0,
        max_rdd: 0,
        max_mw: int(limits.max_mws),
        max_raw_ipv6_qp: 0,
        max_raw_ethy_qp: 0,
        max_mcast_grp: int(limits.max_groups),
        max_mcast_qp_attach: int(limits.max_group_qps),
        max_total_mcast_qp_attach: int(limits.max_groups * limits.max_group_qps),
        max_ah: int(limits.max_ahs),
        max_fmr: 0,
        max_map_per_fmr: 0,
        max_srq: int(limits.max_srqs),
        max_srq_wr: int(limits.max_srq_depth),
        max_srq_sge: int(limits.max_sges),
        max_pkeys: 1,
        local_ca_ack_delay: 15,
        phys_port_cnt: 1,
    }
}

/// `ibv_query_device`.
pub(crate) unsafe extern "C" fn query_device(
    context: *mut verbs::Context,
    attr: *mut verbs::DeviceAttr,
) -> c_int {
    entry::code(|| {
        let context = ContextObject::find(context)?;
        // SAFETY: the caller passes a valid place.
        unsafe { *attr = attributes(context) };
        Ok(())
    })
}

/// Completion times are nanoseconds.
const CLOCK_KHZ: u64 = 1_000_000;

/// The CPU accesses memory, so that all of it may be paged.
fn on_demand() -> verbs::OdpCaps {
    let datagrams =
        verbs::IBV_ODP_SUPPORT_SEND | verbs::IBV_ODP_SUPPORT_RECV | verbs::IBV_ODP_SUPPORT_SRQ_RECV;
    let uc = datagrams | verbs::IBV_ODP_SUPPORT_WRITE;
    let rc = uc
        | verbs::IBV_ODP_SUPPORT_READ
        | verbs::IBV_ODP_SUPPORT_ATOMIC
        | verbs::IBV_ODP_SUPPORT_FLUSH
        | verbs::IBV_ODP_SUPPORT_ATOMIC_WRITE;
    verbs::OdpCaps {
        general_caps: verbs::IBV_ODP_SUPPORT | verbs::IBV_ODP_SUPPORT_IMPLICIT,
        per_transport_caps: [rc, uc, datagrams],
    }
}

/// `ibv_query_rt_values_ex`, by the table: the clock of completion times.
pub(crate) unsafe extern "C" fn query_rt_values(
    context: *mut verbs::Context,
    values: *mut verbs::ValuesEx,
) -> c_int {
    entry::code(|| {
        ContextObject::find(context)?;
        // SAFETY: the caller passes a valid structure.
        let values = unsafe { values.as_mut() }.ok_or(Errno::EINVAL)?;
        if values.comp_mask != verbs::IBV_VALUES_MASK_RAW_CLOCK {
            return Err(Errno::EINVAL);
        }
        let now = i64::try_from(nobounce_nic::links::now_ns()).unwrap_or(i64::MAX);
        // As adapters' drivers do: all of it in one field.
        values.raw_clock = libc::timespec { tv_sec: 0, tv_nsec: now };
        Ok(())
    })
}

/// `ibv_query_device_ex`, by the table: the caller says how long its structure is.
pub(crate) unsafe extern "C" fn query_device_ex(
    context: *mut verbs::Context,
    input: *const verbs::QueryDeviceExInput,
    attr: *mut verbs::DeviceAttrEx,
    size: usize,
) -> c_int {
    entry::code(|| {
        let context = ContextObject::find(context)?;
        // SAFETY: null, or valid.
        let unknown = unsafe { input.as_ref() }.is_some_and(|input| input.comp_mask != 0);
        if unknown || size < size_of::<verbs::DeviceAttr>() {
            return Err(Errno::EINVAL);
        }
        // SAFETY: plain numbers, for which zeroes are valid.
        let mut ours: verbs::DeviceAttrEx = unsafe { std::mem::zeroed() };
        ours.orig_attr = attributes(context);
        let flags = u64::from(ours.orig_attr.device_cap_flags);
        ours.device_cap_flags_ex = flags | verbs::IBV_DEVICE_FLUSH_GLOBAL | verbs::IBV_DEVICE_ATOMIC_WRITE;
        ours.phys_port_cnt_ex = 1;
        ours.odp_caps = on_demand();
        ours.xrc_odp_caps = ours.odp_caps.per_transport_caps[0];
        ours.completion_timestamp_mask = u64::MAX;
        ours.hca_core_clock = CLOCK_KHZ;
        ours.max_dm_size = dm::MAX_BYTES as u64;
        // SAFETY: the caller says how long its structure is.
        unsafe { write_sized(&ours, attr, size) };
        Ok(())
    })
}
