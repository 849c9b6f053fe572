//! Memory nodes of one socket, and peer access between GPUs.

#[path = "common/edit.rs"]
mod edit;

use nobounce_diagnose::diagnose;
use nobounce_diagnose::finding::Finding;
use nobounce_topology::facts::Facts;
use nobounce_topology::machines;
use serde_json::{Value, json};

/// Two sockets of two memory nodes each: GPUs on the first of a socket, its adapter on the second.
fn nps2(more: &[(&str, Value)]) -> Facts {
    let numa: Vec<Value> = (0..4)
        .map(|id| json!({"id": id, "cpus": format!("{}-{}", 32 * id, 32 * id + 31), "socket": id / 2}))
        .collect();
    let place = [("21", 0), ("41", 0), ("61", 1), ("a1", 2), ("c1", 2), ("e1", 3)];
    let mut set = vec![("/machine/numa".to_owned(), json!(numa))];
    set.extend(place.map(|(bus, node)| (format!("/pci/address=0000:{bus}:00.0/numa_node"), json!(node))));
    set.extend(more.iter().map(|(path, value)| ((*path).to_owned(), value.clone())));
    edit::edit(&machines::machine("dual-socket").unwrap(), &[], &set, "nodes")
}

fn find<'a>(found: &'a [Finding], id: &str) -> Option<&'a Finding> {
    found.iter().find(|finding| finding.id == id)
}

#[test]
fn memory_nodes_of_one_socket_are_not_two_sockets() {
    let facts = nps2(&[]);
    assert_eq!(facts.machine.nodes_per_socket(), Some(2));
    let diagnosis = diagnose(&facts);
    assert!(find(&diagnosis.findings, "far-nic").is_none(), "{:#?}", diagnosis.findings);
    let found = find(&diagnosis.findings, "nodes-per-socket").unwrap();
    assert_eq!(found.severity.name(), "warning");
    assert!(found.title.contains("(NPS2)") && found.fix[0].to_string().contains("NPS1"), "{found:#?}");
    assert!(
        found.fix[1].to_string().contains("NCCL_NET_GDR_LEVEL=SYS") && found.devices.len() == 4,
        "{found:#?}"
    );
    // Each GPU gets the adapter of its socket.
    for verdict in diagnosis.verdicts.iter().filter(|verdict| verdict.best) {
        let wanted = if verdict.gpu.as_str() < "0000:80" { "mlx5_0" } else { "mlx5_1" };
        assert_eq!(verdict.nic, wanted, "{verdict:?}");
    }
}

#[test]
fn where_nccl_does_not_stage_the_nodes_are_a_remark() {
    let found = diagnose(&nps2(&[("/environment/NCCL_NET_GDR_LEVEL", json!("SYS"))])).findings;
    assert_eq!(find(&found, "nodes-per-socket").unwrap().severity.name(), "info");
}

#[test]
fn nodes_without_a_known_socket_stay_far() {
    let facts = nps2(&[("/machine/numa/*/socket", Value::Null)]);
    assert_eq!(facts.machine.nodes_per_socket(), None);
    let found = diagnose(&facts).findings;
    assert!(find(&found, "nodes-per-socket").is_none() && find(&found, "far-nic").is_some(), "{found:#?}");
}

/// GPU peers of a machine with these two pairs, found.
fn peers(pairs: Value) -> Vec<Finding> {
    let set = [("/gpu_peers".to_owned(), pairs)];
    let facts = edit::edit(&machines::machine("dgx-h100").unwrap(), &[], &set, "peers");
    assert_eq!(diagnose(&facts.clone().redacted()).ids(), diagnose(&facts).ids());
    let mut found = diagnose(&facts).findings;
    found.retain(|finding| finding.id == "gpu-peers");
    found
}

fn pair(access: Value, denied: Value) -> Value {
    let gpus = machines::machine("dgx-h100").unwrap().gpus;
    json!({"one": gpus[0].address, "other": gpus[1].address, "access": access, "denied": denied})
}

#[test]
fn missing_peer_access_is_reported_by_its_reason() {
    assert!(peers(json!([pair(json!(true), Value::Null)])).is_empty());
    let off = peers(json!([pair(json!(false), json!("disabled"))]));
    assert_eq!(off[0].severity.name(), "warning");
    assert!(off[0].title.starts_with("GPU 0-GPU 1: no peer access; a key"), "{off:#?}");
    assert!(off[0].fix[0].to_string().contains("/etc/modprobe.d") && off[0].needs_reboot, "{off:#?}");
    let model = peers(json!([pair(json!(false), json!("gpu"))]));
    assert_eq!((model[0].severity.name(), model[0].fix.len()), ("info", 0));
}

#[test]
fn a_divided_gpu_has_its_own_finding() {
    let pairs = json!([pair(json!(false), json!("disabled"))]);
    let set = [("/gpu_peers".to_owned(), pairs), ("/gpus/0/mig".to_owned(), json!(true))];
    let facts = edit::edit(&machines::machine("dgx-h100").unwrap(), &[], &set, "divided");
    let found = diagnose(&facts).findings;
    assert!(find(&found, "mig").is_some() && find(&found, "gpu-peers").is_none(), "{found:#?}");
}

#[test]
fn peer_access_that_is_not_known_is_unknown() {
    let unread = json!({"unread": "NVML error 999: Unknown Error"});
    let one = peers(json!([pair(unread.clone(), Value::Null)]));
    assert_eq!(one[0].severity.name(), "unknown");
    assert!(one[0].evidence[0].value.contains("999"), "{one:#?}");
    assert_eq!(peers(unread)[0].severity.name(), "unknown");
}
