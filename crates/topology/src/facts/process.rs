//! The inspecting process, and the libraries it would load.

use serde::{Deserialize, Serialize};

use super::{Probe, Provider, Read, Wheel};

/// Limits, rights and surroundings of the process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    /// Its user.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub uid: Read<u32>,
    /// How much memory it may lock, in bytes; null for no limit.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub memlock_bytes: Read<Option<u64>>,
    /// How far it may raise that limit by itself, in bytes; null for no limit.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub memlock_hard_bytes: Read<Option<u64>>,
    /// Whether CAP_IPC_LOCK is in effect, which lifts that limit.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub ipc_lock: Read<bool>,
    /// Whether it is in a user namespace of its own: there CAP_IPC_LOCK means nothing to drivers.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub user_namespace: Read<bool>,
    /// Whether its IPC namespace is not the machine's.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub ipc_namespace: Read<bool>,
    /// Whether its PID namespace is not the machine's.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub pid_namespace: Read<bool>,
    /// The kind of container; null for none.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub container: Read<Option<String>>,
    /// CPUs it may run on: `0-63`.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub cpus: Read<String>,
    /// Locking memory was tried, really.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub mlock_probe: Read<Probe>,
}

/// A device file that exists, and whether it can be opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceNode {
    /// `/dev/infiniband/uverbs0`.
    pub path: String,
    /// Opening it for reading and writing.
    pub open: Probe,
}

/// Libraries that were found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Libraries {
    /// CUDA's driver: its version such as `13.0`; null if there is none.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub cuda: Read<Option<Library>>,
    /// NVML: the version of the driver it belongs to; null if there is none.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub nvml: Read<Option<Library>>,
    /// libibverbs; null if there is none.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub verbs: Read<Option<Library>>,
    /// NCCL; null if none was found.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub nccl: Read<Option<Library>>,
    /// GDRCopy's library; null if none was found.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub gdrapi: Read<Option<Library>>,
    /// UCX; null if none was found.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub ucx: Read<Option<Ucx>>,
    /// Providers of the system's libibverbs.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub providers: Read<Vec<Provider>>,
    /// Packages of Python with libraries of verbs or UCX of their own.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub wheels: Read<Vec<Wheel>>,
    /// NCCL's plugin for Amazon's adapters (aws-ofi-nccl): whether the loader finds it; null if
    /// there is none. Looked for only where there are such adapters.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub ofi_plugin: Read<Option<bool>>,
}

/// A library.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Library {
    /// Its version, if it tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Why it cannot be used, if it cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Functions that matter and that it lacks: `ibv_reg_dmabuf_mr`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<String>,
}

/// An installation of UCX.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ucx {
    /// Its version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Its transport modules: `ib`, `cuda`, `rdmacm`, ...
    #[serde(default)]
    pub modules: Vec<String>,
}
