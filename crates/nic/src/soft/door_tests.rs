//! What is posted while somebody else has the engine's lock. The engine's own thread seems to be on duty in all of these, and the test has the lock in its stead.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use nobounce_memory::HostBuffer;
use nobounce_protocol::qp::{Mtu, PostError};
use nobounce_protocol::wire::Psn;

use super::config::LinkChoice;
use super::helper::{CPUS_TO_SPIN, allowed_cpus};
use super::unit::Unit;
use super::{
    Access, Config, Cq, Device, Mr, Operation, Pd, Qp, QpAttr, QpLimits, QpState, RecvRequest, Remote,
    SendRequest, Sge, Status, WorkCompletion,
};

/// Longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(20);
const BYTES: usize = 4096;

struct End {
    qp: Qp,
    /// It has a second engine open.
    other: Option<Qp>,
    cq: Cq,
    mr: Mr,
    buffer: HostBuffer,
    pd: Pd,
    device: Device,
}

impl End {
    fn open(link: LinkChoice, limits: QpLimits) -> Self {
        let addr = "127.95.77.1".parse().unwrap();
        let device = Device::open(&Config { addr, link, engines: Some(2), ..Config::default() }).unwrap();
        let pd = device.alloc_pd().unwrap();
        let buffer = HostBuffer::new(BYTES).unwrap();
        // SAFETY: the region is dropped before the buffer, which nobody else has.
        let mr = unsafe { pd.register(buffer.as_mut_ptr(), buffer.len(), Access::all()) }.unwrap();
        let cq = device.create_cq(4096, None).unwrap();
        let qp = pd.create_qp(&cq, &cq, limits).unwrap();
        qp.modify(&QpAttr::to_init(Access::all())).unwrap();
        Self { qp, other: None, cq, mr, buffer, pd, device }
    }

    fn open_second_engine(&mut self) {
        self.other = Some(self.pd.create_qp(&self.cq, &self.cq, QpLimits::default()).unwrap());
        assert_eq!(self.device.engines(), 2);
    }

    fn join(&self, peer: &Self) {
        let (device, psn) = (peer.device.local(), Psn::new(100));
        self.qp.modify(&QpAttr::to_rtr(device, peer.qp.qpn(), psn, Mtu::Mtu1024)).unwrap();
        self.qp.modify(&QpAttr { timeout: 16, ..QpAttr::to_rts(psn) }).unwrap();
    }

    fn unit(&self) -> &Unit {
        self.qp.unit()
    }

    fn sge(&self, offset: u64, len: u32) -> [Sge; 1] {
        [Sge { addr: self.mr.addr() + offset, len, lkey: self.mr.lkey() }]
    }

    /// Posts a WRITE of the buffer's begin to the peer's.
    fn write(&self, wr_id: u64, to: &Self) -> Result<(), PostError> {
        let remote = Remote { addr: to.mr.addr(), rkey: to.mr.rkey() };
        self.qp.post_send(&SendRequest::new(wr_id, Operation::Write(remote), &self.sge(0, 64)))
    }

    fn receive(&self, wr_id: u64) -> Result<(), PostError> {
        self.qp.post_recv(&RecvRequest { wr_id, sges: &self.sge(1024, 64) })
    }

    /// Polls until so many completions came.
    fn completions(&self, count: usize) -> Vec<WorkCompletion> {
        let (mut got, end) = (Vec::new(), Instant::now() + LIMIT);
        while got.len() < count {
            self.cq.poll(&mut got, count).unwrap();
            assert!(Instant::now() < end, "{} of {count} completions: {got:?}", got.len());
        }
        got
    }

    /// Their numbers; all are successes.
    fn numbers(&self, count: usize) -> Vec<u64> {
        let all = self.completions(count);
        assert!(all.iter().all(|one| one.status == Status::Success), "{all:?}");
        all.iter().map(|one| one.wr_id).collect()
    }

    fn seems_on_duty(&self, seems: bool) {
        self.unit().seems_on_duty.store(seems, Ordering::SeqCst);
    }

    /// What `post` returns that somebody calls while the lock is taken and the engine's thread on duty; `None` if it waits for the lock. Then it has what it
    /// waits for, and its result is the second one.
    fn while_taken<R: Send>(&self, post: impl FnOnce() -> R + Send) -> (Option<R>, Option<R>) {
        let engine = self.unit().lock().unwrap();
        self.seems_on_duty(true);
        let (says, hears) = mpsc::channel();
        let at_once = std::thread::scope(|scope| {
            scope.spawn(move || says.send(post()));
            let at_once = match hears.recv_timeout(Duration::from_millis(500)) {
                Ok(result) => Some(result),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => panic!("it did not return"),
            };
            drop(engine);
            (at_once, hears)
        });
        self.seems_on_duty(false);
        let (at_once, hears) = at_once;
        (at_once, hears.try_recv().ok())
    }
}

fn pair(link: LinkChoice, limits: QpLimits) -> (End, End) {
    let (a, b) = (End::open(link, limits), End::open(link, limits));
    a.join(&b);
    b.join(&a);
    (a, b)
}

/// A queue pair's room is known once somebody has posted under the lock.
fn acquainted(link: LinkChoice, limits: QpLimits) -> (End, End) {
    let (mut a, mut b) = pair(link, limits);
    [&mut a, &mut b].into_iter().for_each(End::open_second_engine);
    a.write(0, &b).unwrap();
    b.receive(0).unwrap();
    assert_eq!(a.numbers(1), [0]);
    (a, b)
}

/// Another thread than the one that has the lock does it.
fn elsewhere(does: impl FnOnce() + Send) {
    std::thread::scope(|scope| _ = scope.spawn(does));
}

fn on_every_link(test: impl Fn(LinkChoice)) {
    [LinkChoice::Udp, LinkChoice::Auto].into_iter().for_each(test);
}

#[test]
fn a_post_does_not_wait_for_a_lock_that_the_engines_thread_has() {
    on_every_link(|link| {
        let (a, b) = acquainted(link, QpLimits::default());
        a.buffer.write_at(0, &[7; 64]).unwrap();
        let (at_once, _) = a.while_taken(|| (1..=10).try_for_each(|n| a.write(n, &b)));
        assert_eq!(at_once, Some(Ok(())), "it waited");
        a.write(11, &b).unwrap(); // under the lock, after those that lay at the door
        assert_eq!(a.numbers(11), (1..=11).collect::<Vec<_>>());
        let mut arrived = [0; 64];
        b.buffer.read_at(0, &mut arrived).unwrap();
        assert_eq!(arrived, [7; 64]);
    });
}

#[test]
fn nobody_is_needed_besides_the_one_who_left_it() {
    on_every_link(|link| {
        let (a, b) = acquainted(link, QpLimits::default());
        a.buffer.write_at(0, &[9; 64]).unwrap();
        // The thread goes off duty between the look at it and the look at the lock.
        let engine = a.unit().lock().unwrap();
        a.seems_on_duty(true);
        std::thread::scope(|scope| {
            let poster = scope.spawn(|| {
                let to = Remote { addr: b.mr.addr(), rkey: b.mr.rkey() };
                let sge = a.sge(0, 64);
                let posted = a.qp.post_list(|post| {
                    a.seems_on_duty(false);
                    post(&SendRequest::new(1, Operation::Write(to), &sge))
                });
                posted.unwrap().unwrap();
            });
            let end = Instant::now() + LIMIT;
            while !a.unit().engine().door.is_used() {
                assert!(Instant::now() < end, "nothing was left");
                std::thread::yield_now();
            }
            // By now it would have gone, if it were to go.
            std::thread::sleep(Duration::from_millis(50));
            let went = poster.is_finished();
            drop(engine);
            // Where there are CPUs to spare, the engine's thread may be on duty after all.
            assert!(
                !went || allowed_cpus() >= CPUS_TO_SPIN,
                "it left something and went, and nobody is there"
            );
        });
        // Nobody polls: the bytes arrive all the same.
        let (mut arrived, end) = ([0; 64], Instant::now() + LIMIT);
        while arrived != [9; 64] {
            assert!(Instant::now() < end, "what was left stayed there");
            b.buffer.read_at(0, &mut arrived).unwrap();
        }
        assert_eq!(a.numbers(1), [1]);
    });
}

#[test]
fn a_full_queue_is_said_as_ever() {
    let (a, b) =
        acquainted(LinkChoice::Auto, QpLimits { send_depth: 4, recv_depth: 3, ..QpLimits::default() });
    let silence = b.unit().lock().unwrap(); // nothing completes meanwhile
    let (_, waited) = a.while_taken(|| (1..=9).try_for_each(|n| a.write(n, &b).map_err(|error| (n, error))));
    drop(silence);
    assert_eq!(waited, Some(Err((5, PostError::QueueFull(4)))));
    assert_eq!(a.numbers(4), [1, 2, 3, 4]);
    a.write(20, &b).unwrap();
    assert_eq!(a.numbers(1), [20]);
    // One receive lies there already.
    let (_, waited) = b.while_taken(|| (1..=9).try_for_each(|n| b.receive(n).map_err(|error| (n, error))));
    assert_eq!(waited, Some(Err((3, PostError::QueueFull(3)))));
}

#[test]
fn all_or_none_counts_what_lies_at_the_door() {
    let (a, b) = acquainted(LinkChoice::Auto, QpLimits { send_depth: 4, ..QpLimits::default() });
    let silence = b.unit().lock().unwrap(); // nothing completes meanwhile
    let engine = a.unit().lock().unwrap();
    a.seems_on_duty(true);
    elsewhere(|| (1..=2).for_each(|n| a.write(n, &b).unwrap()));
    drop(engine);
    let sge = a.sge(0, 64);
    let write = Operation::Write(Remote { addr: b.mr.addr(), rkey: b.mr.rkey() });
    let three = [10, 11, 12].map(|n| SendRequest::new(n, write, &sge));
    let refused = a.qp.post_all(three).unwrap_err();
    drop(silence);
    assert!(matches!(refused, (2, PostError::QueueFull(4))), "{refused:?}");
    a.seems_on_duty(false);
    assert_eq!(a.numbers(2), [1, 2]);
}

#[test]
fn a_receive_that_lies_at_the_door_is_there_for_what_comes() {
    on_every_link(|link| {
        let (a, b) = acquainted(link, QpLimits::default());
        // The one that was posted under the lock is used up.
        let send = |n| a.qp.post_send(&SendRequest::new(n, Operation::Send, &a.sge(0, 64))).unwrap();
        send(1);
        assert_eq!((b.numbers(1), a.numbers(1)), (vec![0], vec![1]));
        let mut engine = b.unit().lock().unwrap();
        b.seems_on_duty(true);
        elsewhere(|| b.receive(5).unwrap());
        // Whoever has the lock meets the packet before it looks at the door again.
        send(2);
        let (mut got, end) = (Vec::new(), Instant::now() + LIMIT);
        while got.is_empty() && Instant::now() < end {
            engine.progress();
            a.cq.poll(&mut got, 1).unwrap();
        }
        let not_ready = engine.core.entry(b.qp.qpn()).unwrap().qp.counters().send_rnr_err;
        drop(engine);
        b.seems_on_duty(false);
        assert_eq!((got.len(), not_ready), (1, 0));
        assert_eq!(b.numbers(1), [5]);
    });
}

#[test]
fn a_queue_pair_that_was_reset_takes_nothing_in() {
    let (a, b) = acquainted(LinkChoice::Auto, QpLimits::default());
    let engine = a.unit().lock().unwrap();
    a.seems_on_duty(true);
    elsewhere(|| a.write(1, &b).unwrap());
    drop(engine);
    a.qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
    a.seems_on_duty(false);
    let mut got = Vec::new();
    (0..100).for_each(|_| _ = a.cq.poll(&mut got, 8).unwrap());
    assert!(got.is_empty(), "{got:?}");
    assert!(matches!(a.write(2, &b), Err(PostError::State(QpState::Reset))));
}

#[test]
fn an_error_flushes_what_lies_at_the_door() {
    let (a, b) = acquainted(LinkChoice::Auto, QpLimits::default());
    a.receive(0).unwrap();
    let mut engine = a.unit().lock().unwrap();
    a.seems_on_duty(true);
    elsewhere(|| a.receive(1).and_then(|()| a.write(2, &b)).unwrap());
    // Before anybody lets them in, as when a packet brings bad news.
    let index = a.qp.qpn().get() & 0xffff;
    engine.core.entry(a.qp.qpn()).unwrap().qp.modify(&QpAttr::to_state(QpState::Error)).unwrap();
    engine.core.settle(index);
    drop(engine);
    a.seems_on_duty(false);
    let all = a.completions(3);
    assert!(all.iter().all(|one| one.status == Status::Flushed), "{all:?}");
    assert_eq!(all.iter().map(|one| one.wr_id).collect::<Vec<_>>(), [0, 1, 2]);
}

/// What room there was is not remembered from the time when nobody could leave anything.
#[test]
fn room_that_was_seen_before_there_were_several_engines_is_not_trusted() {
    let (mut a, b) = pair(LinkChoice::Auto, QpLimits { send_depth: 4, ..QpLimits::default() });
    let silence = b.unit().lock().unwrap(); // nothing completes meanwhile
    (1..=2).for_each(|n| a.write(n, &b).unwrap());
    let sge = a.sge(0, 64);
    let write = Operation::Write(Remote { addr: b.mr.addr(), rkey: b.mr.rkey() });
    let refused = a.qp.post_all([5, 6, 7].map(|n| SendRequest::new(n, write, &sge))).unwrap_err();
    assert!(matches!(refused, (2, PostError::QueueFull(4))), "{refused:?}");
    (3..=4).for_each(|n| a.write(n, &b).unwrap());
    a.open_second_engine();
    let (at_once, waited) = a.while_taken(|| a.write(8, &b));
    drop(silence);
    assert_eq!((at_once, waited), (None, Some(Err(PostError::QueueFull(4)))));
    assert_eq!(a.numbers(4), [1, 2, 3, 4]);
}

/// Threads post to one queue pair while its engine's thread comes and goes, and somebody else has the lock now and then.
#[test]
fn everything_completes_once_and_in_order_whoever_has_the_lock() {
    const EACH: u64 = 3000;
    let (a, b) = acquainted(LinkChoice::Auto, QpLimits { send_depth: 16, ..QpLimits::default() });
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..2_u64 {
            let (a, b) = (&a, &b);
            scope.spawn(move || {
                let end = Instant::now() + LIMIT;
                for n in 0..EACH {
                    loop {
                        match a.write(thread << 32 | n, b) {
                            Ok(()) => break,
                            Err(PostError::QueueFull(_)) => std::thread::yield_now(),
                            Err(other) => panic!("{other}"),
                        }
                        assert!(Instant::now() < end, "no room for {n}");
                    }
                }
            });
        }
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                a.seems_on_duty(true);
                let engine = a.unit().lock();
                std::thread::yield_now();
                drop(engine);
                a.seems_on_duty(false);
                std::thread::yield_now();
            }
        });
        let mut next = [0_u64; 2];
        for _ in 0..2 * EACH {
            let one = a.numbers(1)[0];
            let (thread, n) = (usize::try_from(one >> 32).unwrap(), one & 0xffff_ffff);
            assert_eq!(n, next[thread], "of thread {thread}");
            next[thread] += 1;
        }
        over.store(true, Ordering::Relaxed);
        assert_eq!(next, [EACH; 2]);
    });
}
