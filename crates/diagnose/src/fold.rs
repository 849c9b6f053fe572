//! One answer first: findings of one causal chain become one finding, and what another makes moot
//! goes below it.

use crate::finding::{Effect, Finding, Fix, Severity};
use crate::severity::NO_FIX;
use crate::verdict::{Verdict, concerns_names};

/// Links of registration by peer memory.
const PEER_MEMORY: [&str; 6] = [
    "peermem-no-api",
    "peermem-symbols",
    "peermem-not-registered",
    "peermem-not-loaded",
    "peermem-amd",
    "peermem-nic",
];
/// Links of registration by dma-buf, the deepest cause first.
const DMA_BUF: [&str; 11] = [
    "nic-no-dmabuf",
    "gpu-too-old",
    "kernel-no-dmabuf",
    "kernel-no-p2pdma",
    "driver-too-old",
    "closed-module",
    "kernel-too-old",
    "verbs-too-old",
    "dmabuf-export",
    "dmabuf-nic",
    "dmabuf-register",
];
/// Links that only other hardware mends: their method is no way out.
const HARDWARE: [&str; 3] = ["nic-no-dmabuf", "gpu-too-old", "peermem-nic"];
/// Without these nothing else about the device can be told.
const BASIS: [&str; 14] = [
    "gpu-passed-through",
    "nvidia-driver",
    "driver-mismatch",
    "fabric-manager",
    "bar1-unassigned",
    "no-dev-nvidia",
    "nic-no-rdma",
    "nic-other-namespace",
    "no-libibverbs",
    "verbs-provider",
    "no-uverbs",
    "no-dev-infiniband",
    "device-cgroup",
    "dev-permission",
];
/// What a missing basis leaves open.
const NEEDS_BASIS: [&str; 5] =
    ["registration-unproven", "gpu-unread", "port-unread", "dev-unread", "memlock-unread"];
/// Findings about GPUDirect alone: moot where the hardware has none. Beginnings of names.
const GPUDIRECT: [&str; 20] = [
    "peermem-",
    "dmabuf-",
    "closed-module",
    "driver-too-old",
    "kernel-",
    "verbs-too-old",
    "gpu-too-old",
    "registration-",
    "gpu-unread",
    "acs-",
    "ats-off",
    "iommu-",
    "relaxed-ordering",
    "through-cpu",
    "far-nic",
    "nccl-gdr-",
    "nccl-d",
    "nccl-too-old",
    "ucx-gpu-direct",
    "ucx-too-old",
];

/// Folds the findings and brings them into their order: the gravest first, each with those below it
/// behind it.
pub(crate) fn fold(findings: Vec<Finding>, verdicts: &[Verdict]) -> Vec<Finding> {
    let mut findings = findings;
    chain(&mut findings, |severity| severity >= Severity::Warning);
    chain(&mut findings, |severity| severity == Severity::Info);
    moot(&mut findings, verdicts);
    order(findings)
}

/// Links of registration, of one class of severity, go below the one with the easiest way out.
fn chain(findings: &mut [Finding], class: impl Fn(Severity) -> bool) {
    let members = |ids: &[&str], findings: &[Finding]| -> Vec<usize> {
        let at = |id: &&str| findings.iter().position(|finding| finding.id == *id && class(finding.severity));
        ids.iter().filter_map(at).collect()
    };
    let (peer, dma_buf) = (members(&PEER_MEMORY, findings), members(&DMA_BUF, findings));
    if peer.len() + dma_buf.len() < 2 {
        return;
    }
    let is_open =
        |way: &[usize]| !way.is_empty() && !way.iter().any(|at| HARDWARE.contains(&findings[*at].id));
    // Root, then a reboot, then more than one change.
    let effort = |way: &[usize]| {
        let reboots = way.iter().any(|at| findings[*at].needs_reboot);
        (reboots, way.len())
    };
    let mut ways: Vec<(&str, Vec<usize>)> = vec![("peer memory", peer.clone()), ("dma-buf", dma_buf.clone())];
    ways.retain(|(_, way)| is_open(way));
    ways.sort_by_key(|(_, way)| effort(way));
    // Without a way out, the adapter's or the GPU's type is the cause.
    let head = ways
        .first()
        .map_or_else(|| dma_buf.first().or(peer.first()).copied().unwrap_or_default(), |(_, way)| way[0]);
    let id = findings[head].id;
    let fixes: Vec<Fix> =
        ways.iter().flat_map(|(name, way)| way_out(name, way, findings, ways.len())).collect();
    let root = ways.iter().any(|(_, way)| way.iter().any(|at| findings[*at].needs_root));
    let reboot = ways.first().is_some_and(|(_, way)| effort(way).0);
    let devices: Vec<String> =
        peer.iter().chain(&dma_buf).flat_map(|at| findings[*at].devices.clone()).collect();
    for at in peer.iter().chain(&dma_buf).filter(|at| **at != head) {
        findings[*at].under = Some(id);
    }
    let first = &mut findings[head];
    if !fixes.is_empty() {
        first.fix = fixes;
        (first.needs_root, first.needs_reboot) = (root, reboot);
    }
    for device in devices {
        if !first.devices.contains(&device) {
            first.devices.push(device);
        }
    }
}

/// The fixes of one way out, complete on its own: every step, numbered where there are several.
fn way_out(name: &str, way: &[usize], findings: &[Finding], ways: usize) -> Vec<Fix> {
    let steps = way.len();
    let mut fixes = Vec::new();
    for (step, at) in way.iter().enumerate() {
        let finding = &findings[*at];
        let reboot = if finding.needs_reboot { ", with a reboot" } else { "" };
        let remark = match (ways, steps) {
            (..=1, 1) => None,
            (_, 1) => Some(format!("by {name}{reboot}")),
            _ => Some(format!("by {name}, step {} of {steps}{reboot}", step + 1)),
        };
        for (nth, fix) in finding.fix.iter().cloned().enumerate() {
            fixes.push(match remark.as_ref().filter(|_| nth == 0) {
                None => fix,
                Some(remark) => fix.after(remark),
            });
        }
    }
    fixes
}

/// What another finding makes moot goes below it.
fn moot(findings: &mut [Finding], verdicts: &[Verdict]) {
    let best: Vec<&Verdict> = verdicts.iter().filter(|verdict| verdict.best).collect();
    let covers = |root: &Finding| best.iter().all(|verdict| concerns_names(root, &verdict.gpu, &verdict.nic));
    let is_hardware = |finding: &Finding| {
        let by_type = finding.id == "nic-no-dmabuf" && finding.under.is_none();
        finding.effect == Effect::Blocks && (NO_FIX.contains(&finding.id) || by_type)
    };
    let hardware = findings.iter().position(|finding| is_hardware(finding) && covers(finding));
    if let Some(root) = hardware {
        put_below(findings, root, |id| GPUDIRECT.iter().any(|begin| id.starts_with(begin)));
        return;
    }
    let basis = findings.iter().position(|finding| {
        BASIS.contains(&finding.id) && finding.severity == Severity::Error && covers(finding)
    });
    if let Some(root) = basis {
        put_below(findings, root, |id| NEEDS_BASIS.contains(&id));
    }
}

fn put_below(findings: &mut [Finding], root: usize, is_moot: impl Fn(&str) -> bool) {
    let id = findings[root].id;
    for (at, finding) in findings.iter_mut().enumerate() {
        if at != root && finding.under.is_none() && is_moot(finding.id) {
            finding.under = Some(id);
        }
    }
    // What was below a finding that is now below this one comes along.
    for finding in findings.iter_mut() {
        if finding.under.is_some() && is_moot(finding.id) && finding.id != id {
            finding.under = Some(id);
        }
    }
}

fn order(findings: Vec<Finding>) -> Vec<Finding> {
    let (mut heads, below): (Vec<Finding>, Vec<Finding>) =
        findings.into_iter().partition(|finding| finding.under.is_none());
    let roots = |finding: &Finding| {
        NO_FIX.contains(&finding.id) || BASIS.contains(&finding.id) || finding.id == "nic-no-dmabuf"
    };
    let weight = |effect: Effect| match effect {
        Effect::Blocks => 0,
        Effect::Stages => 1,
        Effect::Slows => 2,
        Effect::Nothing => 3,
    };
    heads.sort_by_key(|finding| {
        (std::cmp::Reverse(finding.severity), !roots(finding), weight(finding.effect))
    });
    heads
        .into_iter()
        .flat_map(|head| {
            let mut own: Vec<Finding> =
                below.iter().filter(|finding| finding.under == Some(head.id)).cloned().collect();
            own.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
            std::iter::once(head).chain(own)
        })
        .collect()
}
