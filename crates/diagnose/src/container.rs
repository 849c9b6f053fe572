//! Facts of a container: fixes that change the host name it.

use crate::finding::Finding;
use nobounce_topology::facts::Facts;

/// Fixes on the host say so where the facts are those of a container.
pub(crate) fn name_the_side(facts: &Facts, findings: &mut [Finding]) {
    if !facts.is_container() {
        return;
    }
    for fix in findings.iter_mut().flat_map(|finding| &mut finding.fix) {
        *fix = fix.clone().in_container();
    }
}
