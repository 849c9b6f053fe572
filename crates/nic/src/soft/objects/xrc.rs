//! Extended reliable connections: queue pairs that receive for any shared receive queue of their
//! domain. Each request names the queue by its number.
//!
//! A domain belongs to one device. All of it is on the device's first engine, whose lock protects
//! the receives.

use std::sync::Arc;

use crate::soft::engine::cq_state::CqInner;
use crate::soft::error::CreateQpError;
use crate::soft::limits::CreateError;
use crate::soft::objects::cq::Cq;
use crate::soft::objects::device::{Device, Pd, Shared};
use crate::soft::objects::qp::Qp;
use crate::soft::objects::srq::{CreateSrqError, Srq, SrqLimits};

/// An XRC domain.
#[derive(Clone, Debug)]
pub struct XrcDomain {
    pub(crate) device: Device,
    pub(crate) id: u32,
    handle: Arc<()>,
}

impl XrcDomain {
    /// Creates one.
    ///
    /// # Errors
    /// The process forked.
    pub fn create(device: &Device) -> Result<Self, CreateError> {
        if device.is_forked() {
            return Err(CreateError::Forked);
        }
        Ok(Self { id: device.shared.next_id(), device: device.clone(), handle: Arc::default() })
    }

    /// Creates a shared receive queue in it, for memory of that protection domain. Its receives are
    /// reported to `cq`.
    ///
    /// # Errors
    /// A limit is exceeded.
    pub fn create_srq(&self, pd: &Pd, cq: &Cq, limits: SrqLimits) -> Result<Srq, CreateSrqError> {
        Srq::create_in(pd, limits, Some((self, cq)))
    }

    /// Creates the receiving end of a connection.
    ///
    /// # Errors
    /// A limit is exceeded.
    pub fn create_target(&self) -> Result<Qp, CreateQpError> {
        Qp::create_target(self)
    }

    /// Whether queue pairs or shared receive queues of it exist: closing it now is a program error.
    pub fn is_busy(&self) -> bool {
        Arc::strong_count(&self.handle) > 1
    }

    pub(crate) fn in_use(&self) -> Arc<()> {
        self.handle.clone()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.device.shared
    }

    /// A completion queue that nothing is reported to.
    pub(crate) fn no_cq(&self) -> Arc<CqInner> {
        Arc::new(CqInner::new(self.shared().next_id(), 1, None))
    }
}
