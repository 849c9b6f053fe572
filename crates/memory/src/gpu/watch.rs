//! Memory that CUDA gives out again while our window still reaches it: looked at now and then, and cut off once it was freed.
//!
//! A window keeps the driver's memory object alive, so that what was freed belongs to nobody else for as long as we can reach it. Short
//! allocations of `cudaMalloc` are parts of an object, though, and CUDA gives such a part to the next who asks. No call tells us when,
//! and asking before each store would wait for CUDA's locks, which others may hold until their kernels end. So a thread asks.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use std::{io, ptr};

use super::driver::Driver;
use super::region::GpuMemory;
use crate::signals::BlockedSignals;

/// How often. Until then what arrives for memory that was freed may reach whoever has it now, as with an adapter that knows the memory
/// by dma-buf.
const EVERY: Duration = Duration::from_millis(20);

#[derive(Default)]
struct Watched {
    memories: Vec<Weak<GpuMemory>>,
    /// Somebody looks.
    looked_after: bool,
}

static WATCHED: Mutex<Watched> = Mutex::new(Watched { memories: Vec::new(), looked_after: false });

/// From now on this memory is looked at.
pub(super) fn add(memory: &Arc<GpuMemory>) -> io::Result<()> {
    let mut watched = lock();
    if !watched.looked_after {
        start()?;
        watched.looked_after = true;
    }
    watched.memories.push(Arc::downgrade(memory));
    Ok(())
}

fn lock() -> std::sync::MutexGuard<'static, Watched> {
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread.
fn start() -> io::Result<()> {
    let _blocked = BlockedSignals::new();
    std::thread::Builder::new().name("nobounce-watch".into()).spawn(look).map(|_| ())
}

fn look() {
    loop {
        std::thread::sleep(EVERY);
        let memories: Vec<_> = {
            let mut watched = lock();
            watched.memories.retain(|memory| memory.strong_count() > 0);
            if watched.memories.is_empty() {
                watched.looked_after = false;
                return;
            }
            watched.memories.iter().filter_map(Weak::upgrade).collect()
        };
        // Without the lock: CUDA may make this wait.
        for memory in memories {
            if let Err(gone) = memory.check_alive()
                && !Driver::is_forked()
            {
                memory.cut_off(gone);
                lock().memories.retain(|other| !ptr::eq(other.as_ptr(), Arc::as_ptr(&memory)));
            }
        }
    }
}
