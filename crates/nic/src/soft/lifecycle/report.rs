//! Device reports, written to folders: the launcher's (`NOBOUNCE_REPORT`), and the live folder in
//! the user's runtime directory, for `nobounce top`, `metrics` and `ui`. docs/reference/json.md
//! describes the files.
//!
//! Opening a device creates a marker. The report replaces it when the device closes: with its last
//! object, or at a normal process exit without a close (`exit.rs`). A marker that stays belongs to
//! a process that died. The snapshot file beside it has the device's latest totals (`snapshot.rs`).

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::process::private_file;
use crate::soft::engine::snapshot::Snapshots;
use crate::soft::engine::totals::{Identity, Totals, head, text_of};
use crate::soft::lifecycle::live_folder;

/// Devices of one process that write a report.
const MAX_REPORTS: u32 = 10_000;

/// The report of one device, written once.
#[derive(Debug)]
pub(crate) struct Report {
    marker: PathBuf,
    /// The fields known at open.
    head: String,
    written: AtomicBool,
    /// The marker of the live folder, with a lock that ends with the process.
    locked: Option<File>,
}

impl Report {
    /// The reports of a device that opens. A folder that cannot be written is no reason to fail.
    pub(crate) fn all(identity: Identity) -> Vec<Self> {
        Self::from_env(identity).into_iter().chain(Self::live(identity)).collect()
    }

    /// Its report in the live folder, if there is a runtime directory with space.
    fn live(identity: Identity) -> Option<Self> {
        let folder = live_folder::create()?;
        live_folder::prune(&folder);
        Self::begin(&folder, identity, true)
            .inspect_err(|error| tracing::debug!("no live counters in {}: {error}", folder.display()))
            .ok()
    }

    /// Its report for the launcher, if the environment names a folder.
    fn from_env(identity: Identity) -> Option<Self> {
        let folder = std::env::var_os("NOBOUNCE_REPORT").filter(|folder| !folder.is_empty())?;
        match Self::begin(Path::new(&folder), identity, false) {
            Ok(report) => Some(report),
            Err(error) => {
                tracing::warn!("there will be no report in {}: {error}", folder.display());
                None
            }
        }
    }

    fn begin(folder: &Path, identity: Identity, lock: bool) -> io::Result<Self> {
        let (pid, head) = (std::process::id(), head(identity));
        // A program that calls exec keeps its process ID: its marker stays, and the next one gets
        // another name.
        for n in 0..MAX_REPORTS {
            let marker = folder.join(format!("{pid}-{n}.open"));
            // Left by a device that this process has closed, or by an earlier process of this ID.
            if ["json", "live", "dead"].iter().any(|kind| marker.with_extension(kind).exists()) {
                continue;
            }
            match private_file::options().create_new(true).open(&marker) {
                Ok(mut file) => {
                    // The text comes after the lock: an empty marker is no dead process's
                    // (`live_folder::prune`).
                    let locking = if lock { live_folder::lock(&file) } else { Ok(()) };
                    locking.and_then(|()| writeln!(file, "{{{head}}}")).inspect_err(|_| {
                        let _ = fs::remove_file(&marker); // the first error is the one to tell
                    })?;
                    let locked = lock.then_some(file);
                    return Ok(Self { marker, head, written: AtomicBool::new(false), locked });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other("this process has left too many reports already"))
    }

    /// The device's snapshot file; `None` if it cannot be created.
    pub(crate) fn snapshots(&self) -> Option<Snapshots> {
        let live = self.marker.with_extension("live");
        Snapshots::create(&live).inspect_err(|error| self.without_snapshots(error)).ok()
    }

    fn without_snapshots(&self, error: &io::Error) {
        if self.locked.is_none() {
            tracing::warn!("no totals will survive if the process is killed: {error}");
            return;
        }
        // Live counters that never change would mislead.
        tracing::debug!("no live counters: {error}");
        self.written.store(true, Ordering::Relaxed);
        let _ = fs::remove_file(&self.marker); // it is the user's to clean up otherwise
    }

    /// Writes the report, once.
    pub(crate) fn finish(&self, totals: &Totals) {
        if self.written.swap(true, Ordering::Relaxed) {
            return;
        }
        let Err(error) = self.replace_marker(&text_of(&self.head, totals)) else { return };
        let _ = fs::remove_file(self.marker.with_extension("part")); // may not exist
        if self.locked.is_none() {
            tracing::warn!("cannot leave the report {}: {error}", self.marker.display());
            return;
        }
        tracing::debug!("no last counters in {}: {error}", self.marker.display());
        // The process may live on: a marker with its lock would say that the device is open.
        for kind in ["live", "open"] {
            // pruned with the process otherwise
            let _ = fs::remove_file(self.marker.with_extension(kind));
        }
    }

    fn replace_marker(&self, report: &str) -> io::Result<()> {
        // Renamed into place: a reader of the folder sees a complete report or the marker, never
        // neither.
        let partly = self.marker.with_extension("part");
        private_file::options().create(true).truncate(true).open(&partly)?.write_all(report.as_bytes())?;
        fs::rename(&partly, self.marker.with_extension("json"))?;
        let _ = fs::remove_file(self.marker.with_extension("live")); // may not exist
        fs::remove_file(&self.marker)
    }
}
