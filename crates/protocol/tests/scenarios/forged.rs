//! Unsolicited packets: they have no effect.

use nobounce_protocol::qp::{Handled, Mtu, Operation, Qp, QpAttr, QpConfig, QpState, Service};
use nobounce_protocol::sim::{A, B, Handling, Memory, Rng, Setup};
use nobounce_protocol::timing::{MICROSECOND, MILLISECOND};
use nobounce_protocol::wire::{Aeth, Header, Opcode, Psn, Qpn, Reth, Syndrome};

use crate::world::*;

fn small() -> Setup {
    Setup { mtu: Mtu::Mtu256, ..Setup::default() }
}

fn answer(opcode: Opcode, psn: u32, syndrome: Syndrome) -> Header {
    let mut header = Header::new(opcode, Qpn::new(0x11), Psn::new(psn));
    header.aeth = Aeth { syndrome, msn: 0 };
    header
}

#[test]
fn answers_to_nothing_change_nothing() {
    let mut sim = pair(&small());
    write(&mut sim, 1000);
    sim.drive();
    let before = sim.ends[A].memory.clone();
    let sends = sim.ends[A].sends();
    for opcode in Opcode::ALL.into_iter().filter(|o| o.is_response()) {
        for psn in [0, 3, 4, 5, 1000, 0x7f_ffff, 0x80_0000, 0xff_ffff] {
            for syndrome in [
                Syndrome::Ack(31),
                Syndrome::Nak(0),
                Syndrome::Nak(2),
                Syndrome::RnrNak(1),
                Syndrome::Reserved(0xff),
            ] {
                let payload: &[u8] = if opcode.has_payload() { &[1; 256] } else { &[] };
                sim.ends[A].inject(sim.now, &answer(opcode, psn, syndrome), payload);
            }
        }
    }
    assert!(sim.ends[A].counters.unsolicited > 0);
    assert_eq!(sim.ends[A].sends(), sends);
    assert_eq!(sim.ends[A].qp.state(), QpState::Rts);
    assert_eq!(before.bytes(), sim.ends[A].memory.bytes());
    sim.drive();
    write(&mut sim, 1000);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS; 2], "and it still works");
}

#[test]
fn stale_answers_during_work_change_nothing() {
    let mut sim = pair(&small());
    write(&mut sim, 2560);
    sim.drive();
    read(&mut sim, 2560);
    sim.flush();
    for psn in [0, 5, 9, 20, 21, 500, 0xff_ffff] {
        sim.ends[A].inject(sim.now, &answer(Opcode::Ack, psn, Syndrome::Nak(0)), &[]);
        sim.ends[A].inject(sim.now, &answer(Opcode::Ack, psn, Syndrome::Nak(2)), &[]);
        sim.ends[A].inject(sim.now, &answer(Opcode::ReadResponseMiddle, psn, Syndrome::Ack(31)), &[9; 256]);
        sim.ends[A].inject(sim.now, &answer(Opcode::AtomicAck, psn, Syndrome::Ack(31)), &[]);
    }
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS; 2]);
    assert!(same(&sim, 2560));
}

#[test]
fn an_answer_of_the_wrong_kind_or_length_is_not_taken() {
    let mut sim = pair(&small());
    read(&mut sim, 1000);
    sim.flush();
    for (opcode, len) in [
        (Opcode::ReadResponseFirst, 255),
        (Opcode::ReadResponseFirst, 0),
        (Opcode::ReadResponseOnly, 257),
        (Opcode::AtomicAck, 0),
    ] {
        sim.ends[A].inject(sim.now, &answer(opcode, 0, Syndrome::Ack(31)), &vec![0xee; len]);
    }
    assert_eq!(sim.ends[A].counters.unsolicited, 4);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS]);
    assert!(same(&sim, 1000));
}

#[test]
fn reserved_nak_codes_are_ignored() {
    let mut sim = pair(&small());
    write(&mut sim, 1000);
    sim.flush();
    for code in 5..32 {
        sim.ends[A].inject(sim.now, &answer(Opcode::Ack, 2, Syndrome::Nak(code)), &[]);
    }
    assert_eq!(sim.ends[A].counters.unsolicited, 27);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS]);
}

#[test]
fn old_requests_are_not_carried_out_again() {
    let mut sim = pair(&small());
    sim.ends[B].post_receive(0, 100);
    sim.ends[B].post_receive(0, 100);
    send(&mut sim, 100);
    write(&mut sim, 100);
    add(&mut sim);
    sim.drive();
    let after = sim.ends[B].memory.clone();
    let remote = sim.ends[B].remote(THERE);
    for psn in [0, 1, 2, 0xff_ffff, 0x80_0003] {
        for opcode in Opcode::ALL.into_iter().filter(|o| !o.is_response()) {
            let mut header = Header::new(opcode, sim.ends[B].qpn, Psn::new(psn));
            header.reth.addr = remote.addr;
            header.reth.rkey = remote.rkey;
            header.reth.len = if opcode == Opcode::ReadRequest { 1 } else { 100 };
            header.atomic.addr = remote.addr;
            header.atomic.rkey = remote.rkey;
            header.atomic.swap_or_add = 1;
            let payload: &[u8] = if opcode.has_payload() { &[7; 100] } else { &[] };
            sim.ends[B].inject(sim.now, &header, payload);
        }
    }
    assert_eq!(after.bytes(), sim.ends[B].memory.bytes());
    assert_eq!(sim.ends[B].received().len(), 1);
    assert_eq!(sim.ends[B].memory.receives(), 1);
    assert_eq!(sim.ends[B].memory.atomics(), 1);
    sim.drive();
    send(&mut sim, 100);
    sim.drive();
    assert_eq!(ended(&sim).len(), 4);
    assert_eq!(sim.ends[B].received().len(), 2);
}

#[test]
fn a_flood_of_repeated_reads_does_not_grow_the_queue() {
    let mut sim = pair(&Setup { max_dest_rd_atomic: 4, max_rd_atomic: 4, ..small() });
    for _ in 0..20 {
        read(&mut sim, 300);
    }
    sim.drive();
    let mut rng = Rng::new(5);
    let remote = sim.ends[B].remote(0);
    for _ in 0..10_000 {
        let psn = u32::try_from(rng.below(50)).unwrap();
        let opcode =
            [Opcode::ReadRequest, Opcode::SendOnly, Opcode::FetchAdd][usize::try_from(rng.below(3)).unwrap()];
        let mut header = Header::new(opcode, sim.ends[B].qpn, Psn::new(psn));
        header.reth.addr = remote.addr;
        header.reth.rkey = remote.rkey;
        header.reth.len = 1;
        sim.ends[B].inject(sim.now, &header, &[]);
    }
    let mut answers = 0;
    while sim.ends[B].qp.poll_transmit(sim.now, u64::MAX, true).is_some() {
        answers += 1;
    }
    assert!(answers <= 20, "{answers} answers were kept");
}

#[test]
fn every_state_and_packet_kind() {
    let mut table = String::new();
    for state in [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Error] {
        for opcode in Opcode::ALL.into_iter().filter(|o| o.service() == Service::Rc) {
            let mut qp = Qp::new(QpConfig {
                service: Service::Rc,
                qpn: Qpn::new(1),
                port_mtu: Mtu::Mtu256,
                send_depth: 4,
                signal_all: true,
                responder_resources: 0,
                peer_resources: 0,
            });
            let remote = std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
            let path = [
                QpAttr::to_init(nobounce_protocol::qp::Access::all()),
                QpAttr::to_rtr(remote, Qpn::new(2), Psn::new(0), Mtu::Mtu256),
                QpAttr::to_rts(Psn::new(0)),
                QpAttr::to_state(QpState::Sqd),
            ];
            let steps = match state {
                QpState::Reset | QpState::Error => 0,
                QpState::Init => 1,
                QpState::Rtr => 2,
                QpState::Rts => 3,
                _ => 4,
            };
            for attr in &path[..steps] {
                qp.modify(attr).unwrap();
            }
            if state == QpState::Error {
                qp.modify(&QpAttr::to_state(QpState::Error)).unwrap();
            }
            let mut memory = Memory::new(4096);
            let mut host = Handling { memory: &mut memory, payload: &[] };
            let mut header = Header::new(opcode, Qpn::new(1), Psn::new(0));
            header.ack_req = true;
            let handled = qp.handle_packet(0, &header, 0, &mut host);
            let reply = qp.poll_transmit(0, u64::MAX, true).map_or("silence".to_owned(), |t| {
                match t.header.aeth.syndrome {
                    Syndrome::Ack(_) => format!("{:?}", t.header.opcode),
                    other => format!("{other:?}"),
                }
            });
            let handled = match handled {
                Handled::Taken => "taken",
                Handled::WrongState => "wrong state",
                Handled::Unsolicited => "unsolicited",
                Handled::WrongService => "wrong service",
            };
            let then = if qp.state() == state { String::new() } else { format!(" -> {:?}", qp.state()) };
            table += &format!(
                "{:<6} {:<19} {handled}, {reply}{then}\n",
                format!("{state:?}"),
                format!("{opcode:?}")
            );
        }
    }
    insta::assert_snapshot!("states_and_packets", table);
}

#[test]
fn packets_that_cannot_have_become_one() {
    let mut sim = pair(&small());
    let mut host = Void::default();
    for (opcode, packets, len) in [
        (Opcode::WriteMiddle, 2, 256),
        (Opcode::WriteMiddle, 0, 256),
        (Opcode::WriteMiddle, u32::MAX, 256),
        (Opcode::WriteFirst, 2, 512),
        (Opcode::WriteLast, 2, 512),
        (Opcode::WriteOnly, 2, 512),
        (Opcode::ReadRequest, 2, 0),
        (Opcode::ReadResponseLast, 2, 512),
        (Opcode::Ack, 2, 0),
    ] {
        let header = Header::new(opcode, sim.ends[B].qpn, Psn::new(0));
        let handled = sim.ends[B].qp.handle_run(0, (&header, packets), len, &mut host);
        assert_eq!(handled, Handled::Unsolicited, "{opcode:?} {packets} {len}");
    }
    assert_eq!((host.placed, sim.ends[B].qp.poll_transmit(0, u64::MAX, true)), (0, None));
    // And without saying how many they are, they are one that is too long.
    let header = Header::new(Opcode::WriteMiddle, sim.ends[B].qpn, Psn::new(0));
    sim.ends[B].qp.handle_packet(0, &header, 512, &mut host);
    assert_eq!((host.placed, sim.ends[B].qp.state()), (0, QpState::Error));
}

/// What is sent again may become one with what was not sent before.
#[test]
fn packets_that_became_one_with_some_that_were_taken() {
    let mut sim = pair(&Setup { mtu: Mtu::Mtu256, psn: [0xff_fffe, 0], ..Setup::default() });
    let (end, mut host) = (&mut sim.ends[B], Void::default());
    let at = |n: u32| Psn::new(0xff_fffe).plus(n);
    let mut first = Header::new(Opcode::WriteFirst, end.qpn, at(0));
    first.reth = Reth { addr: 0, rkey: 1, len: 1 << 31 };
    end.qp.handle_packet(0, &first, 256, &mut host);
    let mut come = |from: u32, packets: u32, taken: u32| {
        let header = Header::new(Opcode::WriteMiddle, end.qpn, at(from));
        let len = packets as usize * 256;
        assert_eq!(end.qp.taken_of_run(&header, packets, len), taken, "{packets} from {from} on");
        let rest = Header { psn: header.psn.plus(taken), ..header };
        end.qp.handle_run(0, (&rest, packets - taken), len - taken as usize * 256, &mut host);
        (host.placed / 256, end.qp.counters().duplicate_request, end.qp.counters().out_of_seq_request)
    };
    assert_eq!(come(1, 3, 0), (4, 0, 0));
    assert_eq!(come(2, 6, 2), (8, 0, 0), "two of them had come");
    assert_eq!(come(1, 7, 0), (8, 1, 0), "all of them had");
    assert_eq!(come(9, 2, 0), (8, 1, 1), "one before them has not");
    assert_eq!(come(7, 2, 1), (9, 1, 1), "one is left");
    // Others are not cut.
    let header = Header::new(Opcode::WriteLast, end.qpn, at(7));
    assert_eq!(end.qp.taken_of_run(&header, 4, 1024), 0);
    let header = Header::new(Opcode::WriteMiddle, end.qpn, at(7));
    assert_eq!(end.qp.taken_of_run(&header, 4, 1023), 0);
}

/// A host that has all the memory in the world and keeps none of it.
#[derive(Default)]
struct Void {
    placed: u64,
}

mod void {
    use nobounce_protocol::qp::{Access, Host, LocalFault, Nak, Receive};

    impl Host for super::Void {
        fn check(&mut self, _: u32, _: u64, _: u64, _: Access) -> Result<(), Nak> {
            Ok(())
        }
        fn place_remote(&mut self, _: u32, addr: u64, len: usize, last: bool) -> Result<(), Nak> {
            assert_eq!(addr, self.placed, "in order, without a gap");
            self.placed += len as u64;
            assert_eq!(last, self.placed == 1 << 31);
            Ok(())
        }
        fn take_receive(&mut self) -> Option<Receive> {
            None
        }
        fn place_receive(&mut self, _: u64, _: usize, _: bool) -> Result<(), LocalFault> {
            Err(LocalFault)
        }
        fn place_grh(&mut self) -> Result<(), LocalFault> {
            Err(LocalFault)
        }
        fn place_response(&mut self, _: u64, offset: u64, len: usize, _: bool) -> Result<(), LocalFault> {
            assert_eq!(offset, self.placed);
            self.placed += len as u64;
            Ok(())
        }
        fn place_atomic(&mut self, _: u64, _: u64) -> Result<(), LocalFault> {
            Err(LocalFault)
        }
        fn compare_swap(&mut self, _: u32, _: u64, _: u64, _: u64) -> Result<u64, Nak> {
            Err(Nak::RemoteAccess)
        }
        fn fetch_add(&mut self, _: u32, _: u64, _: u64) -> Result<u64, Nak> {
            Err(Nak::RemoteAccess)
        }
        fn flush(&mut self, _: u32, _: Option<(u64, u64)>) -> Result<(), Nak> {
            Err(Nak::RemoteAccess)
        }
        fn invalidate(&mut self, _: u32) -> Result<(), Nak> {
            Err(Nak::RemoteAccess)
        }
    }
}

#[test]
fn two_to_the_thirty_first_bytes_in_packets_of_256() {
    // 2^23 packets: half of all sequence numbers. Headers are handed over directly, there are no
    // bytes.
    for is_write in [true, false] {
        let mut sim = pair(&Setup { mtu: Mtu::Mtu256, psn: [0x90_0000, 0], ..Setup::default() });
        let mut ends: Vec<Qp> = sim.ends.drain(..).map(|end| end.qp).collect();
        let mut hosts = [Void::default(), Void::default()];
        let remote = nobounce_protocol::qp::Remote { addr: 0, rkey: 1 };
        let op = if is_write { Operation::Write(remote) } else { Operation::Read(remote) };
        let request = nobounce_protocol::qp::WorkRequest {
            wr_id: 1,
            op,
            len: 1 << 31,
            signaled: true,
            solicited: false,
            fence: false,
            xrc_srq: 0,
        };
        ends[A].post(request).unwrap();
        let (mut now, mut packets) = (0, 0_u64);
        loop {
            now += MICROSECOND;
            let mut moved = false;
            for (from, to) in [(A, B), (B, A)] {
                let mut in_flight = 0_u64;
                while let Some(t) = ends[from].poll_transmit(now, u64::MAX, true) {
                    moved = true;
                    packets += 1;
                    in_flight += 1;
                    assert!(in_flight < 1 << 23);
                    let len = usize::try_from(t.payload.len()).unwrap();
                    ends[to].handle_packet(now, &t.header, len, &mut hosts[to]);
                }
            }
            if !moved {
                break;
            }
        }
        let done = ends[A].poll_completion().unwrap();
        assert_eq!((done.wr_id, done.status), (1, SUCCESS));
        assert!(packets > 1 << 23);
        assert_eq!(hosts[usize::from(is_write)].placed, 1 << 31);
    }
}

/// NAKs of a forger: a burst costs nothing as long as the peer's own answers still come.
#[test]
fn a_burst_of_naks_does_not_use_up_the_retries() {
    let mut sim = pair(&small());
    write(&mut sim, 2560);
    sim.drive();
    write(&mut sim, 2560);
    sim.flush();
    for round in 0..1000 {
        let nak = answer(Opcode::Ack, 10, Syndrome::Nak(0));
        sim.ends[A].inject(sim.now + round * 20 * MICROSECOND, &nak, &[]);
    }
    assert!(sim.ends[A].qp.counters().rcvd_seq_err > 7);
    assert_eq!(sim.ends[A].qp.state(), QpState::Rts);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS; 2]);
}

/// A peer that only ever reports the same gap: the connection ends as after silence.
#[test]
fn naks_without_progress_end_the_connection_after_its_timeouts() {
    let mut sim = pair(&small());
    write(&mut sim, 256);
    sim.drive();
    write(&mut sim, 256);
    sim.flush();
    let begun = sim.now;
    let mut now = sim.now;
    while sim.ends[A].qp.state() == QpState::Rts {
        now += MILLISECOND;
        assert!(now < begun + 60_000 * MILLISECOND, "it ends");
        sim.ends[A].inject(now, &answer(Opcode::Ack, 1, Syndrome::Nak(0)), &[]);
    }
    assert!(now > begun + 7 * MILLISECOND, "not by the first few: {}", now - begun);
}
