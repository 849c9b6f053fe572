//! Rate and window of a sender: the interface of congestion control, and the choice of one.
//!
//! An algorithm has no timers. It learns the time with every call and catches up with what its
//! timers would have done since.

mod dcqcn;
mod fixed;
mod swift;

use std::fmt::Debug;

use serde::Serialize;

pub use dcqcn::{Dcqcn, DcqcnOptions};
pub use fixed::Fixed;
pub use swift::{Swift, SwiftOptions};

use crate::units::Picos;

/// What an algorithm knows of its path at the start.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// Rate of the host's link, in Gb/s.
    pub line_gbits: f64,
    /// Round trip of a full packet through empty queues.
    pub round_trip: Picos,
    /// Payload of a full packet, in bytes.
    pub mtu: f64,
    /// Switches on the way.
    pub switches: u32,
}

/// What an ACK says.
#[derive(Clone, Copy, Debug)]
pub struct Ack {
    /// Payload bytes acknowledged for the first time.
    pub bytes: f64,
    /// Time from the departure of a packet to its ACK, if this ACK was asked for by one packet that
    /// left once.
    pub round_trip: Option<Picos>,
}

/// Rate and window of one sender.
pub trait CongestionControl: Debug {
    /// So many payload bytes left.
    fn on_sent(&mut self, now: Picos, bytes: f64);

    /// The receiver acknowledged packets.
    fn on_ack(&mut self, now: Picos, ack: Ack);

    /// The receiver reports marked packets: a congestion notification packet arrived.
    fn on_congestion_notification(&mut self, now: Picos);

    /// Packets were lost.
    fn on_loss(&mut self, now: Picos);

    /// The application sends again after a pause of a round trip or more.
    fn on_restart(&mut self, _now: Picos) {}

    /// Rate at which packets may leave, in Gb/s.
    fn rate(&mut self, now: Picos) -> f64;

    /// Payload bytes that may be unacknowledged; less than a packet means one packet at a time.
    fn window(&self) -> f64;
}

/// The algorithms to choose from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// None but the loss-driven window of the queue pair.
    Loss,
    /// A constant window in bytes.
    Fixed(u64),
    /// Rate control by congestion notification packets, after DCQCN.
    Dcqcn,
    /// The same with other parameters.
    DcqcnWith(DcqcnOptions),
    /// Window control by delay, after Swift.
    Swift,
    /// The same with other parameters.
    SwiftWith(SwiftOptions),
}

impl Algorithm {
    /// A sender's state at the start.
    pub fn start(self, path: Path) -> Box<dyn CongestionControl> {
        match self {
            Self::Loss => Box::new(Fixed::new(f64::INFINITY, path)),
            Self::Fixed(window) => Box::new(Fixed::new(crate::units::float(window), path)),
            Self::Dcqcn => Box::new(Dcqcn::new(DcqcnOptions::default(), path)),
            Self::DcqcnWith(options) => Box::new(Dcqcn::new(options, path)),
            Self::Swift => Box::new(Swift::new(SwiftOptions::default(), path)),
            Self::SwiftWith(options) => Box::new(Swift::new(options, path)),
        }
    }
}
