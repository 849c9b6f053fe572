//! The congestion control of a sender: that of the protocol crate, or one to compare it with.

mod dcqcn;
mod fixed;
mod swift;

use nobounce_protocol::congestion::{Aimd, CongestionControl};
use nobounce_protocol::timing::Nanos;
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

/// The algorithms to choose from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// That of queue pairs: a window by losses and marks.
    Aimd,
    /// A constant window in bytes.
    Fixed(u64),
    /// Rate control by congestion notification packets, after DCQCN.
    Dcqcn,
    /// The same with other parameters.
    DcqcnWith(DcqcnOptions),
    /// Window control by delay, after Swift.
    Swift,
}

impl Algorithm {
    /// A sender's state at the start.
    pub fn start(self, path: Path) -> Box<dyn CongestionControl> {
        match self {
            Self::Aimd => Box::new(Aimd::default()),
            Self::Fixed(window) => Box::new(Fixed::new(window)),
            Self::Dcqcn => Box::new(Dcqcn::new(DcqcnOptions::default(), path)),
            Self::DcqcnWith(options) => Box::new(Dcqcn::new(options, path)),
            Self::Swift => Box::new(Swift::new(SwiftOptions::default(), path)),
        }
    }
}

/// Time that so many bytes take at a rate in Gb/s.
fn gap_of(bytes: u64, gbits: f64) -> Nanos {
    crate::units::whole(crate::units::float(bytes) * 8.0 / gbits)
}

/// Most bytes in flight of a sender that is controlled by a rate.
const RATE_WINDOW: u64 = 128 << 10;
