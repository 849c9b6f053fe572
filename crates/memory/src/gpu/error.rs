//! Errors of the CUDA driver, and of loading it.

use std::fmt;

use thiserror::Error;

use super::nodes;

/// A CUDA driver call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaError {
    /// The call, by the name of its symbol.
    pub call: &'static str,
    /// Its result.
    pub code: u32,
    /// The driver's name for the result, such as `CUDA_ERROR_INVALID_VALUE`.
    pub name: &'static str,
}

impl CudaError {
    /// Invalid argument; pointer queries return it for memory that was freed or never existed.
    pub const INVALID_VALUE: u32 = 1;
    /// The driver is not initialised, as in a child of the process that initialised it.
    pub const NOT_INITIALIZED: u32 = 3;
    /// The driver is being torn down: the process is exiting.
    pub const DEINITIALIZED: u32 = 4;
    /// No GPU is visible.
    pub const NO_DEVICE: u32 = 100;
    /// No context is current on this thread.
    pub const INVALID_CONTEXT: u32 = 201;
    /// The driver does not have this function.
    pub const NOT_FOUND: u32 = 500;
    /// Work is still in flight: a status rather than a failure.
    pub const NOT_READY: u32 = 600;
    /// The context was destroyed, for instance by `cudaDeviceReset`.
    pub const CONTEXT_IS_DESTROYED: u32 = 709;
    /// This driver or device cannot do that.
    pub const NOT_SUPPORTED: u32 = 801;

    /// True where the context that the call ran in does not exist any more.
    #[must_use]
    pub fn context_is_gone(&self) -> bool {
        matches!(self.code, Self::DEINITIALIZED | Self::INVALID_CONTEXT | Self::CONTEXT_IS_DESTROYED)
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with {} ({})", self.call, self.name, self.code)
    }
}

impl std::error::Error for CudaError {}

/// Why the CUDA driver cannot be used in this process.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The library could not be loaded.
    #[error(
        "cannot load the CUDA driver library ({detail}); install the NVIDIA driver, or give the container its driver libraries (--gpus all)"
    )]
    Missing {
        /// The loader's message.
        detail: String,
    },
    /// The library does not have a function that is needed.
    #[error(
        "the CUDA driver library {library} has no {symbol}; it is older than CUDA 11.3 (driver 465): update the driver"
    )]
    Symbol {
        /// The library.
        library: String,
        /// The function.
        symbol: &'static str,
    },
    /// `cuInit` failed.
    #[error("{error}; {advice}")]
    Init {
        /// The call's error.
        error: CudaError,
        /// The problem, and the remedy.
        advice: String,
    },
    /// This process was forked from one that had initialised CUDA.
    #[error(
        "CUDA is unusable in this process: its parent had initialised CUDA, which does not survive a fork; start the child with \
         exec, or fork before using CUDA"
    )]
    Forked,
}

impl DriverError {
    /// `cuInit`, or a call that goes with it, failed.
    pub(super) fn init(error: CudaError) -> Self {
        // CUDA returns the same code for a hidden GPU and for a missing or forbidden device node:
        // check the nodes.
        let found = matches!(error.code, CudaError::NO_DEVICE | OPERATING_SYSTEM | UNKNOWN);
        let found = found.then(nodes::trouble).flatten();
        let hidden =
            std::env::var("CUDA_VISIBLE_DEVICES").ok().filter(|_| error.code == CudaError::NO_DEVICE);
        let hidden = hidden.map(|value| {
            format!("CUDA_VISIBLE_DEVICES is set to '{value}': unset it, or name a GPU that exists")
        });
        let found: Vec<_> = [found, hidden].into_iter().flatten().collect();
        let advice = if found.is_empty() { init_advice(error.code).to_owned() } else { found.join("; and ") };
        Self::Init { error, advice }
    }
}

/// `CUDA_ERROR_OPERATING_SYSTEM`: a system call failed.
const OPERATING_SYSTEM: u32 = 304;
/// `CUDA_ERROR_UNKNOWN`.
const UNKNOWN: u32 = 999;

/// The remedy for a failed `cuInit`.
fn init_advice(code: u32) -> &'static str {
    match code {
        34 => {
            "this is the stub library of the CUDA toolkit: put the driver's own libcuda.so.1 first in the library path"
        }
        CudaError::NO_DEVICE => {
            "no GPU is visible: check CUDA_VISIBLE_DEVICES, and the GPU option of a container (--gpus all)"
        }
        802 | 803 => {
            "the driver library and the kernel module do not match: reload the module or reboot after an update"
        }
        804 => "the compatibility library does not support this GPU: use the driver's own libcuda.so.1",
        UNKNOWN => {
            "the kernel module did not answer (see nvidia-smi); /dev/nvidiactl and /dev/nvidia-uvm must exist and be readable"
        }
        _ => "see nvidia-smi and the kernel log",
    }
}
