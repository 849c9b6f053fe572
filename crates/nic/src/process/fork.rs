//! Fork handling: the child has our memory and sockets but not our engine threads, so the device is
//! dead there.

use std::cell::UnsafeCell;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Once, OnceLock};

static GENERATION: AtomicU64 = AtomicU64::new(0);

/// Runs in every forked child first.
static IN_CHILD: OnceLock<fn()> = OnceLock::new();

/// Sets what runs in every forked child first. It may touch atomics and descriptors, and take no
/// lock.
pub(crate) fn set_in_child(hook: fn()) {
    let _ = IN_CHILD.set(hook); // there is one caller
}

extern "C" fn before() {
    KEPT.acquire();
}

extern "C" fn in_parent() {
    KEPT.release();
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    if let Some(hook) = IN_CHILD.get() {
        hook();
    }
    // SAFETY: `before` took the lock.
    let_go(unsafe { &*KEPT.descriptors.get() });
    KEPT.release();
}

/// The number of forks between this process and the one that loaded us.
pub(crate) fn generation() -> u64 {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the three only touch atomics, descriptors and a lock that is never held for long,
        // which is safe around the fork of a threaded process.
        unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    });
    GENERATION.load(Ordering::Relaxed)
}

/// The generation without the one-time set-up, for hot paths.
#[inline]
pub(crate) fn current() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

/// Replaces inherited descriptors in a child by harmless ones: left open, they would keep names and
/// connections alive that the parent closes. The numbers stay in use, because the child's objects
/// that own them close them later.
pub(crate) fn let_go(descriptors: &[RawFd]) {
    if descriptors.is_empty() {
        return;
    }
    // SAFETY: takes no pointers.
    let nothing = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    if nothing < 0 {
        return;
    }
    for &fd in descriptors {
        // SAFETY: takes no pointers; `fd` is one of ours.
        unsafe { libc::dup3(nothing, fd, libc::O_CLOEXEC) };
    }
    // SAFETY: opened above, with no other owner.
    unsafe { libc::close(nothing) };
}

/// The descriptors of all [`NotInherited`] and [`ParentOnly`], behind a lock that fork takes too:
/// the child sees a consistent list.
struct DescriptorList {
    held: AtomicBool,
    descriptors: UnsafeCell<Vec<RawFd>>,
}

// SAFETY: the list is only touched by the holder of the lock.
unsafe impl Sync for DescriptorList {}

static KEPT: DescriptorList =
    DescriptorList { held: AtomicBool::new(false), descriptors: UnsafeCell::new(Vec::new()) };

impl DescriptorList {
    fn acquire(&self) {
        while self.held.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            std::thread::yield_now();
        }
    }

    fn release(&self) {
        self.held.store(false, Ordering::Release);
    }

    fn with<T>(&self, f: impl FnOnce(&mut Vec<RawFd>) -> T) -> T {
        self.acquire();
        // SAFETY: we hold the lock.
        let result = f(unsafe { &mut *self.descriptors.get() });
        self.release();
        result
    }
}

/// A descriptor that a forked child replaces by a harmless one ([`let_go`]) before anything else
/// happens there. Its socket name or connection ends when the parent closes it, however long the
/// child lives.
#[derive(Debug)]
pub(crate) struct NotInherited(ManuallyDrop<OwnedFd>);

impl NotInherited {
    /// Opens a descriptor by `open`, with forks of this process held off meanwhile. (`open` must
    /// not take long, nor open another `NotInherited`.)
    pub(crate) fn open(open: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<Self> {
        generation();
        KEPT.with(|kept| {
            let fd = open()?;
            kept.push(fd.as_raw_fd());
            Ok(Self(ManuallyDrop::new(fd)))
        })
    }
}

/// Marks a descriptor that another object owns: a forked child replaces it by a harmless one before
/// anything else happens there, as `NotInherited`. Drop the mark before the descriptor is closed.
#[derive(Debug)]
pub struct ParentOnly(RawFd);

impl ParentOnly {
    /// Marks an open descriptor.
    pub fn mark(owner: &impl AsRawFd) -> Self {
        generation();
        let fd = owner.as_raw_fd();
        KEPT.with(|kept| kept.push(fd));
        Self(fd)
    }
}

impl Drop for ParentOnly {
    fn drop(&mut self) {
        KEPT.with(|kept| forget(kept, self.0));
    }
}

fn forget(kept: &mut Vec<RawFd>, fd: RawFd) {
    if let Some(at) = kept.iter().position(|one| *one == fd) {
        kept.swap_remove(at);
    }
}

impl Deref for NotInherited {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        &self.0
    }
}

impl Drop for NotInherited {
    fn drop(&mut self) {
        let fd = self.0.as_raw_fd();
        KEPT.with(|kept| {
            forget(kept, fd);
            // SAFETY: it is dropped here and never used again.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        });
    }
}
