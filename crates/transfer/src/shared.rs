//! What the application's threads and the agent's thread share.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use nobounce::{Connection, RemoteRegion};
use nobounce_nic::EventFd;

use crate::error::Gone;
use crate::exports::Exports;
use crate::job::Job;
use crate::memory::Registrations;
use crate::notification::{Notification, Waiting};
use crate::transfer::Wake;
use crate::wire::Wire;

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
}

/// A peer as both sides of the agent know it.
#[derive(Debug)]
pub(crate) struct PeerShared {
    pub(crate) key: u64,
    pub(crate) name: String,
    pub(crate) generation: u64,
    pub(crate) addr: String,
    state: Mutex<PeerState>,
    pub(crate) changed: Condvar,
}

#[derive(Debug, Default)]
pub(crate) struct PeerState {
    pub(crate) exports: BTreeMap<String, RemoteRegion>,
    pub(crate) gone: Option<Gone>,
}

impl PeerShared {
    pub(crate) fn new(key: u64, name: String, generation: u64, addr: String) -> Self {
        Self { key, name, generation, addr, state: Mutex::default(), changed: Condvar::new() }
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

/// A connection with an agent at its other end.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) peer: Arc<PeerShared>,
    pub(crate) connection: Connection,
    pub(crate) stream: std::net::TcpStream,
    pub(crate) wire: Wire,
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
    Export {
        name: String,
        region: RemoteRegion,
    },
    Withdraw {
        name: String,
    },
    Close {
        peer: u64,
    },
    Stop,
}

#[derive(Debug, Default)]
struct Events {
    is_wanted: bool,
    list: Vec<Event>,
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
    pub(crate) generation: u64,
    commands: Mutex<Vec<Command>>,
    wake: EventFd,
    is_asleep: AtomicBool,
    notifications: Mutex<Waiting>,
    pub(crate) notified: Condvar,
    pub(crate) arrived: Mutex<VecDeque<Arc<PeerShared>>>,
    pub(crate) arrival: Condvar,
    pub(crate) exports: Mutex<Exports>,
    pub(crate) registrations: Registrations,
    events: Mutex<Events>,
    event: EventFd,
    counters: Mutex<AgentCounters>,
    next: AtomicU64,
}

impl Shared {
    pub(crate) fn new(name: String, generation: u64) -> std::io::Result<Self> {
        Ok(Self {
            name,
            generation,
            commands: Mutex::default(),
            wake: EventFd::new()?,
            is_asleep: AtomicBool::new(false),
            notifications: Mutex::default(),
            notified: Condvar::new(),
            arrived: Mutex::default(),
            arrival: Condvar::new(),
            exports: Mutex::default(),
            registrations: Registrations::default(),
            events: Mutex::default(),
            event: EventFd::new()?,
            counters: Mutex::default(),
            next: AtomicU64::new(1),
        })
    }

    /// A number that was not used before.
    pub(crate) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Hands commands to the agent's thread, in this order and without others in between.
    pub(crate) fn push(&self, commands: impl IntoIterator<Item = Command>) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).extend(commands);
        self.wake();
    }

    pub(crate) fn take_commands(&self, into: &mut Vec<Command>) {
        let mut commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut *commands, into);
    }

    /// The agent's thread is going to sleep: false if there are commands.
    pub(crate) fn fall_asleep(&self) -> bool {
        self.is_asleep.store(true, Ordering::SeqCst);
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    pub(crate) fn awake(&self) {
        self.is_asleep.store(false, Ordering::SeqCst);
        self.wake.take();
    }

    pub(crate) fn wake_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    pub(crate) fn notifications(&self) -> MutexGuard<'_, Waiting> {
        self.notifications.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn notify(&self, notification: Notification) {
        self.notifications().push_back(notification);
        self.notified.notify_all();
        self.tell(Event::Notification);
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
        // Of these one stands for many.
        if matches!(event, Event::Transfer(_)) || !events.list.contains(&event) {
            events.list.push(event);
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
        std::mem::take(&mut events.list)
    }
}

impl Wake for Shared {
    fn wake(&self) {
        if self.is_asleep.load(Ordering::SeqCst) {
            self.wake.raise();
        }
    }
}
