//! The routines that touch memory which may vanish. Two backends of one shape; [`Window`](crate::Window) is the only user.
//!
//! Copies return how many bytes were *not* copied (0: all were). 8-byte accesses return `None` or `false` on a fault.

#[cfg(any(test, not(target_arch = "x86_64")))]
pub(crate) mod portable;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(not(target_arch = "x86_64"))]
pub(crate) use portable::{compare_swap, fetch_add, load, load_u64, store, store_ascending, store_u64};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{
    compare_swap, fetch_add, find_fixup, load, load_u64, store, store as store_ascending, store_u64,
};
