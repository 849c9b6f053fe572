//! An open device, with the function tables through which programs call without a symbol.

use std::ffi::{c_int, c_void};

use crate::{
    AllocDmAttr, Cq, CqEx, CqInitAttrEx, Device, DeviceAttr, DeviceAttrEx, Dm, Mr, MrInitAttr, Mw, MwBind,
    ParentDomainInitAttr, Pd, PortAttr, Qp, QpInitAttrEx, QpOpenAttr, QueryDeviceExInput, RecvWr, SendWr,
    Sge, Slot, Srq, SrqInitAttrEx, Td, TdInitAttr, ValuesEx, Wc, Xrcd, XrcdInitAttr,
};

#[repr(C)]
pub struct ContextOps {
    pub _compat_query_device: Option<unsafe extern "C" fn(*mut Context, *mut DeviceAttr) -> c_int>,
    pub _compat_query_port: Option<unsafe extern "C" fn(*mut Context, u8, *mut PortAttr) -> c_int>,
    pub _compat_alloc_pd: Slot,
    pub _compat_dealloc_pd: Slot,
    pub _compat_reg_mr: Slot,
    pub _compat_rereg_mr: Slot,
    pub _compat_dereg_mr: Slot,
    pub alloc_mw: Option<unsafe extern "C" fn(*mut Pd, u32) -> *mut Mw>,
    pub bind_mw: Option<unsafe extern "C" fn(*mut Qp, *mut Mw, *mut MwBind) -> c_int>,
    pub dealloc_mw: Option<unsafe extern "C" fn(*mut Mw) -> c_int>,
    pub _compat_create_cq: Slot,
    pub poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    pub _compat_cq_event: Slot,
    pub _compat_resize_cq: Slot,
    pub _compat_destroy_cq: Slot,
    pub _compat_create_srq: Slot,
    pub _compat_modify_srq: Slot,
    pub _compat_query_srq: Slot,
    pub _compat_destroy_srq: Slot,
    pub post_srq_recv: Option<unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    pub _compat_create_qp: Slot,
    pub _compat_query_qp: Slot,
    pub _compat_modify_qp: Slot,
    pub _compat_destroy_qp: Slot,
    pub post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub post_recv: Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    pub _compat_create_ah: Slot,
    pub _compat_destroy_ah: Slot,
    pub _compat_attach_mcast: Slot,
    pub _compat_detach_mcast: Slot,
    pub _compat_async_event: Slot,
}

#[repr(C)]
pub struct Context {
    pub device: *mut Device,
    pub ops: ContextOps,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: libc::pthread_mutex_t,
    /// [`ABI_IS_EXTENDED`]: this is the end of a [`VerbsContext`].
    pub abi_compat: *mut c_void,
}

/// Marks a [`Context`] as the end of a [`VerbsContext`].
pub const ABI_IS_EXTENDED: *mut c_void = std::ptr::without_provenance_mut(usize::MAX);

/// `struct verbs_context`. It grows at its beginning, so that all offsets from [`Context`] stay.
#[repr(C)]
pub struct VerbsContext {
    pub free_buf: Slot,
    pub alloc_buf: Slot,
    pub dm_export_dmabuf_fd: Slot,
    pub reg_mr_ex: Option<unsafe extern "C" fn(*mut Pd, *mut MrInitAttr) -> *mut Mr>,
    pub dealloc_dmah: Slot,
    pub alloc_dmah: Slot,
    pub query_port: Option<unsafe extern "C" fn(*mut Context, u8, *mut PortAttr, usize) -> c_int>,
    pub advise_mr: Option<unsafe extern "C" fn(*mut Pd, u32, u32, *mut Sge, u32) -> c_int>,
    pub alloc_null_mr: Option<unsafe extern "C" fn(*mut Pd) -> *mut Mr>,
    pub read_counters: Slot,
    pub attach_counters_point_flow: Slot,
    pub create_counters: Slot,
    pub destroy_counters: Slot,
    pub reg_dm_mr: Option<unsafe extern "C" fn(*mut Pd, *mut Dm, u64, usize, u32) -> *mut Mr>,
    pub alloc_dm: Option<unsafe extern "C" fn(*mut Context, *mut AllocDmAttr) -> *mut Dm>,
    pub free_dm: Option<unsafe extern "C" fn(*mut Dm) -> c_int>,
    pub modify_flow_action_esp: Slot,
    pub destroy_flow_action: Slot,
    pub create_flow_action_esp: Slot,
    pub modify_qp_rate_limit: Slot,
    pub alloc_parent_domain: Option<unsafe extern "C" fn(*mut Context, *mut ParentDomainInitAttr) -> *mut Pd>,
    pub dealloc_td: Option<unsafe extern "C" fn(*mut Td) -> c_int>,
    pub alloc_td: Option<unsafe extern "C" fn(*mut Context, *mut TdInitAttr) -> *mut Td>,
    pub modify_cq: Slot,
    pub post_srq_ops: Slot,
    pub destroy_rwq_ind_table: Slot,
    pub create_rwq_ind_table: Slot,
    pub destroy_wq: Slot,
    pub modify_wq: Slot,
    pub create_wq: Slot,
    pub query_rt_values: Option<unsafe extern "C" fn(*mut Context, *mut ValuesEx) -> c_int>,
    pub create_cq_ex: Option<unsafe extern "C" fn(*mut Context, *mut CqInitAttrEx) -> *mut CqEx>,
    pub priv_: *mut c_void,
    pub query_device_ex: Option<
        unsafe extern "C" fn(*mut Context, *const QueryDeviceExInput, *mut DeviceAttrEx, usize) -> c_int,
    >,
    pub ibv_destroy_flow: Slot,
    pub abi_placeholder2: Slot,
    pub ibv_create_flow: Slot,
    pub abi_placeholder1: Slot,
    pub open_qp: Option<unsafe extern "C" fn(*mut Context, *mut QpOpenAttr) -> *mut Qp>,
    pub create_qp_ex: Option<unsafe extern "C" fn(*mut Context, *mut QpInitAttrEx) -> *mut Qp>,
    pub get_srq_num: Option<unsafe extern "C" fn(*mut Srq, *mut u32) -> c_int>,
    pub create_srq_ex: Option<unsafe extern "C" fn(*mut Context, *mut SrqInitAttrEx) -> *mut Srq>,
    pub open_xrcd: Option<unsafe extern "C" fn(*mut Context, *mut XrcdInitAttr) -> *mut Xrcd>,
    pub close_xrcd: Option<unsafe extern "C" fn(*mut Xrcd) -> c_int>,
    pub abi_placeholder3: u64,
    /// Size of the whole structure in bytes: older programs use it to test whether a function
    /// exists.
    pub sz: usize,
    pub context: Context,
}
