//! Progress modes.

use std::str::FromStr;

use super::cpu::{allowed_cpus, are_many};
use crate::soft::config::ConfigError;

/// Which thread drives the engines of a device, as configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Progress {
    /// [`Thread`](Self::Thread) where the process may run on 4 CPUs or more, otherwise [`Caller`](Self::Caller). Decided once, when
    /// the device opens.
    #[default]
    Auto,
    /// The engine thread alone. Posting enqueues, polling reads the completion queue; neither makes a system call while the engine
    /// thread is awake.
    Thread,
    /// The thread that posts or polls. The engine thread takes over when a completion queue is armed or polls stop.
    Caller,
}

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
            // The engine thread would share a CPU with the application, and every message would cost two context switches.
            Self::Auto => Mode::Caller,
        }
    }
}

impl FromStr for Progress {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text.trim() {
            "auto" => Ok(Self::Auto),
            "thread" => Ok(Self::Thread),
            "caller" => Ok(Self::Caller),
            _ => Err(ConfigError::Progress(text.to_owned())),
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

    #[test]
    fn modes_by_their_names() {
        let modes = ["auto", "thread", " caller"].map(|text| text.parse::<Progress>().unwrap());
        assert_eq!(modes, [Progress::Auto, Progress::Thread, Progress::Caller]);
        let error = "fast".parse::<Progress>().unwrap_err().to_string();
        assert!(error.contains("\"fast\"") && error.contains("NOBOUNCE_PROGRESS"), "{error}");
    }
}
