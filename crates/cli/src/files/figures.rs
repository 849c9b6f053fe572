//! What was measured of files.

use serde::{Deserialize, Serialize};

/// Names the form of the JSON.
pub(super) const SCHEMA: &str = "nobounce-files/2";

/// One run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) schema: String,
    pub(super) version: String,
    pub(super) started: String,
    pub(super) machine: String,
    /// Where the bytes go.
    pub(super) memory: String,
    pub(super) links: Vec<LinkFigures>,
}

/// What was measured over one link. Local reads use none.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct LinkFigures {
    pub(super) link: String,
    /// Reads from the page cache.
    pub(super) cached: Vec<Cached>,
    /// Reads of bytes that are not in the page cache.
    pub(super) cold: Option<Cold>,
    pub(super) remote: Vec<Remote>,
}

/// A read from the page cache, by size; median microseconds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Cached {
    pub(super) bytes: u64,
    /// `Region::read_file`.
    pub(super) read_us: f64,
    /// The path that it took.
    pub(super) path: String,
    /// `pread` into pageable memory, then `cudaMemcpy`. GPU memory only.
    pub(super) memcpy_us: Option<f64>,
    /// `pread` by up to four threads into two pinned buffers each, and `cuMemcpyHtoDAsync` on a
    /// stream of each thread.
    pub(super) double_buffered_us: Option<f64>,
}

/// The whole file, past the page cache; GB/s.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Cold {
    pub(super) read_gbytes_per_s: f64,
    /// Four threads that read 1 MiB at a time with `O_DIRECT` into host memory, and leave it there.
    pub(super) disk_gbytes_per_s: f64,
}

/// A read from a file server, by size; median microseconds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Remote {
    /// Bytes of each range.
    pub(super) bytes: u64,
    /// Ranges of one request.
    #[serde(default = "one")]
    pub(super) ranges: u64,
    pub(super) read_us: f64,
    /// WRITEs of the same ranges from host memory of the file's size to the same kind of memory.
    pub(super) write_us: f64,
}

const fn one() -> u64 {
    1
}
