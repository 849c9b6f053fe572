//! A connection: queue pairs to one peer, one completion queue, and the side channel that set them
//! up.

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nobounce_nic::any::{self, Channel, Cq, Qp};
use nobounce_nic::work::{Mtu, QpAttr, QpState, Status, WorkCompletion, WorkKind};

use crate::connect::Lanes;
use crate::control::ControlChannel;
use crate::device::Device;
use crate::handshake::Hello;
use crate::health::{Fault, HealthMonitor};
use crate::lane::{Lane, PostError};
use crate::peer_gone::PeerGone;
use crate::region::{Region, RemoteRegion};
use crate::tickets::{Completion, Ended, Ticket, Tickets};
use crate::wait::{WaitError, judge};

/// Interval of the peer liveness check.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How long `wait` polls before it arms the completion queue and sleeps.
const SPIN: Duration = Duration::from_millis(1);
/// How long the cause of a hardware failure may take to show. The side channel reported a killed
/// peer at most 39 ms after rxe of Linux 6.1 had refused on its behalf. That was in an emulated
/// machine on a busy host.
const LAST_WORD: Duration = Duration::from_millis(200);
/// Query the port after this long without a completion. Some drivers (rxe of Linux 6.1) let it go
/// down without an event, and never complete what it holds.
const SILENCE: Duration = Duration::from_secs(1);
/// Completions fetched per poll.
const BATCH: usize = 64;
/// In a caller that drives the device itself: polls per check of the clock and of everything else.
const POLLS: u32 = 4;

thread_local! {
    /// Buffer for fetched completions, reused between polls.
    static FETCHED: Cell<Vec<WorkCompletion>> = const { Cell::new(Vec::new()) };
}

/// A connection to a peer.
///
/// Operations return a [`Ticket`] at once; [`wait`](Self::wait), [`wait_any`](Self::wait_any) or
/// [`poll`](Self::poll) return the result. A failed operation stops its lane: later operations
/// there fail too. When the peer closes or dies, all operations fail with [`WaitError::PeerGone`]
/// within milliseconds. When it falls silent (a dead network), they fail within the time that
/// [`ConnectOptions`](crate::ConnectOptions) gives, 2.1 s by default.
#[derive(Debug)]
pub struct Connection {
    // Dropped first: pending packets of the queue pairs leave before the side channel closes.
    qps: Vec<Qp>,
    cq: Cq,
    channel: Channel,
    book: Mutex<Tickets>,
    pub(crate) control: ControlChannel,
    device: Device,
    peer: IpAddr,
    mtu: Mtu,
    peer_gone: PeerGone,
    /// The last known health of the device.
    health: HealthMonitor,
    born: Instant,
    /// Time of the last peer liveness check, in microseconds since `born`.
    looked: AtomicU64,
    /// Number of entries added to the tickets.
    booked: AtomicU64,
    /// Whether anything completed since the last check.
    heard: AtomicBool,
    /// Time of the last completion, or of the last query of the port.
    silent_since: AtomicU64,
}

impl Connection {
    pub(crate) fn new(device: &Device, lanes: Lanes, control: ControlChannel, theirs: &Hello) -> Self {
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
            peer_gone: PeerGone::default(),
            health: HealthMonitor::default(),
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

    /// The address of the peer's device.
    pub fn peer(&self) -> IpAddr {
        self.peer
    }

    /// The peer's end of the side channel; `None` once it is gone.
    pub fn peer_control_addr(&self) -> Option<SocketAddr> {
        self.control.stream().peer_addr().ok()
    }

    /// The TCP side channel for a protocol of the caller's own, and bytes of it that were received
    /// already. Messages and region descriptors must not be used beside it, nor
    /// [`wait`](Self::wait) and its like.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn side_channel(&self) -> io::Result<(TcpStream, Vec<u8>)> {
        Ok((self.control.stream().try_clone()?, self.control.take_received()))
    }

    /// The negotiated path MTU.
    pub fn mtu(&self) -> Mtu {
        self.mtu
    }

    /// Number of lanes.
    pub fn lanes(&self) -> usize {
        self.qps.len()
    }

    /// A lane, counted from 0.
    ///
    /// # Panics
    /// There is no such lane.
    pub fn lane(&self, index: usize) -> Lane<'_> {
        assert!(index < self.qps.len(), "lane {index} of a connection with {} lanes", self.qps.len());
        Lane::new(self, index)
    }

    /// The queue pair of a lane, for raw work requests. Do not mix both on one connection: `wait`
    /// and `poll` take every completion and drop unknown ones.
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

    /// The completion channel of the completion queue, to sleep on.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// [`Lane::write`] on lane 0; the same applies to all operations here.
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

    /// Waits for one operation, at most `timeout`. Drives the device for about a millisecond, then
    /// sleeps.
    ///
    /// # Errors
    /// It failed, the peer is gone, or the timeout expired. After a timeout it is still in flight
    /// and can be waited for again.
    pub fn wait(&self, ticket: Ticket, timeout: Duration) -> Result<Completion, WaitError> {
        self.wait_for(timeout, |book| match book.claim(ticket) {
            Some(ended) => Some(Ok(ended)),
            None if book.is_pending(ticket) => None,
            None => Some(Err(WaitError::UnknownTicket { ticket })),
        })
    }

    /// Waits for the next operation to complete, on any lane.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait); or nothing is in flight.
    pub fn wait_any(&self, timeout: Duration) -> Result<Completion, WaitError> {
        self.wait_for(timeout, |book| match book.claim_any() {
            Some(ended) => Some(Ok(ended)),
            None if book.pending() > 0 => None,
            None => Some(Err(WaitError::NothingPending)),
        })
    }

    /// The next completed operation, if any. Drives the device, and never blocks.
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
            && let Some(fault) = self.fault()
        {
            return Err(fault);
        }
        claimed.map(|ended| self.judge(&ended)).transpose()
    }

    /// Operations in flight.
    pub fn pending(&self) -> usize {
        self.book().pending()
    }

    /// Checks whether the peer has closed or died; if so, flushes everything in flight. Costs a few
    /// system calls. Loops that poll the completion queue directly call it every few milliseconds.
    pub fn is_peer_gone(&self) -> bool {
        if self.peer_gone.is_said() {
            return true;
        }
        if !self.control.look_closed() {
            return false;
        }
        // Operations that the peer completed before it went are already in the queue, ahead of the
        // flushed ones.
        self.peer_gone.say(|| self.qps.iter().for_each(flush));
        true
    }

    /// Checks whether the device is gone: then nothing completes any more. The software NIC never
    /// is.
    pub fn is_device_gone(&self) -> bool {
        self.look_after_device();
        self.health.gone.load(Ordering::Acquire)
    }

    /// Checks the health of the device now. It may be gone, its port down for longer than a link
    /// flap (reported once), or completions lost. Loops that poll the completion queue directly
    /// call it every few milliseconds. [`wait`](Self::wait) and [`poll`](Self::poll) check by
    /// themselves.
    ///
    /// # Errors
    /// The problem found.
    pub fn check_device(&self) -> Result<(), WaitError> {
        self.look_after_device();
        self.fault().map_or(Ok(()), Err)
    }

    /// Evidence for a wrong GID of a hardware device, while nothing has reached the peer so far.
    /// Loops that poll the completion queue directly call it on [`Status::RetryExceeded`].
    pub fn doubt_gid(&self) -> Option<String> {
        let hard = self.device.nic().hard()?;
        if self.book().has_succeeded { None } else { hard.doubt_gid(self.peer) }
    }

    fn look_after_device(&self) {
        let (nic, now) = (self.device.nic(), self.since_birth(Instant::now()));
        let mut health = nic.health();
        // Query a port that is down: its return need not raise an event either.
        if self.is_silent(now) || health.port_down {
            health = nic.examine();
        }
        // Ignore a failed queue of another connection.
        health.queue_failed = health.queue_failed && self.cq.has_failed();
        self.health.note(&health, now);
    }

    /// The error for a port that is down now.
    pub(crate) fn port_lost(&self) -> Option<WaitError> {
        let nic = self.device.nic();
        let lost = || WaitError::PortLost { device: nic.name().to_owned(), pending: self.pending() };
        nic.examine().port_down.then(lost)
    }

    /// Whether nothing has completed for so long that the port must be queried; true once per
    /// interval.
    fn is_silent(&self, now: u64) -> bool {
        let since = self.silent_since.load(Ordering::Relaxed);
        let is_silent = u128::from(now.saturating_sub(since)) >= SILENCE.as_micros();
        let has_heard = self.heard.swap(false, Ordering::Relaxed);
        if has_heard || is_silent {
            self.silent_since.store(now, Ordering::Relaxed);
        }
        is_silent && !has_heard
    }

    fn fault(&self) -> Option<WaitError> {
        let fault = self.health.now()?;
        let (device, pending) = (self.device.nic().name().to_owned(), self.pending());
        Some(match fault {
            Fault::Gone => WaitError::DeviceGone { device, pending },
            Fault::QueueFailed => WaitError::QueueFailed { device, pending },
            Fault::PortLost => WaitError::PortLost { device, pending },
        })
    }

    fn since_birth(&self, now: Instant) -> u64 {
        u64::try_from((now - self.born).as_micros()).unwrap_or(u64::MAX)
    }

    /// Posts with a fresh ticket. The ticket is recorded before the device gets the work: another
    /// thread may fetch the completion before this call returns.
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
        self.peer_gone.after_post(|| flush(&self.qps[lane]));
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
            // Search the tickets only after a change, by this thread or by another one that waits.
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
            if let Some(fault) = self.fault() {
                return Err(fault);
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
                // Completions before arming raise no event: poll once more, then sleep.
                self.cq.request_notify(false);
                armed = true;
            }
        }
    }

    /// Moves completions into the tickets.
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

    /// Checks the peer if the interval has passed; returns whether it was just found gone.
    fn look_now_and_then(&self, now: Instant) -> bool {
        let since_birth = self.since_birth(now);
        let looked = self.looked.load(Ordering::Relaxed);
        if u128::from(since_birth.saturating_sub(looked)) < LOOK_EVERY.as_micros() {
            return false;
        }
        self.looked.store(since_birth, Ordering::Relaxed);
        self.look_after_device();
        !self.peer_gone.is_said() && self.is_peer_gone()
    }

    /// Some hardware failures have a cause that shows a little later. A NIC may refuse on behalf of
    /// a dead process before the side channel reports the death. A request may fail before its port
    /// is reported down. Wait a moment for the cause, counted from the failure. Failures that occur
    /// together share the wait; later queries do not wait. A software NIC refuses only for a live
    /// process.
    fn await_last_word(&self, ended: &Ended) {
        let (Some(failed), Some(hard)) = (ended.failed, self.device.nic().hard()) else { return };
        let is_open = || {
            (ended.is_refused() && !self.is_peer_gone())
                || (ended.is_local_trouble() && hard.examine().is_well())
        };
        while failed.elapsed() < LAST_WORD && is_open() {
            std::thread::sleep(Duration::from_millis(1));
            // Collect other failures now, so that they do not start their own wait later.
            let _ = self.collect(); // the next wait reports it
        }
    }

    fn judge(&self, ended: &Ended) -> Result<Completion, WaitError> {
        if matches!(ended.status, Status::RetryExceeded | Status::Flushed) || ended.is_local_trouble() {
            let (health, device) = (self.device.nic().examine(), || self.device.nic().name().to_owned());
            if health.gone {
                self.health.gone.store(true, Ordering::Release);
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

/// Flushes a queue pair: from every state, and repeatedly.
fn flush(qp: &Qp) {
    let _ = qp.modify(&QpAttr::to_state(QpState::Error), 0);
}
