//! Moving messages allocates nothing: counted over a run that is warm, with everything that the
//! process does.
//!
//! A test of its own, because the allocator counts for the whole process.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use nobounce_nic::soft::{Config, LinkChoice, Progress};
use nobounce_nic::work::{Mtu, Operation, QpLimits, RecvRequest, SendRequest, Sge, Status, WorkCompletion};

use crate::common::{End, config, connect};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does everything; only a number is counted besides.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const ROUNDS: usize = 300;
const LONG: u32 = 64 << 10;

/// A short SEND with its bytes, a long SEND, a WRITE from two places, and a READ, each waited for.
fn round(a: &End, b: &End, got: &mut Vec<WorkCompletion>) {
    let there: [Sge; 1] = b.sge(0, LONG);
    let long = a.sge(0, LONG);
    let two = [a.sge(0, LONG / 2)[0], a.sge(LONG.into(), LONG / 2)[0]];
    let requests = [
        SendRequest::inline(1, Operation::Send, &[7; 48]),
        SendRequest::new(2, Operation::Send, &long),
        SendRequest::new(3, Operation::Write(b.remote(0)), &two),
        SendRequest::new(4, Operation::Read(b.remote(0)), &long),
    ];
    for request in &requests {
        if matches!(request.op, Operation::Send) {
            b.qps[0].post_recv(&RecvRequest { wr_id: 9, sges: &there }).unwrap();
        }
        a.qps[0].post_send(request).unwrap();
        got.clear();
        let wanted = 1 + usize::from(matches!(request.op, Operation::Send));
        while got.len() < wanted {
            a.cq.poll(got, 4).unwrap();
            b.cq.poll(got, 4).unwrap();
        }
        assert!(got.iter().all(|one| one.status == Status::Success), "{got:?}");
    }
}

#[test]
fn messages_move_without_allocations() {
    // SAFETY: the only test of its program, and no other thread runs yet. Without a runtime
    // directory no live counters are formatted, four times a second.
    unsafe { std::env::set_var("XDG_RUNTIME_DIR", "/nonexistent") };
    for (number, link) in [LinkChoice::Udp, LinkChoice::Auto].into_iter().enumerate() {
        for (mode, progress) in [Progress::Caller, Progress::Thread].into_iter().enumerate() {
            let at = |end: usize| Config {
                link,
                progress,
                ..config(&format!("127.97.{}.{}", 2 * number + mode, end + 1))
            };
            let (mut a, mut b) = (End::open(&at(0), 1 << 20), End::open(&at(0), 1 << 20));
            a.add_qp(QpLimits::default());
            b.add_qp(QpLimits::default());
            connect(&a, 0, &b, 0, Mtu::Mtu4096);
            let mut got = Vec::with_capacity(16);
            (0..ROUNDS).for_each(|_| round(&a, &b, &mut got));
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            (0..ROUNDS).for_each(|_| round(&a, &b, &mut got));
            let count = ALLOCATIONS.load(Ordering::Relaxed) - before;
            // A queue may still grow once, and a packet behind a lost one is held in memory of its
            // own; four messages of some 50 packets a round would be 15,000.
            assert!(count < ROUNDS / 2, "{count} allocations in {ROUNDS} rounds, {link:?}, {progress:?}");
        }
    }
}
