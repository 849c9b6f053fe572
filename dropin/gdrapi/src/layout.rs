//! Numbers and structures of GDRCopy's interface, version 2.6. Facts of its header.

use std::ffi::{c_int, c_ulong};

/// The version of the interface; also what is said for the kernel module's, of which there is none.
pub(crate) const VERSION: (c_int, c_int) = (2, 6);

/// `GDR_PIN_FLAG_FORCE_PCIE`: the mapping must go through BAR1. Ours always does.
pub(crate) const PIN_FLAG_FORCE_PCIE: u32 = 1;

/// Types of mappings, which requests for one have the same numbers as.
pub(crate) const MAPPING_NONE: u32 = 0;
/// Write-combined: what a window is.
pub(crate) const MAPPING_WC: u32 = 1;
pub(crate) const MAPPING_CACHING: u32 = 2;
pub(crate) const MAPPING_DEVICE: u32 = 3;

/// Attributes of the library as a whole.
pub(crate) const ATTR_USE_PERSISTENT_MAPPING: u32 = 1;
pub(crate) const ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE: u32 = 2;
pub(crate) const ATTR_USING_DMA_BUF_MMAP: u32 = 3;

/// `gdr_mh_t`: the handle of a pinned buffer. C passes it as it would pass its only member.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct MemoryHandle {
    pub(crate) h: c_ulong,
}

/// `gdr_info_v1_t`, what `gdr_get_info` fills in for programs built before 2.4.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct InfoV1 {
    /// First address, as the GPU knows it.
    pub(crate) va: u64,
    pub(crate) mapped_size: u64,
    pub(crate) page_size: u32,
    /// What pinning took, and in which unit: out of use, and 0.
    pub(crate) tm_cycles: u64,
    pub(crate) cycles_per_ms: u32,
    /// Bit 0: mapped. Bit 1: write-combined.
    pub(crate) bits: u32,
}

/// `gdr_info_v2_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct InfoV2 {
    pub(crate) v1: InfoV1,
    pub(crate) mapping_type: u32,
}

// The C compiler's sizes; the tests' C programs hold every offset against them.
const _: () = assert!(size_of::<InfoV1>() == 40 && size_of::<InfoV2>() == 48);
const _: () = assert!(size_of::<MemoryHandle>() == size_of::<usize>());
