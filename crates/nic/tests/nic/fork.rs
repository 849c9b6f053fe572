//! After a fork the device is dead in the child, which learns so at once; the parent notices
//! nothing.
#![allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)] // small constants

use std::io::{Read, Write};

use crate::common::{ALL_ACCESS, End, check_write, config, connect, outcome, pair};
use nobounce_nic::soft::{
    Channel, CqError, CreateError, CreateQpError, ModifyError, RegisterError, Srq, SrqLimitError, SrqLimits,
};
use nobounce_nic::work::{Mtu, Operation, PostError, QpAttr, QpLimits, QpState, RecvRequest, SendRequest};

const LEN: usize = 64 << 10;
const SRQ: SrqLimits = SrqLimits { depth: 4, sges: 1 };

/// What the child finds: the number of the first thing that is not as it should be, or 0.
fn in_the_child(a: End, b: End, (old, srq): (Channel, Srq)) -> i32 {
    let (sge, remote) = (a.sge(0, 8), b.remote(0));
    let mut out = Vec::new();
    let channel = a.device.create_channel();
    // SAFETY: refused before anything is done.
    let registered = unsafe { a.pd.register(a.buffer.as_mut_ptr(), LEN, ALL_ACCESS) };
    a.cq.request_notify(false);
    let checks = [
        a.cq.poll(&mut out, 10) == Err(CqError::Forked),
        a.qps[0].post_send(&SendRequest::new(1, Operation::Write(remote), &sge))
            == Err(PostError::State(QpState::Error)),
        a.qps[0].post_recv(&RecvRequest { wr_id: 1, sges: &sge }) == Err(PostError::State(QpState::Error)),
        a.qps[0].modify(&QpAttr::to_state(QpState::Reset)) == Err(ModifyError::Forked),
        matches!(registered, Err(RegisterError::Forked)),
        matches!(a.pd.create_qp(&a.cq, &a.cq, QpLimits::default()), Err(CreateQpError::Forked)),
        a.qps[0].state() == QpState::Error,
        a.device.next_event().is_none(),
        a.device.counters().sent_pkts == 0,
        channel.is_ok(),
        old.next().is_none() && old.claim().is_none() && a.device.claim_event().is_none(),
        a.device.alloc_pd().is_err_and(|error| error == CreateError::Forked),
        a.device.create_cq(1, None).is_err_and(|error| error == CreateError::Forked),
        a.pd.create_srq(SRQ).is_err_and(|error| error == CreateError::Forked),
        a.cq.resize(8) == Err(CreateError::Forked.into()),
        srq.post_recv(&RecvRequest { wr_id: 1, sges: &sge }) == Err(PostError::State(QpState::Error)),
        srq.set_limit(1) == Err(SrqLimitError::Forked) && !srq.is_busy(),
    ];
    if let Some(wrong) = checks.iter().position(|right| !right) {
        return wrong as i32 + 1;
    }
    drop((a, registered, old, srq));
    drop(b);
    0
}

#[test]
fn the_child_gets_errors_and_never_hangs() {
    for round in 0..30_u8 {
        let (a, b) = pair("127.58.0.1", LEN, Mtu::Mtu1024);
        let more = (a.device.create_channel().unwrap(), a.pd.create_srq(SRQ).unwrap());
        // Traffic in both directions, so that the fork finds locks held.
        for _ in 0..30 {
            a.post(Operation::Write(b.remote(0)), 0, LEN as u32);
            b.post(Operation::Write(a.remote(0)), 0, LEN as u32);
        }
        // SAFETY: the child calls nothing but the device and allocation, and leaves by _exit.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let code = in_the_child(a, b, more);
            // SAFETY: ends the child without running what belongs to the parent.
            unsafe { libc::_exit(code) };
        }
        a.succeed(30);
        b.succeed(30);
        assert_eq!(outcome(child), 0, "the number of the check that failed in the child, round {round}");
        check_write(&a, &b, round, LEN);
        check_write(&b, &a, round, LEN);
    }
}

#[test]
fn the_child_can_open_a_device_of_its_own() {
    let (a, b) = pair("127.58.0.2", LEN, Mtu::Mtu1024);
    check_write(&a, &b, 1, LEN);
    // SAFETY: as above.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let mut own = End::open(&config("127.58.0.3"), LEN);
        own.add_qp(QpLimits::default());
        own.add_qp(QpLimits::default());
        connect(&own, 0, &own, 1, Mtu::Mtu1024);
        check_write(&own, &own, 7, LEN);
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(0) };
    }
    check_write(&a, &b, 2, LEN);
    assert_eq!(outcome(child), 0);
    check_write(&a, &b, 3, LEN);
}

#[test]
fn a_child_that_lives_on_keeps_nothing_of_its_parents_place() {
    let mut first = End::open(&config("127.58.0.4"), LEN);
    first.add_qp(QpLimits::default());
    let place = |end: &End| end.qps[0].qpn().get() >> 16;
    let before = place(&first);
    let (mut ready, mut is_ready) = std::io::pipe().unwrap();
    // SAFETY: the child calls nothing but write, pause and _exit.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let _ = is_ready.write_all(&[1]);
        // SAFETY: as above; a signal ends it.
        unsafe {
            libc::pause();
            libc::_exit(1);
        }
    }
    ready.read_exact(&mut [0]).unwrap();
    drop(first);
    let mut next = End::open(&config("127.58.0.4"), LEN);
    next.add_qp(QpLimits::default());
    next.add_qp(QpLimits::default());
    connect(&next, 0, &next, 1, Mtu::Mtu1024);
    check_write(&next, &next, 9, LEN);
    // SAFETY: our own child, which was not waited for yet; its status is not asked for.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    assert_eq!(place(&next), before);
}
