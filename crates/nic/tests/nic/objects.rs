//! Regions, domains and queue pairs: what can be made, what is refused, and in which words.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::collections::HashSet;

use crate::common::{ALL_ACCESS, End, LIMIT, MIB, check_write, config, connect, pair, patterns, register};
use nobounce_memory::{HostBuffer, page_size};
use nobounce_nic::soft::{CreateQpError, Device, ModifyError, Qp};
use nobounce_nic::work::{
    Access, AttrMask, Mtu, Operation, Psn, QpAttr, QpLimits, QpState, Qpn, Remote, SendRequest, Sge, Status,
    TransitionError,
};

#[test]
fn keys_are_random_never_zero_and_not_reused_soon() {
    let end = End::open(&config("127.50.0.1"), 4096);
    let keys: Vec<u32> = (0..4096).map(|_| register(&end.pd, &end.buffer, ALL_ACCESS).rkey()).collect();
    assert!(!keys.contains(&0));
    let different: HashSet<u32> = keys.iter().copied().collect();
    assert_eq!(different.len(), keys.len(), "a key was given out again soon after it was given back");
    for bit in 0..32 {
        let ones = keys.iter().filter(|key| *key >> bit & 1 == 1).count();
        assert!((1600..2500).contains(&ones), "bit {bit} is 1 in {ones} of 4096 keys");
    }
    let following = keys.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) < 1 << 16).count();
    assert!(following < 10, "{following} keys are close to the one before");
}

#[test]
fn memory_that_is_not_there_is_refused_with_its_page() {
    let end = End::open(&config("127.50.0.2"), 4096);
    let page = page_size();
    let buffer = HostBuffer::guarded(4 * page).unwrap();
    // SAFETY: nothing is done with the regions; all of these are refused.
    let register = |at: *mut u8, len, access| unsafe { end.pd.register(at, len, access) };
    // SAFETY: the third page of a buffer of ours that has no users.
    assert_eq!(unsafe { libc::munmap(buffer.as_mut_ptr().wrapping_add(2 * page).cast(), page) }, 0);
    let hole = format!("{:#x}", buffer.addr() + 2 * page as u64);
    let error = register(buffer.as_mut_ptr(), 4 * page, ALL_ACCESS).unwrap_err();
    assert_eq!(error.errno(), libc::EFAULT);
    assert!(error.to_string().contains(&hole), "{error} does not name {hole}");
    register(buffer.as_mut_ptr(), 2 * page, ALL_ACCESS).unwrap();
    let error = register(buffer.as_mut_ptr(), 2 * page + 1, Access::empty()).unwrap_err();
    assert_eq!(error.errno(), libc::EFAULT);
    let error = register(buffer.as_mut_ptr(), usize::MAX, Access::empty()).unwrap_err();
    assert_eq!(error.errno(), libc::EINVAL, "{error}");
}

#[test]
fn read_only_memory_takes_no_write_access() {
    let end = End::open(&config("127.50.0.3"), 4096);
    let buffer = HostBuffer::new(2 * page_size()).unwrap();
    // SAFETY: a buffer of ours that has no writers.
    let done = unsafe { libc::mprotect(buffer.as_mut_ptr().cast(), 2 * page_size(), libc::PROT_READ) };
    assert_eq!(done, 0);
    // SAFETY: the buffer outlives the regions, and is not written.
    let register = |access| unsafe { end.pd.register(buffer.as_mut_ptr(), buffer.len(), access) };
    let error = register(Access::LOCAL_WRITE).unwrap_err();
    assert_eq!(error.errno(), libc::EFAULT);
    assert!(error.to_string().contains("may not be written"), "{error}");
    assert_eq!(register(Access::REMOTE_READ).unwrap().len(), 2 * page_size() as u64);
}

#[test]
fn remote_write_and_atomics_need_local_write() {
    let end = End::open(&config("127.50.0.4"), 4096);
    for access in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC, Access::REMOTE_ATOMIC | Access::REMOTE_READ] {
        // SAFETY: refused before anything is done.
        let refused = unsafe { end.pd.register(end.buffer.as_mut_ptr(), 64, access) }.unwrap_err();
        assert_eq!(refused.errno(), libc::EINVAL);
        assert!(refused.to_string().contains("local write"), "{refused}");
        // SAFETY: as for the end's own region.
        unsafe { end.pd.register(end.buffer.as_mut_ptr(), 64, access | Access::LOCAL_WRITE) }.unwrap();
    }
}

#[test]
fn protection_domains_do_not_mix() {
    let (a, b) = pair("127.50.0.5", 4096, Mtu::Mtu1024);
    let (other_a, other_b) = (a.device.alloc_pd().unwrap(), b.device.alloc_pd().unwrap());
    let foreign_b = register(&other_b, &b.buffer, ALL_ACCESS);
    a.post(Operation::Write(Remote { addr: foreign_b.addr(), rkey: foreign_b.rkey() }), 0, 8);
    assert_eq!(a.status(), Status::RemoteAccess, "a region of another domain at the peer");
    crate::common::reconnect(&a, &b, Mtu::Mtu1024);
    let foreign_a = register(&other_a, &a.buffer, ALL_ACCESS);
    let sges = [Sge { addr: foreign_a.addr(), len: 8, lkey: foreign_a.lkey() }];
    a.qps[0].post_send(&SendRequest::new(1, Operation::Write(b.remote(0)), &sges)).unwrap();
    assert_eq!(a.status(), Status::LocalProtection, "a region of another domain here");
    crate::common::reconnect(&a, &b, Mtu::Mtu1024);
    check_write(&a, &b, 1, 4096);
}

#[test]
fn limits_beyond_the_device_are_refused_by_name() {
    let end = End::open(&config("127.50.0.6"), 4096);
    let max = QpLimits::MAX;
    for (limits, name) in [
        (QpLimits { send_depth: max.send_depth + 1, ..max }, "send queue depth"),
        (QpLimits { recv_depth: max.recv_depth + 1, ..max }, "receive queue depth"),
        (QpLimits { send_sges: max.send_sges + 1, ..max }, "send scatter/gather elements"),
        (QpLimits { recv_sges: max.recv_sges + 1, ..max }, "receive scatter/gather elements"),
        (QpLimits { inline: max.inline + 1, ..max }, "inline bytes"),
    ] {
        let error = end.pd.create_qp(&end.cq, &end.cq, limits).unwrap_err();
        assert!(matches!(error, CreateQpError::Limit { asked, max, .. } if asked == max + 1), "{error:?}");
        assert!(error.to_string().starts_with(name), "{error}");
    }
    end.pd.create_qp(&end.cq, &end.cq, max).unwrap();
}

#[test]
fn refused_transitions_name_their_attributes_and_change_nothing() {
    let end = End::open(&config("127.50.0.7"), 4096);
    let qp = end.pd.create_qp(&end.cq, &end.cq, QpLimits::default()).unwrap();
    let refused = |attr: &QpAttr| qp.modify(attr).unwrap_err().to_string();
    assert!(refused(&QpAttr::to_state(QpState::Rts)).contains("Reset to Rts"));
    let words = refused(&QpAttr::to_state(QpState::Init));
    assert!(
        words.contains("PKEY_INDEX") && words.contains("PORT") && words.contains("ACCESS_FLAGS"),
        "{words}"
    );
    qp.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
    let rtr = QpAttr::to_rtr(end.device.local(), Qpn::new(77), Psn::new(5), Mtu::Mtu1024);
    let attr = QpAttr { mask: (rtr.mask - AttrMask::DEST_QPN) | AttrMask::TIMEOUT, ..rtr.clone() };
    let error = qp.modify(&attr).unwrap_err();
    let ModifyError::Transition(TransitionError::Attributes { missing, not_allowed, .. }) = error else {
        panic!("{error:?}")
    };
    assert_eq!((missing, not_allowed), (AttrMask::DEST_QPN, AttrMask::TIMEOUT));
    let words = refused(&QpAttr { min_rnr_timer: 32, ..rtr.clone() });
    assert!(words.contains("MIN_RNR_TIMER is 32"), "{words}");
    assert_eq!(qp.state(), QpState::Init);
    qp.modify(&rtr).unwrap();
    let words = refused(&QpAttr { retry_cnt: 8, ..QpAttr::to_rts(Psn::new(0)) });
    assert!(words.contains("RETRY_CNT is 8"), "{words}");
    assert_eq!(qp.state(), QpState::Rtr);
    let attr = qp.attr();
    assert_eq!((attr.dest_qpn, attr.rq_psn, attr.path_mtu), (Qpn::new(77), Psn::new(5), Mtu::Mtu1024));
}

#[test]
fn a_queue_pair_taken_back_starts_anew() {
    let (a, b) = pair("127.50.0.8", MIB, Mtu::Mtu1024);
    for round in 0..5 {
        // Requests are in flight at the reset.
        for _ in 0..10 {
            a.post(Operation::Write(b.remote(0)), 0, 100_000);
        }
        b.post_recv(3, 0, 100);
        crate::common::reconnect(&a, &b, Mtu::Mtu1024);
        check_write(&a, &b, round, MIB);
    }
    b.quiet();
}

#[test]
fn a_queue_pair_with_work_outstanding_can_be_destroyed() {
    let (mut a, mut b) = pair("127.50.0.9", MIB, Mtu::Mtu1024);
    for _ in 0..20 {
        a.post(Operation::Write(b.remote(0)), 0, MIB as u32);
        a.post(Operation::Read(b.remote(0)), 0, MIB as u32);
    }
    b.post_recv(3, 0, 100);
    a.qps.clear();
    a.quiet();
    b.qps.clear();
    b.quiet();
    a.add_qp(QpLimits::default());
    b.add_qp(QpLimits::default());
    connect(&a, 0, &b, 0, Mtu::Mtu1024);
    check_write(&a, &b, 9, MIB);
}

#[test]
fn a_peer_that_vanished_gives_an_error_in_bounded_time() {
    let (a, b) = pair("127.50.0.10", MIB, Mtu::Mtu1024);
    a.qps[0].modify(&QpAttr::to_state(QpState::Reset)).unwrap();
    a.qps[0].modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
    let rtr = QpAttr::to_rtr(b.device.local(), b.qps[0].qpn(), Psn::new(1), Mtu::Mtu1024);
    a.qps[0].modify(&rtr).unwrap();
    // 4.096 us * 2^12 = 17 ms for each of three tries.
    a.qps[0].modify(&QpAttr { timeout: 12, retry_cnt: 2, ..QpAttr::to_rts(Psn::new(0)) }).unwrap();
    let remote = b.remote(0);
    drop(b);
    let start = std::time::Instant::now();
    a.post(Operation::Write(remote), 0, 5000);
    a.post(Operation::Read(remote), 0, 5000);
    let got = a.completions(2);
    assert_eq!((got[0].status, got[1].status), (Status::RetryExceeded, Status::Flushed));
    assert_eq!(a.qps[0].state(), QpState::Error);
    assert!(start.elapsed() < LIMIT / 4, "{:?}", start.elapsed());
}

/// Every object keeps the device alive: they may be dropped in any order, and the last one closes
/// it.
#[test]
fn objects_can_be_dropped_in_any_order() {
    for order in 0..6_u8 {
        let (a, b) = pair("127.50.0.11", 64 << 10, Mtu::Mtu4096);
        check_write(&a, &b, order, 64 << 10);
        let End { qps, cq, mr, buffer, ballast, pd, device } = a;
        let mut parts: Vec<Option<Box<dyn std::any::Any>>> = vec![
            Some(Box::new(device)),
            Some(Box::new(pd)),
            Some(Box::new(cq)),
            Some(Box::new(mr)),
            Some(Box::new((qps, ballast))),
        ];
        let step = [1, 2, 3, 4, 6, 7][usize::from(order)];
        for i in 0..parts.len() {
            parts[(i * step + usize::from(order)) % 5] = None;
        }
        drop((parts, buffer, b));
        // Closed now, not when the engine thread gets round to it.
        let unix = std::fs::read_to_string("/proc/net/unix").unwrap();
        assert!(!unix.contains("nobounce/slot/127.50.0.11/"), "order {order}");
    }
}

#[test]
fn two_queue_pairs_of_one_device_and_one_pair_with_itself() {
    let mut end = End::open(&config("127.50.0.12"), MIB);
    end.add_qp(QpLimits::default());
    end.add_qp(QpLimits::default());
    connect(&end, 0, &end, 1, Mtu::Mtu4096);
    let own = end.pd.create_qp(&end.cq, &end.cq, QpLimits::default()).unwrap();
    own.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
    own.modify(&QpAttr::to_rtr(end.device.local(), own.qpn(), Psn::new(9), Mtu::Mtu4096)).unwrap();
    own.modify(&QpAttr::to_rts(Psn::new(9))).unwrap();
    let half = MIB / 2;
    for (round, qp) in [&end.qps[0], &end.qps[1], &own].into_iter().enumerate() {
        let seed = round as u8;
        end.fill(seed);
        let sges = end.sge(0, half as u32);
        qp.post_send(&SendRequest::new(1, Operation::Write(end.remote(half as u64)), &sges)).unwrap();
        end.succeed(1);
        assert!(end.bytes(half, half) == patterns(seed, 0, half), "round {round}");
    }
}

#[test]
fn queue_pair_numbers_carry_the_slot_and_are_not_reused_at_once() {
    let (a, b) = (End::open(&config("127.50.0.13"), 4096), End::open(&config("127.50.0.13"), 4096));
    let make = |end: &End| -> Qp { end.pd.create_qp(&end.cq, &end.cq, QpLimits::default()).unwrap() };
    let (first, second) = (make(&a).qpn(), make(&a).qpn());
    assert_ne!(first, second, "a number is not given out again as soon as it is free");
    assert_ne!(
        make(&b).qpn().get() >> 16,
        first.get() >> 16,
        "devices on one address have slots of their own"
    );
    assert!(first.get() & 0xffff > 1, "0 and 1 are the management queue pairs");
}

#[test]
fn an_address_that_is_not_ours_is_refused_in_words() {
    let error = Device::open(&config("203.0.113.1")).unwrap_err().to_string();
    assert!(error.contains("203.0.113.1") && error.contains("not an address of this machine"), "{error}");
}
