//! After a fork the child has our memory but not our helper thread, and shares our sockets: the device is dead there.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use super::exit;

static GENERATION: AtomicU64 = AtomicU64::new(0);

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    exit::let_go_of_links();
}

/// The number of forks between this process and the one that loaded us.
pub(crate) fn generation() -> u64 {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: `in_child` only touches atomics and descriptors, which is safe in the child of a threaded process.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    GENERATION.load(Ordering::Relaxed)
}

/// The generation without the one-time set-up, for hot paths.
pub(crate) fn current() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}
