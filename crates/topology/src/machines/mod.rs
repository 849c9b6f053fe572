//! Known machines as facts: what a healthy one of each kind looks like.
//!
//! Tests change one thing and look at what is found; people try `nobounce doctor` on them.

mod build;
mod servers;
mod small;

use crate::facts::Facts;

/// The names of the machines.
pub const NAMES: [&str; 11] = [
    "dgx-a100",
    "dgx-h100",
    "dgx-b200",
    "hgx-h100-roce",
    "dual-socket",
    "vm-flat",
    "container",
    "gh200",
    "workstation",
    "mi300x",
    "p5-efa",
];

/// A healthy machine by its name.
#[must_use]
pub fn machine(name: &str) -> Option<Facts> {
    Some(match name {
        "dgx-a100" => servers::dgx_a100(),
        "dgx-h100" => servers::dgx_h100(),
        "dgx-b200" => servers::dgx_b200(),
        "hgx-h100-roce" => servers::hgx_h100_roce(),
        "dual-socket" => servers::dual_socket(),
        "mi300x" => servers::mi300x(),
        "vm-flat" => small::vm_flat(),
        "container" => small::container(),
        "gh200" => small::gh200(),
        "workstation" => small::workstation(),
        "p5-efa" => small::p5_efa(),
        _ => return None,
    })
}
