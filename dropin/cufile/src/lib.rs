//! A drop-in `libcufile.so.0`: the API of cuFile 1.19 (GPUDirect Storage) on
//! [`nobounce::file`], without nvidia-fs.
//!
//! A registered buffer has a window, through which the page cache is stored. Pieces of long reads
//! that are not in it, and buffers that are not registered, go through pinned memory, as in
//! cuFile's own compatibility mode, and are counted as staged with the reason.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! calls  batch  stream           exported functions
//! transfer                       reads and writes
//! table  memory                  open files, registered buffers
//! parameters  stats  report      settings and counters
//! abi                            cuFile's numbers and structures
//! ```
//!
//! | room | what |
//! |---|---|
//! | `abi` | layouts of the interface, version 1.19 |
//! | `table`, `memory` | what is open and registered; the memory behind a pointer |
//! | `transfer`, `batch`, `stream` | reads and writes: now, by threads, in the order of a CUDA stream |
//! | `calls` | functions for the driver, files, buffers, reads and writes |
//! | `parameters`, `stats`, `report` | parameters, counters, the line for `nobounce run` |

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
