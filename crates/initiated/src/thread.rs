//! The thread of a proxy.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::peer::PROBE_EVERY;
use crate::proxy::{Proxy, Report, Turn};

/// Tells kernels when the thread ends, however it does.
struct Ending(Proxy);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Sleeps until there is a descriptor, or until ranks are to be probed. No kernel can wake a thread.
fn rest(proxy: &Proxy, asked: &AtomicBool) {
    proxy.pause();
    let (until, mut sleep) = (Instant::now() + PROBE_EVERY, MIN_SLEEP);
    while !asked.load(Ordering::Relaxed) && !proxy.has_descriptors() && Instant::now() < until {
        std::thread::sleep(sleep);
        sleep = (sleep * 2).min(MAX_SLEEP);
    }
}

/// The thread of a proxy. Dropping it stops the thread.
#[derive(Debug)]
pub struct ProxyThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    reports: Arc<Mutex<VecDeque<Report>>>,
}

/// Sleeps of an idle thread. The first descriptor after a pause waits for the end of one: at most 2 ms.
const MIN_SLEEP: Duration = Duration::from_micros(20);
const MAX_SLEEP: Duration = Duration::from_micros(1700);

/// How long a thread that is to end goes on with what kernels have asked for.
const DRAIN: Duration = Duration::from_secs(1);

/// How long the thread spins after the last descriptor: as long as a sleep may delay the next one.
const SPIN: Duration = MAX_SLEEP;

impl ProxyThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(proxy: Proxy) -> std::io::Result<Self> {
        let (stop, reports) = (Arc::<AtomicBool>::default(), proxy.reports());
        let asked = stop.clone();
        let mut ending = Ending(proxy);
        let run = move || {
            let Ending(proxy) = &mut ending;
            let (mut last, mut ends) = (Instant::now(), None);
            loop {
                let is_asked = asked.load(Ordering::Relaxed);
                if is_asked && Instant::now() > *ends.get_or_insert_with(|| Instant::now() + DRAIN) {
                    return;
                }
                match proxy.turn() {
                    // All that kernels have asked for is complete.
                    Ok(Turn::Idle) if is_asked => return,
                    Ok(Turn::Busy) => last = Instant::now(),
                    Ok(_) if last.elapsed() < SPIN => std::hint::spin_loop(),
                    // Completions, or on their way what they wait for, come soon.
                    Ok(Turn::Waiting) => std::thread::yield_now(),
                    Ok(Turn::Idle) => rest(proxy, &asked),
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
