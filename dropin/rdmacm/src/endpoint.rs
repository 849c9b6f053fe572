//! Names to addresses, and endpoints made from them.

use std::ffi::{c_char, c_int};
use std::net::SocketAddr;
use std::ptr;

use nobounce_verbs as verbs;

use crate::calls::calls;
use crate::entry::{self, Errno};
use crate::id::{self, Id};
use crate::layout::{AddrInfo, CmId, PS_TCP, PS_UDP, RAI_FAMILY, RAI_NUMERICHOST, RAI_PASSIVE};
use crate::resolve::{known_qp_type, rdma_bind_addr, rdma_resolve_addr, rdma_resolve_route};
use crate::{address, device, qp};

/// Timeout of address resolution in milliseconds; it completes at once.
const TIMEOUT_MS: c_int = 2000;

/// A copy of an address that `rdma_freeaddrinfo` frees.
fn copy(of: SocketAddr) -> Result<(*mut libc::sockaddr, libc::socklen_t), Errno> {
    let storage = address::storage(of);
    // SAFETY: calloc takes numbers; the storage has the requested length.
    unsafe {
        let to = libc::calloc(1, size_of_val(&storage)).cast::<libc::sockaddr_storage>();
        if to.is_null() {
            return Err(Errno::ENOMEM);
        }
        *to = storage;
        Ok((to.cast(), address::len(of)))
    }
}

/// Return value of `rdma_getaddrinfo` for a failure: 0 for success, -1 and errno, or the resolver's
/// code.
enum Failure {
    Errno(Errno),
    Resolver(c_int),
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

/// Queries the resolver for the first address of a name.
fn look_up(
    node: *const c_char,
    service: *const c_char,
    flags: c_int,
    family: c_int,
) -> Result<SocketAddr, Failure> {
    // SAFETY: numbers and pointers, for which zeroes are valid.
    let mut hints: libc::addrinfo = unsafe { std::mem::zeroed() };
    hints.ai_socktype = libc::SOCK_STREAM;
    hints.ai_family = family;
    if flags & RAI_PASSIVE != 0 {
        hints.ai_flags |= libc::AI_PASSIVE;
    }
    if flags & RAI_NUMERICHOST != 0 {
        hints.ai_flags |= libc::AI_NUMERICHOST;
    }
    let mut found = ptr::null_mut();
    // SAFETY: C strings or null, valid hints, and a place for the result.
    let code = unsafe { libc::getaddrinfo(node, service, &raw const hints, &raw mut found) };
    if code != 0 {
        return Err(Failure::Resolver(code));
    }
    // An address of a device's kind, where there are several: "localhost" is both.
    let mut addresses = Vec::new();
    let mut at = found;
    // SAFETY: the resolver's list, which is freed once, after it was read.
    unsafe {
        while let Some(one) = at.as_ref() {
            addresses.extend(address::read(one.ai_addr).ok());
            at = one.ai_next;
        }
        libc::freeaddrinfo(found);
    }
    let usable = addresses.iter().find(|a| device::has_kind(a.ip()));
    usable.or(addresses.first()).copied().ok_or(Failure::Resolver(libc::EAI_NODATA))
}

fn resolve(
    node: *const c_char,
    service: *const c_char,
    hints: Option<&AddrInfo>,
) -> Result<*mut AddrInfo, Failure> {
    if node.is_null() && service.is_null() && hints.is_none() {
        return Err(Errno::EINVAL.into());
    }
    let flags = hints.map_or(0, |hints| hints.flags);
    let family =
        hints.filter(|hints| hints.flags & RAI_FAMILY != 0).map_or(libc::AF_UNSPEC, |hints| hints.family);
    let (mut src, mut dst) = (None, None);
    // SAFETY: addresses of the caller's, or null.
    unsafe {
        if let Some(hints) = hints {
            src = if hints.src_len > 0 { address::read(hints.src_addr).ok() } else { None };
            dst = if hints.dst_len > 0 { address::read(hints.dst_addr).ok() } else { None };
        }
    }
    if !node.is_null() || !service.is_null() {
        let found = look_up(node, service, flags, family)?;
        if flags & RAI_PASSIVE != 0 { src = Some(found) } else { dst = Some(found) }
    }
    let qp_type = hints.and_then(|hints| known_qp_type(hints.qp_type));
    let port_space = hints.map_or(0, |hints| hints.port_space);
    let (qp_type, port_space) = match (qp_type, u32::try_from(port_space).unwrap_or(0)) {
        (Some(verbs::IBV_QPT_UD), 0) => (verbs::IBV_QPT_UD, PS_UDP),
        (None, PS_UDP) => (verbs::IBV_QPT_UD, PS_UDP),
        (qp_type, 0) => (qp_type.unwrap_or(verbs::IBV_QPT_RC), PS_TCP),
        (qp_type, port_space) => (qp_type.unwrap_or(verbs::IBV_QPT_RC), port_space),
    };
    // SAFETY: calloc takes numbers; zeroes are valid for all fields.
    let info: *mut AddrInfo = unsafe { libc::calloc(1, size_of::<AddrInfo>()) }.cast();
    if info.is_null() {
        return Err(Errno::ENOMEM.into());
    }
    // SAFETY: just made.
    unsafe {
        (*info).flags = flags;
        (*info).qp_type = qp_type.cast_signed();
        (*info).port_space = port_space.cast_signed();
        (*info).family = match src.or(dst) {
            Some(SocketAddr::V6(_)) => libc::AF_INET6,
            _ => libc::AF_INET,
        };
        if let Some(src) = src {
            ((*info).src_addr, (*info).src_len) = copy(src)?;
        }
        if let Some(dst) = dst {
            ((*info).dst_addr, (*info).dst_len) = copy(dst)?;
        }
    }
    Ok(info)
}

/// `rdma_getaddrinfo`.
pub(crate) unsafe extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const AddrInfo,
    result: *mut *mut AddrInfo,
) -> c_int {
    entry::guarded(|| {
        // SAFETY: the caller passes a place for the result, and a valid structure or null.
        unsafe {
            *result = ptr::null_mut();
            match resolve(node, service, hints.as_ref()) {
                Ok(info) => *result = info,
                Err(Failure::Resolver(code)) => return Ok(code),
                Err(Failure::Errno(errno)) => return Err(errno),
            }
        }
        Ok(0)
    })
    .unwrap_or_else(|errno| {
        errno.set();
        -1
    })
}

/// `rdma_freeaddrinfo`.
pub(crate) unsafe extern "C" fn rdma_freeaddrinfo(mut info: *mut AddrInfo) {
    // SAFETY: the caller hands back what `rdma_getaddrinfo` gave, all of which came from calloc.
    unsafe {
        while !info.is_null() {
            let next = (*info).next;
            libc::free((*info).src_addr.cast());
            libc::free((*info).dst_addr.cast());
            libc::free((*info).src_canonname.cast());
            libc::free((*info).dst_canonname.cast());
            libc::free((*info).route);
            libc::free((*info).connect);
            libc::free(info.cast());
            info = next;
        }
    }
}

fn done(code: c_int) -> Result<(), Errno> {
    if code == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().into()) }
}

/// Makes an endpoint ready: bound, or resolved and with a queue pair.
///
/// # Safety
/// Structures of C's, valid.
unsafe fn prepare(
    id: &Id,
    info: &AddrInfo,
    pd: *mut verbs::Pd,
    attr: Option<&mut verbs::QpInitAttr>,
) -> Result<(), Errno> {
    let qp_type = known_qp_type(info.qp_type).unwrap_or(verbs::IBV_QPT_RC);
    // SAFETY: as the caller says.
    unsafe {
        if info.flags & RAI_PASSIVE != 0 {
            done(rdma_bind_addr(id.raw(), info.src_addr))?;
            if let Some(attr) = attr {
                attr.qp_type = qp_type;
                id.state().endpoint = Some((pd, *attr));
            }
            return Ok(());
        }
        done(rdma_resolve_addr(id.raw(), info.src_addr, info.dst_addr, TIMEOUT_MS))?;
        done(rdma_resolve_route(id.raw(), TIMEOUT_MS))?;
        if let Some(attr) = attr {
            attr.qp_type = qp_type;
            let create_qp = calls()?.create_qp;
            qp::create(id, pd, attr, |pd, attr| create_qp(pd, attr))?;
        }
        if info.connect_len > 0 && !info.connect.is_null() {
            let data = std::slice::from_raw_parts(info.connect.cast::<u8>(), info.connect_len);
            id.state().connect_data = data.to_vec();
        }
    }
    Ok(())
}

/// `rdma_create_ep`.
pub(crate) unsafe extern "C" fn rdma_create_ep(
    result: *mut *mut CmId,
    info: *mut AddrInfo,
    pd: *mut verbs::Pd,
    attr: *mut verbs::QpInitAttr,
) -> c_int {
    entry::minus_one(|| {
        // SAFETY: the caller passes valid structures; the last may be left out.
        unsafe {
            let info = info.as_ref().ok_or(Errno::EINVAL)?;
            let port_space = u32::try_from(info.port_space).map_err(|_| Errno::EINVAL)?;
            let id = id::create(ptr::null_mut(), ptr::null_mut(), port_space, known_qp_type(info.qp_type))?;
            if let Err(errno) = prepare(&id, info, pd, attr.as_mut()) {
                id.end();
                return Err(errno);
            }
            *result = id.raw();
        }
        Ok(0)
    })
}

/// `rdma_destroy_ep`.
pub(crate) unsafe extern "C" fn rdma_destroy_ep(id: *mut CmId) {
    entry::silent(|| {
        let ours = Id::find(id)?;
        qp::destroy(&ours, calls()?);
        // SAFETY: the caller passes an identifier, which it does not use any more.
        unsafe { qp::rdma_destroy_srq(id) };
        ours.end();
        Ok(())
    });
}
