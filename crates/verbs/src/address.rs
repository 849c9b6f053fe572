//! Addresses: GIDs, routes, address handles.

use crate::{Context, Pd};

#[derive(Clone, Copy)]
#[repr(C)]
pub union Gid {
    pub raw: [u8; 16],
    /// Subnet prefix and interface id, both big-endian; they give the union its alignment.
    pub global: [u64; 2],
}

pub const IBV_GID_TYPE_IB: u32 = 0;
pub const IBV_GID_TYPE_ROCE_V1: u32 = 1;
pub const IBV_GID_TYPE_ROCE_V2: u32 = 2;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct GidEntry {
    pub gid: Gid,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct GlobalRoute {
    pub dgid: Gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Grh {
    pub version_tclass_flow: u32,
    pub paylen: u16,
    pub next_hdr: u8,
    pub hop_limit: u8,
    pub sgid: Gid,
    pub dgid: Gid,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct AhAttr {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

#[repr(C)]
pub struct Ah {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub handle: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Ece {
    pub vendor_id: u32,
    pub options: u32,
    pub comp_mask: u32,
}
