//! Files into registered memory, and back.
//!
//! Host memory is filled from the page cache by the kernel. For GPU memory there are two paths:
//!
//! | path | when |
//! |---|---|
//! | `window` | reads of less than 4 MiB: stored from the page cache through BAR1 |
//! | `staged` | longer ones, and memory without a window: threads fill pinned buffers, past the page cache (`O_DIRECT`) what is not in it, and the copy engine places them |
//!
//! [`Require::Direct`] excludes the second one.

mod error;
#[allow(unsafe_code)] // the caller promises what it says about memory
mod local;
mod open;
mod pieces;
mod queue;
mod read;
mod report;
mod staged;
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
