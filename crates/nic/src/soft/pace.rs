//! How much an engine has to move: whether its own thread should keep it to itself.
//!
//! Short messages are fastest where one thread does everything: who posts sends, who polls receives, and nobody waits for a lock or fetches what
//! another core has just written. Many bytes are faster where the engine's thread moves them and the application only posts and looks.

/// How long a look back is.
const WINDOW_NS: u64 = 50_000;
/// Bytes, in and out, within that time: from here on they are many. (NCCL's all-reduce over shared memory: the engine's thread makes 32 KiB
/// faster, and 16 KiB slower. docs/measurements/nccl.md)
const MANY: u64 = 64 << 10;
/// Below this they are few again.
const FEW: u64 = MANY / 2;

/// What was moved lately.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// When the look back began, and what had been moved by then.
    since: u64,
    then: u64,
    is_bulky: bool,
}

impl Pace {
    /// Whether many bytes are being moved, where `moved` is how many there were in all until now.
    #[inline]
    pub(super) fn judge(&mut self, now: u64, moved: u64) -> bool {
        let (took, bytes) = (now.saturating_sub(self.since), moved.wrapping_sub(self.then));
        if took < WINDOW_NS && (self.is_bulky || bytes < MANY) {
            return self.is_bulky;
        }
        let within = u128::from(bytes) * u128::from(WINDOW_NS) / u128::from(took.max(WINDOW_NS));
        self.is_bulky = within >= u128::from(if self.is_bulky { FEW } else { MANY });
        (self.since, self.then) = (now, moved);
        self.is_bulky
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages of `len` bytes, one every `ns`, for a millisecond: how it ended, and whether that changed after the first tenth.
    fn stream(pace: &mut Pace, now: &mut u64, moved: &mut u64, len: u64, ns: u64) -> (bool, bool) {
        let (begin, mut last, mut changed) = (*now, pace.is_bulky, false);
        while *now < begin + 1_000_000 {
            *now += ns;
            *moved += len;
            let is = pace.judge(*now, *moved);
            changed |= is != last && *now > begin + 100_000;
            last = is;
        }
        (last, changed)
    }

    #[test]
    fn long_messages_are_bulk_and_short_ones_are_not() {
        let (mut pace, mut now, mut moved) = (Pace::default(), 5_000_000, 0);
        assert_eq!(stream(&mut pace, &mut now, &mut moved, 8, 1_000), (false, false));
        assert_eq!(stream(&mut pace, &mut now, &mut moved, 128 << 10, 30_000), (true, false));
        assert_eq!(stream(&mut pace, &mut now, &mut moved, 4096, 15_000), (false, false));
    }

    #[test]
    fn what_is_in_between_changes_nothing() {
        let (mut pace, mut now, mut moved) = (Pace::default(), 5_000_000, 0);
        // 40 KiB in 50 us: less than many, more than few.
        assert_eq!(stream(&mut pace, &mut now, &mut moved, 4096, 5_000), (false, false));
        stream(&mut pace, &mut now, &mut moved, 128 << 10, 30_000);
        assert_eq!(stream(&mut pace, &mut now, &mut moved, 4096, 5_000), (true, false));
    }

    #[test]
    fn the_first_long_message_is_enough() {
        let mut pace = Pace::default();
        pace.judge(1_000_000, 0);
        assert!(pace.judge(1_002_000, MANY));
    }

    #[test]
    fn after_a_pause_nothing_is_left_of_it() {
        let mut pace = Pace::default();
        pace.judge(1_000_000, 1 << 20);
        assert!(pace.judge(1_002_000, 2 << 20));
        assert!(!pace.judge(100_000_000, 2 << 20));
    }
}
