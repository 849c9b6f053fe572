//! Thread domains, parent domains and device memory.

use std::ffi::{c_int, c_void};

use crate::{Context, Pd};

#[repr(C)]
pub struct TdInitAttr {
    pub comp_mask: u32,
}

#[repr(C)]
pub struct Td {
    pub context: *mut Context,
}

pub const IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS: u32 = 1;
pub const IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT: u32 = 2;

#[repr(C)]
pub struct ParentDomainInitAttr {
    pub pd: *mut Pd,
    pub td: *mut Td,
    pub comp_mask: u32,
    pub alloc: Option<unsafe extern "C" fn(*mut Pd, *mut c_void, usize, usize, u64) -> *mut c_void>,
    pub free: Option<unsafe extern "C" fn(*mut Pd, *mut c_void, *mut c_void, u64)>,
    pub pd_context: *mut c_void,
}

#[repr(C)]
pub struct AllocDmAttr {
    pub length: usize,
    pub log_align_req: u32,
    pub comp_mask: u32,
}

#[repr(C)]
pub struct Dm {
    pub context: *mut Context,
    pub memcpy_to_dm: Option<unsafe extern "C" fn(*mut Dm, u64, *const c_void, usize) -> c_int>,
    pub memcpy_from_dm: Option<unsafe extern "C" fn(*mut c_void, *mut Dm, u64, usize) -> c_int>,
    pub comp_mask: u32,
    pub handle: u32,
}

pub const IBV_VALUES_MASK_RAW_CLOCK: u32 = 1;

#[repr(C)]
pub struct ValuesEx {
    pub comp_mask: u32,
    pub raw_clock: libc::timespec,
}

pub const IBV_ADVISE_MR_ADVICE_PREFETCH: u32 = 0;
pub const IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE: u32 = 1;
pub const IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT: u32 = 2;
pub const IBV_ADVISE_MR_FLAG_FLUSH: u32 = 1;

pub const IBV_ODP_SUPPORT: u64 = 1;
pub const IBV_ODP_SUPPORT_IMPLICIT: u64 = 2;
pub const IBV_ODP_SUPPORT_SEND: u32 = 1;
pub const IBV_ODP_SUPPORT_RECV: u32 = 1 << 1;
pub const IBV_ODP_SUPPORT_WRITE: u32 = 1 << 2;
pub const IBV_ODP_SUPPORT_READ: u32 = 1 << 3;
pub const IBV_ODP_SUPPORT_ATOMIC: u32 = 1 << 4;
pub const IBV_ODP_SUPPORT_SRQ_RECV: u32 = 1 << 5;
pub const IBV_ODP_SUPPORT_FLUSH: u32 = 1 << 6;
pub const IBV_ODP_SUPPORT_ATOMIC_WRITE: u32 = 1 << 7;
