//! GPU memory: its mapping, prefetch of sent bytes, staging of received ones, and the thread that
//! makes CUDA's calls.

pub(crate) mod copier;
pub(crate) mod copiers;
pub(crate) mod prefetch;
pub(crate) mod staging;
pub(crate) mod standstill;
pub(crate) mod step;
pub(crate) mod target;
