//! What was sent lately and may still lie in the receiver's socket buffer.
//!
//! Nobody acknowledges the packets of unreliable services, so nobody says when they have left the receiver's buffer,
//! which holds a few hundred KiB. A sender that went as fast as it can would overflow it with every long message. So
//! packets count as lying there, and all senders to one socket share the room in it.
//!
//! A receiver on the same machine is one of ours, and is asked: now and then a *marker* is sent behind the packets, and
//! comes back when the receiver has come to it. Until then they count. One that does not come back is sent again; after
//! a while without any the receiver counts as deaf. Packets to the deaf, and to other machines, count for a fixed time.

use std::collections::VecDeque;

use crate::timing::{MICROSECOND, MILLISECOND, Nanos, SECOND};

/// How long a packet counts as lying in the buffer of a receiver that cannot be asked. One that is awake empties a
/// buffer that is full in about 100 us; with the 208 KiB of a path this lets 0.7 GB/s through.
pub(crate) const LINGER: Nanos = 300 * MICROSECOND;
/// Packets sent within this time are counted together.
const GRAIN: Nanos = LINGER / 8;
/// Bytes behind which a marker is sent.
const MARK_EVERY: u64 = 48 << 10;
/// When a marker is sent again for the first time; twice as long each time after.
const MARK_AGAIN: Nanos = MILLISECOND;
/// How long a receiver that has answered is waited for. One that is merely not scheduled comes back sooner.
const PATIENCE: Nanos = SECOND;
/// How long one is waited for that never has.
const FIRST_PATIENCE: Nanos = 200 * MILLISECOND;

#[derive(Clone, Copy, Debug)]
struct Part {
    sent: Nanos,
    gone: Nanos,
    bytes: u64,
    /// The first marker behind it.
    marker: u32,
}

/// What is known of the receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Receiver {
    #[default]
    Unknown,
    Answers,
    Deaf,
}

#[derive(Debug, Default)]
pub(crate) struct Linger {
    sum: u64,
    parts: VecDeque<Part>,
    /// The receiver can be asked.
    near: bool,
    receiver: Receiver,
    /// The number of the last marker.
    marker: u32,
    /// Bytes since then.
    unmarked: u64,
    /// When to send one behind those, though they are few: others may wait for the room they take.
    mark_at: Option<Nanos>,
    /// When to send another one if the last does not come back.
    again: Option<Nanos>,
    repeats: u32,
}

impl Linger {
    /// Bytes that may still be there.
    pub(crate) const fn bytes(&self) -> u64 {
        self.sum
    }

    /// Whether the receiver of what is sent from now on can be asked.
    pub(crate) fn set_near(&mut self, near: bool) {
        if near && !self.near {
            self.near = true;
            // The packet that showed where things go was counted before.
            let patience = self.patience();
            self.parts.iter_mut().for_each(|part| part.gone = part.sent + patience);
        }
        self.near = near;
    }

    /// So many bytes leave now.
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
                let gone = now + self.patience();
                self.parts.push_back(Part { sent: now, gone, bytes, marker });
            }
        }
    }

    fn patience(&self) -> Nanos {
        match self.receiver {
            _ if !self.near => LINGER,
            Receiver::Unknown => FIRST_PATIENCE,
            Receiver::Answers => PATIENCE,
            Receiver::Deaf => LINGER,
        }
    }

    /// The number of a marker that is to be sent now, behind everything else. `waits`: there is more to send, but no room.
    pub(crate) fn poll_marker(&mut self, now: Nanos, waits: bool) -> Option<u32> {
        let is_due = |at: Option<Nanos>| at.is_some_and(|at| at <= now);
        let new = self.unmarked >= MARK_EVERY || (waits && self.unmarked > 0) || is_due(self.mark_at);
        if !self.near || self.parts.is_empty() || !(new || is_due(self.again)) {
            return None;
        }
        self.repeats = if new { 0 } else { self.repeats + 1 };
        self.mark_at = None;
        self.again = Some(now + (MARK_AGAIN << self.repeats.min(10)));
        self.unmarked = 0;
        self.marker = self.marker.wrapping_add(1);
        Some(self.marker)
    }

    /// A marker came back: what was sent before it is gone.
    pub(crate) fn handle_marker(&mut self, number: u32) {
        let behind = |other: u32| number.wrapping_sub(other) < 1 << 31;
        if !behind(self.marker.wrapping_sub(1 << 16)) || (number != self.marker && behind(self.marker)) {
            return; // we sent none like it
        }
        self.receiver = Receiver::Answers;
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

    /// Time has passed.
    pub(crate) fn expire(&mut self, now: Nanos) {
        while let Some(first) = self.parts.front()
            && first.gone <= now
        {
            // It was waited for, and no marker behind it came back.
            let waited = first.gone - first.sent > LINGER;
            if self.near && waited && first.marker != self.marker.wrapping_add(1) {
                self.receiver = Receiver::Deaf;
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

    /// When time changes something: the next bytes are gone, or a marker is to be sent again.
    pub(crate) fn next(&self) -> Option<Nanos> {
        let first = self.parts.front()?.gone;
        let marks = if self.near { [self.again, self.mark_at] } else { [None; 2] };
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
            assert_eq!(linger.poll_marker(now * 100, true), None, "nobody to ask");
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
        linger.set_near(true);
        let marker = linger.poll_marker(1, false).unwrap();
        linger.expire(FIRST_PATIENCE - 1);
        assert_eq!((linger.bytes(), linger.receiver), (MARK_EVERY, Receiver::Unknown));
        linger.handle_marker(marker);
        assert_eq!((linger.bytes(), linger.receiver), (0, Receiver::Answers));
    }

    fn near() -> Linger {
        Linger { near: true, ..Linger::default() }
    }

    #[test]
    fn bytes_are_gone_when_a_marker_behind_them_comes_back() {
        let mut linger = near();
        linger.add(0, MARK_EVERY - 1);
        assert_eq!(linger.poll_marker(0, false), None, "little is not asked for");
        linger.add(1, 1);
        let first = linger.poll_marker(1, false).unwrap();
        linger.add(2, 70);
        assert_eq!(linger.poll_marker(2, false), None);
        let second = linger.poll_marker(2, true).unwrap();
        linger.add(3, 8);
        assert_eq!(linger.next(), Some(3 + LINGER), "few are asked for when time has passed");
        linger.expire(FIRST_PATIENCE - 1);
        assert_eq!(linger.bytes(), MARK_EVERY + 78);
        linger.handle_marker(second.wrapping_add(1));
        linger.handle_marker(first.wrapping_sub(1 << 20));
        assert_eq!(linger.bytes(), MARK_EVERY + 78, "markers that nobody sent");
        linger.handle_marker(first);
        assert_eq!(linger.bytes(), 78);
        linger.handle_marker(second);
        assert_eq!(linger.bytes(), 8);
        linger.handle_marker(second);
        assert_eq!(linger.bytes(), 8);
    }

    #[test]
    fn a_marker_that_is_lost_is_sent_again() {
        let mut linger = near();
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
        let mut linger = near();
        let mut markers = 0;
        linger.add(0, MARK_EVERY);
        let mut now = 0;
        while linger.bytes() > 0 {
            markers += u32::from(linger.poll_marker(now, false).is_some());
            now = linger.next().unwrap();
            linger.expire(now);
        }
        assert_eq!(now, FIRST_PATIENCE);
        assert!((5..12).contains(&markers), "{markers}");
        linger.add(now, MARK_EVERY);
        assert!(linger.poll_marker(now, false).is_some(), "it is still asked");
        linger.expire(now + LINGER);
        assert_eq!(linger.bytes(), 0);
        linger.handle_marker(linger.marker);
        linger.add(now, 1);
        linger.expire(now + PATIENCE - 1);
        assert_eq!(linger.bytes(), 1, "it was heard at last");
    }
}
