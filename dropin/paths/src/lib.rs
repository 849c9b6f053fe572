//! libnobounce-paths.so, an LD_PRELOAD library: redirects paths below /sys/class/infiniband and
//! /dev/infiniband to the folders of the software NIC.
//!
//! It interposes only calls that take a path, and changes only paths with one of our prefixes;
//! everything else reaches the C library unchanged. It allocates no memory (but when the list of
//! verbs devices is read: see `copies`, and while the folder is sought) and leaves errno as the C
//! library sets it. A library loaded by dlopen cannot interpose the C library, hence the preload.
//! Without `nobounce run` the drop-in libibverbs makes those folders at the first such path.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! calls  dlopen       interposed functions
//! view  copies        paths below our folders; who reads the device list
//! original            the C library's functions
//! ```
//!
//! | room | what |
//! |---|---|
//! | `original` | the function of the same name in the C library; that of libibverbs that makes a view |
//! | `view`, `copies` | the folder that stands for the root; copies of rdma-core inside programs |
//! | `calls`, `dlopen` | each call that takes a path; development names of libraries |

// For `_dl_find_object`, which the unwinder calls.
use nobounce_dropin as _;

mod calls;
mod copies;
mod dlopen;
mod original;
mod view;

/// Before main: later calls, perhaps from a signal handler, then find everything resolved.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    view::find();
    calls::resolve_all();
    dlopen::resolve();
}
