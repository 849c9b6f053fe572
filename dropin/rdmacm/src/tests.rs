//! Tests without a device: addresses, identifiers, channels, options. The others are
//! tests/rdmacm.sh and tests/cm.

use std::net::SocketAddr;
use std::ptr;

use crate::address;
use crate::channel;
use crate::connect::{rdma_accept, rdma_connect, rdma_listen};
use crate::endpoint::{rdma_freeaddrinfo, rdma_getaddrinfo};
use crate::entry::Errno;
use crate::event::{rdma_ack_cm_event, rdma_event_str};
use crate::id::{rdma_create_id, rdma_destroy_id, rdma_get_dst_port, rdma_get_src_port};
use crate::layout::{
    AddrInfo, CmId, EVENT_ESTABLISHED, EventChannel, OPTION_ID, OPTION_ID_REUSEADDR, OPTION_ID_TOS, PS_TCP,
    RAI_NUMERICHOST, RAI_PASSIVE,
};
use crate::resolve::{known_qp_type, rdma_set_option};

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// An identifier with a channel of its own.
struct Party {
    channel: *mut EventChannel,
    id: *mut CmId,
}

impl Party {
    fn new() -> Self {
        let channel = channel::create().unwrap();
        let mut id = ptr::null_mut();
        // SAFETY: a channel that is open, and a place for the identifier.
        assert_eq!(unsafe { rdma_create_id(channel, &raw mut id, ptr::null_mut(), PS_TCP) }, 0);
        Self { channel, id }
    }

    fn port(&self) -> u16 {
        // SAFETY: a live identifier.
        u16::from_be(unsafe { rdma_get_src_port(self.id) })
    }
}

impl Drop for Party {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and destroyed nowhere else.
        assert_eq!(unsafe { rdma_destroy_id(self.id) }, 0);
        channel::destroy(self.channel);
    }
}

fn there_and_back(addr: SocketAddr) -> Result<SocketAddr, Errno> {
    let storage = address::storage(addr);
    // SAFETY: an address as long as its family says.
    unsafe { address::read((&raw const storage).cast()) }
}

#[test]
fn addresses_keep_what_they_say() {
    for text in ["127.0.0.1:18515", "10.1.2.3:0", "[::1]:7471", "[fe80::1]:65535"] {
        let addr: SocketAddr = text.parse().unwrap();
        assert_eq!(there_and_back(addr), Ok(addr), "{text}");
    }
    assert_eq!(there_and_back("[::ffff:10.1.2.3]:5".parse().unwrap()), Ok("10.1.2.3:5".parse().unwrap()));
    assert_eq!(address::len("1.2.3.4:5".parse().unwrap()), 16);
    assert_eq!(address::len("[::1]:5".parse().unwrap()), 28);
}

#[test]
fn other_families_and_null_are_refused() {
    // SAFETY: null is checked first.
    assert_eq!(unsafe { address::read(ptr::null()) }, Err(Errno::EINVAL));
    let mut storage = address::storage("127.0.0.1:1".parse().unwrap());
    storage.ss_family = 1; // AF_UNIX
    // SAFETY: a storage is as long as every family.
    assert_eq!(unsafe { address::read((&raw const storage).cast()) }, Err(Errno(libc::EAFNOSUPPORT)));
}

#[test]
fn identifiers_and_channels_that_are_none_are_refused() {
    let stale = Box::into_raw(Box::new([0_u64; 128])).cast::<CmId>();
    // SAFETY: identifiers are looked up and not dereferenced.
    unsafe {
        assert_eq!((rdma_listen(stale, 1), errno()), (-1, libc::EINVAL));
        assert_eq!((rdma_connect(stale, ptr::null_mut()), errno()), (-1, libc::EINVAL));
        assert_eq!((rdma_get_src_port(stale), rdma_get_dst_port(stale)), (0, 0));
        assert_eq!((rdma_destroy_id(stale), errno()), (-1, libc::EINVAL));
        drop(Box::from_raw(stale.cast::<[u64; 128]>()));
    }
    let channel = channel::create().unwrap();
    assert!(channel::find(channel).is_ok());
    channel::destroy(channel);
    assert!(channel::find(channel).is_err(), "it was destroyed");
    let mut id = ptr::null_mut();
    let channel = channel::create().unwrap();
    // SAFETY: a channel that is open, and a place for the identifier.
    let created = unsafe { rdma_create_id(channel, &raw mut id, ptr::null_mut(), 0x7777) };
    assert_eq!(created, -1, "there is no such port space");
    channel::destroy(channel);
}

#[test]
fn calls_out_of_order_are_refused() {
    let party = Party::new();
    assert_eq!(party.port(), 0, "it is not bound");
    // SAFETY: a live identifier; null parameters select the defaults.
    unsafe {
        assert_eq!(rdma_connect(party.id, ptr::null_mut()), -1, "nothing was resolved");
        assert_eq!(rdma_accept(party.id, ptr::null_mut()), -1, "nothing was asked for");
        assert_eq!(rdma_ack_cm_event(ptr::null_mut()), -1);
    }
}

#[test]
fn options_are_checked() {
    let party = Party::new();
    let set = |level, name, value: &[u8]| {
        // SAFETY: a live identifier, and the stated number of bytes.
        unsafe { rdma_set_option(party.id, level, name, value.as_ptr().cast_mut().cast(), value.len()) }
    };
    assert_eq!(set(OPTION_ID, OPTION_ID_TOS, &[32]), 0);
    assert_eq!(set(OPTION_ID, OPTION_ID_REUSEADDR, &1_i32.to_ne_bytes()), 0);
    assert_eq!(set(OPTION_ID, OPTION_ID_TOS, &[1, 2, 3]), -1, "a byte is expected");
    assert_eq!(set(OPTION_ID, 99, &[0]), -1);
    assert_eq!(set(99, OPTION_ID_TOS, &[0]), -1);
}

#[test]
fn numeric_addresses_are_looked_up() {
    let mut info = ptr::null_mut();
    // SAFETY: numbers, for which zeroes are valid.
    let mut hints: AddrInfo = unsafe { std::mem::zeroed() };
    hints.flags = RAI_PASSIVE | RAI_NUMERICHOST;
    hints.port_space = PS_TCP.cast_signed();
    // SAFETY: C strings, hints, and a place for the result, which is freed by the function made for
    // it.
    unsafe {
        assert_eq!(
            rdma_getaddrinfo(c"127.0.0.1".as_ptr(), c"7471".as_ptr(), &raw const hints, &raw mut info),
            0
        );
        let found = &*info;
        assert_eq!(address::read(found.src_addr), Ok("127.0.0.1:7471".parse().unwrap()));
        assert!(found.dst_addr.is_null(), "it is for a listener");
        rdma_freeaddrinfo(info);
        assert_ne!(
            rdma_getaddrinfo(c"no number".as_ptr(), c"7471".as_ptr(), &raw const hints, &raw mut info),
            0
        );
    }
}

#[test]
fn events_and_types_have_names() {
    // SAFETY: a static C string.
    let name = |event| unsafe { std::ffi::CStr::from_ptr(rdma_event_str(event)) }.to_str().unwrap();
    assert_eq!(name(EVENT_ESTABLISHED), "RDMA_CM_EVENT_ESTABLISHED");
    assert_eq!(name(999), "UNKNOWN EVENT");
    assert!(known_qp_type(2).is_some() && known_qp_type(77).is_none());
}
