//! Posting in `thread` mode. In most tests the engine threads are stopped, and the test drives the
//! engines.

use std::time::{Duration, Instant};

use nobounce_memory::HostBuffer;
use nobounce_protocol::qp::{Mtu, PostError};
use nobounce_protocol::wire::Psn;

use crate::links::LinkChoice;
use crate::links::now_ns;
use crate::soft::engine::Engine;
use crate::soft::{Config, Cq, Device, Mr, Pd, Progress, Qp, QpInit, Srq, SrqLimits};
use crate::work::Operation;
use crate::work::{
    Access, QpAttr, QpLimits, QpState, RecvRequest, Remote, SendRequest, Service, Sge, Status, WorkCompletion,
};

/// Longer than any test here takes.
const LIMIT: Duration = Duration::from_secs(20);
const BYTES: usize = 16 << 20;

struct End {
    qps: Vec<Qp>,
    cq: Cq,
    mr: Mr,
    _buffer: HostBuffer,
    pd: Pd,
    device: Device,
}

impl End {
    fn open(link: LinkChoice) -> Self {
        // An address of its own: devices with stopped threads hand nothing over to those of other
        // tests.
        let [.., high, low] = std::process::id().to_be_bytes();
        let addr = [127, 98, high, low].into();
        let progress = Progress::Thread;
        let device = Device::open(&Config { addr, link, progress, ..Config::default() }).unwrap();
        let pd = device.alloc_pd().unwrap();
        let buffer = HostBuffer::new(BYTES).unwrap();
        // SAFETY: the region is dropped before the buffer.
        let mr = unsafe { pd.register(buffer.as_mut_ptr(), buffer.len(), Access::all()) }.unwrap();
        let cq = device.create_cq(4096, None).unwrap();
        Self { qps: Vec::new(), cq, mr, _buffer: buffer, pd, device }
    }

    fn add_qp(&mut self, limits: QpLimits) {
        let qp = self.pd.create_qp(&self.cq, &self.cq, limits).unwrap();
        qp.modify(&QpAttr::to_init(Access::all())).unwrap();
        self.qps.push(qp);
    }

    fn join(&self, peer: &Self, nth: usize) {
        let (device, psn) = (peer.device.local(), Psn::new(100));
        let qp = &self.qps[nth];
        qp.modify(&QpAttr::to_rtr(device, peer.qps[nth].qpn(), psn, Mtu::Mtu1024)).unwrap();
        qp.modify(&QpAttr { timeout: 16, ..QpAttr::to_rts(psn) }).unwrap();
    }

    fn stop_threads(&self) {
        self.device.shared.engines.iter().for_each(|handle| handle.stop_thread());
    }

    /// One round of each engine.
    fn drive(&self) {
        for handle in self.device.shared.engines.iter() {
            handle.lock().unwrap().progress();
        }
    }

    fn sge(&self, offset: u64, len: u32) -> [Sge; 1] {
        [Sge { addr: self.mr.addr() + offset, len, lkey: self.mr.lkey() }]
    }

    /// Posts a WRITE from the start of the buffer to the start of the peer's.
    fn write(&self, nth: usize, wr_id: u64, len: u32, to: &Self) -> Result<(), PostError> {
        let remote = Remote { addr: to.mr.addr(), rkey: to.mr.rkey() };
        self.qps[nth].post_send(&SendRequest::new(wr_id, Operation::Write(remote), &self.sge(0, len)))
    }

    fn send(&self, wr_id: u64) -> Result<(), PostError> {
        self.qps[0].post_send(&SendRequest::new(wr_id, Operation::Send, &self.sge(0, 64)))
    }

    fn receive(&self, wr_id: u64) -> Result<(), PostError> {
        self.qps[0].post_recv(&RecvRequest { wr_id, sges: &self.sge(1024, 64) })
    }

    fn polled(&self) -> Vec<WorkCompletion> {
        let mut got = Vec::new();
        self.cq.poll(&mut got, 4096).unwrap();
        got
    }
}

/// Drives both until this end has so many completions.
fn completions(of: &End, other: &End, count: usize) -> Vec<WorkCompletion> {
    let (mut got, end) = (Vec::new(), Instant::now() + LIMIT);
    while got.len() < count {
        of.drive();
        other.drive();
        got.extend(of.polled());
        assert!(Instant::now() < end, "{} of {count} completions: {got:?}", got.len());
    }
    got
}

/// Their numbers; all are successes.
fn numbers(of: &End, other: &End, count: usize) -> Vec<u64> {
    let all = completions(of, other, count);
    assert!(all.iter().all(|one| one.status == Status::Success), "{all:?}");
    all.iter().map(|one| one.wr_id).collect()
}

fn pair(link: LinkChoice, qps: usize, limits: QpLimits) -> (End, End) {
    let (mut a, mut b) = (End::open(link), End::open(link));
    for nth in 0..qps {
        a.add_qp(limits);
        b.add_qp(limits);
        a.join(&b, nth);
        b.join(&a, nth);
    }
    (a, b)
}

/// A pair that only the test drives.
fn still(link: LinkChoice, qps: usize, limits: QpLimits) -> (End, End) {
    let (a, b) = pair(link, qps, limits);
    a.stop_threads();
    b.stop_threads();
    (a, b)
}

fn on_every_link(test: impl Fn(LinkChoice)) {
    [LinkChoice::Udp, LinkChoice::Auto].into_iter().for_each(test);
}

#[test]
fn a_post_waits_for_no_lock() {
    on_every_link(|link| {
        let (a, b) = still(link, 1, QpLimits::default());
        let engine = a.qps[0].handle().lock().unwrap();
        for wr_id in 0..8 {
            a.write(0, wr_id, 64, &b).unwrap();
        }
        a.receive(8).unwrap();
        assert!(a.polled().is_empty(), "nothing drives it");
        drop(engine);
        assert_eq!(numbers(&a, &b, 8), (0..8).collect::<Vec<_>>());
    });
}

#[test]
fn a_full_queue_is_said_at_once() {
    on_every_link(|link| {
        let limits = QpLimits { send_depth: 4, recv_depth: 4, ..QpLimits::default() };
        let (a, b) = still(link, 1, limits);
        (0..4).for_each(|wr_id| a.write(0, wr_id, 64, &b).unwrap());
        (0..4).for_each(|wr_id| a.receive(wr_id).unwrap());
        assert_eq!(a.write(0, 4, 64, &b), Err(PostError::QueueFull(4)));
        assert_eq!(a.receive(4), Err(PostError::QueueFull(4)));
        let sge = a.sge(0, 64);
        let one = SendRequest::new(5, Operation::Send, &sge);
        assert_eq!(a.qps[0].post_all([one, one]), Err((0, PostError::QueueFull(4))));
        assert_eq!(numbers(&a, &b, 4), [0, 1, 2, 3]);
        a.write(0, 5, 64, &b).unwrap();
        assert_eq!(numbers(&a, &b, 1), [5]);
    });
}

#[test]
fn more_than_the_submission_queue_holds_keeps_its_order() {
    let limits = QpLimits { send_depth: 2000, ..QpLimits::default() };
    let (a, b) = still(LinkChoice::Auto, 1, limits);
    (0..2000).for_each(|wr_id| a.write(0, wr_id, 8, &b).unwrap());
    assert_eq!(numbers(&a, &b, 2000), (0..2000).collect::<Vec<_>>());
}

/// The receiver has not taken its submissions when the message arrives.
#[test]
fn a_receive_that_was_submitted_is_there_for_what_comes() {
    on_every_link(|link| {
        let (a, b) = still(link, 1, QpLimits::default());
        b.receive(7).unwrap();
        a.send(1).unwrap();
        a.drive();
        let engine = &b.qps[0].handle().engine();
        let mut engine = engine.try_lock().unwrap(); // takes no submissions
        let end = Instant::now() + LIMIT;
        while engine.progress() == 0 {
            assert!(Instant::now() < end);
        }
        drop(engine);
        assert_eq!(b.qps[0].counters().out_of_buffer, 0, "no RNR NAK");
        assert_eq!(numbers(&a, &b, 1), [1]);
        assert_eq!(b.polled().iter().map(|one| one.wr_id).collect::<Vec<_>>(), [7]);
    });
}

#[test]
fn a_reset_takes_submissions_with_it() {
    let (a, b) = still(LinkChoice::Auto, 1, QpLimits::default());
    a.write(0, 1, 64, &b).unwrap();
    a.receive(2).unwrap();
    let rest = a.device.counters().sent_pkts;
    a.qps[0].modify(&QpAttr::to_state(QpState::Reset)).unwrap();
    assert!(a.device.counters().sent_pkts <= rest + 1, "what had begun");
    assert_eq!(a.write(0, 3, 64, &b), Err(PostError::State(QpState::Reset)));
    assert_eq!(a.receive(3), Err(PostError::State(QpState::Reset)));
    a.drive();
    assert!(a.polled().is_empty());
}

#[test]
fn an_error_flushes_submissions() {
    let (a, b) = still(LinkChoice::Auto, 1, QpLimits::default());
    a.receive(1).unwrap();
    a.qps[0].modify(&QpAttr::to_state(QpState::Error)).unwrap();
    a.receive(2).unwrap();
    a.write(0, 3, 64, &b).unwrap();
    let all = completions(&a, &b, 3);
    let mut numbers: Vec<u64> = all.iter().map(|one| one.wr_id).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [1, 2, 3]);
    assert!(all.iter().all(|one| one.status == Status::Flushed), "{all:?}");
}

#[test]
fn a_wrong_request_is_refused_by_the_post() {
    let (a, b) = still(LinkChoice::Auto, 1, QpLimits::default());
    let remote = Remote { addr: b.mr.addr(), rkey: b.mr.rkey() };
    let sge = a.sge(0, 64);
    let add = SendRequest::new(1, Operation::FetchAdd { remote, add: 1 }, &sge);
    assert_eq!(a.qps[0].post_send(&add), Err(PostError::AtomicLength(64)));
    let long = [1; 1025];
    let inline = SendRequest::inline(1, Operation::Send, &long);
    assert!(matches!(a.qps[0].post_send(&inline), Err(PostError::InlineTooLong { .. })));
    a.write(0, 2, 64, &b).unwrap();
    assert_eq!(numbers(&a, &b, 1), [2], "what was refused took no place");
}

/// A pair that only the test drives; the second takes its receives from a shared queue of that
/// depth.
fn shared(depth: usize) -> (End, End, Srq) {
    let (mut a, mut b) = (End::open(LinkChoice::Auto), End::open(LinkChoice::Auto));
    a.add_qp(QpLimits::default());
    let srq = b.pd.create_srq(SrqLimits { depth, sges: 1 }).unwrap();
    let (send_cq, recv_cq, limits) = (&b.cq, &b.cq, QpLimits::default());
    let init = QpInit { service: Service::Rc, send_cq, recv_cq, srq: Some(&srq), limits };
    let qp = b.pd.create_qp_with(&init).unwrap();
    qp.modify(&QpAttr::to_init(Access::all())).unwrap();
    b.qps.push(qp);
    a.join(&b, 0);
    b.join(&a, 0);
    a.stop_threads();
    b.stop_threads();
    (a, b, srq)
}

#[test]
fn shared_receives_are_submitted_too() {
    let (a, b, srq) = shared(2);
    let post = |srq: &Srq, wr_id| srq.post_recv(&RecvRequest { wr_id, sges: &b.sge(1024, 64) });
    post(&srq, 1).unwrap();
    post(&srq, 2).unwrap();
    assert_eq!(post(&srq, 3), Err(PostError::QueueFull(2)));
    a.send(1).unwrap();
    assert_eq!(numbers(&b, &a, 1), [1]);
    post(&srq, 3).unwrap();
    a.send(2).unwrap();
    a.send(3).unwrap();
    assert_eq!(numbers(&b, &a, 2), [2, 3]);
}

/// A message has taken the last receive of a shared queue. A post to the same queue pair delivers
/// its completion before the engine has handled all arrivals: the queue has room again.
#[test]
fn a_shared_receive_has_room_once_its_completion_is_there() {
    let (a, b, srq) = shared(1);
    let post = |wr_id| srq.post_recv(&RecvRequest { wr_id, sges: &b.sge(1024, 64) });
    post(1).unwrap();
    assert_eq!(post(2), Err(PostError::QueueFull(1)));
    a.send(1).unwrap();
    a.drive();
    let mut engine = b.qps[0].handle().lock().unwrap();
    let Engine { link, core, .. } = &mut *engine;
    let end = Instant::now() + LIMIT;
    while link.receive(&mut |datagram| core.handle_datagram(now_ns(), datagram)) == 0 {
        assert!(Instant::now() < end);
    }
    assert!(b.polled().is_empty(), "not delivered yet");
    b.write(0, 9, 8, &a).unwrap();
    assert!(core.take_submissions(now_ns));
    assert_eq!(b.polled().iter().map(|one| one.wr_id).collect::<Vec<_>>(), [1]);
    assert_eq!(post(2), Ok(()));
}

/// A queue pair with 8 bytes to move gets its turn beside one with 4 MiB: counted in engine rounds,
/// not in time.
#[test]
fn a_short_message_does_not_wait_for_a_long_one() {
    on_every_link(|link| {
        let (a, b) = still(link, 2, QpLimits::default());
        a.write(0, 0, 4 << 20, &b).unwrap();
        a.write(0, 0, 4 << 20, &b).unwrap();
        let mut rounds = Vec::new();
        while rounds.len() < 10 {
            a.write(1, 1, 8, &b).unwrap();
            let mut round = 0;
            loop {
                a.drive();
                b.drive();
                round += 1;
                let got = a.polled();
                assert!(got.iter().all(|one| one.status == Status::Success), "{got:?}");
                let longs = got.iter().filter(|one| one.wr_id == 0).count();
                (0..longs).for_each(|_| a.write(0, 0, 4 << 20, &b).unwrap());
                if got.iter().any(|one| one.wr_id == 1) {
                    break;
                }
                assert!(round < 10_000, "{rounds:?}");
            }
            rounds.push(round);
        }
        rounds.sort_unstable();
        assert!(rounds[5] <= 100, "half of them within a hundred rounds: {rounds:?}");
    });
}

/// The engine threads run, and several threads post and poll.
#[test]
fn everything_completes_once_and_in_order() {
    on_every_link(|link| {
        let limits = QpLimits { send_depth: 64, ..QpLimits::default() };
        let (a, b) = pair(link, 2, limits);
        const EACH: u64 = 3000;
        std::thread::scope(|scope| {
            for nth in 0..2_usize {
                let (a, b) = (&a, &b);
                scope.spawn(move || {
                    for number in 0..EACH {
                        while let Err(error) = a.write(nth, (nth as u64) << 32 | number, 8, b) {
                            assert_eq!(error, PostError::QueueFull(64));
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let (mut next, end) = ([0; 2], Instant::now() + LIMIT);
            while next != [EACH; 2] {
                for one in a.polled() {
                    let (nth, number) = (usize::from(one.wr_id >> 32 > 0), one.wr_id & 0xffff_ffff);
                    assert_eq!((one.status, number), (Status::Success, next[nth]));
                    next[nth] += 1;
                }
                assert!(Instant::now() < end, "{next:?}");
                std::thread::yield_now();
            }
        });
    });
}
