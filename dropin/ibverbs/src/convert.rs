//! Between the numbers of C and our own types.

use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::RawFd;
use std::ptr;

use nobounce_nic::hard::state_code;
use nobounce_nic::work::{Access, IpOptions, Mtu, PostError, QpState};
use nobounce_verbs as verbs;

use crate::entry::Errno;

/// The GID of an address: IPv4 is mapped into IPv6.
pub(crate) fn gid_of(addr: IpAddr) -> verbs::Gid {
    let v6 = match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    verbs::Gid { raw: v6.octets() }
}

/// The address of a GID.
pub(crate) fn addr_of(gid: &verbs::Gid) -> IpAddr {
    // SAFETY: any sixteen bytes are a valid GID.
    Ipv6Addr::from(unsafe { gid.raw }).to_canonical()
}

/// IP options (traffic class, hop limit) of packets on that route.
///
/// Programs write hop limits of 0, 1 and 255 without meaning (ping-pongs, perftest, NCCL); the
/// kernel, too, uses the limit of its own routes instead.
pub(crate) fn ip_options_of(route: &verbs::GlobalRoute) -> IpOptions {
    let meant = !matches!(route.hop_limit, 0 | 1 | u8::MAX);
    IpOptions { traffic_class: route.traffic_class, hop_limit: if meant { route.hop_limit } else { 0 } }
}

pub(crate) fn mtu_code(mtu: Mtu) -> u32 {
    match mtu {
        Mtu::Mtu256 => verbs::IBV_MTU_256,
        Mtu::Mtu512 => verbs::IBV_MTU_512,
        Mtu::Mtu1024 => verbs::IBV_MTU_1024,
        Mtu::Mtu2048 => verbs::IBV_MTU_2048,
        Mtu::Mtu4096 => verbs::IBV_MTU_4096,
    }
}

pub(crate) fn mtu_of(code: u32) -> Result<Mtu, Errno> {
    Mtu::ALL.into_iter().find(|mtu| mtu_code(*mtu) == code).ok_or(Errno::EINVAL)
}

pub(crate) fn state_of(code: u32) -> Result<QpState, Errno> {
    QpState::ALL.into_iter().find(|state| state_code(*state) == code).ok_or(Errno::EINVAL)
}

/// Access flags of a region. Bits of the optional range are hints; other unsupported flags are
/// refused.
pub(crate) fn access_of(flags: u32) -> Result<Access, Errno> {
    // A hint about pages, and one about where addresses begin, which the caller has seen to.
    let harmless =
        verbs::IBV_ACCESS_HUGETLB | verbs::IBV_ACCESS_ZERO_BASED | verbs::IBV_ACCESS_OPTIONAL_RANGE;
    if flags & verbs::IBV_ACCESS_ON_DEMAND != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    Access::from_bits(flags & !harmless).ok_or(Errno::EINVAL)
}

/// The file behind a descriptor.
pub(crate) fn file_of(fd: RawFd) -> Option<(libc::dev_t, libc::ino_t)> {
    // SAFETY: plain numbers, for which zeroes are valid.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: takes a number and a valid place.
    let known = unsafe { libc::fstat(fd, &raw mut status) } == 0;
    known.then_some((status.st_dev, status.st_ino))
}

/// Copies out a structure whose length the caller knows from its own headers, older or newer than
/// ours. Writes as much of `ours` as fits, and zeroes in the fields that only a newer one has.
///
/// # Safety
/// `to` has `size` bytes.
pub(crate) unsafe fn write_sized<T: Copy>(ours: &T, to: *mut T, size: usize) {
    // SAFETY: `to` has `size` bytes; no more are written, and no more are read than `ours` has.
    unsafe {
        ptr::write_bytes(to.cast::<u8>(), 0, size);
        ptr::copy_nonoverlapping(ptr::from_ref(ours).cast::<u8>(), to.cast(), size.min(size_of::<T>()));
    }
}

pub(crate) fn post_errno(error: PostError) -> Errno {
    match error {
        PostError::QueueFull(_) => Errno::ENOMEM,
        _ => Errno::EINVAL,
    }
}
