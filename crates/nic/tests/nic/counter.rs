//! Memory that changes while it is read: legal in RDMA, and no packet may be damaged by it.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{LIMIT, StopAtEnd, pair};
use nobounce_nic::work::{Mtu, Operation, QpState, SendRequest, Status};

const READS: usize = 1_000_000;
/// Bytes of each READ: the counter eight times, so that a packet whose bytes are read twice would
/// show.
const LEN: usize = 64;
const DEPTH: usize = 64;

#[test]
fn alone_a_counter_that_never_stands_still_is_read_a_million_times() {
    let (a, b) = pair("127.55.0.1", 64 << 10, Mtu::Mtu1024);
    let stop = AtomicBool::new(false);
    // SAFETY: the window is used by the thread below only, which ends before the buffer does.
    let window = unsafe { b.buffer.window() };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for value in 0_u64.. {
                for word in 0..LEN / 8 {
                    window.store_u64(word * 8, value).unwrap();
                }
                if stop.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        let _stop = StopAtEnd(&stop);
        read_on(&a, &b);
    });
    assert_eq!((a.counter("icrc_errors"), b.counter("icrc_errors")), (0, 0));
    assert_eq!((a.counter("icrc_solved"), b.counter("icrc_solved")), (0, 0));
    assert_eq!((a.qps[0].state(), b.qps[0].state()), (QpState::Rts, QpState::Rts));
    println!("{:?}", a.device.counters());
}

/// Keeps `DEPTH` READs in flight. Each has a place of its own, checked when it is complete and
/// before it is reused.
fn read_on(a: &crate::common::End, b: &crate::common::End) {
    let start = std::time::Instant::now();
    let (mut posted, mut done, mut last, mut moved) = (0, 0, 0_u64, 0_u64);
    let mut got = Vec::new();
    while done < READS {
        while posted < READS && posted - done < DEPTH {
            let sge = a.sge((posted % DEPTH * LEN) as u64, LEN as u32);
            let request = SendRequest::new(posted as u64, Operation::Read(b.remote(0)), &sge);
            a.qps[0].post_send(&request).unwrap();
            posted += 1;
        }
        // On two CPUs there is no room for a third busy thread: this one drives both ends.
        assert_eq!(b.cq.poll(&mut got, 1), Ok(0));
        got.clear();
        a.cq.poll(&mut got, DEPTH).unwrap();
        for completion in &got {
            assert_eq!((completion.status, completion.wr_id), (Status::Success, done as u64));
            let bytes = a.bytes(done % DEPTH * LEN, LEN);
            let words: Vec<u64> =
                bytes.chunks_exact(8).map(|w| u64::from_ne_bytes(w.try_into().unwrap())).collect();
            // The writer goes through the words in order, and every word is written whole: none can
            // run ahead of the first as read before.
            assert!(words[0] >= last && words.iter().all(|word| *word + 1 >= last), "{words:?} after {last}");
            moved += u64::from(words[0] != last);
            last = words[0];
            done += 1;
        }
        assert!(start.elapsed() < 6 * LIMIT, "{done} of {READS} READs");
    }
    // Few where the writer has no CPU of its own.
    assert!(moved > READS as u64 / 10_000, "the counter stood still: it changed {moved} times");
    println!(
        "{READS} READs in {:?}; the counter had moved {moved} times and stood at {last}",
        start.elapsed()
    );
}
