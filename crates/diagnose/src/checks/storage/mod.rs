//! GPUDirect Storage: the chain from a file to a GPU, link by link, with cause and fix.
//!
//! A step makes a link and its finding of the same facts, so that the verdict cannot contradict
//! them. The severity of a finding follows from what all links say: what stops the route that is
//! nearest to working is an error, what stops only the other one is information.

mod cufile;
mod device;
mod filesystem;
mod gpu;
mod kernel;
mod nvidia_fs;

use super::list;
use crate::finding::{Effect, Finding, Severity};
use crate::storage_verdict::{ChainLink, Own, Route, State, StorageDiagnosis, StorageVerdict, decide, worst};
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{Gpu, PciDevice, Storage};

/// A link, why it is not ok, and what else there is to say.
struct ChainStep {
    link: ChainLink,
    cause: Option<Finding>,
    notes: Vec<Finding>,
}

fn step(name: &'static str, p2pdma: State, nvidia_fs: State, text: impl Into<String>) -> ChainStep {
    let link = ChainLink { name, p2pdma, nvidia_fs, text: text.into(), fixable: true };
    ChainStep { link, cause: None, notes: Vec::new() }
}

impl ChainStep {
    /// Why it is not ok.
    fn because(mut self, finding: Finding) -> Self {
        self.cause = Some(finding);
        self
    }

    /// What is worth telling whatever the state.
    fn noting(mut self, finding: Option<Finding>) -> Self {
        self.notes.extend(finding);
        self
    }

    /// Nothing can be done about it on this machine.
    fn for_good(mut self) -> Self {
        self.link.fixable = false;
        self
    }
}

/// A path or name as a word of the shell.
fn shell(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:,@%=".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

/// A direct route.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direct {
    P2pdma,
    NvidiaFs,
}

impl Direct {
    const fn of(self, link: &ChainLink) -> State {
        match self {
            Self::P2pdma => link.p2pdma,
            Self::NvidiaFs => link.nvidia_fs,
        }
    }

    const fn other(self) -> Self {
        match self {
            Self::P2pdma => Self::NvidiaFs,
            Self::NvidiaFs => Self::P2pdma,
        }
    }
}

/// The chain, the route for each GPU, and the findings.
pub(crate) fn diagnose(analysis: &Analysis<'_>, storage: &Storage) -> StorageDiagnosis {
    let facts = analysis.facts;
    let settings = cufile::settings(storage);
    let asks = settings.p2pdma.value == Some(true);
    let has_nvme = facts.pci.iter().any(PciDevice::is_nvme);
    let mut shared = filesystem::steps(storage, has_nvme);
    shared.extend(device::steps(storage, asks, has_nvme));
    shared.extend(cufile::steps(facts, storage));
    shared.extend(kernel::steps(facts, storage));
    shared.extend(nvidia_fs::steps(facts, storage));
    // A forced compat mode is allowed, whatever the other setting says.
    let compat = if settings.force.value == Some(true) { Some(true) } else { settings.allow.value };
    let mut verdicts = Vec::new();
    let mut own: Vec<(&Gpu, Vec<ChainStep>)> = Vec::new();
    for gpu in &facts.gpus {
        let steps = gpu::steps(analysis, storage, gpu);
        let chain: Vec<&ChainLink> = shared.iter().chain(&steps).map(|step| &step.link).collect();
        let (route, reasons) = decide(&chain, compat);
        let (method, own_reason) = own_method(storage, gpu);
        verdicts.push(StorageVerdict {
            gpu: gpu.address.clone(),
            gpu_index: gpu.index,
            distance: gpu::distance(analysis, storage, gpu),
            route,
            reasons,
            own: method,
            own_reason,
            links: steps.iter().map(|step| step.link.clone()).collect(),
        });
        own.push((gpu, steps));
    }
    let findings =
        findings(&shared, own, &verdicts, facts.kernel.is_loaded("nvidia_fs") == Some(true), compat);
    let lost = verdicts.iter().any(|verdict| matches!(verdict.route, Route::Compat | Route::Fails))
        && findings.iter().any(|finding| finding.severity == Severity::Error);
    StorageDiagnosis {
        path: storage.path.clone(),
        chain: shared.into_iter().map(|step| step.link).collect(),
        verdicts,
        findings,
        direct_is_lost: lost,
    }
}

/// How nobounce would bring bytes of a file into this GPU.
fn own_method(storage: &Storage, gpu: &Gpu) -> (Own, String) {
    match gpu.window_probe.known() {
        Some(probe) if probe.ok => {
            let loses = kernel::loses_write_combining(storage);
            let stores = match loses {
                Some(true) => ", which RmForceDisableIomapWC=1 maps without write-combining",
                Some(false) => "",
                None => "; whether it is write-combined is unknown",
            };
            let reason = format!(
                "one copy by the CPU, from the page cache through BAR1 ({}){stores}{}",
                probe.detail,
                long_reads(storage)
            );
            (if loses == Some(true) { Own::SlowWindow } else { Own::Window }, reason)
        }
        Some(probe) => (
            Own::CopyEngine,
            format!("no window: {}; the copy engine fetches from host memory", probe.detail),
        ),
        None => (
            Own::Unknown,
            gpu.window_probe
                .why_not()
                .map_or_else(String::new, |why| format!("the window was not probed: {why}")),
        ),
    }
}

/// What differs for long reads of bytes that are not in the page cache, where there is a window.
fn long_reads(storage: &Storage) -> &'static str {
    match storage.direct_io.known() {
        Some(None) => "; the file takes no O_DIRECT, so long reads take this path, too",
        Some(Some(_)) => {
            "; reads of more than 1 MiB are staged where they are not cached: O_DIRECT into pinned memory, then the copy engine"
        }
        None => {
            "; reads of more than 1 MiB are staged where they are not cached and the file takes O_DIRECT: into pinned memory, then the copy engine"
        }
    }
}

/// The route that is nearest to working: by what each of its links would cost to repair.
fn nearest(chain: &[&ChainLink], verdicts: &[StorageVerdict], loaded: bool) -> Direct {
    if verdicts.iter().any(|verdict| verdict.route == Route::P2pdma) {
        return Direct::P2pdma;
    }
    if verdicts.iter().any(|verdict| verdict.route == Route::NvidiaFs) {
        return Direct::NvidiaFs;
    }
    let cost = |direct: Direct| -> u32 {
        chain
            .iter()
            .filter(|link| direct.of(link) == State::Blocks)
            .map(|link| match link.name {
                _ if !link.fixable => 1000,
                "drive" | "filesystem" => 100,
                "kernel" => 6,
                "NVIDIA driver" | "nvidia-fs client" => 4,
                _ => 2,
            })
            .sum()
    };
    let (p2pdma, nvidia_fs) = (cost(Direct::P2pdma), cost(Direct::NvidiaFs));
    // What is loaded was wanted.
    if nvidia_fs < p2pdma || (loaded && nvidia_fs == p2pdma) { Direct::NvidiaFs } else { Direct::P2pdma }
}

/// What the findings of a link weigh.
struct Scale {
    nearest: Direct,
    /// The route is direct already.
    direct: bool,
    /// There is a GPU to read into.
    has_gpu: bool,
    /// Whether the other route is stopped for certain.
    other_stopped: bool,
    /// Something that cannot be repaired stops both routes: repairing the rest does not help.
    hopeless: bool,
    compat: Option<bool>,
}

impl Scale {
    fn weigh(&self, link: &ChainLink, mut finding: Finding) -> Finding {
        let (near, other) = (self.nearest.of(link), self.nearest.other().of(link));
        let told = finding.severity;
        finding.severity = match (near, other) {
            _ if self.direct => Severity::Info,
            _ if self.hopeless && link.fixable => Severity::Info,
            (State::Blocks, _) if !link.fixable || !self.has_gpu => Severity::Warning,
            (State::Blocks, _) => Severity::Error,
            (State::Unknown, _) if told >= Severity::Warning && self.has_gpu => told,
            (State::Unknown, _) => Severity::Unknown,
            (_, State::Unknown) if !self.other_stopped => Severity::Unknown,
            _ => Severity::Info,
        };
        if near == State::Blocks && !self.direct {
            finding.effect = Effect::Blocks;
            if self.compat == Some(false) {
                finding.why.push_str(" Compat mode is not allowed here: cuFile returns an error.");
            }
        }
        finding
    }
}

fn findings(
    shared: &[ChainStep],
    own: Vec<(&Gpu, Vec<ChainStep>)>,
    verdicts: &[StorageVerdict],
    loaded: bool,
    compat: Option<bool>,
) -> Vec<Finding> {
    let best = own
        .iter()
        .zip(verdicts)
        .find(|(_, verdict)| verdict.route.is_direct())
        .map(|(own, _)| own)
        .or(own.first());
    let chain: Vec<&ChainLink> = shared
        .iter()
        .map(|step| &step.link)
        .chain(best.into_iter().flat_map(|(_, steps)| steps).map(|step| &step.link))
        .collect();
    let nearest = nearest(&chain, verdicts, loaded);
    let other = nearest.other();
    let mut scale = Scale {
        nearest,
        direct: verdicts.iter().any(|verdict| verdict.route.is_direct()),
        has_gpu: !own.is_empty(),
        other_stopped: worst(chain.iter().copied(), |link| other.of(link)) == State::Blocks,
        hopeless: chain.iter().any(|link| !link.fixable && link.p2pdma.min(link.nvidia_fs) == State::Blocks),
        compat,
    };
    let decisive: Vec<&str> = shared
        .iter()
        .chain(own.iter().flat_map(|(_, steps)| steps))
        .filter_map(|step| step.cause.as_ref().map(|cause| cause.id))
        .collect();
    // Findings, and whether they stop both routes.
    let mut found: Vec<(Finding, bool)> = Vec::new();
    for step in shared {
        let both = step.link.p2pdma.min(step.link.nvidia_fs) == State::Blocks;
        found.extend(step.cause.clone().map(|cause| (scale.weigh(&step.link, cause), both)));
        found.extend(step.notes.iter().cloned().map(|note| (note, false)));
    }
    // Those of GPUs once for all that share them.
    let count = own.len();
    let mut of_gpus: Vec<(Finding, bool, Vec<String>)> = Vec::new();
    for ((gpu, steps), verdict) in own.into_iter().zip(verdicts) {
        scale.direct = verdict.route.is_direct();
        for step in steps {
            let both = step.link.p2pdma.min(step.link.nvidia_fs) == State::Blocks;
            let cause = step.cause.map(|cause| (scale.weigh(&step.link, cause), both));
            for (finding, both) in cause.into_iter().chain(step.notes.into_iter().map(|note| (note, false))) {
                let known = of_gpus.iter_mut().find(|(known, ..)| {
                    known.id == finding.id
                        && known.title == finding.title
                        && known.severity == finding.severity
                });
                match known {
                    Some((known, _, labels)) => {
                        known.devices.push(gpu.address.clone());
                        labels.push(gpu.label());
                    }
                    None => of_gpus.push((finding.on([gpu.address.clone()]), both, vec![gpu.label()])),
                }
            }
        }
    }
    found.extend(of_gpus.into_iter().map(|(mut finding, both, labels)| {
        if labels.len() < count {
            finding.title = format!("{}: {}", list(&labels), finding.title);
        }
        (finding, both)
    }));
    // Errors, what the route depends on, what is slow or missing besides, information.
    let rank = |finding: &Finding| match (finding.severity, decisive.contains(&finding.id)) {
        (Severity::Error, _) => 0,
        (Severity::Info, _) => 3,
        (_, true) => 1,
        (_, false) => 2,
    };
    found.sort_by_key(|(finding, both)| (rank(finding), std::cmp::Reverse(finding.severity), !both));
    found.into_iter().map(|(finding, _)| finding).collect()
}
