//! Address handles.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::net::IpAddr;

use nobounce_nic::work::IpOptions;
use nobounce_verbs as verbs;

use crate::convert::{addr_of, ip_options_of};
use crate::entry::{self, Errno};
use crate::live::{Kind, Object, Use};
use crate::log;
use crate::pd::PdObject;
use crate::port::{PORT, is_gid};

#[repr(C)]
pub(crate) struct AhObject {
    raw: UnsafeCell<verbs::Ah>,
    pub(crate) remote: IpAddr,
    pub(crate) ip_options: IpOptions,
    _pd: Use,
    _context: Use,
}

impl Object for AhObject {
    type Raw = verbs::Ah;
    const KIND: Kind = Kind::Ah;
}

fn create(pd: *mut verbs::Pd, attr: &verbs::AhAttr) -> Result<*mut verbs::Ah, Errno> {
    let ours = PdObject::find(pd)?;
    ours.context.alive()?;
    let remote = addr_of(&attr.grh.dgid);
    let local = ours.context.soft.local();
    let wrong = if attr.is_global == 0 {
        Some("RoCE needs a global route: set is_global and grh.dgid".to_owned())
    } else if attr.port_num != PORT {
        Some(format!("port_num is {}; the device has port {PORT}", attr.port_num))
    } else if !is_gid(attr.grh.sgid_index) {
        Some(format!("GID {} is empty; GIDs 0 to 3 are the device's address", attr.grh.sgid_index))
    } else if remote.is_ipv4() != local.is_ipv4() {
        Some(format!("{remote} cannot be reached from {local}: one is IPv4, the other IPv6"))
    } else {
        None
    };
    if let Some(wrong) = wrong {
        log::warn(|| format!("ibv_create_ah: {wrong}"));
        return Err(Errno::EINVAL);
    }
    let of_context = ours.context.ahs.join();
    if ours.context.ahs.count() > ours.context.soft.limits().max_ahs {
        return Err(Errno::ENOMEM);
    }
    let raw = verbs::Ah { context: ours.context.raw(), pd, handle: 0 };
    let ip_options = ip_options_of(&attr.grh);
    let raw = UnsafeCell::new(raw);
    Ok(AhObject { raw, remote, ip_options, _pd: ours.users.join(), _context: of_context }.publish())
}

/// `ibv_create_ah`.
pub(crate) unsafe extern "C" fn create_ah(pd: *mut verbs::Pd, attr: *mut verbs::AhAttr) -> *mut verbs::Ah {
    // SAFETY: the caller passes a valid structure.
    entry::pointer(|| create(pd, unsafe { attr.as_ref() }.ok_or(Errno::EINVAL)?))
}

/// Address of the sender of a datagram, from the GRH in front of it. Without a GRH flag in the
/// completion, the pointer to it may be anything.
///
/// # Safety
/// `wc` is valid, and so is `grh` if the completion says that there is one; it may lie anywhere in
/// a buffer.
unsafe fn answer(wc: *const verbs::Wc, grh: *const verbs::Grh, port: u8) -> Result<verbs::AhAttr, Errno> {
    // SAFETY: as promised.
    let wc = unsafe { wc.as_ref() }.ok_or(Errno::EINVAL)?;
    if wc.wc_flags & verbs::IBV_WC_GRH == 0 || grh.is_null() || port != PORT {
        return Err(Errno::EINVAL);
    }
    // SAFETY: as promised.
    let grh = unsafe { grh.read_unaligned() };
    // SAFETY: any 40 bytes may be read as bytes.
    let bytes: &[u8; 40] = unsafe { &*(&raw const grh).cast() };
    // An IPv4 header stands in the last 20 bytes, with nothing before it.
    let is_v4 = bytes[..20].iter().all(|byte| *byte == 0) && bytes[20] >> 4 == 4;
    let (dgid, traffic_class) = if is_v4 {
        let mut source = [0_u8; 4];
        source.copy_from_slice(&bytes[32..36]);
        (crate::convert::gid_of(IpAddr::from(source)), bytes[21])
    } else {
        (grh.sgid, bytes[0] << 4 | bytes[1] >> 4)
    };
    let route = verbs::GlobalRoute { dgid, flow_label: 0, sgid_index: 0, hop_limit: 0xff, traffic_class };
    Ok(verbs::AhAttr {
        grh: route,
        dlid: wc.slid,
        sl: wc.sl,
        src_path_bits: wc.dlid_path_bits,
        static_rate: 0,
        is_global: 1,
        port_num: port,
    })
}

/// `ibv_init_ah_from_wc`.
pub(crate) unsafe extern "C" fn init_ah_from_wc(
    _context: *mut verbs::Context,
    port: u8,
    wc: *mut verbs::Wc,
    grh: *mut verbs::Grh,
    attr: *mut verbs::AhAttr,
) -> c_int {
    entry::minus_one(|| {
        // SAFETY: the caller passes valid structures.
        unsafe { *attr = answer(wc, grh, port)? };
        Ok(0)
    })
}

/// `ibv_create_ah_from_wc`.
pub(crate) unsafe extern "C" fn create_ah_from_wc(
    pd: *mut verbs::Pd,
    wc: *mut verbs::Wc,
    grh: *mut verbs::Grh,
    port: u8,
) -> *mut verbs::Ah {
    // SAFETY: as above.
    entry::pointer(|| create(pd, &unsafe { answer(wc, grh, port) }?))
}

/// `ibv_destroy_ah`.
pub(crate) unsafe extern "C" fn destroy_ah(ah: *mut verbs::Ah) -> c_int {
    entry::code(|| AhObject::retract(ah).map(drop))
}

/// `ibv_resolve_eth_l2_from_gid`. The kernel resolves Ethernet addresses and does not expose them.
/// A program can only put the answer into an address handle of ours, which ignores it. So it gets a
/// well-formed one: derived from the GID, locally administered.
pub(crate) unsafe extern "C" fn resolve_eth_l2_from_gid(
    _context: *mut verbs::Context,
    attr: *mut verbs::AhAttr,
    mac: *mut u8,
    vlan: *mut u16,
) -> c_int {
    entry::code(|| {
        // SAFETY: the caller passes a valid structure; any sixteen bytes are a GID.
        let gid = unsafe { (*attr).grh.dgid.raw };
        let made = [0x02, 0, gid[12], gid[13], gid[14], gid[15]];
        // SAFETY: the caller has room for six bytes, and for the number unless it is null.
        unsafe {
            std::ptr::copy_nonoverlapping(made.as_ptr(), mac, made.len());
            if !vlan.is_null() {
                *vlan = 0xffff;
            }
        }
        Ok(())
    })
}
