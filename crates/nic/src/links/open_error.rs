//! Why a device could not be opened, in sentences.

use std::io;
use std::net::IpAddr;

use nobounce_protocol::wire::ROCE_PORT;

use super::port_table::PortHolder;

/// Opening a link failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Another program holds the port and does not share it.
    #[error(
        "UDP port {ROCE_PORT} on {addr} is held by {holder}, and only programs of one user that all share the port can \
         use one address together. {remedy}"
    )]
    PortHeld {
        /// The requested address.
        addr: IpAddr,
        /// The holder of the port, as far as the kernel tells.
        holder: Holder,
        /// What to do.
        remedy: &'static str,
    },
    /// A program that does not share the port holds it on another address.
    #[error(
        "UDP port {ROCE_PORT} on {at} is held by {holder}. Who holds the port of one address can forge packets of the \
         others, so a device on {addr} needs it on all of them. Stop that program, run as its user, use a network \
         namespace, or set NOBOUNCE_LOCAL_PORTS=any for all devices of this host and accept such packets"
    )]
    PortHeldElsewhere {
        /// The requested address.
        addr: IpAddr,
        /// Where it is held.
        at: String,
        /// The holder of the port.
        holder: Holder,
    },
    /// The address belongs to no interface of this machine.
    #[error(
        "{addr} is not an address of this machine (bind: {source}). `ip addr` lists the addresses that can be used; \
         on loopback any of 127.0.0.1 to 127.255.255.254"
    )]
    NotLocal {
        /// The requested address.
        addr: IpAddr,
        /// What bind said.
        source: io::Error,
    },
    /// The port is privileged here.
    #[error(
        "this user may not bind UDP port {ROCE_PORT} on {addr} ({source}). RoCEv2 needs that port: \
         `sysctl net.ipv4.ip_unprivileged_port_start` must be at most {ROCE_PORT}, and no security policy may forbid it"
    )]
    NotPermitted {
        /// The requested address.
        addr: IpAddr,
        /// What bind said.
        source: io::Error,
    },
    /// Every slot is taken.
    #[error(
        "all 256 device slots of {addr} are taken, one by each open device (`grep nobounce/slot /proc/net/unix` lists \
         them). Close a device or use another address"
    )]
    NoFreeSlot {
        /// The requested address.
        addr: IpAddr,
    },
    /// `0.0.0.0` and `::` cannot be used.
    #[error(
        "{addr} stands for every address of this machine, but the checksum (ICRC) of a packet covers its source \
         address: specify one address"
    )]
    Unspecified {
        /// The requested address.
        addr: IpAddr,
    },
    /// Anything else the kernel refused.
    #[error("opening the link on {addr} failed: {call}: {source}")]
    Os {
        /// The requested address.
        addr: IpAddr,
        /// The system call.
        call: &'static str,
        /// What it said.
        source: io::Error,
    },
}

impl OpenError {
    /// The error for a refused `bind` of the well-known port.
    pub(super) fn from_bind(addr: IpAddr, source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::EADDRINUSE) => Self::held(addr, Holder::find(addr)),
            Some(libc::EADDRNOTAVAIL) => Self::NotLocal { addr, source },
            Some(libc::EACCES | libc::EPERM) => Self::NotPermitted { addr, source },
            _ => Self::Os { addr, call: "bind", source },
        }
    }

    /// The error for a refused `bind` of the port of all addresses.
    pub(super) fn from_guard(addr: IpAddr, source: io::Error) -> Self {
        if source.raw_os_error() != Some(libc::EADDRINUSE) {
            return Self::from_bind(addr, source);
        }
        let ours = |held: &PortHolder| held.uid == own_uid();
        let found = PortHolder::all().unwrap_or_default().into_iter().filter(ours);
        let mut at: Vec<String> = found.map(|held| place(held.addr)).collect();
        at.sort_unstable();
        at.dedup();
        let holder = if at.is_empty() { Holder::Unknown } else { Holder::User(own_uid()) };
        Self::PortHeldElsewhere { addr, at: at.join(" or "), holder }
    }

    /// The error for a port that the socket tables show as held, without a bind.
    pub(super) fn if_held(addr: IpAddr) -> Result<(), Self> {
        match Holder::find(addr) {
            Some(held) if held.is_kernel || held.uid != own_uid() => Err(Self::held(addr, Some(held))),
            _ => Ok(()), // it may share
        }
    }

    /// The error for a port that another user holds on any address.
    pub(super) fn if_held_elsewhere(addr: IpAddr) -> Result<(), Self> {
        let call = "reading /proc/net/udp, to know that no other user has the port (NOBOUNCE_LOCAL_PORTS=any does not ask)";
        let all = PortHolder::all().map_err(|source| Self::Os { addr, call, source })?;
        match all.into_iter().find(|held| held.uid != own_uid()) {
            Some(held) => Err(Self::elsewhere(addr, held)),
            None => Ok(()),
        }
    }

    fn held(addr: IpAddr, held: Option<PortHolder>) -> Self {
        match held {
            Some(held) if held.addr != addr && !held.is_kernel => Self::elsewhere(addr, held),
            held => {
                let holder = Holder::of(held);
                Self::PortHeld { addr, holder, remedy: holder.remedy(addr) }
            }
        }
    }

    fn elsewhere(addr: IpAddr, held: PortHolder) -> Self {
        Self::PortHeldElsewhere { addr, at: place(held.addr), holder: Holder::of(Some(held)) }
    }
}

fn place(addr: IpAddr) -> String {
    if addr.is_unspecified() { "all addresses".to_owned() } else { addr.to_string() }
}

fn own_uid() -> u32 {
    // SAFETY: geteuid reads one number of this process and cannot fail.
    unsafe { libc::geteuid() }
}

/// Who holds the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Holder {
    /// A program of this user.
    User(u32),
    /// The kernel itself: its own soft-RoCE (rdma_rxe) listens on every address.
    Kernel,
    /// The kernel's tables show no holder.
    Unknown,
}

impl Holder {
    /// The holder that keeps a device from the address. A socket on exactly that address is a
    /// likelier one than a socket for all.
    fn find(addr: IpAddr) -> Option<PortHolder> {
        let mut all = PortHolder::all().unwrap_or_default();
        all.retain(|held| held.excludes(addr));
        all.iter().find(|held| held.addr == addr).or(all.last()).copied()
    }

    /// What to do about a holder of that very address.
    fn remedy(self, addr: IpAddr) -> &'static str {
        match self {
            Self::Kernel => "Unload rdma_rxe (`rmmod rdma_rxe`), or use a network namespace",
            Self::User(uid) if uid != own_uid() => "Stop that program, or run as its user",
            _ if addr.is_loopback() => "Stop that program, or use another address (such as 127.0.0.2)",
            _ => "Stop that program, or use another address",
        }
    }

    fn of(held: Option<PortHolder>) -> Self {
        match held {
            Some(PortHolder { is_kernel: true, .. }) => Self::Kernel,
            Some(PortHolder { uid, .. }) => Self::User(uid),
            None => Self::Unknown,
        }
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let me = own_uid();
        match self {
            Self::User(uid) if *uid == me => {
                write!(f, "another program of this user (uid {uid}) that does not share it")
            }
            Self::User(uid) => write!(f, "a program of another user (uid {uid}; we are uid {me})"),
            Self::Kernel => write!(f, "the kernel (its soft-RoCE, rdma_rxe, listens on all addresses)"),
            Self::Unknown => write!(f, "a program the kernel's tables do not show to us"),
        }
    }
}
