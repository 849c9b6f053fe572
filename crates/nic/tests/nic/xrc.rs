//! Extended reliable connections: one connection serves several shared receive queues.
#![allow(clippy::cast_possible_truncation)] // small constants

use nobounce_memory::HostBuffer;
use nobounce_nic::links::fault::FaultConfig;
use nobounce_nic::soft::{Config, Cq, Mr, Qp, QpInit, Srq, SrqLimits, XrcDomain};
use nobounce_nic::work::{
    Mtu, Operation, Psn, QpAttr, QpLimits, RecvRequest, SendRequest, Service, Status, WorkCompletion,
    WorkKind,
};

use crate::common::{ALL_ACCESS, End, config, pattern, register, until};

const LEN: usize = 64 << 10;
const MTU: Mtu = Mtu::Mtu1024;

/// The receiving end: a domain with two queues, each with memory and a completion queue of its own.
struct Receiver {
    target: Qp,
    queues: [Queue; 2],
    end: End,
}

struct Queue {
    srq: Srq,
    cq: Cq,
    mr: Mr,
    buffer: HostBuffer,
}

impl Queue {
    fn post(&self, wr_id: u64, len: u32) {
        let sges = [nobounce_nic::work::Sge { addr: self.mr.addr(), len, lkey: self.mr.lkey() }];
        self.srq.post_recv(&RecvRequest { wr_id, sges: &sges }).unwrap();
    }

    fn next(&self) -> WorkCompletion {
        let mut got = Vec::new();
        until("a completion of the queue", || self.cq.poll(&mut got, 1).unwrap() > 0);
        got[0]
    }

    fn bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.buffer.read_at(0, &mut bytes).unwrap();
        bytes
    }
}

fn receiver(config: &Config) -> (Receiver, XrcDomain) {
    let end = End::open(config, LEN);
    let domain = XrcDomain::create(&end.device).unwrap();
    let queue = || {
        let pd = end.device.alloc_pd().unwrap();
        let (cq, buffer) = (end.device.create_cq(64, None).unwrap(), HostBuffer::new(LEN).unwrap());
        let mr = register(&pd, &buffer, ALL_ACCESS);
        let srq = domain.create_srq(&pd, &cq, SrqLimits { depth: 16, sges: 1 }).unwrap();
        Queue { srq, cq, mr, buffer }
    };
    let queues = [queue(), queue()];
    (Receiver { target: domain.create_target().unwrap(), queues, end }, domain)
}

fn initiator(end: &End) -> Qp {
    let (send_cq, recv_cq) = (&end.cq, &end.cq);
    let limits = QpLimits::default();
    end.pd
        .create_qp_with(&QpInit { service: Service::XrcInitiator, send_cq, recv_cq, srq: None, limits })
        .unwrap()
}

fn join(qp: &Qp, peer: &Qp, addr: std::net::IpAddr) {
    qp.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
    qp.modify(&QpAttr::to_rtr(addr, peer.qpn(), Psn::new(7), MTU)).unwrap();
    qp.modify(&QpAttr { timeout: 14, ..QpAttr::to_rts(Psn::new(7)) }).unwrap();
}

fn connected(net: u8) -> (End, Qp, Receiver, XrcDomain) {
    connected_with(net, "")
}

fn connected_with(net: u8, fault: &str) -> (End, Qp, Receiver, XrcDomain) {
    let fault = |seed| Some(FaultConfig { seed, ..fault.parse().ok()? });
    let at = |host: u64| Config { fault: fault(host), ..config(&format!("127.59.{net}.{host}")) };
    let a = End::open(&at(1), LEN);
    let (b, domain) = receiver(&at(2));
    let qp = initiator(&a);
    join(&qp, &b.target, b.end.device.local());
    join(&b.target, &qp, a.device.local());
    (a, qp, b, domain)
}

fn post(a: &End, qp: &Qp, op: Operation, len: u32, srq: &Srq) {
    let sges = a.sge(0, len);
    qp.post_send(&SendRequest { xrc_srq: srq.id(), ..SendRequest::new(u64::from(len), op, &sges) }).unwrap();
}

#[test]
fn each_message_reaches_the_queue_it_names() {
    deliver(connected(1));
}

#[test]
fn each_message_reaches_its_queue_over_a_faulty_network() {
    let (a, qp, b, domain) = connected_with(7, "loss=0.02,dup=0.02,reorder=0.02,corrupt=0.01");
    let receiver = b.end.device.clone();
    deliver((a, qp, b, domain));
    assert!(receiver.counters().qps.out_of_seq_request > 0, "{:?}", receiver.counters());
}

fn deliver((a, qp, b, _domain): (End, Qp, Receiver, XrcDomain)) {
    for round in 0..20_u8 {
        a.fill(round);
        let len = 700 * u32::from(round) + 1;
        for (n, queue) in b.queues.iter().enumerate() {
            queue.post(100 + n as u64, len);
            let op = if n == 0 { Operation::Send } else { Operation::SendImmediate(5) };
            post(&a, &qp, op, len, &queue.srq);
        }
        a.succeed(2);
        for (n, queue) in b.queues.iter().enumerate() {
            let got = queue.next();
            assert_eq!((got.status, got.wr_id, got.qpn), (Status::Success, 100 + n as u64, b.target.qpn()));
            assert_eq!((got.byte_len, got.kind), (len, WorkKind::Receive));
            let expected: Vec<u8> = (0..len as usize).map(|at| pattern(round, at)).collect();
            assert!(queue.bytes(len as usize) == expected, "round {round}, queue {n}");
        }
    }
    // Its own completion queues see nothing of it.
    b.end.quiet();
}

/// Memory is that of the protection domain of the queue that a request names.
#[test]
fn requests_use_the_memory_of_the_queue_they_name() {
    let (a, qp, b, _domain) = connected(2);
    let remote = |queue: &Queue| nobounce_nic::work::Remote { addr: queue.mr.addr(), rkey: queue.mr.rkey() };
    let [first, second] = &b.queues;
    a.fill(9);
    post(&a, &qp, Operation::Write(remote(first)), 5000, &first.srq);
    a.succeed(1);
    assert!(first.bytes(5000) == (0..5000).map(|at| pattern(9, at)).collect::<Vec<_>>());
    post(&a, &qp, Operation::Read(remote(first)), 5000, &first.srq);
    post(&a, &qp, Operation::FetchAdd { remote: remote(second), add: 5 }, 8, &second.srq);
    post(&a, &qp, Operation::AtomicWrite(remote(second)), 8, &second.srq);
    a.succeed(3);
    second.post(3, 0);
    post(&a, &qp, Operation::WriteImmediate(remote(second), 77), 3000, &second.srq);
    a.succeed(1);
    assert_eq!(second.next().immediate, Some(77));
    // The key of the one under the name of the other is refused.
    post(&a, &qp, Operation::Write(remote(first)), 8, &second.srq);
    assert_eq!(a.completions(1)[0].status, Status::RemoteAccess);
}

#[test]
fn a_queue_that_is_not_there_is_refused() {
    let (a, qp, b, _domain) = connected(3);
    let sges = a.sge(0, 8);
    qp.post_send(&SendRequest { xrc_srq: 0xf_ffff, ..SendRequest::new(1, Operation::Send, &sges) }).unwrap();
    assert_eq!(a.completions(1)[0].status, Status::RemoteInvalidRequest);
    // One of another domain is none.
    let (a, qp, c, _other) = connected(4);
    let foreign = XrcDomain::create(&c.end.device).unwrap();
    let pd = c.end.device.alloc_pd().unwrap();
    let srq = foreign.create_srq(&pd, &c.end.cq, SrqLimits { depth: 4, sges: 1 }).unwrap();
    post(&a, &qp, Operation::Send, 8, &srq);
    assert_eq!(a.completions(1)[0].status, Status::RemoteInvalidRequest);
    assert!(foreign.is_busy());
    drop(srq);
    assert!(!foreign.is_busy());
    drop(b);
}

#[test]
fn an_empty_queue_is_waited_for() {
    let (a, qp, b, _domain) = connected(5);
    a.fill(3);
    post(&a, &qp, Operation::Send, 2000, &b.queues[1].srq);
    std::thread::sleep(std::time::Duration::from_millis(5));
    b.end.quiet();
    b.queues[1].post(8, 4000);
    a.succeed(1);
    assert_eq!(b.queues[1].next().byte_len, 2000);
}

/// The two ends of a connection are not the same: one sends, the other receives.
#[test]
fn a_target_sends_nothing() {
    let (_a, _qp, b, _domain) = connected(6);
    let sges = b.end.sge(0, 8);
    assert!(b.target.post_send(&SendRequest::new(1, Operation::Send, &sges)).is_err());
}
