//! libnobounce-vmm.so, an LD_PRELOAD library: adds the POSIX file-descriptor handle type to
//! `cuMemCreate` of device memory.
//!
//! ```text
//! program -- dlsym --> lookup -- names of libcuda --> driver -- the real ones --> libcuda
//!                             -- other names ------------------------------------> C library
//! ```
//!
//! | module | what |
//! |---|---|
//! | `driver` | functions of libcuda, and what takes their place |
//! | `lookup` | `dlsym`: names of libcuda lead to `driver`, others to the C library |
//!
//! It allocates no memory.

// For `_dl_find_object`, which the unwinder calls.
use nobounce_dropin as _;

mod driver;
mod lookup;

/// Before main: later calls, perhaps from a signal handler, find everything resolved.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    lookup::resolve();
    driver::read_setting();
}
