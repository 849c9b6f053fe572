//! Tags: once each, after their bytes, with the outcome.

use std::time::Duration;

use nobounce_transfer::{AgentOptions, Event, Notify, Outcome, Pages, Piece, TransferError};

use super::{Pair, SOON, addr, bytes_of, device, fill, shuffled};

#[test]
fn each_tag_comes_once_and_after_its_bytes() {
    const ROUNDS: u64 = 60;
    let pair = Pair::new(256 * 4096, &AgentOptions { lanes: 2, ..AgentOptions::default() });
    for round in 0..ROUNDS {
        let sent = fill(&pair.local, round);
        let order = shuffled(256, round);
        let pages = Pages::whole(&order, &order, 4096);
        let tag = round.to_le_bytes();
        let transfer = pair.peer.write_pages(&pair.local, &pair.remote, &pages, Notify::Tag(&tag)).unwrap();
        let arrived = pair.target.notification(SOON).unwrap();
        assert_eq!((arrived.tag.as_slice(), arrived.peer.as_str()), (&tag[..], "initiator"));
        assert_eq!(arrived.outcome, Outcome::Complete { bytes: 256 * 4096 });
        assert_eq!(arrived.generation, pair.initiator.generation());
        assert!(bytes_of(&pair.exported) == sent, "the bytes of round {round} came after its tag");
        transfer.wait(SOON).unwrap();
    }
    assert_eq!(pair.target.notification(Duration::from_millis(20)), None);
}

#[test]
fn an_announcement_covers_many_transfers_or_is_aborted() {
    let pair = Pair::new(4096, &AgentOptions::default());
    let piece = |at| [Piece { local: at, remote: at, len: 64 }];
    let announcement = pair.peer.announce(b"layers").unwrap();
    for layer in 0..10 {
        let notify = Notify::With(&announcement);
        pair.peer
            .write_list(&pair.local, &pair.remote, &piece(layer * 64), notify)
            .unwrap()
            .wait(SOON)
            .unwrap();
    }
    assert_eq!(pair.target.notification(Duration::from_millis(20)), None, "it is not complete");
    announcement.complete();
    assert_eq!(pair.target.notification(SOON).unwrap().outcome, Outcome::Complete { bytes: 640 });
    pair.peer.announce(b"never").unwrap().abort("no room");
    drop(pair.peer.announce(b"forgotten").unwrap());
    for (tag, words) in [(&b"never"[..], "no room"), (b"forgotten", "given up")] {
        let arrived = pair.target.notification(SOON).unwrap();
        assert_eq!(arrived.tag, tag);
        assert!(
            matches!(&arrived.outcome, Outcome::Aborted { reason } if reason.contains(words)),
            "{arrived:?}"
        );
    }
}

#[test]
fn an_event_loop_hears_of_everything() {
    let pair = Pair::new(4096, &AgentOptions::default());
    let fd = pair.initiator.event_fd();
    let readable = |timeout| {
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure.
        unsafe { libc::poll(&raw mut poll, 1, timeout) == 1 }
    };
    assert!(!readable(0));
    let list = [Piece { local: 0, remote: 0, len: 64 }];
    let transfer = pair.peer.write_list(&pair.local, &pair.remote, &list, Notify::Nothing).unwrap();
    if transfer.watch() {
        // The export of the pair may be an event as well.
        let mut events = Vec::new();
        while !events.contains(&Event::Transfer(transfer.id())) {
            assert!(readable(10_000), "{events:?}");
            events.extend(pair.initiator.take_events());
        }
    }
    transfer.wait(SOON).unwrap();
    assert!(transfer.result().unwrap().is_ok() && !readable(0));
    let other =
        nobounce_transfer::Agent::listening(&device(), "x", "127.0.0.1:0", AgentOptions::default()).unwrap();
    let peer = pair.initiator.connect(addr(&other), SOON).unwrap();
    drop(other);
    assert!(readable(10_000));
    assert_eq!(pair.initiator.take_events(), [Event::Peer]);
    while peer.gone().is_none() {
        std::thread::yield_now();
    }
}

#[test]
fn a_burst_of_tags_waits_for_room_and_loses_none() {
    // More than the peer takes before the application has taken any.
    const COUNT: u64 = 40_000;
    let pair = Pair::new(4096, &AgentOptions::default());
    let list = [Piece { local: 0, remote: 0, len: 8 }];
    let submit = |number: u64| {
        let tag = number.to_le_bytes();
        pair.peer.write_list(&pair.local, &pair.remote, &list, Notify::Tag(&tag)).unwrap()
    };
    let transfers: Vec<_> = (0..COUNT).map(submit).collect();
    let last = transfers.last().unwrap();
    assert_eq!(pair.peer.gone(), None);
    // One that waits can be cancelled at once.
    last.cancel();
    assert_eq!(last.wait(SOON), Err(TransferError::Cancelled));
    let mut tags = std::collections::BTreeSet::new();
    for _ in 0..COUNT {
        let note = pair.target.notification(SOON).unwrap();
        let tag = u64::from_le_bytes(note.tag.try_into().unwrap());
        assert!(tag < COUNT && tags.insert(tag), "{tag} came twice");
        assert_eq!(matches!(note.outcome, Outcome::Complete { bytes: 8 }), tag + 1 < COUNT, "{tag}");
    }
    assert!(transfers[..transfers.len() - 1].iter().all(|transfer| transfer.wait(SOON).is_ok()));
    assert_eq!(pair.target.notification(Duration::from_millis(20)), None);
}

#[test]
fn the_peer_hears_of_the_end_before_the_application_does() {
    let pair = Pair::new(4096, &AgentOptions::default());
    let list = [Piece { local: 0, remote: 0, len: 64 }];
    for number in 0..200_u64 {
        let tag = Notify::Tag(&number.to_le_bytes());
        pair.peer.write_list(&pair.local, &pair.remote, &list, tag).unwrap().wait(SOON).unwrap();
        // Loopback has delivered the frame; the target's thread needs a moment to read it.
        let note = pair.target.notification(SOON).unwrap();
        assert_eq!(note.outcome, Outcome::Complete { bytes: 64 }, "{number}");
    }
}

#[test]
fn a_message_of_a_transfer_comes_after_its_bytes() {
    const ROUNDS: u64 = 40;
    for lanes in [1, 2] {
        let pair = Pair::new(64 * 4096, &AgentOptions { lanes, ..AgentOptions::default() });
        let order = shuffled(64, 5);
        let pages = Pages::whole(&order, &order, 4096);
        for round in 0..ROUNDS {
            let sent = fill(&pair.local, round);
            let message = round.to_le_bytes();
            let notify = Notify::Message(&message);
            let transfer = pair.peer.write_pages(&pair.local, &pair.remote, &pages, notify).unwrap();
            let (_, arrived) = pair.target.message(SOON).unwrap();
            assert_eq!(arrived, message);
            assert!(bytes_of(&pair.exported) == sent, "the bytes of round {round} came after it");
            transfer.wait(SOON).unwrap();
        }
    }
    let pair = Pair::new(4096, &AgentOptions::default());
    let list = [Piece { local: 0, remote: 0, len: 64 }];
    let long = pair.peer.write_list(&pair.local, &pair.remote, &list, Notify::Message(&[0; 1025]));
    assert_eq!(long.unwrap_err(), TransferError::Message(1025));
}

#[test]
fn what_was_sent_before_the_end_arrives() {
    for _ in 0..20 {
        let pair = Pair::new(4096, &AgentOptions::default());
        pair.peer.announce(b"last").unwrap().complete();
        drop(pair.initiator);
        assert_eq!(pair.target.notification(SOON).unwrap().outcome, Outcome::Complete { bytes: 0 });
    }
}
