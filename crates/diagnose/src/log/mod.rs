//! Logs of NCCL, UCX and others: what was done, not what is possible.
//!
//! Read line by line in bounded memory: a log of many ranks and many hours may have gigabytes.

mod adapters;
mod causes;
mod fabric;
mod fatal;
mod known;
mod lines;
mod messages;
mod nccl;
mod overrule;
mod report;
mod rows;
mod text;
mod ucx;

use std::collections::BTreeMap;
use std::io::{self, BufRead};

use serde::Serialize;

pub use adapters::{AdapterErrors, Adapters};
pub use fabric::FabricLog;
pub use fatal::Fatal;
pub use known::{KnownMessages, LogCause};
pub use lines::MAX_LINE;
pub use nccl::{NcclLog, Rank, Transport};
pub use overrule::overrule;
pub use report::{LogReport, join_fabric, join_nccl, join_other, join_ucx};
pub use rows::LogRow;
pub use ucx::{UcxLog, UcxUse};

/// Distinct entries that are kept of each kind. Further ones are only counted.
pub(crate) const MAX_KEPT: usize = 65_536;

/// How often something was seen, and the first example of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Seen {
    /// How often.
    pub count: u64,
    /// The first line.
    pub example: String,
}

impl Seen {
    fn take(&mut self, line: &str) {
        self.count += 1;
        if self.example.is_empty() {
            self.example = line.trim().chars().take(200).collect();
        }
    }
}

/// What the output of one program says, whichever libraries wrote it.
#[derive(Clone, Debug, Default)]
pub struct Logs {
    /// Lines, of any program.
    pub lines: u64,
    /// NCCL's.
    pub nccl: NcclLog,
    /// UCX's.
    pub ucx: UcxLog,
    /// libfabric's.
    pub fabric: FabricLog,
    /// Those of other programs that are known.
    pub other: OtherLog,
}

/// What programs other than NCCL, UCX and libfabric say.
#[derive(Clone, Debug, Default)]
pub struct OtherLog {
    /// Lines.
    pub lines: u64,
    /// Messages whose causes are known.
    pub known: KnownMessages,
    /// Errors by adapter.
    pub errors: Adapters,
    /// Fatal completions by their status.
    fatal: BTreeMap<u32, (fatal::Status, Seen)>,
}

impl OtherLog {
    fn take(&mut self, line: &str) {
        self.lines += 1;
        self.known.take(line);
        // Numbers and words of other programs may mean anything; the names of verbs do not.
        let status = fatal::named(line);
        self.errors.take("", status.map(|status| status.number), line);
        if let Some(status) = status {
            self.fatal.entry(status.number).or_insert_with(|| (status, Seen::default())).1.take(line);
        }
    }

    /// Whether there is anything to report.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.known.is_empty() && self.fatal.is_empty() && self.errors.is_empty()
    }
}

impl Logs {
    /// Takes one line.
    pub fn take(&mut self, line: &str) {
        self.lines += 1;
        let own = |logs: &Self| logs.nccl.lines + logs.ucx.lines + logs.fabric.lines;
        let before = own(self);
        self.nccl.take(line);
        self.ucx.take(line);
        self.fabric.take(line);
        if own(self) == before {
            self.other.take(line);
        }
    }
}

/// Calls `take` with each line of a log; longer ones than [`MAX_LINE`] are cut.
///
/// # Errors
/// The log cannot be read.
pub fn each_line(log: impl BufRead, take: impl FnMut(&str)) -> io::Result<()> {
    lines::each(log, |_| {}, take)
}

/// Reads a log of any program to its end.
///
/// # Errors
/// The log cannot be read.
pub fn read_any(log: impl BufRead, progress: impl FnMut(u64)) -> io::Result<Logs> {
    let mut found = Logs::default();
    lines::each(log, progress, |line| found.take(line))?;
    Ok(found)
}

/// Reads a log of libfabric's to its end.
///
/// # Errors
/// The log cannot be read.
pub fn read_fabric(log: impl BufRead, progress: impl FnMut(u64)) -> io::Result<FabricLog> {
    let mut found = FabricLog::default();
    lines::each(log, progress, |line| found.take(line))?;
    Ok(found)
}

/// Reads a log to its end. `progress` gets the number of bytes read, from time to time.
///
/// # Errors
/// The log cannot be read.
pub fn read_nccl(log: impl BufRead, progress: impl FnMut(u64)) -> io::Result<NcclLog> {
    let mut found = NcclLog::default();
    lines::each(log, progress, |line| found.take(line))?;
    Ok(found)
}

/// The same for a log of UCX.
///
/// # Errors
/// The log cannot be read.
pub fn read_ucx(log: impl BufRead, progress: impl FnMut(u64)) -> io::Result<UcxLog> {
    let mut found = UcxLog::default();
    lines::each(log, progress, |line| found.take(line))?;
    Ok(found)
}
