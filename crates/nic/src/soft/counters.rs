//! Device counters. Names follow the kernel's `hw_counters` where the meaning is the same.

use nobounce_protocol::qp::{Handled, QpCounters, Status};
use nobounce_protocol::wire::Malformed;

/// Counters of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Counters {
    pub sent_pkts: u64,
    pub rcvd_pkts: u64,
    /// Among those sent: markers, this device's and returned ones of peers.
    pub sent_markers: u64,
    /// Payload bytes placed into or read from registered memory.
    pub placed_bytes: u64,
    pub gathered_bytes: u64,
    /// Dropped: the invariant CRC was wrong.
    pub icrc_errors: u64,
    /// Accepted although the IPv4 identification had to be solved for (16 of the 32 CRC bits still
    /// check).
    pub icrc_solved: u64,
    /// Dropped: no such queue pair.
    pub no_such_qp: u64,
    /// Dropped: not from the queue pair's peer.
    pub wrong_peer: u64,
    /// Dropped: the queue pair does not accept such a packet in its state.
    pub wrong_state: u64,
    /// Dropped: the transport service differs from the queue pair's.
    pub wrong_service: u64,
    /// Dropped: a response without a matching request.
    pub unsolicited: u64,
    /// Dropped as malformed, by cause.
    pub malformed: [u64; Malformed::ALL.len()],
    /// Requests rejected because of a wrong key, range or access right.
    pub refused_access: u64,
    /// Accesses to registered memory that had vanished.
    pub memory_faults: u64,
    /// Failed work requests, in the order of [`Status::ALL`].
    failed: [u64; Status::ALL.len()],
    /// Sums over all queue pairs, including destroyed ones.
    pub qps: QpCounters,
}

impl Counters {
    /// Adds the counters of another engine of the same device.
    pub(crate) fn add(&mut self, other: &Self) {
        // Destructured, so that the compiler reports a new counter that is missing here.
        let Self {
            sent_pkts,
            rcvd_pkts,
            sent_markers,
            placed_bytes,
            gathered_bytes,
            icrc_errors,
            icrc_solved,
            no_such_qp,
            wrong_peer,
            wrong_state,
            wrong_service,
            unsolicited,
            malformed,
            refused_access,
            memory_faults,
            failed,
            qps,
        } = other;
        self.sent_pkts += sent_pkts;
        self.rcvd_pkts += rcvd_pkts;
        self.sent_markers += sent_markers;
        self.placed_bytes += placed_bytes;
        self.gathered_bytes += gathered_bytes;
        self.icrc_errors += icrc_errors;
        self.icrc_solved += icrc_solved;
        self.no_such_qp += no_such_qp;
        self.wrong_peer += wrong_peer;
        self.wrong_state += wrong_state;
        self.wrong_service += wrong_service;
        self.unsolicited += unsolicited;
        self.malformed.iter_mut().zip(malformed).for_each(|(sum, one)| *sum += one);
        self.refused_access += refused_access;
        self.memory_faults += memory_faults;
        self.failed.iter_mut().zip(failed).for_each(|(sum, one)| *sum += one);
        add(&mut self.qps, qps);
    }

    /// Names and values, in a fixed order.
    pub fn list(&self) -> Vec<(&'static str, u64)> {
        let mut list = vec![
            ("sent_pkts", self.sent_pkts),
            ("rcvd_pkts", self.rcvd_pkts),
            ("sent_markers", self.sent_markers),
            ("placed_bytes", self.placed_bytes),
            ("gathered_bytes", self.gathered_bytes),
            ("icrc_errors", self.icrc_errors),
            ("icrc_solved", self.icrc_solved),
            ("no_such_qp", self.no_such_qp),
            ("wrong_peer", self.wrong_peer),
            ("wrong_state", self.wrong_state),
            ("wrong_service", self.wrong_service),
            ("unsolicited", self.unsolicited),
            ("refused_access", self.refused_access),
            ("memory_faults", self.memory_faults),
            ("duplicate_request", self.qps.duplicate_request),
            ("out_of_seq_request", self.qps.out_of_seq_request),
            ("rcvd_rnr_err", self.qps.rcvd_rnr_err),
            ("send_rnr_err", self.qps.send_rnr_err),
            ("rcvd_seq_err", self.qps.rcvd_seq_err),
            ("implied_nak_seq_err", self.qps.implied_nak_seq_err),
            ("local_ack_timeout_err", self.qps.local_ack_timeout_err),
            ("probes", self.qps.probes),
            ("retransmitted", self.qps.retransmitted),
            ("np_ecn_marked_roce_packets", self.qps.np_ecn_marked_roce_packets),
            ("np_cnp_sent", self.qps.np_cnp_sent),
            ("rp_cnp_handled", self.qps.rp_cnp_handled),
            ("lost_atomic_replay", self.qps.lost_atomic_replay),
            ("out_of_buffer", self.qps.out_of_buffer),
            ("qkey_violations", self.qps.qkey_violations),
            ("dropped_messages", self.qps.dropped_messages),
        ];
        list.extend(Malformed::ALL.iter().map(|m| (m.name(), self.malformed[m.index()])));
        list
    }

    /// Counts what a queue pair said of a packet.
    #[inline]
    pub(crate) const fn count_handled(&mut self, handled: Handled) {
        match handled {
            Handled::Taken => {}
            Handled::WrongState => self.wrong_state += 1,
            Handled::Unsolicited => self.unsolicited += 1,
            Handled::WrongService => self.wrong_service += 1,
        }
    }

    #[cold]
    pub(crate) fn count_failed(&mut self, status: Status) {
        let counts = Status::ALL.iter().zip(&mut self.failed);
        counts.filter(|(one, _)| **one == status).for_each(|(_, count)| *count += 1);
    }

    /// Number of work requests that ended with this status.
    pub fn failed(&self, status: Status) -> u64 {
        Status::ALL.iter().zip(self.failed).filter(|(one, _)| **one == status).map(|(_, count)| count).sum()
    }

    /// Number of retransmissions: after a NAK, after a response that showed a loss, or after a
    /// timeout; and packets sent again by selective retransmission.
    pub fn retransmissions(&self) -> u64 {
        let QpCounters { rcvd_seq_err, implied_nak_seq_err, local_ack_timeout_err, .. } = self.qps;
        rcvd_seq_err + implied_nak_seq_err + local_ack_timeout_err + self.qps.retransmitted
    }

    /// The sum of everything dropped.
    pub fn dropped(&self) -> u64 {
        self.icrc_errors
            + self.no_such_qp
            + self.wrong_peer
            + self.wrong_state
            + self.wrong_service
            + self.unsolicited
            + self.malformed.iter().sum::<u64>()
    }
}

/// Adds the counters of one queue pair.
pub(crate) fn add(sum: &mut QpCounters, one: &QpCounters) {
    sum.duplicate_request += one.duplicate_request;
    sum.out_of_seq_request += one.out_of_seq_request;
    sum.rcvd_rnr_err += one.rcvd_rnr_err;
    sum.send_rnr_err += one.send_rnr_err;
    sum.rcvd_seq_err += one.rcvd_seq_err;
    sum.implied_nak_seq_err += one.implied_nak_seq_err;
    sum.local_ack_timeout_err += one.local_ack_timeout_err;
    sum.probes += one.probes;
    sum.retransmitted += one.retransmitted;
    sum.np_ecn_marked_roce_packets += one.np_ecn_marked_roce_packets;
    sum.np_cnp_sent += one.np_cnp_sent;
    sum.rp_cnp_handled += one.rp_cnp_handled;
    sum.lost_atomic_replay += one.lost_atomic_replay;
    sum.out_of_buffer += one.out_of_buffer;
    sum.qkey_violations += one.qkey_violations;
    sum.dropped_messages += one.dropped_messages;
}
