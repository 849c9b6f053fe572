//! Libraries of verbs and UCX that packages of Python bring along.

use serde::{Deserialize, Serialize};

/// A package with libraries of its own for RDMA.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wheel {
    /// Its name: `nixl_cu12`.
    pub name: String,
    /// Its version, if it tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Its own libibverbs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verbs: Option<WheelVerbs>,
    /// Providers of verbs that it brings: `mlx5`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub providers: Vec<String>,
    /// Transport modules of its own UCX; none without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ucx: Option<Vec<String>>,
}

/// A package's own libibverbs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WheelVerbs {
    /// Its path.
    pub file: String,
    /// The private version that its providers must have: 34 of `libmlx5-rdmav34.so`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub abi: Option<u32>,
}

/// A provider of the system's libibverbs.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provider {
    /// `mlx5`.
    pub name: String,
    /// The private version of libibverbs that it fits.
    pub abi: u32,
}
