//! A small seeded random number generator: the same seed gives the same run, on every machine.

/// SplitMix64: one 64-bit counter, mixed. Good enough to lose packets by, not for anything secret.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator that will say the same things for the same seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    #[allow(clippy::should_implement_trait)] // an endless iterator would be no easier to use
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 if `n` is 0. The bias of the remainder does not matter here.
    pub const fn below(&mut self, n: u64) -> u64 {
        if n == 0 { 0 } else { self.next() % n }
    }

    /// True `ppm` times in a million. No draw is made when the answer is certain, so that switching
    /// a fault off leaves the others where they were.
    pub const fn chance(&mut self, ppm: u32) -> bool {
        match ppm {
            0 => false,
            1_000_000.. => true,
            _ => self.below(1_000_000) < ppm as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_says_the_same_and_chances_are_what_they_say() {
        let (mut a, mut b) = (Rng::new(7), Rng::new(7));
        assert!((0..100).all(|_| a.next() == b.next()));
        let hits = (0..100_000).filter(|_| a.chance(10_000)).count();
        assert!((900..1100).contains(&hits), "1 % of 100000 is {hits}");
        assert!(!a.chance(0) && a.chance(1_000_000) && a.below(0) == 0);
    }
}
