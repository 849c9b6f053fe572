//! Names for people.

use std::ffi::{CStr, c_char, c_int};

fn pick(names: &[&'static CStr], index: u32, otherwise: &'static CStr) -> *const c_char {
    usize::try_from(index).ok().and_then(|index| names.get(index)).copied().unwrap_or(otherwise).as_ptr()
}

/// `ibv_wc_status_str`.
pub(crate) unsafe extern "C" fn wc_status_str(status: u32) -> *const c_char {
    const NAMES: [&CStr; 24] = [
        c"success",
        c"local length error",
        c"local QP operation error",
        c"local EE context operation error",
        c"local protection error",
        c"Work Request Flushed Error",
        c"memory management operation error",
        c"bad response error",
        c"local access error",
        c"remote invalid request error",
        c"remote access error",
        c"remote operation error",
        c"transport retry counter exceeded",
        c"RNR retry counter exceeded",
        c"local RDD violation error",
        c"remote invalid RD request",
        c"aborted error",
        c"invalid EE context number",
        c"invalid EE context state",
        c"fatal error",
        c"response timeout error",
        c"general error",
        c"TM error",
        c"TM software rendezvous",
    ];
    pick(&NAMES, status, c"unknown")
}

/// `ibv_event_type_str`.
pub(crate) unsafe extern "C" fn event_type_str(event: u32) -> *const c_char {
    const NAMES: [&CStr; 20] = [
        c"CQ error",
        c"local work queue catastrophic error",
        c"invalid request local work queue error",
        c"local access violation work queue error",
        c"communication established",
        c"send queue drained",
        c"path migrated",
        c"path migration request error",
        c"local catastrophic error",
        c"port active",
        c"port error",
        c"LID change",
        c"P_Key change",
        c"SM change",
        c"SRQ catastrophic error",
        c"SRQ limit reached",
        c"last WQE reached",
        c"client reregistration",
        c"GID table change",
        c"WQ fatal",
    ];
    pick(&NAMES, event, c"unknown")
}

/// `ibv_node_type_str`.
pub(crate) unsafe extern "C" fn node_type_str(kind: c_int) -> *const c_char {
    const NAMES: [&CStr; 8] = [
        c"unknown",
        c"InfiniBand channel adapter",
        c"InfiniBand switch",
        c"InfiniBand router",
        c"iWARP NIC",
        c"usNIC",
        c"usNIC UDP",
        c"unspecified",
    ];
    pick(&NAMES, u32::try_from(kind).unwrap_or(0), c"unknown")
}

/// `ibv_port_state_str`.
pub(crate) unsafe extern "C" fn port_state_str(state: u32) -> *const c_char {
    const NAMES: [&CStr; 6] =
        [c"no state change (NOP)", c"DOWN", c"INIT", c"ARMED", c"ACTIVE", c"ACTIVE DEFER"];
    pick(&NAMES, state, c"invalid state")
}

/// The private `ibv_wr_opcode_str`.
pub(crate) unsafe extern "C" fn wr_opcode_str(opcode: u32) -> *const c_char {
    const NAMES: [&CStr; 12] = [
        c"rdma-write",
        c"rdma-write-with-imm",
        c"send",
        c"send-with-imm",
        c"rdma-read",
        c"atomic-cmp-and-swp",
        c"atomic-fetch-and-add",
        c"local-inv",
        c"bind-mw",
        c"send-with-inv",
        c"tso",
        c"driver1",
    ];
    pick(&NAMES, opcode, c"unknown")
}
