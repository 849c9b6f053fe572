//! Regions by another address, and regions that change.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{ALL_ACCESS, End, pair, patterns, reconnect};
use nobounce_memory::{HostBuffer, page_size};
use nobounce_nic::soft::{Mr, NewMemory, RegisterError, Rereg};
use nobounce_nic::work::{Access, Mtu, Operation, Remote, SendRequest, Sge, Status};

const MTU: Mtu = Mtu::Mtu1024;

fn rereg(mr: &mut Mr, change: &Rereg<'_>) -> Result<(), RegisterError> {
    // SAFETY: tests touch their buffers through windows only, and drop the region before the
    // buffer.
    unsafe { mr.rereg(change) }
}

fn host(buffer: &HostBuffer) -> NewMemory<'static> {
    NewMemory::Host { addr: buffer.as_mut_ptr(), len: buffer.len() }
}

/// How a WRITE of 8 bytes to `b` ends; the connection is made anew if it failed.
fn write(a: &End, b: &End, remote: Remote) -> Status {
    a.post(Operation::Write(remote), 0, 8);
    let status = a.status();
    if status != Status::Success {
        reconnect(a, b, MTU);
        while b.device.next_event().is_some() {}
    }
    status
}

#[test]
fn a_region_may_be_named_by_another_address() {
    let (a, b) = pair("127.62.0.1", 8192, MTU);
    a.fill(1);
    let iova = 0xdead_0000_0000;
    // SAFETY: as for the end's own region.
    let mr = unsafe { b.pd.register_at(b.buffer.as_mut_ptr(), 8192, iova, ALL_ACCESS) }.unwrap();
    assert_eq!((mr.addr(), mr.len()), (iova, 8192));
    let rkey = mr.rkey();
    a.post(Operation::Write(Remote { addr: iova + 100, rkey }), 0, 3000);
    a.succeed(1);
    assert!(b.bytes(100, 3000) == patterns(1, 0, 3000));
    // The same address names it here.
    let sges = [Sge { addr: iova + 100, len: 3000, lkey: mr.lkey() }];
    b.qps[0].post_send(&SendRequest::new(1, Operation::Write(a.remote(4096)), &sges)).unwrap();
    b.succeed(1);
    assert!(a.bytes(4096, 3000) == patterns(1, 0, 3000));
    assert_eq!(write(&a, &b, Remote { addr: b.mr.addr(), rkey }), Status::RemoteAccess);
    assert_eq!(write(&a, &b, Remote { addr: iova + 8185, rkey }), Status::RemoteAccess);
    // From 0 on is common.
    // SAFETY: as above.
    let zero = unsafe { b.pd.register_at(b.buffer.as_mut_ptr(), 8192, 0, ALL_ACCESS) }.unwrap();
    assert_eq!(write(&a, &b, Remote { addr: 0, rkey: zero.rkey() }), Status::Success);
    for (iova, len) in [(1, 8192), (u64::MAX - 4095, 8192)] {
        // SAFETY: refused.
        let error = unsafe { b.pd.register_at(b.buffer.as_mut_ptr(), len, iova, ALL_ACCESS) }.unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL, "{error}");
    }
}

#[test]
fn a_region_of_no_bytes_is_one() {
    let (a, b) = pair("127.62.0.2", 4096, MTU);
    // SAFETY: there is no memory in it.
    let none = unsafe { b.pd.register(std::ptr::null_mut(), 0, ALL_ACCESS) }.unwrap();
    assert!(none.is_empty() && none.rkey() != 0);
    assert_eq!(write(&a, &b, Remote { addr: 0, rkey: none.rkey() }), Status::RemoteAccess);
    let sges = [Sge { addr: 0, len: 0, lkey: none.lkey() }];
    b.qps[0].post_send(&SendRequest::new(1, Operation::Write(a.remote(0)), &sges)).unwrap();
    b.succeed(1);
    let too_long = b.device.limits().max_mr_size as usize + 1;
    // SAFETY: refused.
    let error = unsafe { b.pd.register(b.buffer.as_mut_ptr(), too_long, ALL_ACCESS) }.unwrap_err();
    assert_eq!(error.errno(), libc::EINVAL, "{error}");
}

#[test]
fn rights_change_and_the_keys_stay() {
    let (a, mut b) = pair("127.62.0.3", 4096, MTU);
    let (target, key) = (b.remote(0), b.mr.rkey());
    assert_eq!(write(&a, &b, target), Status::Success);
    rereg(&mut b.mr, &Rereg { access: Some(Access::REMOTE_READ), ..Rereg::default() }).unwrap();
    assert_eq!(write(&a, &b, target), Status::RemoteAccess);
    a.post(Operation::Read(target), 0, 8);
    a.succeed(1);
    let wrong = Rereg { access: Some(Access::REMOTE_WRITE), ..Rereg::default() };
    assert_eq!(rereg(&mut b.mr, &wrong).unwrap_err().errno(), libc::EINVAL);
    a.post(Operation::Read(target), 0, 8);
    a.succeed(1);
    rereg(&mut b.mr, &Rereg { access: Some(ALL_ACCESS), ..Rereg::default() }).unwrap();
    assert_eq!(write(&a, &b, target), Status::Success);
    assert_eq!(b.mr.rkey(), key);
}

#[test]
fn other_memory_comes_behind_the_same_key_or_the_old_stays() {
    let (a, mut b) = pair("127.62.0.4", 4096, MTU);
    a.fill(9);
    let old = b.remote(0);
    let other = HostBuffer::new(3 * page_size()).unwrap();
    rereg(&mut b.mr, &Rereg { memory: Some(host(&other)), ..Rereg::default() }).unwrap();
    assert_eq!((b.mr.addr(), b.mr.len()), (other.addr(), other.len() as u64));
    assert_eq!(write(&a, &b, old), Status::RemoteAccess);
    assert_eq!(write(&a, &b, b.remote(4096)), Status::Success);
    let mut got = [0; 8];
    other.read_at(4096, &mut got).unwrap();
    assert_eq!(got[..], patterns(9, 0, 8)[..]);
    // Nothing is mapped there: all stays.
    let gone = NewMemory::Host { addr: std::ptr::without_provenance_mut(page_size()), len: 64 };
    let change = Rereg { memory: Some(gone), access: Some(Access::LOCAL_WRITE), ..Rereg::default() };
    assert_eq!(rereg(&mut b.mr, &change).unwrap_err().errno(), libc::EFAULT);
    assert_eq!(b.mr.addr(), other.addr());
    assert_eq!(write(&a, &b, b.remote(0)), Status::Success);
    // More rights than the mapping has are refused without a new range, too.
    rereg(&mut b.mr, &Rereg { access: Some(Access::REMOTE_READ), ..Rereg::default() }).unwrap();
    // SAFETY: a buffer of ours that has no writers.
    assert_eq!(unsafe { libc::mprotect(other.as_mut_ptr().cast(), other.len(), libc::PROT_READ) }, 0);
    let more = Rereg { access: Some(ALL_ACCESS), ..Rereg::default() };
    assert_eq!(rereg(&mut b.mr, &more).unwrap_err().errno(), libc::EFAULT);
    let back = host(&b.buffer);
    rereg(&mut b.mr, &Rereg { memory: Some(back), ..more }).unwrap();
    assert_eq!(write(&a, &b, old), Status::Success);
}

#[test]
fn a_region_changes_its_domain() {
    let (a, mut b) = pair("127.62.0.5", 4096, MTU);
    let other = b.device.alloc_pd().unwrap();
    rereg(&mut b.mr, &Rereg { pd: Some(&other), ..Rereg::default() }).unwrap();
    assert!(other.is_busy());
    assert_eq!(write(&a, &b, b.remote(0)), Status::RemoteAccess);
    let buffer = HostBuffer::new(4096).unwrap();
    let pd = b.pd.clone();
    let all = Rereg { pd: Some(&pd), memory: Some(host(&buffer)), access: Some(ALL_ACCESS) };
    rereg(&mut b.mr, &all).unwrap();
    assert!(!other.is_busy());
    assert_eq!(write(&a, &b, b.remote(0)), Status::Success);
    assert!(matches!(
        rereg(&mut b.mr, &Rereg { pd: Some(&a.pd), ..Rereg::default() }),
        Err(RegisterError::OtherDevice)
    ));
    drop(b);
}

#[test]
fn a_region_changes_under_traffic() {
    let (a, b) = pair("127.62.0.6", 64 << 10, MTU);
    let End { mut mr, qps, cq, pd, device, buffer, .. } = b;
    let remote = Remote { addr: mr.addr(), rkey: mr.rkey() };
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..200 {
                a.post(Operation::Write(remote), 0, 64 << 10);
                a.succeed(1);
            }
            stop.store(true, Ordering::Relaxed);
        });
        let whole = host(&buffer);
        while !stop.load(Ordering::Relaxed) {
            rereg(&mut mr, &Rereg { memory: Some(whole), ..Rereg::default() }).unwrap();
        }
    });
    drop((mr, qps, cq, pd, device));
}
