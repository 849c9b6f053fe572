//! Memory access: windows onto memory that may change or be unmapped concurrently, and copies that
//! survive it.
//!
//! * [`Window`]: a range of memory that a device, another process or another thread may write,
//!   unmap or truncate at any time. Its loads and stores never make a reference into it, and return
//!   [`AccessError`] where the memory is gone.
//! * [`guard`]: the fault guard behind that.
//! * [`probe`]: checks once, at registration, that a range is mapped with the required permissions.
//! * [`barrier`]: memory ordering points, named after the order they keep.
//! * [`HostBuffer`]: our own page-aligned memory; [`shared_file`]: memory that another process
//!   maps, too; [`FileMapping`]: the page cache of a file.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! gpu                          driver, windows through BAR1, copy engine
//! window  guard  host_buffer   host memory
//! copy                         copy routines, fixups, write-combining
//! barrier  path  probe  shared_file  signals
//! ```
//!
//! | room | what |
//! |---|---|
//! | `copy` | assembly that survives faults; [`wc`] for write-combined windows |
//! | [`guard`], [`Window`], [`HostBuffer`] | host memory that may vanish; our own |
//! | [`gpu`] | CUDA's driver by `dlopen`, registration, windows, the copy engine |

#[cfg(not(target_os = "linux"))]
compile_error!(
    "nobounce-memory knows Linux only: signals, madvise and process_vm_readv are used as Linux defines them"
);

mod access_error;
pub mod barrier;
mod copy;
mod file_io;
mod file_mapping;
mod foreign;
pub mod gpu;
pub mod guard;
mod host_buffer;
pub mod path;
pub mod probe;
mod shared_chunk;
pub mod shared_file;
pub mod signals;
pub mod unmap_watch;
mod window;

pub use copy::wc;

pub use access_error::AccessError;
pub use file_io::FileIoError;
pub use file_mapping::FileMapping;
pub use foreign::{Sink, Source};
pub use host_buffer::HostBuffer;
pub use shared_chunk::{ChunkPool, SharedChunk, SharedPlace};
pub use window::Window;

/// The page size of this machine, in bytes.
#[must_use]
pub fn page_size() -> usize {
    // SAFETY: sysconf reads a constant of the process and has no preconditions.
    let answer = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // It cannot fail for _SC_PAGESIZE; 4096 is the smallest page of any Linux.
    usize::try_from(answer).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
}
