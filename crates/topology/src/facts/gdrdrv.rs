//! The kernel module of GDRCopy.

use serde::{Deserialize, Serialize};

/// The loaded module gdrdrv.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gdrdrv {
    /// Its version: `2.5`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Whether it was built for the open flavour of NVIDIA's module (2.5 and newer tell).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open: Option<bool>,
}

impl Gdrdrv {
    /// The flavour in the module's own words, of its parameters or of the kernel's log.
    #[must_use]
    pub fn flavour(text: &str) -> Option<bool> {
        let text = text.to_ascii_lowercase();
        match (text.contains("opensource"), text.contains("proprietary")) {
            (true, false) => Some(true),
            (false, true) => Some(false),
            _ => None,
        }
    }
}
