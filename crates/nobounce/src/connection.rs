//! A connection: queue pairs to one peer, one completion queue, and the side channel that made them.

use std::cell::Cell;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nobounce_nic::any::{self, Channel, Cq, Qp};
use nobounce_nic::soft::{Mtu, QpAttr, QpState, Status, WorkKind};
use nobounce_nic::work::WorkCompletion;

use crate::Device;
use crate::ailments::{Ailment, Ailments};
use crate::connect::Lanes;
use crate::control::Control;
use crate::farewell::Farewell;
use crate::handshake::Hello;
use crate::lane::{Lane, PostError};
use crate::region::{Region, RemoteRegion};
use crate::tickets::{Completion, Ended, Ticket, Tickets};
use crate::wait::{WaitError, judge};

/// How often it is looked whether the peer is still there.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How long `wait` polls before it arms the completion queue and sleeps.
const SPIN: Duration = Duration::from_millis(1);
/// How long the cause of a failure may take to show after it, with hardware. The side channel told of a killed peer at most 39 ms after rxe of
/// Linux 6.1 had refused for it, in an emulated machine on a busy one.
const LAST_WORD: Duration = Duration::from_millis(200);
/// After so long without a completion the port itself is asked how it is: some drivers (rxe of Linux 6.1) let it go down without an event, and
/// never end what it keeps.
const SILENCE: Duration = Duration::from_secs(1);
/// Completions fetched at once.
const BATCH: usize = 64;
/// Polls of a caller who drives the device himself for one look at the clock, and at all else that is not a completion.
const POLLS: u32 = 4;

thread_local! {
    /// Room for completions that are fetched, kept from one time to the next.
    static FETCHED: Cell<Vec<WorkCompletion>> = const { Cell::new(Vec::new()) };
}

/// A connection to a peer.
///
/// Operations return a [`Ticket`] at once; [`wait`](Self::wait), [`wait_any`](Self::wait_any) or [`poll`](Self::poll) tell
/// how it ended. A failed operation stops its lane: later operations there fail too. When the peer closes or dies, all
/// operations fail with [`WaitError::PeerGone`] within milliseconds; when it falls silent (a dead network), within the time
/// that [`ConnectOptions`](crate::ConnectOptions) gives, 2.1 s by default.
#[derive(Debug)]
pub struct Connection {
    // Dropped first: what the queue pairs still owe leaves before the side channel says that we are gone.
    qps: Vec<Qp>,
    cq: Cq,
    channel: Channel,
    book: Mutex<Tickets>,
    pub(crate) control: Control,
    device: Device,
    peer: IpAddr,
    mtu: Mtu,
    farewell: Farewell,
    /// What the device was last seen to suffer from.
    ailments: Ailments,
    born: Instant,
    /// When it was last looked whether the peer is there, in microseconds since birth.
    looked: AtomicU64,
    /// How often something was put into the book.
    booked: AtomicU64,
    /// Whether something completed since it was last looked.
    heard: AtomicBool,
    /// When something was last seen to have completed, or the port was asked how it is.
    silent_since: AtomicU64,
}

impl Connection {
    pub(crate) fn new(device: &Device, lanes: Lanes, control: Control, theirs: &Hello) -> Self {
        let limit = lanes.cq.depth();
        Self {
            qps: lanes.qps,
            cq: lanes.cq,
            channel: lanes.channel,
            book: Mutex::new(Tickets::new(limit)),
            control,
            device: device.clone(),
            peer: theirs.addr,
            mtu: Mtu::from_bytes(theirs.mtu).unwrap_or(Mtu::Mtu256),
            farewell: Farewell::default(),
            ailments: Ailments::default(),
            born: Instant::now(),
            looked: AtomicU64::new(0),
            booked: AtomicU64::new(0),
            heard: AtomicBool::new(false),
            silent_since: AtomicU64::new(0),
        }
    }

    /// The device it was made on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Where the peer's device is.
    pub fn peer(&self) -> IpAddr {
        self.peer
    }

    /// The peer's end of the side channel; `None` when it is gone.
    pub fn peer_control_addr(&self) -> Option<SocketAddr> {
        self.control.stream().peer_addr().ok()
    }

    /// The path MTU both ends agreed on.
    pub fn mtu(&self) -> Mtu {
        self.mtu
    }

    /// How many lanes it has.
    pub fn lanes(&self) -> usize {
        self.qps.len()
    }

    /// One of its lanes, from 0 on.
    ///
    /// # Panics
    /// There is no such lane.
    pub fn lane(&self, index: usize) -> Lane<'_> {
        assert!(index < self.qps.len(), "lane {index} of a connection with {} lanes", self.qps.len());
        Lane::new(self, index)
    }

    /// The queue pair of a lane, for work requests made by hand. Do not mix the two on one connection: `wait` and `poll` take
    /// every completion, and drop those that are not theirs.
    ///
    /// # Panics
    /// There is no such lane.
    pub fn qp(&self, index: usize) -> &Qp {
        &self.qps[index]
    }

    /// The completion queue of all lanes.
    pub fn cq(&self) -> &Cq {
        &self.cq
    }

    /// The channel of the completion queue, to sleep on.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// [`Lane::write`] on lane 0; so for all operations here.
    #[allow(missing_docs)]
    pub fn write(
        &self,
        local: &Region,
        range: Range<usize>,
        remote: &RemoteRegion,
        offset: u64,
    ) -> Result<Ticket, PostError> {
        self.lane(0).write(local, range, remote, offset)
    }

    /// [`Lane::write_imm`] on lane 0.
    pub fn write_imm(
        &self,
        local: &Region,
        range: Range<usize>,
        remote: &RemoteRegion,
        offset: u64,
        immediate: u32,
    ) -> Result<Ticket, PostError> {
        self.lane(0).write_imm(local, range, remote, offset, immediate)
    }

    /// [`Lane::read`] on lane 0.
    pub fn read(
        &self,
        local: &Region,
        range: Range<usize>,
        remote: &RemoteRegion,
        offset: u64,
    ) -> Result<Ticket, PostError> {
        self.lane(0).read(local, range, remote, offset)
    }

    /// [`Lane::send`] on lane 0.
    pub fn send(&self, local: &Region, range: Range<usize>) -> Result<Ticket, PostError> {
        self.lane(0).send(local, range)
    }

    /// [`Lane::send_imm`] on lane 0.
    pub fn send_imm(&self, local: &Region, range: Range<usize>, immediate: u32) -> Result<Ticket, PostError> {
        self.lane(0).send_imm(local, range, immediate)
    }

    /// [`Lane::recv`] on lane 0.
    pub fn recv(&self, local: &Region, range: Range<usize>) -> Result<Ticket, PostError> {
        self.lane(0).recv(local, range)
    }

    /// [`Lane::fetch_add`] on lane 0.
    pub fn fetch_add(
        &self,
        local: &Region,
        at: usize,
        remote: &RemoteRegion,
        offset: u64,
        add: u64,
    ) -> Result<Ticket, PostError> {
        self.lane(0).fetch_add(local, at, remote, offset, add)
    }

    /// [`Lane::compare_swap`] on lane 0.
    pub fn compare_swap(
        &self,
        local: &Region,
        at: usize,
        remote: &RemoteRegion,
        offset: u64,
        compare: u64,
        swap: u64,
    ) -> Result<Ticket, PostError> {
        self.lane(0).compare_swap(local, at, remote, offset, compare, swap)
    }

    /// Waits for one operation, at most `timeout`. It drives the device for about a millisecond, then sleeps.
    ///
    /// # Errors
    /// It failed, the peer is gone, or the time is over (then it is still under way, and can be waited for again).
    pub fn wait(&self, ticket: Ticket, timeout: Duration) -> Result<Completion, WaitError> {
        self.wait_for(timeout, |book| match book.claim(ticket) {
            Some(ended) => Some(Ok(ended)),
            None if book.is_pending(ticket) => None,
            None => Some(Err(WaitError::UnknownTicket { ticket })),
        })
    }

    /// Waits for whichever operation ends next, on any lane.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait); or nothing is under way.
    pub fn wait_any(&self, timeout: Duration) -> Result<Completion, WaitError> {
        self.wait_for(timeout, |book| match book.claim_any() {
            Some(ended) => Some(Ok(ended)),
            None if book.pending() > 0 => None,
            None => Some(Err(WaitError::NothingPending)),
        })
    }

    /// The next operation that has ended, if any; drives the device, and never blocks.
    ///
    /// # Errors
    /// An operation failed, or the peer is gone.
    pub fn poll(&self) -> Result<Option<Completion>, WaitError> {
        let claimed = self.book().claim_any();
        if let Some(ended) = claimed {
            return self.judge(&ended).map(Some);
        }
        self.look_now_and_then(Instant::now());
        self.collect()?;
        let claimed = self.book().claim_any();
        if claimed.is_none()
            && let Some(ailment) = self.ailment()
        {
            return Err(ailment);
        }
        claimed.map(|ended| self.judge(&ended)).transpose()
    }

    /// Operations under way.
    pub fn pending(&self) -> usize {
        self.book().pending()
    }

    /// Looks whether the peer has closed or died; if so, everything under way is flushed. Costs a few system calls: for loops
    /// that poll the completion queue by hand, every few milliseconds.
    pub fn is_peer_gone(&self) -> bool {
        if self.farewell.is_said() {
            return true;
        }
        if !self.control.look_closed() {
            return false;
        }
        // What the peer finished before it went is finished: it is in the queue already, in front of what is flushed now.
        self.farewell.say(|| self.qps.iter().for_each(flush));
        true
    }

    /// Looks whether the device went away under us: then nothing completes any more. The software NIC never does.
    pub fn is_device_gone(&self) -> bool {
        self.look_after_device();
        self.ailments.gone.load(Ordering::Acquire)
    }

    /// What is wrong with the device itself, looked at now: it is gone, its port is down for longer than a hiccup lasts (told once), or it lost
    /// completions. For loops that poll the completion queue by hand, every few milliseconds; [`wait`](Self::wait) and
    /// [`poll`](Self::poll) look by themselves.
    ///
    /// # Errors
    /// What it is, in a sentence.
    pub fn check_device(&self) -> Result<(), WaitError> {
        self.look_after_device();
        self.ailment().map_or(Ok(()), Err)
    }

    /// What speaks for a wrong GID of a hardware device, where nothing of ours has come through to the peer so far. For loops that poll the
    /// completion queue by hand, when something ends in [`Status::RetryExceeded`].
    pub fn doubt_gid(&self) -> Option<String> {
        let hard = self.device.nic().hard()?;
        if self.book().has_succeeded { None } else { hard.doubt_gid(self.peer) }
    }

    fn look_after_device(&self) {
        let (nic, now) = (self.device.nic(), self.since_birth(Instant::now()));
        let mut health = nic.look();
        // A port that is down says itself whether it still is: that it came back need not be an event either.
        if self.is_silent(now) || health.port_down {
            health = nic.examine();
        }
        // Another connection's queue is not our trouble.
        health.queue_failed = health.queue_failed && self.cq.has_failed();
        self.ailments.note(&health, now);
    }

    /// That the port is down, if it says so now.
    pub(crate) fn port_lost(&self) -> Option<WaitError> {
        let nic = self.device.nic();
        let lost = || WaitError::PortLost { device: nic.name().to_owned(), pending: self.pending() };
        nic.examine().port_down.then(lost)
    }

    /// Whether nothing has completed for so long that the port is to be asked; true once in that time.
    fn is_silent(&self, now: u64) -> bool {
        let since = self.silent_since.load(Ordering::Relaxed);
        let is_silent = u128::from(now.saturating_sub(since)) >= SILENCE.as_micros();
        let has_heard = self.heard.swap(false, Ordering::Relaxed);
        if has_heard || is_silent {
            self.silent_since.store(now, Ordering::Relaxed);
        }
        is_silent && !has_heard
    }

    fn ailment(&self) -> Option<WaitError> {
        let ailment = self.ailments.now()?;
        let (device, pending) = (self.device.nic().name().to_owned(), self.pending());
        Some(match ailment {
            Ailment::Gone => WaitError::DeviceGone { device, pending },
            Ailment::QueueFailed => WaitError::QueueFailed { device, pending },
            Ailment::PortLost => WaitError::PortLost { device, pending },
        })
    }

    fn since_birth(&self, now: Instant) -> u64 {
        u64::try_from((now - self.born).as_micros()).unwrap_or(u64::MAX)
    }

    /// Posts with a fresh ticket. The ticket is in the book before the device knows of the work, for another thread may
    /// fetch the completion before we return.
    pub(crate) fn open(
        &self,
        lane: usize,
        kind: WorkKind,
        post: impl FnOnce(&Qp, u64) -> Result<(), any::PostError>,
    ) -> Result<Ticket, PostError> {
        let mut book = self.book();
        let ticket = book.open(lane, kind).ok_or(PostError::Unclaimed { count: book.limit })?;
        drop(book);
        post(&self.qps[lane], ticket.0).inspect_err(|_| self.book().cancel(ticket))?;
        self.farewell.after_post(|| flush(&self.qps[lane]));
        Ok(ticket)
    }

    fn book(&self) -> MutexGuard<'_, Tickets> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for(
        &self,
        timeout: Duration,
        mut claim: impl FnMut(&mut Tickets) -> Option<Result<Ended, WaitError>>,
    ) -> Result<Completion, WaitError> {
        let start = Instant::now();
        let (mut armed, mut spins) = (false, true);
        let (mut asked, mut polls) = (None, 0_u32);
        loop {
            polls = polls.wrapping_add(1);
            self.collect()?;
            // The book is opened when there is something new in it, by us or by another thread that waits.
            let booked = self.booked.load(Ordering::Acquire);
            if asked != Some(booked) {
                asked = Some(booked);
                let claimed = claim(&mut self.book());
                if let Some(claimed) = claimed {
                    let ended = claimed?;
                    self.await_last_word(&ended);
                    return self.judge(&ended);
                }
            }
            if spins && polls % POLLS != 1 {
                continue;
            }
            let now = Instant::now();
            let waited = now - start;
            if let Some(ailment) = self.ailment() {
                return Err(ailment);
            }
            if waited >= timeout {
                return Err(WaitError::Timeout { timeout, pending: self.pending() });
            }
            if self.look_now_and_then(now) {
                continue;
            }
            spins = waited < SPIN;
            if spins {
                continue;
            }
            if armed {
                self.channel.wait(LOOK_EVERY.min(timeout - waited).max(Duration::from_millis(1)));
                armed = false;
            } else {
                // What came before arming is not announced: look once more, then sleep.
                self.cq.request_notify(false);
                armed = true;
            }
        }
    }

    /// Moves what completed into the book.
    fn collect(&self) -> Result<(), WaitError> {
        let mut work = FETCHED.take();
        let polled = self.cq.poll(&mut work, BATCH);
        if !work.is_empty() {
            self.heard.store(true, Ordering::Relaxed);
            let mut book = self.book();
            work.drain(..).for_each(|completion| book.end(&completion));
            self.booked.fetch_add(1, Ordering::Release);
        }
        FETCHED.set(work);
        polled?;
        Ok(())
    }

    /// Looks after the peer if it is time to; whether it has just been found gone.
    fn look_now_and_then(&self, now: Instant) -> bool {
        let since_birth = self.since_birth(now);
        let looked = self.looked.load(Ordering::Relaxed);
        if u128::from(since_birth.saturating_sub(looked)) < LOOK_EVERY.as_micros() {
            return false;
        }
        self.looked.store(since_birth, Ordering::Relaxed);
        self.look_after_device();
        !self.farewell.is_said() && self.is_peer_gone()
    }

    /// Some failures of hardware have a cause that shows a little later: a NIC refuses for a process that just died before the side channel
    /// tells of its death, and a request fails before its port is said to be down. That is waited for a moment, counted from the failure: what
    /// fails together waits together, and what is asked about later not at all. A software NIC refuses for nobody but a process that lives.
    fn await_last_word(&self, ended: &Ended) {
        let (Some(failed), Some(hard)) = (ended.failed, self.device.nic().hard()) else { return };
        let is_open = || {
            (ended.is_refused() && !self.is_peer_gone())
                || (ended.is_local_trouble() && hard.examine().is_well())
        };
        while failed.elapsed() < LAST_WORD && is_open() {
            std::thread::sleep(Duration::from_millis(1));
            // Others that fail now do not begin to wait when their turn comes.
            let _ = self.collect(); // whoever waits next hears of it
        }
    }

    fn judge(&self, ended: &Ended) -> Result<Completion, WaitError> {
        if matches!(ended.status, Status::RetryExceeded | Status::Flushed) || ended.is_local_trouble() {
            let (health, device) = (self.device.nic().examine(), || self.device.nic().name().to_owned());
            if health.gone {
                self.ailments.gone.store(true, Ordering::Release);
                return Err(WaitError::DeviceGone { device: device(), pending: self.pending() });
            }
            if health.port_down {
                let Completion { ticket, lane, kind, .. } = ended.completion;
                return Err(WaitError::PortDown { ticket, lane, kind, device: device() });
            }
        }
        let judged = judge(ended, || self.is_peer_gone());
        if let Err(WaitError::Failed { ticket, lane, kind, status: Status::RetryExceeded }) = judged
            && let Some(doubt) = self.doubt_gid()
        {
            return Err(WaitError::WrongGid { ticket, lane, kind, peer: self.peer, doubt });
        }
        judged
    }
}

/// Ends what is under way on a queue pair: from every state, and again.
fn flush(qp: &Qp) {
    let _ = qp.modify(&QpAttr::to_state(QpState::Error), 0);
}
