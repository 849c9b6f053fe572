//! What was measured of GPU-initiated operations.

use serde::{Deserialize, Serialize};

/// Names the form of the JSON.
pub(super) const SCHEMA: &str = "nobounce-gpu-initiated/1";

/// One run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct InitiatedReport {
    pub(super) schema: String,
    pub(super) version: String,
    pub(super) started: String,
    /// Machine and GPU, in words.
    pub(super) machine: String,
    /// How the two processes share the GPU.
    pub(super) sharing: String,
    pub(super) links: Vec<InitiatedLinkFigures>,
}

/// What was measured over one link.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct InitiatedLinkFigures {
    pub(super) link: String,
    pub(super) gpu: String,
    /// The paths of the symmetric heap.
    pub(super) paths: String,
    pub(super) latency: Vec<Latency>,
    pub(super) rate: Vec<Rate>,
    pub(super) signal_rate: Vec<Rate>,
    pub(super) bandwidth: Vec<Bandwidth>,
    pub(super) idle: Idle,
}

/// Half of a round trip: a put with a signal, from kernel to kernel.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Latency {
    pub(super) bytes: u64,
    pub(super) p50_us: f64,
    pub(super) mean_us: f64,
    pub(super) p99_us: f64,
}

/// Operations that kernels post, complete at the peer: values of 8 bytes, or signals.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Rate {
    pub(super) channels: u32,
    pub(super) million_per_s: f64,
}

/// What a stream of operations moves.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Bandwidth {
    pub(super) bytes: u64,
    pub(super) put_gbytes_per_s: f64,
    pub(super) get_gbytes_per_s: f64,
    /// WRITEs of the same memory that the host posts.
    pub(super) host_write_gbytes_per_s: f64,
}

/// A second without descriptors.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Idle {
    /// Of one CPU, of the whole process.
    pub(super) cpu_percent: f64,
    /// The first put afterwards, until its completion is visible to the kernel: the longest of all.
    pub(super) first_put_us: f64,
    pub(super) pauses: u32,
}
