//! Registered memory that is unmapped or truncated under traffic: an error completion or a refusal,
//! never a crash.
#![allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)] // small constants

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{ALL_ACCESS, End, MIB, check_write, config, connect, pair, until};
use nobounce_memory::unmap_watch;
use nobounce_nic::soft::{AsyncEvent, Mr};
use nobounce_nic::work::{Mtu, Operation, QpLimits, QpState, RecvRequest, Remote, SendRequest, Sge, Status};
use nobounce_protocol::qp::QpEvent;

const MTU: Mtu = Mtu::Mtu1024;
const LEN: usize = MIB;

/// Memory that can be taken away in the middle. It lies where the kernel puts nothing by itself:
/// addresses that were unmapped are not reused while traffic still goes there.
struct Fragile {
    base: *mut u8,
    file: Option<OwnedFd>,
}

static NEXT_PLACE: AtomicUsize = AtomicUsize::new(0x1000_0000_0000);

impl Fragile {
    fn map(file: Option<OwnedFd>) -> Self {
        let (flags, fd) = match &file {
            Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let place = std::ptr::without_provenance_mut(NEXT_PLACE.fetch_add(1 << 30, Ordering::Relaxed));
        // SAFETY: a new mapping at an address where there is none.
        let base = unsafe { libc::mmap(place, LEN, rights, flags | libc::MAP_FIXED_NOREPLACE, fd, 0) };
        assert_eq!(base, place);
        Self { base: base.cast(), file }
    }

    fn anonymous() -> Self {
        Self::map(None)
    }

    fn file() -> Self {
        // SAFETY: a constant name; the result is checked and owned.
        let fd = unsafe { libc::memfd_create(c"fragile".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: just opened, with no other owner.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: no pointers.
        assert_eq!(unsafe { libc::ftruncate(fd, LEN as i64) }, 0);
        Self::map(Some(file))
    }

    fn register(&self, end: &End) -> Mr {
        // SAFETY: no reference to this memory is ever made.
        unsafe { end.pd.register(self.base, LEN, ALL_ACCESS) }.unwrap()
    }

    /// The second half is gone from here on.
    fn vanish(&self) {
        match &self.file {
            // SAFETY: no pointers; the second half of the mapping has no memory behind it any more.
            Some(file) => assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), LEN as i64 / 2) }, 0),
            // SAFETY: half of a mapping of ours, which is only touched through windows.
            None => assert_eq!(unsafe { libc::munmap(self.base.wrapping_add(LEN / 2).cast(), LEN / 2) }, 0),
        }
    }
}

impl Drop for Fragile {
    fn drop(&mut self) {
        // SAFETY: the range is ours alone, mapped or not.
        unsafe { libc::munmap(self.base.cast(), LEN) };
    }
}

fn sge(mr: &Mr, len: usize) -> [Sge; 1] {
    [Sge { addr: mr.addr(), len: len as u32, lkey: mr.lkey() }]
}

fn remote(mr: &Mr) -> Remote {
    Remote { addr: mr.addr(), rkey: mr.rkey() }
}

/// Both ends work again with new queue pairs.
#[track_caller]
fn still_work(a: &mut End, b: &mut End) {
    a.qps.clear();
    b.qps.clear();
    a.add_qp(QpLimits::default());
    b.add_qp(QpLimits::default());
    connect(a, 0, b, 0, MTU);
    check_write(a, b, 3, LEN);
    check_write(b, a, 4, LEN);
}

#[test]
fn on_the_sending_side() {
    for (n, fragile) in [Fragile::anonymous(), Fragile::file()].into_iter().enumerate() {
        let (mut a, mut b) = pair(&format!("127.54.0.{}", n + 1), LEN, MTU);
        let mr = fragile.register(&a);
        let post = |len| {
            let (op, sge) = (Operation::Write(b.remote(0)), sge(&mr, len));
            a.qps[0].post_send(&SendRequest::new(1, op, &sge)).unwrap();
        };
        post(LEN);
        a.succeed(1);
        fragile.vanish();
        post(LEN / 2);
        a.succeed(1);
        post(LEN);
        post(LEN / 2);
        let got = a.completions(2);
        assert_eq!((got[0].status, got[1].status), (Status::LocalProtection, Status::Flushed));
        assert_eq!((a.counter("memory_faults"), b.counter("memory_faults")), (1, 0));
        assert_eq!(a.qps[0].state(), QpState::Error);
        still_work(&mut a, &mut b);
    }
}

#[test]
fn at_the_target_of_a_write() {
    for (n, fragile) in [Fragile::anonymous(), Fragile::file()].into_iter().enumerate() {
        let (mut a, mut b) = pair(&format!("127.54.1.{}", n + 1), LEN, MTU);
        let mr = fragile.register(&b);
        a.post(Operation::Write(remote(&mr)), 0, LEN as u32);
        a.succeed(1);
        fragile.vanish();
        a.post(Operation::Write(remote(&mr)), 0, LEN as u32 / 2);
        a.succeed(1);
        a.post(Operation::Write(remote(&mr)), 0, LEN as u32);
        a.post(Operation::Write(b.remote(0)), 0, LEN as u32);
        let got = a.completions(2);
        assert_eq!((got[0].status, got[1].status), (Status::RemoteOperation, Status::Flushed));
        assert_eq!(b.event(), AsyncEvent::Qp { qpn: b.qps[0].qpn(), event: QpEvent::Fatal });
        assert_eq!((a.counter("memory_faults"), b.counter("memory_faults")), (0, 1));
        still_work(&mut a, &mut b);
    }
}

#[test]
fn at_the_target_of_a_send() {
    for (n, fragile) in [Fragile::anonymous(), Fragile::file()].into_iter().enumerate() {
        let (mut a, mut b) = pair(&format!("127.54.2.{}", n + 1), LEN, MTU);
        let mr = fragile.register(&b);
        for wr_id in 0..3 {
            b.qps[0].post_recv(&RecvRequest { wr_id, sges: &sge(&mr, LEN) }).unwrap();
        }
        fragile.vanish();
        a.post(Operation::Send, 0, LEN as u32 / 2);
        a.succeed(1);
        b.succeed(1);
        a.post(Operation::Send, 0, LEN as u32);
        assert_eq!(a.status(), Status::RemoteOperation);
        let got = b.completions(2);
        assert_eq!((got[0].status, got[1].status), (Status::LocalProtection, Status::Flushed));
        assert_eq!(b.event(), AsyncEvent::Qp { qpn: b.qps[0].qpn(), event: QpEvent::Fatal });
        still_work(&mut a, &mut b);
    }
}

#[test]
fn at_both_ends_of_a_read() {
    for (n, fragile) in [Fragile::anonymous(), Fragile::file()].into_iter().enumerate() {
        let (mut a, mut b) = pair(&format!("127.54.3.{}", n + 1), LEN, MTU);
        let (here, there) = (fragile.register(&a), fragile.register(&b));
        fragile.vanish();
        a.qps[0].post_send(&SendRequest::new(1, Operation::Read(b.remote(0)), &sge(&here, LEN))).unwrap();
        assert_eq!(a.status(), Status::LocalProtection, "where the bytes go to");
        drop(here);
        still_work(&mut a, &mut b);
        // Few enough bytes that no answer before the refusal gets lost: asked for again, it would
        // meet silence.
        let border = Remote { addr: there.addr() + LEN as u64 / 2 - 20_000, ..remote(&there) };
        a.post(Operation::Read(border), 0, 40_000);
        assert_eq!(a.status(), Status::RemoteOperation, "where they come from");
        assert_eq!(b.event(), AsyncEvent::Qp { qpn: b.qps[0].qpn(), event: QpEvent::Fatal });
        drop(there);
        still_work(&mut a, &mut b);
    }
}

/// An adapter would go on with the old pages. Here the key is dead, and whatever the program mapped
/// at the same address is not touched.
#[test]
fn memory_mapped_anew_is_neither_written_nor_read() {
    let (mut a, mut b) = pair("127.53.0.9", LEN, MTU);
    let memory = Fragile::anonymous();
    let (here, there) = (a.sge(0, 4096), memory.register(&b));
    // Registered after the region, and told after it.
    let witness = match unmap_watch::watch(memory.base.addr() as u64, LEN) {
        Ok(witness) => witness,
        Err(reason) => return println!("waived ({reason})"),
    };
    let at = remote(&there);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a mapping of ours, which is only touched through windows, and is replaced.
    let again = unsafe { libc::mmap(memory.base.cast(), LEN, rights, flags, -1, 0) };
    assert_eq!(again, memory.base.cast());
    // SAFETY: mapped just now.
    unsafe { memory.base.write_volatile(0x77) };
    until("the unmapping to be noticed", || witness.is_gone());
    for op in [
        Operation::Write(at),
        Operation::Read(at),
        Operation::FetchAdd { remote: at, add: 1 },
        Operation::AtomicWrite(at),
    ] {
        let len = if matches!(op, Operation::Write(_) | Operation::Read(_)) { 4096 } else { 8 };
        let sges = [Sge { len, ..here[0] }];
        a.qps[0].post_send(&SendRequest::new(3, op, &sges)).unwrap();
        assert_eq!(a.completions(1)[0].status, Status::RemoteOperation, "{op:?}");
        // SAFETY: mapped above.
        let bytes = unsafe { std::slice::from_raw_parts(memory.base, 4096) };
        assert!(bytes[0] == 0x77 && bytes[1..].iter().all(|byte| *byte == 0), "{op:?}");
        still_work(&mut a, &mut b);
    }
}

#[test]
fn under_an_atomic() {
    let (mut a, mut b) = pair("127.54.4.1", LEN, MTU);
    let fragile = Fragile::file();
    let mr = fragile.register(&b);
    fragile.vanish();
    let far = Remote { addr: mr.addr() + LEN as u64 - 8, ..remote(&mr) };
    a.post(Operation::FetchAdd { remote: far, add: 1 }, 0, 8);
    assert_eq!(a.status(), Status::RemoteOperation);
    drop(mr);
    still_work(&mut a, &mut b);
}

/// Forty requests are on their way when the memory goes.
#[test]
fn while_packets_are_under_way() {
    let (mut a, mut b) = (End::open(&config("127.54.5.1"), LEN), End::open(&config("127.54.5.1"), LEN));
    for round in 0..10 {
        a.qps.clear();
        b.qps.clear();
        a.add_qp(QpLimits::default());
        b.add_qp(QpLimits::default());
        connect(&a, 0, &b, 0, MTU);
        let fragile = if round % 2 == 0 { Fragile::anonymous() } else { Fragile::file() };
        let mr = fragile.register(&b);
        for _ in 0..40 {
            a.post(Operation::Write(remote(&mr)), 0, LEN as u32);
        }
        fragile.vanish();
        // On a machine that does other things, too, all of them may have arrived by now; this one
        // cannot.
        a.post(Operation::Write(remote(&mr)), 0, LEN as u32);
        let got = a.completions(41);
        let failed = got.iter().find(|c| c.status != Status::Success).map(|c| c.status);
        assert_eq!(failed, Some(Status::RemoteOperation), "round {round}");
        assert_ne!(got[40].status, Status::Success, "round {round}");
    }
    still_work(&mut a, &mut b);
}
