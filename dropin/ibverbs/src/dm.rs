//! Device memory. A software NIC has none of its own: it is host memory that only the calls here
//! and requests reach.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use nobounce_memory::{HostBuffer, page_size};
use nobounce_verbs as verbs;

use crate::context::ContextObject;
use crate::convert::access_of;
use crate::entry::{self, Errno};
use crate::live::{self, Kind, Object, Use, Users};
use crate::log;
use crate::mr;
use crate::pd::PdObject;

/// Bytes of device memory of a process.
pub(crate) const MAX_BYTES: usize = 1 << 20;
/// Accesses by the CPU are whole words, as with adapters.
const WORD: u64 = 4;

static TAKEN: AtomicUsize = AtomicUsize::new(0);
static NEXT: AtomicU32 = AtomicU32::new(1);

/// The memory, which the importers of an object share.
struct Memory {
    buffer: HostBuffer,
}

impl Drop for Memory {
    fn drop(&mut self) {
        TAKEN.fetch_sub(self.buffer.len(), Ordering::Relaxed);
    }
}

#[repr(C)]
pub(crate) struct DmObject {
    raw: UnsafeCell<verbs::Dm>,
    memory: Arc<Memory>,
    context: &'static ContextObject,
    users: Users,
    is_imported: bool,
    _context: Use,
}

impl Object for DmObject {
    type Raw = verbs::Dm;
    const KIND: Kind = Kind::Dm;
}

impl DmObject {
    fn new(context: &'static ContextObject, memory: Arc<Memory>, handle: u32, is_imported: bool) -> Self {
        let raw = verbs::Dm {
            context: context.raw(),
            memcpy_to_dm: Some(copy_to),
            memcpy_from_dm: Some(copy_from),
            comp_mask: 1,
            handle,
        };
        let (users, of_context) = (Users::default(), context.users.join());
        Self { raw: UnsafeCell::new(raw), memory, context, users, is_imported, _context: of_context }
    }

    fn handle(&self) -> u32 {
        // SAFETY: our own structure, in which this field never changes.
        unsafe { (*self.raw.get()).handle }
    }

    /// The offset, if all bytes of the range lie in the memory.
    fn offset(&self, offset: u64, len: usize) -> Result<usize, Errno> {
        let end = offset.checked_add(len as u64).ok_or(Errno::EINVAL)?;
        if end > self.memory.buffer.len() as u64 {
            return Err(Errno::EINVAL);
        }
        usize::try_from(offset).map_err(|_| Errno::EINVAL)
    }

    /// The same for an access by the CPU.
    fn word_offset(&self, offset: u64, len: usize) -> Result<usize, Errno> {
        if !offset.is_multiple_of(WORD) || !(len as u64).is_multiple_of(WORD) {
            return Err(Errno::EINVAL);
        }
        self.offset(offset, len)
    }
}

/// `ibv_alloc_dm`, by the table. It needs no engine, and works in a forked child, too.
pub(crate) unsafe extern "C" fn alloc_dm(
    context: *mut verbs::Context,
    attr: *mut verbs::AllocDmAttr,
) -> *mut verbs::Dm {
    entry::pointer(|| {
        let context = ContextObject::find(context)?;
        // SAFETY: the caller passes a valid structure.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::EINVAL)?;
        if attr.comp_mask != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let aligned = 1_usize.checked_shl(attr.log_align_req).is_some_and(|align| align <= page_size());
        if attr.length == 0 || !aligned {
            return Err(Errno::EINVAL);
        }
        let take = |taken: usize| taken.checked_add(attr.length).filter(|sum| *sum <= MAX_BYTES);
        TAKEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).map_err(|taken| {
            log::warn(|| {
                format!(
                    "ibv_alloc_dm: {} bytes asked, {} of {MAX_BYTES} left",
                    attr.length,
                    MAX_BYTES - taken
                )
            });
            Errno::ENOMEM
        })?;
        let buffer = HostBuffer::new(attr.length).map_err(|_| {
            TAKEN.fetch_sub(attr.length, Ordering::Relaxed);
            Errno::ENOMEM
        })?;
        let memory = Arc::new(Memory { buffer });
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(DmObject::new(context, memory, handle, false).publish())
    })
}

/// `ibv_free_dm`, by the table: not while regions have it.
pub(crate) unsafe extern "C" fn free_dm(dm: *mut verbs::Dm) -> c_int {
    entry::code(|| {
        let ours = DmObject::find(dm)?;
        if ours.users.any() || ours.is_imported {
            return Err(if ours.is_imported { Errno::EINVAL } else { Errno::EBUSY });
        }
        DmObject::retract(dm).map(drop)
    })
}

/// `ibv_import_dm`: device memory of this process, by its handle.
pub(crate) unsafe extern "C" fn import_dm(context: *mut verbs::Context, handle: u32) -> *mut verbs::Dm {
    entry::pointer(|| {
        let context = ContextObject::find(context)?;
        let same = |dm: &DmObject| {
            (dm.handle() == handle && dm.context.soft.is_same(&context.soft)).then(|| dm.memory.clone())
        };
        let memory = live::each::<DmObject, _>(same).into_iter().flatten().next();
        Ok(DmObject::new(context, memory.ok_or(Errno(libc::ENOENT))?, handle, true).publish())
    })
}

/// `ibv_unimport_dm`.
pub(crate) unsafe extern "C" fn unimport_dm(dm: *mut verbs::Dm) {
    entry::silent(|| {
        if !DmObject::find(dm)?.is_imported {
            return Err(Errno::EINVAL);
        }
        let retracted = DmObject::retract(dm)?;
        if retracted.users.any() {
            std::mem::forget(retracted); // regions count on it
        }
        Ok(())
    });
}

/// `ibv_memcpy_to_dm`.
unsafe extern "C" fn copy_to(dm: *mut verbs::Dm, offset: u64, from: *const c_void, len: usize) -> c_int {
    entry::code(|| {
        let ours = DmObject::find(dm)?;
        let offset = ours.word_offset(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the caller passes so many readable bytes.
        let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len) };
        ours.memory.buffer.write_at(offset, bytes).map_err(|_| Errno(libc::EFAULT))
    })
}

/// `ibv_memcpy_from_dm`.
unsafe extern "C" fn copy_from(to: *mut c_void, dm: *mut verbs::Dm, offset: u64, len: usize) -> c_int {
    entry::code(|| {
        let ours = DmObject::find(dm)?;
        let offset = ours.word_offset(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the caller passes so many writable bytes.
        let bytes = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), len) };
        ours.memory.buffer.read_at(offset, bytes).map_err(|_| Errno(libc::EFAULT))
    })
}

/// `ibv_reg_dm_mr`, by the table: requests address its first byte as 0.
pub(crate) unsafe extern "C" fn reg_dm_mr(
    pd: *mut verbs::Pd,
    dm: *mut verbs::Dm,
    offset: u64,
    len: usize,
    access: u32,
) -> *mut verbs::Mr {
    entry::pointer(|| {
        let (domain, ours) = (PdObject::find(pd)?, DmObject::find(dm)?);
        domain.context.alive()?;
        if access & verbs::IBV_ACCESS_ZERO_BASED == 0 {
            return Err(Errno::EINVAL);
        }
        let first = ours.memory.buffer.as_mut_ptr().wrapping_add(ours.offset(offset, len)?);
        // SAFETY: the memory is ours alone, and the region keeps it.
        let made = unsafe { domain.soft.register_on_demand(first, len, 0, access_of(access)?) };
        let soft = made.map_err(|error| mr::refused("ibv_reg_dm_mr", &error))?;
        let kept = Box::new((ours.memory.clone(), ours.users.join()));
        Ok(mr::publish_dm(pd, domain, len, soft, kept))
    })
}
