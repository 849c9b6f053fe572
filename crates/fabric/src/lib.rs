//! Leaf-spine fabrics on a virtual clock.
//!
//! The queue pairs are those of `nobounce-protocol`, the ones that the NIC runs. Hosts, links and
//! switches around them are simulated: rates, delays, shared buffers, ECN marks, ECMP, losses and a
//! link failure. Payload has a length and no bytes. A run depends on its configuration and seed
//! alone.
//!
//! [`run`] takes a [`Config`] and a [`Workload`] and returns a [`Report`].
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! report               what a run showed
//! workload             traffic
//! network              hosts and events
//! end  links  messages queue pairs; queues and buffers
//! topology  packet     the shape of the fabric
//! config               what is simulated
//! control              rate and window of senders
//! units  stats  queue  numbers; the event queue
//! ```
//!
//! | room | what |
//! |---|---|
//! | [`units`], [`stats`], `queue` | time, rates and distributions; a calendar queue of events |
//! | [`control`] | congestion control of a sender: the protocol crate's, or one to compare it with |
//! | [`config`] | fabric, switches, queue pairs |
//! | `topology`, `packet` | links and the route along them; headers and lengths |
//! | `end`, `links`, `messages` | one end of a connection, shared buffers, messages under way |
//! | `network` | hosts and connections, driven by events |
//! | `workload`, `report` | what hosts send, and what a run showed |
#![forbid(unsafe_code)]

pub mod config;
pub mod control;
mod end;
mod links;
mod messages;
mod network;
mod packet;
mod queue;
mod report;
pub mod stats;
mod topology;
pub mod units;
mod workload;

pub use config::{Config, ConfigError, Fabric, Failure, Switch, Transport};
pub use control::Algorithm;
pub use network::Sample;
pub use report::{ClassLatency, DeepestQueue, PacketCounts, Report};
pub use workload::Workload;

use network::Network;

/// Simulates traffic on a fabric.
///
/// # Errors
/// The configuration makes no sense; see [`ConfigError`].
pub fn run(config: Config, workload: &Workload) -> Result<Report, ConfigError> {
    config.check()?;
    let mut traffic = workload.traffic(&config)?;
    let mut network = Network::new(config);
    traffic.start(&mut network);
    while traffic.finished().is_none() && network.step() {
        while let Some(notice) = network.poll_notice() {
            traffic.handle(&mut network, notice);
        }
    }
    let time = traffic.finished().unwrap_or_else(|| network.now());
    network.finish();
    Ok(Report::of(workload, traffic.as_ref(), &network, time))
}
