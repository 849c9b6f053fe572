//! Requests of clients, as the agent's thread reads them. Nothing here blocks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use nobounce_transfer::{Handler, Notification, Peer};

use crate::jobs::Serving;
use crate::queue::Queue;
use crate::request::{Message, Request};
use crate::short::{Short, Taken};

/// Puts requests together, answers short ones, and queues the others.
pub(crate) struct Reader {
    serving: Arc<Serving>,
    queue: Arc<Queue>,
    clients: Mutex<Clients>,
}

#[derive(Default)]
struct Clients {
    /// Of each client: the request that is being told, if it is fine so far.
    partial: HashMap<u64, Option<Request>>,
    short: Short,
}

impl Reader {
    pub(crate) fn new(serving: Arc<Serving>, queue: Arc<Queue>) -> Self {
        Self { serving, queue, clients: Mutex::default() }
    }
}

impl Handler for Reader {
    fn message(&self, peer: &Peer, bytes: &[u8]) {
        let Some(message) = Message::decode(bytes) else {
            tracing::warn!(peer = peer.addr(), "a client sent a malformed request");
            return peer.close();
        };
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let key = peer.number();
        match message {
            Message::Begin { id, kind, export } => {
                clients.partial.insert(key, Some(Request::new(id, kind, export)));
            }
            Message::File { id, path } => clients.extend(key, id, |request| request.add_file(path)),
            Message::Ranges { id, ranges } => clients.extend(key, id, |request| request.add_ranges(&ranges)),
            Message::Go { id } => {
                let request = clients.partial.remove(&key).flatten();
                let request = request.filter(|request| request.id == id);
                // Our clients keep the limits and the order.
                if !request.is_some_and(|request| self.queue.add(peer.clone(), request)) {
                    refuse(peer);
                }
            }
            Message::Short { id, kind, export, path, ranges } => {
                let request = Request { id, kind, export, files: vec![(path, ranges)] };
                let is_taken = match clients.short.take(&self.serving, peer, &request) {
                    Taken::Answered => true,
                    Taken::Left => self.queue.add(peer.clone(), request),
                    Taken::Flooded => false,
                };
                if !is_taken {
                    refuse(peer);
                }
            }
        }
    }

    /// Clients send none.
    fn notification(&self, _: Notification) {}

    fn gone(&self, peer: &Peer) {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        clients.partial.remove(&peer.number());
        clients.short.forget(peer);
    }
}

impl Clients {
    /// Adds to a request; one that exceeds a limit is forgotten, and ends the connection.
    fn extend(&mut self, key: u64, id: u64, add: impl FnOnce(&mut Request) -> bool) {
        if let Some(partial) = self.partial.get_mut(&key) {
            let fits = partial.as_mut().is_some_and(|request| request.id == id && add(request));
            if !fits {
                *partial = None;
            }
        }
    }
}

fn refuse(peer: &Peer) {
    tracing::warn!(peer = peer.addr(), "a client exceeded the limits of requests: closed");
    peer.close();
}
