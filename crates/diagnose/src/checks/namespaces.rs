//! IPC and PID namespaces of a container: what its processes share with those of others.

use super::{list, one_or};
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{Facts, Read};

const WHY: &str = "Processes in one container are not concerned. Those of several containers on this machine share neither memory nor CUDA's IPC handles: NCCL and UCX then go over the adapters instead of NVLink.";

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let facts = analysis.facts;
    if !facts.is_container() || facts.gpus.is_empty() {
        return Vec::new();
    }
    let process = &facts.process;
    let of = |is: fn(&Read<bool>) -> bool| -> Vec<&str> {
        [("IPC", &process.ipc_namespace), ("PID", &process.pid_namespace)]
            .into_iter()
            .filter_map(|(name, own)| is(own).then_some(name))
            .collect()
    };
    let own = of(|own| own.get() == Some(true));
    let unread = of(|own| own.known().is_none() && !own.is_not_recorded());
    let finding = |severity, names: &[&str], what: &str| {
        let (many, names) = (one_or(names, "namespace", "namespaces"), list(names));
        Finding::new("container-namespaces", severity, format!("{what} {names} {many}")).why(WHY).fix(
            Fix::container()
                .remark("only with several containers for one job")
                .option("--ipc=host --pid=host")
                .remark("Kubernetes: hostIPC, hostPID"),
        )
    };
    if !own.is_empty() {
        let seen = finding(Severity::Info, &own, "this container has its own")
            .seen("/proc/self/ns", own.join(", ").to_lowercase());
        return vec![match gpus_here(facts) {
            Some(count) => seen.seen("GPUs of this container", format!("{count} of {}", facts.gpus.len())),
            None => seen,
        }];
    }
    if unread.is_empty() {
        return Vec::new();
    }
    let why = process.ipc_namespace.why_not().or(process.pid_namespace.why_not()).unwrap_or_default();
    vec![
        finding(Severity::Unknown, &unread, "unknown whether this container has its own")
            .seen("/proc/self/ns", why),
    ]
}

/// How many GPUs the container has device files of, where it is not all of them: a job with more
/// needs several containers.
fn gpus_here(facts: &Facts) -> Option<usize> {
    let is_gpu =
        |path: &str| path.strip_prefix("/dev/nvidia").is_some_and(|rest| rest.parse::<u32>().is_ok());
    let count = facts.devices.known()?.iter().filter(|node| is_gpu(&node.path)).count();
    (count > 0 && count < facts.gpus.len()).then_some(count)
}
