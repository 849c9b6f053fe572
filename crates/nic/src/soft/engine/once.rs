//! Counts packets once, however often they are retransmitted.

use nobounce_protocol::wire::Psn;

/// The first PSN that was never sent, of a stream with retransmissions. `None`: nothing was sent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Once(Option<Psn>);

impl Once {
    /// Records that `packets` left from `first` on; returns how many of them for the first time.
    ///
    /// Every packet of the stream must be recorded, with payload or without. PSNs are compared
    /// across the wrap, so the next one must not be half the PSN space away.
    #[inline]
    pub(crate) fn note(&mut self, first: Psn, packets: u32) -> u32 {
        let end = Psn::new(first.get() + packets);
        let ahead = self.0.map_or(packets, |next| Psn::new(end.get().wrapping_sub(next.get())).get());
        if self.0.is_some() && (ahead == 0 || u64::from(ahead) >= Psn::SPACE / 2) {
            return 0;
        }
        self.0 = Some(end);
        ahead.min(packets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_new_counts_also_across_the_wrap() {
        let mut once = Once::default();
        let steps = [
            (0xff_fffc, 1, 1), // the first ever
            (0xff_fffc, 1, 0), // retransmitted
            (0xff_fffd, 2, 2),
            (0xff_fffd, 6, 4), // two of six retransmitted, over the wrap
            (0xff_fffe, 1, 0),
            (3, 0, 0),   // an ACK that covers nothing
            (100, 1, 1), // after a READ, which takes many PSNs
            (100, 0, 0),
            (200, 0, 0), // the stream continues after other packets
            (199, 1, 0),
            (200, 1, 1),
        ];
        for (first, packets, new) in steps {
            assert_eq!(once.note(Psn::new(first), packets), new, "{packets} from {first:#x}");
        }
    }
}
