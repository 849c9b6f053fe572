//! One end of a case of any kind: memory, the timed part, and the check of what arrived.

use nobounce::{Path, Region};

use super::round::Round;

/// What came of one timed part.
#[derive(Debug, Default)]
pub(super) struct Timed {
    /// How long it took.
    pub(super) seconds: f64,
    /// Messages, in both directions together where both count.
    pub(super) messages: u64,
    /// Microseconds of each, where they are measured one by one.
    pub(super) latencies: Vec<f64>,
}

impl Timed {
    /// Half round trips, or whole operations.
    pub(super) fn of_latencies(latencies: Vec<f64>, is_half: bool) -> Self {
        let ways = if is_half { 2.0 } else { 1.0 };
        Self {
            seconds: latencies.iter().sum::<f64>() * ways / 1e6,
            messages: latencies.len() as u64,
            latencies,
        }
    }
}

/// One end of a case.
pub(super) trait Side {
    /// Fills the memory for a round; outside the time.
    fn prepare(&self, round: Round) -> anyhow::Result<()>;
    /// The timed part, with the other end at its own.
    fn timed(&self, round: Round) -> anyhow::Result<Timed>;
    /// Checks what must have arrived at this end in that round; outside the timed part.
    fn check(&self, round: Round) -> Result<(), String>;
    /// Messages of a checked round; 0 where every round checks each message.
    fn checkable(&self) -> u64;
    /// How messages get from and to the memory: `direct`, `staged (reason)`, or `naive staging`.
    fn path(&self) -> String;
    /// Where they lie: `host`, `gpu`, or `stand-in`.
    fn memory(&self) -> &'static str;
}

/// The path of a region in one word, and the reason where it is not direct, or not for certain.
pub(super) fn path_of(region: &Region) -> String {
    let paths = region.paths();
    // Where both are staged, it is for the same reason.
    match (&paths.inbound, &paths.outbound) {
        (Path::Staged(reason), _) | (_, Path::Staged(reason)) => format!("staged ({reason})"),
        (Path::Believed(_, reason), _) | (_, Path::Believed(_, reason)) => {
            format!("direct, not proved: {reason}")
        }
        _ => "direct".to_owned(),
    }
}
