//! Multicast: queue pairs attached to groups.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use nobounce_protocol::qp::Service;
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::{Parsed, Qpn};

use crate::links::RxDatagram;
use crate::soft::engine::{Core, Engine};
use crate::soft::limits::DeviceLimits;
use crate::soft::qp_index::QpIndex;

/// Why a queue pair could not be attached to a group or detached from it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// Only datagrams are multicast.
    #[error("only queue pairs of the datagram service (UD) can be attached to a multicast group")]
    Service,
    /// The address is no group, or of the other IP version.
    #[error("{group} is not a multicast group that this device, at {local}, can join")]
    #[allow(missing_docs)]
    Address { group: IpAddr, local: IpAddr },
    /// A limit is reached.
    #[error("the device has {max} {name} already")]
    #[allow(missing_docs)]
    TooMany { name: &'static str, max: usize },
    /// It is not attached.
    #[error("the queue pair is not attached to {0}")]
    NotAttached(IpAddr),
    /// The system refuses.
    #[error("the system does not let this device join {group}: {source}")]
    #[allow(missing_docs)]
    Os { group: IpAddr, source: io::Error },
    /// The device is gone.
    #[error("the device was opened before a fork: the child must open its own")]
    Forked,
}

impl GroupError {
    /// The error number a verbs program expects.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Service | Self::Address { .. } | Self::NotAttached(_) => libc::EINVAL,
            Self::TooMany { .. } => libc::ENOMEM,
            Self::Os { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
            Self::Forked => libc::EIO,
        }
    }
}

/// The groups of an engine: the queue pairs attached to each.
pub(crate) type Groups = BTreeMap<IpAddr, Vec<Qpn>>;

impl Engine {
    /// Attaches a queue pair; again changes nothing.
    pub(crate) fn attach(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), GroupError> {
        let local = self.core.local;
        if self.core.entry(qpn).is_none_or(|entry| entry.qp.service() != Service::Ud) {
            return Err(GroupError::Service);
        }
        if !group.is_multicast() || group.is_ipv4() != local.is_ipv4() {
            return Err(GroupError::Address { group, local });
        }
        let DeviceLimits { max_groups, max_group_qps, .. } = DeviceLimits::OURS;
        let groups = &mut self.core.qps.groups;
        if !groups.contains_key(&group) {
            if groups.len() >= max_groups {
                return Err(GroupError::TooMany { name: "multicast groups", max: max_groups });
            }
            self.link.join_group(group).map_err(|source| GroupError::Os { group, source })?;
        }
        let attached = groups.entry(group).or_default();
        if !attached.contains(&qpn) {
            if attached.len() >= max_group_qps {
                let name = "queue pairs attached to this group";
                return Err(GroupError::TooMany { name, max: max_group_qps });
            }
            attached.push(qpn);
        }
        Ok(())
    }

    /// Detaches a queue pair; whether it was attached. The last one leaves the group.
    pub(crate) fn detach(&mut self, qpn: Qpn, group: IpAddr) -> bool {
        let Some(attached) = self.core.qps.groups.get_mut(&group) else { return false };
        let before = attached.len();
        attached.retain(|other| *other != qpn);
        let was_attached = attached.len() < before;
        if attached.is_empty() {
            self.core.qps.groups.remove(&group);
            self.link.leave_group(group);
        }
        was_attached
    }

    /// Detaches a queue pair from all groups.
    pub(crate) fn detach_from_all(&mut self, qpn: Qpn) {
        let groups = self.core.qps.groups.iter().filter(|(_, attached)| attached.contains(&qpn));
        for group in groups.map(|(group, _)| *group).collect::<Vec<_>>() {
            self.detach(qpn, group);
        }
    }
}

impl Core {
    /// Whether a queue pair is attached to a group.
    pub(crate) fn is_attached(&self, qpn: Qpn) -> bool {
        self.qps.groups.values().any(|attached| attached.contains(&qpn))
    }

    /// Gives a copy to each attached queue pair.
    #[cold]
    pub(crate) fn handle_multicast(
        &mut self,
        now: Nanos,
        group: IpAddr,
        datagram: &RxDatagram<'_>,
        parsed: &Parsed,
    ) {
        let attached = self.qps.groups.get(&group).filter(|_| parsed.header.dest_qpn == Qpn::MULTICAST);
        let Some(attached) = attached.cloned() else {
            self.account.counters.no_such_qp += 1;
            return;
        };
        for qpn in attached {
            self.deliver(now, QpIndex::of(qpn), datagram, parsed);
        }
    }
}
