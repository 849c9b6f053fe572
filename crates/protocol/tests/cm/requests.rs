//! How connections begin, or do not.

use nobounce_protocol::cm::{CmError, Connect, Event, MessageKind, ip, private_len, reason, sidr_status};
use nobounce_protocol::timing::{MILLISECOND, SECOND};
use nobounce_protocol::wire::Qpn;

use crate::world::{A, B, CONSUMER, SERVICE, World, address, answer, rejected, request};

#[test]
fn a_connection_stands_after_three_messages_and_both_know_each_other() {
    let mut world = World::new();
    world.agents[B].listen(SERVICE, 8).unwrap();
    let a = world.connect();
    world.run(MILLISECOND);
    let [Event::Request { id: b, from, req }] = &world.events[B][..] else { panic!("{:?}", world.events) };
    let b = *b;
    assert_eq!((*from, req.qpn, req.mtu, req.service), (address(A), Qpn::new(0x12), 5, SERVICE));
    assert_eq!((req.responder_resources, req.initiator_depth, req.retry_count), (4, 5, 6));
    assert!(req.srq && req.flow_control);
    let (header, user) = ip::IpHeader::parse(&req.private).unwrap();
    assert_eq!((header.src, header.dst, header.port), (address(A), address(B), 40_000));
    assert_eq!((&user[..5], user.len()), (&b"hello"[..], private_len::REQ - ip::IP_HEADER_LEN));
    world.accept(b);
    world.run(MILLISECOND);
    let [Event::Reply { id, rep }] = &world.events[A][..] else { panic!("{:?}", world.events) };
    assert_eq!((*id, rep.qpn, rep.responder_resources, rep.initiator_depth), (a, Qpn::new(0x34), 2, 3));
    assert_eq!((&rep.private[..7], rep.private.len()), (&b"welcome"[..], private_len::REP));
    world.establish(a);
    world.run(SECOND);
    assert_eq!(world.events[B][1..], [Event::Established { id: b }]);
    assert_eq!(world.sent, [(A, MessageKind::Req), (B, MessageKind::Rep), (A, MessageKind::Rtu)]);
}

#[test]
fn numbers_begin_with_the_slot() {
    let mut world = World::new();
    let (a, b) = world.established();
    assert_eq!([a, b].map(|id| id.0 >> 24), [3, 4]);
}

#[test]
fn no_listener() {
    let mut world = World::new();
    let a = world.connect();
    world.run(1450 * MILLISECOND);
    assert_eq!(world.events[A], [], "a listener may still appear");
    world.run(100 * MILLISECOND);
    assert_eq!(world.count(A, MessageKind::Req), 5);
    assert_eq!(world.events[A].iter().map(rejected).collect::<Vec<_>>(), [Some(reason::INVALID_SERVICE_ID)]);
    world.agents[A].release(world.now, a);
    world.assert_forgotten();
}

#[test]
fn a_listener_that_comes_a_second_late_is_found() {
    let mut world = World::new();
    world.connect();
    world.run(SECOND);
    world.agents[B].listen(SERVICE, 8).unwrap();
    world.run(SECOND);
    assert!(matches!(world.events[B][..], [Event::Request { .. }]) && world.events[A].is_empty());
}

#[test]
fn a_refusal_brings_private_data() {
    let mut world = World::new();
    world.agents[B].listen(SERVICE, 8).unwrap();
    let a = world.connect();
    world.run(MILLISECOND);
    let b = world.events[B][0].id();
    world.agents[B].reject(b, CONSUMER, vec![0x5a; private_len::REJ]).unwrap();
    world.agents[B].release(world.now, b);
    world.run(MILLISECOND);
    let expected = Event::Rejected { id: a, reason: CONSUMER, private: vec![0x5a; private_len::REJ] };
    assert_eq!(world.events[A], [expected]);
    world.agents[A].release(world.now, a);
    world.assert_forgotten();
}

#[test]
fn a_refusal_that_was_lost_is_said_again() {
    let mut world = World::new();
    world.agents[B].listen(SERVICE, 8).unwrap();
    world.lose(B, MessageKind::Rej, 0);
    let a = world.connect();
    world.run(MILLISECOND);
    let b = world.events[B][0].id();
    world.agents[B].reject(b, CONSUMER, vec![0x5a; private_len::REJ]).unwrap();
    world.run(SECOND);
    assert_eq!(
        world.events[A],
        [Event::Rejected { id: a, reason: CONSUMER, private: vec![0x5a; private_len::REJ] }]
    );
    assert_eq!(world.events[B].len(), 1, "its user is asked once");
}

#[test]
fn a_user_who_lets_go_of_a_request_refuses_it() {
    let mut world = World::new();
    world.agents[B].listen(SERVICE, 8).unwrap();
    let a = world.connect();
    world.run(MILLISECOND);
    let b = world.events[B][0].id();
    world.agents[B].release(world.now, b);
    world.run(MILLISECOND);
    assert_eq!(rejected(&world.events[A][0]), Some(CONSUMER));
    world.agents[A].release(world.now, a);
    world.assert_forgotten();
}

#[test]
fn private_data_that_does_not_fit_is_refused_with_the_limits() {
    let mut world = World::new();
    let too_long = request(Qpn::new(1), &[0; private_len::REQ - ip::IP_HEADER_LEN + 1]);
    let error = world.agents[A].connect(1, too_long).unwrap_err();
    assert_eq!(error, CmError::PrivateData { given: 93, room: 92 });
    world.agents[B].listen(SERVICE, 8).unwrap();
    let a = world.connect_with(Qpn::new(1), &[1; private_len::REQ - ip::IP_HEADER_LEN]);
    world.run(MILLISECOND);
    let b = world.events[B][0].id();
    assert!(world.agents[B].accept(1, b, answer(&[0; private_len::REP + 1])).is_err());
    assert!(world.agents[B].reject(b, CONSUMER, vec![0; private_len::REJ + 1]).is_err());
    assert_eq!(world.agents[A].establish(a), Err(CmError::WrongState), "no REP has arrived");
    world.agents[B].accept(world.now, b, answer(&[2; private_len::REP])).unwrap();
    world.run(MILLISECOND);
    assert!(
        matches!(&world.events[A][..], [Event::Reply { rep, .. }] if rep.private == [2; private_len::REP])
    );
}

#[test]
fn more_requests_than_may_wait_are_asked_again_and_answered_later() {
    let mut world = World::new();
    world.agents[B].listen(SERVICE, 2).unwrap();
    for n in 0..5 {
        world.connect_with(Qpn::new(n), b"");
    }
    world.run(MILLISECOND);
    assert_eq!(world.events[B].len(), 2);
    assert_eq!(world.agents[B].counters().overrun, 3);
    for _ in 0..40 {
        for event in std::mem::take(&mut world.events[B]) {
            if let Event::Request { id, .. } = event {
                world.accept(id);
            }
        }
        world.run(SECOND);
    }
    assert_eq!(world.events[A].iter().filter(|event| matches!(event, Event::Reply { .. })).count(), 5);
}

#[test]
fn a_datagram_service_is_asked_for_and_answers() {
    let mut world = World::new();
    let service = ip::service_id(0x0111, 77);
    world.agents[B].listen(service, 8).unwrap();
    let a = world.agents[A].ask_service(world.now, address(B), service, b"who?".to_vec()).unwrap();
    world.run(MILLISECOND);
    let [Event::SidrRequest { id: b, req, .. }] = &world.events[B][..] else { panic!("{:?}", world.events) };
    let b = *b;
    assert_eq!(&req.private[..4], b"who?");
    world.agents[B]
        .answer_service(world.now, b, sidr_status::SUCCESS, Qpn::new(9), 0x55, b"me".to_vec())
        .unwrap();
    world.run(MILLISECOND);
    let [Event::SidrReply { id, rep }] = &world.events[A][..] else { panic!("{:?}", world.events) };
    assert_eq!((*id, rep.status, rep.qpn, rep.qkey, rep.service), (a, 0, Qpn::new(9), 0x55, service));
    world.agents[A].release(world.now, a);
    world.agents[B].release(world.now, b);
    world.run(10 * SECOND);
    world.assert_forgotten();
}

/// The answer stays lost for longer than the requester's retransmission interval.
#[test]
fn the_answer_of_a_datagram_service_is_said_again_as_long_as_it_is_kept() {
    let mut world = World::new();
    let service = ip::service_id(0x0111, 78);
    world.agents[B].listen(service, 8).unwrap();
    world.agents[A].ask_service(world.now, address(B), service, Vec::new()).unwrap();
    world.run(MILLISECOND);
    let [Event::SidrRequest { id: b, .. }] = world.events[B][..] else { panic!("{:?}", world.events) };
    world.fate = Box::new(|from, _, _| if from == A { vec![0] } else { vec![] });
    world.agents[B].answer_service(world.now, b, sidr_status::SUCCESS, Qpn::new(9), 1, Vec::new()).unwrap();
    world.run(100 * SECOND);
    // The first question was on its way when there was no answer yet.
    assert!(world.count(A, MessageKind::SidrReq) > 3);
    assert_eq!(
        world.count(B, MessageKind::SidrRep),
        world.count(A, MessageKind::SidrReq),
        "each question has its answer"
    );
}

#[test]
fn an_unreliable_connection_is_refused() {
    let mut world = World::new();
    world.agents[B].listen(SERVICE, 8).unwrap();
    let request = Connect { transport: 1, ..request(Qpn::new(7), b"") };
    world.agents[A].connect(world.now, request).unwrap();
    world.run(MILLISECOND);
    assert_eq!(rejected(&world.events[A][0]), Some(reason::INVALID_TRANSPORT_TYPE));
    assert!(world.events[B].is_empty());
}

#[test]
fn a_datagram_service_without_a_listener_says_so() {
    let mut world = World::new();
    world.agents[A].ask_service(world.now, address(B), 5, Vec::new()).unwrap();
    world.run(MILLISECOND);
    let [Event::SidrReply { rep, .. }] = &world.events[A][..] else { panic!("{:?}", world.events) };
    assert_eq!(rep.status, sidr_status::UNSUPPORTED);
}

#[test]
fn a_service_has_one_listener() {
    let mut world = World::new();
    world.agents[A].listen(SERVICE, 1).unwrap();
    assert_eq!(world.agents[A].listen(SERVICE, 1), Err(CmError::InUse));
    world.agents[A].unlisten(SERVICE);
    world.agents[A].listen(SERVICE, 1).unwrap();
}
