//! A READ of one byte is a flush, as NCCL uses it: when it has completed, a kernel sees all that
//! was written before.

use std::time::{Duration, Instant};

use nobounce_nic::work::{Mtu, Operation, Psn, QpAttr, QpLimits, RecvRequest, SendRequest};

use crate::common::pair;
use crate::rig::{self, GpuMethod, Kind, Memory, Rig};

const LEN: usize = 1 << 20;
/// A long message, some short ones, and one of a few packets.
const PIECES: [(usize, usize); 5] =
    [(0, 600_000), (600_000, 8), (600_008, 40), (600_048, 4096), (604_144, 20_000)];
const TOTAL: usize = 624_144;
const ROUNDS: u64 = 150;

/// The sender's READ, on the queue pair of its WRITEs, which are unsignalled.
#[test]
fn by_the_sender() {
    let Some(rig) = Rig::new("flush::by_the_sender") else { return };
    for (n, way) in GpuMethod::ALL.into_iter().enumerate() {
        let (a, b) = pair(&format!("127.85.41.{}", n + 1), 4096, Mtu::Mtu4096);
        let (from, to) = (Memory::new(&rig, Kind::Buffer, LEN), Memory::new(&rig, Kind::Malloc, LEN));
        let (at_a, at_b) = (rig::register(&a, &from, way), rig::register(&b, &to, way));
        for round in 0..ROUNDS {
            rig.fill(from.addr, TOTAL, round << 40);
            for (at, len) in PIECES {
                let write = Operation::Write(rig::remote(&at_b, at));
                let from = rig::sge(&at_a, at, len);
                let unsignaled = SendRequest { signaled: false, ..SendRequest::new(1, write, &from) };
                a.qps[0].post_send(&unsignaled).unwrap();
            }
            let read = Operation::Read(rig::remote(&at_b, 0));
            a.qps[0].post_send(&SendRequest::new(2, read, &a.sge(0, 1))).unwrap();
            rig::succeed(&a, 1);
            rig.check(to.addr, TOTAL, round << 40, &format!("{way:?}, round {round}"));
        }
    }
}

/// The receiver's READ of its own memory, on a queue pair that is connected to itself, after the
/// immediate of the last WRITE.
#[test]
fn by_the_receiver() {
    let Some(rig) = Rig::new("flush::by_the_receiver") else { return };
    for (n, way) in GpuMethod::ALL.into_iter().enumerate() {
        let (a, mut b) = pair(&format!("127.85.42.{}", n + 1), 4096, Mtu::Mtu4096);
        b.add_qp(QpLimits::default());
        let (own, psn) = (&b.qps[1], Psn::new(0x1234));
        own.modify(&QpAttr::to_rtr(b.device.local(), own.qpn(), psn, Mtu::Mtu4096)).unwrap();
        own.modify(&QpAttr::to_rts(psn)).unwrap();
        let (from, to) = (Memory::new(&rig, Kind::Malloc, LEN), Memory::new(&rig, Kind::Buffer, LEN));
        let (at_a, at_b) = (rig::register(&a, &from, way), rig::register(&b, &to, way));
        let mut times: Vec<Duration> = Vec::new();
        for round in 0..ROUNDS {
            rig.fill(from.addr, TOTAL, round << 40);
            b.qps[0].post_recv(&RecvRequest { wr_id: 5, sges: &[] }).unwrap();
            for (i, (at, len)) in PIECES.into_iter().enumerate() {
                let write = if i + 1 == PIECES.len() {
                    Operation::WriteImmediate(rig::remote(&at_b, at), round as u32)
                } else {
                    Operation::Write(rig::remote(&at_b, at))
                };
                a.qps[0].post_send(&SendRequest::new(1, write, &rig::sge(&at_a, at, len))).unwrap();
            }
            let received = rig::completions(&b, 1);
            assert_eq!(received[0].immediate, Some(round as u32), "{received:?}");
            let begin = Instant::now();
            let read = Operation::Read(rig::remote(&at_b, 0));
            b.qps[1].post_send(&SendRequest::new(2, read, &b.sge(0, 1))).unwrap();
            rig::succeed(&b, 1);
            times.push(begin.elapsed());
            rig.check(to.addr, TOTAL, round << 40, &format!("{way:?}, round {round}"));
            rig::succeed(&a, PIECES.len());
        }
        times.sort();
        println!(
            "figure: flush by a READ of one byte of our own memory, {way:?}: median {:.1?}",
            times[times.len() / 2]
        );
    }
}
