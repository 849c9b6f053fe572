//! Several registrations of one memory, and objects that are dropped in any order.

use nobounce_nic::soft::Mr;
use nobounce_nic::work::{Mtu, Operation, SendRequest, Status};

use crate::common::{End, pair, reconnect};
use crate::rig::{self, GpuMethod, Kind, Memory, Rig};

const LEN: usize = 2 << 20;

#[track_caller]
fn write(a: &End, at_a: &Mr, at_b: &Mr, (from, to, len): (usize, usize, usize)) {
    let op = Operation::Write(rig::remote(at_b, to));
    a.qps[0].post_send(&SendRequest::new(1, op, &rig::sge(at_a, from, len))).unwrap();
    rig::succeed(a, 1);
}

/// Each is a region of its own, whatever the others are and whichever goes first.
#[test]
fn of_the_same_memory() {
    let Some(rig) = Rig::new("registrations::of_the_same_memory") else { return };
    for (n, kind) in [Kind::Buffer, Kind::Malloc].into_iter().enumerate() {
        let (a, b) = pair(&format!("127.85.91.{}", n + 1), 4096, Mtu::Mtu4096);
        let (from, to) = (Memory::new(&rig, kind, LEN), Memory::new(&rig, kind, LEN));
        let at_a = rig::register(&a, &from, GpuMethod::Direct);
        let ways = [GpuMethod::Direct, GpuMethod::Direct, GpuMethod::Staged, GpuMethod::WindowOff];
        let mut regions: Vec<Mr> = ways.map(|way| rig::register(&b, &to, way)).into();
        for seed in 1..=4_u64 {
            rig.fill(from.addr, LEN, seed << 40);
            // Parts of one message each, side by side, through all that are left.
            let part = LEN / regions.len() / 8 * 8;
            for (i, at_b) in regions.iter().enumerate() {
                write(&a, &at_a, at_b, (i * part, i * part, part));
            }
            rig.check(to.addr, part * regions.len(), seed << 40, &format!("{kind:?}, round {seed}"));
            // What one has stored through its window, another reads by the copy engine.
            for reader in &regions {
                let back = Memory::new(&rig, kind, LEN);
                let at_back = rig::register(&a, &back, GpuMethod::Direct);
                write(&a, &at_a, &regions[0], (0, 0, LEN));
                let read = Operation::Read(rig::remote(reader, 0));
                a.qps[0].post_send(&SendRequest::new(2, read, &rig::sge(&at_back, 0, LEN))).unwrap();
                rig::succeed(&a, 1);
                rig.check(back.addr, LEN, seed << 40, &format!("{kind:?}, round {seed}, read back"));
            }
            // The first, the last, the middle.
            let index = [0, regions.len() - 1, regions.len() / 2, 0][seed as usize - 1];
            drop(regions.remove(index));
        }
    }
}

/// The region goes while the peer writes into it: refused from then on, and never crashed.
#[test]
fn dropped_under_traffic() {
    let Some(rig) = Rig::new("registrations::dropped_under_traffic") else { return };
    let (a, b) = pair("127.85.92.1", 4096, Mtu::Mtu4096);
    for way in GpuMethod::ALL {
        for local in [false, true] {
            let (from, to) = (Memory::new(&rig, Kind::Malloc, LEN), Memory::new(&rig, Kind::Malloc, LEN));
            let (at_a, at_b) = (rig::register(&a, &from, way), rig::register(&b, &to, way));
            let op = Operation::Write(rig::remote(&at_b, 0));
            let sges = rig::sge(&at_a, 0, LEN);
            for _ in 0..32 {
                a.qps[0].post_send(&SendRequest::new(1, op, &sges)).unwrap();
            }
            rig::succeed(&a, 2);
            let (gone, kept) = if local { (at_a, at_b) } else { (at_b, at_a) };
            drop(gone);
            // Freed at once, as a program may after it has deregistered.
            let (mut freed, _other) = if local { (from, to) } else { (to, from) };
            freed.free().unwrap();
            let statuses: Vec<_> = rig::completions(&a, 30).iter().map(|done| done.status).collect();
            let good = statuses.iter().take_while(|status| **status == Status::Success).count();
            println!(
                "figure: {way:?}, deregistered {} under 30 WRITEs: {good} went well, then {:?}",
                if local { "the source" } else { "the target" },
                statuses.get(good)
            );
            assert!(good < 30, "{way:?}");
            let expected: &[Status] = if local {
                &[Status::LocalProtection]
            } else {
                &[Status::RemoteAccess, Status::RemoteOperation]
            };
            assert!(expected.contains(&statuses[good]), "{way:?}, {local}: {statuses:?}");
            assert!(statuses[good + 1..].iter().all(|status| *status == Status::Flushed), "{statuses:?}");
            reconnect(&a, &b, Mtu::Mtu4096);
            drop(kept);
        }
    }
    crate::freed::goes_on(&rig, &a, &b);
}

/// Regions before and after their queue pairs, their domain and their device.
#[test]
fn dropped_in_any_order() {
    let Some(rig) = Rig::new("registrations::dropped_in_any_order") else { return };
    let (from, to) = (Memory::new(&rig, Kind::Malloc, LEN), Memory::new(&rig, Kind::Buffer, LEN));
    for round in 0..24_u64 {
        let way = GpuMethod::ALL[round as usize % 3];
        let (a, b) = pair(&format!("127.85.93.{}", round + 1), 4096, Mtu::Mtu4096);
        let (at_a, at_b) = (rig::register(&a, &from, way), rig::register(&b, &to, way));
        rig.fill(from.addr, LEN, round << 40);
        write(&a, &at_a, &at_b, (0, 0, LEN));
        rig.check(to.addr, LEN, round << 40, &format!("round {round}"));
        // Half of the time with a message in flight.
        if round % 2 == 0 {
            let op = Operation::Write(rig::remote(&at_b, 0));
            a.qps[0].post_send(&SendRequest::new(1, op, &rig::sge(&at_a, 0, LEN))).unwrap();
        }
        let End { qps, cq, mr, buffer, pd, device, .. } = b;
        match round / 2 % 4 {
            0 => drop((at_b, qps, cq, mr, pd, device, buffer, at_a, a)),
            1 => drop((a, qps, at_b, at_a, cq, pd, mr, device, buffer)),
            2 => drop((device, pd, cq, qps, mr, a, at_a, at_b, buffer)),
            _ => drop((at_a, at_b, device, mr, buffer, pd, a, qps, cq)),
        }
    }
}
