//! The send queue. A prefix of it is *started*: its requests have PSNs.

use std::collections::VecDeque;

use crate::qp::request::{PostError, WorkRequest};
use crate::qp::wqe::Wqe;

#[derive(Debug)]
pub(super) struct SendQueue {
    wqes: VecDeque<Wqe>,
    depth: usize,
    started: usize,
    /// The request of the next packet.
    cursor: usize,
    next_serial: u64,
}

impl SendQueue {
    pub(super) const fn new(depth: usize) -> Self {
        Self { wqes: VecDeque::new(), depth, started: 0, cursor: 0, next_serial: 0 }
    }

    pub(super) fn post(&mut self, request: WorkRequest) -> Result<u64, PostError> {
        if self.wqes.len() >= self.depth {
            return Err(PostError::QueueFull(self.depth));
        }
        let serial = self.next_serial;
        self.next_serial += 1;
        self.wqes.push_back(Wqe { serial, request, psn: 0, packets: 0, split: false });
        Ok(serial)
    }

    pub(super) fn len(&self) -> usize {
        self.wqes.len()
    }

    /// The serial number of the oldest request.
    pub(super) fn oldest_serial(&self) -> u64 {
        self.wqes.front().map_or(self.next_serial, |wqe| wqe.serial)
    }

    /// Whether no request is started.
    pub(super) const fn is_drained(&self) -> bool {
        self.started == 0
    }

    /// The started requests, oldest first.
    pub(super) fn started(&self) -> impl Iterator<Item = &Wqe> {
        self.wqes.iter().take(self.started)
    }

    /// The oldest one, if it is started.
    #[inline]
    pub(super) fn front(&self) -> Option<&Wqe> {
        self.wqes.front().filter(|_| self.started > 0)
    }

    /// The request of the next packet.
    #[inline]
    pub(super) fn current(&self) -> Option<&Wqe> {
        self.wqes.get(self.cursor)
    }

    /// The next one to be started.
    #[inline]
    pub(super) fn waiting(&self) -> Option<&Wqe> {
        self.wqes.get(self.started)
    }

    /// Starts the next request at that PSN, with packets for that MTU; returns its end. The next
    /// packet is its first one.
    pub(super) fn start(&mut self, psn: u64, mtu: u32, splits_writes: bool) -> u64 {
        let Some(wqe) = self.wqes.get_mut(self.started) else { return psn };
        wqe.start(psn, mtu, splits_writes);
        self.cursor = self.started;
        self.started += 1;
        wqe.end()
    }

    /// Starts the next request, which takes no PSN.
    pub(super) fn start_local(&mut self, psn: u64) {
        if let Some(wqe) = self.wqes.get_mut(self.started) {
            (wqe.psn, wqe.packets) = (psn, 0);
            self.started += 1;
            self.cursor = self.started;
        }
    }

    /// The last packet of the current request has left: the next one belongs to the next request
    /// that has packets.
    #[inline]
    pub(super) fn advance(&mut self) {
        self.cursor += 1;
        while self.cursor < self.started && self.wqes[self.cursor].packets == 0 {
            self.cursor += 1;
        }
    }

    /// The next packet is this one.
    pub(super) fn seek(&mut self, psn: u64) {
        let at = self.started().position(|wqe| psn < wqe.end());
        self.cursor = at.unwrap_or(self.started);
    }

    /// The started request that has this packet.
    pub(super) fn find(&self, psn: u64) -> Option<&Wqe> {
        self.started().skip(self.index_of(psn)?).find(|wqe| (wqe.psn..wqe.end()).contains(&psn))
    }

    /// The first started request that does not end before this PSN.
    fn index_of(&self, psn: u64) -> Option<usize> {
        let (mut low, mut high) = (0, self.started);
        while low < high {
            let middle = usize::midpoint(low, high);
            if self.wqes[middle].end() <= psn { low = middle + 1 } else { high = middle }
        }
        (low < self.started).then_some(low)
    }

    /// Takes out the oldest request, which is over.
    pub(super) fn pop(&mut self) -> Option<Wqe> {
        let wqe = self.wqes.pop_front()?;
        self.started -= 1;
        self.cursor = self.cursor.saturating_sub(1);
        Some(wqe)
    }

    /// Takes out all requests before the one with that serial number.
    pub(super) fn drain_before(&mut self, serial: u64) -> impl Iterator<Item = Wqe> {
        let count = self.wqes.iter().take_while(|wqe| wqe.serial != serial).count();
        self.started = self.started.saturating_sub(count);
        self.cursor = self.cursor.saturating_sub(count);
        self.wqes.drain(..count)
    }

    /// Takes out all requests.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Wqe> {
        (self.started, self.cursor) = (0, 0);
        self.wqes.drain(..)
    }
}
