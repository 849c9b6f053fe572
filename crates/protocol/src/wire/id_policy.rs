//! Which IPv4 identifications are believed of a peer.
//!
//! The identification is under the ICRC but hidden from the receiver. Our own senders use small
//! ones (the index of the packet in its batch), so that all 32 bits of the ICRC check. Kernels and
//! hardware count through all 65536, and of their packets we must solve for it, which leaves 16
//! bits that check. So a peer is watched, and one that is known for small identifications is held
//! to them.

/// What the identification of a valid packet says about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IdVerdict {
    /// Small, as our own senders choose it.
    Ours,
    /// Shortly after the last one, by a peer that counts: good evidence.
    Near,
    /// Any other, by a peer that counts. Accept the packet, and count it.
    Solved,
    /// Not small, by a peer known for small ones: the packet was damaged and the solution is
    /// chance. Drop it.
    Refused,
}

impl IdVerdict {
    /// Whether the packet is to be taken.
    pub const fn is_accepted(self) -> bool {
        !matches!(self, Self::Refused)
    }
}

/// What is known about the identifications of one peer.
#[derive(Clone, Copy, Debug, Default)]
pub struct IdPolicy {
    habit: Habit,
    last: u16,
    /// Packets in a row that speak against the habit.
    contrary: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Habit {
    #[default]
    Unknown,
    Small,
    Counting,
}

impl IdPolicy {
    /// The largest identification our senders use: a batch has at most 64 packets.
    pub const MAX_SMALL: u16 = 63;
    /// How far ahead of the last identification one is still near: the peer also sends to others.
    pub const NEAR: u16 = 1024;
    /// So many refusals in a row and the peer is taken to count after all. A kernel's counter may
    /// have passed 0 when we met it; and a damaged packet has a solution only once in 65536 times,
    /// so that this many in a row do not come from damage.
    pub const REFUSALS: u8 = 4;
    /// So many small ones in a row and a peer that counted is taken to have been replaced by one of
    /// ours. More than a counter gives on its way past 0.
    pub const SMALL_RUN: u8 = 128;

    /// Classifies the identification of a packet with a matching ICRC, and records it.
    pub fn accept(&mut self, ip_id: u16) -> IdVerdict {
        let small = ip_id <= Self::MAX_SMALL;
        let verdict = match self.habit {
            _ if small => IdVerdict::Ours,
            Habit::Unknown => IdVerdict::Solved,
            Habit::Small => IdVerdict::Refused,
            Habit::Counting if (1..=Self::NEAR).contains(&ip_id.wrapping_sub(self.last)) => IdVerdict::Near,
            Habit::Counting => IdVerdict::Solved,
        };
        let (fits, other, limit) = match self.habit {
            // Every batch of our senders begins with 0; a kernel's counter may stand at another
            // small number when we meet it.
            Habit::Unknown => (small && ip_id != 0, if small { Habit::Small } else { Habit::Counting }, 1),
            Habit::Small => (small, Habit::Counting, Self::REFUSALS),
            Habit::Counting => (!small, Habit::Small, Self::SMALL_RUN),
        };
        self.contrary = if fits { 0 } else { self.contrary + 1 };
        if self.contrary >= limit {
            self.habit = other;
            self.contrary = 0;
        }
        if verdict.is_accepted() || self.habit == Habit::Counting {
            self.last = ip_id;
        }
        verdict
    }

    /// The best guess for the next packet, which is the `index`th of the batch it came in.
    pub fn guess(&self, index: u16) -> u16 {
        match self.habit {
            Habit::Counting => self.last.wrapping_add(1),
            Habit::Unknown | Habit::Small => index,
        }
    }

    /// Whether the peer counts, so that its packets are checked by fewer bits.
    pub fn is_solving(&self) -> bool {
        self.habit == Habit::Counting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fed(ids: impl IntoIterator<Item = u16>) -> IdPolicy {
        let mut policy = IdPolicy::default();
        for id in ids {
            policy.accept(id);
        }
        policy
    }

    #[test]
    fn a_peer_of_ours_is_held_to_small_ones() {
        let mut policy = fed([0, 1, 2, 0]);
        assert_eq!(policy.accept(63), IdVerdict::Ours);
        assert_eq!(policy.accept(64), IdVerdict::Refused);
        assert_eq!(policy.accept(40_000), IdVerdict::Refused);
        assert_eq!(policy.accept(5), IdVerdict::Ours);
        assert_eq!(policy.guess(7), 7);
        assert!(!policy.is_solving());
    }

    #[test]
    fn a_counting_peer_is_near_or_solved() {
        let mut policy = IdPolicy::default();
        assert_eq!(policy.accept(5000), IdVerdict::Solved);
        assert!(policy.is_solving());
        assert_eq!(policy.guess(3), 5001);
        assert_eq!(policy.accept(5001), IdVerdict::Near);
        assert_eq!(policy.accept(5001 + 1024), IdVerdict::Near);
        assert_eq!(policy.accept(6025 + 1025), IdVerdict::Solved);
        assert_eq!(policy.accept(7050), IdVerdict::Solved, "the same again is not ahead");
        assert_eq!(policy.accept(7049), IdVerdict::Solved);
    }

    /// Seen with Linux 6.1: four datagrams were lost when its counter, at 43 when we met it, came
    /// to 64.
    #[test]
    fn a_counter_that_stood_at_a_small_number_is_not_refused() {
        for start in 1..=IdPolicy::MAX_SMALL {
            let mut policy = IdPolicy::default();
            for id in start..200 {
                assert_ne!(policy.accept(id), IdVerdict::Refused, "{id}, counted from {start}");
            }
            assert!(policy.is_solving());
        }
    }

    #[test]
    fn a_peer_of_ours_whose_first_packets_were_lost_is_known_by_its_next_batch() {
        let mut policy = fed([2, 3, 0]);
        assert_eq!(policy.accept(64), IdVerdict::Refused);
    }

    #[test]
    fn a_counter_may_pass_zero() {
        let mut policy = IdPolicy::default();
        let mut id = 65_000_u16;
        for _ in 0..200_000 {
            assert_ne!(policy.accept(id), IdVerdict::Refused, "at {id}");
            id = id.wrapping_add(1);
        }
        assert!(policy.is_solving());
    }

    #[test]
    fn a_counter_met_at_zero_is_understood_after_a_few_refusals() {
        let mut policy = fed(0..64);
        let refused = (64..1000).filter(|id| policy.accept(*id) == IdVerdict::Refused).count();
        assert_eq!(refused, usize::from(IdPolicy::REFUSALS));
        assert_eq!(policy.accept(1000), IdVerdict::Near);
    }

    #[test]
    fn one_damaged_first_packet_does_not_weaken_the_check_for_good() {
        let mut policy = fed([31_337]);
        assert!(policy.is_solving());
        for _ in 0..IdPolicy::SMALL_RUN {
            assert_eq!(policy.accept(0), IdVerdict::Ours);
        }
        assert_eq!(policy.accept(31_337), IdVerdict::Refused);
    }
}
