//! Errors of window accesses.

use thiserror::Error;

/// Why a load, store or atomic on a [`Window`](crate::Window) was not done, or not to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AccessError {
    /// The requested range is not inside the window; nothing was accessed.
    #[error(
        "{len} bytes at offset {offset:#x} do not fit in a window of {window} bytes; nothing was touched"
    )]
    OutOfBounds {
        /// Requested offset, in bytes from the start of the window.
        offset: usize,
        /// Requested bytes.
        len: usize,
        /// Length of the window.
        window: usize,
    },
    /// An 8-byte access at an address that is not a multiple of 8; nothing was touched.
    #[error("address {address:#x} is not 8-byte aligned, as atomic access requires; nothing was touched")]
    Misaligned {
        /// The address in this process.
        address: u64,
    },
    /// The memory is no longer mapped, or not with this permission. Bytes before the address were
    /// copied, the rest was not.
    #[error(
        "memory at {address:#x} is no longer mapped with this access: it was unmapped, protected or truncated after registration"
    )]
    Faulted {
        /// The first address that could not be accessed.
        address: u64,
    },
}

impl AccessError {
    /// True where the memory itself failed, as opposed to the request.
    #[must_use]
    pub fn is_fault(&self) -> bool {
        matches!(self, Self::Faulted { .. })
    }
}
