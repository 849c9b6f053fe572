//! Multicast groups that identifiers have joined.
//!
//! On Ethernet there is no subnet manager to ask: a join is over at once. The program hears of it
//! by an event, and the identifier's queue pair is attached before it does.

use std::ffi::{c_int, c_void};
use std::net::IpAddr;
use std::sync::atomic::{AtomicI32, Ordering};

use nobounce_nic::soft::Told;
use nobounce_protocol::wire::Qpn;
use nobounce_verbs as verbs;

use crate::calls::{calls, done};
use crate::entry::{self, Errno};
use crate::event::complete;
use crate::id::Id;
use crate::layout::{
    CmId, EVENT_MULTICAST_JOIN, JOIN_ATTR_ADDRESS, JOIN_ATTR_FLAGS, JOIN_FULL_MEMBER, JOIN_SEND_ONLY,
    JoinAttr, UDP_QKEY, UdParam,
};
use crate::{address, qp};

/// Multicast stays in this network.
const HOP_LIMIT: u8 = 1;

/// Numbers of joins.
static NUMBERS: AtomicI32 = AtomicI32::new(1);

/// A group that an identifier has joined.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Join {
    /// Names it in the notice.
    number: c_int,
    group: IpAddr,
    receives: bool,
    attached: bool,
    context: usize,
}

impl Join {
    fn gid(&self) -> verbs::Gid {
        address::gid(self.group)
    }

    /// The program's pointer, which the event shows it.
    pub(crate) fn context(&self) -> *const c_void {
        std::ptr::with_exposed_provenance(self.context)
    }
}

fn join(id: &Id, addr: *const libc::sockaddr, flags: u32, context: *mut c_void) -> Result<(), Errno> {
    // SAFETY: the caller passes an address.
    let group = unsafe { address::read(addr)? }.ip();
    let mut state = id.state();
    let device = state.device.ok_or(Errno::EINVAL)?;
    if !id.is_ud() || !group.is_multicast() || group.is_ipv4() != device.addr.is_ipv4() {
        return Err(Errno::EINVAL);
    }
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    let receives = flags == JOIN_FULL_MEMBER;
    state.joins.push(Join { number, group, receives, attached: false, context: context.expose_provenance() });
    state.channel.tell(id.tag(), EVENT_MULTICAST_JOIN, number);
    Ok(())
}

/// The program is to hear of a join: attaches the queue pair. `None` if it has left meanwhile.
pub(crate) fn joined(id: &Id, number: c_int) -> Option<(Join, UdParam, Result<(), Errno>)> {
    // Held until it is attached: another thread may leave the group.
    let mut state = id.state();
    let traffic_class = state.link.traffic_class;
    let joined = state.joins.iter_mut().find(|joined| joined.number == number)?;
    let ud = UdParam {
        private_data: joined.context(),
        private_data_len: 0,
        ah_attr: qp::route_to(joined.group, HOP_LIMIT, traffic_class),
        qp_num: Qpn::MULTICAST.get(),
        qkey: UDP_QKEY,
    };
    if !joined.receives || id.qp().is_null() {
        return Some((*joined, ud, Ok(())));
    }
    // SAFETY: the identifier's own queue pair, and a group.
    let result = calls().and_then(|calls| done(unsafe { (calls.attach_mcast)(id.qp(), &joined.gid(), 0) }));
    joined.attached = result.is_ok();
    Some((*joined, ud, result))
}

/// `rdma_join_multicast`.
pub(crate) unsafe extern "C" fn rdma_join_multicast(
    id: *mut CmId,
    addr: *mut libc::sockaddr,
    context: *mut c_void,
) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        join(&id, addr, JOIN_FULL_MEMBER, context)?;
        complete(&id)?;
        Ok(0)
    })
}

/// `rdma_join_multicast_ex`.
pub(crate) unsafe extern "C" fn rdma_join_multicast_ex(
    id: *mut CmId,
    attr: *mut JoinAttr,
    context: *mut c_void,
) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        // SAFETY: the caller passes a structure.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::EINVAL)?;
        let all = JOIN_ATTR_ADDRESS | JOIN_ATTR_FLAGS;
        if attr.comp_mask & !all != 0 {
            return Err(Errno(libc::ENOTSUP));
        }
        if attr.comp_mask != all || attr.join_flags > JOIN_SEND_ONLY {
            return Err(Errno::EINVAL);
        }
        join(&id, attr.addr, attr.join_flags, context)?;
        complete(&id)?;
        Ok(0)
    })
}

/// `rdma_leave_multicast`.
pub(crate) unsafe extern "C" fn rdma_leave_multicast(id: *mut CmId, addr: *mut libc::sockaddr) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        // SAFETY: the caller passes an address.
        let group = unsafe { address::read(addr)? }.ip();
        let mut state = id.state();
        let at = state.joins.iter().position(|joined| joined.group == group);
        let left = state.joins.remove(at.ok_or(Errno(libc::EADDRNOTAVAIL))?);
        let (tag, number) = (id.tag(), left.number);
        state.channel.forget(|notice| {
            let is_join = |told: &Told| {
                matches!(told, Told::Own { kind: EVENT_MULTICAST_JOIN, status } if *status == number)
            };
            notice.tag == tag && is_join(&notice.told)
        });
        // The queue pair stays attached for another join of the same group.
        if left.attached && !state.joins.iter().any(|joined| joined.group == group && joined.attached) {
            detach(&id, &left)?;
        }
        Ok(0)
    })
}

fn detach(id: &Id, joined: &Join) -> Result<(), Errno> {
    if !id.qp().is_null() {
        // SAFETY: the identifier's own queue pair, and a group.
        unsafe { (calls()?.detach_mcast)(id.qp(), &joined.gid(), 0) };
    }
    Ok(())
}

/// The queue pair is going to be destroyed: it must not be attached to a group.
pub(crate) fn detach_all(id: &Id) {
    for joined in id.state().joins.iter_mut().filter(|joined| joined.attached) {
        joined.attached = detach(id, joined).is_err();
    }
}
