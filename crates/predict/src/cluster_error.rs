//! Why a cluster is not compared.

use super::basis::{NoBasis, NoEstimate};
use super::route::NotDirect;

/// A cluster that does not exist.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// One machine has no network between its GPUs.
    #[error(
        "invalid --nodes {0}: a cluster has at least two nodes; bytes inside one machine do not cross the network"
    )]
    Nodes(u32),
    /// More than any real cluster has.
    #[error("too many {what}: {count}, the maximum is {most}")]
    TooMany {
        /// What.
        what: &'static str,
        /// How many.
        count: u32,
        /// At the most.
        most: u32,
    },
    /// Nothing computes.
    #[error("invalid --gpus-per-node 0: expected 1 or more")]
    NoGpus,
    /// Nothing carries the bytes.
    #[error("invalid --nics-per-node 0: expected 1 or more")]
    NoNics,
    /// Not a length of time.
    #[error("invalid --compute {0}: expected 0 or more milliseconds")]
    Compute(f64),
    /// Not a share.
    #[error("invalid --overlap {0}: expected a share of the compute time, 0 to 1 or 0% to 100%")]
    Overlap(f64),
    /// Not a price.
    #[error("invalid --price {0}: expected 0 or more")]
    Price(f64),
    /// There is no direct way to compare with.
    #[error("no direct path to compare with: {0}")]
    NotDirect(NotDirect),
    /// Nothing is known of it.
    #[error("not predicted: {0}")]
    NoBasis(NoBasis),
    /// Host memory needs none.
    #[error("GPUDirect needs GPU memory, but the transfer uses host memory")]
    Host,
}

// None of them is the error's `source()`: the message includes them, and an error chain would print
// them twice.
impl From<NotDirect> for ClusterError {
    fn from(why: NotDirect) -> Self {
        Self::NotDirect(why)
    }
}

impl From<NoBasis> for ClusterError {
    fn from(why: NoBasis) -> Self {
        Self::NoBasis(why)
    }
}

impl From<NoEstimate> for ClusterError {
    fn from(why: NoEstimate) -> Self {
        match why {
            NoEstimate::NotDirect(why) => Self::NotDirect(why),
            NoEstimate::NoBasis(why) => Self::NoBasis(why),
        }
    }
}
