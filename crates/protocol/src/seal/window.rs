//! The replay window: which numbers of a flow have come.

/// Words of the bitmap. Packets of one flow overtake each other on parallel paths: 100 us at 100
/// Gb/s and path MTU 1024 are 1200 packets.
const WORDS: usize = 64;
const BITS: u64 = 64;

/// The numbers that came lately. Older ones count as seen.
#[derive(Clone, Debug)]
pub struct ReplayWindow {
    /// One more than the highest number so far.
    next: u64,
    words: Box<[u64; WORDS]>,
}

impl Default for ReplayWindow {
    fn default() -> Self {
        Self { next: 0, words: Box::new([0; WORDS]) }
    }
}

impl ReplayWindow {
    /// How far behind the highest a number may be.
    pub const LEN: u64 = (WORDS as u64 - 1) * BITS;

    fn word(number: u64) -> usize {
        usize::try_from(number / BITS % WORDS as u64).unwrap_or(0)
    }

    /// Whether that number has not come yet. It is marked once its packet has proven genuine.
    #[inline]
    pub fn is_new(&self, number: u64) -> bool {
        if number >= self.next {
            return number < u64::MAX;
        }
        self.next - number <= Self::LEN && self.words[Self::word(number)] & 1 << (number % BITS) == 0
    }

    /// Marks a new number.
    #[inline]
    pub fn mark(&mut self, number: u64) {
        if number >= self.next {
            let (last, new) = (self.next.saturating_sub(1) / BITS, number / BITS);
            for block in (last + 1..=new).take(WORDS) {
                self.words[Self::word(block * BITS)] = 0;
            }
            self.next = number.saturating_add(1);
        }
        self.words[Self::word(number)] |= 1 << (number % BITS);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::rng::Rng;

    /// Every number once, in any order within the window; never twice; nothing that is too old.
    #[test]
    fn it_agrees_with_a_set() {
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let (mut window, mut seen, mut highest) = (ReplayWindow::default(), BTreeSet::new(), 0_u64);
            for _ in 0..2000 {
                let near = highest.saturating_sub(rng.below(2 * ReplayWindow::LEN));
                let ahead = if rng.chance(20_000) { 20_000 } else { 200 };
                let number = if rng.chance(500_000) { near } else { highest + rng.below(ahead) };
                let old = !seen.is_empty() && number + ReplayWindow::LEN <= highest;
                let new = !old && !seen.contains(&number);
                assert_eq!(window.is_new(number), new, "{number} after {highest}, seed {seed}");
                if new {
                    window.mark(number);
                    seen.insert(number);
                    highest = highest.max(number);
                }
            }
        }
    }

    #[test]
    fn the_last_number_is_refused_so_that_none_follows() {
        let mut window = ReplayWindow::default();
        assert!(!window.is_new(u64::MAX));
        window.mark(u64::MAX - 1);
        assert!(!window.is_new(u64::MAX - 1) && !window.is_new(0) && window.is_new(u64::MAX - 2));
    }
}
