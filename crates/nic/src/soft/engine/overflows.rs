//! Completion-queue overflows of a device, shared by its engines.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nobounce_protocol::qp::{QpAttr, QpEvent, QpState};

use crate::soft::engine::Core;
use crate::soft::events::event::{AsyncEvent, Events};
use crate::sync::waker::Waker;

/// The completion queues that overflowed, in order: each appears once.
#[derive(Debug, Default)]
pub(crate) struct Overflows {
    count: AtomicUsize,
    told: Mutex<KnownOverflows>,
}

#[derive(Debug, Default)]
struct KnownOverflows {
    cqs: Vec<u32>,
    wakers: Vec<Arc<Waker>>,
}

impl Overflows {
    /// Their number: one load.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Wakes this thread at every overflow from now on.
    pub(crate) fn wakes(&self, waker: &Arc<Waker>) {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).wakers.push(waker.clone());
    }

    /// Records an overflow.
    pub(crate) fn tell(&self, cq: u32) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.cqs.push(cq);
        self.count.store(told.cqs.len(), Ordering::Release);
        told.wakers.iter().for_each(|waker| waker.wake());
    }

    /// Those after the first `known`; updates `known`.
    pub(crate) fn since(&self, known: &mut usize) -> Vec<u32> {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let news = told.cqs.get(*known..).unwrap_or_default().to_vec();
        *known = told.cqs.len();
        news
    }
}

/// Where an engine reports what the application and the device's other engines must know.
#[derive(Debug)]
pub(crate) struct Reports {
    pub(crate) events: Arc<Events>,
    overflows: Arc<Overflows>,
    /// Overflows that this engine has handled.
    known: usize,
}

impl Reports {
    pub(crate) fn new(events: Arc<Events>, overflows: Arc<Overflows>) -> Self {
        Self { events, known: overflows.count(), overflows }
    }

    /// Whether there are overflows that this engine has not handled.
    #[inline]
    pub(crate) fn has_overflows(&self) -> bool {
        self.overflows.count() != self.known
    }

    /// A completion queue overflowed here. The other engines handle it later, and this one sees it
    /// once more.
    fn tell_overflow(&self, cq: u32) {
        self.events.push(AsyncEvent::CqOverflow { cq });
        self.overflows.tell(cq);
    }
}

impl Core {
    /// A completion queue overflowed: its queue pairs must not continue.
    pub(crate) fn stop_users_of(&mut self, cq: u32) {
        self.reports.tell_overflow(cq);
        self.stop_own_users_of(cq);
    }

    /// A completion queue overflowed, perhaps in another engine.
    #[cold]
    pub(crate) fn hear_of_overflows(&mut self) {
        for cq in self.reports.overflows.since(&mut self.reports.known) {
            self.stop_own_users_of(cq);
        }
    }

    fn stop_own_users_of(&mut self, cq: u32) {
        for index in self.qps.indexes() {
            let Some(entry) = self.qps.get_mut(index) else { continue };
            let uses = entry.send_cq.id == cq || entry.recv_cq.id == cq;
            if uses && !matches!(entry.qp.state(), QpState::Error | QpState::Reset) {
                let to_error = QpAttr::to_state(QpState::Error);
                let _ = entry.qp.modify(&to_error); // any state may go to the error state
                self.reports.events.push(AsyncEvent::Qp { qpn: entry.qpn, event: QpEvent::Fatal });
                self.settle(index);
            }
        }
    }
}
