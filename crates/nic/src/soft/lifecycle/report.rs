//! What a device did, left in a folder for whoever started the program (`NOBOUNCE_REPORT`; docs/run.md describes the files).
//!
//! A marker is made when the device is opened, and replaced by the report when it goes: with its last object, or when the
//! process exits normally without having closed it (`exit.rs`). A marker that stays belongs to a process that died; what its device did
//! until shortly before is in the file beside it (`snapshot.rs`).

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::links::now_ns;
use crate::soft::engine::snapshot::Snapshots;
use crate::soft::engine::totals::{Totals, head, text_of};

/// Devices of one process that leave a report.
const MAX_REPORTS: u32 = 10_000;

/// The report of one device, to be written once.
#[derive(Debug)]
pub(crate) struct Report {
    marker: PathBuf,
    /// The fields that are known from the beginning.
    head: String,
    written: AtomicBool,
}

impl Report {
    /// Leaves the marker, if the environment names a folder. A folder that cannot be written is no reason to fail.
    pub(crate) fn from_env(local: IpAddr) -> Option<Self> {
        let folder = std::env::var_os("NOBOUNCE_REPORT").filter(|folder| !folder.is_empty())?;
        match Self::begin(Path::new(&folder), local) {
            Ok(report) => Some(report),
            Err(error) => {
                tracing::warn!("there will be no report in {}: {error}", folder.display());
                None
            }
        }
    }

    fn begin(folder: &Path, local: IpAddr) -> io::Result<Self> {
        let (pid, head) = (std::process::id(), head(local));
        // A program that replaces itself keeps its number: its marker stays, and the next one has another name.
        for n in 0..MAX_REPORTS {
            let marker = folder.join(format!("{pid}-{n}.open"));
            match File::create_new(&marker) {
                Ok(mut file) => {
                    writeln!(file, "{{{head}}}")?;
                    return Ok(Self { marker, head, written: AtomicBool::new(false) });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other("this process has left too many reports already"))
    }

    /// Where the device keeps what it has done so far; nothing where that cannot be.
    pub(crate) fn snapshots(&self) -> Option<Snapshots> {
        Snapshots::create(&self.marker.with_extension("live"), now_ns())
            .inspect_err(|error| tracing::warn!("no totals will survive if the process is killed: {error}"))
            .ok()
    }

    /// Writes the report, once.
    pub(crate) fn finish(&self, totals: &Totals) {
        if self.written.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Err(error) = self.replace_marker(&text_of(&self.head, totals)) {
            tracing::warn!("cannot leave the report {}: {error}", self.marker.display());
        }
    }

    fn replace_marker(&self, report: &str) -> io::Result<()> {
        // Whoever looks at the folder meanwhile sees the whole report or none, and always one of the two.
        let partly = self.marker.with_extension("part");
        fs::write(&partly, report)?;
        fs::rename(&partly, self.marker.with_extension("json"))?;
        let _ = fs::remove_file(self.marker.with_extension("live")); // there may be none
        fs::remove_file(&self.marker)
    }
}
