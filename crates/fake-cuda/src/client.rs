//! The client: loads the stand-in's shared library in a test, sets its knobs, and calls it as a
//! CUDA program does.
//!
//! A test links this module and loads the library beside it. The library's copy of the state
//! counts, so every call here goes through `dlsym`. The names of methods and the codes they return
//! are CUDA's.

use std::env;
use std::ffi::{CStr, CString, c_void};
use std::mem;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::OnceLock;

/// The variable by which the driver to load is named.
pub const VARIABLE: &str = "NOBOUNCE_CUDA";

/// Capture modes.
pub const GLOBAL: u32 = 0;
/// See [`GLOBAL`].
pub const THREAD_LOCAL: u32 = 1;
/// See [`GLOBAL`].
pub const RELAXED: u32 = 2;

/// The stand-in, loaded into this process.
#[derive(Debug)]
pub struct StandIn {
    library: *mut c_void,
}

// SAFETY: the handle of a library that is never unloaded; its functions may be called from any
// thread.
unsafe impl Send for StandIn {}
// SAFETY: as above.
unsafe impl Sync for StandIn {}

macro_rules! functions {
    ($($(#[$doc:meta])* $method:ident = $symbol:literal ($($arg:ident: $type:ty),*) $(-> $answer:ty)?;)*) => {
        impl StandIn {$(
            $(#[$doc])*
            #[allow(clippy::must_use_candidate, reason = "many codes do not matter to a test")]
            pub fn $method(&self, $($arg: $type),*) $(-> $answer)? {
                // SAFETY: the library is ours, built with this module, and has the function with
                // this signature; references are pointers to C.
                let function: extern "C" fn($($type),*) $(-> $answer)? = unsafe { mem::transmute(self.find($symbol)) };
                function($($arg),*)
            }
        )*}
    };
}

functions! {
    /// Whether dma-bufs refuse to be mapped.
    refuse_dmabuf_mmap = "fake_cuda_refuse_dmabuf_mmap" (on: i32);
    /// Whether dma-bufs export other memory than requested.
    export_wrong_memory = "fake_cuda_export_wrong_memory" (on: i32);
    /// Whether this process may import its own IPC handles.
    allow_self_import = "fake_cuda_allow_self_import" (on: i32);
    /// Whether the process ends when a handle of a destroyed context is used.
    crash_on_dead_handles = "fake_cuda_crash_on_dead_handles" (on: i32);
    /// Whether VMM memory survives a reset of its device.
    vmm_survives_reset = "fake_cuda_vmm_survives_reset" (on: i32);
    /// Reports the name of each called function, on the calling thread.
    watch_calls = "fake_cuda_watch_calls" (watcher: extern "C" fn(*const libc::c_char));
    /// Duration of each copy.
    set_copy_delay_us = "fake_cuda_set_copy_delay_us" (delay: u32);
    /// Blocks calls that start copies (1), or releases them (0).
    hold_copies = "fake_cuda_hold_copies" (on: i32);
    /// Blocks all calls (1), or releases them (0).
    hold_calls = "fake_cuda_hold_calls" (on: i32);
    /// Number of devices.
    set_device_count = "fake_cuda_set_device_count" (count: i32);
    /// Sets a device attribute.
    set_attribute = "fake_cuda_set_attribute" (number: i32, value: i32);
    /// Lets streams created from now on share one queue with work that waits for the default stream
    /// (1), or not (0).
    few_queues = "fake_cuda_few_queues" (on: i32);
    /// Starts (1) or ends (0) a kernel that spins.
    spin = "fake_cuda_spin" (on: i32);
    /// Cancels the pending failures of [`fail_next`](Self::fail_next).
    forget_failures = "fake_cuda_forget_failures" ();
    /// Number of pending failures of [`fail_next`](Self::fail_next).
    failures = "fake_cuda_failures" () -> u64;
    /// Resets every device.
    device_reset = "fake_cuda_device_reset" ();

    /// `cuInit`.
    init = "cuInit" (flags: u32) -> u32;
    /// `cuDevicePrimaryCtxRetain`.
    retain_primary = "cuDevicePrimaryCtxRetain" (context: &mut u64, device: i32) -> u32;
    /// `cuDevicePrimaryCtxRelease_v2`.
    release_primary = "cuDevicePrimaryCtxRelease_v2" (device: i32) -> u32;
    /// `cuCtxPushCurrent_v2`.
    push = "cuCtxPushCurrent_v2" (context: u64) -> u32;
    /// `cuCtxPopCurrent_v2`.
    pop = "cuCtxPopCurrent_v2" (context: &mut u64) -> u32;
    /// `cuCtxGetCurrent`.
    current = "cuCtxGetCurrent" (context: &mut u64) -> u32;
    /// `cuCtxCreate_v2`.
    create_context = "cuCtxCreate_v2" (context: &mut u64, flags: u32, device: i32) -> u32;
    /// `cuCtxDestroy_v2`.
    destroy_context = "cuCtxDestroy_v2" (context: u64) -> u32;
    /// `cuCtxGetId`.
    context_id = "cuCtxGetId" (context: u64, id: &mut u64) -> u32;
    /// `cuThreadExchangeStreamCaptureMode`.
    exchange_mode = "cuThreadExchangeStreamCaptureMode" (mode: &mut u32) -> u32;
    /// `cuPointerGetAttribute` for attributes of 8 bytes.
    attribute = "cuPointerGetAttribute" (value: &mut u64, number: u32, pointer: u64) -> u32;
    /// `cuMemGetAddressRange_v2`.
    address_range = "cuMemGetAddressRange_v2" (base: &mut u64, len: &mut usize, pointer: u64) -> u32;
    /// `cuMemAlloc_v2`.
    alloc = "cuMemAlloc_v2" (pointer: &mut u64, len: usize) -> u32;
    /// `cuMemFree_v2`.
    free = "cuMemFree_v2" (pointer: u64) -> u32;
    /// `cuMemAllocAsync`.
    alloc_async = "cuMemAllocAsync" (pointer: &mut u64, len: usize, stream: u64) -> u32;
    /// `cuMemFreeAsync`.
    free_async = "cuMemFreeAsync" (pointer: u64, stream: u64) -> u32;
    /// `cuMemAllocManaged`.
    alloc_managed = "cuMemAllocManaged" (pointer: &mut u64, len: usize, flags: u32) -> u32;
    /// `cuMemHostAlloc`.
    alloc_host = "cuMemHostAlloc" (pointer: &mut u64, len: usize, flags: u32) -> u32;
    /// `cuMemFreeHost`.
    free_host = "cuMemFreeHost" (pointer: u64) -> u32;
    /// `cuMemAddressReserve`.
    reserve = "cuMemAddressReserve" (pointer: &mut u64, len: usize, align: usize, hint: u64, flags: u64) -> u32;
    /// `cuMemAddressFree`.
    unreserve = "cuMemAddressFree" (pointer: u64, len: usize) -> u32;
    /// `cuMemCreate`.
    create = "cuMemCreate" (handle: &mut u64, len: usize, prop: &[u32; 8], flags: u64) -> u32;
    /// `cuMemRelease`.
    release = "cuMemRelease" (handle: u64) -> u32;
    /// `cuMemMap`.
    map = "cuMemMap" (pointer: u64, len: usize, offset: usize, handle: u64, flags: u64) -> u32;
    /// `cuMemUnmap`.
    unmap = "cuMemUnmap" (pointer: u64, len: usize) -> u32;
    /// `cuMemSetAccess`.
    set_access = "cuMemSetAccess" (pointer: u64, len: usize, access: &[u32; 3], count: usize) -> u32;
    /// `cuMemRetainAllocationHandle`.
    retain_handle = "cuMemRetainAllocationHandle" (handle: &mut u64, pointer: u64) -> u32;
    /// `cuMemExportToShareableHandle`.
    export_handle = "cuMemExportToShareableHandle" (fd: &mut i32, handle: u64, kind: u32, flags: u64) -> u32;
    /// `cuMemGetHandleForAddressRange`.
    export_range = "cuMemGetHandleForAddressRange" (fd: &mut i32, pointer: u64, len: usize, kind: u32, flags: u64) -> u32;
    /// `cuIpcGetMemHandle`.
    ipc_handle = "cuIpcGetMemHandle" (handle: &mut IpcHandle, pointer: u64) -> u32;
    /// `cuIpcOpenMemHandle_v2`.
    ipc_open = "cuIpcOpenMemHandle_v2" (pointer: &mut u64, handle: IpcHandle, flags: u32) -> u32;
    /// `cuIpcCloseMemHandle`.
    ipc_close = "cuIpcCloseMemHandle" (pointer: u64) -> u32;
    /// `cuStreamCreate`.
    create_stream = "cuStreamCreate" (stream: &mut u64, flags: u32) -> u32;
    /// `cuStreamDestroy_v2`.
    destroy_stream = "cuStreamDestroy_v2" (stream: u64) -> u32;
    /// `cuStreamQuery`.
    query_stream = "cuStreamQuery" (stream: u64) -> u32;
    /// `cuStreamSynchronize`.
    synchronize_stream = "cuStreamSynchronize" (stream: u64) -> u32;
    /// `cuStreamWriteValue32_v2`.
    write_value = "cuStreamWriteValue32_v2" (stream: u64, pointer: u64, value: u32, flags: u32) -> u32;
    /// `cuStreamBeginCapture_v2`.
    begin_capture = "cuStreamBeginCapture_v2" (stream: u64, mode: u32) -> u32;
    /// `cuStreamEndCapture`.
    end_capture = "cuStreamEndCapture" (stream: u64, graph: &mut u64) -> u32;
    /// `cuEventCreate`.
    create_event = "cuEventCreate" (event: &mut u64, flags: u32) -> u32;
    /// `cuEventDestroy_v2`.
    destroy_event = "cuEventDestroy_v2" (event: u64) -> u32;
    /// `cuEventRecord`.
    record = "cuEventRecord" (event: u64, stream: u64) -> u32;
    /// `cuEventQuery`.
    query_event = "cuEventQuery" (event: u64) -> u32;
    /// `cuMemcpyDtoHAsync_v2`; the host side as an address, for the copy goes on after the call.
    read_async = "cuMemcpyDtoHAsync_v2" (to: u64, from: u64, len: usize, stream: u64) -> u32;
    /// `cuMemcpyHtoDAsync_v2`; as above.
    write_async = "cuMemcpyHtoDAsync_v2" (to: u64, from: u64, len: usize, stream: u64) -> u32;
    /// `cuMemcpyDtoH_v2`; as above.
    read_sync = "cuMemcpyDtoH_v2" (to: u64, from: u64, len: usize) -> u32;
}

/// A `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IpcHandle(pub [u32; 16]);

/// VMM memory as a program makes it: reserved, backed by handles, mapped and opened to the device.
#[derive(Debug)]
pub struct Vmm {
    /// First address.
    pub addr: u64,
    /// Length of all mappings together.
    pub len: usize,
    each: usize,
}

impl StandIn {
    /// Loads the library that was built with this test, and sets [`VARIABLE`] so that the code
    /// under test loads it too. Call it before that code first loads its driver.
    ///
    /// # Panics
    /// Where the library is not beside the test's executable.
    #[must_use]
    pub fn load() -> &'static Self {
        static LOADED: OnceLock<StandIn> = OnceLock::new();
        LOADED.get_or_init(|| {
            let path = Self::path();
            // SAFETY: done once, before the code under test runs in this process; Rust's own
            // readers take std's lock.
            unsafe { env::set_var(VARIABLE, &path) };
            let name = CString::new(path.as_os_str().as_bytes()).expect("a path has no zero byte");
            // SAFETY: a library of ours, whose constructors do nothing.
            let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            assert!(!library.is_null(), "{} cannot be loaded", path.display());
            Self { library }
        })
    }

    /// Where the library lies: beside the executable, where cargo puts it.
    ///
    /// # Panics
    /// Where it is not there.
    #[must_use]
    pub fn path() -> PathBuf {
        let executable = env::current_exe().expect("the path of this test");
        executable
            .ancestors()
            .skip(1)
            .take(2)
            .flat_map(|folder| [folder.join("libfake_cuda.so"), folder.join("deps/libfake_cuda.so")])
            .find(|path| path.is_file())
            .expect("libfake_cuda.so beside the test: a dev-dependency on nobounce-fake-cuda builds it")
    }

    /// Loads it, initialises it, and makes the first device's primary context current on this
    /// thread, as a CUDA program does.
    ///
    /// # Panics
    /// Where that fails.
    #[must_use]
    pub fn program() -> &'static Self {
        let cuda = Self::load();
        assert_eq!(cuda.init(0), 0);
        let mut context = 0;
        assert_eq!(cuda.retain_primary(&mut context, 0), 0);
        assert_eq!(cuda.push(context), 0);
        cuda
    }

    /// The address of a function.
    fn find(&self, symbol: &str) -> *mut c_void {
        let name = CString::new(symbol).expect("a name");
        // SAFETY: a library that is never unloaded, and a string that ends in a zero byte.
        let found = unsafe { libc::dlsym(self.library, name.as_ptr()) };
        assert!(!found.is_null(), "the stand-in has no {symbol}");
        found
    }

    /// How many `what` there are: contexts, allocations, handles, reservations, streams, events,
    /// host, fds, captures.
    ///
    /// # Panics
    /// For any other word.
    #[must_use]
    pub fn live(&self, what: &CStr) -> i64 {
        // SAFETY: as in `functions!`.
        let live: extern "C" fn(*const libc::c_char) -> i64 =
            unsafe { mem::transmute(self.find("fake_cuda_live")) };
        let count = live(what.as_ptr());
        assert!(count >= 0, "no such thing as {what:?}");
        count
    }

    /// All counts of [`live`](Self::live), to be compared before and after.
    #[must_use]
    pub fn live_all(&self) -> Vec<(&'static CStr, i64)> {
        [c"contexts", c"allocations", c"handles", c"reservations", c"streams", c"events", c"host", c"fds"]
            .into_iter()
            .map(|what| (what, self.live(what)))
            .collect()
    }

    /// Call count of a function.
    #[must_use]
    pub fn calls(&self, name: &CStr) -> u64 {
        // SAFETY: as in `functions!`.
        let calls: extern "C" fn(*const libc::c_char) -> u64 =
            unsafe { mem::transmute(self.find("fake_cuda_calls")) };
        calls(name.as_ptr())
    }

    /// Makes the next call of a function fail.
    pub fn fail_next(&self, name: &CStr, code: u32) {
        // SAFETY: as in `functions!`.
        let fail: extern "C" fn(*const libc::c_char, u32) =
            unsafe { mem::transmute(self.find("fake_cuda_fail_next")) };
        fail(name.as_ptr(), code);
    }

    /// Reads device memory as a kernel would: under no rule, never waiting.
    ///
    /// # Panics
    /// Where it is not memory.
    #[must_use]
    pub fn peek(&self, from: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: as in `functions!`.
        let peek: extern "C" fn(u64, *mut u8, usize) -> u32 =
            unsafe { mem::transmute(self.find("fake_cuda_peek")) };
        assert_eq!(peek(from, bytes.as_mut_ptr(), len), 0, "{from:#x} is not device memory");
        bytes
    }

    /// Whether an address is device memory.
    #[must_use]
    pub fn holds(&self, addr: u64) -> bool {
        let mut byte = 0_u8;
        // SAFETY: as in `functions!`.
        let peek: extern "C" fn(u64, *mut u8, usize) -> u32 =
            unsafe { mem::transmute(self.find("fake_cuda_peek")) };
        peek(addr, &raw mut byte, 1) == 0
    }

    /// Writes device memory as a kernel would.
    ///
    /// # Panics
    /// Where it is not memory.
    pub fn poke(&self, to: u64, bytes: &[u8]) {
        // SAFETY: as in `functions!`.
        let poke: extern "C" fn(u64, *const u8, usize) -> u32 =
            unsafe { mem::transmute(self.find("fake_cuda_poke")) };
        assert_eq!(poke(to, bytes.as_ptr(), bytes.len()), 0, "{to:#x} is not device memory");
    }

    /// `cuMemAlloc` that must succeed.
    ///
    /// # Panics
    /// Where it does not.
    #[must_use]
    pub fn malloc(&self, len: usize) -> u64 {
        let mut pointer = 0;
        assert_eq!(self.alloc(&mut pointer, len), 0);
        pointer
    }

    /// Creates a stream.
    ///
    /// # Panics
    /// Where it does not.
    #[must_use]
    pub fn stream(&self, flags: u32) -> u64 {
        let mut stream = 0;
        assert_eq!(self.create_stream(&mut stream, flags), 0);
        stream
    }

    /// VMM memory of `handles` consecutive mappings, each of `each` bytes (a multiple of 2 MiB).
    /// The handles are released at once, as expandable segments do; the mappings keep them.
    ///
    /// # Panics
    /// Where the stand-in refuses.
    #[must_use]
    pub fn vmm(&self, handles: usize, each: usize, exportable: bool) -> Vmm {
        let (mut addr, len) = (0, handles * each);
        assert_eq!(self.reserve(&mut addr, len, 0, 0, 0), 0);
        // Pinned memory of device 0, other devices welcome (the second byte of the seventh word).
        let prop = [1, u32::from(exportable), 1, 0, 0, 0, 1 << 8, 0];
        for at in (0..len).step_by(each) {
            let mut handle = 0;
            assert_eq!(self.create(&mut handle, each, &prop, 0), 0);
            assert_eq!(self.map(addr + at as u64, each, 0, handle, 0), 0);
            assert_eq!(self.release(handle), 0);
        }
        assert_eq!(self.set_access(addr, len, &[1, 0, 3], 1), 0);
        Vmm { addr, len, each }
    }

    /// Unmaps and frees what [`vmm`](Self::vmm) made.
    ///
    /// # Panics
    /// Where the stand-in refuses.
    #[allow(clippy::needless_pass_by_value, reason = "it is gone afterwards")]
    pub fn free_vmm(&self, memory: Vmm) {
        for at in (0..memory.len).step_by(memory.each) {
            assert_eq!(self.unmap(memory.addr + at as u64, memory.each), 0);
        }
        assert_eq!(self.unreserve(memory.addr, memory.len), 0);
    }
}
