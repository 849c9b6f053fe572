//! The interface of `rdma/rdma_cma.h` as C lays it out. Enumerations of C are plain integers here.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

use nobounce_verbs as verbs;

pub(crate) const EVENT_ADDR_RESOLVED: u32 = 0;
pub(crate) const EVENT_ROUTE_RESOLVED: u32 = 2;
pub(crate) const EVENT_CONNECT_REQUEST: u32 = 4;
pub(crate) const EVENT_CONNECT_RESPONSE: u32 = 5;
pub(crate) const EVENT_CONNECT_ERROR: u32 = 6;
pub(crate) const EVENT_UNREACHABLE: u32 = 7;
pub(crate) const EVENT_REJECTED: u32 = 8;
pub(crate) const EVENT_ESTABLISHED: u32 = 9;
pub(crate) const EVENT_DISCONNECTED: u32 = 10;
pub(crate) const EVENT_MULTICAST_JOIN: u32 = 12;
pub(crate) const EVENT_MULTICAST_ERROR: u32 = 13;
pub(crate) const EVENT_TIMEWAIT_EXIT: u32 = 15;

pub(crate) const PS_IPOIB: u32 = 0x0002;
pub(crate) const PS_TCP: u32 = 0x0106;
pub(crate) const PS_UDP: u32 = 0x0111;
pub(crate) const PS_IB: u32 = 0x013f;

/// The Q_Key of all datagram queue pairs that the connection manager makes.
pub(crate) const UDP_QKEY: u32 = 0x0123_4567;
/// "As many as there can be."
pub(crate) const MAX_RESOURCES: u8 = 0xff;

pub(crate) const RAI_PASSIVE: c_int = 1;
pub(crate) const RAI_NUMERICHOST: c_int = 2;
pub(crate) const RAI_FAMILY: c_int = 8;

pub(crate) const OPTION_ID: c_int = 0;
pub(crate) const OPTION_ID_TOS: c_int = 0;
pub(crate) const OPTION_ID_REUSEADDR: c_int = 1;
pub(crate) const OPTION_ID_AFONLY: c_int = 2;
pub(crate) const OPTION_ID_ACK_TIMEOUT: c_int = 3;

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IbAddr {
    pub(crate) sgid: verbs::Gid,
    pub(crate) dgid: verbs::Gid,
    pub(crate) pkey: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Addr {
    pub(crate) src: libc::sockaddr_storage,
    pub(crate) dst: libc::sockaddr_storage,
    pub(crate) ib: IbAddr,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Route {
    pub(crate) addr: Addr,
    pub(crate) path_rec: *mut PathRec,
    pub(crate) num_paths: c_int,
}

/// `struct ibv_sa_path_rec`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PathRec {
    pub(crate) dgid: verbs::Gid,
    pub(crate) sgid: verbs::Gid,
    pub(crate) dlid: u16,
    pub(crate) slid: u16,
    pub(crate) raw_traffic: c_int,
    pub(crate) flow_label: u32,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) reversible: c_int,
    pub(crate) numb_path: u8,
    pub(crate) pkey: u16,
    pub(crate) sl: u8,
    pub(crate) mtu_selector: u8,
    pub(crate) mtu: u8,
    pub(crate) rate_selector: u8,
    pub(crate) rate: u8,
    pub(crate) packet_life_time_selector: u8,
    pub(crate) packet_life_time: u8,
    pub(crate) preference: u8,
}

#[repr(C)]
pub(crate) struct EventChannel {
    pub(crate) fd: c_int,
}

/// `struct rdma_cm_id`.
#[repr(C)]
pub(crate) struct CmId {
    pub(crate) verbs: *mut verbs::Context,
    pub(crate) channel: *mut EventChannel,
    pub(crate) context: *mut c_void,
    pub(crate) qp: *mut verbs::Qp,
    pub(crate) route: Route,
    pub(crate) ps: u32,
    pub(crate) port_num: u8,
    pub(crate) event: *mut CmEvent,
    pub(crate) send_cq_channel: *mut verbs::CompChannel,
    pub(crate) send_cq: *mut verbs::Cq,
    pub(crate) recv_cq_channel: *mut verbs::CompChannel,
    pub(crate) recv_cq: *mut verbs::Cq,
    pub(crate) srq: *mut verbs::Srq,
    pub(crate) pd: *mut verbs::Pd,
    pub(crate) qp_type: u32,
}

const _: () = assert!(size_of::<CmId>() == 416);
const _: () = assert!(offset_of!(CmId, route) == 32 && offset_of!(CmId, ps) == 344);
const _: () = assert!(offset_of!(CmId, event) == 352 && offset_of!(CmId, qp_type) == 408);

/// `struct rdma_conn_param`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ConnParam {
    pub(crate) private_data: *const c_void,
    pub(crate) private_data_len: u8,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) srq: u8,
    pub(crate) qp_num: u32,
}

/// `struct rdma_ud_param`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UdParam {
    pub(crate) private_data: *const c_void,
    pub(crate) private_data_len: u8,
    pub(crate) ah_attr: verbs::AhAttr,
    pub(crate) qp_num: u32,
    pub(crate) qkey: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union Param {
    pub(crate) conn: ConnParam,
    pub(crate) ud: UdParam,
}

/// `struct rdma_cm_event`.
#[repr(C)]
pub(crate) struct CmEvent {
    pub(crate) id: *mut CmId,
    pub(crate) listen_id: *mut CmId,
    pub(crate) event: u32,
    pub(crate) status: c_int,
    pub(crate) param: Param,
}

const _: () = assert!(size_of::<CmEvent>() == 80 && offset_of!(CmEvent, param) == 24);

pub(crate) const JOIN_ATTR_ADDRESS: u32 = 1;
pub(crate) const JOIN_ATTR_FLAGS: u32 = 2;
pub(crate) const JOIN_FULL_MEMBER: u32 = 0;
pub(crate) const JOIN_SEND_ONLY: u32 = 1;

/// `struct rdma_cm_join_mc_attr_ex`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct JoinAttr {
    pub(crate) comp_mask: u32,
    pub(crate) join_flags: u32,
    pub(crate) addr: *mut libc::sockaddr,
}

/// `struct rdma_addrinfo`.
#[repr(C)]
pub(crate) struct AddrInfo {
    pub(crate) flags: c_int,
    pub(crate) family: c_int,
    pub(crate) qp_type: c_int,
    pub(crate) port_space: c_int,
    pub(crate) src_len: libc::socklen_t,
    pub(crate) dst_len: libc::socklen_t,
    pub(crate) src_addr: *mut libc::sockaddr,
    pub(crate) dst_addr: *mut libc::sockaddr,
    pub(crate) src_canonname: *mut c_char,
    pub(crate) dst_canonname: *mut c_char,
    pub(crate) route_len: usize,
    pub(crate) route: *mut c_void,
    pub(crate) connect_len: usize,
    pub(crate) connect: *mut c_void,
    pub(crate) next: *mut Self,
}

const _: () = assert!(size_of::<AddrInfo>() == 96);
