//! What the model has no basis for: no source measured it, or what decides is unknown. Nothing is
//! predicted then.

use super::fabric::Kind;
use super::parts::{End, Memory, Parts, Software};
use super::route::NotDirect;
use super::soft;
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
        "the IOMMU translates the addresses of GPU or adapter: each packet passes it, and a fraction of the rate remains; boot with iommu=pt"
    )]
    Iommu,
    /// Published rates contradict each other.
    #[error(
        "reads of a GPU through a Xeon older than Skylake: published rates are 0.3 to 6 GB/s; put GPU and adapter below one switch"
    )]
    OldXeon,
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
    NoBasis(#[from] NoBasis),
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
    if parts.iommu && parts.gpu_over_pcie() {
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
        _ => {}
    }
    let reads_gpu = parts.gpu_over_pcie() && parts.is_on_gpu(End::Source);
    if reads_gpu && parts.through_processor() && parts.platform == Platform::XeonOld {
        return Err(NoBasis::OldXeon);
    }
    let far = parts.gpu_over_pcie() && parts.distance == Distance::Sys;
    if (far || parts.far_rails > 0) && parts.platform.between_sockets().is_none() {
        return Err(NoBasis::Sockets(parts.platform.name()));
    }
    let gbytes = parts.link.goodput(parts.mtu) * f64::from(parts.rails);
    let is_real = parts.link.kind != Kind::Loopback;
    if is_real && parts.memory == Memory::Host && !parts.dram_is_known && gbytes > ANY_SERVER {
        return Err(NoBasis::Dram { rails: parts.rails, gbytes });
    }
    Ok(())
}

/// Whether collectives of so many bytes can be predicted.
///
/// # Errors
/// They cannot, and why.
pub(super) const fn collective(bytes: u64) -> Result<(), NoBasis> {
    if bytes < LONG { Err(NoBasis::NcclProtocol) } else { Ok(()) }
}
