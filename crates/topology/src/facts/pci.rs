//! PCI devices.

use serde::{Deserialize, Serialize};

use super::Read;

/// One function of a PCI device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciDevice {
    /// `0000:1b:00.0`.
    pub address: String,
    /// The bridge above it; none at a root bus.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The root bus it hangs from: `pci0000:17`.
    #[serde(default)]
    pub root: String,
    /// Class code: `0x030200`.
    #[serde(serialize_with = "hex::serialize_class", deserialize_with = "hex::deserialize")]
    pub class: u32,
    /// Vendor: `0x10de`.
    #[serde(with = "hex")]
    pub vendor: u32,
    /// Device: `0x2330`.
    #[serde(with = "hex")]
    pub device: u32,
    /// The driver that holds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Its NUMA node; -1 where the firmware does not say.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub numa_node: Read<i32>,
    /// Its link upwards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
    /// Its memory regions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bars: Vec<Bar>,
    /// Its configuration space; without root only the first 64 bytes are readable, which is not
    /// enough.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub config: Read<ConfigSpace>,
    /// Its IOMMU group; null where it has none, and no IOMMU translates.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub iommu: Read<Option<Iommu>>,
    /// The physical function, if this is a virtual one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub virtual_function_of: Option<String>,
}

/// A PCIe link: its current and its maximum speed and width.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// GT/s now: 2.5, 5, 8, 16, 32, 64.
    pub speed: f64,
    /// GT/s that the device can do.
    pub max_speed: f64,
    /// Lanes now.
    pub width: u32,
    /// Lanes that the device has.
    pub max_width: u32,
}

/// A memory region of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bar {
    /// Its place, 0 to 5.
    pub index: u32,
    /// Its size in bytes.
    pub bytes: u64,
    /// Whether reading has no side effects.
    #[serde(default)]
    pub prefetchable: bool,
}

/// What the configuration space says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfigSpace {
    /// Largest payload of one packet, in bytes, as set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_payload: Option<u32>,
    /// The same, as the device could.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_payload_supported: Option<u32>,
    /// Largest read request, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_read_request: Option<u32>,
    /// Whether the device may set relaxed ordering on its packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relaxed_ordering: Option<bool>,
    /// ACS (access control services); null where the device has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acs: Option<Acs>,
    /// Whether ATS (address translation services) is on; null where the device has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ats: Option<bool>,
    /// Largest size that BAR1 can be resized to, in bytes; null where it cannot be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resizable_bar_max: Option<u64>,
}

/// The ACS bits of a bridge or function, as set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Acs {
    /// The control register.
    #[serde(with = "hex")]
    pub control: u32,
}

impl Acs {
    /// Request Redirect, Completion Redirect and Upstream Forwarding. With any of them, packets
    /// between two devices below this port go up to the root complex instead of peer-to-peer.
    pub const REDIRECT: u32 = 0x04 | 0x08 | 0x10;
    /// Direct Translated P2P: packets with translated addresses (ATS) still go peer-to-peer.
    pub const DIRECT_TRANSLATED: u32 = 0x40;

    /// Whether packets with translated addresses still go peer-to-peer.
    #[must_use]
    pub const fn passes_translated(self) -> bool {
        self.control & Self::DIRECT_TRANSLATED != 0
    }

    /// Whether ACS redirects peer-to-peer packets to the root complex.
    #[must_use]
    pub const fn redirects(self) -> bool {
        self.control & Self::REDIRECT != 0
    }
}

/// The IOMMU group of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Iommu {
    /// The group's number.
    pub group: u32,
    /// `identity` (passed through), `DMA`, `DMA-FQ` (translated), `unmanaged`, `blocked`; none
    /// where the kernel does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
}

impl PciDevice {
    /// A bridge: PCI to PCI.
    #[must_use]
    pub const fn is_bridge(&self) -> bool {
        self.class >> 8 == 0x0604
    }

    /// A display or processing accelerator: a GPU if it is of a vendor that makes them.
    #[must_use]
    pub const fn is_gpu(&self) -> bool {
        let vendor = self.vendor == 0x10de || self.vendor == 0x1002 || self.vendor == 0x8086;
        (vendor && matches!(self.class >> 8, 0x0300 | 0x0302 | 0x0380))
            || (self.vendor != 0x8086 && vendor && self.class >> 8 == 0x1200)
    }

    /// A network adapter: Ethernet, InfiniBand or other.
    #[must_use]
    pub const fn is_network(&self) -> bool {
        self.class >> 16 == 0x02
    }

    /// An NVMe drive.
    #[must_use]
    pub const fn is_nvme(&self) -> bool {
        self.class >> 8 == 0x0108
    }

    /// The domain of its address.
    #[must_use]
    pub fn domain(&self) -> &str {
        self.address.split(':').next().unwrap_or_default()
    }
}

/// Numbers that are usually written in hexadecimal. A plain number is read too.
pub(crate) mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Form {
        Number(u32),
        Text(String),
    }

    pub(crate) fn serialize<S: Serializer>(value: &u32, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{value:#06x}"))
    }

    pub(crate) fn serialize_class<S: Serializer>(value: &u32, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{value:#08x}"))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
        match Form::deserialize(deserializer)? {
            Form::Number(value) => Ok(value),
            Form::Text(text) => {
                let digits = text.strip_prefix("0x").unwrap_or(&text);
                u32::from_str_radix(digits, 16)
                    .map_err(|_| de::Error::custom(format!("{text:?} is no hexadecimal number")))
            }
        }
    }
}
