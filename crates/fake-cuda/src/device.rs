//! The devices: made-up ones whose memory is the host's.

use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use crate::abi::{Out, put_words};
use crate::call::{self, Rule, call};
use crate::status::{Answer, Status};

/// Memory each device claims to have. Pages are only taken when they are written.
pub(crate) const TOTAL_MEMORY: usize = 64 << 30;

const NAME: &str = "stand-in GPU (host memory)";

/// The PCI address of the first device: a domain that no machine has, so that it never matches a
/// real device.
const DOMAIN: i32 = 0xFFFF;
const BUS: i32 = 0xFA;

/// The environment variable with the device count.
const DEVICES: &str = "FAKE_CUDA_DEVICES";

/// Names attributes that the driver does not know, as an old one: numbers with commas.
const UNKNOWN: &str = "FAKE_CUDA_UNKNOWN_ATTRIBUTES";

fn unknown_attributes() -> &'static [i32] {
    static UNKNOWN_ATTRIBUTES: OnceLock<Vec<i32>> = OnceLock::new();
    UNKNOWN_ATTRIBUTES.get_or_init(|| {
        let list = std::env::var(UNKNOWN).unwrap_or_default();
        list.split(',').filter_map(|number| number.trim().parse().ok()).collect()
    })
}

/// Default device attributes: the H200's as far as they matter here.
fn attribute(number: i32, device: i32) -> i32 {
    match number {
        // PCI bus, device and domain.
        33 => BUS + device,
        34 => 0,
        50 => DOMAIN,
        // Warp size, processors, unified addressing, compute capability 9.0, managed memory.
        10 => 32,
        16 => 1,
        41 | 83 => 1,
        75 => 9,
        76 => 0,
        // Virtual memory management and its POSIX file descriptors, GPUDirect RDMA with it, memory
        // pools, GPUDirect RDMA, dma-buf.
        102 | 103 | 110 | 115 | 116 | 124 => 1,
        // Ordering of GPUDirect RDMA writes: seen by all devices without a flush.
        118 => 100,
        _ => 0,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: u32) -> Status {
    call("cuInit", Rule::Always, |call| {
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        // A command that a test starts cannot call the knobs, so the count comes from the
        // environment.
        if let Some(count) = std::env::var(DEVICES).ok().and_then(|count| count.parse().ok()) {
            call.knobs.devices = i32::clamp(count, 0, 4);
        }
        if call.knobs.devices == 0 {
            return Err(Status::NO_DEVICE);
        }
        call.initialise()?;
        call::claim();
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDriverGetVersion(version: Out<i32>) -> Status {
    // CUDA 13.3 introduced CPU mappings of dma-bufs.
    call("cuDriverGetVersion", Rule::Always, |call| {
        version.put(if call.knobs.refuse_mmap { 13000 } else { 13030 })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetCount(count: Out<i32>) -> Status {
    call("cuDeviceGetCount", Rule::Free, |call| count.put(call.knobs.devices))
}

fn exists(devices: i32, device: i32) -> Answer {
    if (0..devices).contains(&device) { Ok(()) } else { Err(Status::INVALID_DEVICE) }
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGet(device: Out<i32>, ordinal: i32) -> Status {
    call("cuDeviceGet", Rule::Free, |call| {
        exists(call.knobs.devices, ordinal)?;
        device.put(ordinal)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetName(name: *mut c_char, len: i32, device: i32) -> Status {
    call("cuDeviceGetName", Rule::Free, |call| {
        exists(call.knobs.devices, device)?;
        let words = CString::new(NAME).map_err(|_| Status::UNKNOWN)?;
        put_words(name, len, &words)
    })
}

fn uuid(device: i32) -> [u8; 16] {
    let mut uuid = *b"stand-in GPU   0";
    uuid[15] = uuid[15].wrapping_add(u8::try_from(device).unwrap_or(0));
    uuid
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid(out: Out<[u8; 16]>, device: i32) -> Status {
    call("cuDeviceGetUuid", Rule::Free, |call| {
        exists(call.knobs.devices, device)?;
        out.put(uuid(device))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid_v2(out: Out<[u8; 16]>, device: i32) -> Status {
    cuDeviceGetUuid(out, device)
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetAttribute(value: Out<i32>, number: i32, device: i32) -> Status {
    call("cuDeviceGetAttribute", Rule::Free, |call| {
        exists(call.knobs.devices, device)?;
        if unknown_attributes().contains(&number) {
            return Err(Status::INVALID_VALUE);
        }
        let set = call.knobs.attributes.get(&number).copied();
        value.put(set.unwrap_or_else(|| attribute(number, device)))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetPCIBusId(room: *mut c_char, len: i32, device: i32) -> Status {
    call("cuDeviceGetPCIBusId", Rule::Free, |call| {
        exists(call.knobs.devices, device)?;
        // In the upper case that CUDA prints.
        let words =
            CString::new(format!("{DOMAIN:04X}:{:02X}:00.0", BUS + device)).map_err(|_| Status::UNKNOWN)?;
        put_words(room, len, &words)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: i32) -> Status {
    call("cuDeviceTotalMem_v2", Rule::Free, |call| {
        exists(call.knobs.devices, device)?;
        bytes.put(TOTAL_MEMORY)
    })
}
