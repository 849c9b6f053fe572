//! The Container Device Interface file, version 1.1.0.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The version that is written: old engines refuse higher ones.
const VERSION: &str = "0.5.0";
pub(super) const KIND: &str = "nobounce.dev/nic";
/// Where the libraries are in a container; also of an image volume with the release archive.
pub(super) const IN_CONTAINER: &str = "/opt/nobounce/lib/nobounce";

/// A file. Engines refuse unknown fields, and so does the check. Missing ones are empty to engines.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct Spec {
    pub(super) cdi_version: String,
    pub(super) kind: String,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) annotations: BTreeMap<String, String>,
    pub(super) container_edits: Edits,
    pub(super) devices: Vec<CdiDevice>,
}

/// A device that can be named: `KIND=NAME`.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct CdiDevice {
    pub(super) name: String,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) annotations: BTreeMap<String, String>,
    pub(super) container_edits: Edits,
}

/// What a container gets.
#[derive(Debug, Default, Deserialize, Serialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct Edits {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) device_nodes: Vec<DeviceNode>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) net_devices: Vec<NetDevice>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) hooks: Vec<Hook>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) mounts: Vec<Mount>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) intel_rdt: Option<IntelRdt>,
    // The specification has both spellings.
    #[serde(rename = "additionalGids", alias = "additionalGIDs", skip_serializing_if = "Vec::is_empty")]
    pub(super) additional_gids: Vec<u32>,
}

/// A bind mount, if no type is given.
#[derive(Debug, Default, Deserialize, Serialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct Mount {
    pub(super) host_path: String,
    pub(super) container_path: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) options: Vec<String>,
    #[serde(rename = "type", skip_serializing_if = "String::is_empty")]
    pub(super) kind: String,
}

/// A device file. Numbers are not checked here.
#[derive(Debug, Default, Deserialize, Serialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct DeviceNode {
    pub(super) path: String,
    pub(super) host_path: String,
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) major: i64,
    pub(super) minor: i64,
    pub(super) file_mode: Option<u32>,
    pub(super) permissions: String,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
}

/// A network interface that is moved into the container.
#[derive(Debug, Default, Deserialize, Serialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct NetDevice {
    pub(super) host_interface_name: String,
    pub(super) name: String,
}

/// A program that the engine runs.
#[derive(Debug, Default, Deserialize, Serialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct Hook {
    pub(super) hook_name: String,
    pub(super) path: String,
    pub(super) args: Vec<String>,
    pub(super) env: Vec<String>,
    pub(super) timeout: Option<i64>,
}

/// Shares of caches and memory bandwidth.
#[derive(Debug, Default, Deserialize, Serialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct IntelRdt {
    #[serde(rename = "closID")]
    pub(super) clos_id: String,
    #[serde(rename = "l3CacheSchema")]
    pub(super) l3_cache_schema: String,
    pub(super) mem_bw_schema: String,
    pub(super) schemata: Vec<String>,
    pub(super) enable_monitoring: bool,
}

impl Spec {
    /// A file of these devices, which share a mount.
    pub(super) fn new(mount: Mount, devices: Vec<CdiDevice>) -> Self {
        Self {
            cdi_version: VERSION.to_owned(),
            kind: KIND.to_owned(),
            container_edits: Edits { mounts: vec![mount], ..Edits::default() },
            devices,
            ..Self::default()
        }
    }
}

impl Edits {
    /// The value of a variable.
    pub(super) fn variable(&self, name: &str) -> Option<&str> {
        self.env.iter().rev().find_map(|set| set.strip_prefix(name)?.strip_prefix('='))
    }
}
