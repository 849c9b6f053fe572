//! TUN devices: IP packets of a namespace, one for each read and write.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use crate::namespace::owned;

/// The name of the device, alike in each namespace.
const NAME: &str = "path0";
/// Packets between the kernel and the emulator; the device drops what does not fit.
const QUEUE_LEN: i32 = 10_000;
/// How often, and how far apart, to try whether an IPv6 address is usable.
const USABLE_TRIES: u32 = 1000;
const USABLE_EVERY: Duration = Duration::from_millis(1);
const PREFIX_V4: u8 = 24;
const PREFIX_V6: u32 = 64;

/// A TUN device.
#[derive(Debug)]
pub(crate) struct Tun {
    file: File,
}

impl Tun {
    /// Makes the device of the calling thread's namespace, with these addresses.
    pub(crate) fn open(v4: Ipv4Addr, v6: Ipv6Addr, mtu: u32) -> io::Result<Self> {
        let named = |what: &'static str| {
            move |error: io::Error| io::Error::new(error.kind(), format!("{what}: {error}"))
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open("/dev/net/tun")
            .map_err(named("/dev/net/tun"))?;
        let mut request = request(NAME);
        request.ifr_ifru.ifru_flags = i16::try_from(libc::IFF_TUN | libc::IFF_NO_PI).unwrap_or(0);
        ioctl(&file, libc::TUNSETIFF, &mut request).map_err(named("TUNSETIFF"))?;
        set_up(v4, v6, mtu).map_err(named("setting up the TUN device"))?;
        Ok(Self { file })
    }

    /// Reads a packet; none is waiting if there is `None`.
    pub(crate) fn read(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match (&self.file).read(buffer) {
            Ok(len) => Ok(Some(len)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes a packet. The kernel refuses what is no IP packet, as a corrupted one may be.
    pub(crate) fn write(&self, packet: &[u8]) -> bool {
        (&self.file).write(packet).is_ok()
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Packets that the device of the calling thread's namespace dropped because the emulator did not
/// read in time.
pub(crate) fn dropped() -> io::Result<u64> {
    let table = fs::read_to_string("/proc/thread-self/net/dev")?;
    let line = table.lines().find_map(|line| line.trim().strip_prefix(NAME)?.strip_prefix(':'));
    // Eight columns for what is received, then bytes, packets, errors and drops of what is sent.
    let field = line.and_then(|line| line.split_whitespace().nth(11));
    field.and_then(|count| count.parse().ok()).ok_or_else(|| io::Error::other("no counters of the device"))
}

fn set_up(v4: Ipv4Addr, v6: Ipv6Addr, mtu: u32) -> io::Result<()> {
    let socket = socket(libc::AF_INET)?;
    let set = |name, code, fill: &dyn Fn(&mut libc::ifreq)| {
        let mut request = request(name);
        fill(&mut request);
        ioctl(&socket, code, &mut request)
    };
    let mask = Ipv4Addr::from(u32::MAX << (32 - PREFIX_V4));
    set(NAME, libc::SIOCSIFADDR, &|request| request.ifr_ifru.ifru_addr = address(v4))?;
    set(NAME, libc::SIOCSIFNETMASK, &|request| request.ifr_ifru.ifru_netmask = address(mask))?;
    set(NAME, libc::SIOCSIFMTU, &|r| r.ifr_ifru.ifru_mtu = i32::try_from(mtu).unwrap_or(i32::MAX))?;
    set(NAME, libc::SIOCSIFTXQLEN, &|request| request.ifr_ifru.ifru_metric = QUEUE_LEN)?;
    for name in ["lo", NAME] {
        let up = i16::try_from(libc::IFF_UP | libc::IFF_RUNNING).unwrap_or(0);
        set(name, libc::SIOCSIFFLAGS, &|request| request.ifr_ifru.ifru_flags = up)?;
    }
    // A kernel may have no IPv6.
    if set_v6(v6).is_ok() {
        wait_until_usable(v6);
    }
    Ok(())
}

fn set_v6(v6: Ipv6Addr) -> io::Result<()> {
    let socket = socket(libc::AF_INET6)?;
    // SAFETY: the name ends with a zero.
    let index = unsafe { libc::if_nametoindex(c"path0".as_ptr()) };
    let mut request = libc::in6_ifreq {
        ifr6_addr: libc::in6_addr { s6_addr: v6.octets() },
        ifr6_prefixlen: PREFIX_V6,
        ifr6_ifindex: libc::c_int::try_from(index).unwrap_or(0),
    };
    // SAFETY: the descriptor is open, and SIOCSIFADDR of IPv6 reads an in6_ifreq.
    let failed = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &raw mut request) };
    if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The kernel makes an address usable in its own time.
fn wait_until_usable(v6: Ipv6Addr) {
    for _ in 0..USABLE_TRIES {
        if UdpSocket::bind((v6, 0)).is_ok() {
            return;
        }
        std::thread::sleep(USABLE_EVERY);
    }
}

fn socket(family: i32) -> io::Result<std::os::fd::OwnedFd> {
    // SAFETY: socket takes numbers only.
    owned(unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })
}

fn request(name: &str) -> libc::ifreq {
    // SAFETY: an ifreq is plain data, and all zeroes are one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request
}

fn address(addr: Ipv4Addr) -> libc::sockaddr {
    let mut data = [0; 14];
    for (to, from) in data[2..].iter_mut().zip(addr.octets()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    libc::sockaddr { sa_family: libc::sa_family_t::try_from(libc::AF_INET).unwrap_or(0), sa_data: data }
}

fn ioctl(file: &impl AsRawFd, code: libc::Ioctl, request: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: the descriptor is open, and these calls read an ifreq.
    let failed = unsafe { libc::ioctl(file.as_raw_fd(), code, std::ptr::from_mut(request)) };
    if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
