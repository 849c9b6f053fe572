//! Protection domains and registered memory.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use nobounce_memory::gpu::{GpuMemory, GpuOptions};
use nobounce_memory::path::{Mechanism, Path, Paths};
use nobounce_protocol::qp::Access;
use nobounce_verbs as verbs;

use super::cq::Cq;
use super::device::Device;
use super::error::{CreateError, RegisterError, last};
use super::gpu;
use super::qp::Qp;
use super::refusal::Refusal;
use super::stage::Shadow;
use crate::work::QpLimits;

pub(crate) struct PdInner {
    pub(crate) device: Device,
    pub(crate) raw: NonNull<verbs::Pd>,
}

// SAFETY: the functions of libibverbs may be called from any thread, on any object.
unsafe impl Send for PdInner {}
// SAFETY: as above.
unsafe impl Sync for PdInner {}

impl Drop for PdInner {
    fn drop(&mut self) {
        if self.device.is_forked() {
            return; // the parent's
        }
        // SAFETY: made by `alloc`; regions and queue pairs in it held us and are gone.
        unsafe { (self.device.inner.context.library.api.dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// A protection domain. Clones share it.
#[derive(Clone)]
pub struct Pd {
    pub(crate) inner: Arc<PdInner>,
}

impl fmt::Debug for Pd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pd({:?})", self.inner.device)
    }
}

impl Pd {
    pub(crate) fn alloc(device: &Device) -> Result<Self, CreateError> {
        device.check_process()?;
        // SAFETY: an open device.
        let raw = unsafe { (device.inner.context.library.api.alloc_pd)(device.inner.context.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| device.refused("ibv_alloc_pd"))?;
        Ok(Self { inner: Arc::new(PdInner { device: device.clone(), raw }) })
    }

    /// The device it is of.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Registers host memory.
    ///
    /// # Safety
    /// Until the region is dropped, the device and peers read and, as `access` allows, write the
    /// memory: no Rust reference to it may be live meanwhile, and it must stay mapped.
    ///
    /// # Errors
    /// The device refused: not mapped, too much for the limit on locked memory, ...
    pub unsafe fn register(&self, base: *mut u8, len: usize, access: Access) -> Result<Mr, RegisterError> {
        self.check_process()?;
        let paths = Paths::both(Path::Direct(Mechanism::Cpu));
        let addr = base.expose_provenance() as u64;
        let raw = self
            .register_range(base.cast(), len, access)
            .map_err(|source| self.refused(addr, len, source))?;
        Ok(self.region(raw, addr, len, paths, None, None))
    }

    /// Registers memory that CUDA knows, by the first method that works: dma-buf, peer memory, or
    /// staging in host memory.
    ///
    /// # Safety
    /// As for [`register`](Self::register); GPU memory must not be freed before the region is
    /// dropped.
    ///
    /// # Errors
    /// It is no GPU memory; or a direct path is required, and there is none.
    pub unsafe fn register_gpu(
        &self,
        addr: u64,
        len: usize,
        access: Access,
        options: &GpuOptions,
    ) -> Result<Mr, RegisterError> {
        self.check_process()?;
        gpu::register(self, addr, len, access, options)
    }

    fn check_process(&self) -> Result<(), RegisterError> {
        let device = self.device();
        if device.is_forked() { Err(RegisterError::Forked(device.name().to_owned())) } else { Ok(()) }
    }

    /// A queue pair of a reliable connection.
    ///
    /// # Errors
    /// The device refused.
    pub fn create_qp(&self, send_cq: &Cq, recv_cq: &Cq, limits: QpLimits) -> Result<Qp, CreateError> {
        Qp::create(self, send_cq, recv_cq, limits)
    }

    /// `ibv_reg_mr`, or with relaxed ordering, where that is requested and offered,
    /// `ibv_reg_mr_iova2`.
    pub(crate) fn register_range(
        &self,
        base: *mut c_void,
        len: usize,
        access: Access,
    ) -> Result<NonNull<verbs::Mr>, std::io::Error> {
        let api = &self.inner.device.inner.context.library.api;
        let flags = self.flags(access);
        if self.inner.device.inner.options.relaxed_ordering
            && let Some(register) = api.reg_mr_iova2
        {
            let (iova, relaxed) = (base.addr() as u64, flags | verbs::IBV_ACCESS_RELAXED_ORDERING);
            // SAFETY: the caller of `register` promises what the device may do with the memory.
            let raw = unsafe { register(self.inner.raw.as_ptr(), base, len, iova, relaxed) };
            if let Some(raw) = NonNull::new(raw) {
                return Ok(raw);
            }
        }
        // SAFETY: as above.
        let raw = unsafe { (api.reg_mr)(self.inner.raw.as_ptr(), base, len, flags.cast_signed()) };
        NonNull::new(raw).ok_or_else(last)
    }

    /// `ibv_reg_dmabuf_mr`; nothing where libibverbs does not have it.
    pub(crate) fn register_dmabuf(
        &self,
        offset: u64,
        len: usize,
        iova: u64,
        fd: c_int,
        access: Access,
    ) -> Option<Result<NonNull<verbs::Mr>, std::io::Error>> {
        let register = self.inner.device.inner.context.library.api.reg_dmabuf_mr?;
        let flags = self.flags(access);
        let relaxed = self.inner.device.inner.options.relaxed_ordering;
        let tries = [flags | verbs::IBV_ACCESS_RELAXED_ORDERING, flags];
        let mut told = None;
        for flags in tries.into_iter().skip(usize::from(!relaxed)) {
            // SAFETY: the caller of `register_gpu` promises what the device may do with the memory
            // behind the descriptor.
            let raw =
                unsafe { register(self.inner.raw.as_ptr(), offset, len, iova, fd, flags.cast_signed()) };
            match NonNull::new(raw) {
                Some(raw) => return Some(Ok(raw)),
                None => told = Some(last()),
            }
        }
        told.map(Err)
    }

    /// The subset of these access rights that the device supports. Memory windows are not bound on
    /// hardware devices, and FLUSH is not posted to them.
    pub(crate) fn flags(&self, access: Access) -> u32 {
        let mut offered = access - Access::BIND_WINDOW - Access::FLUSH_GLOBAL;
        if !self.inner.device.has_atomics() {
            offered -= Access::REMOTE_ATOMIC;
        }
        offered.bits()
    }

    pub(crate) fn refused(&self, addr: u64, len: usize, os: std::io::Error) -> RegisterError {
        RegisterError::Refused { device: self.inner.device.name().to_owned(), addr, len, os }
    }

    pub(crate) fn region(
        &self,
        raw: NonNull<verbs::Mr>,
        addr: u64,
        len: usize,
        paths: Paths,
        gpu: Option<Arc<GpuMemory>>,
        shadow: Option<Arc<Shadow>>,
    ) -> Mr {
        // SAFETY: a live region of libibverbs', whose keys never change.
        let (lkey, rkey) = unsafe { (raw.as_ref().lkey, raw.as_ref().rkey) };
        if let Some(shadow) = &shadow {
            self.inner.device.inner.staging.add(lkey, shadow);
        }
        let handle = Handle { raw, lkey, staged: shadow.is_some(), pd: self.clone() };
        Mr { lkey, rkey, addr, len, paths, refusals: Vec::new(), handle, gpu, shadow }
    }
}

/// The device's own object. Dropping it ends all access.
struct Handle {
    raw: NonNull<verbs::Mr>,
    lkey: u32,
    staged: bool,
    pd: Pd,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.pd.inner.device.is_forked() {
            return; // the parent's
        }
        if self.staged {
            self.pd.inner.device.inner.staging.remove(self.lkey);
        }
        // SAFETY: registered by us, and not used again.
        unsafe { (self.pd.inner.device.inner.context.library.api.dereg_mr)(self.raw.as_ptr()) };
    }
}

// SAFETY: the functions of libibverbs may be called from any thread, on any object.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// Registered memory. Dropping it ends all access.
pub struct Mr {
    lkey: u32,
    rkey: u32,
    addr: u64,
    len: usize,
    paths: Paths,
    refusals: Vec<Refusal>,
    // Fields drop in this order: deregistration before the descriptor, the window and the shadow.
    handle: Handle,
    gpu: Option<Arc<GpuMemory>>,
    shadow: Option<Arc<Shadow>>,
}

impl fmt::Debug for Mr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.handle.pd.inner.device.name();
        write!(f, "Mr({} bytes at {:#x} on {name}: {}", self.len, self.addr, self.paths)?;
        // The path of staged memory has them.
        if self.paths.are_direct() {
            self.refusals.iter().try_for_each(|refusal| write!(f, "; not by {refusal}"))?;
        }
        f.write_str(")")
    }
}

impl Mr {
    pub(crate) fn with_refusals(self, refusals: Vec<Refusal>) -> Self {
        Self { refusals, ..self }
    }

    /// The key of local requests.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The key of peers.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// The address of its first byte, here or on the GPU.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its data path.
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Why the methods before the one in use, or all direct methods, were refused.
    pub fn refusals(&self) -> &[Refusal] {
        &self.refusals
    }

    /// Whether requests of that queue pair may name it: it is in the same protection domain.
    pub fn is_known_to(&self, qp: &Qp) -> bool {
        Arc::ptr_eq(&self.handle.pd.inner, &qp.pd().inner)
    }

    /// Whether it is staged through a shadow in host memory: peers may not use it then.
    pub fn is_staged(&self) -> bool {
        self.shadow.is_some()
    }

    /// The GPU memory behind it, if it is.
    pub fn gpu_memory(&self) -> Option<&Arc<GpuMemory>> {
        self.gpu.as_ref()
    }
}

/// A pointer for C of an address that CUDA or we got elsewhere.
pub(crate) fn pointer(addr: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(usize::try_from(addr).unwrap_or(0))
}
