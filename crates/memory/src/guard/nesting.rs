//! Tracks which threads are chaining a signal at the moment, and how often it has come back.
//!
//! A handler that chains to us, installed below us, would recurse with us forever. So each entry
//! for one fault is counted, and each further entry goes to an older handler. Plain statics instead
//! of thread-locals, whose first use may allocate.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Threads that can be in a chained handler at once and be tracked; further ones chain uncounted.
const SLOTS: usize = 64;

struct NestingSlot {
    /// Thread and signal, 0 if free. Only the claimant of the slot touches the rest.
    owner: AtomicU64,
    frame: AtomicUsize,
    context: AtomicUsize,
    level: AtomicUsize,
}

static TABLE: [NestingSlot; SLOTS] = [const {
    NestingSlot {
        owner: AtomicU64::new(0),
        frame: AtomicUsize::new(0),
        context: AtomicUsize::new(0),
        level: AtomicUsize::new(0),
    }
}; SLOTS];

/// One visit of the handler.
pub(super) struct Visit {
    pub(super) level: usize,
    slot: Option<&'static NestingSlot>,
    /// Previous contents of the slot: frame, context, level.
    outer: Option<(usize, usize, usize)>,
}

/// Enters the handler. `frame` is an address in its stack frame, `context` identifies the
/// interrupted state. `sent` says that the signal was raised by a program and not by a fault.
///
/// An entry is nested if it lies deeper in the stack and has the same interrupted state, or was
/// raised from within. A handler left by `siglongjmp` leaves its slot behind. A new fault then has
/// another state or the same depth, and starts a new count.
pub(super) fn enter(thread: u32, signal: u32, frame: usize, context: usize, sent: bool) -> Visit {
    let owner = u64::from(thread) << 32 | u64::from(signal);
    let Some((slot, claimed)) = find(owner) else { return Visit { level: 0, slot: None, outer: None } };
    let held = (
        slot.frame.load(Ordering::Relaxed),
        slot.context.load(Ordering::Relaxed),
        slot.level.load(Ordering::Relaxed),
    );
    let inside = !claimed && frame < held.0 && (context == held.1 || sent);
    let (level, outer) = if inside { (held.2 + 1, Some(held)) } else { (0, None) };
    slot.frame.store(frame, Ordering::Relaxed);
    slot.context.store(context, Ordering::Relaxed);
    slot.level.store(level, Ordering::Relaxed);
    Visit { level, slot: Some(slot), outer }
}

impl Visit {
    /// Leaves the handler.
    pub(super) fn leave(self) {
        let Some(slot) = self.slot else { return };
        if let Some((frame, context, level)) = self.outer {
            slot.frame.store(frame, Ordering::Relaxed);
            slot.context.store(context, Ordering::Relaxed);
            slot.level.store(level, Ordering::Relaxed);
        } else {
            slot.owner.store(0, Ordering::Release);
        }
    }
}

/// The slot of this owner; true if it was free until now.
fn find(owner: u64) -> Option<(&'static NestingSlot, bool)> {
    if let Some(slot) = TABLE.iter().find(|slot| slot.owner.load(Ordering::Acquire) == owner) {
        return Some((slot, false));
    }
    TABLE
        .iter()
        .find(|slot| slot.owner.compare_exchange(0, owner, Ordering::AcqRel, Ordering::Relaxed).is_ok())
        .map(|slot| (slot, true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visits_inside_a_visit_go_up_and_leave_in_order() {
        let (thread, signal) = (u32::MAX, 11);
        let outer = enter(thread, signal, 1000, 7, false);
        let inner = enter(thread, signal, 900, 7, false);
        let raised = enter(thread, signal, 800, 8, true);
        assert_eq!((outer.level, inner.level, raised.level), (0, 1, 2));
        let other = enter(thread - 1, signal, 700, 7, false);
        assert_eq!(other.level, 0);
        other.leave();
        raised.leave();
        inner.leave();
        let again = enter(thread, signal, 900, 7, false);
        assert_eq!(again.level, 1);
        again.leave();
        outer.leave();
        let fresh = enter(thread, signal, 900, 7, false);
        assert_eq!(fresh.level, 0);
        fresh.leave();
    }

    #[test]
    fn a_visit_left_by_a_jump_does_not_count() {
        let (thread, signal) = (u32::MAX - 2, 11);
        let _left_by_jump = enter(thread, signal, 1000, 7, false);
        let same_depth = enter(thread, signal, 1000, 7, false);
        assert_eq!(same_depth.level, 0);
        let other_state = enter(thread, signal, 500, 8, false);
        assert_eq!(other_state.level, 0);
        other_state.leave();
    }
}
