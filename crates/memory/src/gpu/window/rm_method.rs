//! The second method in the fallback order: the resource manager maps the memory through BAR1,
//! without privileges and without a kernel module of ours.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::os::fd::AsFd;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use super::super::allocation::{GpuBuffer, export_fd};
use super::super::api::{Context, IpcHandle};
use super::super::device::Gpu;
use super::super::error::CudaError;
use super::super::range::{GpuRange, MemoryKind, Segment};
use super::super::rm::{RmDevice, RmError, RmMemory};
use super::mapping::{Extent, Mapping};
use super::{Refused, no_room, piece_of};
use crate::page_size;

pub(super) fn map(range: &GpuRange, extent: Extent) -> Result<Mapping, Refused> {
    let device = device_of(range.gpu(), range.context())?;
    let mut mapping = Mapping::reserve(extent)?;
    for segment in range.segments() {
        let Some(piece) = piece_of(range, segment, extent) else { continue };
        let object = if is_vmm(range.kind()) {
            import_handle(range, &device, *segment)?
        } else {
            duplicate_chunk(range, &device, *segment)?
        };
        if !object.sure {
            mapping.mark_unsure(piece);
        }
        let (offset, len) = place(&object, *segment, piece)?;
        let mapped = mapping
            // SAFETY: the piece lies inside our own reservation, which is still unused; extents are
            // whole pages.
            .place(piece, |at| unsafe { object.memory.map_at(offset, len, at) })
            .map_err(|error| refused(range.gpu(), range.gpu().bar1_size(), len, &error))?;
        mapping.keep(mapped);
    }
    mapping.finish()
}

/// The resource manager's object that a segment lies in.
struct Object {
    memory: Arc<RmMemory>,
    /// Where the segment begins in it.
    segment_offset: u64,
    size: u64,
    /// Whether that place is known, or only likely.
    sure: bool,
}

fn is_vmm(kind: MemoryKind) -> bool {
    matches!(kind, MemoryKind::VmmExportable | MemoryKind::VmmPrivate | MemoryKind::VmmSeveral)
}

/// VMM memory: its handle is exported as a file descriptor and imported by our client.
fn import_handle(range: &GpuRange, device: &Arc<RmDevice>, segment: Segment) -> Result<Object, Refused> {
    let exported = range
        .gpu()
        .driver()
        .in_context(range.context(), |api| export_fd(api, segment.base))
        .map_err(|error| {
            Refused::new(format!(
                "the VMM memory at {:#x} cannot be exported ({error}); create it with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
                segment.base
            ))
        })?;
    let instance = device.instance_of(exported.as_fd()).map_err(Refused::new)?;
    if instance != device.instance() {
        return Err(Refused::new(format!(
            "the memory is on the resource manager's device {instance}, but {} is device {}",
            range.gpu(),
            device.instance()
        )));
    }
    let memory = device.import(exported.as_fd()).map_err(Refused::new)?;
    // CUDA maps handles from their start (cuMemMap requires offset 0). A later driver may drop that
    // rule. Where a handle is larger than its mapping, the contents must confirm the rule.
    let size = memory.size().unwrap_or(segment.size);
    let sure = size <= segment.size;
    Ok(Object { memory, segment_offset: 0, size, sure })
}

/// `cudaMalloc` memory: its CUDA IPC handle names the chunk that the memory lies in.
fn duplicate_chunk(range: &GpuRange, device: &Arc<RmDevice>, segment: Segment) -> Result<Object, Refused> {
    let mut handle = IpcHandle([0; 16]);
    range
        .gpu()
        .driver()
        // SAFETY: the call writes one handle of 64 bytes.
        .in_context(range.context(), |api| unsafe { api.ipc_get(&raw mut handle, segment.base) })
        .map_err(|error: CudaError| {
            Refused::new(format!("the driver does not share this memory ({}) by IPC: {error}", range.kind()))
        })?;
    let named = Chunk::named_by(&handle, segment.size).map_err(Refused::new)?;
    let memory = device.duplicate(named.client, named.object).map_err(Refused::new)?;
    let size = memory.size().unwrap_or(named.size);
    if size < named.size {
        return Err(Refused::new(format!(
            "unknown layout of the IPC handle: it states a chunk of {} bytes, but its object has {size}",
            named.size
        )));
    }
    Ok(Object { memory, segment_offset: named.offset, size, sure: true })
}

/// Contents of an IPC handle, in the layout of driver 580: private to the driver, so each field is
/// checked.
#[derive(Debug, PartialEq, Eq)]
struct Chunk {
    client: u32,
    object: u32,
    /// Length of the chunk, in bytes.
    size: u64,
    /// Where the allocation begins in it.
    offset: u64,
}

impl Chunk {
    fn named_by(handle: &IpcHandle, allocation: u64) -> Result<Self, String> {
        let word = |index: usize| handle.0[index];
        let stated = u64::from(word(5)) << 32 | u64::from(word(4));
        let chunk = Self {
            client: word(12),
            object: word(13),
            size: u64::from(word(6)) * 4096,
            offset: u64::from(word(7)),
        };
        let fits = chunk.offset.checked_add(allocation).is_some_and(|end| end <= chunk.size)
            && (allocation..=chunk.size).contains(&stated)
            && chunk.client != 0
            && chunk.object != 0;
        if fits {
            Ok(chunk)
        } else {
            Err(format!(
                "unknown layout of the IPC handle: it states {stated} bytes, a chunk of {} and offset {:#x} for an allocation of {allocation} bytes",
                chunk.size, chunk.offset
            ))
        }
    }
}

/// Offset and length of a piece in its object.
fn place(object: &Object, segment: Segment, piece: Extent) -> Result<(u64, usize), Refused> {
    // The piece is whole pages and may begin before the segment.
    let offset = (object.segment_offset + piece.start).checked_sub(segment.base);
    let end = offset.map(|offset| offset + piece.len());
    match (offset, usize::try_from(piece.len())) {
        (Some(offset), Ok(len))
            if offset.is_multiple_of(page_size() as u64) && end.is_some_and(|end| end <= object.size) =>
        {
            Ok((offset, len))
        }
        _ => Err(Refused::new(format!(
            "the driver's object of {} bytes does not hold {} bytes at {:#x} in whole pages, with the allocation at offset {:#x}",
            object.size,
            piece.len(),
            piece.start,
            object.segment_offset
        ))),
    }
}

fn refused(gpu: &impl fmt::Display, bar1: Option<u64>, len: usize, error: &RmError) -> Refused {
    if !error.is_lack_of_space() {
        return Refused::new(error);
    }
    no_room(gpu, bar1, len, error)
}

/// Our client of the resource manager for a GPU: one for the life of the process.
fn device_of(gpu: &Arc<Gpu>, context: Context) -> Result<Arc<RmDevice>, Refused> {
    static DEVICES: LazyLock<Mutex<HashMap<i32, Arc<RmDevice>>>> = LazyLock::new(Mutex::default);
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(device) = devices.get(&gpu.ordinal()) {
        return Ok(Arc::clone(device));
    }
    let minor = gpu.minor().or_else(only_node).ok_or_else(|| {
        Refused::new(format!(
            "cannot find the /dev/nvidiaN of {gpu}: /proc/driver/nvidia/gpus/{}/information is not readable",
            gpu.pci_address()
        ))
    })?;
    let unknown = |error: CudaError| {
        Refused::passing(format!("scratch allocation to identify the device failed: {error}"))
    };
    let scratch = GpuBuffer::new_in(gpu, context, 1).map_err(unknown)?;
    let exported = gpu.driver().in_context(context, |api| export_fd(api, scratch.addr())).map_err(unknown)?;
    let device = RmDevice::open(minor, exported.as_fd()).map_err(Refused::new)?;
    devices.insert(gpu.ordinal(), Arc::clone(&device));
    Ok(device)
}

/// The number of the only GPU node, if there is just one: for a container that hides the module's
/// procfs.
fn only_node() -> Option<u32> {
    let mut numbers = fs::read_dir("/dev")
        .ok()?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.strip_prefix("nvidia")?.parse::<u32>().ok());
    let first = numbers.next()?;
    numbers.next().is_none().then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(stated: u64, pages: u32, offset: u32) -> IpcHandle {
        let mut words = [0; 16];
        words[4] = u32::try_from(stated & 0xFFFF_FFFF).unwrap();
        words[5] = u32::try_from(stated >> 32).unwrap();
        words[6] = pages;
        words[7] = offset;
        words[12] = 0xC1D0_0001;
        words[13] = 0x5C00_0002;
        IpcHandle(words)
    }

    /// A BAR1 that is full: the sentence has the sizes, and another time or a smaller range may do.
    #[test]
    fn a_full_bar1_is_said_with_its_sizes() {
        let full = [
            RmError::Status { call: "MAP_MEMORY", status: 0x1A },
            RmError::Status { call: "MAP_MEMORY", status: 0x51 },
            RmError::Mmap { len: 64 << 20, source: std::io::Error::from_raw_os_error(libc::ENOMEM) },
        ];
        for error in full {
            let refused = refused(&"GPU 0 (a card)", Some(256 << 20), 64 << 20, &error);
            assert!(refused.passing, "{}", refused.reason);
            for words in ["65536 KiB", "256 MiB", "GPU 0 (a card)", "resizable BAR"] {
                assert!(refused.reason.contains(words), "{}", refused.reason);
            }
        }
        let other = RmError::Status { call: "MAP_MEMORY", status: 0x1B };
        assert!(!refused(&"GPU 0", None, 4096, &other).passing);
    }

    #[test]
    fn an_ipc_handle_is_believed_only_where_it_fits_its_allocation() {
        let large = Chunk::named_by(&handle(64 << 20, 16384, 0), 64 << 20).unwrap();
        assert_eq!((large.size, large.offset), (64 << 20, 0));
        let small = Chunk::named_by(&handle(2 << 20, 512, 0x1200), 70_000).unwrap();
        assert_eq!(small.offset, 0x1200);
        // A chunk too small, an offset beyond it, sizes that disagree, another layout altogether.
        for (wrong, allocation) in [
            (handle(64 << 20, 16, 0), 64 << 20),
            (handle(2 << 20, 512, 0x1f_f000), 70_000),
            (handle(9, 512, 0), 70_000),
            (IpcHandle([0; 16]), 1),
        ] {
            let reason = Chunk::named_by(&wrong, allocation).unwrap_err();
            assert!(reason.contains("layout"), "{reason}");
        }
    }
}
