//! Taking completions, and not waiting forever.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use nobounce::nic::soft::Device;
use nobounce::nic::work::WorkCompletion;
use nobounce::{Connection, Status, WaitError, WorkKind};

/// A timed part in which nothing moves for so long is over.
const STALLED: Duration = Duration::from_secs(30);

/// A longer gap between two polls means that this process itself was stopped.
const QUIET: Duration = Duration::from_secs(5);

/// Looks that find nothing before it is noted when that began.
const FEW: u32 = 1 << 10;

/// Stall detector: bounds a wait by checking now and then whether anything still moves.
pub(super) struct Watch<'a> {
    connection: &'a Connection,
    since: Instant,
    polled: Instant,
    polls: u32,
}

impl<'a> Watch<'a> {
    pub(super) fn new(connection: &'a Connection) -> Self {
        Self { connection, since: Instant::now(), polled: Instant::now(), polls: 0 }
    }

    pub(super) fn moved(&mut self) {
        self.polls = 0;
    }

    pub(super) fn check(&mut self) -> anyhow::Result<()> {
        self.polls += 1;
        // Not at the first poll: most waits end after a few, and each would read the clock.
        if self.polls == FEW {
            self.since = Instant::now();
        }
        if self.polls.is_multiple_of(1 << 14) {
            // This process was stopped (Ctrl-Z, SIGSTOP): the gap does not count as waiting.
            if self.polls > 1 << 14 && self.polled.elapsed() > QUIET {
                self.since = Instant::now();
            }
            self.polled = Instant::now();
            ensure!(!self.connection.is_peer_gone(), "the bench peer is gone");
            check_device(self.connection)?;
            ensure!(
                self.since.elapsed() < STALLED,
                "no progress for {} s; counters: {:?}; link: {:?}",
                STALLED.as_secs(),
                self.connection.device().nic().soft().map(Device::counters),
                self.connection.device().nic().link_counters()
            );
        }
        Ok(())
    }

    /// Polls completions into `got`; fails when any of them failed.
    pub(super) fn poll(&mut self, got: &mut Vec<WorkCompletion>) -> anyhow::Result<usize> {
        got.clear();
        let count = self.connection.cq().poll(got, 64)?;
        if count == 0 {
            self.check()?;
            return Ok(0);
        }
        self.moved();
        if let Some(failed) = got.iter().find(|completion| completion.status != Status::Success) {
            // What is flushed is the consequence of something else.
            let gone = failed.status == Status::Flushed && self.connection.is_peer_gone();
            ensure!(!gone, "the bench peer is gone");
            let nic = self.connection.device().nic();
            ensure!(
                !nic.examine().port_down,
                "the port of {} is down; check the cable and the interface",
                nic.name()
            );
            ensure!(!self.connection.is_device_gone(), "{} is gone", nic.name());
            let doubt =
                (failed.status == Status::RetryExceeded).then(|| self.connection.doubt_gid()).flatten();
            let doubt = doubt.map_or(String::new(), |doubt| format!(": no answer, and {doubt}"));
            bail!("a {:?} on queue pair {} ended in {:?}{doubt}", failed.kind, failed.qpn, failed.status);
        }
        Ok(count)
    }
}

/// Looks whether our own device is well.
pub(super) fn check_device(connection: &Connection) -> anyhow::Result<()> {
    // Requests are raw, so the connection does not know how many are in flight.
    match connection.check_device() {
        Err(WaitError::PortLost { device, .. }) => {
            bail!("the port of {device} is down; check the cable and the interface")
        }
        Err(WaitError::DeviceGone { device, .. }) => {
            bail!("{device} is gone: its driver was unloaded, or it was unplugged")
        }
        checked => checked?,
    }
    Ok(())
}

pub(super) fn is_receive(completion: &WorkCompletion) -> bool {
    matches!(completion.kind, WorkKind::Receive | WorkKind::ReceiveWriteImmediate)
}
