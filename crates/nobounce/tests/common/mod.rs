//! What the tests share: the devices they run on. By themselves that is the software NIC, each test
//! at an address of its own. With `NOBOUNCE_DEVICE` they run on the device it names, a NIC of a
//! libibverbs: `rxe0`, `mlx5_0`, or our own drop-in as `nb0` of `NOBOUNCE_VERBS`. A test that
//! cannot run there says why.
#![allow(dead_code)] // not every test uses everything

use std::io::Write;
use std::time::Duration;

use nobounce::{Config, ConnectOptions, Connection, Device, hard};

/// Longer than anything that works takes.
pub(crate) const SOON: Duration = Duration::from_secs(20);
/// The device for IPv6, where another one is named for IPv4: its name, or name@address for one of
/// its addresses.
const OVER_IPV6: &str = "NOBOUNCE_TEST_DEVICE6";

/// The device that is named, if one is.
pub(crate) fn named() -> Option<String> {
    std::env::var("NOBOUNCE_DEVICE").ok().filter(|name| !name.is_empty())
}

/// Whether the device is a NIC of a libibverbs. Our own drop-in is one, too, for all that the
/// library sees of it.
pub(crate) fn is_hardware() -> bool {
    named().is_some_and(|name| Device::is_hardware(&name))
}

/// Whether it is our own drop-in.
pub(crate) fn is_dropin() -> bool {
    is_hardware() && named().is_some_and(|name| name.starts_with("nb"))
}

/// A test that cannot run on the named device says why: it is a waiver of `make test`, and a line
/// of this process's output, which the test harness does not keep to itself.
pub(crate) fn waive(test: &str, reason: &str) {
    let required = std::env::var("REQUIRE").unwrap_or_default();
    assert!(
        !required.split(',').any(|name| name == "hardware"),
        "hardware is required, but {test}: {reason}"
    );
    let line = format!("hardware: {test} on {}: {reason}\n", named().unwrap_or_default());
    let _ = std::io::stderr().write_all(format!("waived: {line}").as_bytes());
    if let Some(file) = std::env::var_os("NOBOUNCE_WAIVERS") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(file);
        // One write: tests of other processes append to it too.
        file.unwrap().write_all(line.as_bytes()).unwrap();
    }
}

/// Whether a test about the software NIC alone is left out here.
pub(crate) fn waived_on_hardware(test: &str, reason: &str) -> bool {
    if is_hardware() {
        waive(test, reason);
    }
    is_hardware()
}

/// Whether a test over IPv6 is left out here.
pub(crate) fn waived_for_ipv6(test: &str) -> bool {
    let lacks = is_hardware() && std::env::var_os(OVER_IPV6).is_none();
    if lacks {
        waive(test, "no device for IPv6 is named (NOBOUNCE_TEST_DEVICE6)");
    }
    lacks
}

/// A device at an address of the test's own, so that tests do not meet; or the one that is named.
pub(crate) fn device(addr: &str) -> Device {
    match named() {
        None => Device::open_with(&config(addr)).unwrap(),
        Some(_) if !addr.contains(':') => Device::open().unwrap(),
        Some(_) => {
            let wanted = std::env::var(OVER_IPV6).unwrap();
            let (name, addr) = wanted.split_once('@').map_or((wanted.as_str(), None), |(n, a)| (n, Some(a)));
            let mut options = hard::Options::default();
            options.gid.addr = addr.map(|addr| addr.parse().unwrap());
            Device::open_hardware(name, &options).unwrap()
        }
    }
}

/// How its devices are opened: on the link and with the engines that the environment says, so that
/// all of this runs on all of them.
pub(crate) fn config(addr: &str) -> Config {
    Config::from_env().unwrap().at(addr).unwrap()
}

/// Two ends, on two devices at one address.
pub(crate) fn pair(addr: &str, options: &ConnectOptions) -> (Connection, Connection) {
    let listener = device(addr).listen_with("127.0.0.1:0", options).unwrap();
    let at = listener.local_addr();
    let (device, options) = (device(addr), options.clone());
    let active = std::thread::spawn(move || device.connect(at, &options).unwrap());
    let passive = listener.accept(SOON).unwrap();
    (active.join().unwrap(), passive)
}

/// Bytes that differ by position and seed.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
