//! One end of an InfiniBand link, as its PortInfo attribute describes it.

use serde::{Deserialize, Serialize};

/// A port at one end of a link: what it can do, what it may do, what it does. Widths are lanes, in
/// ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkEnd {
    /// Its number at its own device.
    pub port: u32,
    /// Whether its device is a switch.
    #[serde(default)]
    pub switch: bool,
    /// `LinkWidthSupported`.
    #[serde(default)]
    pub supported: Vec<u32>,
    /// `LinkWidthEnabled`.
    #[serde(default)]
    pub enabled: Vec<u32>,
    /// `LinkWidthActive`; none without a link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active: Option<u32>,
}

/// The code of each width in PortInfo: a bit, and its lanes.
const CODES: [(u8, u32); 5] = [(1, 1), (16, 2), (2, 4), (4, 8), (8, 12)];

impl LinkEnd {
    /// Lanes of the widths in a mask.
    #[must_use]
    pub fn lanes(mask: u8) -> Vec<u32> {
        CODES.iter().filter(|(code, _)| mask & code != 0).map(|(_, lanes)| *lanes).collect()
    }

    /// The mask of some widths, as `ibportstate` takes it.
    #[must_use]
    pub fn mask(widths: &[u32]) -> u8 {
        CODES.iter().filter(|(_, lanes)| widths.contains(lanes)).fold(0, |mask, (code, _)| mask | code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_are_masks_of_codes() {
        assert_eq!(LinkEnd::lanes(0b1_0011), [1, 2, 4]);
        assert_eq!(LinkEnd::lanes(0), Vec::<u32>::new());
        for mask in 0..32 {
            assert_eq!(LinkEnd::mask(&LinkEnd::lanes(mask)), mask);
        }
    }
}
