//! Errors of opening a device, registering memory and creating a queue pair.

use std::io;

use nobounce_memory::gpu::copy_engine::CopyError;
use nobounce_memory::gpu::{self, CudaError};
use nobounce_memory::probe::RangeError;

use crate::links::{self, pcap};
use crate::soft::config::ConfigError;
use crate::soft::limits::{CreateError, MAX_QPS, MAX_REGIONS};

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The link could not be opened.
    #[error(transparent)]
    Udp(#[from] links::OpenError),
    /// The capture file could not be created.
    #[error(transparent)]
    Pcap(#[from] pcap::CaptureError),
    /// A setting is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// It was opened, but the first objects could not be created.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// The kernel refused a descriptor.
    #[error("cannot open the device: {0} (too many open files? see ulimit -n)")]
    Descriptor(#[from] io::Error),
}

/// Why memory could not be registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The range is not mapped, or not with the requested rights.
    #[error("cannot register memory: {0}")]
    Range(#[from] RangeError),
    /// Remote write and atomics need local write.
    #[error("remote write and remote atomic access need local write access too")]
    Rights,
    /// It is longer than a region may be.
    #[error("the range has {len} bytes; a region has at most {max}")]
    #[allow(missing_docs)]
    TooLong { len: u64, max: u64 },
    /// The requested I/O virtual address does not suit the memory.
    #[error(
        "{len} bytes at {addr:#x} cannot be named by {iova:#x}: both must lie at the same place in a page, and the range must not wrap"
    )]
    #[allow(missing_docs)]
    Iova { addr: u64, len: u64, iova: u64 },
    /// The domain belongs to another device.
    #[error("the protection domain is not of the device that the region is of")]
    OtherDevice,
    /// There are too many regions.
    #[error("the device has {MAX_REGIONS} memory regions already: deregister some")]
    TooMany,
    /// The fault guard could not be installed.
    #[error("cannot guard registered memory against vanishing: {0}")]
    Guard(#[from] nobounce_memory::guard::InstallError),
    /// It is GPU memory, and could not be registered.
    #[error(transparent)]
    Gpu(#[from] gpu::GpuRegisterError),
    /// The GPU's copy engine cannot be used.
    #[error(transparent)]
    CopyEngine(#[from] CopyError),
    /// The thread that copies from and to GPU memory could not be started.
    #[error(
        "no thread could be started for the GPU's copy engine ({0}): the process has too many (ulimit -u, pids of its cgroup)"
    )]
    Thread(io::Error),
    /// CUDA reported an error.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The device is gone.
    #[error("the device was opened before a fork: the child must open its own")]
    Forked,
}

impl RegisterError {
    /// The error number a verbs program expects.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Range(range) => range.errno(),
            Self::Rights | Self::TooLong { .. } | Self::Iova { .. } | Self::OtherDevice => libc::EINVAL,
            Self::Gpu(gpu::GpuRegisterError::Range(_)) => libc::EFAULT,
            Self::Gpu(_) | Self::CopyEngine(_) | Self::Cuda(_) => libc::EOPNOTSUPP,
            Self::TooMany | Self::Guard(_) | Self::Thread(_) => libc::ENOMEM,
            Self::Forked => libc::EIO,
        }
    }
}

/// Why a queue pair could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateQpError {
    /// A limit is too large.
    #[error("{name} is {asked}; this device offers at most {max}")]
    Limit {
        #[allow(missing_docs)]
        name: &'static str,
        #[allow(missing_docs)]
        asked: usize,
        #[allow(missing_docs)]
        max: usize,
    },
    /// A queue for it belongs to another device.
    #[error("a completion queue or shared receive queue is not of the device that the queue pair is of")]
    OtherDevice,
    /// All numbers are taken.
    #[error("the device has {MAX_QPS} queue pairs already: destroy some")]
    TooMany,
    /// The device cannot be made reachable.
    #[error(transparent)]
    Listen(#[from] links::OpenError),
    /// The engine thread could not be started.
    #[error("cannot start the engine thread: {0}")]
    EngineThread(#[from] io::Error),
    /// A further engine could not be opened.
    #[error(transparent)]
    Engine(Box<dyn std::error::Error + Send + Sync>),
    /// The device is gone.
    #[error("the device was opened before a fork: the child must open its own")]
    Forked,
}
