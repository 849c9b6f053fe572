//! GeForce and TITAN cards whose driver was not asked: nothing is promised, and nothing is excused.

#[path = "common/edit.rs"]
mod edit;

use nobounce_diagnose::diagnose;
use nobounce_diagnose::verdict::PathKind;
use nobounce_topology::facts::Facts;
use nobounce_topology::machines;
use serde_json::{Value, json};

/// A machine with such a card, without CUDA's attribute 116 and without a registration.
fn card(name: &str, remove: &[&str], more: &[(&str, Value)]) -> Facts {
    let unread = json!({"unread": "no libcuda"});
    let mut set = vec![
        ("/gpus/*/name", json!(name)),
        ("/gpus/*/gpudirect_rdma", unread.clone()),
        ("/gpus/*/export_probe", unread),
        ("/registrations", json!([])),
    ];
    set.extend(more.iter().cloned());
    let set: Vec<(String, Value)> = set.into_iter().map(|(path, value)| (path.to_owned(), value)).collect();
    let remove: Vec<String> = remove.iter().map(|path| (*path).to_owned()).collect();
    edit::edit(&machines::machine("workstation").unwrap(), &remove, &set, name)
}

#[test]
fn the_attribute_of_dma_buf_does_not_prove_the_class() {
    for name in ["NVIDIA GeForce RTX 4090", "NVIDIA TITAN RTX"] {
        let diagnosis = diagnose(&card(name, &[], &[("/gpus/*/dma_buf", json!(true))]));
        let paths: Vec<_> = diagnosis.verdicts.iter().map(|verdict| verdict.path).collect();
        assert_eq!(paths, [PathKind::Unknown], "{name}: {:#?}", diagnosis.verdicts);
    }
    // Other models are not excluded, and a registration decides.
    let other = diagnose(&card("NVIDIA RTX 6000 Ada Generation", &[], &[("/gpus/*/dma_buf", json!(true))]));
    assert_eq!(other.verdicts[0].path, PathKind::Direct, "{:#?}", other.verdicts);
}

#[test]
fn an_assumed_class_hides_no_other_fault() {
    let more = [
        ("/gpus/*/dma_buf", json!(false)),
        ("/kernel/nvidia/open", json!(false)),
        ("/kernel/peer_memory_clients", json!([])),
    ];
    let name = "NVIDIA GeForce RTX 3090";
    let diagnosis = diagnose(&card(name, &["/kernel/modules/nvidia_peermem"], &more));
    let find = |id: &str| diagnosis.findings.iter().find(|finding| finding.id == id);
    assert!(find("gpu-class").is_some(), "{:#?}", diagnosis.findings);
    assert_eq!(find("peermem-not-loaded").unwrap().under, None, "{:#?}", diagnosis.findings);
    assert!(diagnosis.direct_is_lost);
    // The driver's word is the whole cause.
    let mut facts = card(name, &["/kernel/modules/nvidia_peermem"], &more);
    facts.gpus[0].gpudirect_rdma = nobounce_topology::facts::Read::Yes(false);
    let diagnosis = diagnose(&facts);
    assert!(diagnosis.findings[0].id == "gpu-class" && !diagnosis.direct_is_lost, "{diagnosis:#?}");
}
