//! What the application's threads and the agent's thread share.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use nobounce::{Connection, RemoteRegion};
use nobounce_nic::{EventFd, ParentOnly};

use crate::error::{Gone, TransferError};
use crate::exports::Exports;
use crate::frame::Frame;
use crate::frame_lane::FrameLane;
use crate::hook::{Hook, Hooks};
use crate::job::Job;
use crate::memory::Registrations;
use crate::message::{Inbox, Unread};
use crate::notification::{MAX_OF_ALL, Notification, Outcome};
use crate::transfer::{Summary, TransferState};
use crate::wire::Wire;

/// An agent's thread that could not grant enough is asked again after so many notifications.
const GRANT_EVERY: usize = 64;

/// Something that an event loop may wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A transfer has ended; its number.
    Transfer(u64),
    /// A notification has arrived.
    Notification,
    /// A peer has connected, exported or withdrawn a region, or is gone.
    Peer,
    /// A message has arrived.
    Message,
}

/// A peer as both sides of the agent know it.
#[derive(Debug)]
pub(crate) struct PeerShared {
    pub(crate) key: u64,
    pub(crate) name: String,
    pub(crate) generation: u64,
    pub(crate) addr: String,
    origin: Option<Origin>,
    /// Notifications that there is room for: credit of the peer, and transfers that it announced,
    /// until their notifications are taken.
    pub(crate) promised: AtomicUsize,
    pub(crate) unread: Unread,
    /// It has less credit than it should have.
    pub(crate) is_short: AtomicBool,
    state: Mutex<PeerState>,
    pub(crate) changed: Condvar,
}

/// Where a peer is: only one process at a time listens there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// As this end sees it.
    pub(crate) ip: IpAddr,
    pub(crate) host: String,
    pub(crate) listens: SocketAddr,
}

#[derive(Debug, Default)]
pub(crate) struct PeerState {
    /// What it exports, with the versions that added them.
    pub(crate) exports: BTreeMap<String, (u64, RemoteRegion)>,
    /// The side channel has delivered all changes up to this version.
    pub(crate) version: u64,
    pub(crate) gone: Option<Gone>,
}

impl PeerState {
    /// A change from the side channel.
    pub(crate) fn export(&mut self, name: String, version: u64, region: RemoteRegion) {
        self.version = self.version.max(version);
        self.add(name, version, region);
    }

    pub(crate) fn withdraw(&mut self, name: &str, version: u64) {
        self.version = self.version.max(version);
        if self.exports.get(name).is_some_and(|(added, _)| *added < version) {
            self.exports.remove(name);
        }
    }

    /// Exports from metadata. Those that the side channel has delivered already are stale.
    pub(crate) fn learn(&mut self, exports: Vec<(String, u64, RemoteRegion)>) {
        for (name, version, region) in exports {
            if version > self.version {
                self.add(name, version, region);
            }
        }
    }

    fn add(&mut self, name: String, version: u64, region: RemoteRegion) {
        let known = self.exports.entry(name).or_insert((version, region));
        if version > known.0 {
            *known = (version, region);
        }
    }
}

impl PeerShared {
    pub(crate) fn new(key: u64, name: String, generation: u64, addr: String, origin: Option<Origin>) -> Self {
        let (promised, state, changed) = (AtomicUsize::new(0), Mutex::default(), Condvar::new());
        Self {
            key,
            name,
            generation,
            addr,
            origin,
            promised,
            unread: Unread::default(),
            is_short: false.into(),
            state,
            changed,
        }
    }

    /// Whether it is a later start of the other one, which is gone then.
    pub(crate) fn replaces(&self, other: &Self) -> bool {
        self.name == other.name
            && self.generation != other.generation
            && self.origin.is_some()
            && self.origin == other.origin
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, PeerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes it and wakes those who wait for a change.
    pub(crate) fn change(&self, change: impl FnOnce(&mut PeerState)) {
        change(&mut self.state());
        self.changed.notify_all();
    }
}

/// Notifications that the application has not taken, each with its peer.
type Waiting = VecDeque<(Notification, Arc<PeerShared>)>;

/// The TCP stream to a peer. Forked children do not keep it open.
#[derive(Debug)]
pub(crate) struct SideChannel {
    // Dropped first: the number is in use as long.
    _mark: ParentOnly,
    stream: TcpStream,
}

impl SideChannel {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self { _mark: ParentOnly::mark(&stream), stream }
    }
}

impl Deref for SideChannel {
    type Target = TcpStream;

    fn deref(&self) -> &TcpStream {
        &self.stream
    }
}

/// A connection with an agent at its other end.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) peer: Arc<PeerShared>,
    pub(crate) connection: Connection,
    /// Dropped after the connection, which uses its slots.
    pub(crate) frames: FrameLane,
    pub(crate) stream: SideChannel,
    pub(crate) wire: Wire,
    /// The peer's silence limit.
    pub(crate) silence: Duration,
}

/// What the application asks the agent's thread to do.
#[derive(Debug)]
pub(crate) enum Command {
    Add(Box<Arrival>),
    Announce {
        peer: u64,
        id: u64,
        tag: Vec<u8>,
    },
    Submit {
        peer: Arc<PeerShared>,
        job: Box<Job>,
    },
    /// All transfers of an announcement are submitted; or it is given up, for a reason.
    Finish {
        peer: u64,
        id: u64,
        abort: Option<String>,
    },
    /// To all peers.
    Send(Frame),
    /// To one of them.
    SendTo {
        peer: u64,
        frame: Frame,
    },
    Close {
        peer: u64,
    },
    Cancel {
        transfer: u64,
    },
    /// The application has taken notifications of the peer.
    Grant {
        peer: u64,
    },
    Stop,
}

#[derive(Debug, Default)]
struct Commands {
    list: Vec<Command>,
    /// The agent's thread has ended, and takes no more.
    is_stopped: bool,
}

#[derive(Debug, Default)]
struct Events {
    is_wanted: bool,
    transfers: Vec<u64>,
    has_notification: bool,
    has_peer: bool,
    has_message: bool,
}

/// Counters of an agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AgentCounters {
    /// Transfers that ended well.
    pub transfers: u64,
    /// Transfers that failed or were cancelled.
    pub failed: u64,
    /// Bytes of transfers that ended well.
    pub bytes: u64,
    /// Frames of peers that were gone already; they had no effect.
    pub late_frames: u64,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) hook: Hook,
    pub(crate) generation: u64,
    pub(crate) silence: Duration,
    pub(crate) listens: OnceLock<SocketAddr>,
    commands: Mutex<Commands>,
    wake: EventFd,
    is_asleep: AtomicBool,
    notifications: Mutex<Waiting>,
    notified: Condvar,
    /// As of all peers.
    promised: AtomicUsize,
    pub(crate) inbox: Inbox,
    pub(crate) arrived: Mutex<VecDeque<Arc<PeerShared>>>,
    pub(crate) arrival: Condvar,
    pub(crate) exports: Mutex<Exports>,
    pub(crate) registrations: Registrations,
    events: Mutex<Events>,
    event: EventFd,
    counters: Mutex<AgentCounters>,
    /// Of all links.
    pub(crate) lanes: AtomicUsize,
    next: AtomicU64,
}

impl Shared {
    pub(crate) fn new(
        name: String,
        generation: u64,
        silence: Duration,
        hooks: Option<Arc<dyn Hooks>>,
    ) -> std::io::Result<Self> {
        Ok(Self {
            name,
            hook: Hook::new(hooks),
            generation,
            silence,
            listens: OnceLock::new(),
            commands: Mutex::default(),
            wake: EventFd::new()?,
            is_asleep: AtomicBool::new(false),
            notifications: Mutex::default(),
            notified: Condvar::new(),
            promised: AtomicUsize::new(0),
            inbox: Inbox::default(),
            arrived: Mutex::default(),
            arrival: Condvar::new(),
            exports: Mutex::default(),
            registrations: Registrations::default(),
            events: Mutex::default(),
            event: EventFd::new()?,
            counters: Mutex::default(),
            lanes: AtomicUsize::new(0),
            next: AtomicU64::new(1),
        })
    }

    /// A number that was not used before.
    pub(crate) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Hands commands to the agent's thread, in this order and without others in between.
    pub(crate) fn push(&self, commands: impl IntoIterator<Item = Command>) {
        let mut queue = self.queue();
        if queue.is_stopped {
            drop(queue);
            commands.into_iter().for_each(|command| self.refuse(command));
            return;
        }
        queue.list.extend(commands);
        drop(queue);
        self.wake();
    }

    fn queue(&self) -> MutexGuard<'_, Commands> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn take_commands(&self, into: &mut Vec<Command>) {
        std::mem::swap(&mut self.queue().list, into);
    }

    /// The agent's thread has ended: nothing is carried out any more.
    pub(crate) fn stop(&self) {
        let mut queue = self.queue();
        queue.is_stopped = true;
        let left = std::mem::take(&mut queue.list);
        drop(queue);
        self.hook.clear();
        left.into_iter().for_each(|command| self.refuse(command));
    }

    /// A command that comes too late.
    fn refuse(&self, command: Command) {
        match command {
            Command::Submit { peer, job } => self.refuse_job(&peer, *job, Gone::ClosedHere),
            Command::Add(arrival) => arrival.peer.change(|state| state.gone = Some(Gone::ClosedHere)),
            _ => {}
        }
    }

    /// A transfer whose peer is gone.
    pub(crate) fn refuse_job(&self, peer: &PeerShared, job: Job, otherwise: Gone) {
        let reason = peer.state().gone.clone().unwrap_or(otherwise);
        let state = job.state.clone();
        drop(job);
        self.count(|counters| counters.failed += 1);
        self.end(&state, Err(TransferError::PeerGone { peer: peer.name.clone(), reason }));
    }

    /// Ends a transfer and tells the event loop that watches it.
    pub(crate) fn end(&self, state: &TransferState, result: Result<Summary, TransferError>) {
        state.end(result);
        if state.is_watched() {
            self.tell(Event::Transfer(state.id));
        }
    }

    /// The agent's thread is going to sleep: false if there are commands.
    pub(crate) fn fall_asleep(&self) -> bool {
        self.is_asleep.store(true, Ordering::SeqCst);
        self.queue().list.is_empty()
    }

    pub(crate) fn awake(&self) {
        self.is_asleep.store(false, Ordering::SeqCst);
        self.wake.take();
    }

    fn wake(&self) {
        if self.is_asleep.load(Ordering::SeqCst) {
            self.wake.raise();
        }
    }

    pub(crate) fn wake_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// Makes room for so many notifications, or fewer. Peers leave room for others.
    pub(crate) fn promise(&self, peer: &PeerShared, wanted: usize) -> usize {
        let most = |promised: usize| wanted.min(MAX_OF_ALL.saturating_sub(promised).div_ceil(16));
        let add = |promised| Some(promised + most(promised));
        let before =
            self.promised.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).unwrap_or(MAX_OF_ALL);
        peer.promised.fetch_add(most(before), Ordering::Relaxed);
        most(before)
    }

    /// Gives back room that is not needed.
    pub(crate) fn release(&self, peer: &PeerShared, count: usize) {
        self.promised.fetch_sub(count, Ordering::Relaxed);
        let left = peer.promised.fetch_sub(count, Ordering::SeqCst) - count;
        if left.is_multiple_of(GRANT_EVERY) && peer.is_short.load(Ordering::SeqCst) {
            self.push([Command::Grant { peer: peer.key }]);
        }
    }

    pub(crate) fn notify(&self, peer: &Arc<PeerShared>, tag: Vec<u8>, outcome: Outcome, gone: Option<Gone>) {
        let (name, generation) = (peer.name.clone(), peer.generation);
        let notification = Notification { peer: name, generation, tag, outcome, gone };
        if let Some(hooks) = self.hook.get() {
            hooks.notification(notification);
            return self.release(peer, 1);
        }
        let mut waiting = self.notifications.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.push_back((notification, peer.clone()));
        drop(waiting);
        self.notified.notify_all();
        self.tell(Event::Notification);
    }

    /// The next notification; `None` if none comes in time.
    pub(crate) fn notification(&self, timeout: Duration) -> Option<Notification> {
        let waiting = self.notifications.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.notified.wait_timeout_while(waiting, timeout, |waiting| waiting.is_empty());
        let (notification, peer) = waited.unwrap_or_else(PoisonError::into_inner).0.pop_front()?;
        self.release(&peer, 1);
        Some(notification)
    }

    pub(crate) fn count(&self, count: impl FnOnce(&mut AgentCounters)) {
        count(&mut self.counters.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn counters(&self) -> AgentCounters {
        *self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an event for an event loop, if there is one.
    pub(crate) fn tell(&self, event: Event) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if !events.is_wanted {
            return;
        }
        match event {
            Event::Transfer(id) => events.transfers.push(id),
            Event::Notification => events.has_notification = true,
            Event::Peer => events.has_peer = true,
            Event::Message => events.has_message = true,
        }
        self.event.raise();
    }

    /// The descriptor that is readable while there are events. They are recorded from now on.
    pub(crate) fn event_fd(&self) -> RawFd {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).is_wanted = true;
        self.event.as_raw_fd()
    }

    pub(crate) fn take_events(&self) -> Vec<Event> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        self.event.take();
        let mut found: Vec<_> =
            std::mem::take(&mut events.transfers).into_iter().map(Event::Transfer).collect();
        found.extend(std::mem::take(&mut events.has_notification).then_some(Event::Notification));
        found.extend(std::mem::take(&mut events.has_peer).then_some(Event::Peer));
        found.extend(std::mem::take(&mut events.has_message).then_some(Event::Message));
        found
    }
}
