//! What the drop-in libraries share.

pub mod endings;
pub mod entry;
pub mod log;
