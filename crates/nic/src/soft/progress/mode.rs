//! Progress modes.

use crate::process::cpu::{allowed_cpus, are_many};
use crate::soft::config::Progress;

/// The mode of an open device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Thread,
    Caller,
}

impl Progress {
    /// The mode on this machine.
    pub(crate) fn mode(self) -> Mode {
        self.mode_on(allowed_cpus())
    }

    fn mode_on(self, cpus: usize) -> Mode {
        match self {
            Self::Thread => Mode::Thread,
            Self::Caller => Mode::Caller,
            Self::Auto if are_many(cpus) => Mode::Thread,
            // The engine thread would share a CPU with the application, and every message would
            // cost two context switches.
            Self::Auto => Mode::Caller,
        }
    }
}

impl Mode {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Thread => "thread",
            Self::Caller => "caller",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_decides_by_the_allowed_cpus() {
        assert_eq!([1, 2, 3].map(|cpus| Progress::Auto.mode_on(cpus)), [Mode::Caller; 3]);
        assert_eq!([4, 16, 192].map(|cpus| Progress::Auto.mode_on(cpus)), [Mode::Thread; 3]);
        assert_eq!([1, 16].map(|cpus| Progress::Thread.mode_on(cpus)), [Mode::Thread; 2]);
        assert_eq!([1, 16].map(|cpus| Progress::Caller.mode_on(cpus)), [Mode::Caller; 2]);
    }
}
