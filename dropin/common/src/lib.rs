//! Common parts of the drop-in libraries.

pub mod endings;
pub mod entry;
mod find_object;
pub mod log;
pub mod notice;
#[cfg(feature = "nic")]
pub mod own_view;
pub mod reserve;
#[cfg(feature = "nic")]
mod shared_dir;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(feature = "nic")]
pub mod view;
