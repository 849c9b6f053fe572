//! GPU memory: where its bytes lie, prefetch of what is sent, staging of what arrives, and the thread that makes CUDA's calls.

pub(crate) mod copier;
pub(crate) mod copiers;
pub(crate) mod prefetch;
pub(crate) mod staging;
pub(crate) mod standstill;
pub(crate) mod step;
pub(crate) mod target;
