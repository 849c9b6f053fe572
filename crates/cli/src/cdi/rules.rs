//! What engines require of a file: the rules of the CDI specification 1.1.0, and absolute paths,
//! which OCI runtimes require.

use std::collections::BTreeSet;
use std::path::Path;

use super::spec::{DeviceNode, Edits, Hook, Mount, Spec};

/// Oldest first. Engines accept no other text.
const VERSIONS: [&str; 10] =
    ["0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0"];

const HOOKS: [&str; 6] =
    ["prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"];

/// Why engines refuse the file.
pub(super) fn broken(spec: &Spec) -> Vec<String> {
    let mut problems = Vec::new();
    version(spec, &mut problems);
    let (vendor, class) = spec.kind.split_once('/').unwrap_or(("", &spec.kind));
    if ![vendor, class].into_iter().all(|part| is_name(part, false, "_-.")) {
        problems.push(format!("kind {:?}: expected VENDOR/CLASS, such as nobounce.dev/nic", spec.kind));
    }
    if spec.devices.is_empty() {
        problems.push("it has no device".to_owned());
    }
    edits("containerEdits", &spec.container_edits, &mut problems);
    let mut names = BTreeSet::new();
    for device in &spec.devices {
        if !is_name(&device.name, true, "_-.:") {
            problems.push(format!(
                "device {:?}: a name has letters, digits and \"_-.:\", and starts and ends with a letter or digit",
                device.name
            ));
        }
        if !names.insert(&device.name) {
            problems.push(format!("device {} is defined twice", device.name));
        }
        if device.container_edits == Edits::default() {
            problems.push(format!("device {} changes nothing in a container", device.name));
        }
        edits(&format!("device {}", device.name), &device.container_edits, &mut problems);
    }
    problems
}

/// The version is known, and has the fields that are used.
fn version(spec: &Spec, problems: &mut Vec<String>) {
    let wanted = spec.cdi_version.strip_prefix('v').unwrap_or(&spec.cdi_version);
    let Some(given) = VERSIONS.iter().position(|version| *version == wanted) else {
        problems.push(format!(
            "cdiVersion {:?}: expected one of {}",
            spec.cdi_version,
            VERSIONS[2..].join(", ")
        ));
        return;
    };
    let all = || spec.devices.iter().map(|device| &device.container_edits).chain([&spec.container_edits]);
    let rdt = || all().filter_map(|edits| edits.intel_rdt.as_ref());
    let has_annotations =
        !spec.annotations.is_empty() || spec.devices.iter().any(|device| !device.annotations.is_empty());
    let uses = [
        ("1.1.0", "netDevices", all().any(|edits| !edits.net_devices.is_empty())),
        ("1.1.0", "schemata", rdt().any(|rdt| !rdt.schemata.is_empty() || rdt.enable_monitoring)),
        ("0.7.0", "intelRdt", rdt().next().is_some()),
        ("0.7.0", "additionalGids", all().any(|edits| !edits.additional_gids.is_empty())),
        ("0.6.0", "annotations", has_annotations),
        (
            "0.6.0",
            "a dot in the class",
            spec.kind.split_once('/').is_some_and(|(_, class)| class.contains('.')),
        ),
        (
            "0.5.0",
            "a device name that starts with a digit",
            spec.devices.iter().any(|device| device.name.starts_with(|first: char| first.is_ascii_digit())),
        ),
        (
            "0.5.0",
            "hostPath of a device node",
            all().any(|edits| edits.device_nodes.iter().any(|node| !node.host_path.is_empty())),
        ),
        (
            "0.4.0",
            "type of a mount",
            all().any(|edits| edits.mounts.iter().any(|mount| !mount.kind.is_empty())),
        ),
    ];
    // Engines take 0.3.0 for the least that a file needs.
    let needed =
        uses.iter().find(|(_, _, is_used)| *is_used).map_or(("0.3.0", "a file"), |(v, what, _)| (v, what));
    if VERSIONS.iter().position(|version| *version == needed.0).is_some_and(|needed| needed > given) {
        problems.push(format!("cdiVersion {:?}: {} needs {} or later", spec.cdi_version, needed.1, needed.0));
    }
}

fn edits(of: &str, edits: &Edits, problems: &mut Vec<String>) {
    let mut say = |problem: String| problems.push(format!("{of}: {problem}"));
    variables(&edits.env, &mut say);
    edits.mounts.iter().for_each(|mount| check_mount(mount, &mut say));
    edits.device_nodes.iter().for_each(|node| check_node(node, &mut say));
    edits.hooks.iter().for_each(|hook| check_hook(hook, &mut say));
    let (mut on_host, mut inside) = (BTreeSet::new(), BTreeSet::new());
    for device in &edits.net_devices {
        let (host, name) = (&device.host_interface_name, &device.name);
        if host.is_empty() || name.is_empty() {
            say("netDevices: hostInterfaceName and name are required".to_owned());
        } else if !on_host.insert(host) | !inside.insert(name) {
            say(format!("netDevices: {host} or {name} is given twice"));
        }
    }
    if let Some(rdt) = &edits.intel_rdt {
        let id = rdt.clos_id.as_str();
        if id != "/" && (id == "." || id == ".." || id.len() >= 4096 || id.contains(['/', '\n'])) {
            say(format!("intelRdt: closID {id:?} is no file name"));
        }
    }
}

fn variables(env: &[String], say: &mut impl FnMut(String)) {
    for set in env.iter().filter(|set| set.find('=').is_none_or(|at| at == 0)) {
        say(format!("env {set:?}: expected NAME=VALUE"));
    }
}

fn check_mount(mount: &Mount, say: &mut impl FnMut(String)) {
    // Of another type, such as tmpfs, it has no folder on the host.
    let is_bind = ["", "bind", "none"].contains(&mount.kind.as_str());
    if mount.host_path.is_empty() || is_bind && !is_absolute(&mount.host_path) {
        say(format!("hostPath {:?} of a mount: expected an absolute path", mount.host_path));
    }
    if !is_absolute(&mount.container_path) {
        say(format!("containerPath {:?} of a mount: expected an absolute path", mount.container_path));
    }
}

fn check_node(node: &DeviceNode, say: &mut impl FnMut(String)) {
    if !is_absolute(&node.path) || !(node.host_path.is_empty() || is_absolute(&node.host_path)) {
        say(format!("device node {:?}: expected absolute paths", node.path));
    }
    if !["", "b", "c", "u", "p"].contains(&node.kind.as_str()) {
        say(format!("device node {}: type {:?}: expected b, c, u or p", node.path, node.kind));
    }
    if node.permissions != "none" && !node.permissions.bytes().all(|letter| b"rwm".contains(&letter)) {
        say(format!("device node {}: permissions {:?}: expected r, w, m", node.path, node.permissions));
    }
}

fn check_hook(hook: &Hook, say: &mut impl FnMut(String)) {
    if !HOOKS.contains(&hook.hook_name.as_str()) {
        say(format!("hookName {:?}: expected one of {}", hook.hook_name, HOOKS.join(", ")));
    }
    if !is_absolute(&hook.path) {
        say(format!("path {:?} of hook {}: expected an absolute path", hook.path, hook.hook_name));
    }
    variables(&hook.env, say);
}

fn is_absolute(path: &str) -> bool {
    Path::new(path).is_absolute()
}

/// Letters, digits and some signs; the last one, and the first one, is a letter or digit.
fn is_name(text: &str, may_start_with_digit: bool, signs: &str) -> bool {
    let (Some(first), Some(last)) = (text.chars().next(), text.chars().last()) else { return false };
    (first.is_ascii_alphabetic() || may_start_with_digit && first.is_ascii_digit())
        && last.is_ascii_alphanumeric()
        && text.chars().all(|sign| sign.is_ascii_alphanumeric() || signs.contains(sign))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn all_fields() -> Value {
        json!({
            "cdiVersion": "1.1.0", "kind": "nobounce.dev/nic", "annotations": { "a": "b" },
            "containerEdits": {
                "env": ["A=b"],
                "deviceNodes": [{ "path": "/dev/a", "hostPath": "/dev/b", "type": "c", "major": 1, "minor": 2,
                    "fileMode": 384, "permissions": "rw", "uid": 0, "gid": 0 }],
                "netDevices": [{ "hostInterfaceName": "eth1", "name": "eth0" }],
                "hooks": [{ "hookName": "createContainer", "path": "/bin/a", "args": ["a"], "env": ["A=b"], "timeout": 5 }],
                "mounts": [{ "hostPath": "/a", "containerPath": "/b", "options": ["ro"], "type": "bind" }],
                "intelRdt": { "closID": "a", "l3CacheSchema": "b", "memBwSchema": "c", "schemata": [], "enableMonitoring": true },
                "additionalGids": [5],
            },
            "devices": [{ "name": "0", "annotations": { "a": "b" }, "containerEdits": { "env": ["A=b"] } }],
        })
    }

    fn told(change: impl Fn(&mut Value)) -> String {
        let mut value = all_fields();
        change(&mut value);
        let spec: Result<Spec, _> = serde_json::from_value(value);
        spec.map_or_else(|error| error.to_string(), |spec| broken(&spec).join("\n"))
    }

    #[test]
    fn all_fields_of_the_specification_are_accepted() {
        assert_eq!(told(|_| {}), "");
        let other_spelling = |value: &mut Value| {
            let edits = value["containerEdits"].as_object_mut().unwrap();
            let groups = edits.remove("additionalGids").unwrap();
            edits.insert("additionalGIDs".to_owned(), groups);
        };
        assert_eq!(told(other_spelling), "");
        assert!(told(|value| value["hook"] = 1.into()).contains("unknown field"));
        assert!(
            told(|value| value["containerEdits"]["deviceNodes"][0]["mode"] = 1.into())
                .contains("unknown field")
        );
    }

    #[test]
    fn what_engines_refuse_is_named() {
        type Change<'a> = &'a dyn Fn(&mut Value);
        let cases: [(Change<'_>, &str); 19] = [
            (&|value| value["cdiVersion"] = "".into(), "cdiVersion \"\""),
            (&|value| value["cdiVersion"] = "9.9.9".into(), "cdiVersion \"9.9.9\""),
            (&|value| value["cdiVersion"] = "1.0.0".into(), "netDevices needs 1.1.0"),
            (&|value| value["kind"] = "nic".into(), "expected VENDOR/CLASS"),
            (&|value| value["kind"] = "1.dev/nic".into(), "expected VENDOR/CLASS"),
            (&|value| value["devices"] = json!([]), "no device"),
            (&|value| value["devices"][0]["name"] = "".into(), "device \"\""),
            (&|value| value["devices"][0]["name"] = "nb0-".into(), "device \"nb0-\""),
            (&|value| value["devices"][1] = value["devices"][0].clone(), "defined twice"),
            (&|value| value["devices"][0]["containerEdits"] = json!({}), "changes nothing"),
            (&|value| value["devices"][0]["containerEdits"]["env"][0] = "=b".into(), "NAME=VALUE"),
            (&|value| value["containerEdits"]["mounts"][0]["hostPath"] = "a".into(), "hostPath \"a\""),
            (
                &|value| value["containerEdits"]["mounts"][0]["containerPath"] = "".into(),
                "containerPath \"\"",
            ),
            (&|value| value["containerEdits"]["deviceNodes"][0]["path"] = "a".into(), "absolute paths"),
            (&|value| value["containerEdits"]["deviceNodes"][0]["type"] = "x".into(), "type \"x\""),
            (&|value| value["containerEdits"]["deviceNodes"][0]["permissions"] = "x".into(), "permissions"),
            (&|value| value["containerEdits"]["hooks"][0]["hookName"] = "late".into(), "hookName \"late\""),
            (&|value| value["containerEdits"]["netDevices"][0]["name"] = "".into(), "required"),
            (&|value| value["containerEdits"]["intelRdt"]["closID"] = "a/b".into(), "closID"),
        ];
        for (change, part) in cases {
            // A list grows by one element.
            let with_room = |value: &mut Value| {
                if part == "defined twice" {
                    value["devices"].as_array_mut().unwrap().push(Value::Null);
                }
                change(value);
            };
            assert!(told(with_room).contains(part), "{part}: {}", told(with_room));
        }
        let old = |value: &mut Value| {
            *value = json!({ "cdiVersion": "0.3.0", "kind": "a.b/c",
                "devices": [{ "name": "d", "containerEdits": { "env": ["A=b"] } }] });
        };
        assert_eq!(told(old), "");
        assert!(
            told(|value| {
                old(value);
                value["devices"][0]["name"] = "1".into()
            })
            .contains("needs 0.5.0")
        );
    }
}
