//! The handler of an agent, as its thread calls it.

use std::sync::{Arc, PoisonError, RwLock};

use crate::notification::Notification;
use crate::shared::{PeerShared, Shared};

/// What the agent's thread calls instead of filling queues.
pub(crate) trait Hooks: Send + Sync {
    fn message(&self, shared: &Arc<Shared>, peer: &Arc<PeerShared>, bytes: &[u8]);
    fn notification(&self, notification: Notification);
    fn gone(&self, shared: &Arc<Shared>, peer: &Arc<PeerShared>);
}

/// `None` in an agent without a handler. Dropped when the agent's thread ends.
pub(crate) struct Hook(RwLock<Option<Arc<dyn Hooks>>>);

impl Hook {
    pub(crate) fn new(hooks: Option<Arc<dyn Hooks>>) -> Self {
        Self(RwLock::new(hooks))
    }

    /// It may hold what holds the agent.
    pub(crate) fn clear(&self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(crate) fn get(&self) -> Option<Arc<dyn Hooks>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hook({})", self.get().is_some())
    }
}
