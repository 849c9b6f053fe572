//! The end of a process, and the report that it leaves.

pub(crate) mod exit;
pub(crate) mod report;
