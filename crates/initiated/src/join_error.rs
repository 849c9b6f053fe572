//! Why a rank could not join.

use nobounce::{HandshakeError, RegisterError};
use nobounce_memory::gpu::{self, CudaError, DriverError};
use nobounce_nic::any::OpenError;

use crate::mesh::MeshError;
use crate::parts::PartsError;
use crate::rendezvous::RendezvousError;
use crate::ring::WrongSize;

/// Why a rank could not join.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum JoinError {
    #[error("{what}: {given}, at least 1 and at most {most}")]
    Count { what: &'static str, given: usize, most: usize },
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("no GPU {ordinal}: CUDA shows fewer to this process (see CUDA_VISIBLE_DEVICES)")]
    NoGpu { ordinal: i32 },
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Register(#[from] RegisterError),
    #[error("memory that kernels poll cannot be prepared")]
    Control(#[from] gpu::GpuRegisterError),
    #[error("memory that kernels poll has no window, so that the CPU cannot store into it: {reason}")]
    NoWindow { reason: String },
    #[error("memory that kernels poll cannot be written")]
    Words(#[source] nobounce_memory::AccessError),
    #[error("the symmetric heap cannot be cleared")]
    Access(#[from] nobounce::AccessError),
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    #[error("rank {rank} sent something else than its address: {error}; do all ranks run the same version?")]
    Malformed { rank: u32, error: String },
    #[error("rank {rank} has a heap of {theirs} bytes, this one of {ours}: they must be the same")]
    Heaps { rank: u32, ours: u64, theirs: u64 },
    #[error(
        "other ranks cannot reach this GPU memory through the adapter: {reason}; NOBOUNCE_DEVICE=nb0 uses the software NIC"
    )]
    Unreachable { reason: String },
    #[error("cannot create queue pairs")]
    Mesh(#[from] MeshError),
    #[error(transparent)]
    Connect(#[from] HandshakeError),
    #[error(transparent)]
    Ring(#[from] WrongSize),
    #[error(transparent)]
    Parts(#[from] PartsError),
    #[error("cannot start the thread of the proxy")]
    Thread(#[from] std::io::Error),
}
