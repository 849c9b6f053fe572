//! What a run showed.

use serde::Serialize;

use crate::config::Config;
use crate::network::{Network, Sample};
use crate::stats::{Distribution, jain};
use crate::units::{Picos, gbits, micros};
use crate::workload::{Traffic, Workload};

/// The result of a run. It contains nothing that depends on the machine: the same configuration and
/// seed give the same report.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Name and version of the format.
    pub schema: &'static str,
    /// What was simulated; times in picoseconds.
    pub config: Config,
    /// The traffic.
    pub workload: Workload,
    /// Simulated time in microseconds, to the end of the traffic or of the run.
    pub time_us: f64,
    /// Whether traffic that ends by itself ended. (None: it does not.)
    pub complete: Option<bool>,
    /// Payload received, in Gb/s.
    pub goodput_gbits: f64,
    /// The same as a share of what the links of the receivers carry.
    pub goodput: f64,
    /// Jain's index of what the participants received.
    pub jain: f64,
    /// What a participant received, lowest and highest, as a share of the mean.
    pub spread: [f64; 2],
    /// Latencies of messages in microseconds, by class.
    pub latency_us: Vec<ClassLatency>,
    /// Bytes in the queue that packets found at switches.
    pub queue_bytes: Distribution,
    /// The deepest queue of all.
    pub deepest_queue: DeepestQueue,
    /// Share of time in which links between switches were busy: mean and highest.
    pub fabric_load: Option<(f64, f64)>,
    /// Counts of packets.
    pub packets: PacketCounts,
    /// Events of the simulation.
    pub events: u64,
    /// Goodput and queues over time.
    pub samples: Vec<Sample>,
}

/// Latency of one class of messages.
#[derive(Clone, Debug, Serialize)]
pub struct ClassLatency {
    /// What messages they are.
    pub class: &'static str,
    /// In microseconds, from the post to the last byte at the receiver.
    #[serde(flatten)]
    pub us: Distribution,
}

/// The deepest queue.
#[derive(Clone, Debug, Serialize)]
pub struct DeepestQueue {
    /// Its bytes.
    pub bytes: u64,
    /// The link that it was for.
    pub link: String,
}

/// Counts of packets, and of what queue pairs did about losses.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct PacketCounts {
    pub sent: u64,
    pub marked: u64,
    /// Dropped by switches with a full buffer.
    pub dropped: u64,
    /// Lost at random or on a failed link.
    pub lost: u64,
    /// Congestion notification packets.
    pub notifications: u64,
    /// Gaps that queue pairs repaired by going back.
    pub gaps: u64,
    pub timeouts: u64,
    pub probes: u64,
    /// Packets sent again by selective retransmission.
    pub retransmitted: u64,
    /// Messages that ended with an error.
    pub failed: u64,
}

impl Report {
    pub(crate) fn of(workload: &Workload, traffic: &dyn Traffic, network: &Network, time: Picos) -> Self {
        let shares = traffic.shares(network);
        let mean = shares.iter().sum::<f64>() / crate::units::float_of(shares.len().max(1));
        let of_mean = |share: Option<f64>| if mean > 0.0 { share.unwrap_or(0.0) / mean } else { 0.0 };
        let goodput_gbits = gbits(network.totals.received, time);
        let (bytes, link) = network.links.deepest();
        let (links, totals) = (network.links.counters, network.totals);
        Self {
            schema: "nobounce-sim/1",
            config: network.config.clone(),
            workload: workload.clone(),
            time_us: micros(time),
            complete: traffic.ends().then(|| traffic.finished().is_some()),
            goodput_gbits,
            goodput: goodput_gbits / traffic.capacity(&network.config),
            jain: jain(&shares),
            spread: [
                of_mean(shares.iter().copied().reduce(f64::min)),
                of_mean(shares.iter().copied().reduce(f64::max)),
            ],
            latency_us: network
                .messages
                .classes
                .iter()
                .filter(|class| class.latency.count() > 0)
                .map(|class| ClassLatency { class: class.name, us: Distribution::of(&class.latency, 1e-6) })
                .collect(),
            queue_bytes: Distribution::of(&network.links.depths, 1.0),
            deepest_queue: DeepestQueue { bytes, link },
            fabric_load: network.links.fabric_load(time),
            packets: PacketCounts {
                sent: links.packets,
                marked: links.marked,
                dropped: links.dropped,
                lost: links.lost,
                notifications: totals.notifications,
                gaps: totals.gaps,
                timeouts: totals.timeouts,
                probes: totals.probes,
                retransmitted: totals.retransmitted,
                failed: totals.failed,
            },
            events: totals.handled,
            samples: network.samples.clone(),
        }
    }

    /// The latencies of a class, in microseconds.
    pub fn latency(&self, class: &str) -> Option<&Distribution> {
        self.latency_us.iter().find(|one| one.class == class).map(|one| &one.us)
    }
}
