//! What the tests share.
#![allow(dead_code)] // not every test uses everything

use std::time::Duration;

use nobounce::{Config, ConnectOptions, Connection, Device};

/// Longer than anything that works takes.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A device at an address of the test's own, so that tests do not meet; or the one that `NOBOUNCE_DEVICE` names, such as `rxe0`.
pub(crate) fn device(addr: &str) -> Device {
    if std::env::var_os("NOBOUNCE_DEVICE").is_some() {
        return Device::open().unwrap();
    }
    Device::open_with(&Config::default().at(addr).unwrap()).unwrap()
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
