//! The resource manager's ioctls: numbers and layouts, which are public in NVIDIA's open kernel
//! modules.
//!
//! All are `_IOWR('F', number, struct)` on the control device, except `REGISTER_FD`, which goes to
//! the device's own node.

#![allow(clippy::missing_docs_in_private_items, reason = "the fields are named as the interface names them")]

/// Binds a device's descriptor to the control descriptor that its mappings are made through.
pub(super) const REGISTER_FD: u8 = 201;
pub(super) const FREE: u8 = 0x29;
pub(super) const CONTROL: u8 = 0x2A;
pub(super) const ALLOC: u8 = 0x2B;
pub(super) const DUP_OBJECT: u8 = 0x34;
pub(super) const MAP_MEMORY: u8 = 0x4E;
pub(super) const UNMAP_MEMORY: u8 = 0x4F;

pub(super) const CLASS_CLIENT: u32 = 0x41;
pub(super) const CLASS_DEVICE: u32 = 0x80;
pub(super) const CLASS_SUBDEVICE: u32 = 0x2080;

/// The object behind an exported descriptor.
pub(super) const CMD_EXPORT_INFO: u32 = 0x3D08;
/// Brings exported objects into a client.
pub(super) const CMD_IMPORT_OBJECTS: u32 = 0x3D0C;
/// Properties of a memory object, by index.
pub(super) const CMD_SURFACE_INFO: u32 = 0x41_0110;
pub(super) const SURFACE_SIZE_LOW: u32 = 2;
pub(super) const SURFACE_SIZE_HIGH: u32 = 3;

/// An imported object is memory of the GPU.
pub(super) const OBJECT_VIDEO_MEMORY: u8 = 1;
pub(super) const IMPORT_MAX: usize = 128;

/// `ALLOC`.
#[repr(C)]
#[derive(Default)]
pub(super) struct Alloc {
    pub(super) root: u32,
    pub(super) parent: u32,
    pub(super) new: u32,
    pub(super) class: u32,
    pub(super) params: u64,
    pub(super) rights: u64,
    pub(super) params_size: u32,
    pub(super) flags: u32,
    pub(super) status: u32,
    pub(super) pad: u32,
}

/// Parameters of a device.
#[repr(C)]
#[derive(Default)]
pub(super) struct DeviceParams {
    pub(super) instance: u32,
    pub(super) client_share: u32,
    pub(super) target_client: u32,
    pub(super) target_device: u32,
    pub(super) flags: u32,
    pub(super) pad: u32,
    pub(super) va_size: u64,
    pub(super) va_start: u64,
    pub(super) va_limit: u64,
    pub(super) va_mode: u32,
    pub(super) pad2: u32,
}

/// `FREE`.
#[repr(C)]
pub(super) struct Free {
    pub(super) root: u32,
    pub(super) parent: u32,
    pub(super) object: u32,
    pub(super) status: u32,
}

/// `CONTROL`.
#[repr(C)]
pub(super) struct Control {
    pub(super) client: u32,
    pub(super) object: u32,
    pub(super) command: u32,
    pub(super) flags: u32,
    pub(super) params: u64,
    pub(super) params_size: u32,
    pub(super) status: u32,
}

/// `DUP_OBJECT`.
#[repr(C)]
pub(super) struct Dup {
    pub(super) client: u32,
    pub(super) parent: u32,
    pub(super) object: u32,
    pub(super) client_source: u32,
    pub(super) object_source: u32,
    pub(super) flags: u32,
    pub(super) status: u32,
}

/// `MAP_MEMORY`, with the descriptor that the mapping is then made by.
#[repr(C)]
#[derive(Default)]
pub(super) struct Map {
    pub(super) client: u32,
    pub(super) device: u32,
    pub(super) memory: u32,
    pub(super) pad: u32,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) linear: u64,
    pub(super) status: u32,
    pub(super) flags: u32,
    pub(super) fd: i32,
    pub(super) pad2: u32,
}

/// `UNMAP_MEMORY`.
#[repr(C)]
pub(super) struct Unmap {
    pub(super) client: u32,
    pub(super) device: u32,
    pub(super) memory: u32,
    pub(super) pad: u32,
    pub(super) linear: u64,
    pub(super) status: u32,
    pub(super) flags: u32,
}

/// `CMD_EXPORT_INFO`.
#[repr(C)]
pub(super) struct ExportInfo {
    pub(super) fd: i32,
    pub(super) device_instance: u32,
    pub(super) gpu_instance: u32,
    pub(super) max_objects: u16,
    pub(super) metadata: [u8; 64],
}

/// `CMD_IMPORT_OBJECTS`.
#[repr(C)]
pub(super) struct ImportObjects {
    pub(super) fd: i32,
    pub(super) parent: u32,
    pub(super) objects: [u32; IMPORT_MAX],
    pub(super) types: [u8; IMPORT_MAX],
    pub(super) count: u16,
    pub(super) index: u16,
}

/// `CMD_SURFACE_INFO`.
#[repr(C)]
pub(super) struct SurfaceInfo {
    pub(super) count: u32,
    pub(super) pad: u32,
    pub(super) list: u64,
}

/// One entry of its list.
#[repr(C)]
pub(super) struct SurfaceEntry {
    pub(super) index: u32,
    pub(super) data: u32,
}

const _: () = {
    assert!(size_of::<Alloc>() == 48);
    assert!(size_of::<DeviceParams>() == 56);
    assert!(size_of::<Free>() == 16);
    assert!(size_of::<Control>() == 32);
    assert!(size_of::<Dup>() == 28);
    assert!(size_of::<Map>() == 56);
    assert!(size_of::<Unmap>() == 32);
    assert!(size_of::<ExportInfo>() == 80);
    assert!(size_of::<ImportObjects>() == 652);
    assert!(size_of::<SurfaceInfo>() == 16);
};
