//! Peer access between GPUs, from NVML.

use std::ffi::{c_int, c_uint};

use nobounce_topology::facts::{GpuPeer, PeerDenied, Read};

use super::library::{Library, function};
use super::nvml::{DeviceHandle, address, words};

/// GPUs whose pairs are asked about.
const MAX_GPUS: usize = 32;
/// `nvmlGpuP2PCapsIndex_t`.
const READ: c_uint = 0;
const WRITE: c_uint = 1;
const NVLINK: c_uint = 2;

type Status = unsafe extern "C" fn(DeviceHandle, DeviceHandle, c_uint, *mut c_uint) -> c_int;

/// Every pair of GPUs once.
pub(super) fn of(library: Library, devices: &[DeviceHandle]) -> Read<Vec<GpuPeer>> {
    let gpus: Vec<(String, DeviceHandle)> = devices
        .iter()
        .take(MAX_GPUS)
        .filter_map(|device| Some((address(library, *device)?, *device)))
        .collect();
    if gpus.len() < 2 {
        return Read::default();
    }
    let Some(status) = function!(library, c"nvmlDeviceGetP2PStatus", Status) else {
        return Read::no("NVML has no nvmlDeviceGetP2PStatus");
    };
    let ask = |one: DeviceHandle, other: DeviceHandle, index: c_uint| {
        let mut value = 0;
        // SAFETY: two devices of the library's; the call writes one word.
        match unsafe { status(one, other, index, &raw mut value) } {
            0 => Ok(value),
            error => Err(words(library, error)),
        }
    };
    let mut pairs = Vec::new();
    for (at, (one, first)) in gpus.iter().enumerate() {
        for (other, second) in &gpus[at + 1..] {
            let both = |index| [ask(*first, *second, index), ask(*second, *first, index)];
            let answers: Result<Vec<c_uint>, String> = both(READ).into_iter().chain(both(WRITE)).collect();
            let (access, denied) = answers.map_or_else(|why| (Read::no(why), None), |told| judge(&told));
            let nvlink = match ask(*first, *second, NVLINK) {
                Ok(value) => Read::Yes(value == 0),
                Err(why) => Read::no(why),
            };
            let (one, other) = (one.clone(), other.clone());
            pairs.push(GpuPeer { one, other, access, nvlink, denied });
        }
    }
    Read::Yes(pairs)
}

/// Access by the answers for reading and writing, in both directions (`nvmlGpuP2PStatus_t`).
fn judge(answers: &[c_uint]) -> (Read<bool>, Option<PeerDenied>) {
    let denied = |status: &c_uint| match status {
        1 => Some(PeerDenied::Chipset),
        2 => Some(PeerDenied::Gpu),
        3 => Some(PeerDenied::Topology),
        4 => Some(PeerDenied::Disabled),
        5 => Some(PeerDenied::Unsupported),
        _ => None,
    };
    match answers.iter().find_map(denied) {
        Some(why) => (Read::Yes(false), Some(why)),
        None if answers.iter().all(|status| *status == 0) => (Read::Yes(true), None),
        None => (Read::no("NVML does not know it"), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_needs_both_directions_and_unknown_stays_unknown() {
        assert_eq!(judge(&[0, 0, 0, 0]), (Read::Yes(true), None));
        assert_eq!(judge(&[0, 0, 0, 4]), (Read::Yes(false), Some(PeerDenied::Disabled)));
        assert_eq!(judge(&[0, 6, 0, 0]).0.known(), None);
    }
}
