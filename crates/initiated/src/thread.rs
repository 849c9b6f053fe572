//! The thread of a proxy.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::proxy::{PROBE_EVERY, Proxy, Report, Turn};

/// Tells kernels when the thread ends, however it does.
struct Ending(Proxy);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Sleeps until there is a descriptor, or until ranks are to be probed. No kernel can wake a
/// thread.
fn rest(proxy: &Proxy, stopping: &AtomicBool) {
    proxy.pause();
    let until = Instant::now() + PROBE_EVERY;
    while !stopping.load(Ordering::Relaxed) && !proxy.has_descriptors() && Instant::now() < until {
        std::thread::sleep(SLEEP);
    }
}

/// The thread of a proxy. Dropping it stops the thread.
#[derive(Debug)]
pub struct ProxyThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    reports: Arc<Mutex<VecDeque<Report>>>,
}

/// Interval at which an idle thread polls the rings. A wake-up takes 11 to 14 us of CPU time in
/// virtual machines, and the first descriptor after a pause waits for one: 1 % of a CPU, at most
/// 2 ms.
const SLEEP: Duration = Duration::from_micros(1700);

/// How long the thread spins after the last descriptor: as long as a sleep may delay the next one.
const SPIN: Duration = SLEEP;

/// Bound on the time that a proxy which is stopped takes to carry out posted descriptors.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

impl ProxyThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(proxy: Proxy) -> std::io::Result<Self> {
        let (stop, reports) = (Arc::<AtomicBool>::default(), proxy.reports());
        let stopping = stop.clone();
        let mut ending = Ending(proxy);
        let run = move || {
            let Ending(proxy) = &mut ending;
            let (mut last, mut ends) = (Instant::now(), None);
            loop {
                let is_stopping = stopping.load(Ordering::Relaxed);
                if is_stopping && Instant::now() > *ends.get_or_insert_with(|| Instant::now() + DRAIN_TIMEOUT)
                {
                    return;
                }
                match proxy.turn() {
                    // All posted descriptors are complete.
                    Ok(Turn::Idle) if is_stopping => return,
                    Ok(Turn::Busy) => last = Instant::now(),
                    Ok(_) if last.elapsed() < SPIN => std::hint::spin_loop(),
                    // A completion comes soon.
                    Ok(Turn::Waiting) => std::thread::yield_now(),
                    Ok(Turn::Idle) => rest(proxy, &stopping),
                    Err(error) => {
                        tracing::error!(%error, "the proxy of GPU-initiated operations ends");
                        return;
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("nobounce-proxy".into()).spawn(run)?;
        Ok(Self { stop, thread: Some(thread), reports })
    }

    /// Whether it has ended by itself, after an error.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Refused and failed descriptors so far.
    #[must_use]
    pub fn reports(&self) -> Vec<Report> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

impl Drop for ProxyThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there was reported
        }
    }
}
