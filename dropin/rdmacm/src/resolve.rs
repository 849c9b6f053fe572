//! From addresses to devices.

use std::ffi::{c_int, c_void};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use nobounce_verbs as verbs;

use crate::entry::{self, Errno};
use crate::event::complete;
use crate::id::{Id, next_port};
use crate::layout::{
    CmId, EVENT_ADDR_RESOLVED, EVENT_ROUTE_RESOLVED, OPTION_ID, OPTION_ID_ACK_TIMEOUT, OPTION_ID_AFONLY,
    OPTION_ID_REUSEADDR, OPTION_ID_TOS, PathRec,
};
use crate::{address, device};

/// `rdma_bind_addr`.
pub(crate) unsafe extern "C" fn rdma_bind_addr(id: *mut CmId, addr: *mut libc::sockaddr) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        // SAFETY: the caller passes an address.
        let to = unsafe { address::read(addr)? };
        id.bind(&mut id.state(), to)?;
        Ok(0)
    })
}

fn resolve_addr(id: &Id, src: Option<SocketAddr>, dst: SocketAddr) -> Result<(), Errno> {
    let mut state = id.state();
    if state.listening || state.comm.is_some() {
        return Err(Errno::EINVAL);
    }
    // The unspecified address means this host, as with TCP.
    let dst = match dst.ip() {
        ip if !ip.is_unspecified() => dst,
        IpAddr::V4(_) => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), dst.port()),
        IpAddr::V6(_) => SocketAddr::new(std::net::Ipv6Addr::LOCALHOST.into(), dst.port()),
    };
    let dst = SocketAddr::new(device::local_addr(dst.ip()), dst.port());
    let wanted = src.or(state.src);
    let device = match wanted.map(|src| src.ip()).filter(|ip| !ip.is_unspecified()) {
        Some(ip) => device::device_at(ip)?,
        None => device::device_towards(dst.ip())?,
    };
    if device.addr.is_ipv4() != dst.is_ipv4() {
        return Err(Errno(libc::EAFNOSUPPORT));
    }
    if state.src.is_none()
        && let Some(src) = src.filter(|src| src.port() != 0)
    {
        id.bind(&mut state, SocketAddr::new(device.addr, src.port()))?;
    }
    let port = state.src.map_or(0, |src| src.port());
    let port = if port == 0 { next_port() } else { port };
    id.take_device(&mut state, device);
    state.src = Some(SocketAddr::new(device.addr, port));
    state.dst = Some(dst);
    state.link.remote = Some(dst.ip());
    state.link.mtu = device.mtu();
    id.show_addresses(&state);
    state.channel.tell(id.tag(), EVENT_ADDR_RESOLVED, 0);
    Ok(())
}

/// `rdma_resolve_addr`.
pub(crate) unsafe extern "C" fn rdma_resolve_addr(
    id: *mut CmId,
    src: *mut libc::sockaddr,
    dst: *mut libc::sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        // SAFETY: the caller passes addresses; the first may be left out.
        let (src, dst) =
            unsafe { (if src.is_null() { None } else { Some(address::read(src)?) }, address::read(dst)?) };
        resolve_addr(&id, src, dst)?;
        complete(&id)?;
        Ok(0)
    })
}

fn resolve_route(id: &Id) -> Result<(), Errno> {
    let state = id.state();
    let (Some(device), Some(dst)) = (state.device, state.dst) else { return Err(Errno::EINVAL) };
    // SAFETY: our own structure, in a call about it; calloc returns space for one record, or null.
    unsafe {
        let route = &mut (*id.raw()).route;
        if route.path_rec.is_null() {
            let path: *mut PathRec = libc::calloc(1, size_of::<PathRec>()).cast();
            let path = if path.is_null() { return Err(Errno::ENOMEM) } else { path };
            (*path).sgid = address::gid(device.addr);
            (*path).dgid = address::gid(dst.ip());
            (*path).hop_limit = 64;
            (*path).traffic_class = state.link.traffic_class;
            (*path).reversible = 1 << 24;
            (*path).numb_path = 1;
            (*path).pkey = 0xffff;
            (*path).mtu_selector = 2;
            (*path).mtu = device.mtu();
            (*path).rate_selector = 2;
            (*path).rate = 18;
            (*path).packet_life_time_selector = 2;
            (*path).packet_life_time = 16;
            route.path_rec = path;
            route.num_paths = 1;
        }
    }
    state.channel.tell(id.tag(), EVENT_ROUTE_RESOLVED, 0);
    Ok(())
}

/// `rdma_resolve_route`: there is one, the network's.
pub(crate) unsafe extern "C" fn rdma_resolve_route(id: *mut CmId, _timeout_ms: c_int) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        resolve_route(&id)?;
        complete(&id)?;
        Ok(0)
    })
}

/// `rdma_set_option`.
pub(crate) unsafe extern "C" fn rdma_set_option(
    id: *mut CmId,
    level: c_int,
    option: c_int,
    value: *mut c_void,
    len: usize,
) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        let mut state = id.state();
        // SAFETY: the caller passes `len` bytes; as many are read as the option has.
        let (byte, number) = unsafe {
            (
                (len == 1).then(|| value.cast::<u8>().read()),
                (len == size_of::<c_int>()).then(|| value.cast::<c_int>().read_unaligned()),
            )
        };
        match (level, option, byte, number) {
            (OPTION_ID, OPTION_ID_TOS, Some(tos), _) => state.link.traffic_class = tos,
            (OPTION_ID, OPTION_ID_REUSEADDR, _, Some(on)) => state.reuse_addr = on != 0,
            (OPTION_ID, OPTION_ID_AFONLY, _, Some(on)) => state.v6_only = on != 0,
            (OPTION_ID, OPTION_ID_ACK_TIMEOUT, Some(timeout), _) if timeout < 32 => {
                state.link.ack_timeout = timeout;
            }
            (OPTION_ID, OPTION_ID_TOS..=OPTION_ID_ACK_TIMEOUT, ..) => return Err(Errno::EINVAL),
            // The network determines paths.
            _ => return Err(Errno(libc::ENOSYS)),
        }
        Ok(0)
    })
}

/// The kind of queue pair, of those there are.
pub(crate) fn known_qp_type(qp_type: c_int) -> Option<u32> {
    u32::try_from(qp_type).ok().filter(|t| [verbs::IBV_QPT_RC, verbs::IBV_QPT_UD].contains(t))
}
