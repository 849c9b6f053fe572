//! What a device says it offers is what it gives, and not one more.

use std::fmt::Debug;

use crate::common::{ALL_ACCESS, End, config, pair};
use nobounce_nic::soft::{CreateError, CreateQpError, RegisterError, SrqLimits};
use nobounce_nic::work::{
    Access, AttrMask, Mtu, Operation, PostError, Psn, QpAttr, QpLimits, QpState, RecvRequest, SendRequest,
};

/// Makes `max` objects, one too many, and another when one has gone.
#[track_caller]
fn exactly<T, E: Debug>(max: usize, make: impl Fn() -> Result<T, E>, too_many: impl Fn(&E) -> bool) {
    let mut all: Vec<T> = (0..max).map(|_| make().unwrap()).collect();
    for _ in 0..2 {
        let error = make().err().expect("one more than it offers");
        assert!(too_many(&error), "{error:?}");
        all.pop();
        all.push(make().expect("one has gone"));
    }
}

#[test]
fn as_many_domains_and_queues_as_it_says() {
    let end = End::open(&config("127.64.0.1"), 4096);
    let most = end.device.limits();
    let too_many = |error: &CreateError| {
        let words = error.to_string();
        matches!(error, CreateError::TooMany { .. })
            && words.contains("65536")
            && error.errno() == libc::ENOMEM
    };
    exactly(most.max_pds - 1, || end.device.alloc_pd(), too_many);
    exactly(most.max_cqs - 1, || end.device.create_cq(1, None), too_many);
    exactly(most.max_srqs, || end.pd.create_srq(SrqLimits { depth: 1, sges: 1 }), too_many);
}

#[test]
fn as_many_queue_pairs_as_it_says() {
    let end = End::open(&config("127.64.0.2"), 4096);
    let limits = QpLimits { send_depth: 1, recv_depth: 1, ..QpLimits::default() };
    let make = || end.pd.create_qp(&end.cq, &end.cq, limits);
    exactly(end.device.limits().max_qps, make, |error| matches!(error, CreateQpError::TooMany));
}

#[test]
fn as_many_regions_as_it_says() {
    let end = End::open(&config("127.64.0.3"), 4096);
    // SAFETY: there is no memory in them.
    let make = || unsafe { end.pd.register(std::ptr::null_mut(), 0, Access::empty()) };
    let too_many = |error: &RegisterError| error.errno() == libc::ENOMEM;
    exactly(end.device.limits().max_mrs - 1, make, too_many);
}

#[test]
fn queues_of_the_largest_size_take_all_they_should() {
    let end = End::open(&config("127.64.0.4"), 4096);
    let most = end.device.limits();
    let limits = QpLimits {
        send_depth: most.max_qp_depth,
        recv_depth: most.max_qp_depth,
        send_sges: most.max_sges,
        recv_sges: most.max_sges,
        inline: most.max_inline,
        signal_all: true,
    };
    let cq = end.device.create_cq(4 * most.max_qp_depth, None).unwrap();
    let qp = end.pd.create_qp(&cq, &cq, limits).unwrap();
    qp.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
    let sges = vec![end.sge(0, 1)[0]; most.max_sges];
    let receive = RecvRequest { wr_id: 1, sges: &sges };
    (0..most.max_qp_depth).for_each(|_| qp.post_recv(&receive).unwrap());
    assert_eq!(qp.post_recv(&receive), Err(PostError::QueueFull(most.max_qp_depth)));
    // To a peer that never answers: none of it completes.
    qp.modify(&QpAttr::to_rtr(end.device.local(), qp.qpn(), Psn::new(1), Mtu::Mtu1024)).unwrap();
    qp.modify(&QpAttr::to_rts(Psn::new(77))).unwrap();
    let inline = vec![1; most.max_inline];
    let send = SendRequest::inline(1, Operation::Send, &inline);
    (0..most.max_qp_depth).for_each(|_| qp.post_send(&send).unwrap());
    assert_eq!(qp.post_send(&send), Err(PostError::QueueFull(most.max_qp_depth)));
    qp.modify(&QpAttr::to_state(QpState::Error)).unwrap();
    let mut got = Vec::new();
    assert_eq!(cq.poll(&mut got, usize::MAX), Ok(2 * most.max_qp_depth), "all of it is flushed");
}

#[test]
fn what_was_set_can_be_asked_for() {
    let (a, b) = pair("127.64.0.5", 4096, Mtu::Mtu2048);
    let most = a.device.limits().max_rd_atomic;
    let qp = a.pd.create_qp(&a.cq, &a.cq, QpLimits::default()).unwrap();
    qp.modify(&QpAttr::to_init(Access::REMOTE_READ)).unwrap();
    let rtr = QpAttr {
        max_dest_rd_atomic: most,
        min_rnr_timer: 9,
        ..QpAttr::to_rtr(b.device.local(), b.qps[0].qpn(), Psn::new(0xabc), Mtu::Mtu2048)
    };
    assert!(qp.modify(&QpAttr { max_dest_rd_atomic: most + 1, ..rtr.clone() }).is_err());
    qp.modify(&rtr).unwrap();
    let rts = QpAttr {
        max_rd_atomic: 3,
        timeout: 18,
        retry_cnt: 5,
        rnr_retry: 6,
        ..QpAttr::to_rts(Psn::new(0x123))
    };
    qp.modify(&rts).unwrap();
    let attr = qp.attr();
    assert_eq!((attr.state, attr.access, attr.path_mtu), (QpState::Rts, Access::REMOTE_READ, Mtu::Mtu2048));
    assert_eq!((attr.remote, attr.dest_qpn), (b.device.local(), b.qps[0].qpn()));
    assert_eq!((attr.rq_psn, attr.sq_psn), (Psn::new(0xabc), Psn::new(0x123)));
    assert_eq!((attr.max_rd_atomic, attr.max_dest_rd_atomic, attr.min_rnr_timer), (3, most, 9));
    assert_eq!((attr.timeout, attr.retry_cnt, attr.rnr_retry), (18, 5, 6));
    // A later change of one thing leaves the rest.
    let mut change = QpAttr { min_rnr_timer: 4, ..QpAttr::default() };
    change.mask = AttrMask::STATE | AttrMask::MIN_RNR_TIMER;
    change.state = QpState::Rts;
    qp.modify(&change).unwrap();
    assert_eq!(qp.attr(), QpAttr { min_rnr_timer: 4, ..attr });
    assert_eq!(qp.limits().recv_depth, QpLimits::default().recv_depth);
}
