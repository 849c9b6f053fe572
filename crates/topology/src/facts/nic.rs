//! RDMA adapters.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{IpSettings, LinkEnd, Probe, Read};

/// One RDMA adapter.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nic {
    /// `mlx5_0`.
    pub name: String,
    /// Its PCI address; none for a software device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Its driver: `mlx5_core`, `bnxt_en`, `rdma_rxe`, ...
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Firmware.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub firmware: Read<String>,
    /// Its file below `/dev/infiniband`: `uverbs0`; null where the kernel made none.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub uverbs: Read<Option<String>>,
    /// Whether libibverbs lists it: it has a provider for its driver.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub listed: Read<bool>,
    /// Its ports.
    #[serde(default)]
    pub ports: Vec<Port>,
    /// libibverbs opened it, really.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub open_probe: Read<Probe>,
    /// Whether it imports dma-bufs: `ibv_reg_dmabuf_mr` without a descriptor must fail with EBADF,
    /// not with EOPNOTSUPP.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub dma_buf_probe: Read<Probe>,
}

/// A port of an adapter.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Port {
    /// Its number, from 1.
    pub number: u32,
    /// `ACTIVE`, `INIT`, `ARMED`, `DOWN`.
    #[serde(default)]
    pub state: String,
    /// `LinkUp`, `Polling`, `Disabled`, ...
    #[serde(default)]
    pub physical_state: String,
    /// `InfiniBand` or `Ethernet`.
    #[serde(default)]
    pub link_layer: String,
    /// Gb/s.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub rate_gbps: Read<f64>,
    /// Lanes of the network link, as `rate` says it: `4X`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lanes: Option<u32>,
    /// This end of an InfiniBand link, by management datagrams.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub own_end: Read<LinkEnd>,
    /// The other end of it.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub peer_end: Read<LinkEnd>,
    /// Largest RDMA packet, in bytes, as agreed with the switch or derived from the interface.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub active_mtu: Read<u32>,
    /// Its address (LID) in an InfiniBand network.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub lid: Read<u32>,
    /// The address of the subnet manager; 0 for none.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub sm_lid: Read<u32>,
    /// Its network interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netdev: Option<Netdev>,
    /// Entries of the GID table that are in use. Entries that could not be read (of other
    /// namespaces) are counted below.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub gids: Read<Vec<Gid>>,
    /// Entries whose type could not be read although their value could.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable_gids: Vec<u32>,
    /// Counters that matter here, those above 0.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub counters: BTreeMap<String, u64>,
}

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Netdev {
    /// `eth0`.
    pub name: String,
    /// Largest Ethernet payload.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub mtu: Read<u32>,
    /// Whether it is up.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub up: Read<bool>,
    /// Whether PFC (priority flow control) is on for any priority.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub pfc: Read<bool>,
    /// Whether RoCE's reaction to ECN marks (DCQCN) is on for any priority.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub ecn: Read<bool>,
    /// IPv4 subnets that are reached through it without a router: `10.0.0.0/24`.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub subnets: Read<Vec<String>>,
    /// ARP and the reverse-path filter.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub ip: Read<IpSettings>,
    /// The interface by which the kernel sends from an address of this one to its own subnet.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub sends_by: Read<String>,
    /// Whether a route with a gateway leaves by it.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub gateway: Read<bool>,
}

/// An entry of the GID table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gid {
    /// Its place in the table.
    pub index: u32,
    /// Its value; with addresses left out only its form: `fe80::`, `::ffff:ipv4`, `ipv6`.
    pub value: String,
    /// `IB/RoCE v1` or `RoCE v2`.
    #[serde(default)]
    pub kind: String,
    /// The interface it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netdev: Option<String>,
}

impl Gid {
    /// An IPv4 address in IPv6 form.
    #[must_use]
    pub fn is_ipv4(&self) -> bool {
        let value = self.value.to_ascii_lowercase();
        value.starts_with("0000:0000:0000:0000:0000:ffff:") || value.starts_with("::ffff:")
    }

    /// The IPv4 address in it.
    #[must_use]
    pub fn ipv4(&self) -> Option<std::net::Ipv4Addr> {
        self.value.parse::<std::net::Ipv6Addr>().ok()?.to_ipv4_mapped()
    }

    /// A link-local address: it is not routed, and in containers often the only one.
    #[must_use]
    pub fn is_link_local(&self) -> bool {
        let value = self.value.to_ascii_lowercase();
        value.starts_with("fe8")
            || value.starts_with("fe9")
            || value.starts_with("fea")
            || value.starts_with("feb")
    }

    /// RoCE version 2, which is UDP and can be routed.
    #[must_use]
    pub fn is_v2(&self) -> bool {
        self.kind.contains("v2")
    }
}

impl Port {
    /// Whether traffic can pass.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.state.eq_ignore_ascii_case("active")
    }

    /// Active, or not known not to be: its state could not be read.
    #[must_use]
    pub fn may_be_active(&self) -> bool {
        self.is_active() || self.state.is_empty()
    }

    /// RoCE: Ethernet below.
    #[must_use]
    pub fn is_ethernet(&self) -> bool {
        self.link_layer.eq_ignore_ascii_case("ethernet")
    }
}

impl Nic {
    /// Its port that carries traffic, else the first.
    #[must_use]
    pub fn port(&self) -> Option<&Port> {
        self.ports.iter().find(|port| port.is_active()).or(self.ports.first())
    }

    /// A software device: no DMA into GPU memory is possible.
    #[must_use]
    pub fn is_software(&self) -> bool {
        matches!(self.driver.as_deref(), Some("rdma_rxe" | "rxe" | "siw" | "nobounce"))
            || (self.driver.is_none() && (self.name.starts_with("rxe") || self.name.starts_with("siw")))
    }
}
