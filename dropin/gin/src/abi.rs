//! NCCL's plugin interface for GIN, versions 13 (NCCL 2.30.5) and 14, as far as type GPI uses it.

use std::ffi::{c_char, c_int, c_ulong, c_void};

/// `ncclResult_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclResult(pub c_int);

#[allow(missing_docs)]
impl NcclResult {
    pub const SUCCESS: Self = Self(0);
    pub const SYSTEM_ERROR: Self = Self(2);
    pub const INTERNAL_ERROR: Self = Self(3);
    pub const INVALID_ARGUMENT: Self = Self(4);
}

/// `ncclDebugLogger_t`.
pub type Logger = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

/// `NCCL_LOG_WARN`, `NCCL_INIT | NCCL_NET`.
pub const LOG_WARN: c_int = 2;
#[allow(missing_docs)]
pub const SUBSYSTEMS: c_ulong = 0x11;

/// `NCCL_NET_DEVICE_GIN_GPI`, and `NCCL_GIN_GPI_VERSION`.
pub const GPI: c_int = 4;
#[allow(missing_docs)]
pub const GPI_VERSION: c_int = 100;

/// `NCCL_PTR_HOST`, `NCCL_PTR_CUDA`.
pub const PTR_HOST: c_int = 1;
#[allow(missing_docs)]
pub const PTR_CUDA: c_int = 2;

/// `NCCL_NET_HANDLE_MAXSIZE`.
pub const HANDLE_BYTES: usize = 128;

/// `NCCL_NET_ID_UNDEF`.
pub const NO_ID: i16 = -1;

/// `ncclNetProperties_v12_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct NetProperties {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub reg_is_global: c_int,
    pub force_flush: c_int,
    /// Mb/s.
    pub speed: c_int,
    pub port: c_int,
    pub latency: f32,
    pub max_comms: c_int,
    pub max_recvs: c_int,
    pub net_device_type: c_int,
    pub net_device_version: c_int,
    pub virtual_devices: VirtualDevices,
    pub max_p2p_bytes: usize,
    pub max_coll_bytes: usize,
    pub max_multi_request_size: c_int,
    pub rail_id: i16,
    pub plane_id: i16,
}

/// `ncclNetVDeviceProps_v12_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct VirtualDevices {
    pub count: c_int,
    pub devices: [c_int; 8],
}

/// `ncclGinProperties_v14_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct GinProperties {
    pub strong_signals: bool,
    pub va_signals: bool,
}

/// `ncclGinConfig_v13_t`, and the first part of version 14.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Config {
    pub signals: c_int,
    pub counters: c_int,
    pub contexts: c_int,
    pub queue_depth: c_int,
    pub traffic_class: c_int,
}

/// `ncclGinConfig_v14_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Config14 {
    pub config: Config,
    /// 0: the kernels were compiled without this backend.
    pub backend_version: c_int,
    /// Kernels put only to each so-manyth rank, and still count all of them.
    pub rank_stride: c_int,
}

/// `ncclNetDeviceHandle_v11_t`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct DeviceHandle {
    pub net_device_type: c_int,
    pub net_device_version: c_int,
    pub handle: *mut c_void,
    pub size: usize,
    pub needs_proxy_progress: c_int,
}

type Init = unsafe extern "C" fn(*mut *mut c_void, u64, Option<Logger>) -> NcclResult;
type Devices = unsafe extern "C" fn(*mut c_int) -> NcclResult;
type Properties = unsafe extern "C" fn(c_int, *mut NetProperties) -> NcclResult;
type Listen = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void) -> NcclResult;
type Connect = unsafe extern "C" fn(
    *mut c_void,
    *const *const c_void,
    c_int,
    c_int,
    *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
type CreateContext<C> =
    unsafe extern "C" fn(*mut c_void, *const C, *mut *mut c_void, *mut *mut DeviceHandle) -> NcclResult;
type Register = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    u64,
    *mut *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
type RegisterDmaBuf = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    u64,
    c_int,
    u64,
    *mut *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
type Deregister = unsafe extern "C" fn(*mut c_void, *mut c_void) -> NcclResult;
type Close = unsafe extern "C" fn(*mut c_void) -> NcclResult;
type LastError = unsafe extern "C" fn(*mut c_void, *mut bool) -> NcclResult;

/// A function of version 13 that NCCL does not call for type GPI.
type Unused = *const c_void;

/// `ncclGin_v14_t`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Gin14 {
    pub name: *const c_char,
    pub init: Init,
    pub devices: Devices,
    pub gin_properties: unsafe extern "C" fn(*mut GinProperties) -> NcclResult,
    pub properties: Properties,
    pub listen: Listen,
    pub connect: Connect,
    pub create_context: CreateContext<Config14>,
    pub register: Register,
    pub register_dma_buf: RegisterDmaBuf,
    pub deregister: Deregister,
    pub destroy_context: Close,
    pub close_coll: Close,
    pub close_listen: Close,
    pub progress: Close,
    pub last_error: LastError,
    pub finalize: Close,
}

/// `ncclGin_v13_t`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Gin13 {
    pub name: *const c_char,
    pub init: Init,
    pub devices: Devices,
    pub properties: Properties,
    pub listen: Listen,
    pub connect: Connect,
    pub create_context: CreateContext<Config>,
    pub register: Register,
    pub register_dma_buf: RegisterDmaBuf,
    pub deregister: Deregister,
    pub destroy_context: Close,
    pub close_coll: Close,
    pub close_listen: Close,
    pub iput: Unused,
    pub iput_signal: Unused,
    pub iget: Unused,
    pub iflush: Unused,
    pub test: Unused,
    pub progress: Close,
    pub last_error: LastError,
    pub finalize: Close,
}

// SAFETY: they hold addresses of functions and of texts that are never freed.
unsafe impl Sync for Gin14 {}
// SAFETY: as above.
unsafe impl Sync for Gin13 {}

const _: () = assert!(size_of::<NetProperties>() == 128 && size_of::<Config14>() == 28);
const _: () = assert!(size_of::<DeviceHandle>() == 32 && size_of::<Gin14>() == 17 * 8);
const _: () = assert!(size_of::<Gin13>() == 21 * 8);
