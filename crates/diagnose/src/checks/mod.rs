//! The checks: facts in, findings out; no IO, no guesses where a fact is missing.

mod driver;
mod failed_step;
mod gdrdrv;
mod gid;
mod gpu;
mod gpu_peers;
mod iommu;
mod kernel_log;
mod known_bad;
mod moved;
mod namespaces;
mod nccl_env;
mod nodes;
mod other_env;
mod pcie;
pub(crate) mod peer;
pub(crate) mod peer_module;
mod place;
mod port;
pub(crate) mod port_events;
mod process;
mod rails;
mod registration;
mod settings;
pub(crate) mod storage;
mod ucx_env;
mod wheels;
mod width;

use crate::finding::Finding;
use nobounce_topology::analysis::Analysis;

/// All findings, most severe first; among equals in the order of the checks.
pub(crate) fn run(analysis: &Analysis<'_>) -> Vec<Finding> {
    let checks: [fn(&Analysis<'_>) -> Vec<Finding>; 23] = [
        driver::check,
        registration::check,
        gpu::check,
        gpu_peers::check,
        gdrdrv::check,
        process::check,
        namespaces::check,
        port::check,
        width::check,
        port_events::check,
        gid::check,
        rails::check,
        pcie::check,
        iommu::check,
        place::check,
        nodes::check,
        nccl_env::check,
        ucx_env::check,
        other_env::check,
        wheels::check,
        kernel_log::check,
        known_bad::check,
        moved::check,
    ];
    let mut found: Vec<Finding> = checks.iter().flat_map(|check| check(analysis)).collect();
    found.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    found
}

/// `a`, `a and b`, `a, b and 3 more`.
pub(crate) fn list<S: AsRef<str>>(names: &[S]) -> String {
    match names {
        [] => String::new(),
        [one] => one.as_ref().to_owned(),
        [one, other] => format!("{} and {}", one.as_ref(), other.as_ref()),
        [one, two, three] => format!("{}, {} and {}", one.as_ref(), two.as_ref(), three.as_ref()),
        [one, two, rest @ ..] => format!("{}, {} and {} more", one.as_ref(), two.as_ref(), rest.len()),
    }
}

/// The word for one or for many.
pub(crate) fn one_or<'a, T>(names: &[T], one: &'a str, many: &'a str) -> &'a str {
    if names.len() == 1 { one } else { many }
}

/// Bytes for people.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    for (unit, shift) in UNITS {
        if count >= 1 << shift {
            let whole = count >> shift;
            let tenth = ((count - (whole << shift)) * 10) >> shift;
            return if tenth == 0 || whole >= 100 {
                format!("{whole} {unit}")
            } else {
                format!("{whole}.{tenth} {unit}")
            };
        }
    }
    format!("{count} B")
}
