//! Datagrams: each message is a packet and stands for itself.

use nobounce_protocol::qp::{
    AttrMask, Datagram, DatagramSource, GRH_LEN, Mtu, Operation, PostError, QpAttr, QpState, Service, Status,
    WorkRequest,
};
use nobounce_protocol::sim::{A, B, Fate, Memory, Setup, Sim};
use nobounce_protocol::wire::{Deth, Header, Opcode, Psn, Qpn};

use crate::world::*;

const GRH: u32 = 40;

fn ud() -> Setup {
    Setup { service: Service::Ud, ..Setup::default() }
}

/// A request of `len` bytes.
fn request(op: Operation, len: u32) -> WorkRequest {
    WorkRequest { wr_id: 0, op, len, signaled: true, solicited: false, fence: false, xrc_srq: 0 }
}

fn received(sim: &Sim, len: u32) -> bool {
    let (a, b) = (&sim.ends[A], &sim.ends[B]);
    let grh = bytes(&b.memory, b.addr(THERE), GRH);
    grh.iter().all(|byte| *byte == Memory::GRH_BYTE)
        && bytes(&b.memory, b.addr(THERE + GRH_LEN), len) == bytes(&a.memory, a.addr(HERE), len)
}

#[test]
fn datagrams_up_to_the_mtu_arrive_behind_the_ip_header() {
    for mtu in Mtu::ALL {
        for len in [0, 1, 3, mtu.bytes() - 1, mtu.bytes()] {
            let mut sim = pair(&Setup { mtu, ..ud() });
            let before = sim.ends[B].memory.clone();
            let receive = sim.ends[B].post_receive(THERE, u64::from(len) + GRH_LEN);
            let id = sim.ends[A].post(Operation::SendImmediate(9), HERE, len).unwrap();
            sim.drive();
            assert_eq!(sim.ends[A].sends(), [(id, SUCCESS)]);
            let got = sim.ends[B].received();
            assert_eq!((got.len(), got[0].wr_id, got[0].status), (1, receive, SUCCESS));
            assert_eq!((got[0].byte_len, got[0].immediate), (len + GRH, Some(9)));
            assert_eq!(got[0].source, Some(DatagramSource { qpn: sim.ends[A].qpn }));
            assert!(received(&sim, len));
            nothing_else_changed(&before, &sim.ends[B].memory, sim.ends[B].addr(THERE), len + GRH);
            assert_eq!(sim.pipes[1].counters().sent, 0);
        }
    }
}

#[test]
fn what_does_not_fit_a_packet_is_refused_when_posted() {
    let mut sim = pair(&ud());
    let refused = sim.ends[A].post(Operation::Send, HERE, 1025).unwrap_err();
    assert_eq!(refused, PostError::DatagramTooLong { given: 1025, max: 1024 });
    let remote = sim.ends[B].remote(0);
    for op in [
        Operation::Write(remote),
        Operation::WriteImmediate(remote, 1),
        Operation::Read(remote),
        Operation::SendInvalidate(1),
    ] {
        let refused = sim.ends[A].post(op, HERE, 8).unwrap_err();
        assert_eq!(refused, PostError::NotOffered { service: Service::Ud, operation: op.kind() });
    }
    let refused = sim.ends[A].qp.post(request(Operation::Send, 1)).unwrap_err();
    assert_eq!(refused, PostError::Destination(Service::Ud));
    assert!(refused.to_string().contains("address handle required"), "{refused}");
}

#[test]
fn the_key_decides_who_is_heard() {
    let mut sim = pair(&ud());
    let peer = sim.ends[A].peer;
    for (qkey, heard) in
        [(Setup::QKEY, true), (Setup::QKEY + 1, false), (0x8000_0000, true), (u32::MAX, true)]
    {
        // With the highest bit set, the sender's own key is meant, which is the right one.
        sim.ends[A].peer = Datagram { qkey, ..peer };
        sim.ends[B].post_receive(THERE, 100);
        send(&mut sim, 10);
        sim.drive();
        assert_eq!(sim.ends[B].received().len(), usize::from(heard), "{qkey:#x}");
        sim.ends[B].completions.clear();
    }
    assert_eq!(sim.ends[B].qp.counters().qkey_violations, 1);
    // The key may be changed at any time.
    let mask = AttrMask::QKEY;
    sim.ends[B].modify(&QpAttr { mask, qkey: 5, ..QpAttr::default() });
    sim.ends[A].peer = Datagram { qkey: 5, ..peer };
    send(&mut sim, 10);
    sim.drive();
    assert_eq!(sim.ends[B].received().len(), 1);
}

#[test]
fn without_a_receive_a_datagram_is_dropped() {
    let mut sim = pair(&ud());
    send(&mut sim, 10);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS]);
    assert_eq!(sim.ends[B].qp.counters().out_of_buffer, 1);
    assert_eq!(sim.ends[B].qp.state(), QpState::Rts);
}

#[test]
fn a_receive_that_is_too_short_or_gone_fails_and_ends_the_queue_pair() {
    for (capacity, unmapped, status) in [
        (GRH_LEN + 9, 0, Status::LocalLength),
        (39, 0, Status::LocalLength),
        (100, 1, Status::LocalProtection),
    ] {
        let mut sim = pair(&ud());
        let addr = sim.ends[B].addr(THERE);
        sim.ends[B].memory.unmap(addr, unmapped);
        let receive = sim.ends[B].post_receive(THERE, capacity);
        sim.ends[B].post_receive(THERE, capacity);
        send(&mut sim, 10);
        sim.drive();
        assert_eq!(ended(&sim), [SUCCESS], "the sender never knows");
        let got = sim.ends[B].received();
        assert_eq!((got[0].wr_id, got[0].status), (receive, status));
        assert_eq!(got[1].status, Status::Flushed);
        assert_eq!(sim.ends[B].qp.state(), QpState::Error);
    }
}

#[test]
fn a_datagram_longer_than_the_port_takes_is_dropped() {
    let mut sim = pair(&ud());
    sim.ends[B].post_receive(THERE, 5000);
    let mut header = Header::new(Opcode::UdSendOnly, sim.ends[B].qpn, Psn::new(0));
    header.deth = Deth { qkey: Setup::QKEY, source: Qpn::new(3) };
    sim.ends[B].inject(sim.now, &header, &[1; 1028]);
    assert_eq!(sim.ends[B].qp.counters().dropped_messages, 1);
    sim.ends[B].inject(sim.now, &header, &[1; 1024]);
    assert_eq!(sim.ends[B].received()[0].source, Some(DatagramSource { qpn: Qpn::new(3) }));
}

#[test]
fn each_datagram_stands_for_itself() {
    let mut sim = pair(&ud());
    for _ in 0..10 {
        sim.ends[B].post_receive(THERE, 2000);
    }
    sim.pipes[0].script(|n, _| match n {
        1 => Fate::Drop,
        2 => Fate::Delay(100_000),
        3 => Fate::Duplicate,
        _ => Fate::Pass,
    });
    for len in [10, 20, 30, 40, 50] {
        send(&mut sim, len);
    }
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS; 5]);
    let mut got: Vec<u32> = sim.ends[B].received().iter().map(|c| c.byte_len - GRH).collect();
    assert_eq!(got.last(), Some(&30), "it came late, and was taken");
    got.sort_unstable();
    assert_eq!(got, [10, 30, 40, 40, 50]);
}

#[test]
fn every_datagram_names_where_it_goes() {
    let mut sim = pair(&ud());
    let end = &mut sim.ends[A];
    for n in 1..4_u8 {
        let to = Datagram {
            remote: [10, 0, 0, n].into(),
            dest_qpn: Qpn::new(u32::from(n)),
            qkey: n.into(),
            ..end.peer
        };
        end.qp.post_to(request(Operation::Send, 0), to).unwrap();
    }
    for n in 1..4_u8 {
        let transmit = end.qp.poll_transmit(0, u64::MAX, true).unwrap();
        assert_eq!(*end.qp.destination(), std::net::IpAddr::from([10, 0, 0, n]));
        assert_eq!(transmit.header.dest_qpn, Qpn::new(n.into()));
        assert_eq!(transmit.header.deth, Deth { qkey: n.into(), source: end.qpn });
        assert_eq!(transmit.header.psn, Psn::new(u32::from(n) - 1));
        assert!(end.qp.is_current(&transmit));
    }
    assert!(end.qp.poll_transmit(0, u64::MAX, true).is_none());
    assert!(end.qp.has_completions());
}

#[test]
fn a_send_whose_memory_is_gone_stops_the_send_queue_only() {
    let mut sim = pair(&ud());
    sim.ends[B].post_receive(THERE, 2000);
    let addr = sim.ends[A].addr(HERE);
    sim.ends[A].memory.unmap(addr, 1);
    send(&mut sim, 10);
    send(&mut sim, 10);
    sim.drive();
    assert_eq!(ended(&sim), [Status::LocalProtection, Status::Flushed]);
    assert_eq!(sim.ends[A].qp.state(), QpState::Sqe);
    sim.ends[A].modify(&QpAttr::to_state(QpState::Rts));
    sim.ends[A].post(Operation::Send, 64, 10).unwrap();
    sim.drive();
    assert_eq!(ended(&sim)[2..], [SUCCESS]);
    assert_eq!(sim.ends[B].received().len(), 1);
}
