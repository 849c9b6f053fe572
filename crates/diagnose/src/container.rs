//! Which side of a container a fix belongs to: modules, drivers, the kernel and firmware are the
//! host's.

use crate::finding::Finding;
use nobounce_topology::facts::Facts;

/// Findings that the image, its start or its namespaces mend, or that name another side themselves.
const NOT_OF_THE_HOST: [&str; 12] = [
    "no-libibverbs",
    "verbs-provider",
    "verbs-too-old",
    "wheel-",
    "ucx-",
    "nccl-",
    "nic-other-namespace",
    "gid-",
    "rails-",
    "mtu-",
    "ats-off",
    // It runs doctor on the same path again.
    "storage-acs-unread",
];

/// Fixes that need root or a reboot name the host where the facts are those of a container.
pub(crate) fn name_the_side(facts: &Facts, findings: &mut [Finding]) {
    if !facts.is_container() {
        return;
    }
    let is_of_host = |finding: &&mut Finding| {
        (finding.needs_root || finding.needs_reboot)
            // The limit of a namespace (memlock-userns) is that of its outer user.
            && finding.id != "memlock"
            && !NOT_OF_THE_HOST.iter().any(|begin| finding.id.starts_with(begin))
    };
    for finding in findings.iter_mut().filter(is_of_host) {
        finding.put_on_host();
    }
}
