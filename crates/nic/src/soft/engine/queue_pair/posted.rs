//! The work queues of a queue pair.

use std::collections::VecDeque;
use std::sync::Arc;

use nobounce_protocol::qp::QpState;

use super::QueuePair;
use crate::soft::engine::cq_state::CqInner;
use crate::soft::engine::host::{PostedReceive, PostedSend};
use crate::soft::engine::srqs::SrqIndex;
use crate::soft::engine::submission::WorkQueues;

/// Posted work requests.
#[derive(Debug)]
pub(crate) struct Posted {
    pub(crate) sends: VecDeque<PostedSend>,
    /// Its own receives: empty if it uses a shared receive queue.
    pub(crate) receives: VecDeque<PostedReceive>,
    /// The shared receive queue that it takes receives from.
    pub(crate) srq: Option<SrqIndex>,
    /// The receiving end of XRC: requests name the shared receive queue.
    pub(crate) xrc: Option<XrcTarget>,
    /// The protection domain of its receives' memory.
    pub(crate) receive_pd: u32,
    /// It has reported its last receive from the shared queue.
    pub(crate) said_last: bool,
    /// The receive of the incoming message.
    pub(crate) current: Option<PostedReceive>,
    /// Free places in its work queues, as posters see them.
    pub(crate) work_queues: Arc<WorkQueues>,
    /// Depth of its send queue.
    pub(crate) send_depth: usize,
}

/// The receiving end of an extended reliable connection.
#[derive(Debug)]
pub(crate) struct XrcTarget {
    pub(crate) domain: u32,
    /// The queue of the message that began last.
    pub(crate) current: Option<SrqIndex>,
    /// Where taken receives are reported, in order.
    pub(crate) cqs: VecDeque<Arc<CqInner>>,
}

impl Posted {
    /// The shared queue that receives come from now.
    pub(crate) fn shared(&self) -> Option<SrqIndex> {
        self.srq.or(self.xrc.as_ref().and_then(|xrc| xrc.current))
    }

    /// Empty queues; receives go to memory of domain `pd`.
    pub(super) fn new(pd: u32) -> Self {
        Self {
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            srq: None,
            xrc: None,
            receive_pd: pd,
            said_last: false,
            current: None,
            work_queues: Arc::default(),
            send_depth: 0,
        }
    }
}

impl QueuePair {
    /// Takes receives from a shared queue, whose memory belongs to domain `pd`.
    pub(crate) fn share_receives(&mut self, srq: SrqIndex, pd: u32) {
        self.posted.srq = Some(srq);
        self.posted.receive_pd = pd;
    }

    /// Whether it has just taken and reported its last receive from a shared queue.
    pub(crate) fn ends_sharing(&mut self) -> bool {
        let ends = self.posted.srq.is_some()
            && !self.posted.said_last
            && self.qp.state() == QpState::Error
            && self.gpu.held.as_ref().is_none_or(|held| held.completions.is_empty());
        self.posted.said_last |= ends;
        ends
    }

    /// The receive of the incoming message, and its shared queue.
    pub(crate) fn take_open_shared(&mut self) -> Option<(SrqIndex, PostedReceive)> {
        let srq = self.posted.shared().filter(|_| self.qp.has_open_receive())?;
        Some((srq, self.posted.current.take()?))
    }
}
