//! Queue pairs of a link: batches posted on each, and their completions.

use std::collections::VecDeque;

use nobounce::{Connection, Status};
use nobounce_nic::work::WorkCompletion;

use crate::job::{Job, Request};

/// Requests of one batch; only the last one is signaled.
const BATCH: usize = 16;
/// Bytes outstanding on one lane, unless one batch has more. Transfers that come later wait for as
/// many.
const MAX_BYTES: u64 = 4 << 20;
/// Completions fetched per poll.
const FETCH: usize = 64;

#[derive(Debug)]
struct Batch {
    job: u64,
    requests: usize,
    bytes: u64,
}

#[derive(Debug, Default)]
struct LaneState {
    batches: VecDeque<Batch>,
    requests: usize,
    bytes: u64,
}

/// A batch that ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchEnd {
    pub(crate) job: u64,
    pub(crate) status: Status,
}

/// The lanes of one connection.
#[derive(Debug)]
pub(crate) struct Lanes {
    lanes: Vec<LaneState>,
    requests: Vec<Request>,
    fetched: Vec<WorkCompletion>,
}

impl Lanes {
    pub(crate) fn new(connection: &Connection) -> Self {
        let lanes = (0..connection.lanes()).map(|_| LaneState::default()).collect();
        Self { lanes, requests: Vec::new(), fetched: Vec::new() }
    }

    pub(crate) fn are_idle(&self) -> bool {
        self.lanes.iter().all(|lane| lane.batches.is_empty())
    }

    /// Of the lanes with room for a batch, the one with the fewest bytes outstanding.
    pub(crate) fn with_room(&self, connection: &Connection) -> Option<usize> {
        let has_room = |(index, lane): &(usize, &LaneState)| {
            let depth = connection.qp(*index).limits().send_depth;
            lane.batches.is_empty() || (lane.requests + BATCH <= depth && lane.bytes < MAX_BYTES)
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
        lane.batches.push_back(Batch { job: job.state.id, requests: count, bytes });
        lane.requests += count;
        lane.bytes += bytes;
        job.posted += 1;
        Ok(())
    }

    /// Fetches completions. A failed request is the end of its lane, and of all batches behind it.
    ///
    /// # Errors
    /// The device lost completions, or is gone.
    pub(crate) fn poll(&mut self, connection: &Connection, ended: &mut Vec<BatchEnd>) -> Result<(), String> {
        self.fetched.clear();
        connection.cq().poll_awake(&mut self.fetched, FETCH).map_err(|error| error.to_string())?;
        for work in &self.fetched {
            let index = (0..self.lanes.len()).find(|index| connection.qp(*index).qpn() == work.qpn);
            let Some(lane) = index.map(|index| &mut self.lanes[index]) else { continue };
            let Some(batch) = lane.batches.pop_front() else { continue };
            lane.requests -= batch.requests;
            lane.bytes -= batch.bytes;
            ended.push(BatchEnd { job: batch.job, status: work.status });
        }
        Ok(())
    }
}
