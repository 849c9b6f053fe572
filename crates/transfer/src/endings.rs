//! Threads that end links: destroying a queue pair may take up to a second.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::error::Gone;
use crate::link::Link;

/// Links that end at a time; others wait for their turn.
const MAX_THREADS: usize = 16;

#[derive(Debug, Default)]
pub(crate) struct Endings(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<EndingQueue>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct EndingQueue {
    waiting: VecDeque<(Link, Gone)>,
    threads: usize,
}

impl Endings {
    /// Ends the link soon.
    pub(crate) fn push(&self, link: Link, reason: Gone) {
        let mut state = self.0.state();
        state.waiting.push_back((link, reason));
        if state.threads >= MAX_THREADS {
            return;
        }
        state.threads += 1;
        drop(state);
        let inner = self.0.clone();
        let started = std::thread::Builder::new().name("nb-ending".to_owned()).spawn(move || inner.run());
        if started.is_err() {
            self.0.run();
        }
    }

    /// Waits until all have ended.
    pub(crate) fn wait(&self) {
        let state = self.0.state();
        drop(self.0.ended.wait_while(state, |state| state.threads > 0));
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, EndingQueue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        loop {
            let mut state = self.state();
            let Some((link, reason)) = state.waiting.pop_front() else {
                state.threads -= 1;
                self.ended.notify_all();
                return;
            };
            drop(state);
            if catch_unwind(AssertUnwindSafe(|| link.end(&reason))).is_err() {
                tracing::error!("a panic while a connection ended");
            }
        }
    }
}
