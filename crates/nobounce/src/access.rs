//! Why bytes of a region could not be read or written.

use std::time::Duration;

use nobounce_memory::gpu::copy_engine::CopyError;

/// Why bytes of a [`Region`](crate::Region) were not read or written, or only in part.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// The requested range is not inside the region; nothing was touched.
    #[error(
        "{len} bytes at offset {offset:#x} are not inside a region of {region} bytes; nothing was touched"
    )]
    OutOfBounds {
        /// Requested offset.
        offset: usize,
        /// Requested bytes.
        len: usize,
        /// Length of the region.
        region: usize,
    },
    /// A word whose address is not a multiple of 8; nothing was touched.
    #[error("address {address:#x} is not 8-byte aligned, as word access requires; nothing was touched")]
    Misaligned {
        /// The address.
        address: u64,
    },
    /// The memory is gone, or lacks this access right. Bytes before the address were copied, the
    /// rest was not.
    #[error(
        "memory at {address:#x} is no longer mapped with this access: it was unmapped, protected or truncated after registration"
    )]
    Faulted {
        /// The first address that could not be accessed, in this process.
        address: u64,
    },
    /// GPU memory without a BAR1 window, or too much of it for one: the GPU's copy engine refused
    /// the copy.
    #[error("copy by the GPU's copy engine failed: {0}")]
    Copy(#[from] CopyError),
    /// The GPU's copy engine timed out. It may still complete the copy.
    #[error(
        "the GPU's copy engine did not finish {len} bytes within {limit:?}, and may still be copying: the engine is busy with \
         other work, or the GPU hangs (see nvidia-smi)"
    )]
    Slow {
        /// Bytes of the whole access.
        len: usize,
        /// Timeout for one piece.
        limit: Duration,
    },
    /// An error that this version does not know.
    #[error(transparent)]
    Other(nobounce_memory::AccessError),
}

impl From<nobounce_memory::AccessError> for AccessError {
    fn from(error: nobounce_memory::AccessError) -> Self {
        use nobounce_memory::AccessError as Inner;
        match error {
            Inner::OutOfBounds { offset, len, window } => Self::OutOfBounds { offset, len, region: window },
            Inner::Misaligned { address } => Self::Misaligned { address },
            Inner::Faulted { address } => Self::Faulted { address },
            other => Self::Other(other),
        }
    }
}
