//! The devices there are: one for each address of `NOBOUNCE_ADDR`, by name `nb0`, `nb1`, ...
//!
//! Listing opens nothing.

use std::ffi::{c_char, c_int};
use std::net::IpAddr;
use std::ptr;
use std::sync::{Mutex, PoisonError};

use nobounce_nic::soft::Config;
use nobounce_verbs as verbs;

use crate::entry::{self, Errno};
use crate::live::{self, Kind, Object};
use crate::{log, system};

/// A device in its C layout, and its IP address. Made once for each address, and never freed:
/// programs keep pointers to devices beyond the list they came in.
#[repr(C)]
pub(crate) struct DeviceObject {
    raw: verbs::Device,
    /// Where drivers of rdma-core keep their ops table, by which they recognise their own devices:
    /// ours matches no driver.
    ops: *const u8,
    pub(crate) addr: IpAddr,
    index: usize,
}

// SAFETY: nothing in it changes after it was made.
unsafe impl Send for DeviceObject {}
// SAFETY: as above.
unsafe impl Sync for DeviceObject {}

impl Object for DeviceObject {
    type Raw = verbs::Device;
    const KIND: Kind = Kind::Device;
}

impl DeviceObject {
    fn new(index: usize, addr: IpAddr) -> Self {
        let view = std::env::var("NOBOUNCE_VIEW").unwrap_or_default();
        let class = format!("{view}/sys/class");
        let name = format!("nb{index}");
        let node = node_in_view(&view, &name).unwrap_or_else(|| format!("uverbs{index}"));
        Self {
            raw: verbs::Device {
                _ops: [None; 2],
                node_type: verbs::IBV_NODE_CA,
                transport_type: verbs::IBV_TRANSPORT_IB,
                name: text(&name),
                dev_name: text(&node),
                dev_path: text(&format!("{class}/infiniband_verbs/{node}")),
                ibdev_path: text(&format!("{class}/infiniband/{name}")),
            },
            ops: ptr::null(),
            addr,
            index,
        }
    }

    /// The GUID in network byte order, derived from the address in the manner of EUI-64: the same
    /// at every start.
    pub(crate) fn guid(&self) -> u64 {
        let bytes = match self.addr {
            IpAddr::V4(v4) => {
                let [a, b, c, d] = v4.octets();
                [0x02, a, b, 0xff, 0xfe, c, d, 0x01]
            }
            IpAddr::V6(v6) => {
                let o = v6.octets();
                let mut folded: [u8; 8] = std::array::from_fn(|i| o[i].rotate_left(1) ^ o[i + 8]);
                folded[0] = (folded[0] | 0x02) & !0x01;
                folded
            }
        };
        u64::from_ne_bytes(bytes)
    }

    pub(crate) fn name(&self) -> String {
        format!("nb{}", self.index)
    }
}

/// The name of the device's file in the view: beside real devices, which take the first numbers.
/// libnobounce-paths shows the view in place of /sys to this library, too.
fn node_in_view(view: &str, name: &str) -> Option<String> {
    let nodes = std::fs::read_dir(format!("{view}/sys/class/infiniband_verbs")).ok()?;
    nodes.flatten().find_map(|node| {
        let device = std::fs::read_to_string(node.path().join("ibdev")).ok()?;
        (device.trim() == name).then(|| node.file_name().to_string_lossy().into_owned())
    })
}

/// A C string in an array, cut where it does not fit.
pub(crate) fn text<const N: usize>(from: &str) -> [c_char; N] {
    let mut to = [0; N];
    for (to, from) in to.iter_mut().zip(from.bytes().take(N - 1)) {
        *to = c_char::from_ne_bytes([from]);
    }
    to
}

/// Every device made so far.
static MADE: Mutex<Vec<(usize, IpAddr, usize)>> = Mutex::new(Vec::new());

fn device(index: usize, addr: IpAddr) -> *mut verbs::Device {
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, _, raw)) = made.iter().find(|(i, a, _)| (*i, *a) == (index, addr)) {
        return ptr::with_exposed_provenance_mut(*raw);
    }
    let raw = DeviceObject::new(index, addr).publish();
    made.push((index, addr, raw.expose_provenance()));
    raw
}

/// `ibv_get_device_list`.
pub(crate) unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut verbs::Device {
    entry::pointer(|| {
        let addrs = Config::addrs_from_env().unwrap_or_else(|error| {
            log::error(|| format!("no device: {error}"));
            Vec::new()
        });
        let mut devices: Vec<_> = addrs.into_iter().enumerate().map(|(i, addr)| device(i, addr)).collect();
        let (system_list, real) = system::devices();
        devices.extend(real);
        // SAFETY: calloc takes numbers; the list ends in a null pointer, which zeroed memory is.
        let list: *mut *mut verbs::Device =
            unsafe { libc::calloc(devices.len() + 1, size_of::<*mut verbs::Device>()) }.cast();
        if list.is_null() {
            return Err(Errno::ENOMEM);
        }
        // SAFETY: there is room for all of them.
        unsafe { ptr::copy_nonoverlapping(devices.as_ptr(), list, devices.len()) };
        if !count.is_null() {
            // SAFETY: the caller passes a valid place, or null.
            unsafe { *count = c_int::try_from(devices.len()).unwrap_or(c_int::MAX) };
        }
        live::add_with(list, Kind::List, system_list);
        Ok(list)
    })
}

/// `ibv_free_device_list`.
pub(crate) unsafe extern "C" fn free_device_list(list: *mut *mut verbs::Device) {
    entry::silent(|| {
        let system_list = live::take(list, Kind::List).ok_or(Errno::EINVAL)?;
        system::free_devices(system_list);
        // SAFETY: it was in the table, so `get_device_list` allocated it, and it has not been
        // freed.
        unsafe { libc::free(list.cast()) };
        Ok(())
    });
}

/// `ibv_get_device_name`.
pub(crate) unsafe extern "C" fn get_device_name(device: *mut verbs::Device) -> *const c_char {
    if device.is_null() {
        return ptr::null();
    }
    // SAFETY: the caller passes a device; its name has the same offset in every implementation.
    unsafe { (&raw const (*device).name).cast() }
}

/// `ibv_get_device_guid`.
pub(crate) unsafe extern "C" fn get_device_guid(device: *mut verbs::Device) -> u64 {
    entry::guarded(|| Ok(DeviceObject::find(device)?.guid())).unwrap_or(0)
}

/// `ibv_get_device_index`: the kernel has no number for our devices.
pub(crate) unsafe extern "C" fn get_device_index(_device: *mut verbs::Device) -> c_int {
    -1
}
