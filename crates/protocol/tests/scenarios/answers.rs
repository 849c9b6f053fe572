//! Pending responses while nothing can leave: requests arrive, responses queue up.

use nobounce_protocol::qp::{Access, Mtu, Nak, Operation, Payload, QpState, Remote, Status};
use nobounce_protocol::sim::{A, B, Fate, Region, Setup, Sim};
use nobounce_protocol::timing::{MICROSECOND, MILLISECOND};
use nobounce_protocol::wire::{Header, Opcode, Psn, Syndrome};

use crate::world::*;

fn small() -> Sim {
    pair(&Setup { mtu: Mtu::Mtu256, max_dest_rd_atomic: 2, ..Setup::default() })
}

/// B gets a request for `len` bytes of its memory, or with as many.
fn ask(sim: &mut Sim, opcode: Opcode, psn: u32, len: u32) {
    let remote = sim.ends[B].remote(THERE);
    let mut header = Header::new(opcode, sim.ends[B].qpn, Psn::new(psn));
    header.ack_req = true;
    header.reth.addr = remote.addr;
    header.reth.rkey = remote.rkey;
    header.reth.len = len;
    header.atomic.addr = remote.addr;
    header.atomic.rkey = remote.rkey;
    header.atomic.swap_or_add = 1;
    let payload = if opcode.has_payload() { usize::try_from(len).unwrap() } else { 0 };
    header.pad = u8::try_from(payload.wrapping_neg() & 3).unwrap();
    sim.ends[B].inject(0, &header, &vec![1; payload]);
}

/// What B then says, in order.
fn answers(sim: &mut Sim, flush: bool) -> Vec<(Opcode, u32)> {
    std::iter::from_fn(|| sim.ends[B].qp.poll_transmit(0, u64::MAX, flush))
        .map(|t| {
            assert!(matches!(t.header.aeth.syndrome, Syndrome::Ack(_)), "{:?}", t.header);
            (t.header.opcode, t.header.psn.get())
        })
        .collect()
}

#[test]
fn a_repeated_read_is_answered_once_and_before_later_ones() {
    let mut sim = small();
    ask(&mut sim, Opcode::ReadRequest, 0, 300);
    ask(&mut sim, Opcode::ReadRequest, 2, 100);
    ask(&mut sim, Opcode::ReadRequest, 0, 300);
    let want = [(Opcode::ReadResponseFirst, 0), (Opcode::ReadResponseLast, 1), (Opcode::ReadResponseOnly, 2)];
    assert_eq!(answers(&mut sim, true), want);
}

#[test]
fn the_rest_of_a_read_is_answered_from_where_it_was_asked_for() {
    let mut sim = small();
    ask(&mut sim, Opcode::ReadRequest, 0, 1000);
    for psn in 0..3 {
        let sent = sim.ends[B].qp.poll_transmit(0, u64::MAX, true).unwrap();
        assert_eq!(sent.header.psn.get(), psn);
    }
    ask(&mut sim, Opcode::ReadRequest, 2, 400); // the address does not matter here
    assert_eq!(answers(&mut sim, true), [(Opcode::ReadResponseFirst, 2), (Opcode::ReadResponseLast, 3)]);
}

/// The peer had its READ response while its duplicate request was in flight, and then released the
/// memory. This was seen between two engines with late threads: the queue pair ended, and its peer
/// heard nothing more.
#[test]
fn a_read_asked_again_ends_nothing_when_its_memory_has_gone_meanwhile() {
    let mut sim = small();
    let addr = sim.ends[B].addr(THERE);
    sim.ends[B].memory.register(Region { rkey: 77, addr, len: 1000, access: Access::all() });
    sim.ends[A].post(Operation::Read(Remote { addr, rkey: 77 }), HERE, 600).unwrap();
    sim.drive();
    let mut again = Header::new(Opcode::ReadRequest, sim.ends[B].qpn, Psn::new(0));
    (again.reth.addr, again.reth.rkey, again.reth.len) = (addr, 77, 600);
    sim.ends[B].inject(0, &again, &[]);
    sim.ends[B].memory.deregister(77);
    read(&mut sim, 1000);
    write(&mut sim, 1000);
    sim.drive();
    assert_eq!(ended(&sim), [Status::Success; 3]);
    assert_eq!(sim.ends[B].events, []);
    assert_eq!(sim.ends[B].qp.state(), QpState::Rts);
}

#[test]
fn a_read_asked_again_that_cannot_be_answered_keeps_no_later_one_from_it() {
    let mut sim = small();
    ask(&mut sim, Opcode::ReadRequest, 0, 300);
    assert_eq!(answers(&mut sim, true).len(), 2);
    ask(&mut sim, Opcode::ReadRequest, 0, 300);
    ask(&mut sim, Opcode::ReadRequest, 2, 100);
    let first = sim.ends[B].qp.poll_transmit(0, u64::MAX, true).unwrap();
    assert!(matches!(first.payload, Payload::Region { again: true, .. }), "{first:?}");
    sim.ends[B].qp.handle_gather_fault(&first, Nak::RemoteAccess);
    assert_eq!(answers(&mut sim, true), [(Opcode::ReadResponseOnly, 2)]);
}

/// A piece of a WRITE of three packets; only the last one asks for an answer.
fn piece(sim: &mut Sim, n: u32) {
    let remote = sim.ends[B].remote(THERE);
    let opcode = [Opcode::WriteFirst, Opcode::WriteMiddle, Opcode::WriteLast][n as usize];
    let mut header = Header::new(opcode, sim.ends[B].qpn, Psn::new(n));
    header.ack_req = n == 2;
    (header.reth.addr, header.reth.rkey, header.reth.len) = (remote.addr, remote.rkey, 768);
    sim.ends[B].inject(0, &header, &[1; 256]);
}

/// The kernel's requester does not survive an answer in the middle of what it repeats.
#[test]
fn a_repeated_message_is_answered_where_it_ends() {
    let mut sim = small();
    (0..3).for_each(|n| piece(&mut sim, n));
    assert_eq!(answers(&mut sim, true), [(Opcode::Ack, 2)]);
    (0..2).for_each(|n| piece(&mut sim, n));
    assert_eq!(answers(&mut sim, true), []);
    piece(&mut sim, 2);
    assert_eq!(answers(&mut sim, true), [(Opcode::Ack, 2)]);
}

#[test]
fn repeated_writes_between_repeated_reads_pile_nothing_up() {
    let mut sim = small();
    ask(&mut sim, Opcode::WriteOnly, 0, 8);
    ask(&mut sim, Opcode::ReadRequest, 1, 8);
    for _ in 0..2000 {
        ask(&mut sim, Opcode::WriteOnly, 0, 8);
        ask(&mut sim, Opcode::ReadRequest, 1, 8);
    }
    let said = answers(&mut sim, true);
    assert!(said.len() <= 3, "{} answers", said.len());
}

#[test]
fn old_reads_that_come_again_do_not_crowd_out_new_ones() {
    let mut sim = small();
    for psn in 0..4 {
        ask(&mut sim, Opcode::ReadRequest, psn, 1);
        answers(&mut sim, true);
    }
    for psn in [0, 1, 2, 3, 4, 5] {
        // four old ones, of which two are kept, and two new ones
        ask(&mut sim, Opcode::ReadRequest, psn, 1);
    }
    assert_eq!(sim.ends[B].qp.state(), QpState::Rts);
    let psns: Vec<u32> = answers(&mut sim, true).into_iter().map(|(_, psn)| psn).collect();
    assert_eq!(psns, [0, 1, 4, 5]);
}

#[test]
fn what_is_left_behind_a_repeated_piece_of_a_read_is_answered_before_anything_later() {
    let mut sim = small();
    ask(&mut sim, Opcode::ReadRequest, 0, 1000);
    ask(&mut sim, Opcode::WriteOnly, 4, 10);
    // has overtaken the next one, and is answered in its turn
    ask(&mut sim, Opcode::ReadRequest, 2, 256);
    ask(&mut sim, Opcode::ReadRequest, 0, 512);
    let want = [
        (Opcode::ReadResponseFirst, 0),
        (Opcode::ReadResponseLast, 1),
        (Opcode::ReadResponseMiddle, 2),
        (Opcode::ReadResponseLast, 3),
        (Opcode::Ack, 4),
    ];
    assert_eq!(answers(&mut sim, true), want);
}

#[test]
fn a_read_asked_again_is_answered_before_an_acknowledgement_that_covers_it() {
    let mut sim = small();
    ask(&mut sim, Opcode::WriteOnly, 0, 10);
    ask(&mut sim, Opcode::ReadRequest, 1, 100);
    ask(&mut sim, Opcode::WriteOnly, 0, 10); // acknowledged with all that came since
    ask(&mut sim, Opcode::ReadRequest, 1, 100);
    assert_eq!(answers(&mut sim, true), [(Opcode::ReadResponseOnly, 1), (Opcode::Ack, 1)]);
}

#[test]
fn a_read_that_reaches_beyond_what_was_asked_before_is_not_a_repetition() {
    let mut sim = small();
    ask(&mut sim, Opcode::ReadRequest, 0, 1);
    answers(&mut sim, true);
    ask(&mut sim, Opcode::ReadRequest, 0, 1000);
    assert_eq!(answers(&mut sim, true), []);
    assert_eq!(sim.ends[B].qp.state(), QpState::Rts);
}

#[test]
fn a_gap_that_has_closed_is_not_reported() {
    let mut sim = small();
    for psn in [1, 0, 1] {
        ask(&mut sim, Opcode::WriteOnly, psn, 10);
    }
    assert_eq!(answers(&mut sim, true), [(Opcode::Ack, 1)]);
}

#[test]
fn what_was_dropped_behind_a_gap_is_asked_for_although_the_gap_has_closed() {
    let mut sim = small();
    for psn in [3, 1, 0, 2] {
        ask(&mut sim, Opcode::WriteOnly, psn, 10);
    }
    let qp = &mut sim.ends[B].qp;
    let said: Vec<_> = std::iter::from_fn(|| qp.poll_transmit(0, u64::MAX, true)).collect();
    let said: Vec<_> = said.iter().map(|t| (t.header.psn.get(), t.header.aeth.syndrome)).collect();
    assert!(matches!(said[..], [(0, Syndrome::Ack(_)), (1, Syndrome::Nak(0))]), "{said:?}");
}

#[test]
fn an_acknowledgement_may_wait_but_not_with_data_behind_it() {
    let mut sim = small();
    ask(&mut sim, Opcode::WriteOnly, 0, 10);
    assert_eq!(answers(&mut sim, false), [], "bundled with what comes next");
    ask(&mut sim, Opcode::FetchAdd, 1, 8);
    assert_eq!(answers(&mut sim, false), [(Opcode::Ack, 0), (Opcode::AtomicAck, 1)]);
    for psn in 2..10 {
        assert_eq!(answers(&mut sim, false), []);
        ask(&mut sim, Opcode::WriteOnly, psn, 10);
    }
    assert_eq!(answers(&mut sim, false), [(Opcode::Ack, 9)], "eight are enough");
}

#[test]
fn many_acknowledgements_become_one() {
    let mut sim = small();
    for psn in 0..100 {
        ask(&mut sim, Opcode::WriteOnly, psn, 10);
    }
    assert_eq!(answers(&mut sim, true), [(Opcode::Ack, 99)]);
}

#[test]
fn a_receiver_that_is_not_ready_is_not_mistaken_for_loss_when_packets_are_overtaken() {
    // Three packets come in reverse: each time the peer reports a gap, and then that it is not
    // ready. Only the first would use up retries.
    let mut sim = pair(&Setup { min_rnr_timer: 2, ..Setup::default() });
    // the round trip is known, so that a second report is not taken for an echo of the first
    write(&mut sim, 10);
    sim.drive();
    sim.pipes[0].script(|_, header| match header.psn.get() {
        1 => Fate::Delay(MICROSECOND),
        2 => Fate::Delay(MICROSECOND / 2),
        _ => Fate::Pass,
    });
    for _ in 0..3 {
        send(&mut sim, 10);
    }
    sim.drive_for(5 * MILLISECOND);
    assert!(sim.ends[A].qp.counters().rcvd_seq_err > 7);
    assert_eq!(ended(&sim), [SUCCESS], "{:?}", sim.ends[A].completions);
    for _ in 0..3 {
        sim.ends[B].post_receive(THERE, 10);
    }
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS; 4]);
}

#[test]
fn packets_that_have_become_one_are_taken_as_many() {
    let mut sim = pair(&Setup { mtu: Mtu::Mtu256, runs: true, ..Setup::default() });
    write(&mut sim, 50 * 256 + 7);
    read(&mut sim, 50 * 256 + 7);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS; 2]);
    assert!(same(&sim, 50 * 256 + 7));
    let sent = sim.pipes[0].counters().sent + sim.pipes[1].counters().sent;
    assert!(sent < 40, "{sent} packets");
}

/// It is not asked for packets whenever an answer comes.
#[test]
fn who_has_nothing_left_to_send_says_so() {
    let mut sim = pair(&Setup::default());
    assert!(!sim.ends[A].qp.may_send());
    write(&mut sim, 8);
    let a = &mut sim.ends[A];
    assert!(a.qp.may_send());
    let sent = a.qp.poll_transmit(0, u64::MAX, true).unwrap();
    assert!(!a.qp.may_send(), "it waits for an answer, nothing else");
    let due = a.qp.poll_timeout().unwrap();
    a.qp.handle_timeout(due);
    assert!(a.qp.may_send(), "it asks after its packet");
    while a.qp.poll_transmit(due, u64::MAX, true).is_some() {}
    assert!(!a.qp.may_send());
    let mut wait = Header::new(Opcode::Ack, a.qpn, sent.header.psn);
    wait.aeth.syndrome = Syndrome::RnrNak(1);
    a.inject(due, &wait, &[]);
    assert_eq!(a.qp.poll_transmit(due, u64::MAX, true), None);
    assert!(a.qp.may_send(), "later");
}
