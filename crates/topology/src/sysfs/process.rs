//! The process: limits, rights, container, device files.

use super::Root;
use crate::facts::{DeviceNode, Probe, Process, Read};

/// CAP_IPC_LOCK.
const IPC_LOCK: u32 = 14;

/// The process we are.
pub(super) fn process(root: &Root) -> Process {
    let status = root.text("/proc/self/status");
    let field = |name: &str| -> Option<String> {
        let text = status.as_ref().ok()?;
        text.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned()))
    };
    let unread = || {
        status.as_ref().err().map_or_else(|| "it is not in /proc/self/status".to_owned(), ToString::to_string)
    };
    let or_unread = |value: Option<String>| value.map_or_else(|| Read::no(unread()), Read::Yes);
    Process {
        uid: field("Uid")
            .and_then(|line| line.split_whitespace().nth(1)?.parse().ok())
            .map_or_else(|| Read::no(unread()), Read::Yes),
        memlock_bytes: memlock(root, 0),
        memlock_hard_bytes: memlock(root, 1),
        ipc_lock: field("CapEff")
            .and_then(|mask| u64::from_str_radix(&mask, 16).ok())
            .map_or_else(|| Read::no(unread()), |mask| Read::Yes(mask >> IPC_LOCK & 1 == 1)),
        user_namespace: user_namespace(root),
        ipc_namespace: namespace(root, "ipc", "ipc:[4026531839]"),
        pid_namespace: namespace(root, "pid", "pid:[4026531836]"),
        container: container(root),
        cpus: or_unread(field("Cpus_allowed_list")),
        mlock_probe: Read::default(),
    }
}

/// The soft limit of locked memory (0), or the hard one (1).
fn memlock(root: &Root, column: usize) -> Read<Option<u64>> {
    let text = match root.text("/proc/self/limits") {
        Ok(text) => text,
        Err(error) => return Read::no(error.to_string()),
    };
    let limit =
        text.lines().find_map(|line| line.strip_prefix("Max locked memory")?.split_whitespace().nth(column));
    match limit {
        Some("unlimited") => Read::Yes(None),
        Some(number) => number
            .parse()
            .map_or_else(|_| Read::no(format!("{number:?} is no limit")), |n| Read::Yes(Some(n))),
        None => Read::no("it is not in /proc/self/limits"),
    }
}

/// In the first user namespace every number maps to itself.
fn user_namespace(root: &Root) -> Read<bool> {
    match root.text("/proc/self/uid_map") {
        Ok(text) => {
            let words: Vec<&str> = text.split_whitespace().collect();
            Read::Yes(words != ["0", "0", "4294967295"])
        }
        Err(error) => Read::no(error.to_string()),
    }
}

/// Whether a namespace is another than the first of the machine, whose number the kernel fixes.
fn namespace(root: &Root, kind: &str, first: &str) -> Read<bool> {
    let link = root.link_name(&format!("/proc/self/ns/{kind}"));
    match link {
        Ok(name) => Read::Yes(name != first),
        // Copies of a machine's files have no such links.
        Err(_) if !root.is_live() => Read::default(),
        Err(error) => Read::no(format!("/proc/self/ns/{kind}: {error}")),
    }
}

fn container(root: &Root) -> Read<Option<String>> {
    let found = |kind: &str| Read::Yes(Some(kind.to_owned()));
    if root.exists("/run/.containerenv") {
        return found("podman");
    }
    if root.exists("/.dockerenv") {
        return found("docker");
    }
    if root.exists("/var/run/secrets/kubernetes.io") {
        return found("kubernetes");
    }
    if root.exists("/.singularity.d") || root.exists("/singularity") {
        return found("singularity");
    }
    match root.text("/proc/1/cgroup") {
        Ok(text) => {
            let kinds = [
                ("kubepods", "kubernetes"),
                ("docker", "docker"),
                ("containerd", "containerd"),
                ("lxc", "lxc"),
                ("libpod", "podman"),
            ];
            Read::Yes(kinds.iter().find(|(word, _)| text.contains(word)).map(|(_, kind)| (*kind).to_owned()))
        }
        Err(error) => Read::no(format!("/proc/1/cgroup: {error}")),
    }
}

/// Device files that matter and exist, each opened once.
pub(super) fn devices(root: &Root) -> Read<Vec<DeviceNode>> {
    let names = match root.names("/dev") {
        Ok(names) => names,
        Err(error) => return Read::no(format!("/dev: {error}")),
    };
    let is_gpu = |name: &str| {
        matches!(name, "nvidiactl" | "nvidia-uvm" | "gdrdrv" | "kfd")
            || name
                .strip_prefix("nvidia")
                .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let mut paths: Vec<String> =
        names.iter().filter(|name| is_gpu(name)).map(|name| format!("/dev/{name}")).collect();
    let verbs = root.names("/dev/infiniband").unwrap_or_default();
    let is_verbs = |name: &str| name.starts_with("uverbs") || name == "rdma_cm";
    paths.extend(verbs.iter().filter(|name| is_verbs(name)).map(|name| format!("/dev/infiniband/{name}")));
    paths.truncate(512);
    Read::Yes(
        paths
            .into_iter()
            .map(|path| {
                let open = match root.open_device(&path) {
                    Ok(()) => Probe::worked(""),
                    Err(error) => Probe::failed(error.raw_os_error(), error.to_string()),
                };
                DeviceNode { path, open }
            })
            .collect(),
    )
}
