//! Why a device could not be opened, in sentences.

use std::fs;
use std::io;
use std::net::IpAddr;

use nobounce_protocol::wire::ROCE_PORT;

/// Opening a link failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Another program holds the port and does not share it.
    #[error(
        "UDP port {ROCE_PORT} on {addr} is held by {holder}, and only programs of one user that all share the port can \
         use one address together. Stop that program, run as its user, or use another address{hint}"
    )]
    PortHeld {
        /// The requested address.
        addr: IpAddr,
        /// The holder of the port, as far as the kernel tells.
        holder: Holder,
        /// What else could be used.
        hint: &'static str,
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

    /// The error for a port that the socket tables show as held, without a bind.
    pub(super) fn if_held(addr: IpAddr) -> Result<(), Self> {
        match Holder::find(addr) {
            Holder::User(uid) if uid == own_uid() => Ok(()), // it may share
            Holder::Unknown => Ok(()),
            holder => Err(Self::held(addr, holder)),
        }
    }

    fn held(addr: IpAddr, holder: Holder) -> Self {
        let hint = if addr.is_loopback() { " (such as 127.0.0.2)" } else { "" };
        Self::PortHeld { addr, holder, hint }
    }
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
    /// Searches the kernel's socket tables for the holder of the port.
    fn find(addr: IpAddr) -> Self {
        let mut found = Self::Unknown;
        for table in ["/proc/net/udp", "/proc/net/udp6"] {
            for line in fs::read_to_string(table).unwrap_or_default().lines() {
                match Self::parse(line, addr) {
                    // A socket on exactly our address is a likelier holder than a wildcard one.
                    Some((holder, true)) => return holder,
                    Some((holder, false)) => found = holder,
                    None => {}
                }
            }
        }
        found
    }

    /// Reads one line of the table: the holder, and whether it names the very address.
    fn parse(line: &str, addr: IpAddr) -> Option<(Self, bool)> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (host, port) = fields.get(1)?.split_once(':')?;
        if u16::from_str_radix(port, 16) != Ok(ROCE_PORT) {
            return None;
        }
        // The table prints the address as 32-bit words in the byte order of the machine.
        let ours: String = match addr {
            IpAddr::V4(a) => format!("{:08X}", u32::from_ne_bytes(a.octets())),
            IpAddr::V6(a) => a
                .octets()
                .chunks_exact(4)
                .map(|w| format!("{:08X}", u32::from_ne_bytes([w[0], w[1], w[2], w[3]])))
                .collect(),
        };
        let any = host.bytes().all(|b| b == b'0');
        if host != ours && !any {
            return None;
        }
        let holder = match (fields.get(7)?.parse(), fields.get(9)?.parse::<u64>()) {
            (_, Ok(0)) => Self::Kernel,
            (Ok(uid), _) => Self::User(uid),
            _ => Self::Unknown,
        };
        Some((holder, host == ours))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_table_is_read_for_the_holder() {
        let addr: IpAddr = "127.0.0.1".parse().unwrap();
        let host = format!("{:08X}", u32::from_ne_bytes([127, 0, 0, 1]));
        let line = |host: &str, port: &str, uid: &str, inode: &str| {
            format!(
                "  12: {host}:{port} 00000000:0000 07 00000000:00000000 00:00000000 00000000 {uid} 0 {inode} 2 0 0"
            )
        };
        assert_eq!(
            Holder::parse(&line(&host, "12B7", "65534", "77"), addr),
            Some((Holder::User(65534), true))
        );
        assert_eq!(Holder::parse(&line("00000000", "12B7", "0", "0"), addr), Some((Holder::Kernel, false)));
        assert_eq!(Holder::parse(&line(&host, "12B8", "0", "77"), addr), None);
        assert_eq!(Holder::parse(&line("0200007E", "12B7", "0", "77"), addr), None);
        for junk in ["", "sl local", "1: x:12B7", "1: :", "1: 00000000:12B7 a b c d e f g h"] {
            let _ = Holder::parse(junk, addr);
        }
    }
}
