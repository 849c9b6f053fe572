//! Requests that wait for a thread of the server.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use nobounce_transfer::{Agent, Peer};

use crate::jobs::Serving;
use crate::request::{MAX_REQUESTS, Request};

/// Requests that wait for a thread.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    requests: Mutex<Requests>,
    changed: Condvar,
    /// Threads that one client may occupy: all but one.
    most_of_client: usize,
}

#[derive(Debug, Default)]
struct Requests {
    waiting: VecDeque<(Peer, Request)>,
    /// Of each client: those that wait or are carried out, and the latter.
    open: HashMap<u64, (usize, usize)>,
    is_closed: bool,
}

impl Queue {
    pub(crate) fn new(most_of_client: usize) -> Self {
        Self { most_of_client, ..Self::default() }
    }

    /// Its threads end with the requests that they carry out.
    pub(crate) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request; false if this client has more than it may have.
    pub(crate) fn add(&self, peer: Peer, request: Request) -> bool {
        let mut requests = self.lock();
        let (open, _) = requests.open.entry(peer.number()).or_default();
        // An answer leaves before the request is counted as ended.
        if *open >= 2 * MAX_REQUESTS {
            return false;
        }
        *open += 1;
        requests.waiting.push_back((peer, request));
        self.changed.notify_one();
        true
    }

    /// A thread: carries out requests until the server ends.
    pub(crate) fn work(&self, agent: &Agent, serving: &Serving) {
        while let Some((peer, request)) = self.next() {
            if peer.gone().is_none() {
                serving.run(agent, &peer, &request);
            }
            let mut requests = self.lock();
            if let Some((open, running)) = requests.open.get_mut(&peer.number()) {
                (*open, *running) = (*open - 1, *running - 1);
                if *open == 0 {
                    requests.open.remove(&peer.number());
                }
            }
            // One that waited for this client's turn.
            self.changed.notify_one();
        }
    }

    /// The oldest request of a client that does not occupy its share of threads; `None` at the end.
    fn next(&self) -> Option<(Peer, Request)> {
        let mut requests = self.lock();
        loop {
            if requests.is_closed {
                return None;
            }
            let Requests { waiting, open, .. } = &mut *requests;
            let is_free = |(peer, _): &(Peer, Request)| {
                open.get(&peer.number()).is_none_or(|(_, running)| *running < self.most_of_client)
            };
            if let Some(found) = waiting.iter().position(is_free).and_then(|at| waiting.remove(at)) {
                open.entry(found.0.number()).or_default().1 += 1;
                return Some(found);
            }
            requests = self.changed.wait(requests).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
