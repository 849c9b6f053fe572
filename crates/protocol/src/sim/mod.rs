//! Endpoints and a network on a virtual clock: what the tests, the fuzz targets and the throughput
//! table run on.
//!
//! ```text
//!   endpoint 0 --\                    /-- endpoint 1      even endpoints send through pipe 0,
//!   endpoint 2 ----  pipe 0 / pipe 1  ---- endpoint 3     odd ones through pipe 1;
//!   endpoint 4 --/                    \-- endpoint 5      0-1, 2-3, 4-5 are connected
//! ```
//! Packets really become bytes, with an ICRC, and are parsed again. Time stands still while packets
//! are handled and then jumps to the next arrival or timer, so a second costs nothing; the same
//! seed gives the same run.

mod endpoint;
pub mod fuzzing;
mod management;
mod memory;
mod network;
pub mod plan;

mod trace;
pub mod unreliable;

pub use crate::rng::Rng;
pub use endpoint::{Endpoint, EndpointCounters, Setup, encode};
pub use memory::{Handling, Memory, Region};
pub use network::{Conditions, Fate, Pipe, PipeCounters, Script, WIRE_OVERHEAD};

use crate::timing::Nanos;

/// The first endpoint.
pub const A: usize = 0;
/// Its peer.
pub const B: usize = 1;

/// Steps after which [`Sim::drive`] gives up: no scenario needs as many, a livelock needs more.
const MANY_STEPS: u64 = 20_000_000;

/// A simulated world.
#[derive(Debug)]
pub struct Sim {
    /// The time.
    pub now: Nanos,
    /// Both ends of every connection.
    pub ends: Vec<Endpoint>,
    /// From even to odd endpoints, and back.
    pub pipes: [Pipe; 2],
    trace: Option<Vec<String>>,
}

impl Sim {
    /// One connection over a network that loses nothing.
    pub fn new(setup: &Setup) -> Self {
        Self::with(setup, Conditions::default(), 1)
    }

    /// One connection over a network like this, in both directions.
    pub fn with(setup: &Setup, conditions: Conditions, seed: u64) -> Self {
        Self::many(1, setup, conditions, seed)
    }

    /// Several connections that share one network.
    pub fn many(connections: usize, setup: &Setup, conditions: Conditions, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let ends = (0..2 * connections).map(|i| Endpoint::connected(i, setup, i % 2)).collect();
        let pipes = [Pipe::new(conditions, rng.next()), Pipe::new(conditions, rng.next())];
        Self { now: 0, ends, pipes, trace: None }
    }

    /// Starts to note every packet; see [`Sim::trace`].
    pub fn start_trace(&mut self) {
        self.trace = Some(Vec::new());
    }

    /// The packets sent since [`Sim::start_trace`], one line each.
    pub fn trace(&self) -> String {
        self.trace.as_deref().unwrap_or_default().join("\n")
    }

    /// Sends all that may be sent now.
    pub fn flush(&mut self) {
        for index in 0..self.ends.len() {
            self.flush_one(index);
        }
    }

    fn flush_one(&mut self, index: usize) {
        let end = &mut self.ends[index];
        while let Some((header, ip_id, bytes)) = end.next_packet(self.now) {
            let line = self.trace.is_some().then(|| trace::line(self.now, index, &header, &bytes));
            let fate = self.pipes[end.pipe].send(self.now, index, &header, ip_id, bytes);
            if let (Some(lines), Some(line)) = (&mut self.trace, line) {
                lines.push(if fate.is_empty() { line } else { format!("{line} ({fate})") });
            }
        }
        end.collect();
    }

    /// When something will happen next.
    pub fn next_event(&self) -> Option<Nanos> {
        let arrivals = self.pipes.iter().filter_map(Pipe::next_arrival);
        let timers = self.ends.iter().filter_map(|end| end.qp.poll_timeout());
        arrivals.chain(timers).min()
    }

    /// Sends what may be sent, then lets the next thing happen. False if nothing will ever happen.
    pub fn step(&mut self) -> bool {
        self.flush();
        let Some(at) = self.next_event() else { return false };
        self.now = self.now.max(at);
        for pipe in 0..self.pipes.len() {
            while let Some(flying) = self.pipes[pipe].receive(self.now) {
                let to = flying.from ^ 1;
                self.ends[to].receive(self.now, flying.ip_id, &flying.bytes);
                self.flush_one(to);
            }
        }
        for index in 0..self.ends.len() {
            let end = &mut self.ends[index];
            if end.qp.poll_timeout().is_some_and(|at| at <= self.now) {
                end.qp.handle_timeout(self.now);
                end.collect();
                self.flush_one(index);
            }
        }
        true
    }

    /// Lets everything happen until nothing is left to happen.
    ///
    /// # Panics
    /// It does not end.
    pub fn drive(&mut self) {
        assert!(self.drive_bounded(MANY_STEPS), "still busy after {MANY_STEPS} steps: {self:#?}");
    }

    /// As [`Sim::drive`], but says whether it ended within so many steps.
    pub fn drive_bounded(&mut self, steps: u64) -> bool {
        (0..steps).any(|_| !self.step())
    }

    /// Lets everything happen that happens within `time`.
    pub fn drive_for(&mut self, time: Nanos) {
        let end = self.now + time;
        self.flush();
        while self.next_event().is_some_and(|at| at <= end) {
            self.step();
        }
        self.now = end;
    }

    /// Lets things happen until `done` says so. False if nothing is left to happen before.
    pub fn drive_until(&mut self, mut done: impl FnMut(&Self) -> bool) -> bool {
        for _ in 0..MANY_STEPS {
            if done(self) {
                return true;
            }
            if !self.step() {
                return done(self);
            }
        }
        false
    }
}
