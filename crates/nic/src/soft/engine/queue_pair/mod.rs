//! One queue pair: its protocol state, and in named parts what the engine keeps beside it.

use std::sync::Arc;

use nobounce_protocol::qp::Qp as ProtocolQp;
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::Qpn;

use crate::links::{PeerName, peer_name};
use crate::soft::engine::cq_state::CqInner;
use crate::soft::engine::memory_windows::Accessor;
use crate::soft::qp_index::QpIndex;
use crate::tally::PathCounters;

mod ack_delay;
mod held;
mod posted;
mod route;
mod schedule;
mod sent;

pub(crate) use ack_delay::PendingAcks;
pub(crate) use held::{complete, deliver, flushed, next_packet, next_request};

use ack_delay::AckTiming;
use held::GpuState;
pub(crate) use posted::{Posted, XrcTarget};
use route::QpRoute;
use schedule::{SAME_HOST_TURN, Schedule, TURN};
use sent::SentPackets;

/// One queue pair.
#[derive(Debug)]
pub(crate) struct QueuePair {
    pub(crate) qpn: Qpn,
    pub(crate) qp: ProtocolQp,
    pub(crate) pd: u32,
    pub(crate) send_cq: Arc<CqInner>,
    pub(crate) recv_cq: Arc<CqInner>,
    pub(crate) posted: Posted,
    pub(crate) schedule: Schedule,
    pub(crate) ack: AckTiming,
    pub(crate) route: QpRoute,
    pub(crate) sent: SentPackets,
    pub(crate) gpu: GpuState,
    /// Its peer's process was killed: when it goes to the error state.
    pub(crate) ends_at: Option<Nanos>,
    pub(crate) tally: PathCounters,
}

impl QueuePair {
    pub(crate) fn new(
        qpn: Qpn,
        qp: ProtocolQp,
        pd: u32,
        send_cq: Arc<CqInner>,
        recv_cq: Arc<CqInner>,
    ) -> Self {
        Self {
            route: QpRoute::new(qp.service()),
            posted: Posted::new(pd),
            schedule: Schedule::default(),
            ack: AckTiming::default(),
            sent: SentPackets::default(),
            gpu: GpuState::default(),
            ends_at: None,
            tally: PathCounters::default(),
            qpn,
            qp,
            pd,
            send_cq,
            recv_cq,
        }
    }

    /// Its index in the device's table.
    pub(crate) fn index(&self) -> QpIndex {
        QpIndex::of(self.qpn)
    }

    /// The device of its destination.
    pub(crate) fn peer(&self) -> PeerName {
        let attr = self.qp.attr();
        peer_name(attr.remote, attr.dest_qpn)
    }

    /// Packets in its turn; `shared`: other queue pairs use the same route.
    pub(crate) fn whole_turn(&self, shared: bool) -> u64 {
        if self.route.local.is_some() && !shared { SAME_HOST_TURN } else { TURN }
    }

    /// The identity under which its peer accesses memory.
    pub(crate) fn accessor(&self) -> Accessor {
        // Responses of an XRC target may be to requests that named different queues.
        let pd = if self.posted.xrc.is_some() { Accessor::ANY_PD } else { self.pd };
        Accessor { pd, qp: self.index() }
    }

    /// Puts it into a list of queue pairs with a delayed ACK, unless it is in one.
    pub(crate) fn delay_ack(&mut self, now: Nanos, pending_acks: &mut PendingAcks) {
        let (index, wire) = (self.index(), self.route.local.is_none());
        self.ack.delay(now, index, wire, pending_acks);
    }
}
