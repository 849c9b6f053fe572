//! The network: kinds of links, their rates, and the bytes of each packet that are no payload.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::constants as c;
use super::parts::PartsError;
use super::slot::Slot;

/// A network link of one adapter.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Fabric {
    /// What is spoken on it.
    pub kind: Kind,
    /// Gb/s of data: after the line code and error correction, before packet headers.
    pub gbps: f64,
}

/// What is spoken on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// InfiniBand within one subnet.
    InfiniBand,
    /// InfiniBand with global headers, across subnets.
    InfiniBandGlobal,
    /// InfiniBand's headers on Ethernet.
    RoceV1,
    /// UDP over IPv4.
    RoceV2,
    /// UDP over IPv6.
    RoceV2Ipv6,
    /// RDMA over TCP.
    Iwarp,
    /// Amazon's adapter: its own protocol on Ethernet.
    Efa,
    /// Sockets: the kernel's TCP. Not predicted.
    Tcp,
    /// No wire: two processes of one machine.
    Loopback,
}

/// Data rates of four lanes of InfiniBand, by name.
const INFINIBAND: [(&str, f64); 10] = [
    ("sdr", 8.0),
    ("ddr", 16.0),
    ("qdr", 32.0),
    ("fdr10", 40.0),
    ("fdr", 54.54),
    ("edr", 100.0),
    ("ndr200", 200.0),
    ("hdr", 200.0),
    ("ndr", 400.0),
    ("xdr", 800.0),
];
/// Rates of Ethernet that RDMA adapters have, in Gb/s; the link's nominal rate is what packets get.
const ETHERNET: [f64; 8] = [10.0, 25.0, 40.0, 50.0, 100.0, 200.0, 400.0, 800.0];

impl Fabric {
    /// InfiniBand by the name of its generation.
    #[must_use]
    pub fn infiniband(name: &str) -> Option<Self> {
        let (_, gbps) = INFINIBAND.iter().find(|(known, _)| *known == name)?;
        Some(Self { kind: Kind::InfiniBand, gbps: *gbps })
    }

    /// Whether it is Ethernet.
    #[must_use]
    pub const fn is_ethernet(self) -> bool {
        !matches!(self.kind, Kind::InfiniBand | Kind::InfiniBandGlobal)
    }

    /// Bytes of a packet beside its payload, delimiters and gaps included.
    #[must_use]
    pub const fn overhead(self) -> f64 {
        match self.kind {
            // Local header 8, transport header 12, two checksums 6, delimiters 2.
            Kind::InfiniBand => 28.0,
            Kind::InfiniBandGlobal => 68.0,
            // Ethernet 38 with preamble, checksum and gap; global header 40, transport header 12,
            // checksum 4.
            Kind::RoceV1 => 94.0,
            Kind::RoceV2 => 82.0,
            Kind::RoceV2Ipv6 => 102.0,
            // Ethernet 38, IP and TCP 40, framing 6, placement header 14.
            Kind::Iwarp | Kind::Tcp => 98.0,
            // Ethernet 38, IP and UDP 28, the adapter's own header; not published, taken as
            // RoCEv2's.
            Kind::Efa | Kind::Loopback => 82.0,
        }
    }

    /// GB/s of payload with full packets.
    #[must_use]
    pub fn goodput(self, mtu: u32) -> f64 {
        let mtu = f64::from(mtu);
        self.gbps / 8.0 * mtu / (mtu + self.overhead())
    }

    /// Microseconds through two adapters and the cable.
    #[must_use]
    pub const fn base_latency(self) -> f64 {
        match self.kind {
            Kind::InfiniBand | Kind::InfiniBandGlobal => match self.gbps {
                rate if rate <= 8.0 => c::WIRE_BASE_SDR,
                rate if rate <= 16.0 => c::WIRE_BASE_DDR,
                rate if rate <= 32.0 => c::WIRE_BASE_QDR,
                rate if rate < 100.0 => c::WIRE_BASE_FDR,
                _ => c::WIRE_BASE,
            },
            Kind::Iwarp | Kind::Tcp => c::WIRE_BASE + c::IWARP_EXTRA,
            _ => c::WIRE_BASE + c::ROCE_EXTRA,
        }
    }

    /// The packet size to assume where none is given.
    #[must_use]
    pub const fn usual_mtu(self) -> u32 {
        match self.kind {
            Kind::Iwarp | Kind::Tcp => 8960,
            Kind::Efa => 8192,
            _ => 4096,
        }
    }

    /// The slot that adapters of this rate are made for.
    #[must_use]
    pub fn usual_slot(self) -> Slot {
        let (generation, lanes) = match self.gbps {
            rate if rate <= 16.0 => (2, 8),
            rate if rate < 60.0 => (3, 8),
            rate if rate <= 100.0 => (3, 16),
            rate if rate <= 200.0 => (4, 16),
            rate if rate <= 400.0 => (5, 16),
            _ => (6, 16),
        };
        Slot { generation, lanes }
    }

    /// The next faster link of the kind, if there is one.
    #[must_use]
    pub fn next(self) -> Option<Self> {
        let faster = |rate: &f64| *rate > self.gbps * 1.01;
        if self.kind == Kind::Loopback {
            return None;
        }
        let gbps = if self.is_ethernet() {
            ETHERNET.into_iter().find(faster)
        } else {
            INFINIBAND.into_iter().map(|(_, rate)| rate).find(faster)
        };
        gbps.map(|gbps| Self { gbps, ..self })
    }
}

impl fmt::Display for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = INFINIBAND.iter().rev().find(|(_, gbps)| (gbps - self.gbps).abs() < 0.1);
        let text = match (self.kind, named) {
            (Kind::InfiniBand, Some((name, _))) => format!("InfiniBand {}", name.to_uppercase()),
            (Kind::InfiniBand, None) => format!("InfiniBand {} Gb/s", self.gbps),
            (Kind::InfiniBandGlobal, _) => format!("InfiniBand with global headers, {} Gb/s", self.gbps),
            (Kind::RoceV1, _) => format!("RoCEv1 {}G", self.gbps),
            (Kind::RoceV2, _) => format!("RoCEv2 {}G", self.gbps),
            (Kind::RoceV2Ipv6, _) => format!("RoCEv2 over IPv6 {}G", self.gbps),
            (Kind::Iwarp, _) => format!("iWARP {}G", self.gbps),
            (Kind::Efa, _) => format!("EFA {}G", self.gbps),
            (Kind::Tcp, _) => format!("TCP {}G", self.gbps),
            (Kind::Loopback, _) => "no wire".to_owned(),
        };
        f.pad(&text)
    }
}

impl From<Fabric> for String {
    fn from(fabric: Fabric) -> Self {
        let kind = match fabric.kind {
            Kind::InfiniBand => "ib",
            Kind::InfiniBandGlobal => "ib-grh",
            Kind::RoceV1 => "rocev1",
            Kind::RoceV2 => "rocev2",
            Kind::RoceV2Ipv6 => "rocev2-ipv6",
            Kind::Iwarp => "iwarp",
            Kind::Efa => "efa",
            Kind::Tcp => "tcp",
            Kind::Loopback => "loopback",
        };
        format!("{kind}:{}", fabric.gbps)
    }
}

impl TryFrom<String> for Fabric {
    type Error = PartsError;

    fn try_from(text: String) -> Result<Self, PartsError> {
        text.parse()
    }
}

impl FromStr for Fabric {
    type Err = PartsError;

    fn from_str(text: &str) -> Result<Self, PartsError> {
        let lower = text.trim().to_ascii_lowercase();
        let unknown = || PartsError::Fabric(text.to_owned());
        let (kind, rate) = lower.split_once([':', '-', ' ']).unwrap_or(("ib", &lower));
        // `rocev2-ipv6:100` and `ib-grh:ndr` have the dash in their names.
        let (kind, rate) = match lower.rsplit_once(':') {
            Some(pair) => pair,
            None => (kind, rate),
        };
        let kind = match kind {
            "ib" | "infiniband" => Kind::InfiniBand,
            "ib-grh" => Kind::InfiniBandGlobal,
            "rocev1" | "roce1" => Kind::RoceV1,
            "rocev2" | "roce" | "roce2" | "eth" => Kind::RoceV2,
            "rocev2-ipv6" => Kind::RoceV2Ipv6,
            "iwarp" => Kind::Iwarp,
            "efa" => Kind::Efa,
            "tcp" => Kind::Tcp,
            "loopback" => Kind::Loopback,
            _ => return Err(unknown()),
        };
        if let (Kind::InfiniBand | Kind::InfiniBandGlobal, Some(named)) = (kind, Self::infiniband(rate)) {
            return Ok(Self { kind, ..named });
        }
        let number = rate.trim_end_matches("gb/s").trim_end_matches("gbps").trim_end_matches('g').trim();
        let gbps: f64 = number.parse().map_err(|_| unknown())?;
        if !(gbps.is_finite() && gbps > 0.0) {
            return Err(unknown());
        }
        if gbps > MAX_GBPS {
            return Err(PartsError::TooFast { gbps, most: MAX_GBPS });
        }
        Ok(Self { kind, gbps })
    }
}

/// The fastest port announced by any vendor: XDR with eight lanes.
pub(super) const MAX_GBPS: f64 = 1600.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_by_name_carry_what_the_table_of_headers_says() {
        let goodput = |text: &str, mtu| text.parse::<Fabric>().unwrap().goodput(mtu) * 8.0;
        for (text, mtu, wanted) in [
            ("ib:ndr", 4096, 397.3),
            ("ib:hdr", 4096, 198.6),
            ("roce:400", 4096, 392.2),
            ("rocev2:100G", 1024, 92.6),
            ("rocev2-ipv6:100", 1024, 90.9),
            ("rocev1:100", 4096, 97.8),
            ("ib-grh:edr", 256, 79.0),
            ("iwarp:100", 8960, 98.9),
        ] {
            let found = goodput(text, mtu);
            assert!((found - wanted).abs() < 0.06, "{text}: {found} instead of {wanted}");
        }
    }

    #[test]
    fn wrong_links_are_explained() {
        for text in ["", "ib:zdr", "token-ring:16", "roce:-5", "roce:nan", "roce:inf", "ib:"] {
            assert!(matches!(text.parse::<Fabric>(), Err(PartsError::Fabric(_))), "{text:?}");
        }
        assert!(matches!("roce:9999".parse::<Fabric>(), Err(PartsError::TooFast { .. })));
    }

    #[test]
    fn the_next_link_is_faster_and_names_survive_the_round_trip() {
        let mut link = Fabric::infiniband("sdr").unwrap();
        while let Some(next) = link.next() {
            assert!(next.gbps > link.gbps);
            link = next;
            assert_eq!(String::from(link).parse::<Fabric>().unwrap(), link);
        }
        assert_eq!(link.to_string(), "InfiniBand XDR");
    }
}
