//! The facts of one machine: everything the checks use, and nothing else.
//!
//! Facts are read once (`sysfs`, and probes of the command), can be saved, sent and replayed.
//! docs/reference/doctor.md describes the file.

mod blame;
mod gdrdrv;
mod gpu;
mod gpu_peer;
mod ip;
mod kernel;
mod link_end;
mod log_words;
mod machine;
mod nic;
mod order;
mod pci;
mod process;
mod read;
mod redact;
mod storage;
mod wheel;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::clean;

pub use gdrdrv::Gdrdrv;
pub use gpu::{ATTRIBUTE_UNKNOWN, Gpu, GpuVendor};
pub use gpu_peer::{GpuPeer, PeerDenied};
pub use ip::IpSettings;
pub use kernel::{Kernel, Module, NvidiaModule};
pub use kernel::{NO_FOLDER, version_pair};
pub use link_end::LinkEnd;
pub use machine::{Cpu, Machine, NumaNode};
pub use nic::{Gid, Netdev, Nic, Port};
pub use pci::{Acs, Bar, ConfigSpace, Iommu, Link, PciDevice};
pub use process::{DeviceNode, Libraries, Library, Process, Ucx};
pub use read::{Read, Unread};
pub use redact::hide_addresses;
pub use storage::{
    BlockDevice, BlockKind, Cufile, CufileConfig, CufileLibrary, DirectIo, Mount, NvidiaFs, NvmeController,
    Storage,
};
pub use wheel::{Provider, Wheel, WheelVerbs};

/// The version of the facts file that this program writes and reads. It changes with every change
/// of a field.
pub const SCHEMA: u32 = 1;

/// What kind of file it is: the first field of every facts file.
pub const KIND: &str = "nobounce facts";

/// Largest facts file that is read, in bytes. A machine with 16 GPUs and 32 adapters needs less
/// than 1 MiB.
pub const MAX_FILE: u64 = 64 << 20;

/// How a probe ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// Whether it worked.
    pub ok: bool,
    /// The error number of the system, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errno: Option<i32>,
    /// What was seen, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

impl Probe {
    /// A probe that worked.
    pub fn worked(detail: impl Into<String>) -> Self {
        Self { ok: true, errno: None, detail: detail.into() }
    }

    /// A probe that failed.
    pub fn failed(errno: Option<i32>, detail: impl Into<String>) -> Self {
        Self { ok: false, errno, detail: detail.into() }
    }
}

/// Result of actually registering memory of one GPU with one adapter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Registration {
    /// PCI address of the GPU.
    pub gpu: String,
    /// Name of the adapter, such as `mlx5_0`.
    pub nic: String,
    /// `dma-buf` or `peermem`.
    pub way: String,
    /// Bytes that were registered.
    pub bytes: u64,
    /// How it ended.
    pub probe: Probe,
}

/// Result of moving bytes between memory of a GPU and an adapter (`doctor --prove`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transfer {
    /// PCI address of the GPU.
    pub gpu: String,
    /// Name of the adapter.
    pub nic: String,
    /// Bytes that were moved.
    pub bytes: u64,
    /// How it ended.
    pub probe: Probe,
}

/// The facts of one machine, as one process of it sees them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// [`KIND`].
    pub kind: String,
    /// [`SCHEMA`].
    pub schema: u32,
    /// The program that wrote them, with its version.
    #[serde(default)]
    pub written_by: String,
    /// The name of the machine; left out where names are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The machine itself.
    #[serde(default)]
    pub machine: Machine,
    /// Its kernel and modules.
    #[serde(default)]
    pub kernel: Kernel,
    /// Every PCI device that matters: GPUs, adapters, NVMe drives, and the bridges above them.
    #[serde(default)]
    pub pci: Vec<PciDevice>,
    /// The GPUs.
    #[serde(default)]
    pub gpus: Vec<Gpu>,
    /// Peer access between GPUs, each pair once.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub gpu_peers: Read<Vec<GpuPeer>>,
    /// The RDMA adapters, as `/sys/class/infiniband` lists them.
    #[serde(default)]
    pub nics: Vec<Nic>,
    /// Results of registering GPU memory with adapters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub registrations: Vec<Registration>,
    /// Results of moving bytes between GPU memory and adapters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub transfers: Vec<Transfer>,
    /// Device files that matter, those that exist: `/dev/infiniband/*`, `/dev/nvidia*`,
    /// `/dev/gdrdrv`.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub devices: Read<Vec<DeviceNode>>,
    /// The inspecting process: its limits, rights and CPUs.
    #[serde(default)]
    pub process: Process,
    /// Variables of the environment that matter: `NCCL_*`, `UCX_*` and others of the kind.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// The same from files: `/etc/nccl.conf`, `~/.nccl.conf`, `ucx.conf`; by path.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub config_files: BTreeMap<String, BTreeMap<String, String>>,
    /// Libraries that were found.
    #[serde(default)]
    pub libraries: Libraries,
    /// One path, and what a read from it into GPU memory depends on (`doctor --storage`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<Storage>,
}

impl Default for Facts {
    fn default() -> Self {
        Self {
            kind: KIND.to_owned(),
            schema: SCHEMA,
            written_by: String::new(),
            host: None,
            machine: Machine::default(),
            kernel: Kernel::default(),
            pci: Vec::new(),
            gpus: Vec::new(),
            gpu_peers: Read::default(),
            nics: Vec::new(),
            registrations: Vec::new(),
            transfers: Vec::new(),
            devices: Read::default(),
            process: Process::default(),
            environment: BTreeMap::new(),
            config_files: BTreeMap::new(),
            libraries: Libraries::default(),
            storage: None,
        }
    }
}

/// Why a facts file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FactsError {
    /// The text ends too early.
    #[error(
        "the file ends in the middle (line {line}, column {column}): it was cut off; ask for the whole file, or make it again with `nobounce doctor --save`"
    )]
    Truncated {
        /// Where.
        line: usize,
        /// Where.
        column: usize,
    },
    /// It is no JSON, or not of this form.
    #[error("the file cannot be understood: {}", clean(&.0.to_string()))]
    Malformed(serde_json::Error),
    /// A field has another form.
    #[error("the field {} is not as expected: {}", clean(field), clean(&error.to_string()))]
    Field {
        /// The field: `nics[3].ports[0].rate_gbps`.
        field: String,
        /// What was found and what is expected, with line and column.
        error: serde_json::Error,
    },
    /// It is some other JSON.
    #[error("this is no facts file: its \"kind\" is not \"{KIND}\"")]
    NotFacts,
    /// It is of another version.
    #[error(
        "the file has version {found} of the facts, and this program knows version {SCHEMA}: use the nobounce that wrote it ({})",
        clean(by)
    )]
    Version {
        /// The version of the file.
        found: u64,
        /// The program that wrote it.
        by: String,
    },
    /// It is larger than any machine needs.
    #[error("the file is larger than {} MiB; no facts are", MAX_FILE >> 20)]
    TooLarge,
}

impl Facts {
    /// Facts from the text of a file.
    ///
    /// # Errors
    /// The file is truncated, of another kind, or of another version: the message says which.
    pub fn from_json(text: &str) -> Result<Self, FactsError> {
        if text.len() as u64 > MAX_FILE {
            return Err(FactsError::TooLarge);
        }
        // Kind and version first: errors about fields of another version would only confuse.
        let raw: serde_json::Value = serde_json::from_str(text).map_err(Self::explain)?;
        if raw.get("kind").and_then(serde_json::Value::as_str) != Some(KIND) {
            return Err(FactsError::NotFacts);
        }
        let found = raw.get("schema").and_then(serde_json::Value::as_u64).unwrap_or(0);
        if found != u64::from(SCHEMA) {
            let by = raw.get("written_by").and_then(serde_json::Value::as_str).unwrap_or("not recorded");
            return Err(FactsError::Version { found, by: by.to_owned() });
        }
        // Parse the text again, not the value, so that errors name a line.
        serde_json::from_str(text).map_err(|error| match blame::field(&raw) {
            Some(field) => FactsError::Field { field, error },
            None => Self::explain(error),
        })
    }

    fn explain(error: serde_json::Error) -> FactsError {
        if error.is_eof() {
            FactsError::Truncated { line: error.line(), column: error.column() }
        } else {
            FactsError::Malformed(error)
        }
    }

    /// The text of a file.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Facts are plain data with text keys: serialising them cannot fail.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// The PCI device at an address.
    #[must_use]
    pub fn pci_device(&self, address: &str) -> Option<&PciDevice> {
        self.pci.iter().find(|device| device.address == address)
    }

    /// A variable as NCCL and UCX would see it: the environment first, then the files.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<Variable<'_>> {
        let here = self.environment.get_key_value(name).map(|(name, value)| Variable {
            name,
            value,
            source: "environment",
        });
        here.or_else(|| {
            self.config_files.iter().find_map(|(path, settings)| {
                let (name, value) = settings.get_key_value(name)?;
                Some(Variable { name, value, source: path })
            })
        })
    }

    /// Every variable that is set, the environment before the files, each name once.
    pub fn variables(&self) -> impl Iterator<Item = Variable<'_>> {
        let names: std::collections::BTreeSet<&str> = self
            .environment
            .keys()
            .chain(self.config_files.values().flat_map(BTreeMap::keys))
            .map(String::as_str)
            .collect();
        names.into_iter().filter_map(|name| self.variable(name))
    }

    /// True where the machine is a virtual one.
    #[must_use]
    pub fn is_virtual(&self) -> bool {
        matches!(self.machine.hypervisor.known(), Some(Some(_)))
    }

    /// True where the process is in a container.
    #[must_use]
    pub fn is_container(&self) -> bool {
        matches!(self.process.container.known(), Some(Some(_)))
    }
}

/// A setting, and where it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variable<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its value.
    pub value: &'a str,
    /// `environment`, or the path of a file.
    pub source: &'a str,
}

impl std::fmt::Display for Variable<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}={} ({})", self.name, self.value, self.source)
    }
}
