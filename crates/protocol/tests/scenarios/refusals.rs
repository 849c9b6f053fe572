//! What a responder refuses, with which code, and what both sides learn.

use nobounce_protocol::qp::{Access, Mtu, Operation, QpEvent, QpState, Remote, Service, Status};
use nobounce_protocol::sim::{A, B, Memory, Region, Setup, Sim};
use nobounce_protocol::wire::{Feth, Header, Opcode, Psn, Reth, Syndrome};

use crate::world::*;

/// `op` is refused: A learns `status`, B raises `event`, both are in the error state, B's memory is
/// untouched.
fn refused(mut sim: Sim, op: Operation, len: u32, status: Status, event: QpEvent) {
    let before = sim.ends[B].memory.clone();
    let id = sim.ends[A].post(op, HERE, len).unwrap();
    sim.drive();
    assert_eq!(sim.ends[A].sends(), [(id, status)], "{op:?}");
    assert_eq!(sim.ends[B].events, [event], "{op:?}");
    assert_eq!([sim.ends[A].qp.state(), sim.ends[B].qp.state()], [QpState::Error; 2]);
    assert_eq!(before.bytes(), sim.ends[B].memory.bytes());
}

fn fetchers(remote: Remote) -> [(Operation, u32); 4] {
    [
        (Operation::Write(remote), 3000),
        (Operation::Read(remote), 3000),
        (Operation::FetchAdd { remote, add: 1 }, 8),
        (Operation::CompareSwap { remote, compare: 0, swap: 1 }, 8),
    ]
}

#[test]
fn a_wrong_key_is_an_access_error() {
    for i in 0..4 {
        let sim = pair(&Setup::default());
        let remote = Remote { rkey: 0xbad, ..sim.ends[B].remote(0) };
        let (op, len) = fetchers(remote)[i];
        refused(sim, op, len, Status::RemoteAccess, QpEvent::AccessError);
    }
}

#[test]
fn outside_the_region_is_an_access_error_at_either_end() {
    for i in 0..4 {
        let region = pair(&Setup::default()).ends[B].memory.regions()[0];
        for addr in [region.addr - 8, region.addr + region.len - 7, Memory::BASE, 0, u64::MAX - 7] {
            let sim = pair(&Setup::default());
            let (op, len) = fetchers(Remote { addr: addr & !7, rkey: region.rkey })[i];
            let addr = addr & !7;
            if addr >= region.addr && addr.saturating_add(u64::from(len)) <= region.addr + region.len {
                continue; // aligned down, it fits
            }
            refused(sim, op, len, Status::RemoteAccess, QpEvent::AccessError);
        }
    }
}

#[test]
fn a_region_gives_only_the_rights_it_has() {
    let rights = [Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC, Access::REMOTE_ATOMIC];
    for (i, right) in rights.into_iter().enumerate() {
        let mut sim = pair(&Setup::default());
        let addr = sim.ends[B].addr(0);
        sim.ends[B].memory.register(Region { rkey: 77, addr, len: 10_000, access: Access::all() - right });
        let (op, len) = fetchers(Remote { addr, rkey: 77 })[i];
        refused(sim, op, len, Status::RemoteAccess, QpEvent::AccessError);
    }
}

#[test]
fn a_queue_pair_gives_only_the_rights_it_has() {
    let rights = [Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC, Access::REMOTE_ATOMIC];
    for (i, right) in rights.into_iter().enumerate() {
        let sim = pair(&Setup { access: Access::all() - right, ..Setup::default() });
        let (op, len) = fetchers(sim.ends[B].remote(0))[i];
        refused(sim, op, len, Status::RemoteInvalidRequest, QpEvent::RequestError);
    }
}

#[test]
fn an_atomic_off_its_boundary_is_an_invalid_request() {
    let sim = pair(&Setup::default());
    let remote = sim.ends[B].remote(4);
    let op = Operation::FetchAdd { remote, add: 1 };
    refused(sim, op, 8, Status::RemoteInvalidRequest, QpEvent::RequestError);
}

#[test]
fn a_message_longer_than_its_receive_fails_both_sides() {
    for (len, capacity) in [(11, 10), (3000, 2999), (5000, 1000), (1, 0)] {
        let mut sim = pair(&Setup::default());
        let short = sim.ends[B].post_receive(THERE, capacity);
        let other = sim.ends[B].post_receive(THERE, 9000);
        let before = sim.ends[B].memory.clone();
        send(&mut sim, len);
        sim.drive();
        assert_eq!(ended(&sim), [Status::RemoteInvalidRequest]);
        let got: Vec<_> = sim.ends[B].received().iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(got, [(short, Status::LocalLength), (other, Status::Flushed)]);
        let capacity = u32::try_from(capacity).unwrap();
        nothing_else_changed(&before, &sim.ends[B].memory, sim.ends[B].addr(THERE), capacity);
    }
}

#[test]
fn a_send_that_invalidates_an_unknown_key_fails_both_sides() {
    let mut sim = pair(&Setup::default());
    sim.ends[B].post_receive(THERE, 100);
    sim.ends[A].post(Operation::SendInvalidate(0xbad), HERE, 100).unwrap();
    sim.drive();
    assert_eq!(ended(&sim), [Status::RemoteAccess]);
    assert_eq!(sim.ends[B].received().len(), 1);
    assert_ne!(sim.ends[B].received()[0].status, SUCCESS);
}

/// B gets this packet as the next in sequence; returns the code of its refusal.
fn next_packet(
    sim: &mut Sim,
    opcode: Opcode,
    payload: usize,
    change: impl FnOnce(&mut Header),
) -> Option<u8> {
    let mut header = Header::new(opcode, sim.ends[B].qpn, Psn::new(0));
    let remote = sim.ends[B].remote(THERE);
    header.reth = Reth { addr: remote.addr, rkey: remote.rkey, len: u32::try_from(payload).unwrap() };
    header.pad = u8::try_from(payload.wrapping_neg() & 3).unwrap();
    header.ack_req = true;
    change(&mut header);
    sim.ends[B].inject(0, &header, &vec![0x55; payload]);
    refusal(sim)
}

fn refusal(sim: &mut Sim) -> Option<u8> {
    while let Some(t) = sim.ends[B].qp.poll_transmit(0, u64::MAX, true) {
        if let Syndrome::Nak(code) = t.header.aeth.syndrome {
            return Some(code);
        }
    }
    None
}

#[test]
fn opcodes_out_of_sequence_are_invalid_requests() {
    use Opcode::*;
    let starts = [None, Some(SendFirst), Some(WriteFirst)];
    let requests = Opcode::ALL.into_iter().filter(|o| o.service() == Service::Rc && !o.is_response());
    let mut table = String::new();
    for opcode in requests {
        for open in starts {
            let mut sim = pair(&Setup { mtu: Mtu::Mtu256, ..Setup::default() });
            sim.ends[B].post_receive(THERE, 2000);
            sim.ends[B].post_receive(THERE, 2000);
            let mut psn = 0;
            if let Some(first) = open {
                assert_eq!(next_packet(&mut sim, first, 256, |h| h.reth.len = 512), None);
                psn = 1;
            }
            let middle = matches!(opcode, SendFirst | SendMiddle | WriteFirst | WriteMiddle);
            let payload = match opcode {
                AtomicWrite => 8,
                _ if opcode.has_payload() => 256,
                _ => 0,
            };
            let rkey = sim.ends[B].rkey;
            let addr = sim.ends[B].addr(0);
            let code = next_packet(&mut sim, opcode, payload, |h| {
                h.psn = Psn::new(psn);
                h.invalidate = rkey;
                h.atomic.addr = addr;
                h.atomic.rkey = rkey;
                h.feth = Feth::new(Feth::GLOBAL, 0);
                if middle {
                    h.reth.len = 512;
                }
            });
            let open = open.map_or("nothing".to_owned(), |o| format!("{o:?}"));
            let said = code.map_or("taken".to_owned(), |c| format!("nak {c}"));
            table += &format!("after {open:<10} {opcode:?}: {said}\n");
        }
    }
    insta::assert_snapshot!("opcode_sequences", table);
}

/// Words are whole and aligned, and memory here is not persistent.
#[test]
fn a_flush_or_atomic_write_that_cannot_be_done_is_refused() {
    let said = |opcode: Opcode, payload: usize, access: Access, change: fn(&mut Header)| {
        let mut sim = pair(&Setup { access, ..Setup::default() });
        next_packet(&mut sim, opcode, payload, |header| {
            header.feth = Feth::new(Feth::GLOBAL, 0);
            change(header);
        })
    };
    let all = Access::all();
    assert_eq!(said(Opcode::AtomicWrite, 8, all, |_| {}), None);
    assert_eq!(said(Opcode::AtomicWrite, 4, all, |_| {}), Some(1));
    assert_eq!(said(Opcode::AtomicWrite, 16, all, |_| {}), Some(1));
    assert_eq!(said(Opcode::AtomicWrite, 8, all, |h| h.reth.addr += 4), Some(1));
    assert_eq!(said(Opcode::AtomicWrite, 8, all, |h| h.reth.rkey ^= 1), Some(2));
    assert_eq!(said(Opcode::AtomicWrite, 8, Access::REMOTE_ATOMIC, |_| {}), Some(1));
    assert_eq!(said(Opcode::Flush, 0, all, |h| h.reth.len = 100), None);
    assert_eq!(said(Opcode::Flush, 0, all, |h| (h.reth.addr, h.feth) = (0, Feth::new(1, 1))), None);
    assert_eq!(said(Opcode::Flush, 0, all, |h| h.feth = Feth::new(2, 0)), Some(2), "persistence");
    assert_eq!(said(Opcode::Flush, 0, all, |h| h.feth = Feth::new(3, 0)), Some(2), "persistence, too");
    assert_eq!(said(Opcode::Flush, 0, all, |h| h.feth = Feth::new(0, 0)), Some(1));
    assert_eq!(said(Opcode::Flush, 0, all, |h| h.feth = Feth::new(4, 0)), Some(1));
    assert_eq!(said(Opcode::Flush, 0, all, |h| h.feth = Feth::new(1, 2)), Some(1));
    assert_eq!(said(Opcode::Flush, 0, all, |h| h.reth.rkey ^= 1), Some(2));
    assert_eq!(said(Opcode::Flush, 0, all, |h| h.reth.len = u32::MAX), Some(2));
    assert_eq!(said(Opcode::Flush, 0, Access::REMOTE_WRITE, |_| {}), Some(1));
}

#[test]
fn wrong_lengths_are_invalid_requests() {
    use Opcode::*;
    let fresh = || {
        let mut sim = pair(&Setup { mtu: Mtu::Mtu256, ..Setup::default() });
        sim.ends[B].post_receive(THERE, 9000);
        sim
    };
    for (opcode, payload, total) in [
        (SendFirst, 255, 0),
        (SendFirst, 260, 0),
        (SendFirst, 0, 0),
        (SendOnly, 257, 0),
        (WriteFirst, 252, 600),
        (WriteFirst, 256, 256), // nothing would be left for the last
        (WriteFirst, 256, 10),
        (WriteFirst, 256, 0),
        (WriteOnly, 10, 11),
        (WriteOnly, 10, 9),
        (WriteOnly, 0, 10),
        (WriteOnly, 257, 257),
        (WriteOnly, 0, (1 << 31) + 1),
        (ReadRequest, 0, (1 << 31) + 1),
    ] {
        let mut sim = fresh();
        let before = sim.ends[B].memory.clone();
        let code = next_packet(&mut sim, opcode, payload, |h| h.reth.len = total);
        assert_eq!(code, Some(1), "{opcode:?} with {payload} of {total} bytes");
        assert_eq!(sim.ends[B].events, [QpEvent::RequestError]);
        assert_eq!(before.bytes(), sim.ends[B].memory.bytes());
    }
    for (first, opcode, payload) in [
        (SendFirst, SendMiddle, 255),
        (SendFirst, SendLast, 0),
        (SendFirst, SendLast, 257),
        (WriteFirst, WriteMiddle, 100),
        (WriteFirst, WriteLast, 100),
        (WriteFirst, WriteLast, 0),
        (WriteFirst, WriteLast, 257),
    ] {
        let mut sim = fresh();
        assert_eq!(next_packet(&mut sim, first, 256, |h| h.reth.len = 600), None);
        let code = next_packet(&mut sim, opcode, payload, |h| h.psn = Psn::new(1));
        assert_eq!(code, Some(1), "{opcode:?} with {payload} bytes");
    }
}

#[test]
fn more_reads_than_agreed_are_an_invalid_request() {
    let mut sim = pair(&Setup { mtu: Mtu::Mtu256, max_dest_rd_atomic: 2, ..Setup::default() });
    let remote = sim.ends[B].remote(0);
    for psn in 0..3 {
        let mut header = Header::new(Opcode::ReadRequest, sim.ends[B].qpn, Psn::new(psn));
        header.reth = Reth { addr: remote.addr, rkey: remote.rkey, len: 1 };
        sim.ends[B].inject(0, &header, &[]);
    }
    assert_eq!(refusal(&mut sim), Some(1));
}

#[test]
fn a_responder_without_reads_refuses_them() {
    let sim = pair(&Setup { max_dest_rd_atomic: 0, ..Setup::default() });
    let op = Operation::Read(sim.ends[B].remote(0));
    refused(sim, op, 100, Status::RemoteInvalidRequest, QpEvent::RequestError);
}

#[test]
fn a_lost_refusal_is_repeated_on_request() {
    let mut sim = pair(&Setup { timeout: 20, ..Setup::default() });
    sim.pipes[1].script(lose(is_nak, &[0, 1]));
    sim.ends[A].post(Operation::Write(Remote { addr: 0, rkey: 1 }), 0, 10).unwrap();
    sim.drive();
    assert_eq!(ended(&sim), [Status::RemoteAccess], "and not: no answer");
}

#[test]
fn a_region_that_goes_away_in_the_middle_ends_a_write_and_a_read() {
    for is_write in [true, false] {
        let mut sim = pair(&Setup { mtu: Mtu::Mtu256, ..Setup::default() });
        sim.pipes[0].conditions.rate = 1_000_000_000;
        sim.pipes[1].conditions.rate = 1_000_000_000;
        let id = if is_write { write(&mut sim, 100_000) } else { read(&mut sim, 100_000) };
        let rkey = sim.ends[B].rkey;
        sim.drive_for(300_000);
        sim.ends[B].memory.deregister(rkey);
        sim.drive();
        assert_eq!(sim.ends[A].sends(), [(id, Status::RemoteAccess)]);
        assert_eq!(sim.ends[B].events, [QpEvent::AccessError]);
    }
}
