//! Which pointers are ours, and alive.
//!
//! A program may destroy an object twice, or hand in one of another library. Looking the pointer up (never on the data path)
//! tells without touching memory that may be gone.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::entry::Errno;

/// What a pointer points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    List,
    Device,
    Context,
    Pd,
    Mr,
    Channel,
    Cq,
    Qp,
    Srq,
    Ah,
}

/// An object that C holds by a pointer to its first part.
pub(crate) trait Object: Sized + 'static {
    type Raw;
    const KIND: Kind;
    /// Where in the object the part is that C sees.
    const RAW_AT: usize = 0;

    /// Hands a new object to C.
    fn publish(self) -> *mut Self::Raw {
        let object = Box::into_raw(Box::new(self));
        let raw = object.wrapping_byte_add(Self::RAW_AT).cast();
        add(raw, Self::KIND);
        raw
    }

    /// Our object behind a pointer of C's. It lives as long as C does not destroy it, which C must not do in another thread
    /// during the call.
    fn find(raw: *mut Self::Raw) -> Result<&'static Self, Errno> {
        if !is(raw, Self::KIND) {
            return Err(Errno::EINVAL);
        }
        // SAFETY: it is in the table, so it was made by `publish` and is not freed.
        Ok(unsafe { Self::trust(raw) })
    }

    /// The same without a look at the table.
    ///
    /// # Safety
    /// `raw` was made by `publish`, and is not freed.
    #[inline]
    unsafe fn trust(raw: *mut Self::Raw) -> &'static Self {
        // SAFETY: `publish` gave this pointer away, which lies RAW_AT bytes into the object.
        unsafe { &*raw.wrapping_byte_sub(Self::RAW_AT).cast::<Self>() }
    }

    /// Takes an object back from C.
    fn retract(raw: *mut Self::Raw) -> Result<Box<Self>, Errno> {
        if !remove(raw, Self::KIND) {
            return Err(Errno::EINVAL);
        }
        // SAFETY: it was in the table, so `publish` made it from a box; it is there no more, so nobody else frees it.
        Ok(unsafe { Box::from_raw(raw.wrapping_byte_sub(Self::RAW_AT).cast::<Self>()) })
    }
}

/// How many others need an object.
#[derive(Debug, Default)]
pub(crate) struct Users(AtomicUsize);

impl Users {
    pub(crate) fn any(&self) -> bool {
        self.count() > 0
    }

    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }

    pub(crate) fn join(&'static self) -> Use {
        self.0.fetch_add(1, Ordering::AcqRel);
        Use(self)
    }
}

/// The need of one of them; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Use(&'static Users);

impl Drop for Use {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A table behind a lock that a fork takes too, so that the child finds both in order.
struct Table {
    held: AtomicBool,
    map: UnsafeCell<Option<HashMap<usize, (Kind, usize)>>>,
}

// SAFETY: the map is only touched by the holder of the lock.
unsafe impl Sync for Table {}

static TABLE: Table = Table { held: AtomicBool::new(false), map: UnsafeCell::new(None) };

impl Table {
    fn acquire(&self) {
        while self.held.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            std::thread::yield_now();
        }
    }

    fn release(&self) {
        self.held.store(false, Ordering::Release);
    }

    fn with<T>(&self, f: impl FnOnce(&mut HashMap<usize, (Kind, usize)>) -> T) -> T {
        static WATCH: Once = Once::new();
        WATCH.call_once(|| {
            // SAFETY: the three only take and give back the lock, which nobody holds for long.
            unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
        });
        self.acquire();
        // SAFETY: we hold the lock.
        let result = f(unsafe { &mut *self.map.get() }.get_or_insert_default());
        self.release();
        result
    }
}

extern "C" fn before_fork() {
    TABLE.acquire();
}

extern "C" fn after_fork() {
    TABLE.release();
}

fn add<T>(pointer: *mut T, kind: Kind) {
    add_with(pointer, kind, 0);
}

/// Adds a pointer with a number of ours.
pub(crate) fn add_with<T>(pointer: *mut T, kind: Kind, number: usize) {
    TABLE.with(|map| map.insert(pointer.addr(), (kind, number)));
}

fn remove<T>(pointer: *mut T, kind: Kind) -> bool {
    take(pointer, kind).is_some()
}

/// Removes a pointer; the number it was added with.
pub(crate) fn take<T>(pointer: *mut T, kind: Kind) -> Option<usize> {
    TABLE.with(|map| match map.get(&pointer.addr()) {
        Some((found, number)) if *found == kind => {
            let number = *number;
            map.remove(&pointer.addr());
            Some(number)
        }
        _ => None,
    })
}

fn is<T>(pointer: *mut T, kind: Kind) -> bool {
    TABLE.with(|map| map.get(&pointer.addr()).is_some_and(|(found, _)| *found == kind))
}

/// Whether a pointer is of any kind that is ours.
pub(crate) fn is_ours(address: usize) -> bool {
    TABLE.with(|map| map.contains_key(&address))
}
