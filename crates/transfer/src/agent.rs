//! An agent: a device, peers, and the thread that serves them.

use std::hash::{BuildHasher, RandomState};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nobounce::{ConnectOptions, Device, Listener, RegisterError};
use nobounce_nic::EventFd;

use crate::connecting::{self, Attempt};
use crate::error::AgentError;
use crate::exports::{Export, Metadata};
use crate::frame::{Frame, MAX_EXPORTS, MAX_NAME};
use crate::greet::greet;
use crate::handler::{Handler, Hooked};
use crate::hook::Hooks;
use crate::memory::{Foreign, Owner, View};
use crate::notification::Notification;
use crate::peer::Peer;
use crate::service::{Service, wait};
use crate::shared::{AgentCounters, Command, Event, Shared};
use nobounce_nic::allow::AllowList;

/// Time for the handshake with a client that may be anything.
const GREET_WITHIN: Duration = Duration::from_secs(5);
/// Handshakes at once.
const MAX_GREETINGS: usize = 16;
/// Before the next try, where nothing can be accepted.
const PAUSE: Duration = Duration::from_millis(100);
/// Attempts that a queue pair makes before it gives up.
const ATTEMPTS: u32 = 8;

/// How an agent works. The defaults suit most.
#[derive(Clone, Debug)]
pub struct AgentOptions {
    /// Queue pairs for each peer that this agent connects to.
    pub lanes: usize,
    /// A peer from which nothing comes for this long is gone.
    pub silence: Duration,
    /// Requests outstanding on each lane.
    pub depth: usize,
    /// Who may connect to an agent that listens.
    pub allow: AllowList,
}

impl Default for AgentOptions {
    fn default() -> Self {
        Self { lanes: 1, silence: Duration::from_secs(5), depth: 256, allow: AllowList::default() }
    }
}

impl AgentOptions {
    fn connect_options(&self, timeout: Duration) -> ConnectOptions {
        // The longest ACK timeout (4.096 us times a power of two) with which all attempts fit.
        let mut ack_timeout = 1;
        while ack_timeout < 31 && (Duration::from_nanos(4096) * (2 << ack_timeout)) * ATTEMPTS <= self.silence
        {
            ack_timeout += 1;
        }
        ConnectOptions {
            qps: self.lanes,
            depth: self.depth,
            timeout,
            ack_timeout,
            ..ConnectOptions::default()
        }
    }
}

/// One end of transfers. It has a name, exports regions by name, and connects to other agents.
///
/// A thread of its own carries out all transfers; it sleeps while there is nothing to do. Dropping
/// the agent ends transfers in flight, and peers see that it closed.
#[derive(Debug)]
pub struct Agent {
    device: Device,
    options: AgentOptions,
    shared: Arc<Shared>,
    acceptor: Option<Acceptor>,
    service: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Acceptor {
    addr: SocketAddr,
    stop: Arc<EventFd>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Agent {
    /// An agent on this device that only connects to others.
    ///
    /// # Errors
    /// The name is too long, or there can be no thread.
    pub fn new(device: &Device, name: &str, options: AgentOptions) -> Result<Self, AgentError> {
        Self::start(device, name, options, None)
    }

    /// As [`new`](Self::new), with a handler that the agent's thread calls.
    ///
    /// # Errors
    /// As for `new`.
    pub fn new_with(
        device: &Device,
        name: &str,
        options: AgentOptions,
        handler: Box<dyn Handler>,
    ) -> Result<Self, AgentError> {
        Self::start(device, name, options, Some(handler))
    }

    fn start(
        device: &Device,
        name: &str,
        options: AgentOptions,
        handler: Option<Box<dyn Handler>>,
    ) -> Result<Self, AgentError> {
        if name.len() > MAX_NAME {
            return Err(AgentError::Name(name.len()));
        }
        if options.silence.is_zero() {
            return Err(AgentError::Silence);
        }
        let generation = RandomState::new().hash_one(std::process::id());
        let hooks = handler.map(|handler| -> Arc<dyn Hooks> { Arc::new(Hooked(handler)) });
        let shared = Arc::new(Shared::new(name.to_owned(), generation, options.silence, hooks)?);
        let service = Service::new(shared.clone());
        let service = std::thread::Builder::new().name("nb-transfer".to_owned()).spawn(|| service.run())?;
        Ok(Self {
            device: device.clone(),
            options,
            shared,
            acceptor: None,
            service: Mutex::new(Some(service)),
        })
    }

    /// An agent that also listens at a TCP address such as `"0.0.0.0:0"`.
    ///
    /// # Errors
    /// As for [`new`](Self::new), or the address cannot be used.
    pub fn listening(
        device: &Device,
        name: &str,
        addr: impl ToSocketAddrs,
        options: AgentOptions,
    ) -> Result<Self, AgentError> {
        Self::new(device, name, options)?.listen(addr)
    }

    /// As [`listening`](Self::listening), with a handler that the agent's thread calls.
    ///
    /// # Errors
    /// As for `listening`.
    pub fn listening_with(
        device: &Device,
        name: &str,
        addr: impl ToSocketAddrs,
        options: AgentOptions,
        handler: Box<dyn Handler>,
    ) -> Result<Self, AgentError> {
        Self::new_with(device, name, options, handler)?.listen(addr)
    }

    fn listen(mut self, addr: impl ToSocketAddrs) -> Result<Self, AgentError> {
        let agent = &mut self;
        let listener = agent.device.listen_with(addr, &agent.options.connect_options(GREET_WITHIN))?;
        let (addr, stop) = (listener.local_addr(), Arc::new(EventFd::new()?));
        let _ = agent.shared.listens.set(addr); // the agent is new
        let (shared, stopped) = (agent.shared.clone(), stop.clone());
        let allow = agent.options.allow.clone();
        let accept = move || accept_all(&Arc::new(listener), &allow, &shared, &stopped);
        let thread =
            Mutex::new(Some(std::thread::Builder::new().name("nb-accept".to_owned()).spawn(accept)?));
        agent.acceptor = Some(Acceptor { addr, stop, thread });
        Ok(self)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// A random number of this start.
    pub fn generation(&self) -> u64 {
        self.shared.generation
    }

    /// The device it uses.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The address it listens at.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.acceptor.as_ref().map(|acceptor| acceptor.addr)
    }

    /// Connects to the agent that listens at this address.
    ///
    /// # Errors
    /// Nothing listens there, or no agent.
    pub fn connect(&self, addr: impl ToSocketAddrs, timeout: Duration) -> Result<Peer, AgentError> {
        self.connect_with(addr, timeout, &Attempt::default())
    }

    /// As [`connect`](Self::connect); another thread may give it up.
    ///
    /// # Errors
    /// As for `connect`, or it was given up.
    pub fn connect_with(
        &self,
        addr: impl ToSocketAddrs,
        timeout: Duration,
        attempt: &Attempt,
    ) -> Result<Peer, AgentError> {
        let options = self.options.connect_options(timeout);
        let inner = connecting::connect((&self.device, &self.shared), addr, &options, attempt)?;
        Ok(Peer { inner, shared: self.shared.clone() })
    }

    /// Connects to the agent that these metadata are of, and knows its regions at once.
    ///
    /// # Errors
    /// The metadata are malformed or name no address; no connection; or the agent was started anew
    /// since.
    pub fn connect_to(&self, metadata: &[u8], timeout: Duration) -> Result<Peer, AgentError> {
        self.connect_to_with(metadata, timeout, &Attempt::default())
    }

    /// As [`connect_to`](Self::connect_to); another thread may give it up.
    ///
    /// # Errors
    /// As for `connect_to`, or it was given up.
    pub fn connect_to_with(
        &self,
        metadata: &[u8],
        timeout: Duration,
        attempt: &Attempt,
    ) -> Result<Peer, AgentError> {
        let known = Metadata::decode(metadata).ok_or(AgentError::Metadata)?;
        let addr = known.addr.ok_or(AgentError::NotListening)?;
        let peer = self.connect_with(addr, timeout, attempt)?;
        peer.add_metadata(metadata).inspect_err(|_| peer.close())?;
        Ok(peer)
    }

    /// The next agent that connected to this one.
    ///
    /// # Errors
    /// None came in time, or this agent does not listen.
    pub fn accept(&self, timeout: Duration) -> Result<Peer, AgentError> {
        if self.acceptor.is_none() {
            return Err(AgentError::NotListening);
        }
        let arrived = self.shared.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.shared.arrival.wait_timeout_while(arrived, timeout, |arrived| arrived.is_empty());
        let (mut arrived, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let inner = arrived.pop_front().ok_or(AgentError::NoPeer(timeout))?;
        Ok(Peer { inner, shared: self.shared.clone() })
    }

    /// Registers host memory that the agent allocates.
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn register(&self, len: usize) -> Result<View, RegisterError> {
        Ok(View::of(self.device.register(len)?))
    }

    /// Registers memory of the caller, which `owner` keeps alive. Memory inside of a registration
    /// that is alive is not registered again.
    ///
    /// # Errors
    /// See [`RegisterError`].
    ///
    /// # Safety
    /// The memory is valid while `owner` lives, or without one while a view of it does. No Rust
    /// reference to it exists while transfers change it.
    #[allow(unsafe_code)] // hands on what the caller promises
    pub unsafe fn register_raw(&self, memory: &Foreign, owner: Option<Owner>) -> Result<View, RegisterError> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.shared.registrations.view((&self.device, self.generation()), memory, owner) }
    }

    /// Exports memory by name: all peers may read and write it, now and later. The name replaces an
    /// earlier export of it.
    ///
    /// # Errors
    /// The name is too long, there are too many exports, or the device refuses.
    pub fn export(&self, name: &str, view: &View) -> Result<(), AgentError> {
        if name.len() > MAX_NAME {
            return Err(AgentError::Name(name.len()));
        }
        // Registering takes time, and the agent's thread takes the lock: outside of it.
        let export = Export::new(&self.device, view)?;
        let mut exports = self.shared.exports.lock().unwrap_or_else(PoisonError::into_inner);
        if exports.len() >= MAX_EXPORTS && !exports.has(name) {
            return Err(AgentError::TooManyExports);
        }
        let (version, region, old) = exports.add(name, export);
        // Under the lock, so that frames have the order of the changes.
        self.shared.push([Command::Send(Frame::Export { name: name.to_owned(), version, region })]);
        drop(exports);
        drop(old); // deregisters
        Ok(())
    }

    /// Ends an export and its key; returns whether there was one. Transfers of peers that use it
    /// fail.
    pub fn withdraw(&self, name: &str) -> bool {
        let mut exports = self.shared.exports.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((version, old)) = exports.remove(name) else { return false };
        self.shared.push([Command::Send(Frame::Withdraw { name: name.to_owned(), version })]);
        drop(exports);
        drop(old); // deregisters
        true
    }

    /// Who this agent is, where it listens and what it exports, for
    /// [`connect_to`](Self::connect_to). A holder can reach the exported memory: keep it as private
    /// as the memory.
    pub fn metadata(&self) -> Vec<u8> {
        self.metadata_since(0).0
    }

    /// Only regions that were exported after an earlier version, for [`Peer::add_metadata`]; and
    /// the version now.
    pub fn metadata_since(&self, version: u64) -> (Vec<u8>, u64) {
        let exports = self.shared.exports.lock().unwrap_or_else(PoisonError::into_inner);
        let addr = self.local_addr().map(|mut addr| {
            if addr.ip().is_unspecified() {
                addr.set_ip(self.device.nic().local());
            }
            addr
        });
        let (name, generation) = (self.name().to_owned(), self.generation());
        let now = exports.version();
        let metadata = Metadata { name, generation, addr, version: now, exports: exports.since(version) };
        (metadata.encode(), now)
    }

    /// The next notification, if there is one.
    pub fn try_notification(&self) -> Option<Notification> {
        self.shared.notification(Duration::ZERO)
    }

    /// The next notification; `None` if none comes in time.
    pub fn notification(&self, timeout: Duration) -> Option<Notification> {
        self.shared.notification(timeout)
    }

    /// The next message of a peer, with the peer; `None` if none comes in time.
    pub fn message(&self, timeout: Duration) -> Option<(Peer, Vec<u8>)> {
        let (inner, bytes) = self.shared.inbox.take(timeout)?;
        Some((Peer { inner, shared: self.shared.clone() }, bytes))
    }

    /// A descriptor for event loops: readable while [`take_events`](Self::take_events) has
    /// something. Events are recorded from the first call on.
    pub fn event_fd(&self) -> RawFd {
        self.shared.event_fd()
    }

    /// What has happened since the last call.
    pub fn take_events(&self) -> Vec<Event> {
        self.shared.take_events()
    }

    /// Lanes of all connections that this end still holds, also of peers that are gone.
    pub fn lanes(&self) -> usize {
        self.shared.lanes.load(Ordering::Relaxed)
    }

    /// Counters since the start.
    pub fn counters(&self) -> AgentCounters {
        self.shared.counters()
    }
}

impl Agent {
    /// Ends it: peers see that it closed, transfers in flight fail, and new ones are refused.
    pub fn close(&self) {
        let take = |thread: &Mutex<Option<JoinHandle<()>>>| {
            thread.lock().unwrap_or_else(PoisonError::into_inner).take()
        };
        if let Some(acceptor) = &self.acceptor {
            acceptor.stop.raise();
            let _ = take(&acceptor.thread).map(JoinHandle::join);
        }
        self.shared.push([Command::Stop]);
        let _ = take(&self.service).map(JoinHandle::join);
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.close();
    }
}

/// The acceptor thread. Each client gets a thread for its handshake, as long as there are few of
/// them.
fn accept_all(listener: &Arc<Listener>, allow: &AllowList, shared: &Arc<Shared>, stop: &EventFd) {
    let greeting = Arc::new(AtomicUsize::new(0));
    let interest = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    loop {
        let is_full = greeting.load(Ordering::Relaxed) >= MAX_GREETINGS;
        let mut fds = [interest(stop.as_raw_fd()), interest(if is_full { -1 } else { listener.as_raw_fd() })];
        wait(&mut fds, is_full.then_some(PAUSE));
        if fds[0].revents != 0 {
            return;
        }
        if fds[1].revents == 0 {
            continue;
        }
        let accepted = listener.accept_pending().and_then(|pending| {
            let Some((stream, addr)) = pending else { return Ok(()) };
            if !allow.admits(addr.ip()) {
                tracing::warn!(
                    "a client at {} was refused: it is not in the list of allowed peers",
                    addr.ip()
                );
                return Ok(());
            }
            greeting.fetch_add(1, Ordering::Relaxed);
            let (listener, shared, ended) = (listener.clone(), shared.clone(), greeting.clone());
            let greet = move || {
                welcome(&listener, &shared, stream, addr);
                ended.fetch_sub(1, Ordering::Relaxed);
            };
            let started = std::thread::Builder::new().name("nb-greet".to_owned()).spawn(greet);
            started.map(drop).inspect_err(|_| _ = greeting.fetch_sub(1, Ordering::Relaxed))
        });
        if let Err(error) = accepted {
            tracing::warn!("cannot accept a connection: {error}");
            // Out of descriptors, for instance: the listener stays readable.
            wait(&mut fds[..1], Some(PAUSE));
        }
    }
}

fn welcome(listener: &Listener, shared: &Arc<Shared>, stream: TcpStream, addr: SocketAddr) {
    let welcomed =
        listener.handshake(stream, addr).map_err(|error| error.to_string()).and_then(|connection| {
            greet(shared, connection, Instant::now() + GREET_WITHIN).map_err(|error| error.to_string())
        });
    let arrival = match welcomed {
        Ok(arrival) => arrival,
        Err(error) => return tracing::warn!("a client was refused: {error}"),
    };
    let peer = arrival.peer.clone();
    shared.push([Command::Add(Box::new(arrival))]);
    // A handler knows its peers by what they send.
    if shared.hook.get().is_some() {
        return;
    }
    let mut arrived = shared.arrived.lock().unwrap_or_else(PoisonError::into_inner);
    // An application that never accepts does not collect them.
    arrived.retain(|peer| peer.state().gone.is_none());
    arrived.push_back(peer);
    drop(arrived);
    shared.arrival.notify_all();
    shared.tell(Event::Peer);
}
