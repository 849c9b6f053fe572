//! Messages that are lost, duplicated, delayed, or come from an unknown peer.

use nobounce_protocol::cm::{Event, MessageKind};
use nobounce_protocol::timing::{MILLISECOND, SECOND};
use nobounce_protocol::wire::Qpn;

use crate::world::{A, B, SERVICE, World, bad, rejected};

/// Both users answer every event at once.
fn serve(world: &mut World, seconds: u64) -> (usize, usize) {
    let (mut up, mut replies) = (0, 0);
    for _ in 0..seconds * 10 {
        world.run(100 * MILLISECOND);
        for event in std::mem::take(&mut world.events[B]) {
            match event {
                Event::Request { id, .. } => world.accept(id),
                Event::Established { .. } => up += 1,
                _ => {}
            }
        }
        for event in std::mem::take(&mut world.events[A]) {
            if let Event::Reply { id, .. } = event {
                replies += 1;
                world.establish(id);
            }
        }
    }
    (replies, up)
}

#[test]
fn each_message_of_the_beginning_may_be_lost() {
    for (from, kind) in [(A, MessageKind::Req), (B, MessageKind::Rep), (A, MessageKind::Rtu)] {
        let mut world = World::new();
        world.agents[B].listen(SERVICE, 8).unwrap();
        world.lose(from, kind, 0);
        world.connect();
        assert_eq!(serve(&mut world, 2), (1, 1), "{kind:?} was lost");
    }
}

#[test]
fn each_message_may_come_twice() {
    let mut world = World::new();
    world.agents[B].listen(SERVICE, 8).unwrap();
    world.fate = Box::new(|_, _, _| vec![0, 3 * MILLISECOND]);
    let a = world.connect();
    assert_eq!(serve(&mut world, 1), (1, 1));
    world.agents[A].disconnect(world.now, a).unwrap();
    world.run(MILLISECOND * 100);
    assert_eq!(world.events[A], [Event::Disconnected { id: a, silent: false }]);
    assert!(matches!(world.events[B][..], [Event::Disconnected { silent: false, .. }]));
}

#[test]
fn no_answer_arrives() {
    let mut world = World::new();
    world.fate = Box::new(|_, _, _| vec![]);
    let a = world.connect();
    world.run(70 * SECOND);
    assert_eq!(world.events[A], [Event::Unreachable { id: a }]);
    assert_eq!(world.count(A, MessageKind::Req), 16, "once, and fifteen repetitions");
    world.agents[A].release(world.now, a);
    world.assert_forgotten();
}

#[test]
fn the_first_repetitions_come_soon() {
    let mut world = World::new();
    world.fate = Box::new(|_, _, _| vec![]);
    world.connect();
    world.run(SECOND);
    assert_eq!(world.count(A, MessageKind::Req), 3, "after 0.27 and 0.8 s");
}

#[test]
fn a_peer_that_takes_a_minute_to_answer_is_waited_for() {
    let mut world = World::new();
    world.agents[B].listen(SERVICE, 8).unwrap();
    let a = world.connect();
    world.run(150 * SECOND);
    let [Event::Request { id: b, .. }] = world.events[B][..] else { panic!("{:?}", world.events) };
    assert!(world.count(B, MessageKind::Mra) > 0 && world.count(A, MessageKind::Req) < 16);
    assert_eq!(world.events[A], []);
    world.accept(b);
    world.run(MILLISECOND);
    assert!(matches!(world.events[A][..], [Event::Reply { id, .. }] if id == a));
    // Now our side takes its time.
    world.run(100 * SECOND);
    assert!(world.count(A, MessageKind::Mra) > 0);
    world.establish(a);
    world.run(MILLISECOND);
    assert_eq!(world.events[B][1..], [Event::Established { id: b }]);
}

#[test]
fn an_accepting_side_that_hears_nothing_gives_up_and_says_so() {
    let mut world = World::new();
    world.agents[B].listen(SERVICE, 8).unwrap();
    let a = world.connect();
    world.run(MILLISECOND);
    world.fate = Box::new(|by, kind, _| if by == A || kind == MessageKind::Rep { vec![] } else { vec![0] });
    let b = world.events[B][0].id();
    world.accept(b);
    world.run(70 * SECOND);
    assert_eq!(world.events[B][1..], [Event::Unreachable { id: b }]);
    assert_eq!(world.count(B, MessageKind::Rej), 1);
    assert!(
        rejected(world.events[A].last().unwrap()).is_some()
            || world.events[A] == [Event::Unreachable { id: a }]
    );
}

#[test]
fn an_answer_to_a_released_request_is_refused() {
    let mut world = World::new();
    world.agents[B].listen(SERVICE, 8).unwrap();
    let a = world.connect();
    world.run(MILLISECOND);
    world.agents[A].release(world.now, a);
    let b = world.events[B][0].id();
    world.accept(b);
    world.run(MILLISECOND);
    assert!(rejected(&world.events[B][1]).is_some());
    world.agents[B].release(world.now, b);
    world.assert_forgotten();
}

#[test]
fn traffic_says_as_much_as_the_last_message() {
    let mut world = World::new();
    world.agents[B].listen(SERVICE, 8).unwrap();
    world.fate = Box::new(|_, kind, _| if kind == MessageKind::Rtu { vec![] } else { vec![0] });
    world.connect();
    world.run(MILLISECOND);
    let b = world.events[B][0].id();
    world.accept(b);
    world.run(MILLISECOND);
    world.agents[B].note_traffic(b).unwrap();
    world.run(MILLISECOND);
    assert_eq!(world.events[B][1..], [Event::Established { id: b }]);
}

#[test]
fn whatever_the_network_does_both_agree_and_nothing_stays() {
    for seed in 0..300 {
        let mut world = World::with_seed(seed);
        world.agents[B].listen(SERVICE, 64).unwrap();
        world.fate = bad(seed, 300_000);
        let all: Vec<_> = (0..8).map(|n| world.connect_with(Qpn::new(n), b"")).collect();
        let (replies, up) = serve(&mut world, 30);
        assert_eq!((replies, up), (8, 8), "seed {seed}");
        for (n, a) in all.into_iter().enumerate() {
            if n % 2 == 0 {
                world.agents[A].disconnect(world.now, a).unwrap();
            } else {
                world.agents[A].release(world.now, a);
            }
        }
        world.run(70 * SECOND);
        let ended = std::mem::take(&mut world.events[B]);
        let ended: Vec<_> =
            ended.iter().filter(|e| matches!(e, Event::Disconnected { .. })).map(Event::id).collect();
        assert_eq!(ended.len(), 8, "seed {seed}");
        ended.into_iter().for_each(|b| world.agents[B].release(world.now, b));
        let left: Vec<_> = world.events[A].iter().map(Event::id).collect();
        left.into_iter().for_each(|a| world.agents[A].release(world.now, a));
        world.run(70 * SECOND);
        world.assert_forgotten();
    }
}
