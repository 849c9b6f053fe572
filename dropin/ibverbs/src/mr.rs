//! Memory regions.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nobounce_memory::gpu::GpuOptions;
use nobounce_nic::soft;
use nobounce_nic::soft::{NewMemory, RegisterError, Rereg};
use nobounce_nic::work::Access;
use nobounce_verbs as verbs;

use crate::convert::access_of;
use crate::entry::{self, Errno};
use crate::live::{self, Kind, Object, Use};
use crate::log;
use crate::pd::PdObject;

#[repr(C)]
pub(crate) struct MrObject {
    raw: UnsafeCell<verbs::Mr>,
    inner: Mutex<Inner>,
}

struct Inner {
    /// None: imported, and the region is another object's.
    soft: Option<soft::Mr>,
    /// The domain it keeps.
    pd: Use,
    /// The device memory it keeps.
    _dm: Option<Box<dyn Any + Send>>,
}

impl MrObject {
    /// The key by which requests of the program's own name it.
    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: our own structure, in which this field never changes.
        unsafe { (*self.raw.get()).lkey }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its keys, if it has this handle and is a region of that domain.
    pub(crate) fn keys_of(&self, handle: u32, pd: &soft::Pd) -> Option<(u32, u32)> {
        let inner = self.inner();
        let soft = inner.soft.as_ref().filter(|mr| mr.lkey() == handle && mr.is_of(pd))?;
        Some((soft.lkey(), soft.rkey()))
    }

    /// A region whose memory another object keeps.
    pub(crate) fn imported(pd: *mut verbs::Pd, ours: &'static PdObject, (lkey, rkey): (u32, u32)) -> Self {
        let context = ours.context.raw();
        let raw = verbs::Mr { context, pd, addr: ptr::null_mut(), length: 0, handle: lkey, lkey, rkey };
        let inner = Inner { soft: None, pd: ours.users.join(), _dm: None };
        Self { raw: UnsafeCell::new(raw), inner: Mutex::new(inner) }
    }

    /// Its key, first address and length, if it is a region of that domain.
    fn range_in(&self, pd: &soft::Pd) -> Option<(u32, u64, u64)> {
        let inner = self.inner();
        let soft = inner.soft.as_ref().filter(|mr| mr.is_of(pd))?;
        Some((soft.lkey(), soft.addr(), soft.len()))
    }

    pub(crate) fn is_imported(&self) -> bool {
        self.inner().soft.is_none()
    }
}

impl Object for MrObject {
    type Raw = verbs::Mr;
    const KIND: Kind = Kind::Mr;
}

fn publish(
    pd: *mut verbs::Pd,
    ours: &'static PdObject,
    addr: *mut c_void,
    length: usize,
    mr: soft::Mr,
) -> *mut verbs::Mr {
    let (lkey, rkey) = (mr.lkey(), mr.rkey());
    let raw = verbs::Mr { context: ours.context.raw(), pd, addr, length, handle: lkey, lkey, rkey };
    let inner = Inner { soft: Some(mr), pd: ours.users.join(), _dm: None };
    MrObject { raw: UnsafeCell::new(raw), inner: Mutex::new(inner) }.publish()
}

/// A region of device memory, which it keeps.
pub(crate) fn publish_dm(
    pd: *mut verbs::Pd,
    ours: &'static PdObject,
    length: usize,
    mr: soft::Mr,
    dm: Box<dyn Any + Send>,
) -> *mut verbs::Mr {
    let raw = publish(pd, ours, ptr::null_mut(), length, mr);
    // SAFETY: just made.
    unsafe { MrObject::trust(raw) }.inner()._dm = Some(dm);
    raw
}

/// Whether the program uses CUDA: we do not load its driver for a program that does not.
fn cuda_is_loaded() -> bool {
    let is_loaded = |name: &CStr| {
        // SAFETY: a C string; NOLOAD only looks it up, and takes a reference that is never
        // released: the driver stays anyway.
        !unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) }.is_null()
    };
    let named = std::env::var_os("NOBOUNCE_CUDA").and_then(|path| CString::new(path.as_bytes()).ok());
    is_loaded(c"libcuda.so.1") || named.is_some_and(|path| is_loaded(&path))
}

/// Whether a method to register GPU memory is switched off: `NOBOUNCE_REFUSE=dma-buf,peermem`, to
/// test a program's fallback.
fn is_switched_off(way: &str) -> bool {
    let list = std::env::var_os("NOBOUNCE_REFUSE").unwrap_or_default();
    let off = list.to_string_lossy().split(',').any(|word| word.trim() == way);
    if off {
        log::warn(|| format!("GPU memory registration through {way} is disabled by NOBOUNCE_REFUSE"));
    }
    off
}

pub(crate) fn refused(what: &str, error: &RegisterError) -> Errno {
    log::warn(|| format!("{what}: {error}"));
    Errno(error.errno())
}

fn register(
    pd: *mut verbs::Pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    flags: u32,
) -> Result<*mut verbs::Mr, Errno> {
    let ours = PdObject::find(pd)?;
    ours.context.alive()?;
    let iova = if flags & verbs::IBV_ACCESS_ZERO_BASED != 0 { 0 } else { iova };
    if flags & verbs::IBV_ACCESS_ON_DEMAND != 0 {
        return register_on_demand(pd, addr, length, iova, flags);
    }
    let access = access_of(flags)?;
    // SAFETY: registration grants this: the device and peers use the program's memory until it
    // deregisters.
    let mr = match unsafe { ours.soft.register_at(addr.cast(), length, iova, access) } {
        Err(RegisterError::Range(_))
            if cuda_is_loaded() && iova == addr.addr() as u64 && !is_switched_off("peermem") =>
        {
            register_gpu("ibv_reg_mr", ours, iova, length, access)?
        }
        other => other.map_err(|error| refused("ibv_reg_mr", &error))?,
    };
    Ok(publish(pd, ours, addr, length, mr))
}

/// Registers memory whose pages need not exist yet; all addresses of the process, if the program
/// passes none. Accesses by the CPU take pages as they are.
fn register_on_demand(
    pd: *mut verbs::Pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    flags: u32,
) -> Result<*mut verbs::Mr, Errno> {
    let ours = PdObject::find(pd)?;
    let access = access_of(flags & !verbs::IBV_ACCESS_ON_DEMAND)?;
    let everything = addr.is_null() && length == usize::MAX;
    let most = usize::try_from(ours.context.soft.limits().max_mr_size).unwrap_or(usize::MAX);
    let len = if everything { most } else { length };
    // SAFETY: registration grants this: the device and peers use the program's memory until it
    // deregisters.
    let mr = unsafe { ours.soft.register_on_demand(addr.cast(), len, iova, access) };
    Ok(publish(pd, ours, addr, length, mr.map_err(|error| refused("ibv_reg_mr", &error))?))
}

/// `ibv_alloc_null_mr`, by the table.
pub(crate) unsafe extern "C" fn alloc_null_mr(pd: *mut verbs::Pd) -> *mut verbs::Mr {
    entry::pointer(|| {
        let ours = PdObject::find(pd)?;
        ours.context.alive()?;
        let mr = ours.soft.register_null().map_err(|error| refused("ibv_alloc_null_mr", &error))?;
        Ok(publish(pd, ours, ptr::null_mut(), usize::MAX, mr))
    })
}

/// `ibv_advise_mr`, by the table: pages are there when the CPU touches them, so that fetching them
/// ahead is nothing to do.
pub(crate) unsafe extern "C" fn advise_mr(
    pd: *mut verbs::Pd,
    advice: u32,
    flags: u32,
    list: *mut verbs::Sge,
    count: u32,
) -> c_int {
    entry::code(|| {
        let ours = PdObject::find(pd)?;
        ours.context.alive()?;
        let known = advice <= verbs::IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT
            && flags <= verbs::IBV_ADVISE_MR_FLAG_FLUSH;
        if !known {
            return Err(Errno::EOPNOTSUPP);
        }
        if list.is_null() || count == 0 {
            return Err(Errno::EINVAL);
        }
        // SAFETY: the caller passes so many elements.
        let elements = unsafe { std::slice::from_raw_parts(list, count as usize) };
        let regions = live::each::<MrObject, _>(|mr| mr.range_in(&ours.soft));
        let covers = |element: &verbs::Sge| {
            regions.iter().flatten().any(|(lkey, begin, length)| {
                let offset = element.addr.checked_sub(*begin);
                *lkey == element.lkey && offset.is_some_and(|at| at + u64::from(element.length) <= *length)
            })
        };
        if elements.iter().all(covers) { Ok(()) } else { Err(Errno(libc::ENOENT)) }
    })
}

fn register_gpu(
    call: &str,
    pd: &PdObject,
    addr: u64,
    length: usize,
    access: Access,
) -> Result<soft::Mr, Errno> {
    // SAFETY: the program registers its own memory, which grants this access.
    let mr = unsafe { pd.soft.register_gpu(addr, length, access, &GpuOptions::default()) }
        .map_err(|error| refused(call, &error))?;
    log::info(|| format!("{length} bytes of GPU memory at {addr:#x}: {:?}", mr.paths()));
    Ok(mr)
}

/// `ibv_reg_mr`.
pub(crate) unsafe extern "C" fn reg_mr(
    pd: *mut verbs::Pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut verbs::Mr {
    entry::pointer(|| register(pd, addr, length, addr.addr() as u64, access.cast_unsigned()))
}

/// `ibv_reg_mr_iova`.
pub(crate) unsafe extern "C" fn reg_mr_iova(
    pd: *mut verbs::Pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut verbs::Mr {
    entry::pointer(|| register(pd, addr, length, iova, access.cast_unsigned()))
}

/// `ibv_reg_mr_iova2`.
pub(crate) unsafe extern "C" fn reg_mr_iova2(
    pd: *mut verbs::Pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> *mut verbs::Mr {
    entry::pointer(|| register(pd, addr, length, iova, access))
}

/// Whether a descriptor is certainly not a dma-buf: those are files without a type, and their name
/// identifies them.
fn is_no_dmabuf(fd: c_int) -> bool {
    // SAFETY: plain numbers, for which zeroes are valid.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: takes a number and a valid place.
    let has_type = unsafe { libc::fstat(fd, &raw mut status) } == 0 && status.st_mode & libc::S_IFMT != 0;
    let name = std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_default();
    let name = name.to_string_lossy();
    (has_type || name.starts_with("anon_inode:")) && !name.contains("dmabuf")
}

/// The kernel's checks ahead of a driver: address and offset agree modulo the page size, and the
/// range lies in the dma-buf. A descriptor without a known length (not every stand-in has one) is
/// accepted.
fn check_range(fd: c_int, offset: u64, length: usize, iova: u64) -> Result<(), String> {
    let page = nobounce_memory::page_size() as u64;
    if offset % page != iova % page {
        return Err(format!("offset {offset:#x} and address {iova:#x} differ modulo the page size"));
    }
    // SAFETY: the calls take numbers. A dma-buf supports a seek to its end, and nothing uses its
    // file position.
    let size = unsafe {
        let end = libc::lseek(fd, 0, libc::SEEK_END);
        libc::lseek(fd, 0, libc::SEEK_SET);
        end
    };
    let end = offset.checked_add(length as u64);
    match u64::try_from(size) {
        Ok(size) if end.is_none_or(|end| end > size) => {
            Err(format!("{length} bytes at {offset:#x} exceed a dma-buf of {size} bytes"))
        }
        _ => Ok(()),
    }
}

/// `ibv_reg_dmabuf_mr`: GPU memory that the program exported. The descriptor is not needed: the
/// memory is this process's own, and `iova` is its CUDA address. Where it is not, the memory cannot
/// be identified.
pub(crate) unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut verbs::Pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut verbs::Mr {
    entry::pointer(|| {
        let ours = PdObject::find(pd)?;
        ours.context.alive()?;
        // SAFETY: the call takes numbers.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            return Err(Errno(libc::EBADF));
        }
        if is_no_dmabuf(fd) {
            log::warn(|| format!("ibv_reg_dmabuf_mr: descriptor {fd} is not a dma-buf"));
            return Err(Errno::EINVAL);
        }
        check_range(fd, offset, length, iova).map_err(|why| {
            log::warn(|| format!("ibv_reg_dmabuf_mr: {why}"));
            Errno::EINVAL
        })?;
        let access = access_of(access.cast_unsigned())?;
        if is_switched_off("dma-buf") {
            return Err(Errno::EOPNOTSUPP);
        }
        if !cuda_is_loaded() {
            log::warn(|| {
                "ibv_reg_dmabuf_mr: CUDA is not loaded in this process, so the dma-buf is not GPU memory of this process"
                    .to_owned()
            });
            return Err(Errno::EOPNOTSUPP);
        }
        let mr =
            register_gpu("ibv_reg_dmabuf_mr", ours, iova, length, access).map_err(|errno| match errno {
                // No address of a GPU's: then the descriptor is of memory that we cannot know.
                Errno(libc::EFAULT) => Errno::EOPNOTSUPP,
                other => other,
            })?;
        let offset = usize::try_from(offset).map_err(|_| Errno::EINVAL)?;
        Ok(publish(pd, ours, ptr::without_provenance_mut(offset), length, mr))
    })
}

/// `ibv_dereg_mr`: not while memory windows are bound to it.
pub(crate) unsafe extern "C" fn dereg_mr(mr: *mut verbs::Mr) -> c_int {
    entry::code(|| {
        if MrObject::find(mr)?.inner().soft.as_ref().ok_or(Errno::EINVAL)?.has_windows() {
            return Err(Errno(libc::EBUSY));
        }
        MrObject::retract(mr).map(drop)
    })
}

/// `ibv_rereg_mr`: 0, or a negative number of its own. Where it fails, the region stays as it was.
pub(crate) unsafe extern "C" fn rereg_mr(
    mr: *mut verbs::Mr,
    flags: c_int,
    pd: *mut verbs::Pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let changed = entry::guarded(|| {
        let ours = MrObject::find(mr)?;
        let known = verbs::IBV_REREG_MR_CHANGE_TRANSLATION
            | verbs::IBV_REREG_MR_CHANGE_PD
            | verbs::IBV_REREG_MR_CHANGE_ACCESS;
        let has = |bit: c_int| flags & bit != 0;
        let moves = has(verbs::IBV_REREG_MR_CHANGE_TRANSLATION);
        if flags == 0 || flags & !known != 0 || (moves && (addr.is_null() || length == 0)) {
            return Err(Errno::EINVAL);
        }
        let new_pd = has(verbs::IBV_REREG_MR_CHANGE_PD).then(|| PdObject::find(pd)).transpose()?;
        let new_access = has(verbs::IBV_REREG_MR_CHANGE_ACCESS).then(|| access_of(access.cast_unsigned()));
        let memory = moves.then_some(NewMemory::Host { addr: addr.cast(), len: length });
        let change = Rereg { pd: new_pd.map(|pd| &pd.soft), memory, access: new_access.transpose()? };
        let mut inner = ours.inner();
        let soft = inner.soft.as_mut().ok_or(Errno::EINVAL)?;
        // SAFETY: the program registers its own memory, which grants this access.
        let mut done = unsafe { soft.rereg(&change) };
        if matches!(done, Err(RegisterError::Range(_))) && moves && cuda_is_loaded() {
            let options = GpuOptions::default();
            let memory = Some(NewMemory::Gpu { addr: addr.addr() as u64, len: length, options: &options });
            // SAFETY: as above.
            done = unsafe { soft.rereg(&Rereg { memory, ..change }) };
        }
        done.map_err(|error| refused("ibv_rereg_mr", &error))?;
        let raw = ours.raw.get();
        if let Some(new_pd) = new_pd {
            inner.pd = new_pd.users.join();
            // SAFETY: our own structure.
            unsafe { (*raw).pd = pd };
        }
        if moves {
            // SAFETY: our own structure.
            unsafe { ((*raw).addr, (*raw).length) = (addr, length) };
        }
        Ok(())
    });
    match changed {
        Ok(()) => 0,
        Err(errno) => {
            errno.set();
            verbs::IBV_REREG_MR_ERR_INPUT
        }
    }
}

/// `ibv_reg_mr_ex`: one of the other registration calls, by the bits of the mask.
pub(crate) unsafe extern "C" fn reg_mr_ex(
    pd: *mut verbs::Pd,
    attr: *mut verbs::MrInitAttr,
) -> *mut verbs::Mr {
    // SAFETY: the caller passes a valid structure.
    let Some(attr) = (unsafe { attr.as_ref() }) else { return entry::pointer(|| Err(Errno::EINVAL)) };
    let has = |bit: u64| attr.comp_mask & bit != 0;
    let known = verbs::IBV_REG_MR_MASK_IOVA
        | verbs::IBV_REG_MR_MASK_ADDR
        | verbs::IBV_REG_MR_MASK_FD
        | verbs::IBV_REG_MR_MASK_FD_OFFSET;
    if attr.comp_mask & !known != 0 {
        return entry::pointer(|| Err(Errno::EOPNOTSUPP));
    }
    let iova = if has(verbs::IBV_REG_MR_MASK_IOVA) { attr.iova } else { attr.addr.addr() as u64 };
    match (has(verbs::IBV_REG_MR_MASK_FD), has(verbs::IBV_REG_MR_MASK_ADDR)) {
        (true, false) if has(verbs::IBV_REG_MR_MASK_FD_OFFSET) && has(verbs::IBV_REG_MR_MASK_IOVA) => {
            // SAFETY: as for our caller.
            unsafe { reg_dmabuf_mr(pd, attr.fd_offset, attr.length, iova, attr.fd, attr.access) }
        }
        (false, true) => {
            entry::pointer(|| register(pd, attr.addr, attr.length, iova, attr.access.cast_unsigned()))
        }
        _ => entry::pointer(|| Err(Errno::EINVAL)),
    }
}
