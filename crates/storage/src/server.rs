//! The serving end.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};

use nobounce::Device;
use nobounce_transfer::{Agent, AgentOptions, AllowList};

use crate::cache::Cache;
use crate::error::ServerError;
use crate::jobs::Serving;
use crate::queue::Queue;
use crate::reader::Reader;
use crate::root::Root;

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
    agent: Arc<Agent>,
    serving: Arc<Serving>,
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

impl FileServer {
    /// Starts it.
    ///
    /// # Errors
    /// There is no such directory; it listens for other machines, or is writable, without a list of
    /// allowed peers; it listens for other machines without a key; or the address cannot be used.
    pub fn start(device: &Device, root: &Path, options: ServerOptions) -> Result<Self, ServerError> {
        let ServerOptions { listen, is_writable, threads, agent } = options;
        // A hardware NIC has no key.
        let lacks_key = device.nic().soft().is_some_and(|soft| soft.sealed().is_none());
        check(&listen, is_writable, &agent.allow, lacks_key)?;
        let source = |source| ServerError::Root { root: root.to_owned(), source };
        let below = Root::open(root).map_err(source)?;
        let serving = Serving { root: below, is_writable, cache: Cache::default(), at_once: 0.into() };
        let serving = Arc::new(serving);
        let queue = Arc::new(Queue::new(threads.saturating_sub(1).max(1)));
        let reader = Box::new(Reader::new(serving.clone(), queue.clone()));
        let agent = Arc::new(Agent::listening_with(device, "files", listen, agent, reader)?);
        let addr = agent.local_addr().unwrap_or(listen);
        let mut server = Self { addr, agent, serving, queue, threads: Vec::new() };
        for _ in 0..threads.max(1) {
            let (agent, serving, queue) =
                (server.agent.clone(), server.serving.clone(), server.queue.clone());
            server.spawn("nb-serve", move || queue.work(&agent, &serving))?;
        }
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

    /// Short reads of cached files that needed no thread of the server.
    pub fn answered_at_once(&self) -> u64 {
        self.serving.at_once.load(Ordering::Relaxed)
    }

    /// Its agent, for counters.
    pub fn agent(&self) -> &Agent {
        &self.agent
    }
}

impl Drop for FileServer {
    fn drop(&mut self) {
        self.queue.close();
        // Transfers in flight end now, and with them the threads that wait for them.
        self.agent.close();
        self.threads.drain(..).for_each(|thread| _ = thread.join());
    }
}

/// Every user of this machine reaches loopback. Other machines need to be named, and to have the
/// key: addresses can be forged.
fn check(
    listen: &SocketAddr,
    is_writable: bool,
    allow: &AllowList,
    lacks_key: bool,
) -> Result<(), ServerError> {
    let is_remote = !listen.ip().is_loopback();
    if is_remote && allow.is_open() {
        Err(ServerError::NoAllowList(*listen))
    } else if is_writable && allow.is_open() {
        Err(ServerError::WritableToAll)
    } else if is_remote && lacks_key {
        Err(ServerError::NoKey(*listen))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_machines_and_writers_are_named() {
        let (loopback, any) = ("127.0.0.1:1".parse().unwrap(), "0.0.0.0:1".parse().unwrap());
        let (open, list) = (AllowList::default(), "10.0.0.7".parse().unwrap());
        assert!(check(&loopback, false, &open, true).is_ok());
        assert!(check(&loopback, true, &list, true).is_ok());
        assert!(matches!(check(&any, false, &open, false), Err(ServerError::NoAllowList(_))));
        assert!(matches!(check(&loopback, true, &open, false), Err(ServerError::WritableToAll)));
        assert!(matches!(check(&any, false, &list, true), Err(ServerError::NoKey(_))));
        assert!(check(&any, true, &list, false).is_ok());
    }
}
