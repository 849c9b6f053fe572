//! What is simulated: the fabric, the switches, the queue pairs.

use nobounce_protocol::qp::Mtu;
use serde::Serialize;

use crate::control::Algorithm;
use crate::units::{MICROSECOND, Picos};

/// A leaf-spine fabric. Every leaf has one link to every spine. Without spines there is one leaf.
#[derive(Clone, Debug, Serialize)]
pub struct Fabric {
    /// Hosts in all.
    pub hosts: usize,
    /// Hosts below one leaf.
    pub hosts_per_leaf: usize,
    /// Spine switches; 0 where one leaf connects all hosts.
    pub spines: usize,
    /// Rate of the link of a host, in Gb/s.
    pub host_gbits: f64,
    /// Rate of a link between leaf and spine, in Gb/s.
    pub fabric_gbits: f64,
    /// Propagation delay of every link, one way.
    pub link_delay: Picos,
    /// Time a packet spends in a receiving host before the queue pair sees it.
    pub host_delay: Picos,
    /// What switches do with packets.
    pub switch: Switch,
    /// Random losses of every link, in packets per million.
    pub loss_ppm: u32,
    /// A link between leaf 0 and spine 0 that fails.
    pub failure: Option<Failure>,
}

/// A link fails in both directions. Packets on it and behind it are lost until routing avoids it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Failure {
    /// When it fails.
    pub at: Picos,
    /// When the switches stop using it, after that.
    pub detected_after: Picos,
}

/// Buffer and marking of a switch. Marking is RED on the queue that an arriving packet finds: none
/// below `ecn_min`, `ecn_probability` at `ecn_max`, always above.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Switch {
    /// Bytes that all ports share.
    pub buffer: u64,
    /// Dynamic threshold: a port may use so many times what is free.
    pub alpha: f64,
    /// Whether packets are marked at all.
    pub ecn: bool,
    /// Bytes below which nothing is marked.
    pub ecn_min: u64,
    /// Bytes above which everything is marked.
    pub ecn_max: u64,
    /// Share of packets that is marked at `ecn_max`.
    pub ecn_probability: f64,
}

/// How queue pairs are set up.
#[derive(Clone, Debug, Serialize)]
pub struct Transport {
    /// Path MTU in bytes: payload of a packet.
    pub mtu: u32,
    /// Rate and window of senders.
    pub control: Algorithm,
    /// Whether they retransmit selectively, as between two nobounce devices.
    pub selective: bool,
    /// Queue pairs, each with a source port of its own, that a pair of hosts shares its messages
    /// out to.
    pub ports: usize,
}

/// Everything that a run depends on besides its traffic.
#[derive(Clone, Debug, Serialize)]
pub struct Config {
    /// The network.
    pub fabric: Fabric,
    /// The queue pairs.
    pub transport: Transport,
    /// Seed of hashes, marks, losses and arrivals.
    pub seed: u64,
    /// When the run ends, if the traffic does not end before.
    pub until: Picos,
    /// Time between two samples of queues and goodput.
    pub sample_every: Picos,
}

/// Why a configuration cannot be simulated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Too few hosts for any traffic.
    #[error("a fabric needs 2 hosts or more, not {0}")]
    Hosts(usize),
    /// Hosts of several leaves without spines.
    #[error(
        "{hosts} hosts at {per_leaf} a leaf need spines: set spines to 1 or more, or hosts a leaf to {hosts}"
    )]
    #[allow(missing_docs)]
    NoSpines { hosts: usize, per_leaf: usize },
    /// Not a path MTU of the standard.
    #[error("invalid MTU {0}: expected 256, 512, 1024, 2048 or 4096")]
    Mtu(u32),
    /// A rate of zero or less.
    #[error("invalid rate {0} Gb/s: expected more than 0 and at most 1600")]
    Rate(String),
    /// A share of a link that is negative or no number.
    #[error("invalid load {0}: expected a share of the link, more than 0")]
    Load(String),
    /// The traffic needs more hosts.
    #[error("{senders} senders to one receiver need {} hosts, the fabric has {hosts}", senders + 1)]
    #[allow(missing_docs)]
    Senders { senders: usize, hosts: usize },
    /// The failing link does not exist.
    #[error("a link failure needs 2 spines or more, or nothing is left to reroute to")]
    Failure,
}

impl Fabric {
    /// All hosts below one switch.
    pub fn single_switch(hosts: usize, gbits: f64) -> Self {
        Self {
            hosts,
            hosts_per_leaf: hosts,
            spines: 0,
            host_gbits: gbits,
            fabric_gbits: gbits,
            link_delay: 2 * MICROSECOND + MICROSECOND / 4,
            host_delay: MICROSECOND / 2,
            switch: Switch::for_rate(gbits),
            loss_ppm: 0,
            failure: None,
        }
    }

    /// A non-blocking fabric: as many spines as hosts below a leaf.
    pub fn leaf_spine(hosts: usize, hosts_per_leaf: usize, gbits: f64) -> Self {
        Self {
            hosts_per_leaf,
            spines: hosts_per_leaf,
            link_delay: MICROSECOND,
            ..Self::single_switch(hosts, gbits)
        }
    }

    /// Leaf switches.
    pub fn leaves(&self) -> usize {
        self.hosts.div_ceil(self.hosts_per_leaf.max(1))
    }

    /// Propagation and processing of a round trip over so many switches, without serialisation.
    pub fn round_trip(&self, switches: u32) -> Picos {
        2 * (u64::from(switches + 1) * self.link_delay + self.host_delay)
    }
}

impl Switch {
    /// 16 MB; marks from 50 KB on and all from 200 KB on at 100 Gb/s, in proportion at other rates.
    pub fn for_rate(gbits: f64) -> Self {
        let bytes = |at_100: f64| crate::units::whole(at_100 * gbits / 100.0);
        Self {
            buffer: 16_000_000,
            alpha: 8.0,
            ecn: true,
            ecn_min: bytes(50_000.0),
            ecn_max: bytes(200_000.0),
            ecn_probability: 0.1,
        }
    }
}

impl Default for Transport {
    fn default() -> Self {
        Self { mtu: 4096, control: Algorithm::Aimd, selective: true, ports: 1 }
    }
}

impl Config {
    /// Of a fabric, with defaults for the rest.
    pub fn new(fabric: Fabric, until: Picos) -> Self {
        Self { fabric, transport: Transport::default(), seed: 1, until, sample_every: (until / 500).max(1) }
    }

    /// Checks it.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn check(&self) -> Result<(), ConfigError> {
        let fabric = &self.fabric;
        if fabric.hosts < 2 {
            return Err(ConfigError::Hosts(fabric.hosts));
        }
        if fabric.hosts_per_leaf == 0 || (fabric.spines == 0 && fabric.leaves() > 1) {
            let per_leaf = fabric.hosts_per_leaf;
            return Err(ConfigError::NoSpines { hosts: fabric.hosts, per_leaf });
        }
        if Mtu::from_bytes(self.transport.mtu).is_none() {
            return Err(ConfigError::Mtu(self.transport.mtu));
        }
        for rate in [fabric.host_gbits, fabric.fabric_gbits] {
            if !(rate > 0.0 && rate <= 1_600.0) {
                return Err(ConfigError::Rate(rate.to_string()));
            }
        }
        if fabric.failure.is_some() && fabric.spines < 2 {
            return Err(ConfigError::Failure);
        }
        Ok(())
    }
}
