//! One transfer, as the application sees it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::TransferError;
use crate::shared::{Command, Shared};

/// A transfer that ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// Bytes moved.
    pub bytes: u64,
    /// Pieces after adjacent ones were merged.
    pub pieces: usize,
}

/// Longer than any process runs, and short enough to add to the time.
pub(crate) const EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// When a timeout ends.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(EVER)
}

#[derive(Debug)]
pub(crate) struct TransferState {
    pub(crate) id: u64,
    result: Mutex<Option<Result<Summary, TransferError>>>,
    ended: Condvar,
    is_cancelled: AtomicBool,
    is_watched: AtomicBool,
}

impl TransferState {
    pub(crate) fn new(id: u64) -> Self {
        let (result, ended) = (Mutex::default(), Condvar::new());
        Self { id, result, ended, is_cancelled: AtomicBool::new(false), is_watched: AtomicBool::new(false) }
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.is_watched.load(Ordering::SeqCst)
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }

    /// The first result counts.
    pub(crate) fn end(&self, result: Result<Summary, TransferError>) {
        let mut place = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        if place.is_none() {
            *place = Some(result);
            self.ended.notify_all();
        }
    }

    fn result(&self) -> Option<Result<Summary, TransferError>> {
        self.result.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A transfer in flight. It goes on if this is dropped.
#[derive(Clone, Debug)]
pub struct Transfer {
    pub(crate) state: Arc<TransferState>,
    pub(crate) shared: Arc<Shared>,
}

impl Transfer {
    /// Its number, unique in the agent.
    pub fn id(&self) -> u64 {
        self.state.id
    }

    /// Its result, if it has ended.
    pub fn result(&self) -> Option<Result<Summary, TransferError>> {
        self.state.result()
    }

    /// Makes its end an event of the agent ([`Agent::take_events`](crate::Agent::take_events)).
    /// False if it has ended already.
    pub fn watch(&self) -> bool {
        self.state.is_watched.store(true, Ordering::SeqCst);
        self.result().is_none()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It failed; or it is still in flight after the timeout.
    pub fn wait(&self, timeout: Duration) -> Result<Summary, TransferError> {
        let deadline = deadline(timeout);
        let mut result = self.state.result.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(result) = &*result {
                return result.clone();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(TransferError::Timeout(timeout));
            }
            result = self.state.ended.wait_timeout(result, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Stops it: pieces that are not posted yet are left out. It ends with
    /// [`TransferError::Cancelled`] when the posted ones have ended, so its memory may be used
    /// again then. The peer is notified of the failure.
    pub fn cancel(&self) {
        self.state.is_cancelled.store(true, Ordering::Relaxed);
        self.shared.push([Command::Cancel { transfer: self.state.id }]);
    }
}
