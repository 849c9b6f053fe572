//! An idle device costs nothing: its threads are not woken while there is no traffic.

use std::time::Duration;

use nobounce_nic::soft::{Config, Progress};
use nobounce_nic::work::{Mtu, Operation, QpLimits};

use crate::common::{End, config, connect};

/// Observation time: `IDLE_SECONDS`, or less than a second.
fn idle_for() -> Duration {
    let seconds = std::env::var("IDLE_SECONDS").ok().and_then(|text| text.parse().ok());
    seconds.map_or(Duration::from_millis(500), Duration::from_secs)
}

/// How often the engine threads of this process have been on a CPU, and for how many nanoseconds.
pub(crate) fn engine_threads() -> (u64, u64) {
    let mut sum = (0, 0);
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let folder = task.unwrap().path();
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        if !read("comm").starts_with("nobounce") {
            continue;
        }
        let fields: Vec<u64> = read("schedstat").split_whitespace().map(|n| n.parse().unwrap()).collect();
        if let [ran, _, times] = fields[..] {
            sum = (sum.0 + times, sum.1 + ran);
        }
    }
    sum
}

/// Wake-ups of the engine threads and their nanoseconds of CPU within one window.
fn window() -> (u64, u64) {
    let before = engine_threads();
    std::thread::sleep(idle_for());
    let after = engine_threads();
    (after.0 - before.0, after.1 - before.1)
}

#[test]
fn an_idle_device_is_left_asleep() {
    for (number, progress) in [Progress::Thread, Progress::Caller].into_iter().enumerate() {
        let at = Config { progress, ..config(&format!("127.97.9.{}", number + 1)) };
        let (mut a, mut b) = (End::open(&at, 4096), End::open(&at, 4096));
        a.add_qp(QpLimits::default());
        b.add_qp(QpLimits::default());
        connect(&a, 0, &b, 0, Mtu::Mtu1024);
        for _ in 0..100 {
            a.post(Operation::Write(b.remote(0)), 0, 64);
            a.succeed(1);
        }
        // The first windows may hold the last spins, the last publication of counters and, in
        // `caller` mode, the time until the thread knows that the application does not poll.
        let mut windows = vec![window()];
        while windows.len() < 5 && windows.last() != Some(&(0, 0)) {
            windows.push(window());
        }
        println!("{progress:?}: (wake-ups, ns of CPU) {windows:?} in {:?} each", idle_for());
        assert_eq!(windows.last(), Some(&(0, 0)), "{progress:?}: {windows:?} in {:?} each", idle_for());
    }
}
