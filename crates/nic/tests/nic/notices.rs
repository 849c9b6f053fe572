//! Notification: completion channels, solicited events, asynchronous events, overflow.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{End, LIMIT, config, connect, pair, pair_with, until};
use nobounce_nic::links::udp::{UdpConfig, UdpLink};
use nobounce_nic::links::{Link, RxDatagram, TxBatch};
use nobounce_nic::soft::{
    AsyncEvent, Channel, Config, Cq, CqError, Device, LinkChoice, Progress, ResizeError,
};
use nobounce_nic::work::{
    Mtu, Operation, Psn, QpAttr, QpLimits, QpState, RecvRequest, SendRequest, Status, WorkKind,
};
use nobounce_protocol::qp::QpEvent;

const MTU: Mtu = Mtu::Mtu1024;

fn readable(fd: RawFd) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid pollfd; the call does not wait.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
}

/// `b` has a completion queue with a channel.
fn with_channel(addr: &str, depth: usize) -> (End, End, Channel) {
    let mut a = End::open(&config(addr), 64 << 10);
    let mut b = End::open(&config(addr), 64 << 10);
    let channel = b.device.create_channel().unwrap();
    b.cq = b.device.create_cq(depth, Some(&channel)).unwrap();
    a.add_qp(QpLimits::default());
    b.add_qp(QpLimits::default());
    connect(&a, 0, &b, 0, MTU);
    (a, b, channel)
}

fn send(a: &End, solicited: bool) {
    let sge = a.sge(0, 8);
    a.qps[0].post_send(&SendRequest { solicited, ..SendRequest::new(1, Operation::Send, &sge) }).unwrap();
    a.succeed(1);
}

fn polled(cq: &Cq) -> usize {
    cq.poll(&mut Vec::new(), 100).unwrap()
}

#[test]
fn an_armed_queue_raises_its_channel_once() {
    let (a, b, channel) = with_channel("127.52.0.1", 64);
    for wr_id in 0..6 {
        b.post_recv(wr_id, 0, 8);
    }
    send(&a, false);
    assert!(!channel.wait(Duration::from_millis(5)), "not armed");
    assert_eq!(polled(&b.cq), 1);
    b.cq.request_notify(false);
    assert!(!channel.take(), "what came before is not announced");
    // From here on the application does not poll this end: the engine thread alone must notice.
    send(&a, false);
    assert!(channel.wait(LIMIT), "armed, and a completion came");
    send(&a, false);
    assert!(!channel.wait(Duration::from_millis(5)), "one event for one arming");
    assert_eq!(polled(&b.cq), 2);
    b.cq.request_notify(false);
    b.cq.cancel_notify();
    send(&a, false);
    assert!(!channel.wait(Duration::from_millis(5)), "not armed any more");
    assert_eq!(polled(&b.cq), 1);
}

#[test]
fn a_solicited_arming_waits_for_solicited_or_failed_work() {
    let (a, b, channel) = with_channel("127.52.0.2", 64);
    for wr_id in 0..4 {
        b.post_recv(wr_id, 0, 8);
    }
    b.cq.request_notify(true);
    send(&a, false);
    assert!(!channel.wait(Duration::from_millis(5)), "not solicited");
    send(&a, true);
    assert!(channel.wait(LIMIT), "solicited");
    b.cq.request_notify(true);
    b.cq.request_notify(false);
    b.cq.request_notify(true);
    send(&a, false);
    assert!(channel.wait(LIMIT), "a weaker arming does not take back the stronger one");
    polled(&b.cq);
    b.cq.request_notify(true);
    b.qps[0].modify(&QpAttr::to_state(QpState::Error)).unwrap();
    assert!(channel.wait(LIMIT), "a failure is always announced");
    let mut got = Vec::new();
    b.cq.poll(&mut got, 10).unwrap();
    assert_eq!(got[0].status, Status::Flushed);
}

#[test]
fn one_channel_serves_several_queues_and_outlives_them() {
    let (a, b, channel) = with_channel("127.52.0.3", 64);
    let other = b.device.create_cq(8, Some(&channel)).unwrap();
    other.request_notify(false);
    b.cq.request_notify(false);
    b.post_recv(1, 0, 8);
    send(&a, false);
    assert!(channel.wait(LIMIT));
    assert_eq!((polled(&b.cq), polled(&other)), (1, 0));
    drop((other, b, a));
    assert!(!channel.take());
}

/// Reads the descriptor as a program does that waits in read(2).
fn read_fd(fd: RawFd) -> std::io::Result<usize> {
    let mut count = [0_u8; 8];
    // SAFETY: 8 writable bytes.
    let read = unsafe { libc::read(fd, count.as_mut_ptr().cast(), 8) };
    usize::try_from(read).map_err(|_| std::io::Error::last_os_error())
}

fn set_nonblocking(fd: RawFd) {
    // SAFETY: an open descriptor, and no pointers.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) }, 0);
}

/// A program that sleeps on completions takes its own first: `ib_send_lat -e` fails otherwise.
#[test]
fn a_send_completes_before_the_answer_to_it_arrives() {
    const ROUNDS: usize = 300;
    for link in [LinkChoice::Auto, LinkChoice::Udp] {
        let config = Config { link, progress: Progress::Thread, ..config("127.52.9.1") };
        let (a, b) = pair_with(&config, &config, 4096, MTU);
        b.post_recv(0, 0, 8);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    b.completions(1);
                    b.post_recv(0, 0, 8);
                    b.post(Operation::Send, 0, 8);
                    b.completions(1);
                }
            });
            for round in 0..ROUNDS {
                a.post_recv(round as u64, 0, 8);
                a.post(Operation::Send, 0, 8);
                let kinds: Vec<_> = a.completions(2).iter().map(|completion| completion.kind).collect();
                assert_eq!(kinds, [WorkKind::Send, WorkKind::Receive], "{link:?}, round {round}");
            }
        });
    }
}

#[test]
fn every_event_says_which_queue_and_is_counted_by_the_descriptor() {
    let (a, b, channel) = with_channel("127.52.0.8", 64);
    let fd = channel.as_raw_fd();
    let other = b.device.create_cq(8, Some(&channel)).unwrap();
    let lone = b.pd.create_qp(&other, &other, QpLimits::default()).unwrap();
    lone.modify(&QpAttr::to_init(crate::common::ALL_ACCESS)).unwrap();
    for wr_id in 0..6 {
        b.post_recv(wr_id, 0, 8);
    }
    let complete_other = || {
        lone.post_recv(&RecvRequest { wr_id: 1, sges: &b.sge(0, 8) }).unwrap();
        lone.modify(&QpAttr::to_state(QpState::Error)).unwrap();
        lone.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
        lone.modify(&QpAttr::to_init(crate::common::ALL_ACCESS)).unwrap();
    };
    let arm_and_send = || {
        b.cq.request_notify(false);
        send(&a, false);
    };
    arm_and_send();
    other.request_notify(true);
    complete_other();
    arm_and_send();
    // It blocks: these events are pending.
    let counter = channel.counter_fd();
    for cq in [&b.cq, &other, &b.cq] {
        assert_eq!(read_fd(counter).unwrap(), 8);
        assert_eq!(channel.claim(), Some(cq.id()));
    }
    assert!(!readable(fd));
    set_nonblocking(counter);
    assert_eq!(read_fd(counter).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    // The same without reading.
    arm_and_send();
    other.request_notify(false);
    complete_other();
    assert_eq!((channel.next(), channel.next(), channel.next()), (Some(b.cq.id()), Some(other.id()), None));
    assert!(!readable(fd));
}

#[test]
fn events_of_a_queue_that_goes_are_forgotten() {
    let (a, b, channel) = with_channel("127.52.0.9", 64);
    let fd = channel.as_raw_fd();
    let other = b.device.create_cq(8, Some(&channel)).unwrap();
    let lone = b.pd.create_qp(&other, &other, QpLimits::default()).unwrap();
    lone.modify(&QpAttr::to_init(crate::common::ALL_ACCESS)).unwrap();
    b.post_recv(1, 0, 8);
    other.request_notify(false);
    b.cq.request_notify(false);
    lone.post_recv(&RecvRequest { wr_id: 1, sges: &b.sge(0, 8) }).unwrap();
    lone.modify(&QpAttr::to_state(QpState::Error)).unwrap();
    send(&a, false);
    until("both events", || readable(fd));
    assert!(other.is_busy() && b.cq.is_busy());
    drop(lone);
    assert!(!other.is_busy());
    drop(other);
    assert_eq!((channel.next(), channel.next()), (Some(b.cq.id()), None));
    assert!(!readable(fd));
    // A reader had consumed the count of a forgotten event: nothing to claim, and the count is
    // right.
    b.cq.request_notify(false);
    b.qps[0].post_recv(&RecvRequest { wr_id: 2, sges: &b.sge(0, 8) }).unwrap();
    send(&a, false);
    until("the event", || readable(fd));
    assert_eq!(read_fd(channel.counter_fd()).unwrap(), 8);
    drop(b);
    assert_eq!(channel.claim(), None);
    assert!(!readable(fd));
}

#[test]
fn a_completion_queue_changes_its_depth_and_loses_nothing() {
    let (a, b, _channel) = with_channel("127.52.0.10", 2);
    for wr_id in 0..8 {
        b.post_recv(wr_id, 0, 8);
    }
    b.cq.resize(6).unwrap();
    assert_eq!(b.cq.depth(), 6);
    (0..6).for_each(|_| send(&a, false));
    assert_eq!(b.cq.resize(5), Err(ResizeError::Holds { held: 6, asked: 5 }));
    let mut got = Vec::new();
    assert_eq!(b.cq.poll(&mut got, 4), Ok(4));
    b.cq.resize(2).unwrap();
    assert_eq!(b.cq.poll(&mut got, 4), Ok(2));
    assert!(got.iter().map(|wc| wc.wr_id).eq(0..6));
    let most = b.device.limits().max_cq_depth;
    for depth in [0, most + 1] {
        assert!(matches!(b.cq.resize(depth), Err(ResizeError::Depth(_))));
        assert!(b.device.create_cq(depth, None).is_err());
    }
    b.cq.resize(most).unwrap();
    b.device.create_cq(most, None).unwrap();
    b.cq.resize(1).unwrap();
    a.qps[0].post_send(&SendRequest::new(1, Operation::Send, &a.sge(0, 8))).unwrap();
    a.qps[0].post_send(&SendRequest::new(1, Operation::Send, &a.sge(0, 8))).unwrap();
    assert_eq!(b.event(), AsyncEvent::CqOverflow { cq: b.cq.id() });
    assert_eq!(b.cq.resize(64), Err(ResizeError::Overflowed));
}

#[test]
fn events_of_a_queue_pair_that_goes_are_forgotten() {
    let (a, mut b) = pair("127.52.0.11", 4096, MTU);
    let fd = b.device.event_fd();
    let remote = nobounce_nic::work::Remote { rkey: b.mr.rkey() ^ 1, ..b.remote(0) };
    a.post(Operation::Write(remote), 0, 8);
    assert_eq!(a.status(), Status::RemoteAccess);
    until("the descriptor", || readable(fd));
    b.qps.clear();
    assert!(!readable(fd) && b.device.next_event().is_none());
}

#[test]
fn a_full_completion_queue_is_an_event_an_error_and_the_end_of_its_queue_pairs() {
    let (a, b, channel) = with_channel("127.52.0.4", 2);
    for wr_id in 0..4 {
        b.post_recv(wr_id, 0, 8);
    }
    for i in 0..4_u64 {
        a.qps[0].post_send(&SendRequest::new(i, Operation::Send, &a.sge(0, 8))).unwrap();
    }
    assert_eq!(b.event(), AsyncEvent::CqOverflow { cq: b.cq.id() });
    assert_eq!(b.event(), AsyncEvent::Qp { qpn: b.qps[0].qpn(), event: QpEvent::Fatal });
    assert_eq!(b.qps[0].state(), QpState::Error);
    assert!(channel.wait(LIMIT), "an overflow wakes its sleepers");
    let mut got = Vec::new();
    assert_eq!(b.cq.poll(&mut got, 10), Ok(2), "what had room is still there");
    assert_eq!((got[0].wr_id, got[1].wr_id), (0, 1));
    let error = b.cq.poll(&mut got, 10).unwrap_err();
    assert_eq!(error, CqError::Overflow { depth: 2 });
    assert!(error.to_string().contains("overflowed its 2 entries"), "{error}");
    assert!(b.device.next_event().is_none(), "once, not for every lost completion");
    b.post_recv(9, 0, 8); // flushed at once
    assert_eq!(b.cq.poll(&mut got, 10), Err(error), "nothing follows what was lost");
    // The rest of the device lives.
    let cq = b.device.create_cq(16, None).unwrap();
    let qp = b.pd.create_qp(&cq, &cq, QpLimits::default()).unwrap();
    qp.modify(&QpAttr::to_init(crate::common::ALL_ACCESS)).unwrap();
    qp.modify(&QpAttr::to_rtr(b.device.local(), qp.qpn(), Psn::new(1), MTU)).unwrap();
    qp.modify(&QpAttr::to_rts(Psn::new(1))).unwrap();
    qp.post_send(&SendRequest::new(1, Operation::Write(b.remote(100)), &b.sge(0, 8))).unwrap();
    until("a completion in the new queue", || polled(&cq) == 1);
}

#[test]
fn asynchronous_events_make_their_descriptor_readable() {
    let (a, b) = pair("127.52.0.5", 4096, MTU);
    let fd = b.device.event_fd();
    assert!(!readable(fd) && b.device.next_event().is_none());
    let remote = nobounce_nic::work::Remote { rkey: b.mr.rkey() ^ 1, ..b.remote(0) };
    a.post(Operation::Write(remote), 0, 8);
    assert_eq!(a.status(), Status::RemoteAccess);
    until("the descriptor", || readable(fd));
    assert_eq!(
        b.device.next_event(),
        Some(AsyncEvent::Qp { qpn: b.qps[0].qpn(), event: QpEvent::AccessError })
    );
    assert!(!readable(fd) && b.device.next_event().is_none());
    assert!(a.device.next_event().is_none(), "the requester has its completion instead");
}

#[test]
fn the_first_packet_and_the_drained_queue_are_events() {
    let mut a = End::open(&config("127.52.0.6"), 4096);
    let mut b = End::open(&config("127.52.0.6"), 4096);
    a.add_qp(QpLimits::default());
    b.add_qp(QpLimits::default());
    let (qa, qb) = (&a.qps[0], &b.qps[0]);
    qb.modify(&QpAttr::to_rtr(a.device.local(), qa.qpn(), Psn::new(3), MTU)).unwrap();
    qa.modify(&QpAttr::to_rtr(b.device.local(), qb.qpn(), Psn::new(4), MTU)).unwrap();
    qa.modify(&QpAttr::to_rts(Psn::new(3))).unwrap();
    a.post(Operation::Write(b.remote(0)), 0, 8);
    a.succeed(1);
    assert_eq!(b.event(), AsyncEvent::Qp { qpn: qb.qpn(), event: QpEvent::CommunicationEstablished });
    let mut to_sqd = QpAttr { en_sqd_async_notify: true, ..QpAttr::to_state(QpState::Sqd) };
    to_sqd.mask |= nobounce_nic::work::AttrMask::EN_SQD_ASYNC_NOTIFY;
    a.post(Operation::Write(b.remote(0)), 0, 4096);
    qa.modify(&to_sqd).unwrap();
    assert_eq!(a.event(), AsyncEvent::Qp { qpn: qa.qpn(), event: QpEvent::SendQueueDrained });
    // While drained, work is taken and waits.
    a.post(Operation::Write(b.remote(0)), 0, 4096);
    a.succeed(1);
    a.quiet();
    qa.modify(&QpAttr::to_state(QpState::Rts)).unwrap();
    a.succeed(1);
}

#[test]
fn no_thread_needs_to_poll_the_target() {
    let (a, b) = pair("127.52.0.7", 4096, MTU);
    let recv = b.sge(0, 8);
    for wr_id in 0..100 {
        b.qps[0].post_recv(&RecvRequest { wr_id, sges: &recv }).unwrap();
    }
    for i in 0..100_u64 {
        a.buffer.write_at(0, &i.to_ne_bytes()).unwrap();
        a.post(Operation::Send, 0, 8);
        a.post(Operation::Write(b.remote(64)), 0, 8);
        a.succeed(2);
        assert_eq!(b.bytes(64, 8), i.to_ne_bytes(), "written before the writer's completion");
    }
    assert_eq!(polled(&b.cq), 100);
}

/// A link that panics once it is asked to.
#[derive(Debug)]
struct Panicking(UdpLink, std::sync::Arc<AtomicBool>);

impl Link for Panicking {
    fn local(&self) -> std::net::IpAddr {
        self.0.local()
    }

    fn listen(&mut self) -> Result<(), nobounce_nic::links::OpenError> {
        self.0.listen()
    }

    fn slot(&self) -> u8 {
        self.0.slot()
    }

    fn capabilities(&self) -> nobounce_nic::links::Capabilities {
        self.0.capabilities()
    }

    fn send(&mut self, batch: &mut TxBatch) {
        self.0.send(batch);
    }

    fn receive(&mut self, sink: &mut dyn FnMut(&RxDatagram<'_>)) -> usize {
        assert!(!self.1.load(Ordering::Relaxed), "a bug, for the test");
        self.0.receive(sink)
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        self.0.wake_fds()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.0.counters()
    }
}

/// A program that waits for events learns that its device is dead.
#[test]
fn a_panic_of_an_engine_thread_is_a_fatal_event() {
    let broken = std::sync::Arc::new(AtomicBool::new(false));
    let udp = UdpLink::prepare(&UdpConfig::new("127.64.9.1".parse().unwrap())).unwrap();
    let device = Device::with_link(Box::new(Panicking(udp, broken.clone()))).unwrap();
    let mut end = End::of(device, 4096);
    end.add_qp(QpLimits::default());
    broken.store(true, Ordering::Relaxed);
    // A packet wakes the thread.
    let from = std::net::UdpSocket::bind("127.64.9.2:0").unwrap();
    until("the event", || {
        from.send_to(&[0; 20], ("127.64.9.1", 4791)).unwrap();
        end.device.next_event() == Some(AsyncEvent::DeviceFatal)
    });
    std::mem::forget(end); // its destruction would drive the broken link
}
