//! Two threads, as those that drive the engine: one stores a message, the other is notified and
//! continues.
//!
//! One thread alone would hide a missing fence: its next step (a launch, a copy, a lock) flushes
//! its own stores.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::sequences;
use crate::stage::{ROUND, play};

/// Stops the storing thread.
const END: u64 = u64::MAX;

/// A word on lines of its own.
#[repr(align(128))]
struct Word(AtomicU64);

impl Word {
    /// Release and acquire are plain moves on x86_64, without a lock prefix: they order ordinary
    /// memory, but not stores through a write-combining window.
    fn set(&self, value: u64) {
        self.0.store(value, Ordering::Release);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// Words shared by the two threads.
struct Relay {
    /// The round to store; requested when the previous one is over.
    asked: Word,
    /// The stored round, the only notification to the other thread.
    told: Word,
}

/// Ends the storing thread however this scope is left.
struct Ending<'a>(&'a Relay);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.asked.set(END);
    }
}

/// Plays rounds: `store` stores the message of a round on a thread of its own, which then only
/// polls for the next one; `go_on` follows on this thread. Returns the number of rounds.
pub(crate) fn play_relay(most: u64, store: impl FnMut(u64) + Send, mut go_on: impl FnMut(u64)) -> u64 {
    let relay = Relay { asked: Word(AtomicU64::new(0)), told: Word(AtomicU64::new(0)) };
    std::thread::scope(|scope| {
        scope.spawn(|| relay.store_rounds(store));
        let _ending = Ending(&relay);
        play(most, |i| {
            relay.asked.set(i);
            relay.wait_until_told(i);
            go_on(i);
        })
    })
}

impl Relay {
    fn store_rounds(&self, mut store: impl FnMut(u64)) {
        for i in 1.. {
            // Neither a system call nor a locked instruction, which would drive the stores out.
            while self.asked.get() < i {
                spin_loop();
            }
            // The previous round is over. Stores still in flight must not count as this round's.
            sequences::sfence();
            if self.asked.get() == END {
                return;
            }
            store(i);
            self.told.set(i);
        }
    }

    fn wait_until_told(&self, i: u64) {
        let started = Instant::now();
        let mut looks = 0u32;
        while self.told.get() != i {
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(1 << 16) {
                assert!(
                    started.elapsed() < ROUND,
                    "round {i}: the storing thread stands at {}",
                    self.told.get()
                );
            }
            spin_loop();
        }
    }
}

/// A relay that lost a round, or announced one too early, would blame the machine.
#[test]
fn rounds_are_stored_before_they_are_told() {
    let stored = AtomicU64::new(0);
    let mut seen = 0;
    let rounds = play_relay(
        1000,
        |i| stored.store(i, Ordering::Relaxed),
        |i| {
            assert_eq!(stored.load(Ordering::Relaxed), i);
            seen += 1;
        },
    );
    assert_eq!(rounds, seen);
    assert!(rounds > 0);
}

#[test]
fn storing_thread_ends_with_a_panic() {
    let give_up = |i| {
        if i == 5 {
            std::panic::resume_unwind(Box::new("on purpose"));
        }
    };
    assert!(std::panic::catch_unwind(|| play_relay(10, |_| {}, give_up)).is_err());
}
