//! Queue pairs of a link: batches posted on each, and their completions.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nobounce::{Connection, Status};
use nobounce_nic::work::{Operation, SendRequest, WorkCompletion};

use crate::frame_lane::{FrameLane, SENDS};
use crate::job::{Job, Request};
use crate::shared::Shared;

/// Requests of one batch; only the last one is signaled.
const BATCH: usize = 16;
/// Bytes outstanding on one lane, unless one batch has more. Transfers that come later wait for as
/// many.
const MAX_BYTES: u64 = 4 << 20;
/// Completions fetched per poll.
const FETCH: usize = 64;

#[derive(Debug)]
struct Batch {
    /// `None`: frames.
    job: Option<u64>,
    requests: usize,
    bytes: u64,
}

#[derive(Debug, Default)]
struct LaneState {
    batches: VecDeque<Batch>,
    requests: usize,
    bytes: u64,
}

/// A batch that ended; frames only if they failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchEnd {
    pub(crate) job: Option<u64>,
    pub(crate) status: Status,
}

/// The lanes of one connection.
#[derive(Debug)]
pub(crate) struct Lanes {
    lanes: Vec<LaneState>,
    shared: Arc<Shared>,
    requests: Vec<Request>,
    fetched: Vec<WorkCompletion>,
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.shared.lanes.fetch_sub(self.lanes.len(), Ordering::Relaxed);
    }
}

impl Lanes {
    pub(crate) fn new(shared: &Arc<Shared>, connection: &Connection) -> Self {
        let lanes: Vec<_> = (0..connection.lanes()).map(|_| LaneState::default()).collect();
        shared.lanes.fetch_add(lanes.len(), Ordering::Relaxed);
        Self { lanes, shared: shared.clone(), requests: Vec::new(), fetched: Vec::new() }
    }

    pub(crate) fn are_idle(&self) -> bool {
        self.lanes.iter().all(|lane| lane.batches.is_empty())
    }

    /// Whether all requests have one order.
    pub(crate) fn is_single(&self) -> bool {
        self.lanes.len() == 1
    }

    /// Of the lanes with room for a batch and for frames, the one with the fewest bytes
    /// outstanding.
    pub(crate) fn with_room(&self, connection: &Connection) -> Option<usize> {
        let has_room = |(index, lane): &(usize, &LaneState)| {
            let depth = connection.qp(*index).limits().send_depth;
            lane.batches.is_empty() || (lane.requests + BATCH + SENDS <= depth && lane.bytes < MAX_BYTES)
        };
        let least = self.lanes.iter().enumerate().filter(has_room).min_by_key(|(_, lane)| lane.bytes);
        least.map(|(index, _)| index)
    }

    /// Posts the next batch of a job there.
    ///
    /// # Errors
    /// The device refused; nothing more can be posted there.
    pub(crate) fn post(
        &mut self,
        connection: &Connection,
        index: usize,
        job: &mut Job,
    ) -> Result<(), String> {
        let (lane, qp) = (&mut self.lanes[index], connection.qp(index));
        let most = BATCH.min(qp.limits().send_depth);
        self.requests.clear();
        let bytes = job.take_requests(most, MAX_BYTES, &mut self.requests);
        let count = self.requests.len();
        if count == 0 {
            return Ok(());
        }
        let sends = self.requests.iter().enumerate();
        let sends: Vec<_> =
            sends.map(|(at, request)| request.as_send(job.state.id, at + 1 == count)).collect();
        qp.post_sends(&sends).map_err(|(_, error)| error.to_string())?;
        lane.batches.push_back(Batch { job: Some(job.state.id), requests: count, bytes });
        lane.requests += count;
        lane.bytes += bytes;
        job.posted += 1;
        Ok(())
    }

    /// Sends frames behind all requests of the first lane, as far as there is room.
    ///
    /// # Errors
    /// The device refused.
    pub(crate) fn post_frames(
        &mut self,
        connection: &Connection,
        frames: &mut FrameLane,
    ) -> Result<bool, String> {
        let (lane, qp) = (&mut self.lanes[0], connection.qp(0));
        let mut is_busy = false;
        while lane.requests < qp.limits().send_depth
            && let Some(sge) = frames.next_send()?
        {
            let send = SendRequest::new(0, Operation::Send, std::slice::from_ref(&sge));
            qp.post_sends(&[send]).map_err(|(_, error)| error.to_string())?;
            lane.batches.push_back(Batch { job: None, requests: 1, bytes: 0 });
            lane.requests += 1;
            is_busy = true;
        }
        Ok(is_busy)
    }

    /// Fetches completions, and returns whether there were any. A failed request is the end of its
    /// lane, and of all batches behind it.
    ///
    /// # Errors
    /// The device lost completions, or is gone; or the peer sent something else than frames.
    pub(crate) fn poll(
        &mut self,
        connection: &Connection,
        frames: &mut FrameLane,
        ended: &mut Vec<BatchEnd>,
    ) -> Result<bool, String> {
        self.fetched.clear();
        connection.cq().poll_awake(&mut self.fetched, FETCH).map_err(|error| error.to_string())?;
        for work in &self.fetched {
            if FrameLane::is_receive(work) {
                frames.receive(connection, work)?;
                continue;
            }
            let index = (0..self.lanes.len()).find(|index| connection.qp(*index).qpn() == work.qpn);
            let Some(lane) = index.map(|index| &mut self.lanes[index]) else { continue };
            let Some(batch) = lane.batches.pop_front() else { continue };
            lane.requests -= batch.requests;
            lane.bytes -= batch.bytes;
            match (batch.job, work.status) {
                (None, Status::Success) => frames.end_send(),
                (job, status) => ended.push(BatchEnd { job, status }),
            }
        }
        Ok(!self.fetched.is_empty())
    }
}
