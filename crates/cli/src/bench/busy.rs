//! Background load: processes that spin during the measurement, at normal priority.

use std::io::Read;
use std::process::{Child, Command, Stdio};

use anyhow::Context;

/// The hidden subcommand that runs [`spin`].
pub(crate) const SUBCOMMAND: &str = "bench-neighbour";

/// So many processes that spin until this is dropped.
#[derive(Debug)]
pub(super) struct Neighbours(Vec<Child>);

impl Neighbours {
    pub(super) fn start(count: u32) -> anyhow::Result<Self> {
        let myself = std::env::current_exe().context("cannot find the path of the nobounce program")?;
        let mut all = Self(Vec::new());
        for _ in 0..count {
            let mut command = Command::new(&myself);
            let child = command.arg(SUBCOMMAND).stdin(Stdio::piped()).spawn();
            all.0.push(child.context("cannot start a busy-looping process")?);
        }
        Ok(all)
    }
}

impl Drop for Neighbours {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill(); // it may have ended by itself
            let _ = child.wait();
        }
    }
}

/// A load process: spins until end of file on its standard input, which any end of the bench
/// causes.
pub(crate) fn spin() -> anyhow::Result<()> {
    let watcher = std::thread::spawn(|| {
        let mut nothing = [0];
        while matches!(std::io::stdin().read(&mut nothing), Ok(n) if n > 0) {}
    });
    let mut count = 0_u64;
    while !watcher.is_finished() {
        // Work between two looks, as of a program that computes.
        for _ in 0..100_000 {
            count = std::hint::black_box(count.wrapping_add(1));
        }
    }
    Ok(())
}

/// CPU seconds of this process so far.
pub(crate) fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to one live timespec, which the call fills.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    #[allow(clippy::cast_precision_loss)] // nanoseconds of a run fit
    let seconds = time.tv_sec as f64 + time.tv_nsec as f64 / 1e9;
    seconds
}
