//! What a proxy is made of.

use nobounce_nic::any::{Cq, Qp};
use nobounce_nic::work::Sge;

use crate::ring::Ring;
use crate::table::Table;
use crate::words::{WordMemory, Words};

/// Work requests of one descriptor.
pub(crate) const MAX_REQUESTS: usize = 2;

/// What a kernel and the proxy share.
#[derive(Debug)]
pub struct Channel {
    /// The ring, in host memory.
    pub ring: Ring,
    /// One word, in GPU memory: the consumer index.
    pub consumed: Words,
    /// Counters, in GPU memory.
    pub counters: Words,
    /// The signals of this rank that peers' descriptors in this channel change, in GPU memory.
    pub signals: WordMemory,
}

/// Where atomics return old values, which no one reads.
#[derive(Clone, Copy, Debug)]
pub struct Scratch {
    /// Address of 8 bytes.
    pub addr: u64,
    /// Their key.
    pub lkey: u32,
}

impl Scratch {
    pub(crate) fn sge(self) -> Sge {
        Sge { addr: self.addr, len: 8, lkey: self.lkey }
    }
}

/// What a proxy is made of.
#[derive(Debug)]
pub struct Parts {
    /// The number of this rank. It is not probed.
    pub rank: usize,
    /// The channels.
    pub channels: Vec<Channel>,
    /// A connected queue pair to each rank, with completions in `cq`.
    pub qps: Vec<Qp>,
    /// As deep as all send queues together.
    pub cq: Cq,
    /// What descriptors may name.
    pub table: Table,
    /// For atomics.
    pub scratch: Scratch,
    /// One word for each rank, and one for all.
    pub status: Words,
}

/// Parts that do not fit each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum PartsError {
    #[error("a descriptor may need {MAX_REQUESTS} requests: the send queue of rank {rank} is too short")]
    SendQueue { rank: usize },
    #[error("the completion queue has {depth} entries, and needs {needed}")]
    CompletionQueue { depth: usize, needed: usize },
    #[error("{given} queue pairs for {ranks} ranks")]
    Ranks { given: usize, ranks: usize },
    #[error("{given} {what}, needed are {needed}")]
    Words { what: &'static str, given: usize, needed: usize },
}

impl Parts {
    pub(crate) fn check(&self) -> Result<(), PartsError> {
        let Self { channels, qps, cq, table, status, .. } = self;
        let depth = |qp: &Qp| qp.limits().send_depth;
        if let Some(rank) = qps.iter().position(|qp| depth(qp) < MAX_REQUESTS) {
            return Err(PartsError::SendQueue { rank });
        }
        if qps.len() != table.ranks() {
            return Err(PartsError::Ranks { given: qps.len(), ranks: table.ranks() });
        }
        // All requests, and the receive that tells of the end.
        let needed = qps.iter().map(|qp| depth(qp) + 1).sum();
        if cq.depth() < needed {
            return Err(PartsError::CompletionQueue { depth: cq.depth(), needed });
        }
        let counters = channels.iter().map(|channel| ("counters", channel.counters.len(), table.counters()));
        let indices = channels.iter().map(|channel| ("consumer indices", channel.consumed.len(), 1));
        let all = counters.chain(indices).chain([("words of status", status.len(), qps.len() + 1)]);
        for (what, given, needed) in all {
            if given < needed {
                return Err(PartsError::Words { what, given, needed });
            }
        }
        Ok(())
    }
}
