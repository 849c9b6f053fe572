//! The functions of the CUDA driver that we call, by their C signatures.
//!
//! Each becomes a method that returns `Result<(), CudaError>`. They are called inside
//! [`Driver::in_context`](super::Driver::in_context) or
//! [`Driver::relaxed`](super::Driver::relaxed), which provide the table.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr;

use super::error::CudaError;

/// Handles of the driver: addresses of its own objects, meaningful to the driver only.
macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name(pub *mut c_void);

        // SAFETY: a handle is a name; the driver's functions may be called with it from any thread.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}

        impl $name {
            /// No object: the default stream, or no context.
            pub const NULL: Self = Self(ptr::null_mut());

            /// The handle that another library holds as a number.
            #[must_use]
            pub fn from_number(number: u64) -> Self {
                Self(ptr::with_exposed_provenance_mut(usize::try_from(number).unwrap_or(0)))
            }

            /// True for the null handle.
            #[must_use]
            pub fn is_null(self) -> bool {
                self.0.is_null()
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0.addr())
            }
        }
    )*};
}

handles! {
    /// A CUDA context.
    Context;
    /// A stream.
    Stream;
    /// An event.
    Event;
    /// A loaded module.
    Module;
    /// A kernel of a module.
    Function;
    /// A captured graph.
    Graph;
}

/// How the copies of a batch are made: `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BatchAttributes {
    /// When sources are read: [`BatchAttributes::IN_STREAM_ORDER`].
    pub source_order: c_int,
    /// Types and numbers of the locations: hints for managed memory only.
    pub hints: [c_int; 4],
    /// None.
    pub flags: c_uint,
}

impl BatchAttributes {
    /// After the work that is in the stream already.
    pub const IN_STREAM_ORDER: c_int = 1;
}

/// A copy of rows: `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RowCopy {
    /// Bytes to skip in each row of the source, and rows to skip.
    pub src_x: usize,
    /// See above.
    pub src_y: usize,
    /// Memory type of the source: [`RowCopy::DEVICE`].
    pub src_kind: c_uint,
    /// Unused: the source is a device's.
    pub src_host: *const c_void,
    /// The source.
    pub src_device: u64,
    /// Unused.
    pub src_array: *const c_void,
    /// Between the starts of two rows of the source.
    pub src_pitch: usize,
    /// Bytes to skip in each row of the destination, and rows to skip.
    pub dst_x: usize,
    /// See above.
    pub dst_y: usize,
    /// Memory type of the destination: [`RowCopy::HOST`].
    pub dst_kind: c_uint,
    /// The destination.
    pub dst_host: *mut c_void,
    /// Unused: the destination is the host's.
    pub dst_device: u64,
    /// Unused.
    pub dst_array: *const c_void,
    /// Between the starts of two rows of the destination.
    pub dst_pitch: usize,
    /// Bytes of a row that are copied.
    pub width: usize,
    /// Rows.
    pub height: usize,
}

impl RowCopy {
    /// Host memory.
    pub const HOST: c_uint = 1;
    /// Device memory.
    pub const DEVICE: c_uint = 2;
}

/// Where memory lies, as VMM functions want it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemLocation {
    /// 1 = device.
    pub kind: c_uint,
    /// The device's ordinal.
    pub id: c_int,
}

/// The properties of a VMM allocation.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllocationProp {
    /// 1 = pinned, the only kind there is.
    pub kind: c_uint,
    /// Bits: 1 = POSIX file descriptor.
    pub handle_types: c_uint,
    /// Where it lies.
    pub location: MemLocation,
    /// For Windows.
    pub windows: *mut c_void,
    /// Not compressed where 0.
    pub compression: u8,
    /// Other devices may reach it.
    pub gpu_direct_rdma: u8,
    /// Usage bits.
    pub usage: u16,
    /// Nothing.
    pub reserved: [u8; 4],
}

impl AllocationProp {
    /// Memory of the device `ordinal`, exportable by file descriptor where `exportable`.
    #[must_use]
    pub fn device(ordinal: c_int, exportable: bool, gpu_direct_rdma: bool) -> Self {
        Self {
            kind: 1,
            handle_types: c_uint::from(exportable),
            location: MemLocation { kind: 1, id: ordinal },
            windows: ptr::null_mut(),
            compression: 0,
            gpu_direct_rdma: u8::from(gpu_direct_rdma),
            usage: 0,
            reserved: [0; 4],
        }
    }
}

/// Access rights of a device to a mapped VMM range.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessDesc {
    /// The device.
    pub location: MemLocation,
    /// 3 = read and write.
    pub flags: c_uint,
}

/// The result of `cuIpcGetMemHandle`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcHandle(pub [u32; 16]);

/// The handle of a VMM allocation.
pub type AllocationHandle = u64;

/// Numbers of the driver's interface.
#[allow(missing_docs, reason = "they are the driver's own names")]
pub mod consts {
    pub const CAPTURE_MODE_GLOBAL: u32 = 0;
    pub const CAPTURE_MODE_RELAXED: u32 = 2;
    pub const STREAM_NON_BLOCKING: u32 = 1;
    pub const EVENT_DISABLE_TIMING: u32 = 2;
    pub const MEMHOSTALLOC_PORTABLE: u32 = 1;
    pub const MEM_ATTACH_GLOBAL: u32 = 1;
    pub const HANDLE_TYPE_POSIX_FD: u32 = 1;
    pub const RANGE_HANDLE_DMA_BUF_FD: u32 = 1;
    pub const IPC_LAZY_ENABLE_PEER_ACCESS: u32 = 1;

    pub const POINTER_CONTEXT: u32 = 1;
    pub const POINTER_MEMORY_TYPE: u32 = 2;
    pub const POINTER_DEVICE_POINTER: u32 = 3;
    pub const POINTER_HOST_POINTER: u32 = 4;
    pub const POINTER_BUFFER_ID: u32 = 7;
    pub const POINTER_IS_MANAGED: u32 = 8;
    pub const POINTER_DEVICE_ORDINAL: u32 = 9;
    pub const POINTER_IS_LEGACY_IPC_CAPABLE: u32 = 10;
    pub const POINTER_RANGE_START: u32 = 11;
    pub const POINTER_RANGE_SIZE: u32 = 12;
    pub const POINTER_ALLOWED_HANDLE_TYPES: u32 = 14;
    pub const POINTER_MEMPOOL: u32 = 17;
    pub const POINTER_MEMORY_BLOCK_ID: u32 = 20;

    pub const MEMORY_TYPE_HOST: u32 = 1;
    pub const MEMORY_TYPE_DEVICE: u32 = 2;

    pub const ATTRIBUTE_PCI_BUS: u32 = 33;
    pub const ATTRIBUTE_PCI_DEVICE: u32 = 34;
    pub const ATTRIBUTE_PCI_DOMAIN: u32 = 50;
    pub const ATTRIBUTE_VMM: u32 = 102;
    pub const ATTRIBUTE_RDMA_WITH_VMM: u32 = 110;
    pub const ATTRIBUTE_GPU_DIRECT_RDMA: u32 = 116;
    pub const ATTRIBUTE_RDMA_WRITES_ORDERING: u32 = 118;
    pub const ATTRIBUTE_DMA_BUF: u32 = 124;
}

macro_rules! functions {
    (@field required $signature:ty) => { $signature };
    (@field optional $signature:ty) => { Option<$signature> };
    (@load required $found:expr, $symbol:literal) => {
        match $found {
            Some(function) => function,
            None => return Err($symbol),
        }
    };
    (@load optional $found:expr, $symbol:literal) => { $found };
    (@call required $self:ident, $function:expr, $symbol:literal) => { $function };
    (@call optional $self:ident, $function:expr, $symbol:literal) => {
        match $function {
            Some(function) => function,
            None => {
                return Err(CudaError {
                    call: $symbol,
                    code: CudaError::NOT_FOUND,
                    name: "CUDA_ERROR_NOT_FOUND: this driver does not have the function",
                });
            }
        }
    };
    ($($need:ident $name:ident = $symbol:literal ($($arg:ident: $type:ty),* $(,)?);)*) => {
        /// The table of functions.
        pub struct Api {
            $($name: functions!(@field $need unsafe extern "C" fn($($type),*) -> c_uint),)*
        }

        impl Api {
            /// Resolves every function, or returns the name of the first required one that is
            /// absent.
            ///
            /// # Safety
            /// `find` gives addresses of functions with the signatures that CUDA's header declares
            /// for these names.
            pub(super) unsafe fn load(find: impl Fn(&CStr) -> *mut c_void) -> Result<Self, &'static str> {
                Ok(Self {$(
                    $name: {
                        const SYMBOL: &CStr = match CStr::from_bytes_with_nul(concat!($symbol, "\0").as_bytes()) {
                            Ok(symbol) => symbol,
                            Err(_) => panic!("a symbol's name"),
                        };
                        // SAFETY: a null pointer becomes None, any other is a function of this
                        // type: the caller's promise.
                        let found = unsafe {
                            std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($type),*) -> c_uint>>(
                                find(SYMBOL),
                            )
                        };
                        functions!(@load $need found, $symbol)
                    },
                )*})
            }

            $(
                #[doc = concat!("`", $symbol, "`.")]
                ///
                /// # Safety
                /// As for the C function: pointers are valid for what it reads and writes, handles
                /// are live.
                #[inline]
                #[allow(clippy::too_many_arguments, reason = "the C function has them")]
                pub unsafe fn $name(&self, $($arg: $type),*) -> Result<(), CudaError> {
                    let function = functions!(@call $need self, self.$name, $symbol);
                    // SAFETY: the caller's promise.
                    let code = unsafe { function($($arg),*) };
                    self.check($symbol, code)
                }
            )*
        }
    };
}

functions! {
    required init = "cuInit" (flags: c_uint);
    required driver_version = "cuDriverGetVersion" (version: *mut c_int);
    required error_name = "cuGetErrorName" (code: c_uint, name: *mut *const c_char);
    required error_string = "cuGetErrorString" (code: c_uint, text: *mut *const c_char);
    required device_count = "cuDeviceGetCount" (count: *mut c_int);
    required device_get = "cuDeviceGet" (device: *mut c_int, ordinal: c_int);
    required device_name = "cuDeviceGetName" (name: *mut c_char, len: c_int, device: c_int);
    required device_uuid = "cuDeviceGetUuid" (uuid: *mut [u8; 16], device: c_int);
    optional device_uuid_v2 = "cuDeviceGetUuid_v2" (uuid: *mut [u8; 16], device: c_int);
    required device_attribute = "cuDeviceGetAttribute" (value: *mut c_int, attribute: c_uint, device: c_int);
    required device_pci_bus_id = "cuDeviceGetPCIBusId" (id: *mut c_char, len: c_int, device: c_int);
    optional mem_info = "cuMemGetInfo_v2" (free: *mut usize, total: *mut usize);
    required device_total_mem = "cuDeviceTotalMem_v2" (bytes: *mut usize, device: c_int);
    required primary_retain = "cuDevicePrimaryCtxRetain" (context: *mut Context, device: c_int);
    required primary_release = "cuDevicePrimaryCtxRelease_v2" (device: c_int);
    required primary_state = "cuDevicePrimaryCtxGetState" (device: c_int, flags: *mut c_uint, active: *mut c_int);
    optional primary_reset = "cuDevicePrimaryCtxReset_v2" (device: c_int);
    required ctx_current = "cuCtxGetCurrent" (context: *mut Context);
    required ctx_push = "cuCtxPushCurrent_v2" (context: Context);
    required ctx_pop = "cuCtxPopCurrent_v2" (context: *mut Context);
    required ctx_device = "cuCtxGetDevice" (device: *mut c_int);
    required ctx_synchronize = "cuCtxSynchronize" ();
    optional ctx_create = "cuCtxCreate_v2" (context: *mut Context, flags: c_uint, device: c_int);
    optional ctx_destroy = "cuCtxDestroy_v2" (context: Context);
    optional ctx_id = "cuCtxGetId" (context: Context, id: *mut u64);
    required exchange_capture_mode = "cuThreadExchangeStreamCaptureMode" (mode: *mut c_uint);
    required pointer_attribute = "cuPointerGetAttribute" (value: *mut c_void, attribute: c_uint, pointer: u64);
    required pointer_attributes = "cuPointerGetAttributes"
        (count: c_uint, attributes: *const c_uint, values: *const *mut c_void, pointer: u64);
    required address_range = "cuMemGetAddressRange_v2" (base: *mut u64, size: *mut usize, pointer: u64);
    required mem_granularity = "cuMemGetAllocationGranularity"
        (granularity: *mut usize, prop: *const AllocationProp, option: c_uint);
    required mem_create = "cuMemCreate"
        (handle: *mut AllocationHandle, size: usize, prop: *const AllocationProp, flags: u64);
    required mem_release = "cuMemRelease" (handle: AllocationHandle);
    required mem_reserve = "cuMemAddressReserve"
        (pointer: *mut u64, size: usize, alignment: usize, hint: u64, flags: u64);
    required mem_address_free = "cuMemAddressFree" (pointer: u64, size: usize);
    required mem_map = "cuMemMap" (pointer: u64, size: usize, offset: usize, handle: AllocationHandle, flags: u64);
    required mem_unmap = "cuMemUnmap" (pointer: u64, size: usize);
    required mem_set_access = "cuMemSetAccess" (pointer: u64, size: usize, access: *const AccessDesc, count: usize);
    required mem_retain_handle = "cuMemRetainAllocationHandle" (handle: *mut AllocationHandle, address: u64);
    required mem_handle_prop = "cuMemGetAllocationPropertiesFromHandle"
        (prop: *mut AllocationProp, handle: AllocationHandle);
    required mem_export = "cuMemExportToShareableHandle"
        (shareable: *mut c_void, handle: AllocationHandle, kind: c_uint, flags: u64);
    optional mem_range_handle = "cuMemGetHandleForAddressRange"
        (handle: *mut c_void, pointer: u64, size: usize, kind: c_uint, flags: u64);
    required ipc_get = "cuIpcGetMemHandle" (handle: *mut IpcHandle, pointer: u64);
    required ipc_open = "cuIpcOpenMemHandle_v2" (pointer: *mut u64, handle: IpcHandle, flags: c_uint);
    required ipc_close = "cuIpcCloseMemHandle" (pointer: u64);
    required mem_alloc = "cuMemAlloc_v2" (pointer: *mut u64, size: usize);
    required mem_free = "cuMemFree_v2" (pointer: u64);
    optional mem_alloc_async = "cuMemAllocAsync" (pointer: *mut u64, size: usize, stream: Stream);
    optional mem_free_async = "cuMemFreeAsync" (pointer: u64, stream: Stream);
    required mem_alloc_managed = "cuMemAllocManaged" (pointer: *mut u64, size: usize, flags: c_uint);
    required mem_host_alloc = "cuMemHostAlloc" (pointer: *mut *mut c_void, size: usize, flags: c_uint);
    required mem_host_free = "cuMemFreeHost" (pointer: *mut c_void);
    optional mem_host_register = "cuMemHostRegister_v2" (pointer: *mut c_void, size: usize, flags: c_uint);
    required copy_to_device_async = "cuMemcpyHtoDAsync_v2" (to: u64, from: *const c_void, len: usize, stream: Stream);
    required copy_from_device_async = "cuMemcpyDtoHAsync_v2" (to: *mut c_void, from: u64, len: usize, stream: Stream);
    required copy_rows_async = "cuMemcpy2DAsync_v2" (copy: *const RowCopy, stream: Stream);
    optional copy_batch_async = "cuMemcpyBatchAsync"
        (to: *const u64, from: *const u64, sizes: *const usize, count: usize, attributes: *const BatchAttributes,
         first: *const usize, attributes_count: usize, failed: *mut usize, stream: Stream);
    required copy_to_device = "cuMemcpyHtoD_v2" (to: u64, from: *const c_void, len: usize);
    required copy_from_device = "cuMemcpyDtoH_v2" (to: *mut c_void, from: u64, len: usize);
    required memset_async = "cuMemsetD8Async" (pointer: u64, value: u8, len: usize, stream: Stream);
    required stream_create = "cuStreamCreate" (stream: *mut Stream, flags: c_uint);
    required stream_destroy = "cuStreamDestroy_v2" (stream: Stream);
    required stream_query = "cuStreamQuery" (stream: Stream);
    required stream_synchronize = "cuStreamSynchronize" (stream: Stream);
    required stream_begin_capture = "cuStreamBeginCapture_v2" (stream: Stream, mode: c_uint);
    required stream_end_capture = "cuStreamEndCapture" (stream: Stream, graph: *mut Graph);
    optional stream_write_value = "cuStreamWriteValue32_v2" (stream: Stream, pointer: u64, value: c_uint, flags: c_uint);
    required event_create = "cuEventCreate" (event: *mut Event, flags: c_uint);
    required event_destroy = "cuEventDestroy_v2" (event: Event);
    required event_record = "cuEventRecord" (event: Event, stream: Stream);
    required event_query = "cuEventQuery" (event: Event);
    required module_load = "cuModuleLoadData" (module: *mut Module, image: *const c_void);
    required module_unload = "cuModuleUnload" (module: Module);
    required module_function = "cuModuleGetFunction" (function: *mut Function, module: Module, name: *const c_char);
    required launch_kernel = "cuLaunchKernel" (
        function: Function, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared_bytes: c_uint, stream: Stream, arguments: *mut *mut c_void, extra: *mut *mut c_void,
    );
}

impl Api {
    /// Turns a result into words; success needs none.
    #[inline]
    fn check(&self, call: &'static str, code: c_uint) -> Result<(), CudaError> {
        if code == 0 { Ok(()) } else { Err(CudaError { call, code, name: self.name_of(code) }) }
    }

    fn name_of(&self, code: c_uint) -> &'static str {
        // A poller meets this one all the time.
        if code == CudaError::NOT_READY {
            return "CUDA_ERROR_NOT_READY";
        }
        let mut name: *const c_char = ptr::null();
        // SAFETY: the function writes one pointer.
        let answer = unsafe { (self.error_name)(code, &raw mut name) };
        if answer != 0 || name.is_null() {
            return "an error without a name";
        }
        // SAFETY: the driver's names are constant strings in a library that is never unloaded.
        unsafe { CStr::from_ptr(name) }.to_str().unwrap_or("an error without a name")
    }
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Api(CUDA driver)")
    }
}
