//! Published figures, and what the model says of each.

use serde::Deserialize;

use super::basis::NoEstimate;
use super::cluster::{Cluster, Pattern, direct_step};
use super::fabric::{Fabric, Kind};
use super::fitted::Fitted;
use super::interval::{Class, Length};
use super::model::direct;
use super::parts::{Memory, Parts, Software, Spec};
use super::route::float;
use super::slot::Slot;
use super::staging::staged;
use super::window;

/// One series of figures of a source.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedRow {
    /// Short name.
    pub id: String,
    /// Paper, thread or page. Figures of one source are held out together.
    pub source: String,
    /// What was measured.
    pub what: String,
    figure: String,
    /// us, GB/s, Gb/s, MB/s or MiB/s.
    pub unit: String,
    way: String,
    /// `least`: the source says "more than".
    #[serde(default)]
    pub bound: Option<String>,
    /// The limiting factors that the source names.
    #[serde(default)]
    pub binds: Vec<String>,
    /// Parts that the source does not state and that the row assumes. Such a row is not scored.
    #[serde(default)]
    pub assumes: Vec<String>,
    /// Why no options describe it. Such a row is not scored.
    #[serde(default)]
    pub inexpressible: Option<String>,
    /// For people.
    #[serde(default)]
    pub note: String,
    #[serde(default)]
    cluster: Option<(u32, u32, u32)>,
    #[serde(default)]
    nvlinks: Option<u32>,
    #[serde(default)]
    per_link: Option<f64>,
    parts: Spec,
    /// Size and figure.
    pub points: Vec<(u64, f64)>,
}

/// Kinds of figures, of which the score names each bias.
pub(super) const KINDS: [&str; 4] = ["latency", "stream", "collective", "staged"];

/// Every row.
///
/// # Panics
/// The list is part of the program and well-formed.
#[must_use]
pub fn rows() -> Vec<PublishedRow> {
    serde_json::from_str(include_str!("../published.json")).expect("published.json is well-formed")
}

/// What the model says of one figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Said {
    /// In microseconds, or GB/s of 10^9 bytes.
    pub expected: f64,
    /// The factor that it names.
    pub binds: Option<String>,
    /// Of a rate: what the slowest stage carries, which no band exceeds.
    pub most: f64,
}

impl PublishedRow {
    /// The figure in microseconds, or GB/s of 10^9 bytes.
    ///
    /// # Panics
    /// A unit that the list does not have.
    #[must_use]
    pub fn measured(&self, value: f64) -> f64 {
        match self.unit.as_str() {
            "us" | "GB/s" => value,
            "Gb/s" => value / 8.0,
            "MB/s" => value / 1e3,
            "MiB/s" => value * 1_048_576.0 / 1e9,
            other => panic!("no unit: {other}"),
        }
    }

    /// Whether the figure is a time.
    #[must_use]
    pub fn is_time(&self) -> bool {
        self.unit == "us"
    }

    /// Whether the row counts: its options are stated, and there are options for it.
    #[must_use]
    pub fn is_scored(&self) -> bool {
        self.assumes.is_empty() && self.inexpressible.is_none()
    }

    /// The class whose interval applies to a size.
    #[must_use]
    pub fn class(&self, size: u64) -> Class {
        let Ok(parts) = self.parts.resolve() else { return Class::Unvalidated };
        match self.way.as_str() {
            _ if self.cluster.is_some() => parts.collective_class(size),
            "staged" => parts.staged_class(size),
            _ => parts.class(size),
        }
    }

    /// The transfer of a figure of the direct way, if that is what the row has.
    #[must_use]
    pub fn direct_parts(&self) -> Option<Parts> {
        let is_transfer = self.cluster.is_none() && self.way == "direct";
        self.parts.resolve().ok().filter(|_| is_transfer)
    }

    /// One of the kinds.
    pub(super) fn kind(&self) -> &'static str {
        match (self.way.as_str(), self.figure.as_str()) {
            _ if self.cluster.is_some() => "collective",
            ("staged", _) => "staged",
            (_, "microseconds" | "lone_gbytes_per_s") => "latency",
            _ => "stream",
        }
    }

    /// Whether the row has a GPU on PCIe and does not state its distance to the adapter.
    #[must_use]
    pub fn lacks_distance(&self) -> bool {
        self.parts.memory != Some(Memory::Host)
            && self.parts.coherent != Some(true)
            && self.parts.distance.is_none()
    }

    /// Whether packets between GPU and adapter pass a processor that the row does not state. Staged
    /// bytes do not pass it on their way.
    #[must_use]
    pub fn lacks_platform(&self) -> bool {
        self.way == "direct"
            && self.parts.platform.is_none()
            && self.parts.distance.is_some_and(|distance| !distance.is_below_switch())
    }

    /// Whether the row is about RoCE and does not state the path MTU.
    #[must_use]
    pub fn lacks_mtu(&self) -> bool {
        let is_roce = |link: Fabric| matches!(link.kind, Kind::RoceV1 | Kind::RoceV2 | Kind::RoceV2Ipv6);
        self.parts.link.is_some_and(is_roce) && self.parts.mtu.is_none()
    }

    /// Largest error that counts as right: 5 % from 1 MiB on, 20 % below.
    #[must_use]
    pub const fn limit(size: u64) -> f64 {
        if matches!(Length::of(size), Length::Long) { 0.05 } else { 0.20 }
    }

    /// What the model says with these constants.
    ///
    /// # Errors
    /// The model does not predict it, and why.
    ///
    /// # Panics
    /// The row does not describe a transfer.
    pub fn predict(&self, size: u64, fitted: &Fitted) -> Result<Said, String> {
        let length = float(size);
        let slot = self.parts.gpu.unwrap_or(Slot { generation: 3, lanes: 16 });
        let plain = |expected| Ok(Said { expected, binds: None, most: f64::INFINITY });
        match self.figure.as_str() {
            "window_store_us" => return plain(length / window::store(slot) / 1000.0),
            "window_load_us" => return plain(window::load_microseconds(size)),
            "window_store_gbytes" => return plain(window::store(slot)),
            "window_load_gbytes" => return plain(length / window::load_microseconds(size) / 1000.0),
            "copy_engine" => return plain(slot.copy_engine()),
            "xgmi" => return plain(window::xgmi(self.per_link.unwrap_or(0.0))),
            "nvlink" => {
                return plain(window::nvlink(self.nvlinks.unwrap_or(0), self.per_link.unwrap_or(0.0)));
            }
            _ => {}
        }
        let mut parts = self.parts.resolve().map_err(|error| error.to_string())?;
        parts.fitted = fitted.clone();
        if let Some((nodes, gpus_per_node, nics_per_node)) = self.cluster {
            let nvlink = self.nvlinks.zip(self.per_link).map(|(links, each)| window::nvlink(links, each));
            let cluster = Cluster {
                nodes,
                gpus_per_node,
                nics_per_node,
                bytes: size,
                compute_ms: 0.0,
                overlap: 0.0,
                price: 0.0,
                nvlink,
            };
            return self.collective(&parts, &cluster);
        }
        let estimate = match self.way.as_str() {
            "staged" => staged(&parts, size, true).map_err(|error| NoEstimate::from(error).to_string())?,
            _ => direct(&parts, size).map_err(|error| error.to_string())?,
        };
        let (expected, binds) = match self.figure.as_str() {
            "microseconds" => (estimate.microseconds.expected, estimate.binds),
            "lone_gbytes_per_s" => (length / estimate.microseconds.expected / 1000.0, estimate.binds),
            "gbytes_per_s" => (estimate.gbytes_per_s.expected, estimate.stream_binds),
            other => panic!("no figure: {other}"),
        };
        let most = if self.figure == "gbytes_per_s" { estimate.most } else { f64::INFINITY };
        Ok(Said { expected, binds: Some(name(binds)), most })
    }

    fn collective(&self, parts: &Parts, cluster: &Cluster) -> Result<Said, String> {
        let pattern = match self.figure.as_str() {
            "tree_busbw" => Pattern::TreeAllReduce,
            "alltoall_busbw" => Pattern::AllToAll,
            "allgather_busbw" => Pattern::AllGather,
            _ => Pattern::RingAllReduce,
        };
        let step = direct_step(parts, cluster, pattern).map_err(|error| error.to_string())?;
        let (expected, most) = match self.figure.as_str() {
            "ring_us" => (step.exchange_ms * 1000.0, f64::INFINITY),
            _ => (step.bus_gbytes_per_s, step.bus_most_gbytes_per_s),
        };
        Ok(Said { expected, binds: Some(name(step.binds)), most })
    }

    /// Whether a fitted constant may change what the model says of the row.
    pub(super) fn uses(&self, software: Option<Software>) -> bool {
        software.is_none_or(|one| self.parts.software.unwrap_or_default() == one)
    }
}

/// The name of a factor in JSON.
fn name(factor: super::factor::Factor) -> String {
    serde_json::to_value(factor).ok().and_then(|value| Some(value.as_str()?.to_owned())).unwrap_or_default()
}
