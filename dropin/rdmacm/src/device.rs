//! The devices that connections are made on: those of libibverbs, each with its connection manager.

use std::ffi::{CStr, c_int};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use nobounce_nic::soft::{Cm, Config, Device as SoftDevice, LinkChoice};
use nobounce_nic::work::Mtu;
use nobounce_protocol::wire::ROCE_PORT;
use nobounce_verbs as verbs;

use crate::calls::{calls, done, made};
use crate::entry::{self, Errno};
use crate::log;

/// A device. It is opened once and never closed: programs keep pointers to its context.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) addr: IpAddr,
    /// As libibverbs opened it: queue pairs are made here.
    pub(crate) context: *mut verbs::Context,
    /// The default protection domain, for programs that pass none.
    pub(crate) pd: *mut verbs::Pd,
    /// The connection manager's datagrams, beside the program's own traffic; from the first
    /// connection on.
    cm: Mutex<Option<Cm>>,
    pub(crate) max_responder_resources: u8,
    pub(crate) max_initiator_depth: u8,
}

// SAFETY: context and domain are libibverbs' objects, which any thread may use.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Its connection manager.
    pub(crate) fn cm(&self) -> Result<Cm, Errno> {
        let mut cm = self.cm.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cm) = &*cm {
            return if cm.device().is_forked() { Err(Errno::EIO) } else { Ok(cm.clone()) };
        }
        let config = Config::from_env().map_err(|error| refuse(&error))?;
        // Connection management always uses the UDP link, whatever link the traffic takes.
        let config = Config { addr: self.addr, link: LinkChoice::Udp, engines: Some(1), ..config };
        let soft = SoftDevice::open(&config).map_err(|error| refuse(&error))?;
        let opened = soft.cm().map_err(|error| refuse(&error))?;
        *cm = Some(opened.clone());
        Ok(opened)
    }

    /// The largest path MTU, as the standard encodes it.
    pub(crate) fn mtu(&self) -> u8 {
        let max = self.cm().map_or(Mtu::Mtu1024, |cm| cm.device().max_mtu());
        let place = Mtu::ALL.iter().position(|mtu| *mtu == max).unwrap_or(0);
        u8::try_from(place + 1).unwrap_or(1)
    }

    fn open(index: usize, addr: IpAddr) -> Result<Self, Errno> {
        let context = open_context(&format!("nb{index}"))?;
        // SAFETY: all fields are numbers, for which zeroes are valid.
        let mut attr: verbs::DeviceAttr = unsafe { std::mem::zeroed() };
        let calls = calls()?;
        // SAFETY: an open device and a place for the answer.
        done(unsafe { (calls.query_device)(context, &raw mut attr) })?;
        // SAFETY: an open device.
        let pd = made(unsafe { (calls.alloc_pd)(context) })?;
        let small = |n: c_int| u8::try_from(n.clamp(0, 254)).unwrap_or(0);
        Ok(Self {
            addr,
            context,
            pd,
            cm: Mutex::new(None),
            max_responder_resources: small(attr.max_qp_rd_atom),
            max_initiator_depth: small(attr.max_qp_init_rd_atom),
        })
    }
}

fn refuse(error: &dyn std::error::Error) -> Errno {
    log::error(|| format!("librdmacm: {error}"));
    Errno(libc::ENODEV)
}

/// Opens the device that libibverbs lists under this name.
fn open_context(name: &str) -> Result<*mut verbs::Context, Errno> {
    let calls = calls()?;
    // SAFETY: the count may be left out.
    let list = made(unsafe { (calls.get_device_list)(ptr::null_mut()) })?;
    let mut at = list;
    let mut context = Err(Errno(libc::ENODEV));
    // SAFETY: the list ends in a null pointer; its devices have names, and stay when it is freed.
    unsafe {
        while !(*at).is_null() {
            if CStr::from_ptr((calls.get_device_name)(*at)).to_bytes() == name.as_bytes() {
                context = made((calls.open_device)(*at));
                break;
            }
            at = at.add(1);
        }
        (calls.free_device_list)(list);
    }
    context
}

static DEVICES: Mutex<Vec<&'static Device>> = Mutex::new(Vec::new());

/// The device of an address of ours; `ENODEV` where there is none.
fn device(index: usize, addr: IpAddr) -> Result<&'static Device, Errno> {
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = devices.iter().find(|device| device.addr == addr) {
        return Ok(found);
    }
    let opened: &'static _ = Box::leak(Box::new(Device::open(index, addr)?));
    devices.push(opened);
    Ok(opened)
}

fn addrs() -> Vec<IpAddr> {
    Config::addrs_from_env().unwrap_or_else(|error| {
        log::error(|| format!("librdmacm: no device: {error}"));
        Vec::new()
    })
}

/// All devices that `which` picks by their address.
pub(crate) fn devices(which: impl Fn(IpAddr) -> bool) -> Result<Vec<&'static Device>, Errno> {
    let picked = addrs().into_iter().enumerate().filter(|(_, addr)| which(*addr));
    picked.map(|(index, addr)| device(index, addr)).collect()
}

/// Whether a device has an address of this kind: IPv4 or IPv6, of the loopback or not.
pub(crate) fn has_kind(of: IpAddr) -> bool {
    let of = local_addr(of);
    let alike = |addr: &IpAddr| addr.is_ipv4() == of.is_ipv4() && addr.is_loopback() == of.is_loopback();
    of.is_unspecified() || addrs().iter().any(alike)
}

/// The device that has this very address.
pub(crate) fn device_at(addr: IpAddr) -> Result<&'static Device, Errno> {
    devices(|other| other == addr)?.first().copied().ok_or(Errno(libc::ENODEV))
}

/// Maps an address of this host to a device's: where no device has a loopback address, it is the
/// first device.
pub(crate) fn local_addr(addr: IpAddr) -> IpAddr {
    let addrs = addrs();
    if !addr.is_loopback() || addrs.iter().any(IpAddr::is_loopback) {
        return addr;
    }
    addrs.into_iter().find(|other| other.is_ipv4() == addr.is_ipv4()).unwrap_or(addr)
}

/// The device from which the system would reach `to`; else the first one that can.
pub(crate) fn device_towards(to: IpAddr) -> Result<&'static Device, Errno> {
    let any: SocketAddr = match to {
        IpAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        IpAddr::V6(_) => ([0_u16; 8], 0).into(),
    };
    let source = UdpSocket::bind(any).and_then(|socket| {
        socket.connect((to, ROCE_PORT))?;
        socket.local_addr()
    });
    match source {
        Ok(source) => {
            if let Ok(found) = device_at(source.ip()) {
                return Ok(found);
            }
        }
        // Every device can send to a group, with or without a route.
        Err(_) if to.is_multicast() => {}
        Err(error) => return Err(error.into()),
    }
    let same_scope = |addr: IpAddr| to.is_multicast() || addr.is_loopback() == to.is_loopback();
    let alike = |addr: IpAddr| addr.is_ipv4() == to.is_ipv4() && same_scope(addr);
    let mut devices = devices(alike)?;
    // A group is most likely one of the network.
    devices.sort_by_key(|device| to.is_multicast() && device.addr.is_loopback());
    devices.first().copied().ok_or_else(|| {
        log::warn(|| format!("librdmacm: no device has a route to {to} (NOBOUNCE_ADDR)"));
        Errno(libc::ENODEV)
    })
}

/// `rdma_get_devices`: the open contexts, ended by a null pointer.
pub(crate) unsafe extern "C" fn rdma_get_devices(count: *mut c_int) -> *mut *mut verbs::Context {
    entry::pointer(|| {
        let devices = devices(|_| true)?;
        // SAFETY: calloc takes numbers; zeroed memory is null pointers.
        let list: *mut *mut verbs::Context =
            unsafe { libc::calloc(devices.len() + 1, size_of::<*mut verbs::Context>()) }.cast();
        let list = if list.is_null() { return Err(Errno::ENOMEM) } else { list };
        for (at, device) in devices.iter().enumerate() {
            // SAFETY: there is room for all of them.
            unsafe { *list.add(at) = device.context };
        }
        if !count.is_null() {
            // SAFETY: the caller passes a place for the count, or null.
            unsafe { *count = c_int::try_from(devices.len()).unwrap_or(c_int::MAX) };
        }
        Ok(list)
    })
}

/// `rdma_free_devices`.
pub(crate) unsafe extern "C" fn rdma_free_devices(list: *mut *mut verbs::Context) {
    // SAFETY: the caller hands back what calloc gave, or null.
    unsafe { libc::free(list.cast()) };
}
