//! A drop-in `libgdrapi.so.2`: GDRCopy's API, version 2.6, on the BAR1 window onto GPU memory
//! (`nobounce_memory::gpu`), without gdrdrv.
//!
//! Thin: a pinned buffer is a registration with its window, a map is the window's address, a copy
//! is one of the window's routines. Handles are numbers that are looked up (`table.rs`), so that a
//! stale one is refused. Where GDRCopy leaves the behaviour open, gdrdrv with persistent mappings
//! is the model. Loading the library does nothing.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! calls             exported functions
//! table  pin        handles, pinned buffers and their windows
//! slab  layout      objects by number; GDRCopy's structures
//! ```
//!
//! | room | what |
//! |---|---|
//! | `layout`, `slab` | layouts of the interface, version 2.6; slots with a generation |
//! | `pin`, `table` | whole GPU pages and the window onto them; all of this process |
//! | `calls` | the header's functions, in its order |

mod calls;
mod layout;
mod pin;
mod slab;
mod table;

use nobounce_dropin::{entry, log};
