//! Widths of InfiniBand links by both of their ends: the commands that mend them.

#[path = "common/edit.rs"]
mod edit;

use nobounce_diagnose::diagnose;
use nobounce_diagnose::finding::Finding;
use nobounce_topology::machines;
use serde_json::{Value, json};

/// The finding about an adapter's port with these ends, at 2 of 4 lanes.
fn width(own: &Value, peer: &Value) -> Finding {
    let port = "/nics/name=mlx5_1/ports/0/";
    let set: Vec<(String, Value)> = [
        ("rate_gbps", json!(200.0)),
        ("lanes", json!(2)),
        ("own_end", own.clone()),
        ("peer_end", peer.clone()),
    ]
    .map(|(field, value)| (format!("{port}{field}"), value))
    .to_vec();
    let facts = edit::edit(&machines::machine("dgx-h100").unwrap(), &[], &set, "width");
    let mut found = diagnose(&facts).findings;
    assert_eq!(found.len(), 1, "{found:#?}");
    found.remove(0)
}

fn end(port: u32, enabled: &[u32]) -> Value {
    json!({"port": port, "switch": port > 1, "supported": [1, 2, 4], "enabled": enabled, "active": 2})
}

#[test]
fn failed_lanes_name_the_cable_of_the_adapter() {
    let found = width(&end(1, &[1, 2, 4]), &end(17, &[1, 2, 4]));
    assert!(found.title.contains("2 lanes") && found.title.contains("both ends enable 4"), "{found:#?}");
    assert!(
        found.fix[0].to_string().contains("mlxlink -d 0000:") && found.devices == ["mlx5_1"],
        "{found:#?}"
    );
    let peer = &found.evidence[1];
    assert!(peer.source.contains("switch's port 17"), "{peer:?}");
    assert_eq!(peer.value, "supported 1X 2X 4X, enabled 1X 2X 4X, active 2X");
}

#[test]
fn a_width_that_an_end_leaves_out_is_enabled_at_that_end() {
    let found = width(&end(1, &[1, 2, 4]), &end(17, &[1, 2]));
    let tool = "sudo ibportstate -C mlx5_1 -P 1 -D";
    assert_eq!(texts(&found.fix), [format!("{tool} 0,1 17 width 19 && {tool} 0,1 17 reset")]);
    let found = width(&end(1, &[1, 2]), &json!({"unread": "Connection timed out"}));
    assert_eq!(texts(&found.fix), [format!("{tool} 0 1 width 19")]);
    assert!(found.evidence[1].value.contains("timed out"), "{found:#?}");
}

#[test]
fn an_end_that_is_not_read_leaves_the_width_unknown() {
    let unread = json!({"unread": "/dev/infiniband/umad1: Permission denied (os error 13)"});
    let port = "/nics/*/ports/0/";
    let set: Vec<(String, Value)> =
        [("rate_gbps", json!(200.0)), ("lanes", json!(2)), ("own_end", unread.clone()), ("peer_end", unread)]
            .map(|(field, value)| (format!("{port}{field}"), value))
            .to_vec();
    let facts = edit::edit(&machines::machine("dgx-h100").unwrap(), &[], &set, "width");
    let found = diagnose(&facts).findings;
    assert_eq!((found[0].id, found[0].severity.name()), ("port-width", "unknown"), "{found:#?}");
    assert!(found[0].evidence[1].value.contains("Permission denied"), "{found:#?}");
}

fn texts(fixes: &[nobounce_diagnose::finding::Fix]) -> Vec<String> {
    fixes.iter().map(ToString::to_string).collect()
}
