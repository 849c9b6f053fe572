//! Process exit, and the report at that time.

pub(crate) mod exit;
pub(crate) mod report;
