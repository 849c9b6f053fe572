//! libnobounce-paths.so, to be preloaded: a program that opens /sys/class/infiniband or /dev/infiniband is shown the folders
//! that `nobounce run` made for it.
//!
//! Only calls that take a path are here, and only a path with one of our prefixes is changed; everything else reaches the C
//! library as it came. No memory is allocated and errno is left as the C library sets it. A library that is reached by dlopen
//! cannot stand before the C library, hence the preload.

mod calls;
mod original;
mod view;

/// Before main: later calls, perhaps from a signal handler, then find everything resolved.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    view::find();
    calls::resolve_all();
}
