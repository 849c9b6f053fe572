//! Messages between applications, in order beside the transfers.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::shared::PeerShared;

/// Messages of one peer that the application has not taken. A peer that sends more is against the
/// protocol: an application that may get ahead waits for answers.
pub const MAX_UNREAD: usize = 4096;

/// Messages that the application has not taken, each with its peer.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    waiting: Mutex<VecDeque<(Arc<PeerShared>, Vec<u8>)>>,
    arrived: Condvar,
}

/// The number of messages of a peer that wait.
#[derive(Debug, Default)]
pub(crate) struct Unread(AtomicUsize);

impl Inbox {
    /// Adds a message; false if the application is too far behind.
    pub(crate) fn add(&self, peer: &Arc<PeerShared>, bytes: Vec<u8>) -> bool {
        if peer.unread.0.fetch_add(1, Ordering::Relaxed) >= MAX_UNREAD {
            peer.unread.0.fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.push_back((peer.clone(), bytes));
        drop(waiting);
        self.arrived.notify_all();
        true
    }

    /// Forgets those of a peer that is gone: an application that takes none would keep them.
    pub(crate) fn forget(&self, peer: &PeerShared) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|(other, _)| other.key != peer.key);
    }

    /// The next one; `None` if none comes in time.
    pub(crate) fn take(&self, timeout: Duration) -> Option<(Arc<PeerShared>, Vec<u8>)> {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.arrived.wait_timeout_while(waiting, timeout, |waiting| waiting.is_empty());
        let (peer, bytes) = waited.unwrap_or_else(PoisonError::into_inner).0.pop_front()?;
        peer.unread.0.fetch_sub(1, Ordering::Relaxed);
        Some((peer, bytes))
    }
}
