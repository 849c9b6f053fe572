//! Atomics through the window are atomic among each other, across all threads of this host. (They
//! are not against the GPU's own.)

use std::sync::Barrier;

use crate::stage::{Count, Shows, Stage, judge};

const THREADS: usize = 2;
const EACH: u64 = 100_000;

#[test]
fn no_fetch_add_is_lost() {
    let Some(stage) = Stage::without_kernels() else { return };
    let kept = race(&stage, |stage| {
        stage.window().fetch_add(0, 1).unwrap();
    });
    let swapped = race(&stage, |stage| {
        let mut seen = stage.window().load_u64(0).unwrap();
        loop {
            let found = stage.window().compare_swap(0, seen, seen + 1).unwrap();
            if found == seen {
                return;
            }
            seen = found;
        }
    });
    assert_eq!(swapped.violations, 0, "compare and swap lost updates: {swapped}");
    let bare = race(&stage, |stage| {
        let seen = stage.window().load_u64(0).unwrap();
        stage.window().store_u64(0, seen + 1).unwrap();
        stage.window().complete().unwrap();
    });
    judge("additions lost by atomics", kept, &[("no lock", Shows::Known, bare)]);
}

/// Adds 1 from two threads at once; what is missing in the end was lost.
fn race(stage: &Stage, add: impl Fn(&Stage) + Sync) -> Count {
    stage.window().store_u64(0, 0).unwrap();
    stage.window().read_back().unwrap();
    let together = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                together.wait();
                (0..EACH).for_each(|_| add(stage));
            });
        }
    });
    let rounds = THREADS as u64 * EACH;
    Count { rounds, violations: rounds.saturating_sub(stage.window().load_u64(0).unwrap()) }
}
