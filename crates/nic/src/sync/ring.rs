//! A bounded lock-free queue: several producers, several consumers.
//!
//! Each slot has a sequence number: its position while it is free, the position plus one while it
//! is full. Emptying it sets the position of the next lap. A producer or consumer claims positions
//! by moving the tail or the head, and then has those slots to itself.

use std::mem::MaybeUninit;

use crate::sync::{AtomicUsize, Ordering, UnsafeCell};

/// Two cache lines: processors fetch them in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct Padded<T>(T);

#[derive(Debug)]
struct RingSlot<T> {
    sequence: AtomicUsize,
    value: UnsafeCell<MaybeUninit<T>>,
}

fn places_for(room: usize) -> usize {
    room.max(2).next_power_of_two()
}

/// The queue.
#[derive(Debug)]
pub(crate) struct Ring<T> {
    slots: Box<[RingSlot<T>]>,
    mask: usize,
    head: Padded<AtomicUsize>,
    tail: Padded<AtomicUsize>,
}

// SAFETY: a value is reached by the thread alone that claimed its slot, and moves from one thread
// to another with it.
unsafe impl<T: Send> Send for Ring<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Ring<T> {}

impl<T> Ring<T> {
    /// A queue of at least `room` places.
    pub(crate) fn new(room: usize) -> Self {
        Self::of(Vec::new(), room)
    }

    /// The same; `None` where memory has run out.
    pub(crate) fn try_new(room: usize) -> Option<Self> {
        let mut slots = Vec::new();
        slots.try_reserve_exact(places_for(room)).ok()?;
        Some(Self::of(slots, room))
    }

    fn of(mut slots: Vec<RingSlot<T>>, room: usize) -> Self {
        let places = places_for(room);
        slots.extend((0..places).map(|at| RingSlot {
            sequence: AtomicUsize::new(at),
            value: UnsafeCell::new(MaybeUninit::uninit()),
        }));
        Self {
            slots: slots.into_boxed_slice(),
            mask: places - 1,
            head: Padded(AtomicUsize::new(0)),
            tail: Padded(AtomicUsize::new(0)),
        }
    }

    /// How many places it has.
    pub(crate) fn places(&self) -> usize {
        self.slots.len()
    }

    #[inline]
    fn slot(&self, position: usize) -> &RingSlot<T> {
        &self.slots[position & self.mask]
    }

    /// Whether nothing is there to be taken; also while another consumer is taking the oldest.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        let head = self.head.0.load(Ordering::Acquire);
        self.slot(head).sequence.load(Ordering::Acquire) != head.wrapping_add(1)
    }

    /// How many were claimed by producers and not by consumers: those that are being written count.
    #[inline]
    pub(crate) fn claimed(&self) -> usize {
        let head = self.head.0.load(Ordering::Acquire);
        self.tail.0.load(Ordering::Acquire).wrapping_sub(head)
    }

    /// Puts a value in.
    ///
    /// # Errors
    /// There is no room: the value comes back.
    #[inline]
    pub(crate) fn push(&self, value: T) -> Result<(), T> {
        let mut tail = self.tail.0.load(Ordering::Relaxed);
        loop {
            let slot = self.slot(tail);
            let sequence = slot.sequence.load(Ordering::Acquire);
            if sequence == tail {
                let next = tail.wrapping_add(1);
                match self.tail.0.compare_exchange_weak(tail, next, Ordering::AcqRel, Ordering::Relaxed) {
                    Ok(_) => {
                        // SAFETY: the slot is free and this thread has just claimed it.
                        slot.value.with_mut(|place| unsafe { (*place).write(value) });
                        slot.sequence.store(next, Ordering::Release);
                        return Ok(());
                    }
                    Err(now) => tail = now,
                }
            } else if sequence.wrapping_sub(tail) > self.mask {
                return Err(value); // not emptied since the last lap
            } else {
                tail = self.tail.0.load(Ordering::Relaxed);
            }
        }
    }

    /// Takes at most `max` values, in order; how many.
    #[inline]
    pub(crate) fn pop_each(&self, max: usize, mut each: impl FnMut(T)) -> usize {
        let mut head = self.head.0.load(Ordering::Relaxed);
        let count = loop {
            let is_full = |at: &usize| {
                let position = head.wrapping_add(*at);
                self.slot(position).sequence.load(Ordering::Acquire) == position.wrapping_add(1)
            };
            let count = (0..max).take_while(is_full).count();
            if count == 0 {
                let now = self.head.0.load(Ordering::Relaxed);
                if now == head {
                    return 0;
                }
                head = now;
                continue;
            }
            let next = head.wrapping_add(count);
            match self.head.0.compare_exchange_weak(head, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break count,
                Err(now) => head = now,
            }
        };
        for position in (0..count).map(|at| head.wrapping_add(at)) {
            let slot = self.slot(position);
            // SAFETY: the slot was full when this thread claimed it, and no other thread empties
            // it.
            let value = slot.value.with(|place| unsafe { (*place).assume_init_read() });
            slot.sequence.store(position.wrapping_add(self.places()), Ordering::Release);
            each(value);
        }
        count
    }

    /// Takes the oldest value.
    #[inline]
    pub(crate) fn pop(&self) -> Option<T> {
        let mut taken = None;
        self.pop_each(1, |value| taken = Some(value));
        taken
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}
