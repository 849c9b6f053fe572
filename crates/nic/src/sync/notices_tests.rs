//! Notices and the kernel's own counter; `tests/loom.rs` has the same file with a counter of its
//! own.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::sync::notices::Notices;

const KEPT: u32 = 1;
const GOING: u32 = 2;
const LAST: u32 = 3;

fn read_blocking(notices: &Notices<u32>) {
    let mut count = [0_u8; 8];
    // SAFETY: 8 writable bytes.
    assert_eq!(unsafe { libc::read(notices.counter_fd(), count.as_mut_ptr().cast(), 8) }, 8);
}

#[test]
fn readers_that_block_get_every_notice_that_is_not_forgotten() {
    const READERS: usize = 3;
    const ROUNDS: usize = 5000;
    let notices = Notices::new().unwrap();
    let kept = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..READERS {
            scope.spawn(|| {
                loop {
                    read_blocking(&notices);
                    match notices.claim() {
                        Some(KEPT) => _ = kept.fetch_add(1, Ordering::Relaxed),
                        Some(LAST) => return,
                        // Of one that goes, or forgotten while we were reading.
                        _ => {}
                    }
                }
            });
        }
        for round in 0..ROUNDS {
            notices.push(GOING, usize::MAX);
            notices.push(KEPT, usize::MAX);
            if round % 3 == 0 {
                notices.forget(|notice| *notice == GOING);
            }
        }
        (0..READERS).for_each(|_| notices.push(LAST, usize::MAX));
    });
    assert_eq!(kept.into_inner(), ROUNDS);
    assert!(!notices.take_all() && !notices.counter.is_raised(), "nothing is left, and nothing is announced");
}

#[test]
fn the_oldest_makes_room() {
    let notices = Notices::new().unwrap();
    (0..5).for_each(|notice| notices.push(notice, 3));
    let all: Vec<u32> = std::iter::from_fn(|| notices.next()).collect();
    assert_eq!(all, [2, 3, 4]);
    assert!(!notices.counter.is_raised());
}
