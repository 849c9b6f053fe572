//! The PCI configuration space of a function, as far as the checks need it.
//!
//! Capabilities are chains of byte offsets from a device, a hypervisor or a broken file. Every step
//! is checked, and every walk is bounded.

use crate::facts::{Acs, ConfigSpace};

/// Most capabilities that a chain can have: 192 bytes of 4 each; 3840 of 4 each.
const MAX_CHAIN: usize = 48;
const MAX_EXTENDED_CHAIN: usize = 960;

const PCIE: u8 = 0x10;
const ACS: u16 = 0x000d;
const ATS: u16 = 0x000f;
const RESIZABLE_BAR: u16 = 0x0015;

/// Why the bytes do not say enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum ConfigError {
    /// Only the header, which is all that the kernel gives to users other than root.
    #[error("only the first {0} bytes of the configuration space can be read; root can read all")]
    HeaderOnly(usize),
    /// The extended part is missing: old device, or one behind a bridge that hides it.
    #[error("there are only {0} bytes of configuration space")]
    NoExtended(usize),
}

/// What the configuration space says.
pub(super) fn parse(bytes: &[u8]) -> Result<ConfigSpace, ConfigError> {
    if bytes.len() <= 64 {
        return Err(ConfigError::HeaderOnly(bytes.len()));
    }
    let mut found = ConfigSpace::default();
    let mut is_pcie = false;
    if let Some(at) = capability(bytes, PCIE) {
        is_pcie = true;
        let size = |code: u32| 128_u32.checked_shl(code & 7).filter(|bytes| *bytes <= 4096);
        if let Some(capabilities) = u32_at(bytes, at + 4) {
            found.max_payload_supported = size(capabilities);
        }
        if let Some(control) = u16_at(bytes, at + 8) {
            found.max_payload = size(u32::from(control >> 5));
            found.max_read_request = size(u32::from(control >> 12));
            found.relaxed_ordering = Some(control & 0x10 != 0);
        }
    }
    if is_pcie && bytes.len() <= 256 {
        return Err(ConfigError::NoExtended(bytes.len()));
    }
    if let Some(at) = extended(bytes, ACS) {
        found.acs = u16_at(bytes, at + 6).map(|control| Acs { control: u32::from(control) });
    }
    if let Some(at) = extended(bytes, ATS) {
        found.ats = u16_at(bytes, at + 6).map(|control| control & 0x8000 != 0);
    }
    if let Some(at) = extended(bytes, RESIZABLE_BAR) {
        found.resizable_bar_max = largest_bar(bytes, at);
    }
    Ok(found)
}

/// The largest size of any resizable BAR. Bit 4 + n of a BAR's capabilities stands for 2^n MiB.
fn largest_bar(bytes: &[u8], at: usize) -> Option<u64> {
    let regions = (u32_at(bytes, at + 8)? >> 5 & 7).min(6);
    (0..regions)
        .filter_map(|region| {
            let at = at + 4 + 8 * usize::try_from(region).ok()?;
            let (capabilities, control) = (u32_at(bytes, at)?, u32_at(bytes, at + 4)?);
            // Sizes above 128 TiB are in the upper half of the control register.
            let sizes = u64::from(capabilities >> 4) | u64::from(control >> 16) << 28;
            let largest = 63_u32.checked_sub(sizes.leading_zeros())?;
            (1_u64 << 20).checked_shl(largest)
        })
        .max()
}

/// Where a capability of the first 256 bytes is.
fn capability(bytes: &[u8], wanted: u8) -> Option<usize> {
    // Bit 4 of the status register: there is a list.
    if u16_at(bytes, 0x06)? & 0x10 == 0 {
        return None;
    }
    let mut at = usize::from(*bytes.get(0x34)? & 0xfc);
    for _ in 0..MAX_CHAIN {
        if at < 0x40 {
            return None;
        }
        if *bytes.get(at)? == wanted {
            return Some(at);
        }
        at = usize::from(*bytes.get(at + 1)? & 0xfc);
    }
    None
}

/// Where an extended capability is.
fn extended(bytes: &[u8], wanted: u16) -> Option<usize> {
    let mut at = 0x100;
    for _ in 0..MAX_EXTENDED_CHAIN {
        let head = u32_at(bytes, at)?;
        if head == 0 || head == u32::MAX {
            return None;
        }
        if head & 0xffff == u32::from(wanted) {
            return Some(at);
        }
        at = usize::try_from(head >> 20).ok()? & !3;
        if at < 0x100 {
            return None;
        }
    }
    None
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A space with a PCIe capability at 0x60 and an extended chain.
    fn space() -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        bytes[0x06] = 0x10;
        bytes[0x34] = 0x40;
        bytes[0x40] = 0x01; // power management, then
        bytes[0x41] = 0x60;
        bytes[0x60] = PCIE;
        bytes[0x64..0x68].copy_from_slice(&0x2_u32.to_le_bytes()); // can 512
        // 4096 read, 256 payload, relaxed
        bytes[0x68..0x6a].copy_from_slice(&(0x5000_u16 | 0x20 | 0x10).to_le_bytes());
        bytes[0x100..0x104].copy_from_slice(&(0x148_u32 << 20 | 1 << 16 | u32::from(ACS)).to_le_bytes());
        bytes[0x106] = 0x1d;
        bytes[0x148..0x14c].copy_from_slice(&(0x160_u32 << 20 | 1 << 16 | u32::from(ATS)).to_le_bytes());
        bytes[0x14f] = 0x80;
        bytes[0x160..0x164].copy_from_slice(&(1_u32 << 16 | u32::from(RESIZABLE_BAR)).to_le_bytes());
        // 256 MiB, 16 GiB
        bytes[0x164..0x168].copy_from_slice(&(1_u32 << (4 + 8) | 1 << (4 + 14)).to_le_bytes());
        bytes[0x168..0x16c].copy_from_slice(&(1_u32 << 5).to_le_bytes());
        bytes
    }

    #[test]
    fn everything_is_found() {
        let found = parse(&space()).unwrap();
        assert_eq!(
            (found.max_payload, found.max_payload_supported, found.max_read_request),
            (Some(256), Some(512), Some(4096))
        );
        assert_eq!(found.relaxed_ordering, Some(true));
        assert!(found.acs.unwrap().redirects());
        assert_eq!(found.ats, Some(true));
        assert_eq!(found.resizable_bar_max, Some(16 << 30));
    }

    #[test]
    fn less_than_all_is_said() {
        assert_eq!(parse(&space()[..64]), Err(ConfigError::HeaderOnly(64)));
        assert_eq!(parse(&space()[..256]), Err(ConfigError::NoExtended(256)));
        assert_eq!(parse(&[]), Err(ConfigError::HeaderOnly(0)));
    }

    #[test]
    fn loops_and_nonsense_end() {
        let mut loops = space();
        loops[0x40] = 1;
        loops[0x41] = 0x40;
        loops[0x100..0x104].copy_from_slice(&(0x100_u32 << 20 | 7).to_le_bytes());
        assert_eq!(parse(&loops).unwrap(), ConfigSpace::default());
        assert_eq!(parse(&vec![0xff; 4096]).unwrap().acs, None);
        let mut seed = 1_u32;
        for length in [65, 100, 255, 256, 257, 300, 4095, 4096, 5000] {
            for _ in 0..50 {
                let noise: Vec<u8> = (0..length)
                    .map(|_| {
                        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        seed.to_le_bytes()[3]
                    })
                    .collect();
                let _ = parse(&noise);
            }
        }
    }
}
