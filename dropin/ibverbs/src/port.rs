//! The one port of a device, its GIDs and its one partition key.

use std::ffi::c_int;
use std::net::IpAddr;

use nobounce_nic::interfaces::{index_of, interface_of};
use nobounce_nic::soft::DeviceLimits;
use nobounce_protocol::qp::{MAX_MESSAGE, Mtu};
use nobounce_verbs as verbs;

use crate::context::ContextObject;
use crate::convert::{gid_of, mtu_code, write_sized};
use crate::entry::{self, Errno};
use crate::live::Object;

/// The only port.
pub(crate) const PORT: u8 = 1;
const GID_TABLE: u32 = DeviceLimits::OURS.gid_table;
const GIDS: u32 = DeviceLimits::OURS.gids;
/// The only partition: the default one, as a full member.
const PKEY: u16 = 0xffff;
/// The link is up.
const PHYS_STATE_LINK_UP: u8 = 5;
/// The kernel's sysfs number of RoCE v2, which differs from the API's.
const SYSFS_ROCE_V2: u32 = 1;

/// Whether an index names a GID of the device.
pub(crate) fn is_gid(index: u8) -> bool {
    u32::from(index) < GIDS
}

/// Whether the entry of the GID table is filled.
fn check_gid(port: u32, index: u32) -> Result<bool, Errno> {
    if port == u32::from(PORT) && index < GID_TABLE { Ok(index < GIDS) } else { Err(Errno::EINVAL) }
}

fn check(port: u32, index: u32) -> Result<(), Errno> {
    if port == u32::from(PORT) && index == 0 { Ok(()) } else { Err(Errno::EINVAL) }
}

fn attributes(context: &ContextObject) -> verbs::PortAttr {
    let speed = context.soft.speed();
    verbs::PortAttr {
        state: verbs::IBV_PORT_ACTIVE,
        max_mtu: mtu_code(Mtu::Mtu4096),
        active_mtu: mtu_code(context.soft.max_mtu()),
        gid_tbl_len: c_int::try_from(GID_TABLE).unwrap_or(0),
        port_cap_flags: verbs::IBV_PORT_IP_BASED_GIDS,
        max_msg_sz: MAX_MESSAGE,
        bad_pkey_cntr: 0,
        qkey_viol_cntr: 0,
        pkey_tbl_len: 1,
        lid: 0,
        sm_lid: 0,
        lmc: 0,
        max_vl_num: 1,
        sm_sl: 0,
        subnet_timeout: 0,
        init_type_reply: 0,
        active_width: speed.width,
        active_speed: speed.lane,
        phys_state: PHYS_STATE_LINK_UP,
        link_layer: verbs::IBV_LINK_LAYER_ETHERNET,
        flags: verbs::IBV_QPF_GRH_REQUIRED,
        port_cap_flags2: 0,
        active_speed_ex: speed.lane.into(),
    }
}

/// The form behind the table: the caller says how long its structure is.
pub(crate) unsafe extern "C" fn query_port_sized(
    context: *mut verbs::Context,
    port: u8,
    attr: *mut verbs::PortAttr,
    size: usize,
) -> c_int {
    entry::code(|| {
        let context = ContextObject::find(context)?;
        check(port.into(), 0)?;
        // SAFETY: the caller says how long its structure is.
        unsafe { write_sized(&attributes(context), attr, size) };
        Ok(())
    })
}

/// `ibv_query_port`, the symbol: its callers' structure may be as short as the first one was.
pub(crate) unsafe extern "C" fn query_port(
    context: *mut verbs::Context,
    port: u8,
    attr: *mut verbs::PortAttr,
) -> c_int {
    // SAFETY: every caller's structure has at least these bytes.
    unsafe { query_port_sized(context, port, attr, verbs::COMPAT_PORT_ATTR_SIZE) }
}

/// `ibv_query_port_speed`.
pub(crate) unsafe extern "C" fn query_port_speed(
    context: *mut verbs::Context,
    port: u32,
    speed: *mut u64,
) -> c_int {
    entry::code(|| {
        let context = ContextObject::find(context)?;
        check(port, 0)?;
        // In units of 100 Mb/s.
        // SAFETY: the caller passes a valid place.
        unsafe { *speed = 10 * u64::from(context.soft.speed().gigabits()) };
        Ok(())
    })
}

/// `ibv_query_gid`.
pub(crate) unsafe extern "C" fn query_gid(
    context: *mut verbs::Context,
    port: u8,
    index: c_int,
    gid: *mut verbs::Gid,
) -> c_int {
    entry::minus_one(|| {
        let context = ContextObject::find(context)?;
        let filled = check_gid(port.into(), u32::try_from(index).map_err(|_| Errno::EINVAL)?)?;
        let entry = if filled { gid_of(context.soft.local()) } else { verbs::Gid { raw: [0; 16] } };
        // SAFETY: the caller passes a valid place, aligned or not.
        unsafe { gid.write_unaligned(entry) };
        Ok(0)
    })
}

fn gid_entry(context: &ContextObject, index: u32) -> verbs::GidEntry {
    let local = context.soft.local();
    verbs::GidEntry {
        gid: gid_of(local),
        gid_index: index,
        port_num: PORT.into(),
        gid_type: verbs::IBV_GID_TYPE_ROCE_V2,
        ndev_ifindex: interface_index(local),
    }
}

/// `_ibv_query_gid_ex`.
pub(crate) unsafe extern "C" fn query_gid_ex(
    context: *mut verbs::Context,
    port: u32,
    index: u32,
    entry: *mut verbs::GidEntry,
    flags: u32,
    size: usize,
) -> c_int {
    entry::code(|| {
        let context = ContextObject::find(context)?;
        let filled = check_gid(port, index)?;
        if flags != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if !filled {
            return Err(Errno(libc::ENODATA));
        }
        // SAFETY: the caller says how long its structure is.
        unsafe { write_sized(&gid_entry(context, index), entry, size) };
        Ok(())
    })
}

/// `_ibv_query_gid_table`: how many entries there are, or a negative error number.
pub(crate) unsafe extern "C" fn query_gid_table(
    context: *mut verbs::Context,
    entries: *mut verbs::GidEntry,
    max: usize,
    flags: u32,
    size: usize,
) -> isize {
    let written = entry::guarded(|| {
        let context = ContextObject::find(context)?;
        if flags != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if max < GIDS as usize {
            return Err(Errno::EINVAL);
        }
        for index in 0..GIDS {
            // SAFETY: there is room for as many entries of `size` bytes.
            unsafe { write_sized(&gid_entry(context, index), entries.byte_add(index as usize * size), size) };
        }
        isize::try_from(GIDS).map_err(|_| Errno::EINVAL)
    });
    written.unwrap_or_else(|errno| {
        errno.set();
        -(errno.0 as isize)
    })
}

/// The private `ibv_query_gid_type`.
pub(crate) unsafe extern "C" fn query_gid_type(
    context: *mut verbs::Context,
    port: u8,
    index: u32,
    kind: *mut u32,
) -> c_int {
    entry::minus_one(|| {
        ContextObject::find(context)?;
        check_gid(port.into(), index)?;
        // SAFETY: the caller passes a valid place.
        unsafe { *kind = SYSFS_ROCE_V2 };
        Ok(0)
    })
}

/// `ibv_query_pkey`.
pub(crate) unsafe extern "C" fn query_pkey(
    context: *mut verbs::Context,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    entry::minus_one(|| {
        ContextObject::find(context)?;
        check(port.into(), u32::try_from(index).map_err(|_| Errno::EINVAL)?)?;
        // SAFETY: the caller passes a valid place.
        unsafe { *pkey = PKEY };
        Ok(0)
    })
}

/// `ibv_get_pkey_index`.
pub(crate) unsafe extern "C" fn get_pkey_index(context: *mut verbs::Context, port: u8, pkey: u16) -> c_int {
    entry::minus_one(|| {
        ContextObject::find(context)?;
        check(port.into(), 0)?;
        if pkey == PKEY { Ok(0) } else { Err(Errno::EINVAL) }
    })
}

/// The number of the interface that has this address; 0 if none has.
fn interface_index(addr: IpAddr) -> u32 {
    // All of 127/8 is the loopback interface's, whether it is listed there or not.
    let name = if addr.is_loopback() { Some("lo".to_owned()) } else { interface_of(addr) };
    name.and_then(|name| index_of(&name)).unwrap_or(0)
}
