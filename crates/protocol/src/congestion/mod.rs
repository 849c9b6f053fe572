//! Congestion control of a reliable connection: how many bytes may be in flight, and how far apart
//! packets leave.
//!
//! An algorithm does no IO and has no timers: it learns the time with every call. A queue pair owns
//! one, tells it what happens, and obeys its window and its gap
//! ([`Qp::set_congestion_control`](crate::qp::Qp::set_congestion_control)).

mod aimd;

use std::fmt::Debug;

pub use aimd::Aimd;

use crate::timing::Nanos;

/// What an acknowledgement says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// Payload of full packets that were acknowledged for the first time.
    pub bytes: u64,
    /// Time from the departure of a packet that left once to its acknowledgement.
    pub round_trip: Option<Nanos>,
    /// At least half of the window was in flight.
    pub in_use: bool,
}

/// Packets found lost at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// How many, at least.
    pub packets: u64,
    /// Everything since is sent again (go-back-N).
    pub resends_all: bool,
}

/// Window and pacing of one sender.
pub trait CongestionControl: Debug + Send {
    /// The connection begins, with this path MTU.
    fn begin(&mut self, mtu: u32);

    /// So many payload bytes leave, or are asked for by a READ.
    fn on_sent(&mut self, _now: Nanos, _bytes: u64) {}

    /// Packets were acknowledged.
    fn on_ack(&mut self, now: Nanos, ack: Ack);

    /// The path is congested: a congestion notification, or a marked response, arrived.
    fn on_mark(&mut self, now: Nanos);

    /// Packets were lost. Returns whether the sender slows down: it is then told of no other loss
    /// of the same window.
    fn on_loss(&mut self, now: Nanos, loss: Loss) -> bool;

    /// The peer is silent: a transport timeout, or several probes without an answer.
    fn on_silence(&mut self, _now: Nanos) {}

    /// The peer was only slow: what was taken for lost has arrived, or nothing was lost in a
    /// silence.
    fn on_spurious(&mut self) {}

    /// Packets leave again after a pause of a round trip or more with nothing in flight.
    fn on_restart(&mut self, _now: Nanos) {}

    /// Payload bytes that may be in flight. Less than a packet means one packet at a time.
    fn window(&self) -> u64;

    /// Time from the departure of a packet with so many payload bytes to the next one.
    fn gap(&mut self, _now: Nanos, _bytes: u64) -> Nanos {
        0
    }
}
