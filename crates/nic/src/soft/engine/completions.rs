//! The ring inside a completion queue: engines push completions, applications take them and arm the
//! queue.
//!
//! Taking is lock-free: consumers read a ring without a system call. Pushing, arming and all rare
//! operations use a lock that consumers never take. The ring grows as it fills, up to the depth of
//! the queue. Outgrown rings are kept until the queue is freed, since a consumer may still read
//! one. `tests/loom.rs` tries every order.

use crate::soft::events::completion_events::CompletionEvents;
use crate::sync::ring::Ring;
use crate::sync::{AtomicBool, AtomicPtr, FIRST_PLACES, Mutex, MutexGuard, Ordering, PoisonError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Armed {
    No,
    Solicited,
    Any,
}

#[derive(Debug)]
struct Producer<T> {
    /// All rings so far; the last one is in use.
    #[allow(clippy::vec_box)] // consumers hold their addresses
    rings: Vec<Box<Ring<T>>>,
    depth: usize,
    armed: Armed,
    /// The channel that an armed queue notifies, until its owner destroys it.
    channel: Option<CompletionEvents>,
    /// The owner is gone: the depth is 0, and an overflow is no event.
    closed: bool,
}

impl<T> Producer<T> {
    fn ring(&self) -> &Ring<T> {
        &self.rings[self.rings.len() - 1]
    }

    fn announce(&self, id: u32) {
        if let Some(channel) = &self.channel {
            channel.push(id);
        }
    }
}

/// The queue.
#[derive(Debug)]
pub(crate) struct Completions<T> {
    pub(crate) id: u32,
    /// The ring in use.
    ring: AtomicPtr<Ring<T>>,
    /// Completions are lost. Set after the last one that is not.
    overflowed: AtomicBool,
    /// A copy of the producer's flag, for pollers.
    is_armed: AtomicBool,
    /// Whether completions carry their time.
    records_time: AtomicBool,
    producer: Mutex<Producer<T>>,
}

impl<T: Send> Completions<T> {
    pub(crate) fn new(id: u32, depth: usize, channel: Option<CompletionEvents>) -> Self {
        let ring = Box::new(Ring::new(depth.min(FIRST_PLACES)));
        let address = std::ptr::from_ref(&*ring).cast_mut();
        let producer = Producer { rings: vec![ring], depth, armed: Armed::No, channel, closed: false };
        Self {
            id,
            ring: AtomicPtr::new(address),
            overflowed: AtomicBool::new(false),
            is_armed: AtomicBool::new(false),
            records_time: AtomicBool::new(false),
            producer: Mutex::new(producer),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Producer<T>> {
        self.producer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn ring(&self) -> &Ring<T> {
        // SAFETY: the address of a ring in `rings`, which are freed with `self` only, and never
        // borrowed mutably.
        unsafe { &*self.ring.load(Ordering::Acquire) }
    }

    pub(crate) fn depth(&self) -> usize {
        self.lock().depth
    }

    /// From now on completions carry their time.
    pub(crate) fn record_time(&self) {
        self.records_time.store(true, Ordering::Relaxed);
    }

    pub(crate) fn records_time(&self) -> bool {
        self.records_time.load(Ordering::Relaxed)
    }

    pub(crate) fn is_overflowed(&self) -> bool {
        self.overflowed.load(Ordering::Acquire)
    }

    /// Whether the next completion raises an event: the application is about to sleep.
    #[inline]
    pub(crate) fn is_armed(&self) -> bool {
        self.is_armed.load(Ordering::Relaxed)
    }

    /// Adds a completion; false at the first overflow. An urgent completion also raises a
    /// solicited-only event.
    #[inline]
    pub(crate) fn push(&self, completion: T, urgent: bool) -> bool {
        let mut producer = self.lock();
        // After a loss none follows: otherwise the taken completions would look complete, and the
        // loss would be detected too late.
        if producer.ring().claimed() >= producer.depth
            || self.overflowed.load(Ordering::Relaxed)
            || !self.put(&mut producer, completion)
        {
            if producer.closed {
                return true;
            }
            let known = self.overflowed.swap(true, Ordering::Release);
            // Wake a sleeping application: no completion will follow.
            if !known {
                producer.announce(self.id);
            }
            return known;
        }
        if producer.armed == Armed::Any || (producer.armed == Armed::Solicited && urgent) {
            self.set_armed(&mut producer, Armed::No);
            producer.announce(self.id);
        }
        true
    }

    fn set_armed(&self, producer: &mut Producer<T>, armed: Armed) {
        producer.armed = armed;
        self.is_armed.store(armed != Armed::No, Ordering::Relaxed);
    }

    /// False where memory for a larger ring has run out.
    #[inline]
    fn put(&self, producer: &mut Producer<T>, completion: T) -> bool {
        match producer.ring().push(completion) {
            Ok(()) => true,
            Err(completion) => self.grow(producer, completion),
        }
    }

    /// Continues in a ring of twice the size, which has `last` at its end. (A consumer that has not
    /// finished taking holds places, so that the ring may need more of them than the queue is
    /// deep.)
    #[cold]
    fn grow(&self, producer: &mut Producer<T>, last: T) -> bool {
        let Some(larger) = Ring::try_new(producer.ring().places() * 2) else { return false };
        let larger = Box::new(larger);
        producer.ring().pop_each(usize::MAX, |completion| _ = larger.push(completion));
        let _ = larger.push(last); // twice the size has room for one more
        self.ring.store(std::ptr::from_ref(&*larger).cast_mut(), Ordering::Release);
        producer.rings.push(larger);
        true
    }

    /// Whether it is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.ring().is_empty()
    }

    /// Takes at most `max` completions, and returns how many.
    #[inline(always)]
    pub(crate) fn take(&self, max: usize, each: &mut impl FnMut(T)) -> usize {
        self.ring().pop_each(max, each)
    }

    /// As [`take`](Self::take); `None` once the queue is empty and has overflowed.
    #[inline]
    pub(crate) fn take_unless_lost(&self, max: usize, each: &mut impl FnMut(T)) -> Option<usize> {
        // Loaded first: the take below must see everything that was pushed before the overflow.
        let overflowed = self.is_overflowed();
        let taken = self.take(max, each);
        (taken > 0 || !overflowed).then_some(taken)
    }

    /// Removes the completions that `of` selects. The others may be invisible for a moment.
    pub(crate) fn forget(&self, of: impl Fn(&T) -> bool) {
        let mut producer = self.lock();
        let mut kept = Vec::new();
        producer.ring().pop_each(usize::MAX, |completion| kept.push(completion));
        for completion in kept.into_iter().filter(|completion| !of(completion)) {
            self.put(&mut producer, completion);
        }
    }

    /// The next completion raises an event, once (or the next urgent one).
    pub(crate) fn arm(&self, solicited_only: bool) {
        let mut producer = self.lock();
        let only = solicited_only && producer.armed != Armed::Any;
        self.set_armed(&mut producer, if only { Armed::Solicited } else { Armed::Any });
    }

    /// The next completion raises no event.
    pub(crate) fn disarm(&self) {
        self.set_armed(&mut self.lock(), Armed::No);
    }

    /// Sets the depth.
    ///
    /// # Errors
    /// It holds more than `depth`: how many.
    pub(crate) fn resize(&self, depth: usize) -> Result<(), usize> {
        let mut producer = self.lock();
        let held = producer.ring().claimed();
        if held > depth {
            return Err(held);
        }
        producer.depth = depth;
        Ok(())
    }

    /// The owner is gone: completions and events are dropped, including pending events.
    pub(crate) fn close(&self) {
        // Under the lock, so that no event is raised concurrently.
        let mut producer = self.lock();
        if let Some(channel) = producer.channel.take() {
            channel.forget(self.id);
        }
        (producer.closed, producer.depth) = (true, 0);
        producer.ring().pop_each(usize::MAX, drop);
    }
}
