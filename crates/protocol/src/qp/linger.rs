//! What was sent lately and may still lie in the receiver's socket buffer.
//!
//! Nobody acknowledges the packets of unreliable services, so nobody says when they have left the receiver's buffer,
//! which holds a few hundred KiB. A sender that went as fast as it can would overflow it with every long message. So
//! each packet counts as lying there for a while after it was sent, and all senders to one socket share the room in it:
//! whatever their number, no more than that room is sent in that while. Where the caller can see that the receiver is
//! behind, it takes longer. A receiver that is away for longer still loses packets, as the service allows.

use std::collections::VecDeque;

use crate::timing::{MICROSECOND, MILLISECOND, Nanos};

/// How long a packet counts as lying in the receiver's buffer. A receiver that is awake empties one that is full in
/// about 100 us; with the 340 KiB of a path this lets 1.1 GB/s through.
pub(crate) const LINGER: Nanos = 300 * MICROSECOND;
/// When to look again after a receiver that is behind.
const LOOK_AGAIN: Nanos = 100 * MICROSECOND;
/// How long a receiver that is behind is waited for. One that is merely not scheduled comes back sooner.
const PATIENCE: Nanos = 50 * MILLISECOND;
/// Packets sent within this time are counted together.
const GRAIN: Nanos = LINGER / 8;

#[derive(Clone, Copy, Debug)]
struct Part {
    sent: Nanos,
    gone: Nanos,
    bytes: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Linger {
    sum: u64,
    parts: VecDeque<Part>,
}

impl Linger {
    /// Bytes that may still be there.
    pub(crate) const fn bytes(&self) -> u64 {
        self.sum
    }

    /// So many bytes leave now.
    pub(crate) fn add(&mut self, now: Nanos, bytes: u64) {
        self.sum += bytes;
        match self.parts.back_mut() {
            Some(last) if now < last.sent + GRAIN => last.bytes += bytes,
            _ => self.parts.push_back(Part { sent: now, gone: now + LINGER, bytes }),
        }
    }

    /// Time has passed.
    pub(crate) fn expire(&mut self, now: Nanos) {
        while let Some(first) = self.parts.front()
            && first.gone <= now
        {
            self.sum -= first.bytes;
            self.parts.pop_front();
        }
    }

    /// Time has passed, but what was sent is still there.
    pub(crate) fn delay(&mut self, now: Nanos) {
        for part in self.parts.iter_mut().filter(|part| part.gone <= now && now < part.sent + PATIENCE) {
            part.gone = now + LOOK_AGAIN;
        }
        self.expire(now);
    }

    /// When the next bytes are gone.
    pub(crate) fn next(&self) -> Option<Nanos> {
        self.parts.front().map(|first| first.gone)
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
        }
        let kept = LINGER / 100;
        assert!((kept * 8 / 10..=kept * 12 / 10).contains(&linger.bytes()), "{}", linger.bytes());
        let last = 10 * LINGER;
        assert!(linger.next().is_some_and(|at| at <= last + LINGER));
        linger.expire(last + LINGER);
        assert_eq!((linger.bytes(), linger.next()), (0, None));
    }

    #[test]
    fn a_receiver_that_is_behind_is_waited_for_but_not_without_end() {
        let mut linger = Linger::default();
        linger.add(0, 7);
        let mut looks = 0;
        while let Some(at) = linger.next() {
            assert_eq!(linger.bytes(), 7);
            linger.delay(at);
            looks += 1;
        }
        assert_eq!(linger.bytes(), 0);
        assert_eq!(looks, 1 + (PATIENCE - LINGER).div_ceil(LOOK_AGAIN));
    }
}
