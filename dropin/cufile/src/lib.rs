//! A drop-in `libcufile.so.0`: the API of cuFile 1.19 (GPUDirect Storage) on
//! [`nobounce::file`], without nvidia-fs.
//!
//! A registered buffer has a window, through which the page cache is stored. Pieces of long reads
//! that are not in it, and buffers that are not registered, go through pinned memory, as in
//! cuFile's own compatibility mode, and are counted as staged with the reason.

mod abi;
mod batch;
mod calls;
mod memory;
mod parameters;
mod report;
mod stats;
mod stream;
mod table;
mod transfer;

use nobounce_dropin::{entry, log};
