//! Operations in flight, and the unclaimed results of those that ended.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Instant;

use nobounce_nic::work::{Status, WorkCompletion, WorkKind};

/// One operation of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub(crate) u64);

/// An operation that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Completion {
    /// Its ticket.
    pub ticket: Ticket,
    /// The lane it was posted on.
    pub lane: usize,
    /// Its kind.
    pub kind: WorkKind,
    /// Bytes received, read or fetched.
    pub len: u32,
    /// The immediate data of a receive.
    pub immediate: Option<u32>,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    pub(crate) completion: Completion,
    pub(crate) status: Status,
    /// When its failure was seen, if it failed.
    pub(crate) failed: Option<Instant>,
}

impl Ended {
    /// Whether it failed at this end for a reason that the device cannot name.
    pub(crate) fn is_local_trouble(&self) -> bool {
        matches!(self.status, Status::LocalQpOperation | Status::Fatal | Status::General)
    }

    /// Whether the peer's device refused, as it also does for a process whose memory is gone.
    pub(crate) fn is_refused(&self) -> bool {
        matches!(self.status, Status::RemoteAccess | Status::RemoteOperation)
    }
}

/// Tickets are consecutive numbers of our own making. A peer cannot provoke hash collisions, so a
/// multiplicative spread suffices.
#[derive(Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(self.0 ^ u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        // The map uses the highest and the lowest bits. Multiply by an odd constant with bits all
        // over, then fold the upper half into the lower.
        let product = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ (product >> 32);
    }
}

type ByTicket<V> = HashMap<Ticket, V, BuildHasherDefault<Spread>>;

/// The tickets of a connection.
#[derive(Debug)]
pub(crate) struct Tickets {
    next: u64,
    /// Operations in flight, their lanes, and their kinds: a device need not report the kind of a
    /// failed one.
    pending: ByTicket<(usize, WorkKind)>,
    ended: ByTicket<Ended>,
    /// In order of completion; may contain tickets that were claimed meanwhile.
    order: VecDeque<Ticket>,
    /// Limit of tickets in flight or unclaimed. It equals the size of the completion queue, which
    /// therefore cannot overflow. That holds even if operations end faster than they are claimed
    /// (on a failed lane, at once).
    pub(crate) limit: usize,
    /// Whether any operation has succeeded.
    pub(crate) has_succeeded: bool,
}

impl Tickets {
    pub(crate) fn new(limit: usize) -> Self {
        let (pending, ended, order) = (ByTicket::default(), ByTicket::default(), VecDeque::new());
        Self { next: 0, pending, ended, order, limit, has_succeeded: false }
    }

    /// Opens a ticket, unless there are too many.
    pub(crate) fn open(&mut self, lane: usize, kind: WorkKind) -> Option<Ticket> {
        if self.pending.len() + self.ended.len() >= self.limit {
            return None;
        }
        let ticket = Ticket(self.next);
        self.next += 1;
        self.pending.insert(ticket, (lane, kind));
        Some(ticket)
    }

    /// The operation was not posted after all.
    pub(crate) fn cancel(&mut self, ticket: Ticket) {
        self.pending.remove(&ticket);
    }

    pub(crate) fn is_pending(&self, ticket: Ticket) -> bool {
        self.pending.contains_key(&ticket)
    }

    pub(crate) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Records a completion. Raw work requests have no ticket and are ignored.
    pub(crate) fn end(&mut self, work: &WorkCompletion) {
        let ticket = Ticket(work.wr_id);
        let Some((lane, posted)) = self.pending.remove(&ticket) else { return };
        let kind = if work.status == Status::Success { work.kind } else { posted };
        let completion = Completion { ticket, lane, kind, len: work.byte_len, immediate: work.immediate };
        self.has_succeeded |= work.status == Status::Success;
        let failed = (work.status != Status::Success).then(Instant::now);
        self.ended.insert(ticket, Ended { completion, status: work.status, failed });
        self.order.push_back(ticket);
        // At most every second entry is stale: the queue stays within twice the results.
        if self.order.len() > 2 * self.ended.len() + 16 {
            self.order.retain(|ticket| self.ended.contains_key(ticket));
        }
    }

    /// The result of this one, if it has ended.
    pub(crate) fn claim(&mut self, ticket: Ticket) -> Option<Ended> {
        let ended = self.ended.remove(&ticket);
        if self.order.front() == Some(&ticket) {
            self.order.pop_front();
        }
        ended
    }

    /// The next unclaimed result.
    pub(crate) fn claim_any(&mut self) -> Option<Ended> {
        loop {
            let ticket = self.order.pop_front()?;
            if let Some(ended) = self.ended.remove(&ticket) {
                return Some(ended);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use nobounce_nic::work::Qpn;

    use super::*;

    fn done(ticket: Ticket) -> WorkCompletion {
        WorkCompletion {
            wr_id: ticket.0,
            status: Status::Success,
            kind: WorkKind::Write,
            byte_len: 0,
            immediate: None,
            invalidated: None,
            qpn: Qpn::new(2),
            source: None,
            timestamp: 0,
        }
    }

    #[test]
    fn results_are_claimed_once_in_any_order() {
        let mut book = Tickets::new(10);
        let tickets: Vec<_> = (0..4).map(|lane| book.open(lane, WorkKind::Write).unwrap()).collect();
        for &ticket in tickets.iter().rev() {
            book.end(&done(ticket));
        }
        book.end(&done(Ticket(99))); // another connection's
        assert_eq!(book.claim(tickets[1]).unwrap().completion.lane, 1);
        assert!(book.claim(tickets[1]).is_none());
        let rest: Vec<_> = std::iter::from_fn(|| book.claim_any()).map(|e| e.completion.lane).collect();
        assert_eq!(rest, [3, 2, 0]);
        assert_eq!(book.pending(), 0);
    }

    #[test]
    fn the_book_does_not_grow() {
        let mut book = Tickets::new(3);
        let keep = book.open(0, WorkKind::Write).unwrap();
        book.end(&done(keep)); // stays in front, unclaimed
        for _ in 0..1000 {
            let ticket = book.open(0, WorkKind::Write).unwrap();
            book.end(&done(ticket));
            assert!(book.claim(ticket).is_some());
        }
        assert!(book.order.len() < 32, "{}", book.order.len());
        for _ in 0..2 {
            let ticket = book.open(0, WorkKind::Write).unwrap();
            book.end(&done(ticket));
        }
        assert!(book.open(0, WorkKind::Write).is_none(), "three results lie unclaimed");
        assert!(book.claim(keep).is_some());
        assert!(book.open(0, WorkKind::Write).is_some());
    }
}
