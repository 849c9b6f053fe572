//! The interval of a prediction: the quotients of published and predicted figures, by class and
//! length, with every source held out in turn.

use serde::Serialize;

use super::factor::Band;
use super::interval_table::TABLE;

/// Predictions that are right or wrong for the same reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Verbs between two machines.
    Verbs,
    /// The same through a library.
    Library,
    /// Through host memory.
    Staged,
    /// Exchanges between all GPUs of a cluster.
    Collective,
    /// Transfers unlike all scored figures: [`super::parts::Parts::unvalidated`] says in what.
    Unvalidated,
}

impl Class {
    /// All of them, in the order of the table.
    pub const ALL: [Self; 5] =
        [Self::Verbs, Self::Library, Self::Staged, Self::Collective, Self::Unvalidated];
}

/// How long a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Length {
    /// Below 8 KiB.
    Short,
    /// Below 1 MiB.
    Middle,
    /// From 1 MiB on.
    Long,
}

impl Length {
    /// All of them, in the order of the table.
    pub const ALL: [Self; 3] = [Self::Short, Self::Middle, Self::Long];

    /// Of a message.
    #[must_use]
    pub const fn of(size: u64) -> Self {
        match size {
            0..8192 => Self::Short,
            8192..1_048_576 => Self::Middle,
            _ => Self::Long,
        }
    }
}

/// Quotients of a time that was measured and the predicted one: the interval holds the published
/// time, and its reciprocals hold a published rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// At most 1.
    pub low: f64,
    /// At least 1.
    pub high: f64,
}

impl Interval {
    /// As calibrated with all sources.
    #[must_use]
    pub fn of(class: Class, size: u64) -> Self {
        let (low, high) = TABLE[class as usize][Length::of(size) as usize];
        Self { low, high }
    }

    /// The band of a time.
    #[must_use]
    pub fn of_time(self, expected: f64) -> Band {
        Band { expected, low: expected * self.low, high: expected * self.high }
    }

    /// The band of a rate. No uncertainty lifts a stream above `most`, which its slowest stage
    /// carries.
    #[must_use]
    pub fn of_rate(self, expected: f64, most: f64) -> Band {
        let high = (expected / self.low).min(most).max(expected);
        Band { expected, low: expected / self.high, high }
    }
}
