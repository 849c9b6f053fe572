//! The event queue: a calendar queue with a heap for the far future.
//!
//! Time is divided into buckets. A ring of them holds the near future, unsorted; a bucket is sorted
//! when its time has come. Events beyond the ring wait in a heap. Events of one time leave in the
//! order in which they were pushed, so a run depends on nothing but its seed.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::units::Picos;

/// A bucket spans 4.1 ns.
const BUCKET_BITS: u32 = 12;
/// The ring spans 33.6 us: deliveries are nearer than that, most timers are not.
const BUCKETS: u64 = 1 << 13;

#[derive(Clone, Copy, Debug)]
struct Entry<E> {
    at: Picos,
    order: u64,
    event: E,
}

impl<E> Entry<E> {
    const fn bucket(&self) -> u64 {
        self.at >> BUCKET_BITS
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// Events by time, and by order of insertion within one time.
#[derive(Debug)]
pub(crate) struct EventQueue<E> {
    /// The bucket in progress, latest first.
    current: Vec<Entry<E>>,
    bucket: u64,
    ring: Vec<Vec<Entry<E>>>,
    /// One bit for each bucket of the ring that is not empty.
    occupied: Vec<u64>,
    far: BinaryHeap<Reverse<Entry<E>>>,
    pushed: u64,
}

impl<E: Copy> EventQueue<E> {
    pub(crate) fn new() -> Self {
        Self {
            current: Vec::new(),
            bucket: 0,
            ring: (0..BUCKETS).map(|_| Vec::new()).collect(),
            occupied: vec![0; slot(BUCKETS) / 64],
            far: BinaryHeap::new(),
            pushed: 0,
        }
    }

    /// Adds an event. One in the past happens next.
    pub(crate) fn push(&mut self, at: Picos, event: E) {
        let entry = Entry { at, order: self.pushed, event };
        self.pushed += 1;
        self.place(entry);
    }

    fn place(&mut self, entry: Entry<E>) {
        let bucket = entry.bucket();
        if bucket <= self.bucket {
            let at = self.current.partition_point(|other| *other > entry);
            self.current.insert(at, entry);
        } else if bucket < self.bucket + BUCKETS {
            let slot = slot(bucket % BUCKETS);
            self.ring[slot].push(entry);
            self.occupied[slot / 64] |= 1 << (slot % 64);
        } else {
            self.far.push(Reverse(entry));
        }
    }

    /// The next event and its time.
    pub(crate) fn pop(&mut self) -> Option<(Picos, E)> {
        loop {
            if let Some(entry) = self.current.pop() {
                return Some((entry.at, entry.event));
            }
            self.advance()?;
        }
    }

    /// Opens the next bucket that is not empty.
    fn advance(&mut self) -> Option<()> {
        let near = self.next_occupied();
        // What waits in the heap lies behind the whole ring.
        self.bucket = match near {
            Some(bucket) => bucket,
            None => self.far.peek()?.0.bucket(),
        };
        let slot = slot(self.bucket % BUCKETS);
        if near.is_some() {
            std::mem::swap(&mut self.current, &mut self.ring[slot]);
            self.occupied[slot / 64] &= !(1 << (slot % 64));
            self.current.sort_unstable_by(|a, b| b.cmp(a));
        }
        while self.far.peek().is_some_and(|Reverse(entry)| entry.bucket() < self.bucket + BUCKETS) {
            if let Some(Reverse(entry)) = self.far.pop() {
                self.place(entry);
            }
        }
        Some(())
    }

    fn next_occupied(&self) -> Option<u64> {
        let start = slot(self.bucket % BUCKETS);
        let words = self.occupied.len();
        for step in 0..=words {
            let word = (start / 64 + step) % words;
            let mut bits = self.occupied[word];
            if step == 0 {
                bits &= !0 << (start % 64);
            } else if step == words {
                bits &= !(!0 << (start % 64));
            }
            if bits != 0 {
                let found = word as u64 * 64 + u64::from(bits.trailing_zeros());
                return Some(self.bucket + (found + BUCKETS - start as u64) % BUCKETS);
            }
        }
        None
    }
}

#[allow(clippy::cast_possible_truncation, reason = "below the length of the ring")]
const fn slot(bucket: u64) -> usize {
    bucket as usize
}

#[cfg(test)]
mod tests {
    use nobounce_protocol::rng::Rng;

    use super::*;

    #[test]
    fn events_leave_by_time_and_by_insertion() {
        let mut rng = Rng::new(3);
        let mut queue = EventQueue::new();
        let mut expected = Vec::new();
        let mut now = 0;
        for number in 0..20_000_u32 {
            // Same times, near ones, and some beyond the ring.
            let ahead = match rng.below(4) {
                0 => 0,
                1 => rng.below(5_000),
                2 => rng.below(30_000_000),
                _ => rng.below(500_000_000),
            };
            queue.push(now + ahead, number);
            expected.push((now + ahead, number));
            if rng.below(3) == 0 {
                let first = expected.iter().copied().min().unwrap();
                expected.retain(|one| *one != first);
                assert_eq!(queue.pop(), Some(first));
                now = first.0;
            }
        }
        expected.sort_unstable();
        for one in expected {
            assert_eq!(queue.pop(), Some(one));
        }
        assert_eq!(queue.pop(), None);
    }
}
