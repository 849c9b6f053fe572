//! What the model has no basis for: no source measured it, or what decides is unknown. Nothing is
//! predicted then.

use super::constants as c;
use super::fabric::Kind;
use super::interval::{Class, Length};
use super::parts::{End, Memory, Op, Parts, Software};
use super::route::NotDirect;
use super::soft;
use nobounce_topology::facts::GpuVendor;
use nobounce_topology::platform::Platform;
use nobounce_topology::tree::Distance;

/// Why nothing is predicted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NoBasis {
    /// Amazon's adapters.
    #[error(
        "EFA's time for one message depends on its own protocol, of which no figures are published; messages from 1 MiB on are predicted"
    )]
    Efa,
    /// A socket has other limits: system calls, congestion control.
    #[error("TCP is bound by the kernel's network stack, which the model does not have")]
    Tcp,
    /// A GPU posts the work requests.
    #[error("GPU-initiated transfers depend on how many thread blocks post, which the model does not have")]
    GpuInitiated,
    /// UCX takes other protocols with every version.
    #[error(
        "UCX's protocol for GPU messages of this size depends on its version and settings: published rates differ by a factor of six on like hardware"
    )]
    UcxProtocol,
    /// The rates of two clusters differ too much.
    #[error(
        "the core copies and matches messages below 64 KiB: published MPI rates differ by a factor of three on like adapters"
    )]
    MpiCore,
    /// One source only: nothing to validate it with.
    #[error("of NIXL's messages below 1 MiB one source is published, which cannot be validated")]
    Nixl,
    /// NCCL changes its protocol below.
    #[error("below 1 MiB NCCL uses the protocols LL and LL128, which the model does not have")]
    NcclProtocol,
    /// The run was of something else.
    #[error("the calibration has no run over {0}; add one with `nobounce bench` and --calibrate")]
    NotCalibrated(String),
    /// Nothing flows.
    #[error("{0}: bring it up, or name another adapter with --nic or a link with --link")]
    PortDown(String),
    /// Each packet passes the processor's translation.
    #[error(
        "the IOMMU translates the addresses of the GPU or the adapter: each packet passes it, and a fraction of the rate remains; boot with iommu=pt"
    )]
    Iommu,
    /// Published rates contradict each other.
    #[error(
        "reads of a GPU through a Xeon older than Skylake: published rates are 0.3 to 6 GB/s; put GPU and adapter below one switch"
    )]
    OldXeon,
    /// The same of Zen's generations.
    #[error(
        "reads of a GPU through an AMD Zen CPU: published rates are 6 GB/s to line rate; put GPU and adapter below one switch, and state it with --distance PIX"
    )]
    ZenReads,
    /// Its speed is a property of the processor.
    #[error("the link between the sockets is unknown for {0}; name the processor with --platform")]
    Sockets(&'static str),
    /// Memory may be slower than the adapters.
    #[error(
        "{rails} adapters carry up to {gbytes:.0} GB/s and the bandwidth of host memory is unknown; add --dram or --platform"
    )]
    Dram {
        /// Adapters.
        rails: u32,
        /// What they carry.
        gbytes: f64,
    },
}

/// Why there is no estimate.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NoEstimate {
    /// The path does not exist.
    #[error(transparent)]
    NotDirect(#[from] NotDirect),
    /// It may exist, and nothing is known of it.
    #[error("not predicted: {0}")]
    NoBasis(NoBasis),
}

/// Not as `source()`: the message includes the reason, and an error chain would print it twice.
impl From<NoBasis> for NoEstimate {
    fn from(why: NoBasis) -> Self {
        Self::NoBasis(why)
    }
}

/// GB/s that the memory of every known server carries: the least of the table of processors, less
/// what is never reached.
const ANY_SERVER: f64 = 60.0;
/// Messages from which the slots and the link decide, whatever the protocol.
const LONG: u64 = 1 << 20;
/// MPI messages of host memory from which the adapters decide.
const MPI_COPIES: u64 = 64 << 10;

/// Whether transfers of these parts can be predicted, direct and staged alike.
///
/// # Errors
/// They cannot, and why.
pub(super) fn known(parts: &Parts, size: u64) -> Result<(), NoBasis> {
    if let Some(port) = &parts.port_down {
        return Err(NoBasis::PortDown(port.clone()));
    }
    if let Some(what) = soft::not_calibrated(parts) {
        return Err(NoBasis::NotCalibrated(what));
    }
    // Two processes of one machine use no adapter, whose addresses would be translated.
    if parts.iommu && parts.link.kind != Kind::Loopback {
        return Err(NoBasis::Iommu);
    }
    if parts.link.kind == Kind::Efa && size < LONG {
        return Err(NoBasis::Efa);
    }
    if parts.link.kind == Kind::Tcp {
        return Err(NoBasis::Tcp);
    }
    if parts.software == Software::GpuInitiated {
        return Err(NoBasis::GpuInitiated);
    }
    let gpu = parts.memory == Memory::Gpu;
    match parts.software {
        Software::Mpi if gpu && size < LONG => return Err(NoBasis::UcxProtocol),
        Software::Mpi if size < MPI_COPIES => return Err(NoBasis::MpiCore),
        Software::Nixl if size < LONG => return Err(NoBasis::Nixl),
        Software::Nccl if size < LONG => return Err(NoBasis::NcclProtocol),
        _ => {}
    }
    // A core moves the bytes of the software NIC: no packet passes between devices.
    let forwards = parts.link.kind != Kind::Loopback && parts.software != Software::Nobounce;
    let reads_gpu = forwards && parts.gpu_over_pcie() && parts.is_on_gpu(End::Source);
    if reads_gpu && parts.through_processor() && parts.platform == Platform::XeonOld {
        return Err(NoBasis::OldXeon);
    }
    if reads_gpu && (parts.through_processor() || !parts.is_placed) && parts.platform == Platform::Zen {
        return Err(NoBasis::ZenReads);
    }
    let far = parts.gpu_over_pcie() && parts.distance == Distance::Sys;
    if forwards && (far || parts.far_rails > 0) && parts.platform.between_sockets().is_none() {
        return Err(NoBasis::Sockets(parts.platform.name()));
    }
    if parts.memory == Memory::Host { host_memory(parts, parts.rails) } else { Ok(()) }
}

/// Whether host memory is known to be faster than so many adapters, or how fast it is.
///
/// # Errors
/// Neither is known.
pub(super) fn host_memory(parts: &Parts, rails: u32) -> Result<(), NoBasis> {
    let gbytes = parts.link.goodput(parts.mtu) * f64::from(rails);
    let is_real = parts.link.kind != Kind::Loopback;
    let least = match parts.platform {
        // What is assumed is the least of these classes, and staging crosses it twice.
        Platform::XeonSkylake | Platform::EmeraldRapids => (parts.dram / c::DRAM_PASSES).max(ANY_SERVER),
        _ => ANY_SERVER,
    };
    if is_real && !parts.dram_is_known && gbytes > least {
        return Err(NoBasis::Dram { rails, gbytes });
    }
    Ok(())
}

impl Parts {
    /// What of the network and the slots no scored figure validates.
    fn unvalidated_link(&self, size: u64) -> Vec<&'static str> {
        let slots = [Some(self.nic), self.gpu];
        let is_infiniband = self.link.kind == Kind::InfiniBand;
        let is_roce = matches!(self.link.kind, Kind::RoceV1 | Kind::RoceV2 | Kind::RoceV2Ipv6);
        // One figure of host memory.
        let has_roce = self.memory == Memory::Host && Length::of(size) == Length::Middle;
        let found = [
            (self.link.kind == Kind::Efa, "EFA"),
            (self.link.kind == Kind::Iwarp, "iWARP"),
            (self.link.kind == Kind::InfiniBandGlobal, "InfiniBand with global headers"),
            (is_roce && self.memory == Memory::Gpu, "RoCE with GPU memory"),
            (is_roce && self.memory == Memory::Host && !has_roce, "RoCE below 8 KiB and from 1 MiB on"),
            (is_infiniband && self.link.gbps < 50.0, "InfiniBand before FDR"),
            (self.link.gbps > 400.0, "links above 400 Gb/s"),
            (slots.iter().flatten().any(|slot| slot.generation > 5), "PCIe Gen6 and later"),
        ];
        found.into_iter().filter_map(|(is_so, what)| is_so.then_some(what)).collect()
    }

    /// What of the way between GPU and adapter no scored figure validates.
    fn unvalidated_path(&self) -> Vec<&'static str> {
        if !self.gpu_over_pcie() {
            return Vec::new();
        }
        if !self.is_placed {
            return vec!["an assumed distance between GPU and adapter"];
        }
        let through = self.through_processor();
        let is_other = self.platform != Platform::EmeraldRapids && self.platform != Platform::Other;
        let found = [
            (self.distance == Distance::Pxb, "several PCIe switches between GPU and adapter (PXB)"),
            (self.distance == Distance::Phb, "one host bridge between GPU and adapter (PHB)"),
            (self.distance == Distance::Sys, "a GPU on another socket than its adapter (SYS)"),
            (self.acs_redirect, "ACS redirect"),
            (through && self.platform == Platform::Other, "an unknown processor between GPU and adapter"),
            (through && is_other, "a processor other than Emerald Rapids between GPU and adapter"),
        ];
        found.into_iter().filter_map(|(is_so, what)| is_so.then_some(what)).collect()
    }

    /// What of a transfer of so many bytes no scored figure validates. Its interval is the widest.
    /// `tests/validated.rs` compares this with the scored figures.
    #[must_use]
    pub fn unvalidated(&self, size: u64) -> Vec<&'static str> {
        // The software NIC has an interval of its own.
        if self.link.kind == Kind::Loopback || self.software == Software::Nobounce {
            return Vec::new();
        }
        let gpu = self.memory == Memory::Gpu;
        let (host, read) = (self.memory == Memory::Host, self.operation == Op::Read);
        let length = Length::of(size);
        let found = [
            (gpu && length != Length::Long, "GPU memory below 1 MiB"),
            (host && !read && length == Length::Short, "writes of host memory below 8 KiB"),
            (host && read && length == Length::Middle, "reads of host memory from 8 KiB to 1 MiB"),
            (gpu && read, "reads of GPU memory by RDMA READ"),
            (self.host_end.is_some(), "host memory at one end"),
            (self.far_rails > 0, "adapters on another socket than their GPU"),
            (gpu && self.gpu_vendor != GpuVendor::Nvidia, "GPUs other than NVIDIA's"),
        ];
        let mut all = self.unvalidated_link(size);
        all.extend(self.unvalidated_path());
        all.extend(found.into_iter().filter_map(|(is_so, what)| is_so.then_some(what)));
        all
    }

    /// What no scored figure validates of any of these sizes, each once.
    #[must_use]
    pub fn unvalidated_of(&self, sizes: impl Iterator<Item = u64>) -> Vec<&'static str> {
        let mut found = Vec::new();
        for what in sizes.flat_map(|size| self.unvalidated(size)) {
            if !found.contains(&what) {
                found.push(what);
            }
        }
        found
    }

    /// The class of the direct transfer.
    #[must_use]
    pub fn class(&self, size: u64) -> Class {
        match self.software {
            _ if !self.unvalidated(size).is_empty() => Class::Unvalidated,
            Software::Verbs | Software::Nobounce | Software::GpuInitiated => Class::Verbs,
            Software::Mpi | Software::Nixl | Software::Nccl => Class::Library,
        }
    }

    /// The class of a staged transfer: no packet passes between GPU and adapter.
    #[must_use]
    pub fn staged_class(&self, size: u64) -> Class {
        if self.unvalidated_link(size).is_empty() { Class::Staged } else { Class::Unvalidated }
    }

    /// The class of a collective.
    #[must_use]
    pub fn collective_class(&self, size: u64) -> Class {
        if self.unvalidated(size).is_empty() { Class::Collective } else { Class::Unvalidated }
    }
}

/// Whether collectives of so many bytes can be predicted.
///
/// # Errors
/// They cannot, and why.
pub(super) const fn collective(bytes: u64) -> Result<(), NoBasis> {
    if bytes < LONG { Err(NoBasis::NcclProtocol) } else { Ok(()) }
}
