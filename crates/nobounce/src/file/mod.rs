//! Files into registered memory, and back.
//!
//! Host memory is filled from the page cache by the kernel. For GPU memory there are two paths:
//!
//! | path | when |
//! |---|---|
//! | `window` | memory with a window: threads store through BAR1 from the page cache |
//! | `staged` | pieces of long reads that are not in the page cache, and memory without a window: threads fill pinned buffers, and the copy engine places them |
//!
//! Pieces that are not in the page cache are read past it (`O_DIRECT`). [`Require::Direct`]
//! excludes the second path.

mod error;
mod load;
#[allow(unsafe_code)] // the caller promises what it says about memory
mod local;
mod long;
mod open;
mod pieces;
mod queue;
mod read;
mod report;
mod windowed;
mod write;

pub use error::FileError;
pub use local::{LocalMemory, LocalMemoryError};
pub use open::File;
pub use queue::{FileJob, FileQueue};
pub use report::{FileCounters, FileReport, StagedFile, file_counters};

use nobounce_memory::gpu::GpuOptions;
use nobounce_memory::path::Require;

/// How a file is read or written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileOptions {
    /// Required path. [`Require::Direct`] reads through the window only, and fails where GPU memory
    /// has none.
    pub require: Require,
}

impl FileOptions {
    /// With `NOBOUNCE_REQUIRE=direct` of the environment.
    #[must_use]
    pub fn from_env() -> Self {
        Self { require: GpuOptions::default().with_environment().require }
    }
}
