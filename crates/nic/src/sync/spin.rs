//! How long a waiting thread spins before it sleeps.

use nobounce_protocol::timing::Nanos;

/// Spin time of a polling caller, or of the engine thread in its place, after the last packet or
/// post. It is about one round trip between two processes. A shorter spin misses the reply on an
/// idle machine. A longer one costs its own length where the peer shares the CPU
/// (docs/measurements/README.md).
pub(crate) const CALLER_SPIN_NS: u64 = 10_000;

/// The same for the engine thread of `thread` mode: about one iteration of a program that waits for
/// its GPU in between. On 16 CPUs NCCL's all-reduce of 8 B takes 15 us with it and 57 us with 10 us
/// (docs/measurements/README.md).
pub(crate) const THREAD_SPIN_NS: u64 = 50_000;

/// Maximum backoff: waits without a spin after fruitless ones. Where the peer shares the CPU, a
/// spin only keeps it from running.
const MOST_SKIPPED: u32 = 32;

/// Length factor of the spin that ends a backoff and tests whether spinning pays again.
const PROBE: Nanos = 4;

/// The longest spin of a caller.
pub(crate) const MAX_CALLER_SPIN_NS: Nanos = PROBE * CALLER_SPIN_NS;

/// Adaptive spin with backoff: decides before each wait how long to spin. After a fruitless spin
/// the next wait skips it, then the next two, and so on; a successful spin resets the backoff.
#[derive(Debug)]
pub(crate) struct AdaptiveSpin {
    usual: Nanos,
    adapts: bool,
    /// Waits left without a spin.
    skip: u32,
    /// Waits to skip after the next fruitless spin.
    backoff: u32,
    /// The current wait: its start and its spin time.
    wait: Option<(Nanos, Nanos)>,
}

impl AdaptiveSpin {
    /// Spins for this long, with backoff after fruitless spins.
    pub(crate) fn adaptive(usual: Nanos) -> Self {
        Self { usual, adapts: true, skip: 0, backoff: 0, wait: None }
    }

    /// Spins for this long each time.
    pub(crate) fn fixed(usual: Nanos) -> Self {
        Self { adapts: false, ..Self::adaptive(usual) }
    }

    /// Something came: the wait is over.
    #[inline]
    pub(crate) fn found(&mut self) {
        if let Some((_, spin)) = self.wait.take()
            && spin > 0
        {
            self.backoff = 0;
        }
    }

    /// Nothing has come, at `now`: whether to sleep.
    #[inline]
    pub(crate) fn is_over(&mut self, now: Nanos) -> bool {
        let wait = self.wait.unwrap_or_else(|| (now, self.next()));
        self.wait = Some(wait);
        let (since, spin) = wait;
        now.saturating_sub(since) >= spin
    }

    /// The thread sleeps.
    pub(crate) fn slept(&mut self) {
        if let Some((_, spin)) = self.wait.take()
            && spin > 0
            && self.adapts
        {
            self.skip = self.backoff;
            self.backoff = (self.backoff * 2).clamp(1, MOST_SKIPPED);
        }
    }

    /// How long the wait that begins spins.
    fn next(&mut self) -> Nanos {
        if self.skip > 0 {
            self.skip -= 1;
            return 0;
        }
        // A sleeping peer takes longer to reply.
        if self.backoff > 0 { PROBE * self.usual } else { self.usual }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: Nanos = 10;

    /// Waits in vain; how long it spun.
    fn in_vain(spin: &mut AdaptiveSpin, at: Nanos) -> Nanos {
        let length = (0..).find(|passed| spin.is_over(at + passed)).unwrap();
        spin.slept();
        length
    }

    #[test]
    fn fruitless_spins_become_rare() {
        let mut spin = AdaptiveSpin::adaptive(USUAL);
        let spins: Vec<Nanos> = (0..100).map(|at| in_vain(&mut spin, at * 100)).collect();
        assert_eq!(&spins[..8], [10, 40, 0, 40, 0, 0, 40, 0]);
        assert!(spins[40..].iter().filter(|length| **length > 0).count() <= 3, "{spins:?}");
    }

    #[test]
    fn a_spin_that_finds_something_is_worth_the_next() {
        let mut spin = AdaptiveSpin::adaptive(USUAL);
        (0..10).for_each(|at| _ = in_vain(&mut spin, at * 100));
        let waits = (10..).find(|at| {
            let spins = !spin.is_over(at * 100);
            if spins {
                spin.found();
            } else {
                spin.slept();
            }
            spins
        });
        assert!(waits.is_some());
        assert_eq!(in_vain(&mut spin, 10_000), USUAL, "the next one spins as usual");
    }

    #[test]
    fn what_comes_without_a_spin_says_nothing() {
        let mut spin = AdaptiveSpin::adaptive(USUAL);
        in_vain(&mut spin, 0);
        in_vain(&mut spin, 100);
        assert!(spin.is_over(200));
        spin.found();
        assert_eq!(in_vain(&mut spin, 300), PROBE * USUAL, "after one wait without");
    }
}
