//! Reads the GID table of a port and selects the entry to use.

use std::ffi::c_int;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::Arc;

use nobounce_verbs as verbs;

use super::context::OpenContext;
use super::device::Options;
use super::error::OpenError;
use super::gid::{self, GidChoice, GidEntry, GidKind};
use super::library::Library;
use crate::interfaces;

/// Where RoCE v2 is spoken.
const ROCE_PORT: u16 = 4791;
/// Maximum number of entries read.
const MAX_GIDS: u32 = 1024;

/// The entry for a port; on InfiniBand the first, or the requested one.
pub(crate) fn choose(
    open: &OpenContext<Arc<Library>>,
    port: u8,
    attr: &verbs::PortAttr,
    is_ib: bool,
    options: &Options,
) -> Result<GidChoice, OpenError> {
    let table = gid_table(open, port, attr.gid_tbl_len);
    if is_ib {
        // Inside a subnet only the LID matters; the first GID names the port in messages and across
        // subnets.
        let index = options.gid.index.unwrap_or(0);
        let none = GidEntry { index, gid: [0; 16], kind: Some(GidKind::InfiniBand), interface: None };
        let entry = table.into_iter().find(|entry| entry.index == index).unwrap_or(none);
        let why = format!(
            "InfiniBand: addressed by LID {:#x}, GID {index} where a route header is needed",
            attr.lid
        );
        return Ok(GidChoice { entry, explanation: vec![why] });
    }
    gid::choose(&table, &options.gid).map_err(|why| OpenError::Gid {
        device: open.name().to_owned(),
        port,
        why,
    })
}

/// Why an entry may be the wrong one for a peer, by what the kernel's routes say.
pub(crate) fn doubt(entry: &GidEntry, peer: IpAddr) -> Option<String> {
    gid::doubt(entry, peer, source_towards(peer))
}

/// The kernel's source address for a peer. Sends nothing.
fn source_towards(peer: IpAddr) -> io::Result<IpAddr> {
    let any: IpAddr =
        if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect((peer, ROCE_PORT))?;
    Ok(socket.local_addr()?.ip())
}

fn gid_table(open: &OpenContext<Arc<Library>>, port: u8, len: c_int) -> Vec<GidEntry> {
    let here = interfaces::addresses();
    (0..u32::try_from(len).unwrap_or(0).min(MAX_GIDS))
        .map(|index| {
            let (gid, kind, ifindex) = read_gid(open, port, index);
            let mut entry = GidEntry { index, gid, kind, interface: None };
            entry.interface = interfaces::having(&here, entry.addr(), ifindex);
            entry
        })
        .collect()
}

fn read_gid(
    open: &OpenContext<Arc<Library>>,
    port: u8,
    index: u32,
) -> ([u8; 16], Option<GidKind>, Option<u32>) {
    let library = &open.library;
    if let Some(query) = library.api.query_gid_ex {
        // SAFETY: plain numbers, for which zeroes are valid.
        let mut entry: verbs::GidEntry = unsafe { std::mem::zeroed() };
        let size = size_of::<verbs::GidEntry>();
        // SAFETY: an open device and a valid place of the size said.
        if unsafe { query(open.as_ptr(), port.into(), index, &raw mut entry, 0, size) } == 0 {
            let kind = match entry.gid_type {
                verbs::IBV_GID_TYPE_IB => Some(GidKind::InfiniBand),
                verbs::IBV_GID_TYPE_ROCE_V1 => Some(GidKind::RoceV1),
                verbs::IBV_GID_TYPE_ROCE_V2 => Some(GidKind::RoceV2),
                _ => None,
            };
            // SAFETY: every bit pattern is a valid array of bytes.
            return (unsafe { entry.gid.raw }, kind, Some(entry.ndev_ifindex).filter(|index| *index != 0));
        }
        return ([0; 16], None, None);
    }
    let mut gid = verbs::Gid { raw: [0; 16] };
    // SAFETY: an open device and a valid place.
    let code = unsafe {
        (library.api.query_gid)(
            open.as_ptr(),
            port,
            c_int::try_from(index).unwrap_or(c_int::MAX),
            &raw mut gid,
        )
    };
    // SAFETY: every bit pattern is a valid array of bytes.
    let gid = if code == 0 { unsafe { gid.raw } } else { [0; 16] };
    // Before rdma-core 32 only sysfs told the protocol and interface of an entry.
    let file = |what: &str| {
        let path = library.kernel.join(format!("{}/ports/{port}/gid_attrs/{what}/{index}", open.name()));
        std::fs::read_to_string(path).ok()
    };
    let kind = file("types").and_then(|text| match text.trim() {
        "RoCE v2" => Some(GidKind::RoceV2),
        "IB/RoCE v1" => Some(GidKind::RoceV1),
        _ => None,
    });
    // An interface not found here belongs to another network namespace, and so does the entry:
    // index 0 matches no interface.
    let interface = file("ndevs").map(|name| interfaces::index_of(name.trim()).unwrap_or(0));
    (gid, kind, interface)
}
