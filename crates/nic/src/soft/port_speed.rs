//! The speed that the port of a device states. Programs choose protocols by it; nothing is limited.

use std::str::FromStr;

use super::config::ConfigError;

/// A speed that verbs can express.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortSpeed {
    gigabits: u32,
    /// `active_width`: 1 is one lane, 2 is four.
    pub width: u8,
    /// `active_speed`, that of a lane.
    pub lane: u8,
    lane_name: &'static str,
}

/// All that can be stated: Gb/s, width, speed and name of a lane.
const SPEEDS: [PortSpeed; 7] = [
    PortSpeed { gigabits: 10, width: 1, lane: 4, lane_name: "QDR" },
    PortSpeed { gigabits: 25, width: 1, lane: 32, lane_name: "EDR" },
    PortSpeed { gigabits: 40, width: 2, lane: 4, lane_name: "QDR" },
    PortSpeed { gigabits: 50, width: 1, lane: 64, lane_name: "HDR" },
    PortSpeed { gigabits: 100, width: 2, lane: 32, lane_name: "EDR" },
    PortSpeed { gigabits: 200, width: 2, lane: 64, lane_name: "HDR" },
    PortSpeed { gigabits: 400, width: 2, lane: 128, lane_name: "NDR" },
];

impl PortSpeed {
    /// Gb/s.
    pub fn gigabits(self) -> u32 {
        self.gigabits
    }

    /// As in the file `rate` of sysfs.
    pub fn rate(self) -> String {
        let lanes = if self.width == 1 { 1 } else { 4 };
        format!("{} Gb/sec ({lanes}X {})", self.gigabits, self.lane_name)
    }
}

impl Default for PortSpeed {
    /// 100 Gb/s: with 40, UCX copies messages into 8 KiB buffers that it could send in place.
    fn default() -> Self {
        SPEEDS[4]
    }
}

impl FromStr for PortSpeed {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let asked = text.trim().parse();
        let found = SPEEDS.into_iter().find(|speed| asked == Ok(speed.gigabits));
        found.ok_or_else(|| ConfigError::Speed(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_are_read_and_printed() {
        let rate = |text: &str| text.parse::<PortSpeed>().map(PortSpeed::rate).ok();
        assert_eq!(rate(" 40 ").as_deref(), Some("40 Gb/sec (4X QDR)"));
        assert_eq!(rate("25").as_deref(), Some("25 Gb/sec (1X EDR)"));
        assert_eq!(PortSpeed::default().rate(), "100 Gb/sec (4X EDR)");
        for wrong in ["", "30", "100G", "-1"] {
            assert_eq!(rate(wrong), None);
            assert!(wrong.parse::<PortSpeed>().unwrap_err().to_string().contains("NOBOUNCE_SPEED"));
        }
    }
}
