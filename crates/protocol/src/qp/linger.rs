//! What was sent lately and may still lie in the receiver's socket buffer.
//!
//! Nobody acknowledges the packets of unreliable services, so nobody says when they have left the receiver's buffer,
//! which holds a few hundred KiB. A sender that went as fast as it can would overflow it with every long message. So
//! each packet counts as lying there for a while after it was sent, and all senders to one socket share the room in it:
//! whatever their number, no more than that room is sent in that while. A receiver that is away for longer loses
//! packets, as the service allows.

use std::collections::VecDeque;

use crate::timing::{MICROSECOND, Nanos};

/// How long a packet counts as lying in the receiver's buffer. A receiver that is awake empties one that is full in
/// about 100 us; with the 340 KiB of a path this lets 1.1 GB/s through.
pub(crate) const LINGER: Nanos = 300 * MICROSECOND;
/// Packets sent within this time are counted together.
const GRAIN: Nanos = LINGER / 8;

#[derive(Debug, Default)]
pub(crate) struct Linger {
    sum: u64,
    /// When they are gone, and how many bytes.
    parts: VecDeque<(Nanos, u64)>,
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
            Some((gone, part)) if now + LINGER < *gone + GRAIN => *part += bytes,
            _ => self.parts.push_back((now + LINGER, bytes)),
        }
    }

    /// Time has passed.
    pub(crate) fn expire(&mut self, now: Nanos) {
        while let Some(&(gone, bytes)) = self.parts.front()
            && gone <= now
        {
            self.sum -= bytes;
            self.parts.pop_front();
        }
    }

    /// When the next bytes are gone.
    pub(crate) fn next(&self) -> Option<Nanos> {
        self.parts.front().map(|&(gone, _)| gone)
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
}
