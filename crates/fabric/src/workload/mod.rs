//! Traffic: who sends what to whom, and when.

mod all_to_all;
mod incast;
mod kv;
mod permutation;
mod ring;

use serde::Serialize;

use crate::config::{Config, ConfigError};
use crate::network::{Network, Notice};
use crate::units::Picos;

/// What hosts send.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Workload {
    /// Hosts 1 to `senders` send to host 0 until the run ends. Each also sends it short messages on
    /// a queue pair of its own, at random times.
    Incast {
        /// Number of senders.
        senders: usize,
        /// Bytes of a long message; 0 leaves the short ones alone.
        message: u32,
        /// Bytes of a short message.
        short: u32,
        /// Load of the short messages on the receiver's link, as a share of it.
        short_load: f64,
    },
    /// Every host sends to one other host, and receives from one, until the run ends.
    Permutation {
        /// Bytes of a message.
        message: u32,
    },
    /// Every host sends so many bytes to every other host.
    AllToAll {
        /// Bytes for each pair.
        bytes: u32,
        /// Peers that a host sends to at a time.
        concurrent: usize,
    },
    /// Ring all-reduce: twice n - 1 steps, in each of which every host sends an n-th of the data to
    /// its successor.
    RingAllReduce {
        /// Bytes of data on each host.
        bytes: u64,
        /// Whether neighbours are chosen at random instead of by number.
        shuffled: bool,
    },
    /// The first half of the hosts fetches blocks from the other half, at random times: a request
    /// of 64 bytes, and a block of 16 KiB (50 %), 128 KiB (40 %) or 1 MiB (10 %).
    Kv {
        /// Load of the blocks on the links of those that fetch, as a share of them.
        load: f64,
    },
}

/// Traffic on a network.
pub(crate) trait Traffic {
    /// The run begins.
    fn start(&mut self, network: &mut Network);

    /// Something happened.
    fn handle(&mut self, network: &mut Network, notice: Notice);

    /// When all was done, for traffic that ends by itself.
    fn finished(&self) -> Option<Picos> {
        None
    }

    /// Whether it ends by itself.
    fn ends(&self) -> bool {
        false
    }

    /// What each participant got, in any unit, for Jain's index.
    fn shares(&self, network: &Network) -> Vec<f64>;

    /// Gb/s that the receiving links carry at most, all together.
    fn capacity(&self, config: &Config) -> f64;
}

impl Workload {
    /// A short name.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Incast { .. } => "incast",
            Self::Permutation { .. } => "permutation",
            Self::AllToAll { .. } => "all-to-all",
            Self::RingAllReduce { .. } => "ring all-reduce",
            Self::Kv { .. } => "KV",
        }
    }

    pub(crate) fn traffic(&self, config: &Config) -> Result<Box<dyn Traffic>, ConfigError> {
        let hosts = config.fabric.hosts;
        let load = match *self {
            // No short messages at all are fine.
            Self::Incast { short_load, .. } if short_load != 0.0 => short_load,
            Self::Kv { load } => load,
            _ => 1.0,
        };
        if !(load > 0.0 && load.is_finite()) {
            return Err(ConfigError::Load(load.to_string()));
        }
        Ok(match *self {
            Self::Incast { senders, message, short, short_load } => {
                if senders >= hosts {
                    return Err(ConfigError::Senders { senders, hosts });
                }
                Box::new(incast::Incast::new(senders, message, short, short_load))
            }
            Self::Permutation { message } => Box::new(permutation::Permutation::new(message)),
            Self::AllToAll { bytes, concurrent } => {
                Box::new(all_to_all::AllToAll::new(hosts, bytes, concurrent))
            }
            Self::RingAllReduce { bytes, shuffled } => Box::new(ring::Ring::new(hosts, bytes, shuffled)),
            Self::Kv { load } => Box::new(kv::Kv::new(hosts, load)),
        })
    }
}

/// Time to the next of events that happen at random with this mean distance.
pub(crate) fn exponential(network: &mut Network, mean: f64) -> Picos {
    let uniform = crate::units::float(network.rng.below(1 << 53) + 1) / crate::units::float(1 << 53);
    crate::units::whole(-uniform.ln() * mean)
}

/// The numbers below `count` in random order.
pub(crate) fn shuffled(network: &mut Network, count: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..crate::units::index(count)).collect();
    for last in (1..order.len()).rev() {
        let other = usize::try_from(network.rng.below(last as u64 + 1)).unwrap_or(0);
        order.swap(last, other);
    }
    order
}
