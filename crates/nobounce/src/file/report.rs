//! Counters of bytes between files and memory, by path.

use std::sync::{Mutex, PoisonError};

use nobounce_memory::path::{Mechanism, Reason};
use nobounce_nic::tally::{PathTotals, Tally};

/// Reasons that are remembered.
const MAX_REASONS: usize = 32;

/// Bytes that were staged, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagedFile {
    /// Why they were.
    pub reason: Reason,
    /// Their number.
    pub bytes: u64,
}

/// What one read or write moved, by path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileReport {
    /// Bytes by path.
    pub paths: PathTotals,
    /// The staged ones by reason.
    pub staged: Vec<StagedFile>,
}

impl FileReport {
    /// Bytes on all paths.
    pub fn bytes(&self) -> u64 {
        self.paths.bytes()
    }

    pub(super) fn count(&mut self, mechanism: Mechanism, bytes: usize) {
        let tally = match mechanism {
            Mechanism::Window => &mut self.paths.window,
            Mechanism::CopyEngine => &mut self.paths.copy_engine,
            _ => &mut self.paths.cpu,
        };
        tally.bytes += bytes as u64;
    }

    pub(super) fn count_staged(&mut self, reason: &Reason, bytes: usize) {
        if bytes > 0 {
            self.paths.staged.bytes += bytes as u64;
            add(&mut self.staged, reason, bytes as u64);
        }
    }

    /// Counts the operation, once for each path that it took, and adds it to the process's
    /// counters.
    pub(super) fn finish(mut self, is_read: bool) -> Self {
        let used = |tally: &mut Tally| tally.operations = u64::from(tally.bytes > 0);
        let PathTotals { cpu, window, copy_engine, staged, .. } = &mut self.paths;
        [cpu, window, copy_engine, staged].into_iter().for_each(used);
        let mut counters = COUNTERS.lock().unwrap_or_else(PoisonError::into_inner);
        let direction = if is_read { &mut counters.read } else { &mut counters.written };
        direction.merge(&self);
        self
    }

    fn merge(&mut self, other: &Self) {
        let merge = |into: &mut Tally, from: Tally| {
            into.bytes += from.bytes;
            into.operations += from.operations;
        };
        merge(&mut self.paths.cpu, other.paths.cpu);
        merge(&mut self.paths.window, other.paths.window);
        merge(&mut self.paths.copy_engine, other.paths.copy_engine);
        merge(&mut self.paths.staged, other.paths.staged);
        for StagedFile { reason, bytes } in &other.staged {
            add(&mut self.staged, reason, *bytes);
        }
    }
}

fn add(staged: &mut Vec<StagedFile>, reason: &Reason, bytes: u64) {
    if let Some(known) = staged.iter_mut().find(|known| known.reason == *reason) {
        known.bytes += bytes;
    } else if staged.len() < MAX_REASONS {
        staged.push(StagedFile { reason: reason.clone(), bytes });
    }
}

/// What all files of this process moved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileCounters {
    /// From files into memory.
    pub read: FileReport,
    /// From memory into files.
    pub written: FileReport,
}

static COUNTERS: Mutex<FileCounters> = Mutex::new(FileCounters {
    read: FileReport { paths: EMPTY, staged: Vec::new() },
    written: FileReport { paths: EMPTY, staged: Vec::new() },
});

const NONE: Tally = Tally { bytes: 0, operations: 0 };
const EMPTY: PathTotals =
    PathTotals { cpu: NONE, window: NONE, copy_engine: NONE, dma_buf: NONE, peermem: NONE, staged: NONE };

/// Counters of this process, for local files.
pub fn file_counters() -> FileCounters {
    COUNTERS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}
