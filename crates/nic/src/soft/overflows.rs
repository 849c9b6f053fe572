//! Which completion queues of a device have lost something: its engines tell each other.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::bell::Bell;

/// The completion queues that overflowed, in order: each is named once in its life.
#[derive(Debug, Default)]
pub(crate) struct Overflows {
    count: AtomicUsize,
    told: Mutex<Told>,
}

#[derive(Debug, Default)]
struct Told {
    cqs: Vec<u32>,
    bells: Vec<Bell>,
}

impl Overflows {
    /// How many there are: a look at one number.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// This bell is rung when there is one more.
    pub(crate) fn wakes(&self, bell: &Bell) {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).bells.push(bell.clone());
    }

    /// One more.
    pub(crate) fn tell(&self, cq: u32) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.cqs.push(cq);
        self.count.store(told.cqs.len(), Ordering::Release);
        told.bells.iter().for_each(Bell::wake);
    }

    /// Those after the first `known`, which are known from now on.
    pub(crate) fn since(&self, known: &mut usize) -> Vec<u32> {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let news = told.cqs.get(*known..).unwrap_or_default().to_vec();
        *known = told.cqs.len();
        news
    }
}
