//! What comes of it for each GPU and adapter.

use serde::Serialize;

use crate::finding::{Effect, Finding, Severity};
use crate::{nccl, ucx};
use nobounce_predict::machine;
use nobounce_predict::model::direct;
use nobounce_predict::parts::{Parts, Spec};
use nobounce_predict::slot::Slot;
use nobounce_predict::staging::staged;
use nobounce_topology::analysis::{Analysis, Pair};
use nobounce_topology::facts::{Port, Transfer};
use nobounce_topology::methods::Answer;
use nobounce_topology::tree::Distance;
use nobounce_topology::usable;

/// The way bytes take between a GPU and an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PathKind {
    /// The adapter reads and writes GPU memory.
    Direct,
    /// It does, but slower than it could.
    Slow,
    /// The facts do not say.
    Unknown,
    /// Through host memory.
    Staged,
}

impl PathKind {
    /// Its name for people.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Slow => "direct but slow",
            Self::Unknown => "unknown",
            Self::Staged => "staged",
        }
    }
}

/// What a library does with a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum UseKind {
    /// Directly.
    Direct,
    /// One direction directly.
    Half,
    /// Through host memory, over the adapter.
    Staged,
    /// Not over this adapter.
    None,
    /// It depends on what is not known.
    Unknown,
}

const MAY_FAIL: &str = "may fail";

/// What a library does with a pair, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Use {
    /// In short.
    pub kind: UseKind,
    /// For people.
    pub text: String,
}

impl Use {
    fn of(kind: UseKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }

    pub(crate) fn direct(text: impl Into<String>) -> Self {
        Self::of(UseKind::Direct, text)
    }

    pub(crate) fn half(text: impl Into<String>) -> Self {
        Self::of(UseKind::Half, text)
    }

    pub(crate) fn staged(text: impl Into<String>) -> Self {
        Self::of(UseKind::Staged, text)
    }

    pub(crate) fn none(text: impl Into<String>) -> Self {
        Self::of(UseKind::None, text)
    }

    pub(crate) fn unknown(text: impl Into<String>) -> Self {
        Self::of(UseKind::Unknown, text)
    }

    /// Versions that are known to fail, where the facts leave open whether they do here.
    fn perhaps(nic: &str, finding: &Finding) -> Self {
        let what = if finding.effect == Effect::Slows { "slow" } else { MAY_FAIL };
        Self::unknown(format!("{what} with {nic}: {}", finding.title))
    }

    /// Whether it is one of those.
    pub(crate) fn may_fail(&self) -> bool {
        self.kind == UseKind::Unknown && self.text.starts_with(MAY_FAIL)
    }
}

/// The verdict for one GPU and one adapter.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// PCI address of the GPU.
    pub gpu: String,
    /// The GPU's number, if it has one.
    pub gpu_index: Option<u32>,
    /// Name of the adapter.
    pub nic: String,
    /// Their distance; `None` for an adapter without a PCI address.
    pub distance: Option<Distance>,
    /// Whether it is the adapter to use for this GPU.
    pub best: bool,
    /// The way.
    pub path: PathKind,
    /// By what: `dma-buf`, `peermem`, `window`.
    pub by: Option<String>,
    /// Whether memory of this pair was actually registered.
    pub proven: bool,
    /// Why it is not simply direct.
    pub reasons: Vec<String>,
    /// Expected GB/s of long messages, by the predictor, where the facts suffice; staged ones,
    /// where they are staged.
    pub expected_gbs: Option<f64>,
    /// GB/s of the same pair with GPUDirect, its links and settings as they should be.
    pub possible_gbs: Option<f64>,
    /// What NCCL will do.
    pub nccl: Use,
    /// What UCX will do.
    pub ucx: Use,
}

impl Verdict {
    /// The share of the possible rate that is lost, where both are known and it is significant.
    #[must_use]
    pub fn loss(&self) -> Option<f64> {
        let loss = 1.0 - self.expected_gbs? / self.possible_gbs?;
        (loss > 0.02).then_some(loss)
    }
}

/// The verdict for every pair.
pub(crate) fn of(analysis: &Analysis<'_>, findings: &[Finding]) -> Vec<Verdict> {
    let best: Vec<(&str, &str)> = analysis
        .best()
        .into_iter()
        .flatten()
        .map(|pair| (pair.gpu.address.as_str(), pair.nic.name.as_str()))
        .collect();
    analysis
        .pairs
        .iter()
        .map(|pair| {
            let (path, by, reasons) = path(analysis, pair, findings);
            let (expected_gbs, possible_gbs) = expected(analysis, pair, path, findings);
            let bound = |plan: Use, library: &str| bound(plan, library, path, &reasons, pair, findings);
            Verdict {
                gpu: pair.gpu.address.clone(),
                gpu_index: pair.gpu.index,
                nic: pair.nic.name.clone(),
                distance: pair.distance,
                best: best.contains(&(&pair.gpu.address, &pair.nic.name)),
                path,
                by,
                proven: pair.proven.is_some(),
                expected_gbs,
                possible_gbs,
                nccl: bound(nccl::plan(analysis, pair), "NCCL"),
                ucx: bound(ucx::plan(analysis, pair), "UCX"),
                reasons,
            }
        })
        .collect()
}

/// Limits a plan to the path: no library is direct where the hardware is not, nor against its own
/// setting.
fn bound(
    plan: Use,
    library: &str,
    path: PathKind,
    reasons: &[String],
    pair: &Pair<'_>,
    findings: &[Finding],
) -> Use {
    if matches!(plan.kind, UseKind::None | UseKind::Staged) {
        return plan;
    }
    let own = |is: fn(&Finding) -> bool| {
        let mut own = findings.iter().filter(|finding| finding.library == Some(library));
        own.find(|finding| is(finding) && concerns(finding, pair))
    };
    if let Some(finding) = own(|finding| finding.effect == Effect::Blocks) {
        return Use::none(format!("fails with {}: {}", pair.nic.name, finding.title));
    }
    if path != PathKind::Staged
        && let Some(finding) = findings.iter().find(|finding| {
            // Without a library it concerns all.
            let is_own = finding.library.is_none_or(|own| own == library);
            finding.id == "known-bad" && is_own && concerns(finding, pair)
        })
    {
        return Use::perhaps(&pair.nic.name, finding);
    }
    let why = || reasons.join("; ");
    match path {
        PathKind::Staged => Use::staged(why()),
        PathKind::Unknown if plan.kind != UseKind::Unknown => Use::unknown(why()),
        _ => plan,
    }
}

/// The same by names; a finding that names no device is about all.
pub(crate) fn concerns_names(finding: &Finding, gpu: &str, nic: &str) -> bool {
    finding.devices.is_empty() || finding.devices.iter().any(|device| device == gpu || device == nic)
}

fn concerns(finding: &Finding, pair: &Pair<'_>) -> bool {
    finding.devices.iter().any(|device| {
        *device == pair.gpu.address
            || *device == pair.nic.name
            || Some(device.as_str()) == pair.nic.address.as_deref()
            || pair.bridges.contains(&device.as_str())
    })
}

/// A path, the method that serves it, and the reasons why it is not simply direct.
type Judged = (PathKind, Option<String>, Vec<String>);

/// The facts and findings of a pair decide its path.
fn path(analysis: &Analysis<'_>, pair: &Pair<'_>, findings: &[Finding]) -> Judged {
    // Our software adapter: it uses the CPU's window onto the GPU (BAR1).
    if pair.nic.driver.as_deref() == Some("nobounce") {
        return window_path(analysis, pair);
    }
    let blocks = blocking_reasons(analysis, pair, findings);
    if !blocks.is_empty() {
        return (PathKind::Staged, None, blocks);
    }
    if pair.proven.is_none() && !pair.nic.ports.iter().any(Port::is_active) {
        return (PathKind::Unknown, None, vec!["the state of its port could not be read".to_owned()]);
    }
    if let (None, Answer::Unknown(why)) = (pair.proven, usable::nic(analysis.facts, pair.nic)) {
        return (PathKind::Unknown, None, vec![why]);
    }
    let by = match pair.proven {
        Some(way) => Some(way),
        None if pair.dma_buf() => Some("dma-buf"),
        None if pair.peermem.is_yes() => Some("peermem"),
        None => None,
    };
    let Some(by) = by else { return path_without_method(pair) };
    let slow = slowing_reasons(analysis, pair, findings);
    let kind = if slow.is_empty() { PathKind::Direct } else { PathKind::Slow };
    (kind, Some(by.to_owned()), slow)
}

/// The probe of the CPU's window decides the path of the software adapter.
fn window_path(analysis: &Analysis<'_>, pair: &Pair<'_>) -> Judged {
    if let Some(failed) = failed_transfer(analysis, pair) {
        let reason = format!("no bytes went through the window: {}", failed.probe.detail);
        return (PathKind::Staged, None, vec![reason]);
    }
    match pair.gpu.window_probe.known() {
        Some(probe) if probe.ok => (PathKind::Direct, Some("window".to_owned()), Vec::new()),
        Some(probe) => (PathKind::Staged, None, vec![probe.detail.clone()]),
        None => (PathKind::Unknown, None, vec!["the window was not probed".to_owned()]),
    }
}

/// Findings about one method of registration begin so: they do not block, another one may work.
const OF_METHODS: [&str; 16] = [
    // It concerns single pairs of the GPU.
    "moves-no-data",
    "nic-no-dmabuf",
    "peermem",
    "dmabuf",
    "closed-module",
    "driver-too-old",
    "kernel-",
    "verbs-too-old",
    "gpu-too-old",
    "no-dev",
    "dev-permission",
    "device-cgroup",
    "no-uverbs",
    "nic-open",
    "nvidia-driver",
    "gpu-passed",
];

/// A pair that registers may still move nothing, or stage it.
fn failed_transfer<'a>(analysis: &Analysis<'a>, pair: &Pair<'_>) -> Option<&'a Transfer> {
    let of_pair = |transfer: &&Transfer| transfer.gpu == pair.gpu.address && transfer.nic == pair.nic.name;
    analysis.facts.transfers.iter().filter(of_pair).find(|transfer| !transfer.probe.ok)
}

/// Unusable devices and blocking findings keep the pair from any direct path.
fn blocking_reasons(analysis: &Analysis<'_>, pair: &Pair<'_>, findings: &[Finding]) -> Vec<String> {
    let facts = analysis.facts;
    let mut blocks: Vec<String> = Vec::new();
    for answer in [usable::gpu(facts, pair.gpu), usable::nic(facts, pair.nic)] {
        if let Answer::No(_, why) = answer {
            blocks.push(why);
        }
    }
    blocks.extend(
        failed_transfer(analysis, pair)
            .map(|failed| format!("it registers, but moves no bytes directly: {}", failed.probe.detail)),
    );
    for finding in findings.iter().filter(|finding| {
        let blocks = finding.effect == Effect::Blocks && finding.severity >= Severity::Warning;
        finding.library.is_none() && (blocks || finding.id == "port-down")
    }) {
        if concerns(finding, pair) && !OF_METHODS.iter().any(|begin| finding.id.starts_with(begin)) {
            blocks.push(finding.title.clone());
        }
    }
    blocks
}

/// A pair without a working method is staged, or unknown while a method may still work.
fn path_without_method(pair: &Pair<'_>) -> Judged {
    let mut reasons = Vec::new();
    let mut unknown = false;
    // Registering is the last step: it is open only where the others are not in its way.
    let early = pair.export.is_no() || pair.import.is_no();
    let register = (!early || pair.register.is_no()).then_some(&pair.register);
    for answer in [&pair.export, &pair.import].into_iter().chain(register).chain([&pair.peermem]) {
        match answer {
            Answer::No(_, why) => reasons.push(why.clone()),
            Answer::Unknown(why) => {
                unknown = true;
                reasons.push(why.clone());
            }
            Answer::Yes(_) => {}
        }
    }
    reasons.dedup();
    let certain = pair.no_dma_buf() && pair.peermem.is_no();
    (if certain || !unknown { PathKind::Staged } else { PathKind::Unknown }, None, reasons)
}

/// Findings and the link between sockets slow a direct path.
fn slowing_reasons(analysis: &Analysis<'_>, pair: &Pair<'_>, findings: &[Finding]) -> Vec<String> {
    let mut slow: Vec<String> = findings
        .iter()
        .filter(|finding| {
            // Settings of one library concern only its own plan.
            finding.effect == Effect::Slows
                && finding.library.is_none()
                && finding.severity >= Severity::Warning
                && concerns(finding, pair)
        })
        // Bridges of other pairs may share a finding with ours.
        .filter(|finding| {
            finding.id != "acs-redirect" || pair.distance.is_some_and(Distance::is_below_switch)
        })
        .filter(|finding| finding.id != "far-nic" || pair.distance == Some(Distance::Sys))
        .map(|finding| finding.title.clone())
        .collect();
    if pair.distance == Some(Distance::Sys) && !slow.iter().any(|reason| reason.contains("socket")) {
        let sure = pair
            .nic
            .address
            .as_deref()
            .is_some_and(|nic| analysis.tree.distance_is_sure(&pair.gpu.address, nic));
        let words = if sure {
            "it crosses the link between sockets"
        } else {
            "it may cross the link between sockets: memory nodes are unknown"
        };
        slow.push(words.to_owned());
    }
    slow
}

/// GB/s to expect of the pair as it is, and as it could be: both by the predictor, for long
/// messages.
fn expected(
    analysis: &Analysis<'_>,
    pair: &Pair<'_>,
    path: PathKind,
    findings: &[Finding],
) -> (Option<f64>, Option<f64>) {
    if path == PathKind::Unknown || pair.nic.is_software() || pair.distance.is_none() {
        return (None, None);
    }
    let has = |id: &str| findings.iter().any(|finding| finding.id == id && concerns(finding, pair));
    let mut now = machine::of_pair(analysis, pair).spec;
    if has("relaxed-ordering") || has("relaxed-ordering-env") {
        now.relaxed_ordering = Some(false);
    }
    let facts = analysis.facts;
    let link = |address: &str| facts.pci_device(address).and_then(|device| device.link);
    // A GPU that is awake has the speed that it shows.
    if let (true, Some(link)) = (
        pair.gpu.performance_state.get().is_some_and(|state| state <= 2) && now.gpu.is_some(),
        link(&pair.gpu.address),
    ) {
        now.gpu = Slot::of_speed(link.speed, link.width).or(now.gpu);
    }
    // The same devices in the same places, with their links and settings as they should be.
    let could = Spec {
        relaxed_ordering: Some(true),
        max_read_request: Some(4096),
        nic: pair
            .nic
            .address
            .as_deref()
            .and_then(link)
            .and_then(|link| Slot::of_speed(link.max_speed, link.max_width))
            .or(now.nic),
        gpu: link(&pair.gpu.address)
            .filter(|_| now.gpu.is_some())
            .and_then(|link| Slot::of_speed(link.max_speed, link.max_width))
            .or(now.gpu),
        distance: pair.distance.filter(|_| now.distance.is_some()),
        acs_redirect: None,
        iommu: None,
        unavailable: None,
        port_down: None,
        ..now.clone()
    }
    .within_platform();
    let rate = |spec: &Spec, is_direct: bool| {
        let parts = Parts { bar1: None, ..spec.resolve().ok()? };
        let estimate =
            if is_direct { direct(&parts, LONG).ok()? } else { staged(&parts, LONG, true).ok()? };
        Some(estimate.gbytes_per_s.expected)
    };
    (rate(&now, path != PathKind::Staged), rate(&could, true))
}

/// A message long enough to show the bandwidth of the path.
const LONG: u64 = 64 << 20;
