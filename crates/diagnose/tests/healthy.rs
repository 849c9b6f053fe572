//! Healthy machines: nothing is found on them but what their slots make NCCL do.

use nobounce_diagnose::diagnose;
use nobounce_diagnose::finding::Severity;
use nobounce_diagnose::verdict::PathKind;
use nobounce_topology::machines;

/// The complete report for a machine.
fn said(name: &str) -> Vec<String> {
    let facts = machines::machine(name).unwrap();
    diagnose(&facts).ids().into_iter().map(|(id, severity)| format!("{severity} {id}")).collect()
}

#[test]
fn healthy_machines_have_no_fault() {
    for (name, wanted) in [
        ("dgx-a100", &[][..]),
        ("dgx-h100", &[]),
        ("hgx-h100-roce", &[]),
        ("dual-socket", &["warning nccl-distance", "info shared-nic", "info through-cpu"]),
        ("vm-flat", &["warning nccl-distance", "info vm-flat"]),
        ("gh200", &["warning known-bad"]),
        ("workstation", &["info bar1-small", "warning nccl-distance", "info through-cpu"]),
        ("mi300x", &[]),
        ("p5-efa", &["info peermem-nic"]),
    ] {
        assert_eq!(said(name), wanted, "{name}");
        let facts = machines::machine(name).unwrap();
        let diagnosis = diagnose(&facts);
        assert!(!diagnosis.direct_is_lost, "{name}");
        for verdict in diagnosis.verdicts.iter().filter(|verdict| verdict.best) {
            assert_eq!(verdict.path, PathKind::Direct, "{name}: {verdict:?}");
        }
    }
}

#[test]
fn a_container_without_the_adapters_files_is_told_so() {
    assert_eq!(said("container"), ["error no-dev-infiniband"]);
    let diagnosis = diagnose(&machines::machine("container").unwrap());
    assert!(diagnosis.direct_is_lost);
    assert!(diagnosis.verdicts.iter().all(|verdict| verdict.path == PathKind::Staged));
}

#[test]
fn every_gpu_has_its_own_adapter_where_there_are_enough() {
    for (name, count) in
        [("dgx-a100", 8), ("dgx-h100", 8), ("hgx-h100-roce", 8), ("mi300x", 8), ("p5-efa", 8), ("vm-flat", 8)]
    {
        let diagnosis = diagnose(&machines::machine(name).unwrap());
        let mut best: Vec<_> = diagnosis.verdicts.iter().filter(|v| v.best).map(|v| v.nic.as_str()).collect();
        best.sort_unstable();
        best.dedup();
        assert_eq!(best.len(), count, "{name}");
    }
}

#[test]
fn every_machine_can_be_saved_and_read_again() {
    for name in machines::NAMES {
        let facts = machines::machine(name).unwrap();
        let again = nobounce_topology::facts::Facts::from_json(&facts.to_json()).unwrap();
        for (one, other) in facts.to_json().lines().zip(again.to_json().lines()) {
            assert_eq!(one, other, "{name}");
        }
        assert!(facts == again, "{name}: something is not in the file");
        // Without names and addresses the answer is the same.
        let (open, closed) = (diagnose(&facts), diagnose(&facts.clone().redacted()));
        assert_eq!(open.ids(), closed.ids(), "{name}");
        assert_eq!(open.verdicts, closed.verdicts, "{name}");
    }
}

#[test]
fn no_finding_lacks_its_parts() {
    for name in machines::NAMES {
        for finding in diagnose(&machines::machine(name).unwrap()).findings {
            assert!(!finding.title.is_empty() && !finding.why.is_empty(), "{finding:?}");
            assert!(!finding.evidence.is_empty(), "{finding:?}");
            assert!(finding.severity <= Severity::Info || !finding.fix.is_empty(), "{finding:?}");
        }
    }
}
