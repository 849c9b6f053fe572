//! Registration of GPU memory with an adapter: peer memory and dma-buf, which of the two is
//! missing, and why.

use std::collections::BTreeMap;

use super::failed_step::FailedStep;
use super::peer_module::{self, PeerModule};
use super::{list, one_or};
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::adapters;
use nobounce_topology::analysis::{Analysis, Pair};
use nobounce_topology::facts::{Facts, Gpu, Registration};
use nobounce_topology::gpudirect;
use nobounce_topology::methods::{self, Answer};
use nobounce_topology::usable;

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    if !analysis.has_hardware_nic() || analysis.facts.gpus.is_empty() {
        return found;
    }
    // Each cause once, with the pairs it concerns.
    let mut causes: BTreeMap<&'static str, RegistrationCause<'_>> = BTreeMap::new();
    for pair in analysis.pairs.iter().filter(|pair| !pair.nic.is_software()) {
        for (answer, side) in [
            (&pair.peermem, MethodSide::Peermem),
            (&pair.export, MethodSide::Gpu),
            (&pair.import, MethodSide::Nic),
            (&pair.register, MethodSide::Nic),
        ] {
            // A pair that is refused alone says nothing about the GPU's other methods: the other
            // pairs report those.
            let apart = pair.refused_alone() && !matches!(answer, Answer::No("registration-pair", _));
            if let (Answer::No(id, why), false) = (answer, apart) {
                // A pair that was actually registered by dma-buf proves both of its sides.
                if pair.proven == Some("dma-buf") && !matches!(side, MethodSide::Peermem) {
                    continue;
                }
                causes
                    .entry(id)
                    .or_insert_with(|| RegistrationCause { why, side, pairs: Vec::new() })
                    .pairs
                    .push(pair);
            }
        }
    }
    for (id, cause) in &causes {
        found.extend(finding(analysis, id, cause));
    }
    sizes(analysis, &mut found);
    unproven(analysis, &mut found);
    peer_module::modules(analysis, &mut found);
    found
}

#[derive(Clone, Copy, Debug)]
enum MethodSide {
    Peermem,
    Gpu,
    Nic,
}

#[derive(Debug)]
struct RegistrationCause<'a> {
    why: &'a str,
    side: MethodSide,
    pairs: Vec<&'a Pair<'a>>,
}

impl RegistrationCause<'_> {
    /// Info if each of its pairs has another method or probably has, a warning if it may have, an
    /// error if it has none.
    fn severity(&self, facts: &Facts, id: &str) -> Severity {
        let likely = |pair: &Pair<'_>| methods::peermem_is_likely(facts, pair.nic, &pair.peermem);
        let worst = self.pairs.iter().map(|pair| match self.side {
            MethodSide::Peermem if pair.dma_buf() => Severity::Info,
            MethodSide::Peermem if pair.no_dma_buf() => Severity::Error,
            // The type of the adapter is no fault while its own method may work.
            MethodSide::Peermem if id == "peermem-nic" || pair.export.is_yes() => Severity::Info,
            MethodSide::Peermem => Severity::Warning,
            MethodSide::Gpu | MethodSide::Nic if pair.peermem.is_yes() || likely(pair) => Severity::Info,
            MethodSide::Gpu | MethodSide::Nic if pair.peermem.is_no() => Severity::Error,
            // A model without dma-buf is meant to use peer memory.
            MethodSide::Gpu | MethodSide::Nic if id == "gpu-too-old" => Severity::Info,
            MethodSide::Gpu | MethodSide::Nic => Severity::Warning,
        });
        worst.max().unwrap_or(Severity::Info)
    }

    /// Whether every pair is known to have the other method.
    fn is_replaced(&self) -> bool {
        self.pairs.iter().all(|pair| match self.side {
            MethodSide::Peermem => pair.dma_buf(),
            MethodSide::Gpu | MethodSide::Nic => pair.peermem.is_yes(),
        })
    }

    fn devices(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .pairs
            .iter()
            .map(|pair| match self.side {
                MethodSide::Nic => pair.nic.name.clone(),
                MethodSide::Peermem | MethodSide::Gpu => pair.gpu.address.clone(),
            })
            .collect();
        names.sort();
        names.dedup();
        names
    }
}

const STAGED: &str = "Without peer memory and dma-buf every byte is copied through host memory.";
const DMA_BUF_WORKS: &str = "dma-buf works here. Programs that support only peer memory (NCCL before 2.13, UCX before 1.14, perftest without --use_cuda_dmabuf) still stage or fail.";
const PEER_MEMORY_WORKS: &str = "Peer memory works here, and NCCL, UCX and perftest use it. Only programs that need dma-buf (perftest with --use_cuda_dmabuf) fail.";

const OTHER_LIKELY: &str =
    "The other method (peer memory or dma-buf) is probably available: no probe has shown that it works.";

fn finding(analysis: &Analysis<'_>, id: &str, cause: &RegistrationCause<'_>) -> Option<Finding> {
    let severity = severity_of(analysis, id, cause);
    let why = match (severity, cause.side) {
        (Severity::Info, _) if !cause.is_replaced() => OTHER_LIKELY,
        (Severity::Info, MethodSide::Peermem) => DMA_BUF_WORKS,
        (Severity::Info, MethodSide::Gpu | MethodSide::Nic) => PEER_MEMORY_WORKS,
        _ => STAGED,
    };
    let case = Case { analysis, cause, severity, why, names: cause.devices() };
    if id == "registration-pair" {
        return Some(case.refused_pairs());
    }
    // The check of GPUs and drivers explains the others.
    let finding = case
        .peer_memory(id)
        .or_else(|| case.export(id))
        .or_else(|| case.kernel(id))
        .or_else(|| case.import(id))?;
    let finding = if severity >= Severity::Warning { finding.blocks() } else { finding };
    Some(finding.on(case.names))
}

/// A refused pair is at most a warning while each GPU keeps its best adapter.
fn severity_of(analysis: &Analysis<'_>, id: &str, cause: &RegistrationCause<'_>) -> Severity {
    match cause.severity(analysis.facts, id) {
        severity if id == "registration-pair" => {
            let best = analysis.best();
            let hurt = best.iter().flatten().any(|best| {
                cause
                    .pairs
                    .iter()
                    .any(|pair| pair.gpu.address == best.gpu.address && pair.nic.name == best.nic.name)
            });
            if hurt { severity } else { severity.min(Severity::Warning) }
        }
        severity => severity,
    }
}

/// A cause carries all that its finding tells.
#[derive(Debug)]
struct Case<'a> {
    analysis: &'a Analysis<'a>,
    cause: &'a RegistrationCause<'a>,
    severity: Severity,
    why: &'static str,
    names: Vec<String>,
}

impl Case<'_> {
    /// The platform refuses single pairs whose GPU registers with another adapter.
    fn refused_pairs(&self) -> Finding {
        let pairs: Vec<_> = self
            .cause
            .pairs
            .iter()
            .map(|pair| format!("{} with {}", pair.gpu.address, pair.nic.name))
            .collect();
        Finding::new("registration-pair", self.severity, format!("memory cannot be registered for {}, but can with another adapter", list(&pairs)))
            .why("The platform blocks this adapter from this GPU (ACS, IOMMU, another root complex). Engines that register with every adapter fail; NCCL and UCX use the near one and work.")
            .seen("registration", self.cause.why)
            .fixes(self.adapters_that_register())
    }

    /// Variables that restrict the processes of a GPU to the adapters that register its memory.
    fn adapters_that_register(&self) -> Vec<Fix> {
        let facts = self.analysis.facts;
        let mut gpus: Vec<&Gpu> = Vec::new();
        for pair in &self.cause.pairs {
            if !gpus.iter().any(|gpu| gpu.address == pair.gpu.address) {
                gpus.push(pair.gpu);
            }
        }
        let works = |gpu: &Gpu| {
            let refuses = |name: &str| {
                self.cause.pairs.iter().any(|pair| pair.gpu.address == gpu.address && pair.nic.name == name)
            };
            let mut names: Vec<&str> = Vec::new();
            for registration in facts.registrations.iter().filter(|r| r.gpu == gpu.address && r.probe.ok) {
                if !names.contains(&registration.nic.as_str()) && !refuses(&registration.nic) {
                    names.push(&registration.nic);
                }
            }
            names
        };
        let ports_of = |name: &str| -> Vec<String> {
            let ports = facts.nics.iter().filter(|nic| nic.name == name).flat_map(|nic| &nic.ports);
            let active = ports.filter(|port| port.may_be_active());
            active.map(|port| format!("{name}:{}", port.number)).collect()
        };
        let fix = |gpu: &Gpu| {
            let names = works(gpu);
            let ports: Vec<String> = names.iter().flat_map(|name| ports_of(name)).collect();
            // `=` takes the names as they are, not as beginnings.
            Fix::container()
                .set(format!("NCCL_IB_HCA=={} UCX_NET_DEVICES={}", names.join(","), ports.join(",")))
                .remark(format!("for processes of {}, or the device list of the engine", gpu.label()))
        };
        gpus.into_iter().map(fix).collect()
    }

    /// Peer memory is missing, or does nothing.
    fn peer_memory(&self, id: &str) -> Option<Finding> {
        Some(match id {
            "peermem-not-loaded" => self.peermem_not_loaded(),
            "peermem-not-registered" => self.peermem_not_registered(),
            "peermem-no-api" => {
                let finding = Finding::new(
                    "peermem-no-api",
                    self.severity,
                    "the kernel's ib_core has no peer-memory interface",
                )
                .why(self.why)
                .seen("/proc/kallsyms", "no ib_register_peer_memory_client");
                // Where dma-buf is stopped as well, its own finding names the way there.
                if self.cause.pairs.iter().all(|pair| pair.no_dma_buf()) {
                    let fix = "install OFED's or DOCA's drivers, whose ib_core has the interface";
                    finding.fix(Fix::host().remark(fix)).reboot()
                } else {
                    finding
                        .fix(Fix::host().remark("use dma-buf (kernel 5.12 or newer on both sides), or install OFED/DOCA's drivers"))
                        .root()
                }
            }
            "peermem-nic" => Finding::new("peermem-nic", self.severity, self.cause.why.to_owned())
                .why(format!("A loaded and registered module has no effect for these adapters. {}", self.why))
                .seen("driver", self.driver())
                .fix(Fix::both().remark("use dma-buf, or the vendor's library")),
            "peermem-amd" => self.peermem_amd(),
            _ => return None,
        })
    }

    /// The module is loaded and does nothing.
    fn peermem_not_registered(&self) -> Finding {
        let facts = self.analysis.facts;
        let clients = facts.kernel.peer_memory_clients.known().map_or_else(
            || "unread".to_owned(),
            |clients| if clients.is_empty() { "no client".to_owned() } else { clients.join(" ") },
        );
        let module = PeerModule(facts);
        let title = format!("the peer-memory module is loaded but has no effect: {}", self.cause.why);
        let finding = Finding::new("peermem-not-registered", self.severity, title)
            .why(format!(
                "NCCL and UCX check only for the module's file: they will try it, and fail or stage. {}",
                self.why
            ))
            .seen(format!("/sys/module/{}", module.loaded().unwrap_or_else(|| module.name())), "loaded")
            .seen("/sys/kernel/mm/memory_peers", clients);
        if module.has_no_interface() {
            // Loading it again cannot help.
            return module.fix(finding);
        }
        finding.fix(module.reload()).root()
    }

    /// No module for peer memory is loaded.
    fn peermem_not_loaded(&self) -> Finding {
        let module = PeerModule(self.analysis.facts);
        let name = module.name();
        let mut why = self.why.to_owned();
        if self.analysis.facts.kernel.is_loaded("gdrdrv") == Some(true) {
            why.push_str(" gdrdrv does not replace it: a CPU mapping of GPU memory (gdr_map) has no pages that ibv_reg_mr could pin.");
        }
        let finding = Finding::new("peermem-not-loaded", self.severity, format!("{name} is not loaded"))
            .why(why)
            .seen(format!("/sys/module/{name}"), "not there");
        module.fix(finding)
    }

    /// The driver amdgpu does not register with ib_core.
    fn peermem_amd(&self) -> Finding {
        let facts = self.analysis.facts;
        let new_kernel = facts.kernel.version().is_some_and(|version| version >= (6, 3));
        let finding = Finding::new("peermem-amd", self.severity, "amdgpu is not registered with ib_core")
            .why(self.why)
            .seen("/sys/kernel/mm/memory_peers", "no amdkfd");
        if new_kernel {
            let fix = Fix::container().set("NCCL_DMABUF_ENABLE=1");
            finding
                .seen("uname -r", facts.kernel.release.clone())
                .fix(fix.remark("for RCCL: since kernel 6.3 amdgpu cannot use OFED's interface, but dma-buf"))
        } else {
            let fix = "reinstall amdgpu-dkms after OFED, so that it is built with its interface";
            finding.fix(Fix::host().remark(fix)).reboot()
        }
    }

    /// The GPU or its driver exports no dma-bufs.
    fn export(&self, id: &str) -> Option<Finding> {
        Some(match id {
            "closed-module" => Finding::new("closed-module", self.severity, "NVIDIA's closed kernel module is loaded, which does not export dma-bufs")
                .why(self.why)
                .seen("/proc/driver/nvidia/version", module_line(self.analysis))
                .fix(Fix::host().remark("install the open module of the driver's branch").run(format!("sudo apt install {}", open_package(self.analysis.facts.kernel.nvidia_major()))).remark("dnf: nvidia-driver:open-dkms"))
                .reboot(),
            "driver-too-old" => Finding::new("driver-too-old", self.severity, format!("{}: no dma-buf export before 515", self.cause.why))
                .why(self.why)
                .seen("/proc/driver/nvidia/version", module_line(self.analysis))
                .fix(Fix::host().remark("upgrade to a current driver with the open kernel module"))
                .reboot(),
            "gpu-too-old" => Finding::new("gpu-too-old", self.severity, format!("{}: older than Turing, so the open module does not support {} and dma-bufs are unavailable", list(&self.names), one_or(&self.names, "it", "them")))
                .why(self.why)
                .seen("compute capability", self.cause.pairs.first().and_then(|pair| pair.gpu.compute_capability.get()).map_or_else(String::new, |cc| format!("{}.{}", cc / 10, cc % 10)))
                .fix(Fix::both().remark("a Turing or newer GPU; this one registers by peer memory only")),
            "dmabuf-export" => self.failed(FailedStep::export)?,
            _ => return None,
        })
    }

    /// The kernel passes no dma-bufs on.
    fn kernel(&self, id: &str) -> Option<Finding> {
        Some(match id {
            "kernel-no-dmabuf" => Finding::new("kernel-no-dmabuf", self.severity, "the kernel was built without dma-buf")
                .why(self.why)
                .seen("CONFIG_DMA_SHARED_BUFFER", "n")
                .fix(Fix::host().remark("use a kernel of the distribution, or build with CONFIG_DMA_SHARED_BUFFER=y"))
                .reboot(),
            "kernel-no-p2pdma" => Finding::new("kernel-no-p2pdma", self.severity, self.cause.why)
                .why(format!("Sharing memory between devices needs CONFIG_PCI_P2PDMA; amdgpu also needs CONFIG_DMABUF_MOVE_NOTIFY and CONFIG_HSA_AMD_P2P. {}", self.why))
                .seen("kernel options", self.cause.why)
                .fix(Fix::host().remark("use a kernel that has these options, or OFED's drivers with peer memory (nvidia_peermem, amdgpu-dkms)"))
                .reboot(),
            "kernel-too-old" => Finding::new("kernel-too-old", self.severity, format!("{}: its verbs do not support dma-buf", self.cause.why))
                .why(self.why)
                .seen("uname -r", self.analysis.facts.kernel.release.clone())
                .fix(Fix::host().remark("use kernel 5.12 or newer, or OFED/DOCA's drivers"))
                .reboot(),
            _ => return None,
        })
    }

    /// The verbs library or the adapter takes no dma-bufs.
    fn import(&self, id: &str) -> Option<Finding> {
        Some(match id {
            "verbs-too-old" => Finding::new(
                "verbs-too-old",
                self.severity,
                "libibverbs is older than rdma-core 34: it has no ibv_reg_dmabuf_mr",
            )
            .why(self.why)
            .seen("libibverbs.so.1", "no ibv_reg_dmabuf_mr")
            .fix(Fix::container().remark("install rdma-core 34 or newer (in the container's image, too)"))
            .root(),
            "nic-no-dmabuf" => self.adapter_type(),
            "dmabuf-nic" => self
                .failed(FailedStep::import)
                .or_else(|| self.failed(|pair| FailedStep::register(self.analysis.facts, pair)))?,
            "dmabuf-register" => self.failed(|pair| FailedStep::register(self.analysis.facts, pair))?,
            _ => return None,
        })
    }

    /// The finding of a failed step, from the first pair whose facts show it.
    fn failed(&self, step: impl Fn(&Pair<'_>) -> Option<FailedStep>) -> Option<Finding> {
        let step = self.cause.pairs.iter().find_map(|pair| step(pair))?;
        Some(step.finding(self.severity, &self.names, self.why))
    }

    /// An adapter whose type has no dma-buf.
    fn adapter_type(&self) -> Finding {
        let neither = self.cause.pairs.iter().all(|pair| adapters::without_peer_memory(pair.nic).is_some());
        let finding = Finding::new(
            "nic-no-dmabuf",
            self.severity,
            format!("{}: {}", list(&self.names), self.cause.why),
        )
        .seen("driver", self.driver());
        if neither {
            finding
                .why("Its verbs have neither dma-buf nor peer memory: no driver, module or IOMMU setting changes that. Programs on verbs stage GPU memory.")
                .fix(Fix::both().remark("Omni-Path: use PSM2 with CUDA (libpsm2 built with PSM_CUDA) or libfabric's opx provider, by NCCL's OFI plugin or Open MPI's ofi; otherwise stage"))
        } else {
            finding
                .why(format!(
                    "No kernel and no version of rdma-core adds it: only peer memory is left. {}",
                    self.why
                ))
                .fix(Fix::both().remark("use peer memory"))
        }
    }

    fn driver(&self) -> String {
        self.cause.pairs.first().and_then(|pair| pair.nic.driver.clone()).unwrap_or_default()
    }
}

/// The package of the open module: Ubuntu's up to 559, then NVIDIA's, which serves only the current
/// branch under one name since 590.
fn open_package(major: Option<u32>) -> String {
    match major {
        Some(major @ ..560) => format!("nvidia-driver-{major}-open"),
        Some(major @ 560..590) => format!("nvidia-open-{major}"),
        _ => "nvidia-open".to_owned(),
    }
}

fn module_line(analysis: &Analysis<'_>) -> String {
    analysis.facts.kernel.nvidia.known().and_then(Option::as_ref).map_or_else(String::new, |module| {
        let kind = match module.open {
            Some(true) => "open",
            Some(false) => "closed",
            None => "unknown kind",
        };
        format!("{} ({kind})", module.version)
    })
}

/// Pairs that register little memory and refuse more.
fn sizes(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let all = &analysis.facts.registrations;
    let smaller = |failed: &Registration| {
        let works = |r: &&Registration| {
            r.probe.ok
                && r.bytes < failed.bytes
                && (&r.gpu, &r.nic, &r.way) == (&failed.gpu, &failed.nic, &failed.way)
        };
        all.iter().filter(works).map(|r| r.bytes).max()
    };
    let hit: Vec<_> =
        all.iter().filter(|r| !r.probe.ok).filter_map(|failed| Some((failed, smaller(failed)?))).collect();
    let Some((first, works)) = hit.first() else { return };
    let mut names: Vec<String> = hit.iter().map(|(failed, _)| failed.gpu.clone()).collect();
    names.dedup();
    let (works, fails) = (super::bytes(*works), super::bytes(first.bytes));
    found.push(
        Finding::new("registration-size", Severity::Warning, format!("{}: {works} of memory can be registered, {fails} cannot", list(&names)))
            .why("Programs that register large buffers fail although a test with a small one works: BAR1, the limit of locked memory, or the adapter's tables are too small.")
            .seen(format!("{} of {fails} with {}", first.way, first.nic), first.probe.detail.clone())
            .fix(Fix::both().run("nvidia-smi -q -d MEMORY | grep -A3 BAR1; ulimit -l"))
            .slows()
            .on(names),
    );
}

/// No method is proven, and none is refused for certain.
fn unproven(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let open: Vec<&Pair<'_>> = analysis
        .pairs
        .iter()
        .filter(|pair| {
            !pair.nic.is_software() && pair.proven.is_none() && !pair.dma_buf() && !pair.peermem.is_yes()
        })
        .filter(|pair| !(pair.no_dma_buf() && pair.peermem.is_no()))
        // A GPU or an adapter that cannot be used at all has its own finding.
        .filter(|pair| !gpudirect::waits_for_fabric(pair.gpu))
        .filter(|pair| {
            !usable::gpu(analysis.facts, pair.gpu).is_no() && !usable::nic(analysis.facts, pair.nic).is_no()
        })
        .collect();
    let Some(first) = open.first() else { return };
    let mut reasons: Vec<String> = Vec::new();
    for answer in [&first.export, &first.import, &first.peermem] {
        if let Answer::Unknown(why) = answer
            && !reasons.contains(why)
        {
            reasons.push(why.clone());
        }
    }
    let mut names: Vec<String> = open.iter().map(|pair| pair.gpu.address.clone()).collect();
    names.dedup();
    found.push(
        Finding::new(
            "registration-unproven",
            Severity::Unknown,
            "registration of GPU memory with the adapters was not proved",
        )
        .why("The facts are not sufficient; the verdict for these pairs is uncertain.")
        .seen("probes", reasons.join("; "))
        .fix(
            Fix::both()
                .run("nobounce doctor")
                .remark("on the machine, where CUDA and the adapters can be opened"),
        )
        .on(names),
    );
}
