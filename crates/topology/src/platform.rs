//! CPU properties for peer-to-peer traffic: how they forward packets from one device to another.

use serde::{Deserialize, Serialize};

use crate::facts::Cpu;

/// A CPU class, as far as it matters for traffic between devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Platform {
    /// Intel, for desktops and laptops.
    IntelClient,
    /// Xeon before Skylake.
    XeonOld,
    /// Xeon Skylake to Ice Lake.
    XeonSkylake,
    /// Sapphire Rapids.
    SapphireRapids,
    /// Emerald Rapids and what came after.
    EmeraldRapids,
    /// AMD's Zen: EPYC, Threadripper, Ryzen.
    Zen,
    /// NVIDIA Grace.
    Grace,
    /// Something else.
    Other,
}

impl Platform {
    /// By what `/proc/cpuinfo` says.
    #[must_use]
    pub fn of(cpu: &Cpu) -> Self {
        match cpu.vendor.as_str() {
            "GenuineIntel" => match cpu.model {
                Some(143) => Self::SapphireRapids,
                Some(207 | 173 | 174 | 175) => Self::EmeraldRapids,
                Some(85 | 106 | 108) => Self::XeonSkylake,
                Some(45 | 62 | 63 | 79 | 86 | 47 | 46 | 44) => Self::XeonOld,
                _ if cpu.name.contains("Xeon") && !cpu.name.contains("E-2") && !cpu.name.contains("W-1") => {
                    Self::Other
                }
                Some(_) => Self::IntelClient,
                None => Self::Other,
            },
            "AuthenticAMD" | "HygonGenuine" if cpu.family.is_some_and(|family| family >= 23) => Self::Zen,
            "ARM" if cpu.model == Some(0xd4f) => Self::Grace,
            _ => Self::Other,
        }
    }

    /// GB/s between sockets to plan with, if such a figure exists.
    #[must_use]
    pub const fn between_sockets(self) -> Option<f64> {
        match self {
            Self::XeonOld => Some(6.0),
            Self::XeonSkylake => Some(10.0),
            Self::SapphireRapids => Some(22.0),
            Self::EmeraldRapids => Some(40.0),
            Self::Zen => Some(16.0),
            Self::IntelClient | Self::Grace | Self::Other => None,
        }
    }

    /// GB/s of one socket's memory with all its channels, from the data sheets of the larger
    /// models.
    #[must_use]
    pub const fn memory_per_socket(self) -> f64 {
        match self {
            // Four channels of DDR4-2400.
            Self::XeonOld => 76.8,
            // Six channels of DDR4-2933, where the model is unknown.
            Self::XeonSkylake => 140.8,
            // Eight channels of DDR5-4800, and of DDR5-5600.
            Self::SapphireRapids => 307.2,
            Self::EmeraldRapids => 358.4,
            // Eight channels of DDR4-3200, where the model is unknown.
            Self::Zen => 204.8,
            Self::Grace => 500.0,
            // Two channels of DDR4-3200 or so.
            Self::IntelClient | Self::Other => 51.2,
        }
    }

    /// Whether the CPUs of a class have different memory, so that it takes the model to know it.
    /// AMD's generations differ by a factor of three, and its desktops have two channels.
    #[must_use]
    pub const fn memory_varies(self) -> bool {
        matches!(self, Self::XeonSkylake | Self::EmeraldRapids | Self::Zen | Self::Other)
    }

    /// GB/s of one socket's memory, where the model of the CPU says how many channels it has.
    #[must_use]
    pub fn memory_of(cpu: &Cpu) -> Option<f64> {
        match Self::of(cpu) {
            Self::Other => None,
            Self::Zen if !cpu.name.contains("EPYC") => None,
            // Eight channels of DDR4-3200: Ice Lake, which is in one class with Skylake.
            Self::XeonSkylake if matches!(cpu.model, Some(106 | 108)) => Some(204.8),
            // Granite Rapids and Sierra Forest: eight or twelve channels, of DDR5-6400 or MRDIMMs.
            Self::EmeraldRapids if cpu.model != Some(207) => None,
            Self::Zen => match (cpu.family?, cpu.model?) {
                // Eight channels: Naples with DDR4-2666, Rome and Milan with DDR4-3200.
                (23, 1) => Some(170.6),
                (23, 49) | (25, 1) => Some(204.8),
                // Twelve channels: Genoa with DDR5-4800, Turin with DDR5-6000.
                (25, 17) => Some(460.8),
                (26, 2 | 17) => Some(576.0),
                _ => None,
            },
            known => Some(known.memory_per_socket()),
        }
    }

    /// GB/s of writes into a GPU through the CPU without relaxed ordering, where measured: by one
    /// adapter.
    #[must_use]
    pub const fn strict_order(self) -> Option<f64> {
        match self {
            Self::SapphireRapids | Self::EmeraldRapids => Some(16.0),
            Self::Zen => Some(18.75),
            _ => None,
        }
    }

    /// The same for host memory. On AMD's the figure is of all that adapters write (ucx#8062);
    /// Intel's write host memory as fast in order (ucx#11532 takes relaxed ordering back for all
    /// but GPU memory).
    #[must_use]
    pub const fn strict_order_of_host(self) -> Option<f64> {
        match self {
            Self::Zen => self.strict_order(),
            _ => None,
        }
    }

    /// The fastest PCIe generation of the CPU's own slots, where known: devices attached to them
    /// have no faster link. From the makers' data sheets: Gen3 up to Broadwell, Gen4 from Ice Lake
    /// on (which is in one class with Skylake), Gen5 on Sapphire Rapids and Grace.
    #[must_use]
    pub const fn fastest_slot(self) -> Option<u32> {
        match self {
            Self::XeonOld => Some(3),
            Self::XeonSkylake => Some(4),
            Self::SapphireRapids | Self::Grace => Some(5),
            Self::IntelClient | Self::EmeraldRapids | Self::Zen | Self::Other => None,
        }
    }

    /// Its name for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::IntelClient => "an Intel desktop processor",
            Self::XeonOld => "a Xeon older than Skylake",
            Self::XeonSkylake => "a Xeon of Skylake's to Ice Lake's kind",
            Self::SapphireRapids => "Sapphire Rapids",
            Self::EmeraldRapids => "Emerald Rapids or newer",
            Self::Zen => "an AMD Zen",
            Self::Grace => "Grace",
            Self::Other => "this processor",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_follows_from_the_model_of_the_cpu() {
        for (model, wanted) in [
            (85, Some(140.8)),
            (106, Some(204.8)),
            (108, Some(204.8)),
            (143, Some(307.2)),
            (207, Some(358.4)),
            (173, None),
            (174, None),
            (175, None),
        ] {
            let cpu = Cpu { vendor: "GenuineIntel".to_owned(), model: Some(model), ..Cpu::default() };
            assert_eq!(Platform::memory_of(&cpu), wanted, "model {model}");
        }
    }
}
