//! The Container Device Interface file: the part of the specification that is used here.

use serde::{Deserialize, Serialize};

/// The lowest version that has all fields below: old engines refuse higher ones.
const VERSION: &str = "0.5.0";
pub(super) const KIND: &str = "nobounce.dev/nic";
/// Where the libraries are in a container; also of an image volume with the release archive.
pub(super) const IN_CONTAINER: &str = "/opt/nobounce/lib/nobounce";

/// A file. Engines refuse unknown fields, and so does the check.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Spec {
    pub(super) cdi_version: String,
    pub(super) kind: String,
    #[serde(default)]
    pub(super) container_edits: Edits,
    pub(super) devices: Vec<Device>,
}

/// A device that can be named: `KIND=NAME`.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Device {
    pub(super) name: String,
    pub(super) container_edits: Edits,
}

/// What a container gets.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Edits {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) env: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) mounts: Vec<Mount>,
}

/// A bind mount.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Mount {
    pub(super) host_path: String,
    pub(super) container_path: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) options: Vec<String>,
}

impl Spec {
    /// A file of these devices, which share a mount.
    pub(super) fn new(mount: Mount, devices: Vec<Device>) -> Self {
        let container_edits = Edits { mounts: vec![mount], ..Edits::default() };
        Self { cdi_version: VERSION.to_owned(), kind: KIND.to_owned(), container_edits, devices }
    }
}

impl Edits {
    /// The value of a variable.
    pub(super) fn variable(&self, name: &str) -> Option<&str> {
        self.env.iter().rev().find_map(|set| set.strip_prefix(name)?.strip_prefix('='))
    }
}
