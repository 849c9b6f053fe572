//! Attributes of a queue pair, as passed to a modify call.

use std::net::{IpAddr, Ipv4Addr};

use bitflags::bitflags;

use super::state::{AttrMask, QpState, TransitionError};
use crate::wire::{Psn, Qpn};

bitflags! {
    /// Access rights of memory or of a queue pair. The bits are those of the verbs interface.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Access: u32 {
        /// The device may write it on behalf of this process (receives, READ results).
        const LOCAL_WRITE = 1 << 0;
        /// A peer may WRITE it.
        const REMOTE_WRITE = 1 << 1;
        /// A peer may READ it.
        const REMOTE_READ = 1 << 2;
        /// A peer may operate on it atomically.
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound to it.
        const BIND_WINDOW = 1 << 4;
        /// A peer may FLUSH it: make sure that what it wrote is visible to all.
        const FLUSH_GLOBAL = 1 << 8;
    }
}

/// IP options of packets. 0 selects the system's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IpOptions {
    /// The traffic class of IPv6, the type of service of IPv4: six bits of class, two of congestion
    /// notification.
    pub traffic_class: u8,
    /// How many routers they may pass.
    pub hop_limit: u8,
}

/// A path MTU: payload bytes per packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
#[allow(missing_docs)]
pub enum Mtu {
    Mtu256 = 256,
    Mtu512 = 512,
    Mtu1024 = 1024,
    Mtu2048 = 2048,
    Mtu4096 = 4096,
}

impl Mtu {
    /// Every MTU, ascending.
    pub const ALL: [Self; 5] = [Self::Mtu256, Self::Mtu512, Self::Mtu1024, Self::Mtu2048, Self::Mtu4096];

    /// Bytes per packet.
    pub const fn bytes(self) -> u32 {
        self as u32
    }

    /// The MTU of exactly this many bytes.
    pub fn from_bytes(bytes: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|m| m.bytes() == bytes)
    }

    /// The largest MTU of at most this many bytes.
    pub fn at_most(bytes: u32) -> Option<Self> {
        Self::ALL.into_iter().rev().find(|m| m.bytes() <= bytes)
    }
}

/// The values of a modify call; `mask` selects those that are set.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the names are the standard's
pub struct QpAttr {
    pub mask: AttrMask,
    pub state: QpState,
    pub cur_state: QpState,
    pub en_sqd_async_notify: bool,
    pub access: Access,
    /// Of datagrams: what a sender must know.
    pub qkey: u32,
    /// Of a datagram queue pair: the port's, always.
    pub path_mtu: Mtu,
    /// Where the peer is.
    pub remote: IpAddr,
    /// How packets to it are treated on their way.
    pub ip_options: IpOptions,
    pub dest_qpn: Qpn,
    pub rq_psn: Psn,
    pub sq_psn: Psn,
    /// READs and atomics we may have outstanding.
    pub max_rd_atomic: u8,
    /// READs and atomics the peer may have outstanding here.
    pub max_dest_rd_atomic: u8,
    /// 5-bit code of [`crate::timing::rnr_timer`].
    pub min_rnr_timer: u8,
    /// 5-bit code of [`crate::timing::ack_timeout`].
    pub timeout: u8,
    pub retry_cnt: u8,
    /// 7 means without end.
    pub rnr_retry: u8,
}

impl Default for QpAttr {
    fn default() -> Self {
        Self {
            mask: AttrMask::empty(),
            state: QpState::Reset,
            cur_state: QpState::Reset,
            en_sqd_async_notify: false,
            access: Access::empty(),
            qkey: 0,
            path_mtu: Mtu::Mtu1024,
            remote: IpAddr::V4(Ipv4Addr::LOCALHOST),
            ip_options: IpOptions::default(),
            dest_qpn: Qpn::default(),
            rq_psn: Psn::default(),
            sq_psn: Psn::default(),
            max_rd_atomic: 16,
            max_dest_rd_atomic: 16,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
        }
    }
}

impl QpAttr {
    /// The largest number of outstanding READs and atomics a queue pair takes.
    pub const MAX_RD_ATOMIC: u8 = 128;

    /// To INIT, with these rights for the peer.
    pub fn to_init(access: Access) -> Self {
        let mask = AttrMask::STATE | AttrMask::PKEY_INDEX | AttrMask::PORT | AttrMask::ACCESS_FLAGS;
        Self { mask, state: QpState::Init, access, ..Self::default() }
    }

    /// To RTR, towards that queue pair.
    pub fn to_rtr(remote: IpAddr, dest_qpn: Qpn, rq_psn: Psn, path_mtu: Mtu) -> Self {
        let mask = AttrMask::STATE
            | AttrMask::AV
            | AttrMask::PATH_MTU
            | AttrMask::DEST_QPN
            | AttrMask::RQ_PSN
            | AttrMask::MAX_DEST_RD_ATOMIC
            | AttrMask::MIN_RNR_TIMER;
        Self { mask, state: QpState::Rtr, remote, dest_qpn, rq_psn, path_mtu, ..Self::default() }
    }

    /// To RTS.
    pub fn to_rts(sq_psn: Psn) -> Self {
        let mask = AttrMask::STATE
            | AttrMask::TIMEOUT
            | AttrMask::RETRY_CNT
            | AttrMask::RNR_RETRY
            | AttrMask::SQ_PSN
            | AttrMask::MAX_QP_RD_ATOMIC;
        Self { mask, state: QpState::Rts, sq_psn, ..Self::default() }
    }

    /// To RTR, towards that queue pair, over an unreliable connection.
    pub fn uc_to_rtr(remote: IpAddr, dest_qpn: Qpn, rq_psn: Psn, path_mtu: Mtu) -> Self {
        let mask =
            AttrMask::STATE | AttrMask::AV | AttrMask::PATH_MTU | AttrMask::DEST_QPN | AttrMask::RQ_PSN;
        Self { mask, ..Self::to_rtr(remote, dest_qpn, rq_psn, path_mtu) }
    }

    /// To INIT, for datagrams with this key. RTR then needs nothing.
    pub fn ud_to_init(qkey: u32) -> Self {
        let mask = AttrMask::STATE | AttrMask::PKEY_INDEX | AttrMask::PORT | AttrMask::QKEY;
        Self { mask, state: QpState::Init, qkey, ..Self::default() }
    }

    /// To RTS, for services without retransmission: unreliable connections and datagrams.
    pub fn unreliable_to_rts(sq_psn: Psn) -> Self {
        Self { mask: AttrMask::STATE | AttrMask::SQ_PSN, ..Self::to_rts(sq_psn) }
    }

    /// To a state that needs no attributes.
    pub fn to_state(state: QpState) -> Self {
        Self { mask: AttrMask::STATE, state, ..Self::default() }
    }

    /// Checks the selected values against their ranges.
    ///
    /// # Errors
    /// Names the attribute, its value and its range.
    pub fn check_values(&self) -> Result<(), TransitionError> {
        let max_rd = u64::from(Self::MAX_RD_ATOMIC);
        for (bit, name, value, max) in [
            (AttrMask::MAX_QP_RD_ATOMIC, "MAX_QP_RD_ATOMIC", self.max_rd_atomic, max_rd),
            (AttrMask::MAX_DEST_RD_ATOMIC, "MAX_DEST_RD_ATOMIC", self.max_dest_rd_atomic, max_rd),
            (AttrMask::MIN_RNR_TIMER, "MIN_RNR_TIMER", self.min_rnr_timer, 31),
            (AttrMask::TIMEOUT, "TIMEOUT", self.timeout, 31),
            (AttrMask::RETRY_CNT, "RETRY_CNT", self.retry_cnt, 7),
            (AttrMask::RNR_RETRY, "RNR_RETRY", self.rnr_retry, 7),
        ] {
            let value = u64::from(value);
            if self.mask.contains(bit) && value > max {
                return Err(TransitionError::Value { name, value, max });
            }
        }
        Ok(())
    }

    /// Copies the selected values from `new`.
    pub fn merge(&mut self, new: &Self) {
        let mask = new.mask;
        macro_rules! take {
            ($($bit:ident => $field:ident),* $(,)?) => {
                $(if mask.contains(AttrMask::$bit) { self.$field = new.$field; })*
            };
        }
        take!(
            STATE => state,
            EN_SQD_ASYNC_NOTIFY => en_sqd_async_notify,
            ACCESS_FLAGS => access,
            QKEY => qkey,
            AV => remote,
            AV => ip_options,
            PATH_MTU => path_mtu,
            TIMEOUT => timeout,
            RETRY_CNT => retry_cnt,
            RNR_RETRY => rnr_retry,
            RQ_PSN => rq_psn,
            MAX_QP_RD_ATOMIC => max_rd_atomic,
            MIN_RNR_TIMER => min_rnr_timer,
            SQ_PSN => sq_psn,
            MAX_DEST_RD_ATOMIC => max_dest_rd_atomic,
            DEST_QPN => dest_qpn,
        );
    }
}
