//! Configuration, connection parameters and counters of a queue pair.

use super::{Access, Mtu, QpAttr, Service};
use crate::wire::Qpn;

/// Counters of one queue pair, with the kernel's names where it has the same counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct QpCounters {
    pub duplicate_request: u64,
    pub out_of_seq_request: u64,
    pub rcvd_rnr_err: u64,
    pub send_rnr_err: u64,
    pub rcvd_seq_err: u64,
    pub implied_nak_seq_err: u64,
    pub local_ack_timeout_err: u64,
    /// Probes for a possibly lost tail; they do not count as retries.
    pub probes: u64,
    /// Packets sent again by selective retransmission.
    pub retransmitted: u64,
    /// Packets that arrived with a congestion mark.
    pub np_ecn_marked_roce_packets: u64,
    /// Congestion notifications sent, and those of the peer.
    pub np_cnp_sent: u64,
    pub rp_cnp_handled: u64,
    /// Duplicate atomics whose result was no longer kept.
    pub lost_atomic_replay: u64,
    /// Unreliable services: messages dropped because no receive was posted.
    pub out_of_buffer: u64,
    /// Datagrams dropped because of a wrong Q_Key.
    pub qkey_violations: u64,
    /// Unreliable services: messages dropped as incomplete, not permitted, or too long.
    pub dropped_messages: u64,
}

/// Parameters of a connection: the attributes in the form that requester and responder use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Params {
    pub(crate) qpn: Qpn,
    pub(crate) xrc: bool,
    pub(crate) qkey: u32,
    pub(crate) dest_qpn: Qpn,
    pub(crate) mtu: u32,
    pub(crate) access: Access,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
}

impl Params {
    pub(super) fn of(config: &QpConfig, attr: &QpAttr) -> Self {
        Self {
            qpn: config.qpn,
            xrc: config.service.is_xrc(),
            qkey: attr.qkey,
            dest_qpn: attr.dest_qpn,
            mtu: attr.path_mtu.bytes(),
            access: attr.access,
            max_rd_atomic: at_least(attr.max_rd_atomic, config.peer_resources),
            max_dest_rd_atomic: at_least(attr.max_dest_rd_atomic, config.responder_resources),
            min_rnr_timer: attr.min_rnr_timer,
            timeout: attr.timeout,
            retry_cnt: attr.retry_cnt,
            rnr_retry: attr.rnr_retry,
        }
    }
}

/// A limit of 0 forbids READs and atomics, and stays.
fn at_least(limit: u8, resources: u8) -> u8 {
    if limit == 0 { 0 } else { limit.max(resources) }
}

/// Configuration of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpConfig {
    /// Its transport service.
    pub service: Service,
    /// Its number (QPN), which datagrams carry.
    pub qpn: Qpn,
    /// The largest path MTU of the port; datagrams use it.
    pub port_mtu: Mtu,
    /// Depth of the send queue.
    pub send_depth: usize,
    /// Signal every request, whatever it says.
    pub signal_all: bool,
    /// READs and atomics that are answered at a time, also where `max_dest_rd_atomic` is lower.
    pub responder_resources: u8,
    /// Those that the peer is known to answer at a time, also where `max_rd_atomic` is lower.
    pub peer_resources: u8,
}
