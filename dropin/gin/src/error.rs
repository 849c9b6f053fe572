//! Why a call of NCCL fails.

use nobounce::{HandshakeError, OpenError, RegisterError};
use nobounce_initiated::mesh::MeshError;
use nobounce_initiated::parts::PartsError;
use nobounce_initiated::rendezvous::RendezvousError;
use nobounce_initiated::ring::WrongSize;
use nobounce_memory::AccessError;
use nobounce_memory::gpu::{self, CudaError, DriverError};

use crate::abi::NcclResult;

/// Why a call of NCCL fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum GinError {
    #[error("NCCL gave {what}")]
    Argument { what: &'static str },
    #[error("no CUDA device is current in the calling thread")]
    NoGpu,
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("cannot listen at {addr} for the other ranks: {source}")]
    Listen { addr: std::net::IpAddr, source: std::io::Error },
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    #[error("{} of rank {rank} is malformed; do all ranks run the same version of nobounce?", .what)]
    Malformed { what: &'static str, rank: usize },
    #[error("a window of {len} bytes cannot be registered: {source}")]
    Register { len: usize, source: RegisterError },
    #[error("rank {rank} failed to make {what}: see its log")]
    Peer { what: &'static str, rank: usize },
    #[error(
        "NCCL {version} does not know plugins of type GPI: 2.30.5 is the first; NCCL_GIN_TYPE=2 keeps to its proxy"
    )]
    Version { version: i32 },
    #[error(
        "the kernels were compiled with headers of NCCL 2.30.4 or earlier, which do not know type GPI: set NCCL_GIN_TYPE=2"
    )]
    Kernels,
    #[error("the adapter has no access to GPU memory, or no atomics, which signals need: {reason}")]
    Adapter { reason: String },
    #[error("{0} windows are registered already")]
    Handles(usize),
    #[error("memory that kernels poll cannot be prepared: {0}")]
    Control(#[from] gpu::GpuRegisterError),
    #[error("memory that kernels poll has no window, so that the CPU cannot store into it: {reason}")]
    NoWindow { reason: String },
    #[error("memory that kernels poll cannot be written: {0}")]
    Words(#[from] AccessError),
    #[error("cannot create queue pairs: {0}")]
    Mesh(#[from] MeshError),
    #[error(transparent)]
    Connect(#[from] HandshakeError),
    #[error(transparent)]
    Ring(#[from] WrongSize),
    #[error(transparent)]
    Parts(#[from] PartsError),
    #[error("cannot start the thread of the proxy: {0}")]
    Thread(#[from] std::io::Error),
    #[error("internal error {0}, see the log")]
    Panic(i32),
}

impl GinError {
    /// The result that NCCL gets.
    #[must_use]
    pub fn code(&self) -> NcclResult {
        match self {
            Self::Argument { .. } | Self::Handles(_) => NcclResult::INVALID_ARGUMENT,
            Self::Panic(_) => NcclResult::INTERNAL_ERROR,
            _ => NcclResult::SYSTEM_ERROR,
        }
    }
}
