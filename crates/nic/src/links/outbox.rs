//! Handovers that wait because the owner's queue is full.
//!
//! The send buffer of a Unix socket is small against the UDP socket that received the packets. The
//! receiving device keeps the others for a moment: services without retransmission would lose
//! messages otherwise.

use std::collections::VecDeque;

use super::handover::{GroBurst, Handover};
use super::now_ns;
use super::slot::{Slot, SlotOwner};

/// Maximum bytes kept. Beyond it packets are dropped, as with a full socket buffer.
const MAX_BYTES: usize = 1 << 20;
/// Maximum bytes kept for one owner: one that is stopped must not take the room of others.
const MAX_OF_OWNER: usize = MAX_BYTES / 4;
/// Retry interval for a full queue, in nanoseconds: it doubles while nothing moves.
const RETRY_NS: (u64, u64) = (50_000, 10_000_000);
/// How long packets are kept, in nanoseconds.
const KEPT_NS: u64 = 1_000_000_000;

#[derive(Debug)]
struct Letter {
    owner: SlotOwner,
    run: GroBurst<'static>,
    bytes: Vec<u8>,
    since: u64,
}

#[derive(Debug, Default)]
pub(super) struct Outbox {
    letters: VecDeque<Letter>,
    bytes: usize,
    retry_at: u64,
    interval: u64,
    /// Packets that were kept and dropped: their owner is gone.
    pub(super) lost: u64,
}

impl Outbox {
    /// Hands packets to their owner, now or a little later, in order.
    pub(super) fn hand_over(&mut self, from: &mut Slot, owner: SlotOwner, run: &GroBurst<'_>) -> Handover {
        if !self.letters.iter().any(|letter| letter.owner == owner) {
            match from.hand_over(owner, run) {
                Handover::Full => {
                    self.interval = RETRY_NS.0;
                    self.retry_at = now_ns() + self.interval;
                }
                other => return other,
            }
        }
        let of_owner: usize =
            self.letters.iter().filter(|letter| letter.owner == owner).map(|letter| letter.bytes.len()).sum();
        if self.bytes + run.bytes.len() > MAX_BYTES || of_owner + run.bytes.len() > MAX_OF_OWNER {
            return Handover::Lost;
        }
        self.bytes += run.bytes.len();
        let (run, bytes) = (GroBurst { bytes: &[], ..*run }, run.bytes.to_vec());
        let letter = Letter { owner, run, bytes, since: now_ns() };
        self.letters.push_back(letter);
        Handover::Done
    }

    pub(super) fn is_empty(&self) -> bool {
        self.letters.is_empty()
    }

    /// Deadline of the next [`Outbox::retry`].
    pub(super) fn next_retry(&self) -> Option<u64> {
        (!self.is_empty()).then_some(self.retry_at)
    }

    /// Tries again, if it is time.
    pub(super) fn retry(&mut self, from: &mut Slot) {
        let now = now_ns();
        if now < self.retry_at {
            return;
        }
        let mut full: Vec<SlotOwner> = Vec::new();
        let before = self.letters.len();
        let Self { letters, bytes, lost, .. } = self;
        letters.retain(|letter| {
            let run = GroBurst { bytes: &letter.bytes, ..letter.run };
            if now.saturating_sub(letter.since) > KEPT_NS {
                *lost += run.packets();
                *bytes -= letter.bytes.len();
                return false;
            }
            if full.contains(&letter.owner) {
                return true;
            }
            match from.hand_over(letter.owner, &run) {
                Handover::Full => {
                    full.push(letter.owner);
                    return true;
                }
                Handover::Done => {}
                Handover::NoOwner | Handover::Lost => *lost += run.packets(),
            }
            *bytes -= letter.bytes.len();
            false
        });
        let moved = self.letters.len() < before;
        self.interval = if moved { RETRY_NS.0 } else { (2 * self.interval).clamp(RETRY_NS.0, RETRY_NS.1) };
        self.retry_at = now + self.interval;
    }
}

#[cfg(test)]
mod tests {
    use super::super::handover::TAKE_BUFFER;
    use super::*;

    fn claimed() -> Slot {
        let mut slot = Slot::new("127.77.1.1".parse().unwrap()).unwrap();
        assert!(slot.claim().unwrap());
        slot
    }

    #[test]
    fn what_finds_a_full_queue_arrives_later_and_in_order() {
        let (mut from, mut to) = (claimed(), claimed());
        let mut outbox = Outbox::default();
        let mut letters = Vec::new();
        fn run(bytes: &[u8]) -> GroBurst<'_> {
            GroBurst { src: [127, 0, 0, 1].into(), src_port: 1, ip_id: 0, segment: 100, marked: false, bytes }
        }
        while outbox.letters.len() < 10 {
            let bytes = vec![u8::try_from(letters.len() % 251).unwrap(); 20_000];
            assert_eq!(
                outbox.hand_over(&mut from, SlotOwner::Slot(to.number()), &run(&bytes)),
                Handover::Done
            );
            letters.push(bytes);
        }
        assert!(outbox.next_retry().is_some(), "more than fit the queue");
        let mut buffer = vec![0; TAKE_BUFFER];
        let mut got = Vec::new();
        while got.len() < letters.len() {
            outbox.retry(&mut from);
            while let Some(Some(run)) = to.take(&mut buffer) {
                got.push(run.bytes.to_vec());
            }
        }
        assert!(got == letters);
        assert!(outbox.is_empty() && outbox.bytes == 0 && outbox.lost == 0);
    }

    #[test]
    fn it_keeps_no_more_than_so_much_and_nothing_for_the_dead() {
        let (mut from, to) = (claimed(), claimed());
        let mut outbox = Outbox::default();
        let bytes = vec![1; 60_000];
        let run = GroBurst {
            src: [127, 0, 0, 1].into(),
            src_port: 1,
            ip_id: 0,
            segment: 1000,
            marked: false,
            bytes: &bytes,
        };
        while outbox.hand_over(&mut from, SlotOwner::Slot(to.number()), &run) == Handover::Done {}
        assert!(outbox.bytes <= MAX_OF_OWNER && outbox.bytes > MAX_OF_OWNER - 60_000);
        let kept = outbox.letters.len() as u64;
        drop(to);
        outbox.retry_at = 0;
        outbox.retry(&mut from);
        assert!(outbox.is_empty());
        assert_eq!((outbox.bytes, outbox.lost), (0, kept * 60));
    }
}
