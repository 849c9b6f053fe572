//! Requests that wait for a thread of the server.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use nobounce_transfer::{Agent, MAX_UNREAD, Peer};

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
    /// With the number of its messages.
    waiting: VecDeque<(Peer, Request, usize)>,
    by_client: HashMap<u64, Load>,
    is_closed: bool,
}

/// Requests of one client.
#[derive(Debug, Default)]
struct Load {
    /// Those that wait or are carried out.
    open: usize,
    running: usize,
    /// Messages of those that wait: they occupy memory.
    messages: usize,
}

impl Load {
    /// Adds a request; false if that are more than our clients send. An answer leaves before the
    /// request is counted as ended; none leaves while a request waits.
    fn admit(&mut self, messages: usize) -> bool {
        let fits = self.open < 2 * MAX_REQUESTS && self.messages + messages <= MAX_UNREAD;
        if fits {
            self.open += 1;
            self.messages += messages;
        }
        fits
    }

    fn begin(&mut self, messages: usize) {
        self.running += 1;
        self.messages -= messages;
    }

    /// Whether it was the last one.
    fn end(&mut self) -> bool {
        (self.open, self.running) = (self.open - 1, self.running - 1);
        self.open == 0
    }
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
        let messages = request.message_count();
        let mut requests = self.lock();
        if !requests.by_client.entry(peer.number()).or_default().admit(messages) {
            return false;
        }
        requests.waiting.push_back((peer, request, messages));
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
            if requests.by_client.get_mut(&peer.number()).is_some_and(Load::end) {
                requests.by_client.remove(&peer.number());
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
            let Requests { waiting, by_client, .. } = &mut *requests;
            let is_free = |(peer, ..): &(Peer, Request, usize)| {
                by_client.get(&peer.number()).is_none_or(|load| load.running < self.most_of_client)
            };
            let found = waiting.iter().position(is_free).and_then(|at| waiting.remove(at));
            if let Some((peer, request, messages)) = found {
                by_client.entry(peer.number()).or_default().begin(messages);
                return Some((peer, request));
            }
            requests = self.changed.wait(requests).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_wait_are_few_and_small() {
        let mut load = Load::default();
        assert!(load.admit(MAX_UNREAD), "the largest request");
        assert!(!load.admit(1));
        load.begin(MAX_UNREAD);
        assert!(load.admit(MAX_UNREAD), "its memory is the thread's");
        assert!(!load.end());
        load.begin(MAX_UNREAD);
        assert!(load.end());
        let mut load = Load::default();
        assert_eq!((0..1000).filter(|_| load.admit(1)).count(), 2 * MAX_REQUESTS);
    }
}
