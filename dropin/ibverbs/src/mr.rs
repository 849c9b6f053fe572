//! Memory regions.

use std::cell::UnsafeCell;
use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::ptr;
use std::sync::{Mutex, PoisonError};

use nobounce_memory::gpu::GpuOptions;
use nobounce_nic::soft;
use nobounce_nic::soft::{Access, NewMemory, RegisterError, Rereg};
use nobounce_verbs as verbs;

use crate::convert::access_of;
use crate::entry::{self, Errno};
use crate::live::{Kind, Object, Use};
use crate::log;
use crate::pd::PdObject;

#[repr(C)]
pub(crate) struct MrObject {
    raw: UnsafeCell<verbs::Mr>,
    /// The region, and the domain it keeps.
    inner: Mutex<(soft::Mr, Use)>,
}

impl MrObject {
    /// The key by which requests of the program's own name it.
    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: our own structure, in which this field never changes.
        unsafe { (*self.raw.get()).lkey }
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
    MrObject { raw: UnsafeCell::new(raw), inner: Mutex::new((mr, ours.users.join())) }.publish()
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

fn refused(what: &str, error: &RegisterError) -> Errno {
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
    let access = access_of(flags)?;
    let iova = if flags & verbs::IBV_ACCESS_ZERO_BASED != 0 { 0 } else { iova };
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
        if MrObject::find(mr)?.inner.lock().unwrap_or_else(PoisonError::into_inner).0.has_windows() {
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
        let mut inner = ours.inner.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the program registers its own memory, which grants this access.
        let mut done = unsafe { inner.0.rereg(&change) };
        if matches!(done, Err(RegisterError::Range(_))) && moves && cuda_is_loaded() {
            let options = GpuOptions::default();
            let memory = Some(NewMemory::Gpu { addr: addr.addr() as u64, len: length, options: &options });
            // SAFETY: as above.
            done = unsafe { inner.0.rereg(&Rereg { memory, ..change }) };
        }
        done.map_err(|error| refused("ibv_rereg_mr", &error))?;
        let raw = ours.raw.get();
        if let Some(new_pd) = new_pd {
            inner.1 = new_pd.users.join();
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
