//! The devices that a libibverbs shows, and what it says about them.

use std::ffi::{CStr, c_int};
use std::fmt;

use nobounce_protocol::qp::Mtu;
use nobounce_verbs as verbs;

use super::context::OpenContext;
use super::device::{LinkLayer, is_infiniband, mtu_of, speed, state_name};
use super::error::{OpenError, last};
use super::library::Library;

/// Maximum number of devices in a list; a longer list is corrupt.
const MAX_DEVICES: usize = 256;

/// A device of the list, as it describes itself.
#[derive(Clone)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// What libibverbs says about it.
    pub attr: verbs::DeviceAttr,
    /// Its ports.
    pub ports: Vec<ListedPort>,
}

/// A port of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedPort {
    /// Its number, from 1 on.
    pub number: u8,
    /// Its state in words: `active`, `down`, ...
    pub state: &'static str,
    /// What carries packets.
    pub link_layer: LinkLayer,
    /// Megabits per second, as far as the port says.
    pub megabits: u64,
    /// The largest path MTU now.
    pub mtu: Mtu,
}

impl fmt::Debug for Listed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listed({self})")
    }
}

impl fmt::Display for Listed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let attr = &self.attr;
        let firmware: Vec<u8> =
            attr.fw_ver.iter().map(|byte| byte.to_ne_bytes()[0]).take_while(|byte| *byte != 0).collect();
        let firmware = String::from_utf8_lossy(&firmware);
        write!(f, "{}: ", self.name)?;
        if !firmware.is_empty() {
            write!(f, "firmware {firmware}, ")?;
        }
        write!(f, "{} queue pairs, {} READs at once", attr.max_qp, attr.max_qp_rd_atom)?;
        for port in &self.ports {
            let carried = if port.link_layer == LinkLayer::InfiniBand { "InfiniBand" } else { "RoCE" };
            let (number, state, speed) = (port.number, port.state, port.megabits / 1000);
            write!(f, "; port {number}: {state}, {carried}, {speed} Gb/s, MTU {}", port.mtu.bytes())?;
        }
        Ok(())
    }
}

/// All devices with their attributes, or the reason why one cannot be opened.
///
/// # Errors
/// libibverbs gives no list. (An empty list is none.)
pub fn list(library: &Library) -> Result<Vec<Result<Listed, OpenError>>, OpenError> {
    let list = List::of(library)?;
    Ok(list.devices().map(|(name, device)| describe(library, name, device)).collect())
}

fn describe(library: &Library, name: String, device: *mut verbs::Device) -> Result<Listed, OpenError> {
    let open = OpenContext::device(library, name, device)?;
    let attr = open.attr()?;
    let ports = (1..=attr.phys_port_cnt).filter_map(|number| {
        let port = open.port(number).ok()?;
        Some(ListedPort {
            number,
            state: state_name(port.state),
            link_layer: if is_infiniband(&port) { LinkLayer::InfiniBand } else { LinkLayer::Ethernet },
            megabits: speed(open.name(), number, &port),
            mtu: mtu_of(port.active_mtu),
        })
    });
    Ok(Listed { ports: ports.collect(), name: open.name().to_owned(), attr })
}

/// The names of the devices that the system's libibverbs shows.
///
/// # Errors
/// There is no libibverbs, or it gives no list. (An empty list is none.)
pub fn names(library: &Library) -> Result<Vec<String>, OpenError> {
    let list = List::of(library)?;
    Ok(list.devices().map(|(name, _)| name).collect())
}

/// A device list, freed on drop.
pub(crate) struct List<'a> {
    library: &'a Library,
    list: *mut *mut verbs::Device,
    count: usize,
}

impl<'a> List<'a> {
    pub(crate) fn of(library: &'a Library) -> Result<Self, OpenError> {
        let mut count: c_int = 0;
        // SAFETY: the call writes one word and gives a list.
        let list = unsafe { (library.api.get_device_list)(&raw mut count) };
        if list.is_null() {
            return Err(OpenError::List { os: last() });
        }
        Ok(Self { library, list, count: usize::try_from(count).unwrap_or(0).min(MAX_DEVICES) })
    }

    pub(crate) fn devices(&self) -> impl Iterator<Item = (String, *mut verbs::Device)> + '_ {
        (0..self.count).filter_map(|index| {
            // SAFETY: the list has that many devices, and lives as long as we do.
            let device = unsafe { *self.list.add(index) };
            // SAFETY: a device of the list.
            let name = unsafe { (self.library.api.get_device_name)(device) };
            if name.is_null() {
                return None;
            }
            // SAFETY: a C string of the device's.
            Some((unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(), device))
        })
    }
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        // SAFETY: what was given above; devices that were opened stay open.
        unsafe { (self.library.api.free_device_list)(self.list) };
    }
}
