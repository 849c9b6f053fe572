//! How connections end.

use nobounce_protocol::cm::{CmError, Event, Ids, MessageKind, emit_dreq, reason};
use nobounce_protocol::timing::{MILLISECOND, SECOND};
use nobounce_protocol::wire::Qpn;

use crate::world::{A, B, SERVICE, World, rejected};

#[test]
fn one_side_ends_it_and_both_remember_it_for_a_second() {
    let mut world = World::new();
    let (a, b) = world.established();
    world.agents[A].disconnect(world.now, a).unwrap();
    world.run(MILLISECOND);
    assert_eq!(world.events[A], [Event::Disconnected { id: a, silent: false }]);
    assert_eq!(world.events[B], [Event::Disconnected { id: b, silent: false }]);
    world.agents[B].disconnect(world.now, b).expect("to end what has ended is no mistake");
    world.run(900 * MILLISECOND);
    assert_eq!((world.events[A].len(), world.events[B].len()), (1, 1));
    world.run(SECOND);
    assert_eq!(world.events[A][1..], [Event::TimewaitExit { id: a }]);
    assert_eq!(world.events[B][1..], [Event::TimewaitExit { id: b }]);
    world.agents[A].release(world.now, a);
    world.agents[B].release(world.now, b);
    world.assert_forgotten();
}

/// The server accepts and goes, before the program of the client has looked.
#[test]
fn one_who_goes_right_after_it_has_accepted_is_missed() {
    let mut world = World::new();
    world.agents[B].listen(SERVICE, 8).unwrap();
    let a = world.connect();
    world.run(MILLISECOND);
    let [Event::Request { id: b, .. }] = world.events[B][..] else { panic!("{:?}", world.events) };
    world.accept(b);
    world.run(MILLISECOND);
    world.agents[B].release(world.now, b);
    world.run(MILLISECOND);
    assert!(world.events[A].contains(&Event::Disconnected { id: a, silent: false }), "{:?}", world.events[A]);
}

#[test]
fn both_end_it_at_once() {
    let mut world = World::new();
    let (a, b) = world.established();
    world.agents[A].disconnect(world.now, a).unwrap();
    world.agents[B].disconnect(world.now, b).unwrap();
    world.run(MILLISECOND);
    assert_eq!(world.events[A], [Event::Disconnected { id: a, silent: false }]);
    assert_eq!(world.events[B], [Event::Disconnected { id: b, silent: false }]);
}

#[test]
fn the_word_that_it_ends_may_be_lost_and_so_may_the_answer() {
    for (from, kind) in [(A, MessageKind::Dreq), (B, MessageKind::Drep)] {
        let mut world = World::new();
        let (a, _) = world.established();
        world.lose(from, kind, 0);
        world.agents[A].disconnect(world.now, a).unwrap();
        world.run(600 * MILLISECOND);
        assert_eq!(world.events[A], [Event::Disconnected { id: a, silent: false }], "{kind:?} was lost");
        assert_eq!(world.events[B].len(), 1);
    }
}

#[test]
fn the_other_side_is_dead() {
    let mut world = World::new();
    let (a, _) = world.established();
    world.fate = Box::new(|_, _, _| vec![]);
    world.agents[A].disconnect(world.now, a).unwrap();
    world.run(70 * SECOND);
    assert_eq!(world.events[A][0], Event::Disconnected { id: a, silent: true });
    assert_eq!(world.count(A, MessageKind::Dreq), 16);
}

#[test]
fn a_side_that_has_forgotten_it_agrees_that_it_ends() {
    let mut world = World::new();
    let (a, b) = world.established();
    world.agents[B].release(world.now, b);
    world.run(10 * SECOND);
    assert_eq!(world.events[A][0], Event::Disconnected { id: a, silent: false });
    // Its memory is gone by now; the other side may ask late, and again.
    let (a, b) = {
        world = World::new();
        world.established()
    };
    world.fate = Box::new(|by, _, _| if by == B { vec![] } else { vec![0] });
    world.agents[B].release(world.now, b);
    world.run(70 * SECOND);
    assert_eq!(world.agents[B].len(), 0);
    world.fate = Box::new(|_, _, _| vec![0]);
    world.agents[A].disconnect(world.now, a).unwrap();
    world.run(MILLISECOND);
    assert_eq!(world.events[A], [Event::Disconnected { id: a, silent: false }]);
}

#[test]
fn letting_go_of_a_connection_ends_it() {
    let mut world = World::new();
    let (a, b) = world.established();
    world.agents[A].release(world.now, a);
    world.run(MILLISECOND);
    assert_eq!(world.events[B], [Event::Disconnected { id: b, silent: false }]);
    assert_eq!(world.events[A], [], "nothing is told of what one let go");
    world.agents[B].release(world.now, b);
    world.run(3 * SECOND);
    world.assert_forgotten();
}

#[test]
fn a_process_that_goes_tells_everybody() {
    let mut world = World::new();
    let (_, b) = world.established();
    world.agents[A].end_all(world.now);
    world.run(MILLISECOND);
    assert_eq!(world.events[B], [Event::Disconnected { id: b, silent: false }]);
}

/// Stale connection: a dead process left its peers an established connection, and a new REQ comes
/// from the same queue pair.
#[test]
fn a_queue_pair_that_asks_again_is_refused_as_stale_and_taken_when_its_old_connection_has_ended() {
    let mut world = World::new();
    let (a, b) = world.established();
    let again = world.connect_with(Qpn::new(0x12), b"");
    world.run(MILLISECOND);
    assert_eq!((world.count(B, MessageKind::Rej), world.count(B, MessageKind::Dreq)), (1, 1));
    assert_eq!(world.events[A], [Event::Disconnected { id: a, silent: false }]);
    assert_eq!(world.events[B], [Event::Disconnected { id: b, silent: false }]);
    world.run(150 * MILLISECOND);
    let Event::Request { id, .. } = world.events[B][1] else { panic!("{:?}", world.events) };
    world.accept(id);
    world.run(MILLISECOND);
    assert!(matches!(world.events[A][1..], [Event::Reply { id, .. }] if id == again));
}

#[test]
fn an_answer_with_a_queue_pair_that_stands_in_a_connection_is_refused_as_stale() {
    let mut world = World::new();
    let (a, b) = world.established();
    let again = world.connect_with(Qpn::new(0x13), b"");
    world.run(MILLISECOND);
    let Some(Event::Request { id, .. }) = world.events[B].pop() else { panic!("no request") };
    // With the queue pair of the connection before.
    world.accept_with(id, Qpn::new(0x34));
    world.run(MILLISECOND);
    let stale = reason::STALE_CONNECTION;
    assert!(world.events[A].iter().any(|event| event.id() == again && rejected(event) == Some(stale)));
    assert!(world.events[B].iter().any(|event| event.id() == id && rejected(event) == Some(stale)));
    assert!(world.events[A].contains(&Event::Disconnected { id: a, silent: false }));
    assert!(world.events[B].contains(&Event::Disconnected { id: b, silent: false }));
}

/// The kernel asks for an answer to its DREQ for more than a minute, and its program waits.
#[test]
fn a_process_that_goes_says_its_last_words_again() {
    let mut world = World::new();
    let (a, b) = world.established();
    // The DREP is lost, and so is the first of its final copies.
    world.fate =
        Box::new(|by, kind, n| if (by, kind) == (B, MessageKind::Drep) && n < 2 { vec![] } else { vec![0] });
    world.agents[A].disconnect(world.now, a).unwrap();
    world.run(MILLISECOND);
    world.agents[B].release(world.now, b);
    world.agents[B].end_all(world.now);
    world.run(MILLISECOND);
    assert_eq!(world.events[A], [Event::Disconnected { id: a, silent: false }]);
    assert_eq!(world.count(B, MessageKind::Drep), 4);
}

#[test]
fn a_process_that_goes_says_again_what_was_not_answered() {
    let mut world = World::new();
    let (a, b) = world.established();
    world.fate =
        Box::new(|by, kind, n| if (by, kind) == (A, MessageKind::Dreq) && n < 3 { vec![] } else { vec![0] });
    world.agents[A].disconnect(world.now, a).unwrap();
    world.run(MILLISECOND);
    world.agents[A].end_all(world.now);
    world.run(MILLISECOND);
    assert_eq!(world.events[B], [Event::Disconnected { id: b, silent: false }]);
}

#[test]
fn dreps_are_kept_for_a_time_and_only_for_known_connections() {
    let mut world = World::new();
    let (a, _) = world.established();
    world.agents[A].disconnect(world.now, a).unwrap();
    world.run(11 * SECOND);
    assert_eq!(world.count(B, MessageKind::Drep), 1);
    let stranger = emit_dreq(Ids { local: 77, remote: 78 }, Qpn::new(5), 9);
    world.deliver(B, &stranger);
    world.agents[B].end_all(world.now);
    world.run(MILLISECOND);
    assert_eq!(world.count(B, MessageKind::Drep), 2, "the stranger's answer, and nothing more");
}

#[test]
fn what_does_not_stand_cannot_be_ended_and_what_is_unknown_cannot_be_anything() {
    let mut world = World::new();
    let a = world.connect();
    assert_eq!(world.agents[A].disconnect(world.now, a), Err(CmError::WrongState));
    world.agents[A].release(world.now, a);
    assert_eq!(world.agents[A].disconnect(world.now, a), Err(CmError::Unknown));
    assert_eq!(world.agents[A].establish(a), Err(CmError::Unknown));
}

#[test]
fn ten_thousand_connections_one_after_the_other_leave_nothing() {
    let mut world = World::new();
    world.agents[B].listen(SERVICE, 8).unwrap();
    for n in 0..10_000 {
        let a = world.connect_with(Qpn::new(n), b"");
        world.run(MILLISECOND);
        let b = world.events[B][0].id();
        world.accept(b);
        world.run(MILLISECOND);
        world.establish(a);
        world.run(MILLISECOND);
        world.agents[A].disconnect(world.now, a).unwrap();
        world.run(MILLISECOND);
        world.agents[A].release(world.now, a);
        world.agents[B].release(world.now, b);
        world.events.iter_mut().for_each(Vec::clear);
        world.sent.clear();
        assert!(world.agents[A].len() < 400, "a second's worth is remembered");
    }
    world.run(3 * SECOND);
    world.assert_forgotten();
}
