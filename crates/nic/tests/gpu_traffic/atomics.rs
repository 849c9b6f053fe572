//! Atomics on GPU memory: none is lost, whichever queue pair it came by.

use std::collections::HashSet;
use std::time::Instant;

use nobounce_nic::work::{Mtu, Operation, QpLimits, SendRequest, Status};

use crate::common::{End, config, connect};
use crate::rig::{self, GpuMethod, Kind, Memory, Rig};

const QPS: usize = 4;
const EACH: usize = 1000;
/// On the stand-in, whose copies wait for a CPU.
const EACH_OF_STAND_IN: usize = 50;
/// Posted at a time on one queue pair.
const DEPTH: usize = 50;
const OFFSET: usize = 4096 + 8;
const FIRST: u64 = u64::MAX - 100;
const ADD: u64 = 0x1_0000_0003;

fn ends(addr: &str) -> (End, End) {
    let (mut a, mut b) = (End::open(&config(addr), 64 << 10), End::open(&config(addr), 4096));
    for i in 0..QPS {
        a.add_qp(QpLimits::default());
        b.add_qp(QpLimits::default());
        connect(&a, i, &b, i, Mtu::Mtu4096);
    }
    (a, b)
}

fn word(memory: &Memory) -> u64 {
    u64::from_ne_bytes(memory.get(OFFSET, 8).try_into().unwrap())
}

fn set(memory: &Memory, value: u64) {
    let mut bytes = memory.get(0, 8192);
    bytes[OFFSET..OFFSET + 8].copy_from_slice(&value.to_ne_bytes());
    memory.put(&bytes);
}

fn kinds() -> [(Kind, GpuMethod); 5] {
    [
        (Kind::Buffer, GpuMethod::Direct),
        (Kind::Malloc, GpuMethod::Direct),
        (Kind::Pool, GpuMethod::Direct),
        (Kind::Malloc, GpuMethod::Staged),
        (Kind::Buffer, GpuMethod::WindowOff),
    ]
}

#[test]
fn no_fetch_add_is_lost() {
    let Some(rig) = Rig::new("atomics::no_fetch_add_is_lost") else { return };
    let each = if rig.is_stand_in() { EACH_OF_STAND_IN } else { EACH };
    for (n, (kind, way)) in kinds().into_iter().enumerate() {
        let (a, b) = ends(&format!("127.85.51.{}", n + 1));
        let memory = Memory::new(&rig, kind, 1 << 20);
        let at_b = rig::register(&b, &memory, way);
        set(&memory, FIRST);
        let mut before = HashSet::new();
        let begin = Instant::now();
        for _ in 0..each / DEPTH {
            for i in 0..DEPTH * QPS {
                let add = Operation::FetchAdd { remote: rig::remote(&at_b, OFFSET), add: ADD };
                let to = a.sge(i as u64 * 8, 8);
                a.qps[i % QPS].post_send(&SendRequest::new(i as u64, add, &to)).unwrap();
            }
            rig::succeed(&a, DEPTH * QPS);
            let answers = a.bytes(0, DEPTH * QPS * 8);
            before.extend(answers.chunks(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())));
        }
        let took = begin.elapsed();
        let count = (QPS * each) as u64;
        println!(
            "figure: {count} fetch-and-adds by {QPS} queue pairs, {kind:?}, {way:?}: {:.2?} each",
            took / count as u32
        );
        assert_eq!(word(&memory), FIRST.wrapping_add(ADD.wrapping_mul(count)), "{kind:?}, {way:?}");
        let expected: HashSet<u64> = (0..count).map(|i| FIRST.wrapping_add(ADD.wrapping_mul(i))).collect();
        assert!(before == expected, "{kind:?}, {way:?}: {} different answers", before.len());
    }
}

#[test]
fn compare_and_swap() {
    let Some(rig) = Rig::new("atomics::compare_and_swap") else { return };
    for (n, (kind, way)) in kinds().into_iter().enumerate() {
        let (a, b) = ends(&format!("127.85.52.{}", n + 1));
        let (memory, answers) = (Memory::new(&rig, kind, 1 << 20), Memory::new(&rig, kind, 1 << 20));
        let (at_b, at_a) = (rig::register(&b, &memory, way), rig::register(&a, &answers, way));
        set(&memory, 40);
        let swap =
            |compare, swap| Operation::CompareSwap { remote: rig::remote(&at_b, OFFSET), compare, swap };
        let add = Operation::FetchAdd { remote: rig::remote(&at_b, OFFSET), add: 2 };
        for (op, old, new) in
            [(swap(41, 1), 40, 40), (swap(40, 7), 40, 7), (add, 7, 9), (swap(9, u64::MAX), 9, u64::MAX)]
        {
            a.qps[0].post_send(&SendRequest::new(1, op, &rig::sge(&at_a, OFFSET, 8))).unwrap();
            rig::succeed(&a, 1);
            assert_eq!((word(&answers), word(&memory)), (old, new), "{kind:?}, {way:?}, {op:?}");
        }
        // One lock, four who want it: exactly one gets it.
        set(&memory, 0);
        for (i, qp) in a.qps.iter().enumerate() {
            let to = a.sge(i as u64 * 8, 8);
            qp.post_send(&SendRequest::new(1, swap(0, i as u64 + 1), &to)).unwrap();
        }
        rig::succeed(&a, QPS);
        let found: Vec<u64> =
            a.bytes(0, QPS * 8).chunks(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
        let winner = word(&memory);
        assert!((1..=QPS as u64).contains(&winner), "{winner}");
        for (i, &old) in found.iter().enumerate() {
            assert_eq!(old, if i as u64 + 1 == winner { 0 } else { winner }, "{found:?}");
        }
        // Not a word: refused.
        let odd = Operation::FetchAdd { remote: rig::remote(&at_b, OFFSET + 4), add: 1 };
        a.qps[0].post_send(&SendRequest::new(1, odd, &a.sge(0, 8))).unwrap();
        assert_ne!(rig::status(&a), Status::Success);
        assert_eq!(word(&memory), winner);
    }
}
