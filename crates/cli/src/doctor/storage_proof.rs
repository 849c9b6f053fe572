//! What `doctor --storage --prove` reports, and how much it reads.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Most bytes of one read of the file, and the length of one piece.
pub(super) const MAX_BYTES: u64 = 256 << 20;
pub(super) const PIECE: usize = 8 << 20;
/// How long all reads together take: no piece starts later. A single one is not interrupted. The
/// process that reads by cuFile has as long, and is killed then.
pub(super) const LIMIT: Duration = Duration::from_secs(10);

/// One read of the file.
#[derive(Debug, Clone, Serialize)]
pub(super) struct StorageProof {
    /// `O_DIRECT into host memory`, `page cache into GPU 0`.
    pub(super) how: String,
    /// Bytes that were read.
    pub(super) bytes: u64,
    /// GB/s; null where nothing was read.
    pub(super) gbs: Option<f64>,
    /// What was seen, or why it failed.
    pub(super) detail: String,
    /// Whether it worked.
    pub(super) ok: bool,
}

/// What was read, and what was not tried.
#[derive(Debug, Clone, Serialize)]
pub(super) struct StorageProofs {
    /// The file that was read.
    pub(super) file: String,
    /// Reads, in their order.
    pub(super) reads: Vec<StorageProof>,
    /// The libcufile that was loaded.
    pub(super) cufile: Option<CufileLibrary>,
    /// What was not tried, and why.
    pub(super) not_tried: Vec<String>,
}

impl fmt::Display for StorageProof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.gbs {
            Some(gbs) if self.ok => {
                write!(f, "  {}: {} MB, {gbs:.2} GB/s; {}", self.how, self.bytes / 1_000_000, self.detail)
            }
            _ => write!(f, "  {}: FAILED: {}", self.how, self.detail),
        }
    }
}

/// The library that was loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CufileLibrary {
    /// Its file.
    pub(super) path: String,
    /// `1.19`; null for a library without `cuFileGetVersion`.
    pub(super) version: Option<String>,
    /// Whether it is this project's.
    pub(super) is_nobounce: bool,
}

impl fmt::Display for CufileLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = if self.is_nobounce { "nobounce's libcufile" } else { "libcufile" };
        let version = self.version.as_deref().unwrap_or("of unknown version");
        write!(f, "cuFile is {owner} {version}: {}", self.path)
    }
}

pub(super) fn gbs_of(bytes: u64, time: Duration) -> f64 {
    let kilobytes = u32::try_from(bytes / 1000).unwrap_or(u32::MAX);
    f64::from(kilobytes) / 1e6 / time.as_secs_f64().max(1e-9)
}
