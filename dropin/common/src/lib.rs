//! Common parts of the drop-in libraries.

pub mod endings;
pub mod entry;
pub mod log;
pub mod notice;
pub mod reserve;
#[cfg(feature = "testing")]
pub mod testing;
