//! The queue inside a completion queue: engines put completions in, applications take them out and arm it.
//!
//! Taking is lock-free: a ring that consumers read without a system call. Putting, arming and everything rare is done under a lock that
//! consumers never take. The ring grows as it fills, up to the depth of the queue; outgrown rings are kept until the queue goes, since a
//! consumer may still be looking at one. `tests/loom.rs` tries every order.

use crate::soft::events::channel::Channel;
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
    /// All rings there have been; the last one is in use.
    #[allow(clippy::vec_box)] // consumers have their addresses
    rings: Vec<Box<Ring<T>>>,
    depth: usize,
    armed: Armed,
    /// Where an armed queue announces itself, until its owner destroys it.
    channel: Option<Channel>,
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
    /// As the producer's, for those who poll.
    is_armed: AtomicBool,
    producer: Mutex<Producer<T>>,
}

impl<T: Send> Completions<T> {
    pub(crate) fn new(id: u32, depth: usize, channel: Option<Channel>) -> Self {
        let ring = Box::new(Ring::new(depth.min(FIRST_PLACES)));
        let address = std::ptr::from_ref(&*ring).cast_mut();
        let producer = Producer { rings: vec![ring], depth, armed: Armed::No, channel, closed: false };
        Self {
            id,
            ring: AtomicPtr::new(address),
            overflowed: AtomicBool::new(false),
            is_armed: AtomicBool::new(false),
            producer: Mutex::new(producer),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Producer<T>> {
        self.producer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn ring(&self) -> &Ring<T> {
        // SAFETY: the address of a ring in `rings`, which are freed with `self` only, and never borrowed mutably.
        unsafe { &*self.ring.load(Ordering::Acquire) }
    }

    pub(crate) fn depth(&self) -> usize {
        self.lock().depth
    }

    pub(crate) fn is_overflowed(&self) -> bool {
        self.overflowed.load(Ordering::Acquire)
    }

    /// Whether the next completion is announced: the application is about to sleep.
    #[inline]
    pub(crate) fn is_armed(&self) -> bool {
        self.is_armed.load(Ordering::Relaxed)
    }

    /// Adds a completion; false when there was no room, for the first time. An urgent one is announced to those who asked for
    /// solicited ones only.
    #[inline]
    pub(crate) fn push(&self, completion: T, urgent: bool) -> bool {
        let mut producer = self.lock();
        // Once one is lost, none follows it: what is taken out would look complete, and the loss would be found out too late.
        if producer.ring().claimed() >= producer.depth || self.overflowed.load(Ordering::Relaxed) {
            if producer.closed {
                return true;
            }
            let known = self.overflowed.swap(true, Ordering::Release);
            // A sleeping application must learn that nothing will ever come.
            if !known {
                producer.announce(self.id);
            }
            return known;
        }
        self.put(&mut producer, completion);
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

    #[inline]
    fn put(&self, producer: &mut Producer<T>, completion: T) {
        if let Err(completion) = producer.ring().push(completion) {
            self.grow(producer, completion);
        }
    }

    /// Continues in a ring of twice the size, which has `last` at its end. (A consumer that has not finished taking holds places, so
    /// that the ring may need more of them than the queue is deep.)
    #[cold]
    fn grow(&self, producer: &mut Producer<T>, last: T) {
        let larger = Box::new(Ring::new(producer.ring().places() * 2));
        producer.ring().pop_each(usize::MAX, |completion| _ = larger.push(completion));
        let _ = larger.push(last); // twice the size has room for one more
        self.ring.store(std::ptr::from_ref(&*larger).cast_mut(), Ordering::Release);
        producer.rings.push(larger);
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.ring().is_empty()
    }

    /// Takes at most `max` completions, and returns how many.
    #[inline(always)]
    pub(crate) fn take(&self, max: usize, each: &mut impl FnMut(T)) -> usize {
        self.ring().pop_each(max, each)
    }

    /// As [`take`](Self::take); nothing when there are none, and never will be all there should.
    #[inline]
    pub(crate) fn take_unless_lost(&self, max: usize, each: &mut impl FnMut(T)) -> Option<usize> {
        // Loaded first: what was there when it overflowed must be seen by the look after this.
        let overflowed = self.is_overflowed();
        let taken = self.take(max, each);
        (taken > 0 || !overflowed).then_some(taken)
    }

    /// Forgets the completions that `of` picks. The others may be out of sight for a moment.
    pub(crate) fn forget(&self, of: impl Fn(&T) -> bool) {
        let mut producer = self.lock();
        let mut kept = Vec::new();
        producer.ring().pop_each(usize::MAX, |completion| kept.push(completion));
        for completion in kept.into_iter().filter(|completion| !of(completion)) {
            self.put(&mut producer, completion);
        }
    }

    /// The next completion is announced, once (or the next urgent one).
    pub(crate) fn arm(&self, solicited_only: bool) {
        let mut producer = self.lock();
        let only = solicited_only && producer.armed != Armed::Any;
        self.set_armed(&mut producer, if only { Armed::Solicited } else { Armed::Any });
    }

    /// Holds at most `depth` from now on.
    ///
    /// # Errors
    /// It holds more than that: how many.
    pub(crate) fn resize(&self, depth: usize) -> Result<(), usize> {
        let mut producer = self.lock();
        let held = producer.ring().claimed();
        if held > depth {
            return Err(held);
        }
        producer.depth = depth;
        Ok(())
    }

    /// The owner goes: nothing is taken or announced any more, and what was announced is forgotten.
    pub(crate) fn close(&self) {
        // Under the lock, so that nothing is announced behind our back.
        let mut producer = self.lock();
        if let Some(channel) = producer.channel.take() {
            channel.forget(self.id);
        }
        (producer.closed, producer.depth) = (true, 0);
        producer.ring().pop_each(usize::MAX, drop);
    }
}
