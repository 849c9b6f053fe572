//! Objects of this process by their handles: a second context, domain or region that shares the
//! first one's device. The memory of another process is out of reach.

use std::ffi::{c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};

use nobounce_verbs as verbs;

use crate::context::ContextObject;
use crate::convert::file_of;
use crate::entry::{self, Errno};
use crate::live::{self, Object};
use crate::mr::MrObject;
use crate::pd::PdObject;
use crate::system;

/// `ibv_import_device`: a context of this process, by a copy of its command descriptor. Another
/// descriptor belongs to a device of the system's.
pub(crate) unsafe extern "C" fn import_device(fd: c_int) -> *mut c_void {
    let same = |context: &ContextObject| {
        let is_it = file_of(fd).is_some() && file_of(fd) == file_of(context.cmd_fd());
        is_it.then(|| context.raw().expose_provenance())
    };
    let Some(first) = live::each::<ContextObject, _>(same).into_iter().flatten().next() else {
        return system::import_device(fd);
    };
    entry::pointer(|| {
        let first = ContextObject::find(std::ptr::with_exposed_provenance_mut(first))?;
        first.alive()?;
        // The descriptor becomes the new context's own: it must be a copy.
        if fd == first.cmd_fd() {
            return Err(Errno::EINVAL);
        }
        // SAFETY: the caller gives the descriptor away.
        let context = first.share(unsafe { OwnedFd::from_raw_fd(fd) });
        Ok(context.cast::<c_void>())
    })
}

/// `ibv_import_pd`.
pub(crate) unsafe extern "C" fn import_pd(context: *mut verbs::Context, handle: u32) -> *mut verbs::Pd {
    entry::pointer(|| {
        let context = ContextObject::find(context)?;
        context.alive()?;
        let same = |pd: &PdObject| {
            (pd.soft.id() == handle && pd.context.soft.is_same(&context.soft)).then(|| pd.soft.clone())
        };
        let soft = live::each::<PdObject, _>(same).into_iter().flatten().next().ok_or(Errno(libc::ENOENT))?;
        let mut imported = PdObject::new(context, soft, Vec::new());
        imported.is_imported = true;
        Ok(imported.publish())
    })
}

/// `ibv_unimport_pd`.
pub(crate) unsafe extern "C" fn unimport_pd(pd: *mut verbs::Pd) {
    entry::silent(|| {
        if !PdObject::find(pd)?.is_imported {
            return Err(Errno::EINVAL);
        }
        let retracted = PdObject::retract(pd)?;
        if retracted.users.any() {
            std::mem::forget(retracted); // its objects count on it
        }
        Ok(())
    });
}

/// `ibv_import_mr`: its address and length are not known to the importer.
pub(crate) unsafe extern "C" fn import_mr(pd: *mut verbs::Pd, handle: u32) -> *mut verbs::Mr {
    entry::pointer(|| {
        let ours = PdObject::find(pd)?;
        ours.context.alive()?;
        let keys =
            live::each::<MrObject, _>(|mr| mr.keys_of(handle, &ours.soft)).into_iter().flatten().next();
        Ok(MrObject::imported(pd, ours, keys.ok_or(Errno(libc::ENOENT))?).publish())
    })
}

/// `ibv_unimport_mr`.
pub(crate) unsafe extern "C" fn unimport_mr(mr: *mut verbs::Mr) {
    entry::silent(|| {
        if !MrObject::find(mr)?.is_imported() {
            return Err(Errno::EINVAL);
        }
        MrObject::retract(mr).map(drop)
    });
}
