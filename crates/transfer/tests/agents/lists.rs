//! Lists of pages: what moves, and what is refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nobounce_transfer::{
    AgentOptions, Direction, Gate, ListError, Notify, Pages, Part, Piece, Repeat, TransferError,
};

use super::{Pair, SOON, bytes_of, fill, shuffled};

const PAGE: u64 = 4096;

fn options(lanes: usize) -> AgentOptions {
    AgentOptions { lanes, ..AgentOptions::default() }
}

#[test]
fn every_page_arrives_at_its_place_in_both_directions() {
    for lanes in [1, 3] {
        let pair = Pair::new(1000 * 4096, &options(lanes));
        let (from, to) = (shuffled(1000, 1), shuffled(1000, 2));
        let (sent, pages) = (fill(&pair.local, 7), Pages::whole(&from, &to, PAGE));
        let written = pair.peer.write_pages(&pair.local, &pair.remote, &pages, Notify::Nothing).unwrap();
        assert_eq!(written.wait(SOON).unwrap().bytes, 1000 * PAGE);
        let found = bytes_of(&pair.exported);
        let page = |bytes: &[u8], at: u64| bytes[usize::try_from(at * PAGE).unwrap()..][..4096].to_vec();
        for (from, to) in from.iter().zip(&to) {
            assert!(page(&sent, *from) == page(&found, *to), "page {from} to {to}, {lanes} lanes");
        }
        let there = fill(&pair.exported, 8);
        pair.peer.read_pages(&pair.local, &pair.remote, &pages, Notify::Nothing).unwrap().wait(SOON).unwrap();
        let found = bytes_of(&pair.local);
        for (from, to) in from.iter().zip(&to) {
            assert!(page(&found, *from) == page(&there, *to), "page {to} to {from}, {lanes} lanes");
        }
        let counters = pair.initiator.counters();
        assert_eq!((counters.transfers, counters.failed, counters.bytes), (2, 0, 2000 * PAGE));
    }
}

#[test]
fn a_head_slice_of_every_layer_arrives() {
    // 3 layers of 8 pages of 16 tokens; 4 heads of 32 bytes here, 2 of them there.
    let (here, there) = (4 * 32_u64, 2 * 32_u64);
    let pair = Pair::new(3 * 8 * 16 * 128, &options(1));
    let sent = fill(&pair.local, 3);
    let layers = Repeat { count: 3, local_step: 8 * 16 * here, remote_step: 8 * 16 * there };
    let tokens = Repeat { count: 16, local_step: here, remote_step: there };
    let (from, to) = (shuffled(8, 5), shuffled(8, 6));
    let pages = Pages {
        len: there,
        local_stride: 16 * here,
        remote_stride: 16 * there,
        local_offset: 2 * 32,
        repeats: &[layers, tokens],
        ..Pages::whole(&from, &to, 0)
    };
    pair.peer.write_pages(&pair.local, &pair.remote, &pages, Notify::Nothing).unwrap().wait(SOON).unwrap();
    let found = bytes_of(&pair.exported);
    for layer in 0..3 {
        for (from, to) in from.iter().zip(&to) {
            for token in 0..16 {
                let source = usize::try_from(((layer * 8 + from) * 16 + token) * here + 64).unwrap();
                let target = usize::try_from(((layer * 8 + to) * 16 + token) * there).unwrap();
                assert!(
                    sent[source..][..64] == found[target..][..64],
                    "layer {layer}, page {from}, token {token}"
                );
            }
        }
    }
}

#[test]
fn long_pieces_and_empty_lists_and_several_parts() {
    let pair = Pair::new(5 << 20, &options(2));
    let sent = fill(&pair.local, 9);
    let whole = Piece { local: 0, remote: 1, len: (5 << 20) - 1 };
    let write = |list: &[Piece]| {
        pair.peer.write_list(&pair.local, &pair.remote, list, Notify::Nothing).unwrap().wait(SOON).unwrap()
    };
    assert_eq!((write(&[whole]).bytes, write(&[]).bytes), (whole.len, 0));
    assert!(bytes_of(&pair.exported)[1..] == sent[..sent.len() - 1]);
    let piece = Piece { local: 0, remote: 0, len: 100 };
    let (near, far) = (pair.local.part(500, 100).unwrap(), pair.remote.part(4 << 20, 100).unwrap());
    let parts = vec![
        Part { local: &near, remote: &pair.remote, pieces: Arc::new(vec![piece]) },
        Part { local: &pair.local, remote: &far, pieces: Arc::default() },
        Part { local: &pair.local, remote: &far, pieces: Arc::new(vec![piece]) },
    ];
    pair.peer.submit(Direction::Write, parts, Notify::Nothing).unwrap().wait(SOON).unwrap();
    let found = bytes_of(&pair.exported);
    assert!(found[..100] == sent[500..600] && found[4 << 20..][..100] == sent[..100]);
}

#[test]
fn what_is_not_inside_is_refused_and_nothing_else_is_hurt() {
    let pair = Pair::new(4096, &options(1));
    let write = |list: &[Piece]| pair.peer.write_list(&pair.local, &pair.remote, list, Notify::Nothing);
    let refused = |list: &[Piece]| match write(list).unwrap_err() {
        TransferError::List(error) => error,
        other => panic!("{other}"),
    };
    let good = Piece { local: 0, remote: 0, len: 1 };
    assert!(matches!(
        refused(&[good, Piece { local: 4090, ..good }, Piece { local: 4096, ..good }]),
        ListError::Local { index: 2, .. }
    ));
    assert!(matches!(refused(&[Piece { remote: u64::MAX, ..good }]), ListError::Remote { .. }));
    assert!(matches!(refused(&[Piece { len: u64::MAX, ..good }]), ListError::Local { .. }));
    let long = pair.peer.write_list(&pair.local, &pair.remote, &[good], Notify::Tag(&[0; 257]));
    assert_eq!(long.unwrap_err(), TransferError::Tag(257));
    assert!(write(&[good]).unwrap().wait(SOON).is_ok());
}

#[test]
fn more_than_the_queues_hold_waits_for_its_turn() {
    let pair = Pair::new(1 << 20, &AgentOptions { depth: 4, ..options(1) });
    fill(&pair.local, 1);
    let pages: Vec<_> = shuffled(1024, 3);
    let pages = Pages::whole(&pages, &pages, 1024);
    let transfers: Vec<_> = (0..20)
        .map(|_| pair.peer.write_pages(&pair.local, &pair.remote, &pages, Notify::Nothing).unwrap())
        .collect();
    for transfer in transfers {
        assert_eq!(transfer.wait(SOON).unwrap().bytes, 1 << 20);
    }
    assert!(bytes_of(&pair.local) == bytes_of(&pair.exported));
}

#[test]
fn a_cancelled_transfer_ends_and_others_go_on() {
    let pair = Pair::new(16 << 20, &options(1));
    fill(&pair.local, 1);
    let order = shuffled(1 << 16, 4);
    let pages = Pages::whole(&order, &order, 256);
    let submit = |tag| pair.peer.write_pages(&pair.local, &pair.remote, &pages, Notify::Tag(tag)).unwrap();
    let (first, second) = (submit(b"first"), submit(b"second"));
    first.cancel();
    assert_eq!(first.wait(SOON), Err(TransferError::Cancelled));
    assert_eq!(second.wait(SOON).unwrap().bytes, 16 << 20);
    let mut ends = [pair.target.notification(SOON).unwrap(), pair.target.notification(SOON).unwrap()];
    ends.sort_by(|a, b| a.tag.cmp(&b.tag));
    assert!(format!("{:?}", ends[0].outcome).contains("Aborted"), "{ends:?}");
    assert!(format!("{:?}", ends[1].outcome).contains("Complete"), "{ends:?}");
}

#[test]
fn a_gate_holds_a_transfer_back_and_no_other() {
    let pair = Pair::new(4096, &options(1));
    fill(&pair.local, 1);
    let part = |at| {
        vec![Part {
            local: &pair.local,
            remote: &pair.remote,
            pieces: Arc::new(vec![Piece { local: at, remote: at, len: 64 }]),
        }]
    };
    let open = Arc::new(AtomicBool::new(false));
    let gate = |open: &Arc<AtomicBool>| -> Gate {
        let open = open.clone();
        Box::new(move || Ok(open.load(Ordering::Relaxed)))
    };
    let held =
        pair.peer.submit_after(Direction::Write, part(0), Notify::Tag(b"held"), Some(gate(&open))).unwrap();
    let broken: Gate = Box::new(|| Err("the kernel failed".to_owned()));
    let failed = pair.peer.submit_after(Direction::Write, part(64), Notify::Nothing, Some(broken)).unwrap();
    assert_eq!(failed.wait(SOON), Err(TransferError::Gate("the kernel failed".to_owned())));
    let free = pair.peer.submit(Direction::Write, part(128), Notify::Nothing).unwrap();
    free.wait(SOON).unwrap();
    assert!(bytes_of(&pair.exported)[..128].iter().all(|byte| *byte == 0) && held.result().is_none());
    open.store(true, Ordering::Relaxed);
    held.wait(SOON).unwrap();
    assert_eq!(pair.target.notification(SOON).unwrap().tag, b"held");
    let never = pair
        .peer
        .submit_after(Direction::Write, part(0), Notify::Nothing, Some(gate(&Arc::default())))
        .unwrap();
    never.cancel();
    assert_eq!(never.wait(SOON), Err(TransferError::Cancelled));
}

#[test]
fn the_longest_timeout_waits() {
    let pair = Pair::new(4096, &options(1));
    let piece = [Piece { local: 0, remote: 0, len: 64 }];
    let transfer = pair.peer.write_list(&pair.local, &pair.remote, &piece, Notify::Tag(b"t")).unwrap();
    assert_eq!(transfer.wait(Duration::MAX).unwrap().bytes, 64);
    pair.peer.region("kv", Duration::MAX).unwrap();
    pair.target.notification(Duration::MAX).unwrap();
    pair.initiator.connect(super::addr(&pair.target), Duration::MAX).unwrap();
}
