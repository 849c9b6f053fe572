//! One UDP socket: addresses in the kernel's form, options, errors.

use std::collections::BTreeMap;
use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use nobounce_protocol::cm::GSI_QPN;
use nobounce_protocol::wire::Qpn;

use super::OpenError;
use super::bpf;
use super::steering::{NUMBER_AT, PROBE_LEN};
use crate::links::wire_packets::SLOT_BYTE;

/// An address and port in the form system calls take.
#[derive(Clone, Copy)]
pub(super) struct SockAddr {
    storage: libc::sockaddr_in6,
    len: libc::socklen_t,
}

impl SockAddr {
    pub(super) fn new(addr: IpAddr, port: u16, scope: u32) -> Self {
        let mut this = Self::empty();
        match addr {
            IpAddr::V4(a) => {
                let v4 = libc::sockaddr_in {
                    sin_family: family(libc::AF_INET),
                    sin_port: port.to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(a.octets()) },
                    sin_zero: [0; 8],
                };
                // SAFETY: sockaddr_in is smaller than sockaddr_in6 and needs no stricter alignment;
                // any bytes are a valid sockaddr_in6.
                unsafe { (&raw mut this.storage).cast::<libc::sockaddr_in>().write(v4) };
                this.len = size_of_len::<libc::sockaddr_in>();
            }
            IpAddr::V6(a) => {
                this.storage = libc::sockaddr_in6 {
                    sin6_family: family(libc::AF_INET6),
                    sin6_port: port.to_be(),
                    sin6_flowinfo: 0,
                    sin6_addr: libc::in6_addr { s6_addr: a.octets() },
                    sin6_scope_id: if needs_scope(a) { scope } else { 0 },
                };
                this.len = size_of_len::<libc::sockaddr_in6>();
            }
        }
        this
    }

    /// Room for the kernel to fill.
    pub(super) fn empty() -> Self {
        // SAFETY: sockaddr_in6 is plain integers; zeros are a valid value.
        Self { storage: unsafe { mem::zeroed() }, len: size_of_len::<libc::sockaddr_in6>() }
    }

    /// What the kernel filled in.
    pub(super) fn get(&self) -> Option<(IpAddr, u16)> {
        match i32::from(self.storage.sin6_family) {
            libc::AF_INET => {
                // SAFETY: the family says the bytes are a sockaddr_in, which fits inside and is
                // plain integers.
                let v4 = unsafe { (&raw const self.storage).cast::<libc::sockaddr_in>().read() };
                let addr = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
                Some((addr.into(), u16::from_be(v4.sin_port)))
            }
            libc::AF_INET6 => {
                let addr = Ipv6Addr::from(self.storage.sin6_addr.s6_addr);
                Some((addr.into(), u16::from_be(self.storage.sin6_port)))
            }
            _ => None,
        }
    }

    pub(super) fn as_ptr(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut libc::c_void {
        (&raw mut self.storage).cast()
    }

    pub(super) fn len(&self) -> libc::socklen_t {
        self.len
    }
}

/// Whether an address names a host or a group of one link only.
fn needs_scope(addr: Ipv6Addr) -> bool {
    const LINK: u16 = 2;
    addr.is_unicast_link_local() || addr.is_multicast() && addr.segments()[0] & 0xf <= LINK
}

// address families are small positive constants
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
const fn family(af: i32) -> libc::sa_family_t {
    af as libc::sa_family_t
}

#[allow(clippy::cast_possible_truncation)] // sizes of small structs
const fn size_of_len<T>() -> libc::socklen_t {
    size_of::<T>() as libc::socklen_t
}

/// A UDP socket, closed on drop.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    /// A socket whose packets carry DF and a predictable identification (see the ICRC), not yet
    /// bound.
    ///
    /// It must never be connected: a connected socket numbers its packets from a random start.
    pub(super) fn new(addr: IpAddr) -> Result<Self, OpenError> {
        let os = |call| move |source| OpenError::Os { addr, call, source };
        let domain = if addr.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        let this = Self::of(domain).map_err(os("socket"))?;
        this.set(libc::SOL_SOCKET, libc::SO_REUSEPORT, 1).map_err(os("setsockopt(SO_REUSEPORT)"))?;
        if addr.is_ipv4() {
            this.set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)
                .map_err(os("setsockopt(IP_MTU_DISCOVER)"))?;
        } else {
            this.set(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1).map_err(os("setsockopt(IPV6_V6ONLY)"))?;
            this.set(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO)
                .map_err(os("setsockopt(IPV6_MTU_DISCOVER)"))?;
            // Accept a zero UDP checksum over IPv6: rdma_rxe and hardware send it, and the ICRC
            // protects more.
            this.set(libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1).map_err(os("setsockopt(UDP_NO_CHECK6_RX)"))?;
        }
        Ok(this)
    }

    /// A socket for both families that shares its port.
    pub(super) fn dual() -> io::Result<Self> {
        let this = Self::of(libc::AF_INET6)?;
        this.set(libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)?;
        this.set(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 0)?;
        Ok(this)
    }

    fn of(domain: libc::c_int) -> io::Result<Self> {
        // SAFETY: no pointers are passed; the result is checked before it is owned.
        let fd =
            unsafe { libc::socket(domain, libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0) };
        check(fd)?;
        // SAFETY: `fd` was just opened and has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(super) fn bind(&self, to: &SockAddr) -> io::Result<()> {
        // SAFETY: the pointer and length describe a live socket address.
        check(unsafe { libc::bind(self.fd(), to.as_ptr(), to.len()) })
    }

    /// Sets an integer option.
    pub(super) fn set(&self, level: i32, name: i32, value: i32) -> io::Result<()> {
        self.set_value(level, name, &value)
    }

    /// Sets an option whose value the kernel reads as plain data.
    pub(super) fn set_value<T: Copy>(&self, level: i32, name: i32, value: &T) -> io::Result<()> {
        // SAFETY: the pointer and length describe one live value.
        check(unsafe {
            libc::setsockopt(self.fd(), level, name, ptr::from_ref(value).cast(), size_of_len::<T>())
        })
    }

    /// The value of an integer option.
    pub(super) fn option(&self, level: i32, name: i32) -> io::Result<i32> {
        let mut value = 0_i32;
        let mut len = size_of_len::<i32>();
        // SAFETY: the pointers describe one live integer and its length.
        check(unsafe { libc::getsockopt(self.fd(), level, name, (&raw mut value).cast(), &raw mut len) })?;
        Ok(value)
    }

    /// Asks for the congestion marks of what arrives. A kernel that refuses reports none.
    pub(super) fn read_marks(&self, addr: IpAddr) {
        let _ = match addr {
            IpAddr::V4(_) => self.set(libc::IPPROTO_IP, libc::IP_RECVTOS, 1),
            IpAddr::V6(_) => self.set(libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1),
        };
    }

    /// Sets the traffic class of what it sends.
    pub(super) fn set_class(&self, addr: IpAddr, class: u8) -> io::Result<()> {
        match addr {
            IpAddr::V4(_) => self.set(libc::IPPROTO_IP, libc::IP_TOS, class.into()),
            IpAddr::V6(_) => self.set(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, class.into()),
        }
    }

    /// Whether the kernel knows an option.
    pub(super) fn knows(&self, level: i32, name: i32) -> bool {
        self.option(level, name).is_ok()
    }

    /// The hop limit of what it sends; 0 if the kernel does not say.
    pub(super) fn hop_limit(&self, addr: IpAddr) -> u8 {
        let asked = match addr {
            IpAddr::V4(_) => self.option(libc::IPPROTO_IP, libc::IP_TTL),
            IpAddr::V6(_) => self.option(libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS),
        };
        asked.ok().and_then(|hops| u8::try_from(hops).ok()).unwrap_or(0)
    }

    /// Drops everything that arrives.
    pub(super) fn drop_all(&self) -> io::Result<()> {
        self.attach(libc::SO_ATTACH_FILTER, &mut [bpf::plain(bpf::RET_K, 0)])
    }

    /// Attaches the SO_REUSEPORT program. It selects the socket by the high byte of the destination
    /// QP number, the slot, except for slots with another number. Probes carry the number. MADs are
    /// for the host as a whole and go to any socket: where a process is stopped, a retransmission
    /// reaches another one.
    pub(super) fn steer(&self, moved: &BTreeMap<u8, u8>, sockets: usize) -> io::Result<()> {
        let offset = |at| u32::try_from(at).unwrap_or(0);
        let answer = bpf::plain(bpf::RET_A, 0);
        let mut code = vec![
            bpf::plain(bpf::LD_LEN, 0),
            bpf::unless(offset(PROBE_LEN), 2),
            bpf::plain(bpf::LDB_ABS, offset(NUMBER_AT)),
            answer,
        ];
        if sockets > 1 {
            code.extend([
                bpf::plain(bpf::LDW_ABS, offset(SLOT_BYTE - 1)),
                bpf::plain(bpf::AND_K, Qpn::MAX),
                bpf::unless(GSI_QPN, 3),
                bpf::plain(bpf::LDW_ABS, bpf::RANDOM),
                bpf::plain(bpf::MOD_K, offset(sockets)),
                answer,
            ]);
        }
        code.push(bpf::plain(bpf::LDB_ABS, offset(SLOT_BYTE)));
        for (slot, number) in moved.iter().filter(|(slot, number)| slot != number) {
            code.push(bpf::unless(u32::from(*slot), 1));
            code.push(bpf::plain(bpf::RET_K, u32::from(*number)));
        }
        code.push(answer);
        self.attach(libc::SO_ATTACH_REUSEPORT_CBPF, &mut code)
    }

    /// Attaches a filter program.
    pub(super) fn attach(&self, option: libc::c_int, code: &mut [libc::sock_filter]) -> io::Result<()> {
        let len = u16::try_from(code.len()).map_err(io::Error::other)?;
        let program = libc::sock_fprog { len, filter: code.as_mut_ptr() };
        // SAFETY: the program and its instructions live through the call, which copies them.
        check(unsafe {
            libc::setsockopt(
                self.fd(),
                libc::SOL_SOCKET,
                option,
                (&raw const program).cast(),
                size_of_len::<libc::sock_fprog>(),
            )
        })
    }

    /// Sends a few bytes; errors are ignored.
    pub(super) fn send_to(&self, bytes: &[u8], to: &SockAddr) {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the pointers and lengths describe live bytes and a live socket address.
        unsafe {
            libc::sendto(self.fd(), bytes.as_ptr().cast(), bytes.len(), flags, to.as_ptr(), to.len());
        }
    }

    /// Datagrams the kernel dropped because the receive buffer was full.
    pub(super) fn drops(&self) -> u64 {
        const DROPS: usize = 8; // SK_MEMINFO_DROPS
        let mut info = [0_u32; 9];
        let mut len = size_of_len::<[u32; 9]>();
        // SAFETY: the pointers describe live room and its length; the kernel writes no more than
        // that.
        let done = check(unsafe {
            libc::getsockopt(
                self.fd(),
                libc::SOL_SOCKET,
                libc::SO_MEMINFO,
                info.as_mut_ptr().cast(),
                &raw mut len,
            )
        });
        done.map_or(0, |()| u64::from(info[DROPS]))
    }

    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
