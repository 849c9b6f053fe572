//! Factors: what takes time, and how factors in series add up.

use serde::Serialize;

/// A part of the path that takes time or limits the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Factor {
    /// The network link and its packet headers.
    Wire,
    /// Adapters, cable and switches: the time of one empty packet.
    Adapters,
    /// The adapter's PCIe slot.
    NicSlot,
    /// The GPU's PCIe slot.
    GpuSlot,
    /// Waiting for the answer of a PCIe read.
    PcieRead,
    /// Outstanding PCIe reads: too few bytes in flight for the round trip.
    ReadWindow,
    /// The link between sockets.
    Sockets,
    /// Writes that may not pass each other.
    StrictOrder,
    /// ACS redirect: packets between devices below one switch go up to the CPU and down again.
    AcsRedirect,
    /// The CPU splits packets between devices into 64 bytes.
    RootComplex,
    /// Host memory.
    Dram,
    /// Copies between GPU and host memory.
    GpuCopy,
    /// Starting copies and learning that they are done.
    CopyCalls,
    /// The library's work for one message.
    Software,
    /// Asking before sending: rendezvous.
    Handshake,
    /// A core of the software NIC.
    SoftNic,
    /// Links between GPUs of one machine.
    GpuLinks,
    /// The residual of this machine, from a calibration. It is the only one that may be negative.
    Seen,
}

impl Factor {
    /// What it is, for people.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Wire => "the network link",
            Self::Adapters => "adapters and switches",
            Self::NicSlot => "the adapter's PCIe slot",
            Self::GpuSlot => "the GPU's PCIe slot",
            Self::PcieRead => "the round trip of PCIe reads",
            Self::ReadWindow => "outstanding PCIe reads (MaxReadReq)",
            Self::Sockets => "the link between sockets",
            Self::StrictOrder => "strict ordering of PCIe writes",
            Self::AcsRedirect => "ACS redirect through the processor",
            Self::RootComplex => "the processor as a PCIe switch",
            Self::Dram => "host memory",
            Self::GpuCopy => "copies between GPU and host",
            Self::CopyCalls => "starting copies",
            Self::Software => "the library's calls",
            Self::Handshake => "the rendezvous",
            Self::SoftNic => "the core of the software NIC",
            Self::GpuLinks => "links between the GPUs of a machine",
            Self::Seen => "the residual correction of this machine",
        }
    }
}

/// A stage of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Stage {
    /// What it is.
    pub factor: Factor,
    /// GB/s that it carries.
    pub gbytes_per_s: f64,
    /// How many of the kind are on the way: one at each end, mostly.
    pub count: u32,
}

/// Time that one factor takes of one message.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Share {
    /// What takes it.
    pub factor: Factor,
    /// Microseconds; negative only of [`Factor::Seen`].
    pub microseconds: f64,
}

/// GB/s of stages in series. Never above the slowest; below it where others are nearly as slow,
/// since stages wait for each other at times.
#[must_use]
pub fn in_series(stages: &[Stage], exponent: f64) -> f64 {
    let Some(slowest) = slowest(stages) else { return f64::INFINITY };
    // Computed relative to the slowest, so that powers stay in the range of a float.
    let sum: f64 = stages
        .iter()
        .map(|stage| f64::from(stage.count) * (slowest.gbytes_per_s / stage.gbytes_per_s).powf(exponent))
        .sum();
    slowest.gbytes_per_s * sum.powf(-1.0 / exponent)
}

/// The stage that binds.
#[must_use]
pub fn slowest(stages: &[Stage]) -> Option<&Stage> {
    stages.iter().min_by(|a, b| a.gbytes_per_s.total_cmp(&b.gbytes_per_s))
}

/// A figure with what it may as well be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Band {
    /// What is expected.
    pub expected: f64,
    /// The least that would be no surprise.
    pub low: f64,
    /// The most.
    pub high: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(gbytes_per_s: f64) -> Stage {
        Stage { factor: Factor::Wire, gbytes_per_s, count: 1 }
    }

    #[test]
    fn stages_in_series_are_slower_than_the_slowest_and_only_a_little() {
        let alone = in_series(&[stage(10.0)], 16.0);
        assert!((alone - 10.0).abs() < 1e-9);
        let beside = in_series(&[stage(10.0), stage(100.0)], 16.0);
        assert!(beside <= 10.0 && beside > 9.999);
        let equals = in_series(&[stage(10.0), stage(10.0)], 16.0);
        assert!(equals < 9.7 && equals > 9.5);
        assert!(in_series(&[], 16.0).is_infinite());
    }
}
