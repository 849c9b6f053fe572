//! Combinations of versions that are known to crash, hang or fail: one table.

use crate::finding::FixPart::{self, Assignment, Remark};
use crate::finding::{Finding, Fix, Severity, Side};
use crate::nccl::{self, Network};
use crate::ucx;
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{Facts, Nic, Port, version_pair};

type Version = [u32; 3];

/// The first three numbers of a version.
fn version_of(text: &str) -> Option<Version> {
    let mut parts = text.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().ok());
    let first = parts.next()??;
    let mut rest = parts.map_while(|part| part);
    Some([first, rest.next().unwrap_or(0), rest.next().unwrap_or(0)])
}

/// Where the combination strikes.
#[derive(Clone, Copy, Debug)]
enum Strikes {
    /// One library.
    Library(&'static str),
    /// One library, perhaps: the facts leave a part of the combination open.
    LibraryPerhaps(&'static str),
    /// One library if the facts show the rest of the combination, else perhaps.
    LibraryIf(fn(&Facts) -> bool, &'static str),
    /// The same, with some adapters.
    AdaptersPerhaps(fn(&Nic) -> bool, &'static str),
    /// One library is slow with some adapters.
    Slow(fn(&Nic) -> bool, &'static str),
    /// Every use of GPUDirect.
    Path,
    /// Every use of GPUDirect, perhaps.
    PathPerhaps,
}

/// A program or module whose version is looked at.
#[derive(Clone, Copy, Debug)]
enum Part {
    Nccl,
    Ucx,
    Driver,
    Kernel,
    NvPeerMem,
    GdrDrv,
    Verbs,
    /// Adapters of HPE Slingshot, whatever their version.
    Slingshot,
}

impl Part {
    const fn name(self) -> &'static str {
        match self {
            Self::Nccl => "NCCL",
            Self::Ucx => "UCX",
            Self::Driver => "NVIDIA driver",
            Self::Kernel => "kernel",
            Self::NvPeerMem => "nv_peer_mem",
            Self::GdrDrv => "gdrdrv",
            Self::Verbs => "rdma-core",
            Self::Slingshot => "Slingshot",
        }
    }

    /// Where it is changed.
    const fn side(self) -> Side {
        match self {
            Self::Driver | Self::Kernel | Self::NvPeerMem | Self::GdrDrv => Side::Host,
            Self::Nccl | Self::Ucx | Self::Verbs | Self::Slingshot => Side::Container,
        }
    }

    /// The version, and its source where that is not the part itself.
    fn version(self, analysis: &Analysis<'_>) -> Option<(Version, String, Option<&'static str>)> {
        let facts = analysis.facts;
        let module = |name: &str| facts.kernel.modules.known()?.get(name)?.version.clone();
        let text = match self {
            Self::Nccl => facts.libraries.nccl.known()?.as_ref()?.version.clone()?,
            Self::Ucx => facts.libraries.ucx.known()?.as_ref()?.version.clone()?,
            Self::Driver => facts.kernel.nvidia.known()?.as_ref()?.version.clone(),
            Self::Kernel => facts.kernel.release.clone(),
            Self::NvPeerMem => module("nv_peer_mem")?,
            Self::GdrDrv => {
                // The module tells no patch level; libgdrapi of the same release does, where it is
                // the host's.
                let module = module("gdrdrv")?;
                let library = facts.libraries.gdrapi.known().and_then(Option::as_ref);
                let release = format!("{module}.");
                let patch = library
                    .filter(|_| !facts.is_container())
                    .and_then(|library| library.version.clone())
                    .filter(|version| version.starts_with(&release));
                if let Some(patch) = patch {
                    return Some((version_of(&patch)?, patch, Some("libgdrapi")));
                }
                module
            }
            Self::Verbs => facts.libraries.verbs.known()?.as_ref()?.version.clone()?,
            Self::Slingshot => {
                let mut drivers = facts.nics.iter().filter_map(|nic| nic.driver.as_deref());
                return drivers
                    .any(|driver| driver.starts_with("cxi"))
                    .then(|| ([0; 3], "(cxi)".to_owned(), None));
            }
        };
        Some((version_of(&text)?, text, None))
    }
}

/// A row: versions from the first up to, but without, the second; the rest of the combination; what
/// happens; the public report; the way out.
struct KnownBad {
    part: Part,
    since: Version,
    before: Version,
    with: fn(&Analysis<'_>) -> bool,
    strikes: Strikes,
    happens: &'static str,
    source: &'static str,
    fix: &'static [FixPart<&'static str>],
}

const TABLE: [KnownBad; 14] = [
    KnownBad {
        part: Part::Ucx,
        since: [1, 22, 0],
        before: [1, 23, 0],
        with: |analysis| {
            let facts = analysis.facts;
            let verbs = facts.variable("UCX_TLS").is_some_and(|variable| variable.value.contains("rc_verbs"));
            verbs && facts.variable("UCX_RC_ECE").is_none() && facts.nics.iter().any(is_bond)
        },
        strikes: Strikes::Slow(is_bond, "UCX"),
        happens: "applies enhanced connection establishment (ECE) by default: rc_verbs over a bond falls to MB/s",
        source: "openucx/ucx#11955",
        fix: &[Assignment("UCX_RC_ECE=0"), Remark("or leave rc_mlx5 in UCX_TLS")],
    },
    KnownBad {
        part: Part::Ucx,
        since: [1, 22, 0],
        before: [1, 23, 0],
        with: |analysis| {
            let cuda = analysis
                .facts
                .libraries
                .cuda
                .known()
                .and_then(|cuda| version_pair(cuda.as_ref()?.version.as_deref()?));
            cuda.is_some_and(|cuda| cuda >= (13, 0)) && !ucx::is_off(analysis.facts, "UCX_CUDA_COPY_DMABUF")
        },
        strikes: Strikes::Library("UCX"),
        happens: "crashes with CUDA 13 when it probes dma-buf of pool allocations",
        source: "rapidsai/ucxx#749",
        fix: &[Assignment("UCX_CUDA_COPY_DMABUF=no"), Remark("or UCX 1.21")],
    },
    KnownBad {
        part: Part::Nccl,
        since: [2, 13, 0],
        before: [2, 14, 0],
        with: |analysis| {
            nccl::is_on(analysis.facts, "NCCL_DMABUF_ENABLE") != Some(false)
                && analysis
                    .best()
                    .iter()
                    .flatten()
                    .any(|pair| pair.export.is_yes() && pair.import.is_no() && pair.peermem.is_yes())
        },
        strikes: Strikes::Library("NCCL"),
        happens: "fails in ibv_reg_dmabuf_mr (Operation not supported) where only the GPU has dma-buf: it does not fall back to peer memory",
        source: "NVIDIA/nccl#778",
        fix: &[Assignment("NCCL_DMABUF_ENABLE=0"), Remark("or a newer NCCL")],
    },
    KnownBad {
        part: Part::Nccl,
        since: [2, 17, 0],
        before: [2, 19, 0],
        with: |analysis| {
            let over_ucx = |nic| matches!(nccl::network(analysis.facts, nic), Network::Ucx(_));
            analysis.facts.nics.iter().any(over_ucx)
        },
        strikes: Strikes::Library("NCCL"),
        happens: "closes connections of its UCX plugin in jobs above 128 ranks",
        source: "NVIDIA/nccl#947",
        fix: &[Assignment("NCCL_NET=IB"), Remark("or another version of NCCL")],
    },
    KnownBad {
        part: Part::Nccl,
        since: [2, 18, 0],
        before: [2, 20, 0],
        with: |analysis| {
            let facts = analysis.facts;
            let is_dual = |nic: &Nic| nic.ports.iter().filter(|port| port.is_active()).count() > 1;
            facts.nics.iter().any(is_dual)
                && facts.gpus.iter().any(|gpu| {
                    gpu.compute_capability.get().is_some_and(|cc| cc >= 90)
                        && gpu.nvlinks.get().unwrap_or(0) > 0
                })
        },
        strikes: Strikes::Library("NCCL"),
        happens: "hangs or aborts (free(): invalid next size) with NVLS and adapters of two active ports",
        source: "NVIDIA/nccl#1043",
        fix: &[Assignment("NCCL_NVLS_ENABLE=0"), Remark("or NCCL 2.20 and newer")],
    },
    KnownBad {
        part: Part::NvPeerMem,
        since: [0, 0, 0],
        before: [1, 2, 0],
        with: |analysis| {
            let ofed = analysis.facts.kernel.ofed.known().and_then(Option::as_deref);
            let digits = |text: &str| text.find(|c: char| c.is_ascii_digit()).map(|at| text[at..].to_owned());
            ofed.and_then(digits)
                .and_then(|text| version_pair(&text))
                .is_some_and(|ofed| ((5, 1)..(6, 0)).contains(&ofed))
        },
        strikes: Strikes::Path,
        happens: "deadlocks with OFED 5.1 to 5.9 when memory is freed (lock inversion, bug 2696789)",
        source: "Mellanox/nv_peer_memory#92",
        fix: &[Remark("use nv_peer_mem 1.2 or newer, or nvidia_peermem of driver 470 and newer")],
    },
    KnownBad {
        part: Part::Driver,
        since: [595, 0, 0],
        before: [595, 71, 5],
        with: |analysis| {
            let module = analysis.facts.kernel.nvidia.known().and_then(Option::as_ref);
            module.is_some_and(|module| module.open == Some(true))
        },
        strikes: Strikes::PathPerhaps,
        happens: "crashes the kernel when a debugger or a crash handler reads GPU mappings (nvidia_vma_access)",
        source: "NVIDIA/open-gpu-kernel-modules#1107",
        fix: &[Remark("upgrade the driver to 595.71.05 or newer")],
    },
    KnownBad {
        part: Part::Kernel,
        since: [7, 0, 0],
        before: [7, 1, 0],
        with: |analysis| {
            analysis.facts.kernel.release.contains("-nvidia")
                && analysis.facts.gpus.iter().any(|gpu| gpu.title().contains("GB10"))
        },
        strikes: Strikes::Library("NCCL"),
        happens: "refuses NCCL's registrations on GB10 (ibv_reg_mr_iova2: Cannot allocate memory): kexec handover (KHO) takes the contiguous memory (CmaTotal 0)",
        source: "MiaAI-Lab/DeepSeek-v4.1-Flash-DGX-Sparks#14",
        fix: &[Remark(
            "add kho=off to the kernel command line and boot again, or boot the 6.17 kernel of the same distribution",
        )],
    },
    KnownBad {
        part: Part::GdrDrv,
        since: [2, 4, 1],
        before: [2, 4, 2],
        with: |analysis| analysis.facts.kernel.nvidia_major().is_none_or(|major| major >= 555),
        // Short messages; without them UCX may still register.
        strikes: Strikes::LibraryPerhaps("UCX"),
        happens: "cannot pin GPU memory with drivers of 2024 and later (gdr_pin_buffer fails)",
        source: "NVIDIA/gdrcopy#305",
        fix: &[Remark("upgrade GDRCopy and its module gdrdrv to 2.4.2 or newer")],
    },
    KnownBad {
        part: Part::Nccl,
        since: [2, 28, 0],
        before: [2, 29, 3],
        with: |analysis| analysis.facts.machine.arch == "aarch64",
        // The slots last for some jobs.
        strikes: Strikes::LibraryPerhaps("NCCL"),
        happens: "leaks slots of its proxy thread on ARM: collectives stop without an error",
        source: "marin-community/marin#8038",
        fix: &[Remark("use NCCL 2.29.3 or newer")],
    },
    KnownBad {
        part: Part::Nccl,
        since: [2, 0, 0],
        before: [2, 13, 0],
        with: |analysis| {
            analysis.facts.nics.iter().any(nccl::is_efa) && analysis.facts.variable("NCCL_PROTO").is_none()
        },
        // The version of aws-ofi-nccl is no fact.
        strikes: Strikes::LibraryPerhaps("NCCL"),
        happens: "may corrupt data over EFA: its protocols LL and LL128 need packets in order",
        source: "NVIDIA/nccl#716",
        fix: &[Assignment("NCCL_PROTO=simple"), Remark("newer versions of aws-ofi-nccl set it themselves")],
    },
    KnownBad {
        part: Part::Nccl,
        since: [2, 22, 0],
        before: [2, 23, 0],
        with: |analysis| {
            analysis.facts.nics.iter().any(is_ethernet)
                && analysis.facts.variable("NCCL_IB_ECE_ENABLE").is_none()
        },
        strikes: Strikes::AdaptersPerhaps(is_ethernet, "NCCL"),
        happens: "is slow and unstable over some RoCE adapters by enhanced connection establishment (ECE)",
        source: "NVIDIA/nccl#1403",
        fix: &[Assignment("NCCL_IB_ECE_ENABLE=0"), Remark("to compare")],
    },
    KnownBad {
        part: Part::Verbs,
        since: [39, 0, 0],
        before: [51, 0, 0],
        with: |analysis| analysis.facts.nics.iter().any(is_broadcom),
        strikes: Strikes::AdaptersPerhaps(is_broadcom, "NCCL"),
        happens: "has a provider for bnxt_re that fails to create queue pairs from worker threads",
        source: "ROCm/MAD#215",
        fix: &[Remark("use a newer rdma-core, or the adapter vendor's libbnxt_re")],
    },
    KnownBad {
        part: Part::Slingshot,
        since: [0, 0, 0],
        before: [1, 0, 0],
        with: |analysis| {
            let facts = analysis.facts;
            let off = |name: &str| facts.variable(name).is_some_and(|variable| variable.value.trim() == "0");
            facts.gpus.iter().any(|gpu| gpu.title().contains("GH200"))
                && facts.kernel.is_loaded("gdrdrv") != Some(false)
                && !off("FI_HMEM_CUDA_USE_GDRCOPY")
                && !off("FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD")
        },
        strikes: Strikes::LibraryIf(|facts| facts.kernel.is_loaded("gdrdrv") == Some(true), "NCCL"),
        happens: "with GH200: copies of libfabric by GDRCopy fail (cxil_map: write error) or deliver wrong data to NCCL",
        source: "NVIDIA/nccl#2001, eth-cscs/cscs-docs#161",
        fix: &[
            Assignment("FI_HMEM_CUDA_USE_GDRCOPY=0"),
            Remark("MPI"),
            Assignment("FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD=0"),
        ],
    },
];

fn is_bond(nic: &Nic) -> bool {
    nic.name.contains("bond")
}

fn is_ethernet(nic: &Nic) -> bool {
    nic.ports.iter().any(Port::is_ethernet)
}

fn is_broadcom(nic: &Nic) -> bool {
    nic.driver.as_deref().is_some_and(|driver| driver.starts_with("bnxt_"))
}

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let facts = analysis.facts;
    let has_nic = analysis.has_hardware_nic();
    let devices = || facts.gpus.iter().map(|gpu| gpu.address.clone());
    let adapters = |is_one: fn(&Nic) -> bool| {
        facts.nics.iter().filter(move |nic| is_one(nic)).map(|nic| nic.name.clone())
    };
    TABLE
        .iter()
        .filter(|row| has_nic || matches!(row.part, Part::GdrDrv))
        .filter_map(|row| {
            let (version, text, source) = row.part.version(analysis)?;
            ((row.since..row.before).contains(&version) && (row.with)(analysis))
                .then_some((row, text, source))
        })
        .map(|(row, text, source)| {
            let finding = Finding::new(
                "known-bad",
                Severity::Warning,
                format!("{} {text} {}", row.part.name(), row.happens),
            )
            .why("This combination of versions is reported in public.")
            .seen("version", format!("{} {text}", source.unwrap_or(row.part.name())))
            .seen("report", row.source)
            .fix(Fix::of(row.part.side(), row.fix));
            let finding = match row.part {
                Part::Driver | Part::Kernel => finding.reboot(),
                Part::NvPeerMem | Part::GdrDrv => finding.root(),
                Part::Nccl | Part::Ucx | Part::Verbs | Part::Slingshot => finding,
            };
            match row.strikes {
                Strikes::Library(library) => finding.of_library(library).blocks().on(devices()),
                Strikes::LibraryIf(is_certain, library) if is_certain(facts) => {
                    finding.of_library(library).blocks().on(devices())
                }
                Strikes::LibraryPerhaps(library) | Strikes::LibraryIf(_, library) => {
                    finding.of_library(library).on(devices())
                }
                Strikes::Path => finding.blocks().on(devices()),
                Strikes::PathPerhaps => finding.on(devices()),
                Strikes::AdaptersPerhaps(is_one, library) => finding.of_library(library).on(adapters(is_one)),
                Strikes::Slow(is_one, library) => finding.of_library(library).slows().on(adapters(is_one)),
            }
        })
        .collect()
}
