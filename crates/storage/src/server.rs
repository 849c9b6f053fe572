//! The serving end.

use std::collections::{HashMap, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nobounce::Device;
use nobounce_nic::EventFd;
use nobounce_transfer::{Agent, AgentOptions, AllowList, Event, Peer};

use crate::cache::Cache;
use crate::error::ServerError;
use crate::jobs::Serving;
use crate::request::{MAX_REQUESTS, Message, Request};
use crate::root::Root;
use crate::short::{Short, Taken};

/// Port of a server unless another is given.
pub(crate) const PORT: u16 = 9200;

/// How a server works.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Where clients connect to.
    pub listen: SocketAddr,
    /// Clients may also write files. Needs a list in `agent.allow`.
    pub is_writable: bool,
    /// Threads that carry out requests.
    pub threads: usize,
    /// The connection with clients, and which of them are allowed.
    pub agent: AgentOptions,
}

impl Default for ServerOptions {
    fn default() -> Self {
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
        Self { listen, is_writable: false, threads: 4, agent: AgentOptions::default() }
    }
}

/// Exports the files below a directory. Dropping it ends all connections.
#[derive(Debug)]
pub struct FileServer {
    addr: SocketAddr,
    serving: Arc<Serving>,
    queue: Arc<Queue>,
    stop: Arc<EventFd>,
    threads: Vec<JoinHandle<()>>,
}

/// Requests that wait for a thread.
#[derive(Debug, Default)]
struct Queue {
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

impl FileServer {
    /// Starts it.
    ///
    /// # Errors
    /// There is no such directory; it listens for other machines, or is writable, without a list of
    /// allowed peers; or the address cannot be used.
    pub fn start(device: &Device, root: &Path, options: ServerOptions) -> Result<Self, ServerError> {
        let ServerOptions { listen, is_writable, threads, agent } = options;
        check(&listen, is_writable, &agent.allow)?;
        let source = |source| ServerError::Root { root: root.to_owned(), source };
        let below = Root::open(root).map_err(source)?;
        let agent = Agent::listening(device, "files", listen, agent)?;
        let addr = agent.local_addr().unwrap_or(listen);
        let events = agent.event_fd();
        let serving =
            Arc::new(Serving { agent, root: below, is_writable, cache: Cache::default(), at_once: 0.into() });
        let most_of_client = threads.saturating_sub(1).max(1);
        let queue = Arc::new(Queue { most_of_client, ..Queue::default() });
        let stop = Arc::new(EventFd::new().map_err(ServerError::Thread)?);
        let mut server = Self { addr, serving, queue, stop, threads: Vec::new() };
        for _ in 0..threads.max(1) {
            let (serving, queue) = (server.serving.clone(), server.queue.clone());
            server.spawn("nb-serve", move || queue.work(&serving))?;
        }
        let (serving, queue, stop) = (server.serving.clone(), server.queue.clone(), server.stop.clone());
        server.spawn("nb-requests", move || {
            Reader { serving, queue, partial: HashMap::new(), short: Short::default() }.run(events, &stop);
        })?;
        Ok(server)
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), ServerError> {
        let thread = thread::Builder::new().name(name.to_owned()).spawn(work).map_err(ServerError::Thread)?;
        self.threads.push(thread);
        Ok(())
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Short reads of cached files that needed no other thread.
    pub fn answered_at_once(&self) -> u64 {
        self.serving.at_once.load(Ordering::Relaxed)
    }

    /// Its agent, for counters.
    pub fn agent(&self) -> &Agent {
        &self.serving.agent
    }
}

impl Drop for FileServer {
    fn drop(&mut self) {
        self.queue.lock().is_closed = true;
        self.queue.changed.notify_all();
        self.stop.raise();
        // Transfers in flight end now, and with them the threads that wait for them.
        self.serving.agent.close();
        self.threads.drain(..).for_each(|thread| _ = thread.join());
    }
}

/// Every user of this machine reaches loopback; other machines need to be named.
fn check(listen: &SocketAddr, is_writable: bool, allow: &AllowList) -> Result<(), ServerError> {
    if !allow.is_open() {
        Ok(())
    } else if !listen.ip().is_loopback() {
        Err(ServerError::NoAllowList(*listen))
    } else if is_writable {
        Err(ServerError::WritableToAll)
    } else {
        Ok(())
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request; false if this client has more than it may have.
    fn add(&self, peer: Peer, request: Request) -> bool {
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
    fn work(&self, serving: &Serving) {
        while let Some((peer, request)) = self.next() {
            if peer.gone().is_none() {
                serving.run(&peer, &request);
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

/// Reads messages and puts requests together.
struct Reader {
    serving: Arc<Serving>,
    queue: Arc<Queue>,
    /// Of each client: the request that is being told, if it is fine so far.
    partial: HashMap<u64, (Peer, Option<Request>)>,
    short: Short,
}

impl Reader {
    fn run(mut self, events: RawFd, stop: &EventFd) {
        while wait([events, stop.as_raw_fd()]) {
            let happened = self.serving.agent.take_events();
            while let Some((peer, bytes)) = self.serving.agent.message(Duration::ZERO) {
                self.take(peer, &bytes);
            }
            if happened.contains(&Event::Peer) {
                // Clients are accepted by their first request; a gone one leaves nothing behind.
                while self.serving.agent.accept(Duration::ZERO).is_ok() {}
                self.partial.retain(|_, (peer, _)| peer.gone().is_none());
                self.short.retain();
            }
        }
    }

    fn take(&mut self, peer: Peer, bytes: &[u8]) {
        let Some(message) = Message::decode(bytes) else {
            tracing::warn!(peer = peer.addr(), "a client sent a malformed request");
            return peer.close();
        };
        let key = peer.number();
        match message {
            Message::Begin { id, kind, export } => {
                self.partial.insert(key, (peer, Some(Request::new(id, kind, export))));
            }
            Message::File { id, path } => self.extend(key, id, |request| request.add_file(path)),
            Message::Ranges { id, ranges } => self.extend(key, id, |request| request.add_ranges(&ranges)),
            Message::Go { id } => {
                let request = self.partial.remove(&key).and_then(|(_, request)| request);
                let request = request.filter(|request| request.id == id);
                // Our clients keep the limits and the order.
                if !request.is_some_and(|request| self.queue.add(peer.clone(), request)) {
                    refuse(&peer);
                }
            }
            Message::Short { id, kind, export, path, ranges } => {
                let request = Request { id, kind, export, files: vec![(path, ranges)] };
                let is_taken = match self.short.take(&self.serving, &peer, &request) {
                    Taken::Answered => true,
                    Taken::Left => self.queue.add(peer.clone(), request),
                    Taken::Flooded => false,
                };
                if !is_taken {
                    refuse(&peer);
                }
            }
        }
    }

    /// Adds to a request; one that exceeds a limit is forgotten, and ends the connection.
    fn extend(&mut self, key: u64, id: u64, add: impl FnOnce(&mut Request) -> bool) {
        if let Some((_, partial)) = self.partial.get_mut(&key) {
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

/// Waits until the first descriptor is readable; false if the second one is.
#[allow(unsafe_code)] // one system call
pub(crate) fn wait(fds: [RawFd; 2]) -> bool {
    let mut polled = fds.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    loop {
        // SAFETY: the array has two entries.
        let ready = unsafe { libc::poll(polled.as_mut_ptr(), 2, -1) };
        if ready > 0 {
            return polled[1].revents == 0;
        }
        let error = std::io::Error::last_os_error();
        if ready < 0 && error.kind() != std::io::ErrorKind::Interrupted {
            tracing::error!("poll: {error}");
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_machines_and_writers_are_named() {
        let (loopback, any) = ("127.0.0.1:1".parse().unwrap(), "0.0.0.0:1".parse().unwrap());
        let (open, list) = (AllowList::default(), "10.0.0.7".parse().unwrap());
        assert!(check(&loopback, false, &open).is_ok());
        assert!(matches!(check(&any, false, &open), Err(ServerError::NoAllowList(_))));
        assert!(matches!(check(&loopback, true, &open), Err(ServerError::WritableToAll)));
        assert!(check(&any, true, &list).is_ok());
    }
}
