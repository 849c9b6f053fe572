//! Tracks which pointers are ours, and alive.
//!
//! A program may destroy an object twice, or pass one of another library. A table lookup (never on
//! the data path) detects that without touching freed memory. Freed memory is quarantined for a
//! while. Otherwise a new object could reuse a stale pointer's address, and a second destroy of the
//! old one would destroy the new one.

use std::alloc::Layout;
use std::cell::UnsafeCell;
use std::collections::{HashMap, VecDeque};
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::entry::Errno;

/// Kind of object behind a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    List,
    Device,
    Context,
    Pd,
    Td,
    Dm,
    Xrcd,
    Mr,
    Mw,
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

    /// Our object behind a C pointer. It lives until C destroys it, which C must not do in another
    /// thread during the call.
    fn find(raw: *mut Self::Raw) -> Result<&'static Self, Errno> {
        if !is(raw, Self::KIND) {
            return Err(Errno::EINVAL);
        }
        // SAFETY: it is in the table, so it was made by `publish` and is not freed.
        Ok(unsafe { Self::trust(raw) })
    }

    /// The same without a table lookup.
    ///
    /// # Safety
    /// `raw` was made by `publish`, and is not freed.
    #[inline]
    unsafe fn trust(raw: *mut Self::Raw) -> &'static Self {
        // SAFETY: `publish` gave this pointer away, which lies RAW_AT bytes into the object.
        unsafe { &*raw.wrapping_byte_sub(Self::RAW_AT).cast::<Self>() }
    }

    /// Takes an object back from C.
    fn retract(raw: *mut Self::Raw) -> Result<Retracted<Self>, Errno> {
        if !remove(raw, Self::KIND) {
            return Err(Errno::EINVAL);
        }
        let object = raw.wrapping_byte_sub(Self::RAW_AT).cast::<Self>();
        Ok(Retracted(NonNull::new(object).ok_or(Errno::EINVAL)?))
    }
}

/// An object that C no longer holds: `publish` made it, and it has left the table. Dropping it
/// drops the object at once, and puts its memory at the end of the quarantine queue.
#[derive(Debug)]
pub(crate) struct Retracted<T>(NonNull<T>);

impl<T> Deref for Retracted<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: it was taken from the table, so no other thread drops it.
        unsafe { self.0.as_ref() }
    }
}

impl<T> Drop for Retracted<T> {
    fn drop(&mut self) {
        // SAFETY: it was taken from the table, so no other thread drops it, and it is not used
        // after this.
        unsafe { self.0.drop_in_place() };
        rest(Block { at: self.0.cast(), layout: Layout::new::<T>() });
    }
}

/// Length of the quarantine: blocks kept before they are freed.
const RESTING: usize = 1024;

/// Memory of an object that was destroyed.
struct Block {
    at: NonNull<u8>,
    layout: Layout,
}

/// Frees the oldest block in exchange for this one, once there are enough.
fn rest(block: Block) {
    let oldest = TABLE.with(|known| {
        known.resting.push_back(block);
        if known.resting.len() > RESTING { known.resting.pop_front() } else { None }
    });
    if let Some(Block { at, layout }) = oldest {
        // SAFETY: a box of an object with this layout was there; the object was dropped, and the
        // block was in the queue only once.
        unsafe { std::alloc::dealloc(at.as_ptr(), layout) };
    }
}

/// Reference count: dependants of an object.
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

/// Live objects, and quarantined memory.
#[derive(Default)]
struct Known {
    live: HashMap<usize, (Kind, usize)>,
    resting: VecDeque<Block>,
}

/// A table behind a lock that a fork takes too, so that the child finds both in order.
struct Table {
    held: AtomicBool,
    known: UnsafeCell<Option<Known>>,
}

// SAFETY: what is known is only touched by the holder of the lock.
unsafe impl Sync for Table {}

static TABLE: Table = Table { held: AtomicBool::new(false), known: UnsafeCell::new(None) };

impl Table {
    fn acquire(&self) {
        while self.held.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            std::thread::yield_now();
        }
    }

    fn release(&self) {
        self.held.store(false, Ordering::Release);
    }

    fn with<T>(&self, f: impl FnOnce(&mut Known) -> T) -> T {
        static WATCH: Once = Once::new();
        WATCH.call_once(|| {
            // SAFETY: the three only take and release the lock, which is never held for long.
            unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
        });
        self.acquire();
        // SAFETY: we hold the lock.
        let result = f(unsafe { &mut *self.known.get() }.get_or_insert_default());
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
    TABLE.with(|known| known.live.insert(pointer.expose_provenance(), (kind, number)));
}

fn remove<T>(pointer: *mut T, kind: Kind) -> bool {
    take(pointer, kind).is_some()
}

/// Removes a pointer; the number it was added with.
pub(crate) fn take<T>(pointer: *mut T, kind: Kind) -> Option<usize> {
    TABLE.with(|known| match known.live.get(&pointer.addr()) {
        Some((found, number)) if *found == kind => {
            let number = *number;
            known.live.remove(&pointer.addr());
            Some(number)
        }
        _ => None,
    })
}

/// Maps `of` over all live objects of a kind. None is destroyed meanwhile, so `of` must be short
/// and must not call us.
pub(crate) fn each<O: Object, T>(of: impl Fn(&O) -> T) -> Vec<T> {
    TABLE.with(|known| {
        let ours = known.live.iter().filter(|(_, (kind, _))| *kind == O::KIND);
        let raw = ours.map(|(address, _)| std::ptr::with_exposed_provenance_mut(*address));
        // SAFETY: it is in the table, so it was made by `publish`; objects are freed after their
        // removal from the table, which cannot happen while we hold the lock.
        raw.map(|raw| of(unsafe { O::trust(raw) })).collect()
    })
}

fn is<T>(pointer: *mut T, kind: Kind) -> bool {
    TABLE.with(|known| known.live.get(&pointer.addr()).is_some_and(|(found, _)| *found == kind))
}

/// Whether a pointer is of any of our kinds, or was lately: a double destroy must not be forwarded
/// to a library that never knew the object. A null pointer is ours, too, to be refused.
pub(crate) fn is_ours(address: usize) -> bool {
    let rests = |block: &Block| {
        let begin = block.at.addr().get();
        (begin..begin + block.layout.size()).contains(&address)
    };
    address == 0 || TABLE.with(|known| known.live.contains_key(&address) || known.resting.iter().any(rests))
}
