//! Every operation between two devices over real sockets.
#![allow(clippy::cast_possible_truncation)] // small constants

use crate::common::{End, MIB, pair, pattern};
use nobounce_nic::work::{Mtu, Operation, Status, WorkKind};
use nobounce_protocol::wire::Feth;

fn ok(end: &End) {
    for completion in end.completions(1) {
        assert_eq!(completion.status, Status::Success, "{completion:?}");
    }
}

#[test]
fn write_and_read_every_mtu_and_size() {
    for (n, mtu) in Mtu::ALL.into_iter().enumerate() {
        let (a, b) = pair(&format!("127.40.0.{}", n + 1), 2 * MIB, mtu);
        let m = mtu.bytes() as usize;
        for (round, len) in [0, 1, 3, m - 1, m, m + 1, 10 * m + 5, MIB].into_iter().enumerate() {
            a.fill(round as u8);
            b.fill(0xee);
            a.post(Operation::Write(b.remote(100)), 5, len as u32);
            ok(&a);
            let expected: Vec<u8> = (0..len).map(|i| pattern(round as u8, i + 5)).collect();
            assert!(b.bytes(100, len) == expected, "{mtu:?} {len}");
            assert_eq!(b.bytes(99, 1)[0], pattern(0xee, 99));
            assert_eq!(b.bytes(100 + len, 1)[0], pattern(0xee, 100 + len));
            a.fill(0x55);
            a.post(Operation::Read(b.remote(100)), 64, len as u32);
            ok(&a);
            assert!(a.bytes(64, len) == expected, "{mtu:?} {len}");
            assert_eq!(a.bytes(64 + len, 1)[0], pattern(0x55, 64 + len));
        }
        assert_eq!(a.device.counters().icrc_errors + b.device.counters().icrc_errors, 0);
    }
}

#[test]
fn send_with_and_without_immediate() {
    let (a, b) = pair("127.40.1.1", MIB, Mtu::Mtu1024);
    a.fill(3);
    for (op, imm) in [(Operation::Send, None), (Operation::SendImmediate(0xdead_beef), Some(0xdead_beef))] {
        b.post_recv(42, 1000, 5000);
        a.post(op, 0, 4321);
        ok(&a);
        let got = b.completions(1)[0];
        assert_eq!((got.wr_id, got.status, got.kind), (42, Status::Success, WorkKind::Receive));
        assert_eq!((got.byte_len, got.immediate), (4321, imm));
        assert!(b.bytes(1000, 4321) == (0..4321).map(|i| pattern(3, i)).collect::<Vec<_>>());
    }
    b.post_recv(43, 0, 0);
    a.post(Operation::WriteImmediate(b.remote(9000), 17), 0, 3000);
    ok(&a);
    let got = b.completions(1)[0];
    assert_eq!((got.wr_id, got.kind, got.byte_len), (43, WorkKind::ReceiveWriteImmediate, 3000));
    assert_eq!(got.immediate, Some(17));
}

#[test]
fn atomics_return_the_value_before() {
    let (a, b) = pair("127.40.2.1", MIB, Mtu::Mtu1024);
    b.buffer.write_at(64, &100_u64.to_ne_bytes()).unwrap();
    for i in 0..10_u64 {
        a.post(Operation::FetchAdd { remote: b.remote(64), add: 5 }, 8, 8);
        ok(&a);
        assert_eq!(a.bytes(8, 8), (100 + 5 * i).to_ne_bytes());
    }
    a.post(Operation::CompareSwap { remote: b.remote(64), compare: 150, swap: 7 }, 8, 8);
    ok(&a);
    assert_eq!(a.bytes(8, 8), 150_u64.to_ne_bytes());
    assert_eq!(b.bytes(64, 8), 7_u64.to_ne_bytes());
    a.post(Operation::CompareSwap { remote: b.remote(64), compare: 150, swap: 9 }, 8, 8);
    ok(&a);
    assert_eq!(b.bytes(64, 8), 7_u64.to_ne_bytes(), "a failed comparison changes nothing");
}

#[test]
fn atomic_writes_and_flushes_complete_in_order() {
    let (a, b) = pair("127.40.5.1", MIB, Mtu::Mtu1024);
    for i in 0..50_u64 {
        a.buffer.write_at(8, &(i * 3).to_ne_bytes()).unwrap();
        a.post(Operation::AtomicWrite(b.remote(64)), 8, 8);
        ok(&a);
        assert_eq!(b.bytes(64, 8), (i * 3).to_ne_bytes());
    }
    a.fill(4);
    for selectivity in [0, 1] {
        a.post(Operation::Write(b.remote(4096)), 0, 9000);
        a.post(
            Operation::Flush {
                remote: b.remote(4096),
                len: 9000,
                feth: Feth::new(Feth::GLOBAL, selectivity),
            },
            0,
            0,
        );
        a.post(Operation::AtomicWrite(b.remote(64)), 16, 8);
        let done = a.completions(3);
        let kinds: Vec<_> = done.iter().map(|c| (c.kind, c.status)).collect();
        let expected = [WorkKind::Write, WorkKind::Flush, WorkKind::AtomicWrite];
        assert_eq!(kinds, expected.map(|kind| (kind, Status::Success)));
        assert!(b.bytes(4096, 9000) == a.bytes(0, 9000) && b.bytes(64, 8) == a.bytes(16, 8));
    }
    // Words only, and only where they lie whole.
    a.post(Operation::AtomicWrite(b.remote(68)), 8, 8);
    assert_eq!(a.completions(1)[0].status, Status::RemoteInvalidRequest);
}

#[test]
fn ipv6_works_too() {
    let (a, b) = pair("::1", MIB, Mtu::Mtu4096);
    a.fill(9);
    a.post(Operation::Write(b.remote(0)), 0, 500_000);
    ok(&a);
    assert!(b.bytes(0, 500_000) == (0..500_000).map(|i| pattern(9, i)).collect::<Vec<_>>());
}

#[test]
fn both_directions_at_once_and_many_requests() {
    let (a, b) = pair("127.40.3.1", 4 * MIB, Mtu::Mtu4096);
    a.fill(1);
    b.fill(2);
    let piece = 100_000;
    for i in 0..10_u64 {
        a.post(Operation::Write(b.remote(2 * MIB as u64 + i * piece)), i * piece, piece as u32);
        b.post(Operation::Write(a.remote(2 * MIB as u64 + i * piece)), i * piece, piece as u32);
    }
    assert!(a.completions(10).iter().all(|c| c.status == Status::Success));
    assert!(b.completions(10).iter().all(|c| c.status == Status::Success));
    let total = 10 * piece as usize;
    assert!(b.bytes(2 * MIB, total) == (0..total).map(|i| pattern(1, i)).collect::<Vec<_>>());
    assert!(a.bytes(2 * MIB, total) == (0..total).map(|i| pattern(2, i)).collect::<Vec<_>>());
}
