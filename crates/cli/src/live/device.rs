//! One device: its state and its totals.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::status::meaning;

/// Whether its process still has it open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    #[default]
    Live,
    /// Closed.
    Ended,
    /// Its process ended without closing it: the totals are from shortly before.
    Killed,
}

#[cfg(feature = "top")]
impl State {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Ended => "ended",
            Self::Killed => "killed",
        }
    }
}

/// What went by one path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct MovedByPath {
    pub(crate) bytes: u64,
    pub(crate) operations: u64,
}

/// A device. Missing fields count as zero.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct LiveDevice {
    #[serde(skip_deserializing)]
    pub(crate) id: String,
    #[serde(skip_deserializing)]
    pub(crate) state: State,
    pub(crate) pid: u32,
    pub(crate) program: String,
    /// Its name: `nb0`, `nb1`, ...
    pub(crate) device: String,
    pub(crate) address: String,
    /// When it was opened, in seconds since 1970.
    pub(crate) since: u64,
    /// Which threads drive it: `thread` for its own engine threads, `caller` for the program's.
    pub(crate) progress: String,
    /// The speed that its port states, in Gb/s.
    pub(crate) rate_gbps: u32,
    /// How packets by UDP are sealed: `no`, `encrypt`, `authenticate`; of several devices `mixed`.
    pub(crate) sealed: String,
    /// By path, from the wire into memory.
    pub(crate) r#in: BTreeMap<String, MovedByPath>,
    /// By path, from memory to the wire.
    pub(crate) out: BTreeMap<String, MovedByPath>,
    pub(crate) staged_reason: Vec<String>,
    pub(crate) udp_reason: Vec<String>,
    pub(crate) packets_sent: u64,
    pub(crate) packets_received: u64,
    pub(crate) packets_dropped: u64,
    pub(crate) retransmissions: u64,
    pub(crate) errors: BTreeMap<String, u64>,
    pub(crate) queue_pairs: u64,
    pub(crate) peers: Vec<String>,
    pub(crate) engine_cpu_ns: u64,
    pub(crate) link: BTreeMap<String, u64>,
}

/// Names of the paths, in the order of tables.
pub(crate) const PATHS: [&str; 6] = ["cpu", "window", "copy-engine", "dma-buf", "peermem", "staged"];

/// A sum that stays at the largest number: files of the live folder may hold any.
fn sum(counts: impl IntoIterator<Item = u64>) -> u64 {
    counts.into_iter().fold(0, u64::saturating_add)
}

impl LiveDevice {
    pub(super) fn parse(text: &[u8], id: String, state: State) -> Option<Self> {
        let device: Self = serde_json::from_slice(text).ok()?;
        Some(Self { id, state, ..device })
    }

    /// Adds the traffic of another device.
    pub(crate) fn add(&mut self, other: Self) {
        for (to, from) in [(&mut self.r#in, other.r#in), (&mut self.out, other.out)] {
            for (path, moved) in from {
                let sum = to.entry(path).or_default();
                sum.bytes = sum.bytes.saturating_add(moved.bytes);
                sum.operations = sum.operations.saturating_add(moved.operations);
            }
        }
        for (name, count) in other.errors {
            let sum = self.errors.entry(name).or_default();
            *sum = sum.saturating_add(count);
        }
        for (to, from) in
            [(&mut self.staged_reason, other.staged_reason), (&mut self.udp_reason, other.udp_reason)]
        {
            for reason in from {
                if !to.contains(&reason) {
                    to.push(reason);
                }
            }
        }
        self.retransmissions = self.retransmissions.saturating_add(other.retransmissions);
        if self.sealed.is_empty() {
            self.sealed = other.sealed;
        } else if !other.sealed.is_empty() && self.sealed != other.sealed {
            self.sealed = "mixed".to_owned();
        }
    }

    /// Bytes of one direction on all paths.
    pub(crate) fn bytes(direction: &BTreeMap<String, MovedByPath>) -> u64 {
        sum(direction.values().map(|moved| moved.bytes))
    }

    /// Bytes that rested in host buffers, in both directions.
    #[cfg(any(test, feature = "top"))]
    pub(crate) fn staged(&self) -> u64 {
        sum([&self.r#in, &self.out].iter().filter_map(|paths| paths.get("staged")).map(|moved| moved.bytes))
    }

    /// Packets that a link could not send or receive. Losses that were injected are none.
    pub(crate) fn lost(&self) -> u64 {
        self.lost_of("lost")
    }

    /// Those whose counter's name has this part.
    pub(crate) fn lost_of(&self, part: &str) -> u64 {
        let names = |name: &str| name.contains("lost") && name.contains(part) && name != "fault_lost";
        sum(self.link.iter().filter(|(name, _)| names(name)).map(|(_, count)| *count))
    }

    /// Failed work requests.
    #[cfg(any(test, feature = "top"))]
    pub(crate) fn failed(&self) -> u64 {
        sum(self.errors.values().copied())
    }

    /// A counter of the link.
    pub(crate) fn link(&self, name: &str) -> u64 {
        self.link.get(name).copied().unwrap_or(0)
    }

    /// As the page takes it.
    pub(super) fn event(&self) -> Value {
        let errors = self.errors.iter().filter(|(_, count)| **count > 0);
        let errors: Vec<_> = errors
            .map(|(status, count)| json!({ "status": status, "reason": meaning(status), "count": count }))
            .collect();
        let link = |name: &str| json!({ "out": self.link(&format!("{name}_tx_bytes")), "in": self.link(&format!("{name}_rx_bytes")) });
        json!({
            "id": self.id, "pid": self.pid, "command": self.program, "device": self.device, "address": self.address,
            "state": self.state, "since": self.since, "out": self.out, "in": self.r#in,
            "links": { "shm": link("shm"), "udp": link("udp") }, "retransmissions": self.retransmissions,
            "dropped": self.packets_dropped, "lost": self.lost(), "errors": errors,
            "staged_reasons": self.staged_reason, "udp_reasons": self.udp_reason, "progress": self.progress,
            "engine_cpu_s": std::time::Duration::from_nanos(self.engine_cpu_ns).as_secs_f64(),
            "queue_pairs": self.queue_pairs, "peers": self.peers,
        })
    }
}
