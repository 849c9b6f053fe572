//! What was measured of page lists.

use serde::{Deserialize, Serialize};

/// Names the form of the JSON.
pub(super) const SCHEMA: &str = "nobounce-kv/1";

/// One run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct KvReport {
    pub(super) schema: String,
    pub(super) version: String,
    pub(super) started: String,
    pub(super) machine: String,
    /// Where the pages are.
    pub(super) memory: String,
    pub(super) links: Vec<KvLinkFigures>,
}

/// What was measured over one link.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct KvLinkFigures {
    pub(super) link: String,
    /// The paths of the pages.
    pub(super) paths: String,
    /// From the start of a connection to the end of its first WRITE.
    pub(super) connect_ms: f64,
    pub(super) lists: Vec<List>,
    pub(super) requests: Vec<Requests>,
}

/// Pages of two random block tables, in one transfer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct List {
    pub(super) page_bytes: u64,
    pub(super) pages: u64,
    pub(super) write_gbytes_per_s: f64,
    pub(super) read_gbytes_per_s: f64,
    /// The same bytes in one piece.
    pub(super) contiguous_write_gbytes_per_s: f64,
    pub(super) contiguous_read_gbytes_per_s: f64,
    /// Time of the posting call.
    pub(super) submit_us: f64,
}

/// Requests in flight at once: layer-major lists over random block tables, each with a tag.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Requests {
    pub(super) at_once: u64,
    pub(super) page_tokens: u64,
    pub(super) page_bytes: u64,
    pub(super) request_bytes: u64,
    pub(super) gbytes_per_s: f64,
    /// From posting to completion.
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
}
