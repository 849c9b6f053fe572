//! Process exit, the report at that time, and where live counters are published.

pub(crate) mod exit;
pub mod live_folder;
pub(crate) mod report;
