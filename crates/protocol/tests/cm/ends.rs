//! How connections end.

use nobounce_protocol::cm::{CmError, Event, Kind};
use nobounce_protocol::timing::{MILLISECOND, SECOND};
use nobounce_protocol::wire::Qpn;

use crate::world::{A, B, World};

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
    for (from, kind) in [(A, Kind::Dreq), (B, Kind::Drep)] {
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
    assert_eq!(world.count(A, Kind::Dreq), 16);
}

#[test]
fn whoever_has_forgotten_it_agrees_that_it_ends() {
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
    world.agents[A].end_all();
    world.run(MILLISECOND);
    assert_eq!(world.events[B], [Event::Disconnected { id: b, silent: false }]);
}

#[test]
fn a_queue_pair_that_asks_again_has_lost_its_old_connection() {
    let mut world = World::new();
    let (_, b) = world.established();
    let again = world.connect_with(Qpn::new(0x12), b"");
    world.run(MILLISECOND);
    assert_eq!(world.events[B][0], Event::Disconnected { id: b, silent: true });
    let Event::Request { id, .. } = world.events[B][1] else { panic!("{:?}", world.events) };
    world.accept(id);
    world.run(MILLISECOND);
    assert!(matches!(world.events[A][..], [Event::Reply { id, .. }] if id == again));
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
    world.agents[B].listen(crate::world::SERVICE, 8).unwrap();
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
