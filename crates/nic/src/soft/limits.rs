//! Device limits, and counting objects against them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nobounce_protocol::qp::QpAttr;

use crate::work::QpLimits;

/// Queue pair numbers of one device: 16 bits besides the slot, without the last one, which stands
/// for multicast in the highest slot.
pub(crate) const MAX_QPS: usize = (1 << 16) - 1;
/// Regions of one device.
pub(crate) const MAX_REGIONS: usize = 1 << 20;

/// READs and atomics that a queue pair answers at a time, also where its attributes say less.
/// Another device of this kind makes use of it: programs that connect with `max_rd_atomic` 1 (NCCL)
/// would otherwise wait a round trip for each atomic.
pub(crate) const RESPONDER_RESOURCES: u8 = 64;

/// Upper limits of a device; requests beyond them fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the names say it
#[non_exhaustive]
pub struct DeviceLimits {
    pub max_pds: usize,
    pub max_mrs: usize,
    pub max_mws: usize,
    /// Bytes of one region.
    pub max_mr_size: u64,
    pub max_cqs: usize,
    pub max_cq_depth: usize,
    pub max_qps: usize,
    /// Requests in one send queue, and receives in one receive queue.
    pub max_qp_depth: usize,
    /// Elements of one scatter/gather list.
    pub max_sges: usize,
    /// Bytes copied into one send request.
    pub max_inline: usize,
    /// READs and atomics outstanding, in each direction.
    pub max_rd_atomic: u8,
    pub max_srqs: usize,
    pub max_srq_depth: usize,
    /// Address handles are only data: the verbs layer that keeps them counts them.
    pub max_ahs: usize,
    /// Multicast groups.
    pub max_groups: usize,
    /// Queue pairs attached to one group.
    pub max_group_qps: usize,
    /// Entries of the GID table.
    pub gid_table: u32,
    /// How many of them are filled, from the first on, all with the device's address: recipes for
    /// adapters name the entry of RoCE v2, often 1 or 3.
    pub gids: u32,
}

impl DeviceLimits {
    /// Those of every software NIC.
    pub const OURS: Self = Self {
        max_pds: 1 << 16,
        max_mrs: MAX_REGIONS,
        max_mws: 1 << 16,
        max_mr_size: 1 << 47,
        max_cqs: 1 << 16,
        max_cq_depth: 1 << 22,
        max_qps: MAX_QPS - 2,
        max_qp_depth: QpLimits::MAX.send_depth,
        max_sges: QpLimits::MAX.send_sges,
        max_inline: QpLimits::MAX.inline,
        max_rd_atomic: QpAttr::MAX_RD_ATOMIC,
        max_srqs: 1 << 16,
        max_srq_depth: QpLimits::MAX.recv_depth,
        max_ahs: 1 << 16,
        max_groups: 64,
        max_group_qps: 64,
        gid_table: 8,
        gids: 4,
    };
}

/// Why a domain, a completion queue or a shared receive queue could not be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// A number is out of range.
    #[error("{name} is {asked}; this device offers 1 to {max}")]
    #[allow(missing_docs)]
    Limit { name: &'static str, asked: usize, max: usize },
    /// There are too many.
    #[error("the device has {max} {name} already: destroy some")]
    #[allow(missing_docs)]
    TooMany { name: &'static str, max: usize },
    /// The device is gone.
    #[error("the device was opened before a fork: the child must open its own")]
    Forked,
}

impl CreateError {
    /// The error number a verbs program expects.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Limit { .. } => libc::EINVAL,
            Self::TooMany { .. } => libc::ENOMEM,
            Self::Forked => libc::EIO,
        }
    }
}

/// Refuses a number that is 0 or too large.
pub(crate) fn check(name: &'static str, asked: usize, max: usize) -> Result<(), CreateError> {
    if (1..=max).contains(&asked) { Ok(()) } else { Err(CreateError::Limit { name, asked, max }) }
}

/// The number of objects of a kind.
#[derive(Clone, Debug, Default)]
pub(crate) struct Count(Arc<AtomicUsize>);

impl Count {
    /// Counts one more, until the result is dropped.
    pub(crate) fn take(&self, name: &'static str, max: usize) -> Result<CountGuard, CreateError> {
        let more = |count| (count < max).then_some(count + 1);
        match self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(CountGuard(self.0.clone())),
            Err(_) => Err(CreateError::TooMany { name, max }),
        }
    }
}

/// One of the objects a device offers; uncounted when dropped.
#[derive(Debug)]
pub(crate) struct CountGuard(Arc<AtomicUsize>);

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
