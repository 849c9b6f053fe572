//! Counting packets once, however often they are sent.

use nobounce_protocol::wire::Psn;

/// The first sequence number that was never sent, of a stream in which some are sent again. `None`: nothing was sent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Once(Option<Psn>);

impl Once {
    /// Notes that `packets` left from `first` on; how many of them for the first time.
    ///
    /// Every packet of the stream must be told, with payload or without: numbers are compared across the wrap, so the next one must
    /// not be half of all numbers away.
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
            (0xff_fffc, 1, 0), // again
            (0xff_fffd, 2, 2),
            (0xff_fffd, 6, 4), // two of six again, over the wrap
            (0xff_fffe, 1, 0),
            (3, 0, 0),   // an answer that covers nothing
            (100, 1, 1), // after a READ, which takes many numbers
            (100, 0, 0),
            (200, 0, 0), // the stream goes on behind what others sent
            (199, 1, 0),
            (200, 1, 1),
        ];
        for (first, packets, new) in steps {
            assert_eq!(once.note(Psn::new(first), packets), new, "{packets} from {first:#x}");
        }
    }
}
