//! How a transfer is posted, and where its bytes lie.

use serde::{Deserialize, Serialize};

/// The software that posts the transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Software {
    /// The verbs themselves: perftest, or a library that adds next to nothing.
    #[default]
    Verbs,
    /// MPI over UCX.
    Mpi,
    /// NIXL over UCX.
    Nixl,
    /// NCCL, point to point.
    Nccl,
    /// Kernels on the GPU that post themselves, as NVSHMEM and DeepEP do. Not predicted.
    GpuInitiated,
    /// This project's software NIC: a core at each end moves the bytes.
    Nobounce,
}

/// Where the bytes lie, at both ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// On a GPU.
    #[default]
    Gpu,
    /// In host memory.
    Host,
}

/// The operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// The sender pushes; SEND costs the same.
    #[default]
    Write,
    /// The receiver asks.
    Read,
}

/// One end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum End {
    /// Where the bytes come from.
    Source,
    /// Where they go.
    Target,
}
