//! Packets sent recently that may still occupy the receiver's socket buffer.
//!
//! Unreliable services have no acknowledgements, so the sender cannot know when packets have left
//! the receiver's socket buffer. That buffer holds a few hundred KiB. A sender at full speed would
//! overflow it with every long message. So packets count as queued there, and all senders to one
//! socket share its room.
//!
//! A receiver on the same host runs nobounce and can be queried. Now and then a *marker* follows
//! the packets, and the receiver echoes it. Until then the packets count. A lost marker is sent
//! again. After a while without any echo the receiver counts as deaf. Packets to deaf receivers,
//! and to other hosts, count for a fixed time.

use std::collections::VecDeque;

use crate::timing::{MICROSECOND, MILLISECOND, Nanos, SECOND};

/// How long a packet counts against the buffer of a receiver that cannot be queried. A running
/// receiver empties a full buffer in about 100 us. With 208 KiB per path this allows 0.7 GB/s.
pub(crate) const LINGER: Nanos = 300 * MICROSECOND;
/// Packets sent within this time share one entry.
const GRAIN: Nanos = LINGER / 8;
/// Bytes between two markers.
const MARK_EVERY: u64 = 48 << 10;
/// Delay before a marker is first sent again; exponential backoff doubles it.
const MARK_AGAIN: Nanos = MILLISECOND;
/// Timeout for a receiver that has answered before. One that is merely descheduled answers sooner.
const LINGER_TIMEOUT: Nanos = SECOND;
/// Timeout for a receiver that has never answered.
const FIRST_LINGER_TIMEOUT: Nanos = 200 * MILLISECOND;

#[derive(Clone, Copy, Debug)]
struct Part {
    sent: Nanos,
    gone: Nanos,
    bytes: u64,
    /// The first marker behind it.
    marker: u32,
}

/// What is known about the receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ReceiverStatus {
    #[default]
    Unknown,
    Answers,
    Deaf,
}

#[derive(Debug, Default)]
pub(crate) struct Linger {
    sum: u64,
    parts: VecDeque<Part>,
    /// The receiver answers markers.
    same_host: bool,
    receiver: ReceiverStatus,
    /// Number of the last marker.
    marker: u32,
    /// Bytes since the last marker.
    unmarked: u64,
    /// When to send a marker behind those few bytes: other senders may wait for their room.
    mark_at: Option<Nanos>,
    /// When to send another marker if the last one is not echoed.
    again: Option<Nanos>,
    repeats: u32,
}

impl Linger {
    /// Bytes that may still be in the buffer.
    pub(crate) const fn bytes(&self) -> u64 {
        self.sum
    }

    /// Whether the receiver of later packets answers markers.
    pub(crate) fn set_same_host(&mut self, same_host: bool) {
        if same_host && !self.same_host {
            self.same_host = true;
            // The packet that revealed the receiver was counted before.
            let timeout = self.timeout();
            self.parts.iter_mut().for_each(|part| part.gone = part.sent + timeout);
        }
        self.same_host = same_host;
    }

    /// Accounts for bytes that leave now.
    pub(crate) fn add(&mut self, now: Nanos, bytes: u64) {
        self.sum += bytes;
        if self.unmarked == 0 {
            self.mark_at = Some(now + LINGER);
        }
        self.unmarked += bytes;
        let marker = self.marker.wrapping_add(1);
        match self.parts.back_mut() {
            Some(last) if now < last.sent + GRAIN && last.marker == marker => last.bytes += bytes,
            _ => {
                let gone = now + self.timeout();
                self.parts.push_back(Part { sent: now, gone, bytes, marker });
            }
        }
    }

    fn timeout(&self) -> Nanos {
        match self.receiver {
            _ if !self.same_host => LINGER,
            ReceiverStatus::Unknown => FIRST_LINGER_TIMEOUT,
            ReceiverStatus::Answers => LINGER_TIMEOUT,
            ReceiverStatus::Deaf => LINGER,
        }
    }

    /// The marker to send now, behind everything else. `waits`: more data is queued, but there is
    /// no room.
    pub(crate) fn poll_marker(&mut self, now: Nanos, waits: bool) -> Option<u32> {
        let is_due = |at: Option<Nanos>| at.is_some_and(|at| at <= now);
        let new = self.unmarked >= MARK_EVERY || (waits && self.unmarked > 0) || is_due(self.mark_at);
        if !self.same_host || self.parts.is_empty() || !(new || is_due(self.again)) {
            return None;
        }
        self.repeats = if new { 0 } else { self.repeats + 1 };
        self.mark_at = None;
        self.again = Some(now + (MARK_AGAIN << self.repeats.min(10)));
        self.unmarked = 0;
        self.marker = self.marker.wrapping_add(1);
        Some(self.marker)
    }

    /// A marker came back: the receiver has taken everything sent before it.
    pub(crate) fn handle_marker(&mut self, number: u32) {
        let behind = |other: u32| number.wrapping_sub(other) < 1 << 31;
        if !behind(self.marker.wrapping_sub(1 << 16)) || (number != self.marker && behind(self.marker)) {
            return; // we sent none like it
        }
        self.receiver = ReceiverStatus::Answers;
        self.repeats = 0;
        if number == self.marker {
            self.again = None;
        }
        while let Some(first) = self.parts.front()
            && behind(first.marker)
        {
            self.sum -= first.bytes;
            self.parts.pop_front();
        }
    }

    /// Drops entries whose time has passed.
    pub(crate) fn expire(&mut self, now: Nanos) {
        while let Some(first) = self.parts.front()
            && first.gone <= now
        {
            // A marker was expected, and none behind it came back.
            let waited = first.gone - first.sent > LINGER;
            if self.same_host && waited && first.marker != self.marker.wrapping_add(1) {
                self.receiver = ReceiverStatus::Deaf;
                self.parts.iter_mut().for_each(|part| part.gone = part.gone.min(now + LINGER));
            }
            if let Some(first) = self.parts.pop_front() {
                self.sum -= first.bytes;
            }
        }
        if self.parts.is_empty() {
            (self.again, self.mark_at) = (None, None);
            self.unmarked = 0;
        }
    }

    /// The next deadline: bytes expire, or a marker must be sent again.
    pub(crate) fn next(&self) -> Option<Nanos> {
        let first = self.parts.front()?.gone;
        let marks = if self.same_host { [self.again, self.mark_at] } else { [None; 2] };
        marks.into_iter().flatten().chain([first]).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_gone_after_a_while_and_few_parts_are_kept() {
        let mut linger = Linger::default();
        for now in 0..10 * LINGER / 100 {
            linger.expire(now * 100);
            linger.add(now * 100, 1);
            assert!(linger.parts.len() <= 10);
            assert_eq!(linger.poll_marker(now * 100, true), None, "no receiver to ask");
        }
        let kept = LINGER / 100;
        assert!((kept * 8 / 10..=kept * 12 / 10).contains(&linger.bytes()), "{}", linger.bytes());
        let last = 10 * LINGER;
        assert!(linger.next().is_some_and(|at| at <= last + LINGER));
        linger.expire(last + LINGER);
        assert_eq!((linger.bytes(), linger.next()), (0, None));
    }

    #[test]
    fn regression_the_first_packet_counts_until_a_marker_comes_back() {
        let mut linger = Linger::default();
        linger.add(0, MARK_EVERY);
        linger.set_same_host(true);
        let marker = linger.poll_marker(1, false).unwrap();
        linger.expire(FIRST_LINGER_TIMEOUT - 1);
        assert_eq!((linger.bytes(), linger.receiver), (MARK_EVERY, ReceiverStatus::Unknown));
        linger.handle_marker(marker);
        assert_eq!((linger.bytes(), linger.receiver), (0, ReceiverStatus::Answers));
    }

    fn same_host() -> Linger {
        Linger { same_host: true, ..Linger::default() }
    }

    #[test]
    fn bytes_are_gone_when_a_marker_behind_them_comes_back() {
        let mut linger = same_host();
        linger.add(0, MARK_EVERY - 1);
        assert_eq!(linger.poll_marker(0, false), None, "little is not asked for");
        linger.add(1, 1);
        let first = linger.poll_marker(1, false).unwrap();
        linger.add(2, 70);
        assert_eq!(linger.poll_marker(2, false), None);
        let second = linger.poll_marker(2, true).unwrap();
        linger.add(3, 8);
        assert_eq!(linger.next(), Some(3 + LINGER), "few are asked for when time has passed");
        linger.expire(FIRST_LINGER_TIMEOUT - 1);
        assert_eq!(linger.bytes(), MARK_EVERY + 78);
        linger.handle_marker(second.wrapping_add(1));
        linger.handle_marker(first.wrapping_sub(1 << 20));
        assert_eq!(linger.bytes(), MARK_EVERY + 78, "markers that were never sent");
        linger.handle_marker(first);
        assert_eq!(linger.bytes(), 78);
        linger.handle_marker(second);
        assert_eq!(linger.bytes(), 8);
        linger.handle_marker(second);
        assert_eq!(linger.bytes(), 8);
    }

    #[test]
    fn a_marker_that_is_lost_is_sent_again() {
        let mut linger = same_host();
        linger.add(0, MARK_EVERY);
        let lost = linger.poll_marker(0, false).unwrap();
        assert_eq!(linger.next(), Some(MARK_AGAIN));
        linger.expire(MARK_AGAIN);
        let again = linger.poll_marker(MARK_AGAIN, false).unwrap();
        assert_eq!(linger.next(), Some(3 * MARK_AGAIN), "twice as long");
        linger.handle_marker(again);
        assert_eq!((linger.bytes(), linger.next()), (0, None));
        linger.handle_marker(lost);
    }

    #[test]
    fn a_receiver_that_never_answers_is_waited_for_once() {
        let mut linger = same_host();
        let mut markers = 0;
        linger.add(0, MARK_EVERY);
        let mut now = 0;
        while linger.bytes() > 0 {
            markers += u32::from(linger.poll_marker(now, false).is_some());
            now = linger.next().unwrap();
            linger.expire(now);
        }
        assert_eq!(now, FIRST_LINGER_TIMEOUT);
        assert!((5..12).contains(&markers), "{markers}");
        linger.add(now, MARK_EVERY);
        assert!(linger.poll_marker(now, false).is_some(), "it is still asked");
        linger.expire(now + LINGER);
        assert_eq!(linger.bytes(), 0);
        linger.handle_marker(linger.marker);
        linger.add(now, 1);
        linger.expire(now + LINGER_TIMEOUT - 1);
        assert_eq!(linger.bytes(), 1, "it was heard at last");
    }
}
