//! Multicast groups of datagram queue pairs.

use std::ffi::c_int;

use nobounce_nic::soft::GroupError;
use nobounce_verbs as verbs;

use crate::convert::addr_of;
use crate::entry::{self, Errno};
use crate::live::Object;
use crate::log;
use crate::qp::QpObject;

fn refused(call: &str, error: &GroupError) -> Errno {
    log::warn(|| format!("{call}: {error}"));
    Errno(error.errno())
}

/// `ibv_attach_mcast`. RoCE has no LIDs.
pub(crate) unsafe extern "C" fn attach_mcast(qp: *mut verbs::Qp, gid: *const verbs::Gid, _lid: u16) -> c_int {
    entry::code(|| {
        // SAFETY: the caller passes a group.
        let group = addr_of(unsafe { gid.as_ref() }.ok_or(Errno::EINVAL)?);
        QpObject::find(qp)?.soft.attach(group).map_err(|error| refused("ibv_attach_mcast", &error))
    })
}

/// `ibv_detach_mcast`.
pub(crate) unsafe extern "C" fn detach_mcast(qp: *mut verbs::Qp, gid: *const verbs::Gid, _lid: u16) -> c_int {
    entry::code(|| {
        // SAFETY: as above.
        let group = addr_of(unsafe { gid.as_ref() }.ok_or(Errno::EINVAL)?);
        QpObject::find(qp)?.soft.detach(group).map_err(|error| refused("ibv_detach_mcast", &error))
    })
}
