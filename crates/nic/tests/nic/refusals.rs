//! What a peer may not do: it is refused as the standard says, nothing outside changes, and the
//! device lives on.
#![allow(clippy::cast_possible_truncation)] // small constants

use crate::common::{ALL_ACCESS, End, check_write, config, connect, patterns, register};
use nobounce_memory::HostBuffer;
use nobounce_nic::soft::{AsyncEvent, Mr};
use nobounce_nic::work::{
    Access, Mtu, Operation, QpAttr, QpLimits, QpState, RecvRequest, Remote, SendRequest, Sge, Status,
};
use nobounce_protocol::qp::QpEvent;

const MTU: Mtu = Mtu::Mtu256;
/// The peer's region is the middle of its buffer; around it lies memory that must not change.
const GUARD: usize = 4096;
const REGION: usize = 8192;

struct World {
    a: End,
    b: End,
    guarded: HostBuffer,
}

impl World {
    fn new(addr: &str) -> Self {
        let (a, b) = (End::open(&config(addr), 64 << 10), End::open(&config(addr), 64 << 10));
        let guarded = HostBuffer::new(REGION + 2 * GUARD).unwrap();
        guarded.write_at(0, &patterns(0x99, 0, guarded.len())).unwrap();
        a.fill(1);
        Self { a, b, guarded }
    }

    fn region(&self, access: Access) -> Mr {
        // SAFETY: the buffer is touched through windows only, and lives as long as the world.
        unsafe { self.b.pd.register(self.guarded.as_mut_ptr().wrapping_add(GUARD), REGION, access) }.unwrap()
    }

    /// A fresh connection on which the peer may do `access`.
    fn connect(&mut self, access: Access) {
        self.a.qps.clear();
        self.b.qps.clear();
        self.a.add_qp(QpLimits::default());
        self.b.add_qp(QpLimits::default());
        self.b.qps[0].modify(&QpAttr::to_init(access)).unwrap();
        connect(&self.a, 0, &self.b, 0, MTU);
    }

    fn unchanged(&self) -> bool {
        let mut now = vec![0; self.guarded.len()];
        self.guarded.read_at(0, &mut now).unwrap();
        now == patterns(0x99, 0, now.len())
    }
}

/// Every operation on remote memory, with its length and the right it needs.
fn operations(remote: Remote, len: u32) -> [(Operation, u32, Access); 5] {
    [
        (Operation::Write(remote), len, Access::REMOTE_WRITE),
        (Operation::WriteImmediate(remote, 1), len, Access::REMOTE_WRITE),
        (Operation::Read(remote), len, Access::REMOTE_READ),
        (Operation::CompareSwap { remote, compare: 0, swap: 1 }, 8, Access::REMOTE_ATOMIC),
        (Operation::FetchAdd { remote, add: 1 }, 8, Access::REMOTE_ATOMIC),
    ]
}

/// Posts the operation and more behind it, and checks all that must come of it.
#[track_caller]
fn refused(w: &World, op: Operation, len: u32, status: Status, event: QpEvent) {
    let (a, b) = (&w.a, &w.b);
    // What a READ was going to bring may have come in part.
    let from = if matches!(op, Operation::Read(_)) { len as usize } else { 0 };
    let all = || (a.bytes(from, a.buffer.len() - from), b.bytes(0, b.buffer.len()));
    let before = all();
    b.post_recv(50, 0, 8);
    b.post_recv(51, 0, 8);
    a.qps[0].post_send(&SendRequest::new(1, op, &a.sge(0, len))).unwrap();
    for wr_id in [2, 3] {
        // A queue pair that is in error already takes these too, and flushes them.
        a.qps[0].post_send(&SendRequest::new(wr_id, Operation::Write(b.remote(0)), &a.sge(0, 3000))).unwrap();
    }
    let got: Vec<_> = a.completions(3).iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(got, [(1, status), (2, Status::Flushed), (3, Status::Flushed)], "{op:?}");
    let got: Vec<_> = b.completions(2).iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(got, [(50, Status::Flushed), (51, Status::Flushed)], "{op:?}");
    assert_eq!(b.event(), AsyncEvent::Qp { qpn: b.qps[0].qpn(), event }, "{op:?}");
    assert_eq!((a.qps[0].state(), b.qps[0].state()), (QpState::Error, QpState::Error), "{op:?}");
    assert!(w.unchanged(), "{op:?} changed memory of the peer");
    assert!(before == all(), "{op:?} changed memory");
    assert!(a.device.next_event().is_none() && b.device.next_event().is_none());
}

/// After all that was refused, a new queue pair works.
#[track_caller]
fn still_works(w: &mut World) {
    w.connect(ALL_ACCESS);
    check_write(&w.a, &w.b, 5, 64 << 10);
    let region = w.region(ALL_ACCESS);
    let remote = Remote { addr: region.addr(), rkey: region.rkey() };
    w.a.post(Operation::Write(remote), 0, REGION as u32);
    w.a.succeed(1);
    assert!(!w.unchanged(), "what is allowed is done");
}

#[test]
fn a_wrong_key() {
    let mut w = World::new("127.53.0.1");
    let region = w.region(ALL_ACCESS);
    let remote = Remote { addr: region.addr(), rkey: region.rkey() ^ 0x8000 };
    for (op, len, _) in operations(remote, 1000) {
        w.connect(ALL_ACCESS);
        refused(&w, op, len, Status::RemoteAccess, QpEvent::AccessError);
    }
    assert!(w.b.counter("refused_access") >= 5);
    still_works(&mut w);
}

#[test]
fn a_key_that_was_given_back() {
    let mut w = World::new("127.53.0.2");
    let region = w.region(ALL_ACCESS);
    let remote = Remote { addr: region.addr(), rkey: region.rkey() };
    drop(region);
    for (op, len, _) in operations(remote, 1000) {
        w.connect(ALL_ACCESS);
        refused(&w, op, len, Status::RemoteAccess, QpEvent::AccessError);
    }
    still_works(&mut w);
}

#[test]
fn one_byte_beyond_either_end() {
    let mut w = World::new("127.53.0.3");
    let region = w.region(ALL_ACCESS);
    let (addr, rkey, size) = (region.addr(), region.rkey(), REGION as u32);
    let end = addr + REGION as u64;
    for (addr, len) in [
        (addr, size + 1),
        (addr + 1, size),
        (addr - 1, 1),
        (addr - 1, 2),
        (end, 1),
        (end - 1, 2),
        (u64::MAX, 2),
        (0, 1),
    ] {
        for op in [Operation::Write(Remote { addr, rkey }), Operation::Read(Remote { addr, rkey })] {
            w.connect(ALL_ACCESS);
            refused(&w, op, len, Status::RemoteAccess, QpEvent::AccessError);
        }
    }
    for addr in [addr - 8, end, u64::MAX - 7] {
        w.connect(ALL_ACCESS);
        let op = Operation::FetchAdd { remote: Remote { addr, rkey }, add: 1 };
        refused(&w, op, 8, Status::RemoteAccess, QpEvent::AccessError);
    }
    still_works(&mut w);
}

#[test]
fn a_region_without_the_right() {
    let mut w = World::new("127.53.0.4");
    for n in 0..5 {
        let right = operations(Remote::default(), 8)[n].2;
        let region = w.region(ALL_ACCESS - right);
        let remote = Remote { addr: region.addr(), rkey: region.rkey() };
        let (op, len, _) = operations(remote, 1000)[n];
        w.connect(ALL_ACCESS);
        refused(&w, op, len, Status::RemoteAccess, QpEvent::AccessError);
    }
    still_works(&mut w);
}

#[test]
fn a_queue_pair_without_the_right() {
    let mut w = World::new("127.53.0.5");
    let region = w.region(ALL_ACCESS);
    let remote = Remote { addr: region.addr(), rkey: region.rkey() };
    for (op, len, right) in operations(remote, 1000) {
        w.connect(ALL_ACCESS - right);
        refused(&w, op, len, Status::RemoteInvalidRequest, QpEvent::RequestError);
    }
    drop(region);
    still_works(&mut w);
}

#[test]
fn another_protection_domain() {
    let mut w = World::new("127.53.0.6");
    let other = w.b.device.alloc_pd().unwrap();
    let region = register(&other, &w.b.buffer, ALL_ACCESS);
    let remote = Remote { addr: region.addr(), rkey: region.rkey() };
    for (op, len, _) in operations(remote, 1000) {
        w.connect(ALL_ACCESS);
        refused(&w, op, len, Status::RemoteAccess, QpEvent::AccessError);
    }
    still_works(&mut w);
}

#[test]
fn a_misaligned_atomic() {
    let mut w = World::new("127.53.0.7");
    let region = w.region(ALL_ACCESS);
    for offset in [1, 4, 7] {
        w.connect(ALL_ACCESS);
        let remote = Remote { addr: region.addr() + offset, rkey: region.rkey() };
        let op = Operation::CompareSwap { remote, compare: 0, swap: 1 };
        refused(&w, op, 8, Status::RemoteInvalidRequest, QpEvent::RequestError);
    }
    drop(region);
    still_works(&mut w);
}

/// The standard checks neither key nor address where no byte moves.
#[test]
fn nothing_at_all_needs_no_key() {
    let mut w = World::new("127.53.0.8");
    w.connect(ALL_ACCESS);
    for op in [Operation::Write(Remote::default()), Operation::Read(Remote::default())] {
        w.a.post(op, 0, 0);
        w.a.succeed(1);
    }
    still_works(&mut w);
}

#[test]
fn local_lists_that_name_what_they_may_not() {
    let mut w = World::new("127.53.0.9");
    let read_only = register(&w.a.pd, &w.a.buffer, Access::REMOTE_READ);
    let region = w.region(ALL_ACCESS);
    let remote = Remote { addr: region.addr(), rkey: region.rkey() };
    let good = w.a.sge(0, 64)[0];
    let no_write = Sge { lkey: read_only.lkey(), ..good };
    let (wrong_key, beyond) =
        (Sge { lkey: good.lkey ^ 1, ..good }, Sge { addr: good.addr + (64 << 10) - 63, ..good });
    let atomic = |sge: Sge| [Sge { len: 8, ..sge }];
    for (op, list) in [
        (Operation::Write(remote), vec![wrong_key]),
        (Operation::Write(remote), vec![beyond]),
        (Operation::Write(remote), vec![good, wrong_key]),
        (Operation::Read(remote), vec![wrong_key]),
        (Operation::Read(remote), vec![no_write]),
        (Operation::Read(remote), vec![beyond]),
        (Operation::CompareSwap { remote, compare: 9, swap: 9 }, atomic(no_write).to_vec()),
    ] {
        w.connect(ALL_ACCESS);
        let before = w.a.bytes(0, 64 << 10);
        w.a.qps[0].post_send(&SendRequest::new(1, op, &list)).unwrap();
        let got = w.a.completions(1)[0];
        assert_eq!((got.wr_id, got.status), (1, Status::LocalProtection), "{op:?}");
        assert_eq!(w.a.qps[0].state(), QpState::Error);
        assert!(w.unchanged() && before == w.a.bytes(0, 64 << 10), "{op:?}");
    }
    // Reading from memory that may only be read is fine.
    w.connect(ALL_ACCESS);
    w.a.qps[0].post_send(&SendRequest::new(1, Operation::Write(remote), &[no_write])).unwrap();
    w.a.succeed(1);
    // A receive that names a wrong key fails here, and the sender learns that it was not its fault.
    w.connect(ALL_ACCESS);
    let wrong = [Sge { lkey: w.b.mr.lkey() ^ 1, ..w.b.sge(0, 64)[0] }];
    w.b.qps[0].post_recv(&RecvRequest { wr_id: 9, sges: &wrong }).unwrap();
    w.a.post(Operation::Send, 0, 64);
    assert_eq!(w.a.status(), Status::RemoteOperation);
    let got = w.b.completions(1)[0];
    assert_eq!((got.wr_id, got.status), (9, Status::LocalProtection));
    drop(region);
    still_works(&mut w);
}
