//! A PCIe slot, and what it carries in writes and in reads.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::constants as c;
use super::parts::PartsError;
use nobounce_topology::bandwidth;

/// A PCIe link of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Slot {
    /// 1 to 7.
    pub generation: u32,
    /// Lanes.
    pub lanes: u32,
}

impl Slot {
    /// A slot.
    ///
    /// # Errors
    /// There is no such link.
    pub const fn new(generation: u32, lanes: u32) -> Result<Self, PartsError> {
        if generation == 0 || generation > 7 {
            return Err(PartsError::Generation(generation));
        }
        if !matches!(lanes, 1 | 2 | 4 | 8 | 12 | 16) {
            return Err(PartsError::Lanes(lanes));
        }
        Ok(Self { generation, lanes })
    }

    /// The same link in a slot of an older generation.
    #[must_use]
    pub fn at_most(self, generation: u32) -> Self {
        Self { generation: self.generation.min(generation), ..self }
    }

    /// GT/s of one lane.
    #[must_use]
    pub const fn speed(self) -> f64 {
        match self.generation {
            1 => 2.5,
            2 => 5.0,
            3 => 8.0,
            4 => 16.0,
            5 => 32.0,
            6 => 64.0,
            _ => 128.0,
        }
    }

    /// By the speed of a lane in GT/s.
    #[must_use]
    pub fn of_speed(speed: f64, lanes: u32) -> Option<Self> {
        let generation =
            (1..=7).find(|generation| Self { generation: *generation, lanes }.speed() >= speed * 0.9)?;
        Self::new(generation, lanes).ok()
    }

    /// GB/s of writes, and of the completions of reads, in packets of `payload` bytes.
    #[must_use]
    pub fn carries(self, payload: u32) -> f64 {
        bandwidth::pcie(self.speed(), self.lanes, payload)
    }

    /// GB/s of a copy engine in this slot.
    #[must_use]
    pub fn copy_engine(self) -> f64 {
        self.carries(256) * c::COPY_ENGINE
    }

    /// GB/s of a kernel that copies to or from host memory over this slot while it does the other,
    /// too: requests for reads travel with the writes.
    #[must_use]
    pub fn kernel_copy(self) -> f64 {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a constant of 64")]
        let payload = c::KERNEL_PAYLOAD as u32;
        let packet = c::KERNEL_PAYLOAD + 30.0;
        self.carries(payload) * packet / (packet + 30.0)
    }

    /// The next generation with as many lanes, or all lanes of this one.
    #[must_use]
    pub const fn next(self) -> Option<Self> {
        if self.lanes < 16 {
            return Some(Self { lanes: 16, ..self });
        }
        if self.generation < 7 { Some(Self { generation: self.generation + 1, ..self }) } else { None }
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("Gen{} x{}", self.generation, self.lanes))
    }
}

impl From<Slot> for String {
    fn from(slot: Slot) -> Self {
        format!("gen{}x{}", slot.generation, slot.lanes)
    }
}

impl TryFrom<String> for Slot {
    type Error = PartsError;

    fn try_from(text: String) -> Result<Self, PartsError> {
        text.parse()
    }
}

impl FromStr for Slot {
    type Err = PartsError;

    fn from_str(text: &str) -> Result<Self, PartsError> {
        let unknown = || PartsError::Slot(text.to_owned());
        let lower: String = text.to_ascii_lowercase().split_whitespace().collect();
        let rest = lower.strip_prefix("gen").or_else(|| lower.strip_prefix("pcie")).unwrap_or(&lower);
        let (generation, lanes) = rest.split_once('x').unwrap_or((rest, "16"));
        let number = |text: &str| text.parse::<u32>().map_err(|_| unknown());
        Self::new(number(generation)?, number(lanes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_as_people_write_them() {
        for (text, generation, lanes) in
            [("gen4x16", 4, 16), ("Gen5 x8", 5, 8), ("3x4", 3, 4), ("gen5", 5, 16)]
        {
            assert_eq!(text.parse::<Slot>().unwrap(), Slot { generation, lanes });
        }
        assert!(matches!("gen5x32".parse::<Slot>(), Err(PartsError::Lanes(32))));
        assert!(matches!("gen9x16".parse::<Slot>(), Err(PartsError::Generation(9))));
        assert!(matches!("agp".parse::<Slot>(), Err(PartsError::Slot(_))));
        assert!(matches!("gen4x0".parse::<Slot>(), Err(PartsError::Lanes(0))));
    }

    #[test]
    fn speeds_of_links_name_their_generation() {
        assert_eq!(Slot::of_speed(32.0, 16), Some(Slot { generation: 5, lanes: 16 }));
        assert_eq!(Slot::of_speed(2.5, 1), Some(Slot { generation: 1, lanes: 1 }));
        assert_eq!(Slot::of_speed(500.0, 1), None);
    }

    #[test]
    fn the_copy_engine_is_as_published() {
        for (generation, wanted) in [(3, 12.0), (4, 24.0), (5, 48.0)] {
            let found = Slot { generation, lanes: 16 }.copy_engine();
            assert!((found / wanted - 1.0).abs() < 0.03, "{found} instead of {wanted}");
        }
    }
}
