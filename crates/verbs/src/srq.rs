//! Shared receive queues.

use std::ffi::c_void;

use crate::{Context, Cq, Pd};

#[repr(C)]
pub struct Srq {
    pub context: *mut Context,
    pub srq_context: *mut c_void,
    pub pd: *mut Pd,
    pub handle: u32,
    pub mutex: libc::pthread_mutex_t,
    pub cond: libc::pthread_cond_t,
    pub events_completed: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct SrqAttr {
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
}

#[repr(C)]
pub struct SrqInitAttr {
    pub srq_context: *mut c_void,
    pub attr: SrqAttr,
}

#[repr(C)]
pub struct SrqInitAttrEx {
    pub srq_context: *mut c_void,
    pub attr: SrqAttr,
    pub comp_mask: u32,
    pub srq_type: u32,
    pub pd: *mut Pd,
    pub xrcd: *mut Xrcd,
    pub cq: *mut Cq,
    /// Tags and operations of tag matching.
    pub tm_cap: [u32; 2],
}

pub const IBV_SRQ_MAX_WR: i32 = 1;
pub const IBV_SRQ_LIMIT: i32 = 2;
pub const IBV_SRQT_BASIC: u32 = 0;
pub const IBV_SRQT_XRC: u32 = 1;
pub const IBV_SRQ_INIT_ATTR_XRCD: u32 = 4;
pub const IBV_SRQ_INIT_ATTR_CQ: u32 = 8;

#[repr(C)]
pub struct XrcdInitAttr {
    pub comp_mask: u32,
    pub fd: i32,
    pub oflags: i32,
}

/// `struct ibv_qp_open_attr`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct QpOpenAttr {
    pub comp_mask: u32,
    pub qp_num: u32,
    pub xrcd: *mut Xrcd,
    pub qp_context: *mut c_void,
    pub qp_type: u32,
}

#[repr(C)]
pub struct Xrcd {
    pub context: *mut Context,
}

pub const IBV_QP_OPEN_ATTR_NUM: u32 = 1;
pub const IBV_QP_OPEN_ATTR_XRCD: u32 = 2;
pub const IBV_QP_OPEN_ATTR_CONTEXT: u32 = 4;
pub const IBV_QP_OPEN_ATTR_TYPE: u32 = 8;
pub const IBV_XRCD_INIT_ATTR_FD: u32 = 1;
pub const IBV_XRCD_INIT_ATTR_OFLAGS: u32 = 2;
pub const IBV_SRQ_INIT_ATTR_TYPE: u32 = 1;
pub const IBV_SRQ_INIT_ATTR_PD: u32 = 2;
