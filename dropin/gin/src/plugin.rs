//! The functions that NCCL calls.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use nobounce::{Access, Device, GpuOptions};
use nobounce_dropin::entry::{Errno, guarded};
use nobounce_memory::gpu::{Driver, Gpu};

use crate::abi::*;
use crate::context::{Contexts, control_memory};
use crate::error::GinError;
use crate::group::{Group, Listener, MemoryKind};
use crate::log;
use crate::nccl;

const NAME: *const c_char = c"nobounce".as_ptr();
/// 100 Gb/s. NCCL chooses between adapters by it, and this plugin has one.
const SPEED: c_int = 100_000;
const MAX_COMMS: c_int = 1 << 16;
/// NCCL 2.30.5. Earlier releases load plugins by the same name, and end with an error at this type.
const FIRST_GPI: c_int = 23_005;

/// What a communicator has of the plugin.
struct Instance {
    device: Arc<Device>,
    gpu: Arc<Gpu>,
}

/// The device of all communicators of this process, while there are any.
static DEVICE: Mutex<Weak<Device>> = Mutex::new(Weak::new());

fn answer(call: impl FnOnce() -> Result<(), GinError>) -> NcclResult {
    let error = match guarded(|| Ok(call())) {
        Ok(Ok(())) => return NcclResult::SUCCESS,
        Ok(Err(error)) => error,
        Err(Errno(number)) => GinError::Panic(number),
    };
    log::warn(&error.to_string());
    error.code()
}

/// # Safety
/// Null, or one of ours that was not freed.
unsafe fn given<'a, T>(pointer: *mut c_void, what: &'static str) -> Result<&'a T, GinError> {
    // SAFETY: the caller's promise.
    unsafe { pointer.cast::<T>().as_ref() }.ok_or(GinError::Argument { what })
}

/// # Safety
/// Null, or a place for the result.
unsafe fn store<T>(place: *mut T, value: T) -> Result<(), GinError> {
    if place.is_null() {
        return Err(GinError::Argument { what: "no place for a result" });
    }
    // SAFETY: the caller's promise.
    unsafe { place.write(value) };
    Ok(())
}

/// # Safety
/// Null, or a box of this type that is not used again.
unsafe fn free<T>(pointer: *mut c_void) {
    if !pointer.is_null() {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(pointer.cast::<T>()) });
    }
}

fn current_gpu() -> Result<Arc<Gpu>, GinError> {
    let mut ordinal = -1;
    // SAFETY: the call writes one int.
    Driver::get()?.relaxed(|api| unsafe { api.ctx_device(&raw mut ordinal) })?;
    Gpu::by_ordinal(ordinal)?.ok_or(GinError::NoGpu)
}

fn open(gpu: &Arc<Gpu>) -> Result<Arc<Device>, GinError> {
    let mut opened = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(device) = opened.upgrade() {
        return Ok(device);
    }
    let device = Arc::new(Device::open_near_gpu_polled(gpu.ordinal())?);
    *opened = Arc::downgrade(&device);
    Ok(device)
}

/// Signals are words of GPU memory that atomics of peers change and the CPU stores.
fn check_reachable(gpu: &Arc<Gpu>, device: &Device) -> Result<(), GinError> {
    const LEN: usize = 4096;
    let (_memory, buffer) = control_memory(gpu, LEN)?;
    if device.nic().hard().is_some_and(|hard| !hard.has_atomics()) {
        return Err(GinError::Adapter { reason: "it has no atomics".to_owned() });
    }
    // SAFETY: the region is dropped before the buffer, which has so many bytes.
    let region =
        unsafe { device.register_gpu_raw(buffer.addr(), LEN, Access::all(), &GpuOptions::default()) };
    let region = region.map_err(|source| GinError::Register { len: LEN, source })?;
    match region.is_closed() {
        true => Err(GinError::Adapter { reason: region.paths().to_string() }),
        false => Ok(()),
    }
}

unsafe extern "C" fn init(context: *mut *mut c_void, _comm: u64, logger: Option<Logger>) -> NcclResult {
    log::set(logger);
    // What is refused here NCCL's own proxy serves: later NCCL relies on the plugin.
    answer(|| {
        if let Some(version) = logger.and_then(nccl::version).filter(|version| *version < FIRST_GPI) {
            return Err(GinError::Version { version });
        }
        let gpu = current_gpu()?;
        let device = open(&gpu)?;
        check_reachable(&gpu, &device)?;
        let instance = Box::into_raw(Box::new(Instance { device, gpu }));
        // SAFETY: NCCL's place.
        unsafe { store(context, instance.cast()) }
    })
}

unsafe extern "C" fn devices(count: *mut c_int) -> NcclResult {
    // SAFETY: NCCL's place.
    answer(|| unsafe { store(count, 1) })
}

unsafe extern "C" fn gin_properties(properties: *mut GinProperties) -> NcclResult {
    // One queue pair to each rank carries out everything in order, and adds to words anywhere in
    // windows.
    let ours = GinProperties { strong_signals: true, va_signals: true };
    // SAFETY: NCCL's place.
    answer(|| unsafe { store(properties, ours) })
}

unsafe extern "C" fn properties(_device: c_int, properties: *mut NetProperties) -> NcclResult {
    answer(|| {
        let ours = NetProperties {
            // NCCL merges adapters of one name, and this one must not change what it knows of nb0.
            name: c"nobounce_gin".as_ptr(),
            pci_path: ptr::null(),
            guid: 0,
            ptr_support: PTR_HOST | PTR_CUDA,
            reg_is_global: 0,
            force_flush: 0,
            speed: SPEED,
            port: 1,
            latency: 0.0,
            max_comms: MAX_COMMS,
            max_recvs: 1,
            net_device_type: GPI,
            net_device_version: GPI_VERSION,
            virtual_devices: VirtualDevices { count: 1, devices: [0; 8] },
            max_p2p_bytes: 1 << 30,
            max_coll_bytes: 1 << 30,
            max_multi_request_size: 1,
            rail_id: NO_ID,
            plane_id: NO_ID,
        };
        // SAFETY: NCCL's place.
        unsafe { store(properties, ours) }
    })
}

unsafe extern "C" fn listen(
    context: *mut c_void,
    _device: c_int,
    handle: *mut c_void,
    listener: *mut *mut c_void,
) -> NcclResult {
    answer(|| {
        // SAFETY: what `init` made.
        let instance: &Instance = unsafe { given(context, "no context") }?;
        let ours = Listener::open(&instance.device)?;
        // SAFETY: NCCL's places.
        unsafe {
            store(handle.cast::<[u8; HANDLE_BYTES]>(), ours.handle())?;
            store(listener, Box::into_raw(Box::new(ours)).cast())
        }
    })
}

/// A group, and the GPU of its rank.
struct Member {
    group: Arc<Group>,
    gpu: Arc<Gpu>,
}

unsafe extern "C" fn connect(
    context: *mut c_void,
    handles: *const *const c_void,
    ranks: c_int,
    rank: c_int,
    listener: *mut c_void,
    member: *mut *mut c_void,
) -> NcclResult {
    answer(|| {
        // SAFETY: what `init` and `listen` made; NCCL's list has a handle of each rank.
        let (instance, listener, first) = unsafe {
            let instance: &Instance = given(context, "no context")?;
            let listener: &Listener = given(listener, "no listener")?;
            let first = handles.as_ref().ok_or(GinError::Argument { what: "no handles" })?;
            (instance, listener, given::<[u8; HANDLE_BYTES]>(first.cast_mut(), "no handle")?)
        };
        let place = usize::try_from(rank).ok().zip(usize::try_from(ranks).ok());
        let place = place.ok_or(GinError::Argument { what: "a negative rank" })?;
        let group = Arc::new(Group::connect(instance.device.clone(), listener, first, place)?);
        let ours = Box::into_raw(Box::new(Member { group, gpu: instance.gpu.clone() }));
        // SAFETY: NCCL's place.
        unsafe { store(member, ours.cast()) }
    })
}

fn contexts(
    member: *mut c_void,
    config: &Config,
    context: *mut *mut c_void,
    handle: *mut *mut DeviceHandle,
) -> Result<(), GinError> {
    // SAFETY: what `connect` made.
    let member: &Member = unsafe { given(member, "no communicator") }?;
    let mut ours = Box::new(Contexts::create(&member.group, &member.gpu, config)?);
    let theirs = ours.handle();
    // SAFETY: NCCL's places. What the handle points to is on the heap.
    unsafe {
        store(handle, theirs)?;
        store(context, Box::into_raw(ours).cast())
    }
}

unsafe extern "C" fn create_contexts(
    member: *mut c_void,
    config: *const Config14,
    context: *mut *mut c_void,
    handle: *mut *mut DeviceHandle,
) -> NcclResult {
    answer(|| {
        // SAFETY: NCCL's settings.
        let given = unsafe { config.as_ref() }.ok_or(GinError::Argument { what: "no settings" })?;
        if given.backend_version == 0 {
            return Err(GinError::Kernels);
        }
        contexts(member, &given.config, context, handle)
    })
}

unsafe extern "C" fn create_contexts_13(
    member: *mut c_void,
    config: *const Config,
    context: *mut *mut c_void,
    handle: *mut *mut DeviceHandle,
) -> NcclResult {
    answer(|| {
        // SAFETY: NCCL's settings.
        let config = unsafe { config.as_ref() }.ok_or(GinError::Argument { what: "no settings" })?;
        contexts(member, config, context, handle)
    })
}

unsafe extern "C" fn register(
    member: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    _flags: u64,
    registration: *mut *mut c_void,
    window: *mut *mut c_void,
) -> NcclResult {
    answer(|| {
        // SAFETY: what `connect` made.
        let member: &Member = unsafe { given(member, "no communicator") }?;
        let kind = match kind {
            PTR_CUDA => MemoryKind::Gpu,
            PTR_HOST => MemoryKind::Host,
            _ => return Err(GinError::Argument { what: "an unknown type of memory" }),
        };
        // SAFETY: NCCL keeps the memory until it deregisters it.
        let handle = unsafe { member.group.register(data.expose_provenance() as u64, size, kind) }?;
        let handle = ptr::without_provenance_mut::<c_void>(handle.into());
        // SAFETY: NCCL's places.
        unsafe {
            store(registration, handle)?;
            store(window, handle)
        }
    })
}

unsafe extern "C" fn register_dma_buf(
    member: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    _offset: u64,
    _fd: c_int,
    flags: u64,
    registration: *mut *mut c_void,
    window: *mut *mut c_void,
) -> NcclResult {
    // The window finds the memory by its address.
    // SAFETY: the same promises.
    unsafe { register(member, data, size, kind, flags, registration, window) }
}

unsafe extern "C" fn deregister(member: *mut c_void, registration: *mut c_void) -> NcclResult {
    answer(|| {
        // SAFETY: what `connect` made.
        let member: &Member = unsafe { given(member, "no communicator") }?;
        let handle = u16::try_from(registration.addr());
        member.group.deregister(handle.map_err(|_| GinError::Argument { what: "an unknown registration" })?);
        Ok(())
    })
}

unsafe extern "C" fn destroy_contexts(context: *mut c_void) -> NcclResult {
    answer(|| {
        // SAFETY: what `create_contexts` made.
        unsafe { free::<Contexts>(context) };
        Ok(())
    })
}

unsafe extern "C" fn close_coll(member: *mut c_void) -> NcclResult {
    answer(|| {
        // SAFETY: what `connect` made.
        unsafe { free::<Member>(member) };
        Ok(())
    })
}

unsafe extern "C" fn close_listen(listener: *mut c_void) -> NcclResult {
    answer(|| {
        // SAFETY: what `listen` made.
        unsafe { free::<Listener>(listener) };
        Ok(())
    })
}

unsafe extern "C" fn progress(_context: *mut c_void) -> NcclResult {
    NcclResult::SUCCESS
}

unsafe extern "C" fn last_error(context: *mut c_void, has_error: *mut bool) -> NcclResult {
    answer(|| {
        // SAFETY: what `create_contexts` made.
        let contexts: &Contexts = unsafe { given(context, "no context") }?;
        let has_failed = contexts.has_failed();
        // SAFETY: NCCL's place.
        unsafe { store(has_error, has_failed) }
    })
}

unsafe extern "C" fn finalize(context: *mut c_void) -> NcclResult {
    answer(|| {
        // SAFETY: what `init` made.
        unsafe { free::<Instance>(context) };
        Ok(())
    })
}

/// What NCCL looks for.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclGinPlugin_v14: Gin14 = Gin14 {
    name: NAME,
    init,
    devices,
    gin_properties,
    properties,
    listen,
    connect,
    create_context: create_contexts,
    register,
    register_dma_buf,
    deregister,
    destroy_context: destroy_contexts,
    close_coll,
    close_listen,
    progress,
    last_error,
    finalize,
};

/// The same for NCCL 2.30.5.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclGinPlugin_v13: Gin13 = Gin13 {
    name: NAME,
    init,
    devices,
    properties,
    listen,
    connect,
    create_context: create_contexts_13,
    register,
    register_dma_buf,
    deregister,
    destroy_context: destroy_contexts,
    close_coll,
    close_listen,
    iput: ptr::null(),
    iput_signal: ptr::null(),
    iget: ptr::null(),
    iflush: ptr::null(),
    test: ptr::null(),
    progress,
    last_error,
    finalize,
};
