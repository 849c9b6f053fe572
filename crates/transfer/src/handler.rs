//! An application that the agent's thread calls, instead of keeping events for it.

use std::sync::Arc;

use crate::hook::Hooks;
use crate::notification::Notification;
use crate::peer::Peer;
use crate::shared::{PeerShared, Shared};

/// Called by the agent's threads, most often by the one that carries out all transfers: nothing
/// here may block, or end the agent. What an agent with a handler receives is in none of its
/// queues.
pub trait Handler: Send + Sync {
    /// A message of a peer.
    fn message(&self, peer: &Peer, bytes: &[u8]);

    /// A transfer of a peer with a tag has ended.
    fn notification(&self, notification: Notification);

    /// A peer is gone.
    fn gone(&self, peer: &Peer);
}

/// A handler as the agent's thread knows it.
pub(crate) struct Hooked(pub(crate) Box<dyn Handler>);

impl Hooks for Hooked {
    fn message(&self, shared: &Arc<Shared>, peer: &Arc<PeerShared>, bytes: &[u8]) {
        self.0.message(&Peer { inner: peer.clone(), shared: shared.clone() }, bytes);
    }

    fn notification(&self, notification: Notification) {
        self.0.notification(notification);
    }

    fn gone(&self, shared: &Arc<Shared>, peer: &Arc<PeerShared>) {
        self.0.gone(&Peer { inner: peer.clone(), shared: shared.clone() });
    }
}
