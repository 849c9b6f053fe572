//! What the process may do: device files, locked memory, CPUs.

use std::collections::BTreeSet;

use super::{bytes, list, one_or};
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Analysis;
use nobounce_topology::cpu_list;
use nobounce_topology::facts::{Process, Read};
use nobounce_topology::methods::Answer;
use nobounce_topology::usable;

/// With less, the queues of one adapter alone do not fit.
const TOO_LITTLE: u64 = 64 << 20;
/// A hard limit that is worth raising the soft one to: most of a GPU's memory.
const ENOUGH: u64 = 16 << 30;

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    device_files(analysis, &mut found);
    connection_manager(analysis, &mut found);
    memlock(analysis, &mut found);
    cpus(analysis, &mut found);
    found
}

fn device_files(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let unread: Vec<_> = facts
        .nics
        .iter()
        .filter_map(|nic| match usable::nic(facts, nic) {
            Answer::Unknown(why) => Some((nic.name.clone(), why)),
            _ => None,
        })
        .collect();
    if let Some((_, why)) = unread.first() {
        let names: Vec<_> = unread.iter().map(|(name, _)| name.clone()).collect();
        found.push(
            Finding::new("dev-unread", Severity::Unknown, format!("access to {} is unknown", list(&names)))
                .why("Without its device file programs use TCP.")
                .seen("/dev/infiniband", why.clone())
                .fix(Fix::both().run("ls -l /dev/infiniband"))
                .on(names),
        );
    }
    let mut seen = BTreeSet::new();
    for nic in &facts.nics {
        let Answer::No(id, why) = usable::nic(facts, nic) else { continue };
        if !seen.insert(id) {
            continue;
        }
        let hit: Vec<String> = facts
            .nics
            .iter()
            .filter(|nic| matches!(usable::nic(facts, nic), Answer::No(other, _) if other == id))
            .map(|nic| nic.name.clone())
            .collect();
        let who = list(&hit);
        // Where some adapters work, the others may belong to another tenant: a container often gets
        // only one adapter.
        let some_work = facts.nics.iter().any(|nic| usable::nic(facts, nic).is_yes());
        let severity = match id {
            // The file was left out on purpose; a file that refuses to open was not.
            "no-dev-infiniband" if some_work && facts.is_container() && !is_missed(analysis, &hit) => {
                Severity::Info
            }
            _ if some_work => Severity::Warning,
            _ => Severity::Error,
        };
        let finding = match id {
            "no-dev-infiniband" => Finding::new("no-dev-infiniband", severity, format!("{who}: /sys shows {}, but {why}", one_or(&hit, "it", "them")))
                .why("NCCL and UCX cannot open the adapter and silently use TCP.")
                .seen("/dev/infiniband", why.clone())
                .fix(Fix::container().option("--device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1").remark("Kubernetes: an RDMA device plugin and its resource in the pod")),
            "dev-permission" => Finding::new("dev-permission", severity, format!("{who}: {why}"))
                .why("Unprivileged users cannot open the adapter: NCCL and UCX use TCP.")
                .seen("open", why.clone())
                .fix(Fix::host().run("sudo chmod 0666 /dev/infiniband/uverbs* /dev/infiniband/rdma_cm").remark("permanently: the udev rules of rdma-core, or the group rdma"))
                .root(),
            "device-cgroup" => Finding::new("device-cgroup", severity, format!("{who}: {why}"))
                .why("The file exists, but the container's device cgroup denies it: a bind mount alone is not enough.")
                .seen("open", why.clone())
                .fix(Fix::container().option("--device /dev/infiniband").remark("-v /dev/infiniband alone does not allow it; or").option("--device-cgroup-rule 'c 231:* rwm'")),
            "no-libibverbs" => Finding::new("no-libibverbs", severity, "libibverbs is not installed here: programs cannot use the adapters")
                .why("NCCL, UCX and libfabric load it at startup; without it they silently use TCP sockets.")
                .seen("libibverbs.so.1", "not found")
                .fix(Fix::container().run("apt install libibverbs1 ibverbs-providers").remark("dnf: libibverbs rdma-core; in the container's image"))
                .root(),
            "verbs-provider" => Finding::new("verbs-provider", severity, format!("{who}: libibverbs has no provider for {}", one_or(&hit, "it", "them")))
                .why("The kernel shows the adapter, but libibverbs has no library for its driver (libmlx5, libionic, libbnxt_re): NCCL and UCX silently use TCP.")
                .seen("ibv_get_device_list", why.clone())
                .fix(Fix::container().run("sudo apt install ibverbs-providers").remark("dnf: rdma-core; in the container's image, in the version of its libibverbs"))
                .root(),
            "no-uverbs" => Finding::new("no-uverbs", severity, format!("{who}: {why}"))
                .why("User-space programs cannot use the adapter.")
                .seen(format!("/sys/class/infiniband/{}/device/infiniband_verbs", hit[0]), why.clone())
                .fix(Fix::host().run("sudo modprobe -a ib_uverbs rdma_ucm && echo ib_uverbs | sudo tee /etc/modules-load.d/rdma.conf"))
                .root(),
            _ => Finding::new("nic-open", severity, format!("{who} cannot be opened: {why}"))
                .why("NCCL and UCX skip the adapter, and use TCP if there is no other.")
                .seen("ibv_open_device", why.clone())
                .fix(Fix::both().run("ibv_devinfo -v").remark("check the provider: ibverbs-providers of rdma-core, OFED or the vendor must match the kernel driver; in a container install the host's version")),
        };
        let finding = if severity == Severity::Info { finding } else { finding.blocks() };
        found.push(finding.on(hit));
    }
}

/// Whether a GPU has no usable adapter as near as one of these.
fn is_missed(analysis: &Analysis<'_>, names: &[String]) -> bool {
    analysis.facts.gpus.iter().any(|gpu| {
        let nearest = |wanted: bool| {
            let pairs = analysis.pairs.iter().filter(|pair| pair.gpu.address == gpu.address);
            let pairs =
                pairs.filter(|pair| names.contains(&pair.nic.name) == wanted && pair.closed == wanted);
            pairs.filter_map(|pair| pair.distance).min()
        };
        matches!((nearest(true), nearest(false)), (Some(missing), Some(left)) if missing < left)
    })
}

/// Connections by address need a file of their own.
fn connection_manager(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let Some(nodes) = facts.devices.known() else { return };
    let opens = |path: &str| nodes.iter().find(|node| node.path == path).map(|node| node.open.ok);
    let usable = facts.nics.iter().any(|nic| {
        !nic.is_software() && nic.driver.as_deref() != Some("efa") && usable::nic(facts, nic).is_yes()
    });
    let loaded = facts.kernel.is_loaded("rdma_ucm");
    let file = opens("/dev/infiniband/rdma_cm");
    if !usable || file == Some(true) && loaded != Some(false) {
        return;
    }
    let (seen, fix) = match (loaded, file) {
        (Some(false), _) => (
            "rdma_ucm is not loaded",
            Fix::host()
                .run("sudo modprobe rdma_ucm && echo rdma_ucm | sudo tee /etc/modules-load.d/rdma-cm.conf"),
        ),
        (_, Some(false)) => (
            "it cannot be opened",
            Fix::host()
                .run("sudo chmod 0666 /dev/infiniband/rdma_cm")
                .remark("and allow it in the container's device cgroup"),
        ),
        _ => (
            "it does not exist",
            Fix::container()
                .option("--device /dev/infiniband/rdma_cm")
                .remark("Kubernetes: the RDMA device plugin provides it with the adapter"),
        ),
    };
    found.push(
        Finding::new("rdma-cm", Severity::Info, format!("connections by address (rdma_cm) do not work: {seen}"))
            .why("NCCL does not need it. Programs that connect by address do: perftest -R, UCX's rdmacm, NVMe over fabrics, MPI in some builds.")
            .seen("/dev/infiniband/rdma_cm", seen)
            .fix(fix)
            .root(),
    );
}

/// The command that takes the limit off a unit of systemd.
fn unlimited(unit: &str) -> String {
    let folder = format!("/etc/systemd/system/{unit}.service.d");
    format!(
        "sudo mkdir -p {folder} && printf '[Service]\\nLimitMEMLOCK=infinity\\n' | sudo tee {folder}/memlock.conf && sudo systemctl daemon-reload"
    )
}

fn hard_limit(process: &Process) -> String {
    match &process.memlock_hard_bytes {
        Read::Yes(limit) => limit.map_or_else(|| "unlimited".to_owned(), bytes),
        Read::No(unread) => unread.unread.clone(),
    }
}

fn memlock(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    if !analysis.has_hardware_nic() {
        return;
    }
    let process = &facts.process;
    let namespaced = process.user_namespace.get() == Some(true);
    let exempt = process.ipc_lock.get() == Some(true) && !namespaced;
    let container = facts.is_container();
    let mut fixes: Vec<Fix> = Vec::new();
    // A shell raises its own limit up to the hard one: no container or session starts anew.
    let raises =
        process.memlock_hard_bytes.known().is_some_and(|hard| hard.is_none_or(|hard| hard >= ENOUGH));
    if raises {
        fixes.push(
            Fix::container()
                .run("ulimit -l $(ulimit -H -l)")
                .remark("in the shell that starts the program; the hard limit allows it"),
        );
    }
    if container {
        fixes.push(Fix::container().option("--ulimit memlock=-1:-1 --cap-add IPC_LOCK"));
        fixes.push(Fix::host().run(unlimited("containerd")).remark("Kubernetes, where IPC_LOCK has no effect for non-root users: restart containerd; with CRI-O the unit is crio"));
    } else {
        fixes.push(
            Fix::host()
                .run("printf '* %s memlock unlimited\\n' soft hard | sudo tee /etc/security/limits.d/rdma.conf")
                .remark("log in again"),
        );
        fixes.push(
            Fix::host()
                .remark("for services, from the next boot")
                .line("/etc/systemd/system.conf", "DefaultLimitMEMLOCK=infinity"),
        );
    }
    let limit = process.memlock_bytes.known().copied();
    let failed = process.mlock_probe.known().filter(|probe| !probe.ok);
    if let Some(probe) = failed
        && namespaced
        && limit.flatten().is_none_or(|limit| limit >= TOO_LITTLE)
    {
        found.push(
            Finding::new("memlock-userns", Severity::Error, "locking memory fails in this user namespace despite the limit")
                .why("Rootless containers inherit the limit of the outer user; drivers ignore CAP_IPC_LOCK inside. Creating queues and regions fails with ENOMEM.")
                .seen("mlock", probe.detail.clone())
                .seen("/proc/self/uid_map", "a namespace of its own")
                .fix(Fix::host().run(unlimited("user@")).remark("raises the limit of the outer user, who then logs in again"))
                .root()
                .blocks()
                .on(facts.nics.iter().map(|nic| nic.name.clone())),
        );
        return;
    }
    match limit {
        Some(Some(limit)) if !exempt => {
            let severity =
                if limit < TOO_LITTLE || failed.is_some() { Severity::Error } else { Severity::Warning };
            let mut finding = Finding::new("memlock", severity, format!("only {} of memory may be locked", bytes(limit)))
                .why("Registered memory is locked. Beyond the limit, creating queues and registering memory fails with 'Cannot allocate memory', and NCCL or UCX aborts or falls back to TCP.")
                .seen("/proc/self/limits: Max locked memory", bytes(limit))
                .seen("its hard limit", hard_limit(process))
                .seen("CAP_IPC_LOCK", if process.ipc_lock.get() == Some(true) { "set, but only inside a user namespace" } else { "not in effect" });
            if let Some(probe) = failed {
                finding = finding.seen("mlock", probe.detail.clone());
            }
            for fix in fixes {
                finding = finding.fix(fix);
            }
            finding = finding.root();
            if severity == Severity::Error {
                finding = finding.blocks().on(facts.nics.iter().map(|nic| nic.name.clone()));
            }
            found.push(finding);
        }
        // No limit, and yet locking fails: a cgroup, a seccomp rule or a lack of memory.
        Some(_) if failed.is_some() => found.push(
            Finding::new("memlock", Severity::Error, "locking memory fails, although no limit forbids it")
                .why("Registered memory is locked: creating queues and registering memory fails as well.")
                .seen("mlock", failed.map(|probe| probe.detail.clone()).unwrap_or_default())
                .seen("/proc/self/limits: Max locked memory", limit.flatten().map_or_else(|| "unlimited".to_owned(), bytes))
                .fix(Fix::both().remark("check the container's memory limit, its seccomp profile, and the free memory of the machine"))
                .blocks()
                .on(facts.nics.iter().map(|nic| nic.name.clone())),
        ),
        Some(_) => {}
        None => found.push(
            Finding::new("memlock-unread", Severity::Unknown, "the limit of locked memory is unknown")
                .why("A small limit makes registrations fail.")
                .seen("/proc/self/limits", process.memlock_bytes.why_not().unwrap_or_default())
                .fix(Fix::both().run("ulimit -l")),
        ),
    }
}

/// A process that may not run near the devices it will use.
fn cpus(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let Some(allowed) = facts.process.cpus.known().and_then(|text| cpu_list::parse(text)) else { return };
    if facts.machine.numa.len() < 2 || allowed.is_empty() {
        return;
    }
    let nodes: Vec<i32> = facts
        .machine
        .numa
        .iter()
        .filter(|node| cpu_list::parse(&node.cpus).is_some_and(|cpus| !cpus.is_disjoint(&allowed)))
        .map(|node| node.id)
        .collect();
    let node_of = |address: &str| {
        facts.pci_device(address).and_then(|device| device.numa_node.get()).filter(|node| *node >= 0)
    };
    let placed: Vec<(&str, i32)> =
        facts.gpus.iter().filter_map(|gpu| Some((gpu.address.as_str(), node_of(&gpu.address)?))).collect();
    let far: Vec<&str> =
        placed.iter().filter(|(_, node)| !nodes.contains(node)).map(|(address, _)| *address).collect();
    if far.is_empty() {
        return;
    }
    if far.len() < placed.len() {
        found.push(
            Finding::new("cpu-binding", Severity::Info, format!("this process may run only on CPUs far from {}", list(&far)))
                .why("Correct if the process uses only the near GPUs; for the others, threads cross the sockets for every message.")
                .seen("/proc/self/status: Cpus_allowed_list", facts.process.cpus.known().cloned().unwrap_or_default()),
        );
        return;
    }
    found.push(
        Finding::new("cpu-binding", Severity::Warning, "this process may run only on CPUs far from every GPU")
            .why("Threads that post and poll cross the sockets for every message, and host buffers are in remote memory.")
            .seen("/proc/self/status: Cpus_allowed_list", facts.process.cpus.known().cloned().unwrap_or_default())
            .seen("memory nodes of the GPUs", list(&placed.iter().map(|(_, node)| node.to_string()).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()))
            .fix(Fix::both().remark("put before the program").run(format!("numactl --cpunodebind={0} --membind={0}", placed[0].1)).remark("containers: --cpuset-cpus; Slurm: --cpu-bind"))
            .slows()
            .on(facts.gpus.iter().map(|gpu| gpu.address.clone())),
    );
}
