//! Rails in one subnet, and rails without a route: what the kernel's settings make of them.

#[path = "common/edit.rs"]
mod edit;

use nobounce_diagnose::diagnose;
use nobounce_diagnose::finding::Finding;
use nobounce_topology::facts::Facts;
use nobounce_topology::machines;
use serde_json::{Value, json};

/// Two rails of a machine with these facts.
fn rails(both: &[(&str, Value)], second: &[(&str, Value)]) -> Facts {
    let path = |nic: &str, field: &str| format!("/nics/name={nic}/ports/0/netdev/{field}");
    let both = both
        .iter()
        .flat_map(|(field, value)| ["mlx5_0", "mlx5_1"].map(|nic| (path(nic, field), value.clone())));
    let second = second.iter().map(|(field, value)| (path("mlx5_1", field), value.clone()));
    let set: Vec<(String, Value)> = both.chain(second).collect();
    edit::edit(&machines::machine("hgx-h100-roce").unwrap(), &[], &set, "rails")
}

fn settings(ignore: u32, announce: u32, rp_filter: u32) -> Value {
    json!({"arp_ignore": ignore, "arp_announce": announce, "arp_filter": false, "rp_filter": rp_filter})
}

/// The one finding, which is the same without names.
fn only(facts: &Facts) -> Finding {
    let mut found = diagnose(facts).findings;
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(diagnose(&facts.clone().redacted()).ids(), diagnose(facts).ids());
    found.remove(0)
}

fn one_subnet(ip: Value) -> Vec<(&'static str, Value)> {
    vec![("subnets", json!(["10.0.0.0/24"])), ("ip", ip)]
}

#[test]
fn interfaces_that_answer_for_each_other_are_told_apart_by_commands() {
    let mut both = one_subnet(settings(0, 0, 2));
    both.push(("sends_by", json!("eth0")));
    let found = only(&rails(&both, &[]));
    assert_eq!((found.id, found.severity.name()), ("rails-one-subnet", "warning"));
    assert!(found.title.contains("answer ARP for each other"), "{found:#?}");
    assert!(
        found.fix[0]
            .to_string()
            .starts_with("for d in eth0 eth1; do sudo sysctl -w net.ipv4.conf.$d.arp_ignore=1"),
        "{found:#?}"
    );
    assert!(found.fix[1].to_string().contains("ip route replace 10.0.0.0/24 dev $d table $t"), "{found:#?}");
    assert!(found.evidence.iter().any(|seen| seen.value == "leaves by eth0"), "{found:#?}");
}

#[test]
fn a_strict_filter_stops_rails_whose_route_is_another_one() {
    let mut both = one_subnet(settings(1, 2, 1));
    both.push(("sends_by", json!("eth0")));
    let found = only(&rails(&both, &[]));
    assert!(found.title.contains("reverse-path filter"), "{found:#?}");
    // With a route of its own the filter passes everything.
    let facts = rails(&both, &[("sends_by", json!("eth1"))]);
    assert!(diagnose(&facts).findings.is_empty(), "{:#?}", diagnose(&facts).findings);
}

#[test]
fn routes_by_one_rail_concern_tcp() {
    let mut both = one_subnet(settings(1, 2, 2));
    both.push(("sends_by", json!("eth0")));
    let found = only(&rails(&both, &[]));
    assert_eq!(found.severity.name(), "info");
    assert!(found.title.contains("leave by one") && found.why.contains("TCP"), "{found:#?}");
    assert!(!found.fix[0].to_string().contains("sysctl"), "{found:#?}");
}

#[test]
fn settings_that_are_not_read_are_unknown() {
    let found = only(&rails(&[("subnets", json!(["10.0.0.0/24"]))], &[]));
    assert_eq!((found.id, found.severity.name()), ("rails-one-subnet", "unknown"));
    // Of one rail alone, too.
    let mut both = one_subnet(settings(1, 2, 2));
    both.push(("sends_by", json!("eth0")));
    let found = only(&rails(&both, &[("ip", json!({"unread": "Permission denied"}))]));
    assert_eq!(found.severity.name(), "unknown");
}

#[test]
fn a_rail_without_a_route_is_named() {
    let gateway = |second: Value, subnet: &str| {
        let second = [("gateway", second), ("subnets", json!([subnet])), ("sends_by", json!("eth1"))];
        rails(
            &[("gateway", json!(true)), ("subnets", json!(["10.0.0.0/31"])), ("sends_by", json!("eth0"))],
            &second,
        )
    };
    let found = only(&gateway(json!(false), "10.0.0.2/31"));
    assert_eq!((found.id, found.severity.name()), ("rails-no-route", "warning"));
    assert!(
        found.fix[0].to_string().contains("for d in eth0 eth1; do ip route show table all dev $d; done"),
        "{found:#?}"
    );
    // A larger subnet may hold all peers.
    assert_eq!(only(&gateway(json!(false), "10.0.1.0/24")).severity.name(), "info");
    let unread = json!({"unread": "the main table has none, and other tables are not in /proc"});
    assert_eq!(only(&gateway(unread, "10.0.1.0/24")).severity.name(), "unknown");
    assert!(diagnose(&gateway(json!(true), "10.0.1.0/24")).findings.is_empty());
}
