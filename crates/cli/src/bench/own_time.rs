//! How much of a CPU this thread had.

use std::time::{Duration, Instant};

/// A span of this thread's life.
#[derive(Debug)]
pub(crate) struct OwnTime {
    began: Instant,
    used: Duration,
}

impl OwnTime {
    /// From now on.
    pub(crate) fn begin() -> Self {
        Self { began: Instant::now(), used: used() }
    }

    /// The CPU share of this thread so far: 1 for one that spins on a CPU of its own.
    pub(crate) fn share(&self) -> f64 {
        let ran = used().saturating_sub(self.used).as_secs_f64();
        (ran / self.began.elapsed().as_secs_f64().max(1e-9)).min(1.0)
    }
}

/// CPU time of this thread so far.
fn used() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to one live timespec, which the call fills.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_sleeps_had_none_of_it() {
        let time = OwnTime::begin();
        std::thread::sleep(Duration::from_millis(50));
        assert!(time.share() < 0.5, "{}", time.share());
        let time = OwnTime::begin();
        while time.began.elapsed() < Duration::from_millis(20) {}
        assert!(time.share() > 0.0 && time.share() <= 1.0, "{}", time.share());
    }
}
